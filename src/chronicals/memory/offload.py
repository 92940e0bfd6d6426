"""Activations in host memory between the forward and the backward pass.

What autograd saves is copied out on a stream of its own while the forward pass goes on, and brought back ahead of its use.
A tensor that a copy still reads is held on the card until the copy has ended, ``window`` bytes at a time: a card that
computes faster than the bus carries waits there. As much is on its way back at a time. What the forward pass made last, the
backward pass wants first, and takes from the card, where it still is.

Streams order all of it and nothing asks the host, so a step can be captured in a CUDA graph once it has run without: by
then its host memory is there.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from chronicals.kernels.launch import next_power_of_2

SMALLEST = 1 << 20
"""Bytes of the smallest tensor that is moved."""

LARGEST_SHARE = 4
"""Memory goes as a whole, with all the tensors in it, unless it is so many times as large as the first that is saved."""

AT_A_TIME = 3
"""Tensors as large as the largest that are on their way in one direction: one that is carried, one that waits for it, and one
that was just made. A layer of an 8B model has about as much, of layers that are made again their inputs are all."""


class ActivationOffload:
    """Moves what autograd saves in forward passes of ``module`` to host memory; see the module's docstring.

    Weights stay where they are. Results do not change by a bit. Host memory is kept from pass to pass.

    Args:
        module: such as the decoder of a model; layers in it may be recomputed, then it is their inputs that move.
        smallest: bytes of the smallest tensor that is moved; ``SMALLEST`` by default.
        window: bytes on their way in one direction; by default ``AT_A_TIME`` times those of the largest tensor.
    """

    def __init__(self, module: nn.Module, smallest: int | None = None, window: int | None = None):
        self.smallest = SMALLEST if smallest is None else smallest
        self.largest, self._window = 0, window
        self.device: torch.device | None = None
        self.streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self.free: dict[int, list[Tensor]] = {}
        self.moved = 0
        self._passes: list[saved_tensors_hooks | None] = []
        self._hooks = (
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave, always_call=True),
        )

    @property
    def window(self) -> int:
        return AT_A_TIME * self.largest if self._window is None else self._window

    def __enter__(self) -> ActivationOffload:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Leave the module as it was, as at the end of ``with``; passes that were begun can be finished."""
        for hook in self._hooks:
            hook.remove()
        while self._passes:  # torch calls no hook where a pass is broken off from the keyboard
            self._leave()

    def _enter(self, module: nn.Module, _args: object) -> None:
        hooks = None
        if torch.is_grad_enabled():
            self._follow(next(module.parameters()).device)
            self.moved = 0
            tape = _Tape(self, {p.untyped_storage().data_ptr() for p in module.parameters()})
            hooks = saved_tensors_hooks(tape.pack, tape.unpack)
            hooks.__enter__()
        self._passes.append(hooks)

    def _leave(self, *_: object) -> None:
        hooks = self._passes.pop()
        if hooks is not None:
            hooks.__exit__(None, None, None)

    def _follow(self, device: torch.device) -> None:
        """To where the module is now."""
        if device != self.device:
            self.device, self.free = device, {}
            self.streams = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if device.type == "cuda" else None

    def take(self, size: int) -> Tensor:
        """At least so many bytes of host memory, pinned if they come from a card: a power of two, so that what one pass
        leaves serves another of other lengths. Pinned memory comes in such sizes anyway."""
        room = next_power_of_2(size)
        free = self.free.setdefault(room, [])
        self.moved, self.largest = self.moved + size, max(self.largest, size)
        return free.pop() if free else torch.empty(room, dtype=torch.uint8, pin_memory=self.streams is not None)


class _Saved:
    """The memory of saved tensors, on the host.

    Attributes:
        number: its place in the order of the forward pass.
        here: its bytes on the device, while a copy runs or until its uses are over.
        first: a tensor in it, while ``here`` is the memory that the forward pass made.
        version: of that tensor when it was saved.
        event: the end of the copy that was begun last.
        uses: how often it was saved and not yet asked for.
        spoiled: it was written to while it was being copied.
    """

    def __init__(self, owner: ActivationOffload, number: int, tensor: Tensor):
        self.number, self.uses, self.spoiled = number, 0, False
        self.first: Tensor | None = tensor.detach()
        self.version = tensor._version
        self.here: Tensor | None = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self.event: torch.cuda.Event | None = None
        memory = owner.take(self.here.nbytes)
        self.host = memory[: self.here.nbytes]
        weakref.finalize(self, owner.free[memory.nbytes].append, memory).atexit = False

    def let_go(self) -> None:
        """Give the memory on the device back."""
        self.check()
        self.here = self.first = None

    def check(self) -> None:
        self.spoiled = self.spoiled or (self.first is not None and self.first._version != self.version)

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in the memory that is being copied, which was not written to since."""
        if self.first is None or self.version != tensor._version:
            return False
        return self.first.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


@dataclass(frozen=True)
class _Place:
    """A tensor in saved memory."""

    memory: _Saved
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt

    def tensor(self) -> Tensor:
        assert self.memory.here is not None
        return self.memory.here.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


class _Tape:
    """One forward pass and the backward passes through it.

    Attributes:
        saved: what was moved, in order; it lives as long as autograd wants it.
        leaving: copies to the host that may still run, oldest first.
        coming: bytes on their way back, by number.
        used: streams that something of this pass runs on; a graph can wait for no other.
    """

    def __init__(self, owner: ActivationOffload, weights: set[int]):
        self.owner, self.weights = owner, weights
        self.device, self.streams = owner.device, owner.streams
        self.saved: list[weakref.ref[_Saved]] = []
        self.leaving: deque[_Saved] = deque()
        self.coming: dict[int, int] = {}
        self.used: set[torch.cuda.Stream] = set()
        self.joins = False

    # --- forward -------------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Tensor | _Place:
        if not self._moves(tensor):
            return tensor
        saved = next((other for other in self.leaving if other.holds(tensor)), None)
        if saved is None:
            if tensor.untyped_storage().nbytes() > LARGEST_SHARE * tensor.nbytes:
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            saved = _Saved(self.owner, len(self.saved), tensor)
            self.saved.append(weakref.ref(saved))
            self._send(saved)
        saved.uses += 1
        return _Place(saved, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _moves(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or not tensor.is_floating_point() or tensor.device != self.device:
            return False
        memory = tensor.untyped_storage()
        return min(tensor.nbytes, memory.nbytes()) >= self.owner.smallest and memory.data_ptr() not in self.weights

    def _send(self, saved: _Saved) -> None:
        self.leaving.append(saved)
        assert saved.here is not None
        if self.streams is None:
            saved.host.copy_(saved.here)
        else:
            out = self.streams[0]
            self.used.add(out)
            out.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(out):
                saved.host.copy_(saved.here, non_blocking=True)
                saved.event = out.record_event()
        while sum(other.host.nbytes for other in self.leaving) > self.owner.window:
            oldest = self.leaving.popleft()
            self._wait_for(oldest)
            oldest.let_go()

    def _wait_for(self, saved: _Saved) -> None:
        """Let what is computed from here on begin after the copy."""
        if saved.event is not None:
            torch.cuda.current_stream(self.device).wait_event(saved.event)

    # --- backward ------------------------------------------------------------------------------------------------

    def unpack(self, packed: Tensor | _Place) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        saved = packed.memory
        self._join_at_the_end()
        self._bring(saved)
        for number in range(saved.number - 1, -1, -1):
            if sum(self.coming.values()) > self.owner.window:
                break
            other = self.saved[number]()
            if other is not None and other.uses > 0:
                self._bring(other)
        if self.coming.pop(saved.number, None):
            self._wait_for(saved)
            self._forget_leaving()
        saved.check()
        if saved.spoiled:
            raise RuntimeError(
                f"a tensor {list(packed.shape)} that the backward pass needs was changed in place after it was saved; "
                "without activation_offload autograd says by which operation"
            )
        tensor = packed.tensor()
        saved.uses -= 1
        if saved.uses <= 0 and saved not in self.leaving:
            saved.let_go()
        return tensor

    def _bring(self, saved: _Saved) -> None:
        if saved.here is not None:
            return
        self.coming[saved.number] = saved.host.nbytes
        if self.streams is None:
            saved.here = saved.host.clone()
            return
        back = self.streams[1]
        self.used.add(back)
        saved.here = torch.empty_like(saved.host, device=self.device)
        back.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(back):
            saved.here.copy_(saved.host, non_blocking=True)
            saved.event = back.record_event()

    def _forget_leaving(self) -> None:
        """What was used from where it still was can go; by now the last copies to the host have ended, too."""
        if self.leaving:
            self._wait_for(self.leaving[-1])
        for saved in self.leaving:
            if saved.uses <= 0:
                saved.let_go()
        self.leaving.clear()

    def _join_at_the_end(self) -> None:
        """After the backward pass nothing of ours runs beside what comes next."""
        if not self.joins and torch._C._current_graph_task_id() != -1:
            self.joins = True
            torch.autograd.Variable._execution_engine.queue_callback(self._join)  # type: ignore[attr-defined]

    def _join(self) -> None:
        self.joins = False
        for stream in self.used:
            torch.cuda.current_stream(self.device).wait_stream(stream)
        self._forget_leaving()
        self.coming.clear()
        self.used.clear()
