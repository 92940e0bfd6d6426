"""Keeps saved activations in host memory between the forward and the backward pass.

Tensors that autograd saves are copied to the host on a separate stream during the forward pass, and
prefetched before the backward pass uses them. A tensor stays on the GPU until its copy has ended.
At most ``window`` bytes are in such copies, so a GPU that computes faster than the bus copies waits
for the bus. Prefetching has the same limit. The tensors saved last are used first, and are still on
the GPU then.

``InputOffload`` moves the inputs of some layers that are recomputed, which are all alike: they go to
one memory that is allocated once, and of those that come back only the next one is prefetched.

All ordering is by streams, without host synchronisation. After one ordinary step, which allocates
the host memory, a step can therefore be captured in a CUDA graph.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from chronicals.kernels.host_memory import HOST_ALIGNMENT, PinnedMemory
from chronicals.kernels.launch import next_power_of_2

logger = logging.getLogger(__name__)

SMALLEST = 1 << 20
"""Bytes of the smallest tensor that is offloaded."""

LARGEST_RATIO = 4
"""Largest ratio of a storage to the tensor in it that is saved first, to move the whole storage.

All tensors in the storage move with it. From a larger storage only that tensor is copied out.
"""

WINDOW_TENSORS = 3
"""Default window in units of the largest tensor: one being copied, one waiting, one just computed.

That is about what a layer of an 8B model saves; a recomputed layer saves only its input.
"""


class ActivationOffload:
    """Moves the tensors that autograd saves in forward passes of ``module`` to host memory.

    Weights stay on the GPU. Results are bit-equal. Host buffers are reused by later passes. Usable
    as a context manager.

    Args:
        module: for example a model's decoder; recomputed layers in it offload their inputs.
        smallest: bytes of the smallest tensor that is offloaded; ``SMALLEST`` by default.
        window: most bytes being copied in one direction at a time; ``WINDOW_TENSORS`` times the largest
            tensor by default.
    """

    def __init__(self, module: nn.Module, smallest: int | None = None, window: int | None = None):
        self.smallest = SMALLEST if smallest is None else smallest
        self.largest = 0
        self._window = window
        self.device: torch.device | None = None
        self.streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self.free: dict[int, list[Tensor]] = {}
        self.moved = 0
        self._passes: list[saved_tensors_hooks | None] = []
        self._hooks: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave, always_call=True),
        ]

    @property
    def window(self) -> int:
        """Most bytes that are being copied in one direction at a time."""
        return WINDOW_TENSORS * self.largest if self._window is None else self._window

    def prefetches_more(self, coming: Mapping[int, int], using: int) -> bool:
        """Return whether another tensor is to be prefetched.

        Args:
            coming: bytes of those that are on their way, by number.
            using: number of the tensor that is needed now.
        """
        return sum(coming.values()) <= self.window

    def __enter__(self) -> ActivationOffload:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the hooks; backward passes of earlier forward passes still work."""
        for hook in self._hooks:
            hook.remove()
        while self._passes:  # torch calls no hook if KeyboardInterrupt ends a pass
            self._leave()

    def _enter(self, module: nn.Module, _args: object) -> None:
        hooks = None
        if torch.is_grad_enabled():
            tape = self._new_tape(module)
            hooks = saved_tensors_hooks(tape.pack, tape.unpack)
            hooks.__enter__()
        self._passes.append(hooks)

    def _new_tape(self, module: nn.Module) -> _Tape:
        """Return the tape of a pass that begins."""
        device = device_of(module)
        if device != self.device:  # the module has moved, or this is its first pass
            self.device = device
            self.free = {}
            self.streams = None
            if device.type == "cuda":
                self.streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.moved = 0
        weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        return _Tape(self, weights, device, self.streams)

    def _leave(self, *_: object) -> None:
        hooks = self._passes.pop()
        if hooks is not None:
            hooks.__exit__(None, None, None)

    def take(self, size: int) -> Tensor:
        """Return a uint8 host buffer of at least ``size`` bytes, pinned if the device is a GPU.

        Sizes are powers of two, so that passes of other lengths can reuse a buffer. torch rounds
        pinned memory up to powers of two anyway.
        """
        rounded = next_power_of_2(size)
        free = self.free.setdefault(rounded, [])
        self.moved = self.moved + size
        self.largest = max(self.largest, size)
        return (
            free.pop()
            if free
            else torch.empty(rounded, dtype=torch.uint8, pin_memory=self.streams is not None)
        )


def device_of(module: nn.Module) -> torch.device:
    """Return the device on which a module runs; some of its weights may be in host memory."""
    devices = {parameter.device for parameter in module.parameters()}
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


class InputOffload(ActivationOffload):
    """Moves the inputs of some layers, all that such layers save, to host memory.

    Inputs are of one size, that of the first. There is one memory for all of a pass, allocated when
    the first comes, pinned if the device is a GPU; where a pass saves more of them, or larger ones,
    these get memory of their own. Usable as a context manager.

    Args:
        module: the decoder.
        layers: the layers.
        smallest: bytes of the smallest tensor that is offloaded; ``SMALLEST`` by default.
    """

    def __init__(self, module: nn.Module, layers: Sequence[nn.Module], smallest: int | None = None):
        super().__init__(module, smallest)
        self.layers = tuple(layers)
        self._tape: _Tape | None = None
        self._memory = PinnedMemory()
        self._room: Tensor | None = None
        for layer in self.layers:
            self._hooks += (
                layer.register_forward_pre_hook(self._enter_layer),
                layer.register_forward_hook(self._leave, always_call=True),
            )

    @property
    def window(self) -> int:
        """Bytes of an input: one is on its way while the next layer runs."""
        return self.largest

    def prefetches_more(self, coming: Mapping[int, int], using: int) -> bool:
        """Return whether no input but the one that is needed now is on its way."""
        return not coming.keys() - {using}

    def _enter(self, module: nn.Module, _args: object) -> None:
        self._tape = self._new_tape(module) if torch.is_grad_enabled() else None
        self._passes.append(None)

    def _enter_layer(self, layer: nn.Module, _args: object) -> None:
        hooks = None
        if self._tape is not None and torch.is_grad_enabled():
            hooks = saved_tensors_hooks(self._tape.pack, self._tape.unpack)
            hooks.__enter__()
        self._passes.append(hooks)

    def _new_tape(self, module: nn.Module) -> _Tape:
        device = self.device
        tape = super()._new_tape(module)
        if self.device != device:
            self._room = None
        return tape

    def take(self, size: int) -> Tensor:
        """Return a uint8 host buffer of ``size`` bytes."""
        if self._room is None:
            self._allocate(size)
        if self.free.get(size):
            self.moved += size
            self.largest = max(self.largest, size)
            return self.free[size].pop()
        return super().take(size)

    def _allocate(self, size: int) -> None:
        """Allocate the memory for an input of each layer."""
        step = -(-size // HOST_ALIGNMENT) * HOST_ALIGNMENT
        like = torch.empty(step * len(self.layers), dtype=torch.uint8, device="meta")
        if self.streams is None:
            self._room = torch.empty_like(like, device="cpu")
        else:
            began = time.monotonic()
            self._memory.registered = step
            self._memory.allocate(like.nbytes)
            self._room = self._memory.tensor(0, like)
            logger.info(
                "inputs of %d layers: %.1f GiB of host memory were pinned in %.1f s",
                len(self.layers),
                like.nbytes / 2**30,
                time.monotonic() - began,
            )
        self.free[size] = [part[:size] for part in self._room.split(step)]

    def remove(self) -> None:
        """Remove the hooks, and unpin the memory once all copies have ended."""
        super().remove()
        self._room = None
        self.free = {}
        if self.streams is not None and self._memory.size:
            torch.cuda.synchronize(self.device)
            self._memory.release()


class _Saved:
    """A storage with saved tensors, and its copy on the host.

    Attributes:
        number: its index in the order of the forward pass.
        here: its bytes on the device, while a copy runs and until its last use; else None.
        first: a tensor in it, while ``here`` is the storage that the forward pass allocated.
        version: autograd's version counter of ``first`` when it was saved.
        event: the end of the latest copy.
        uses: number of its saved tensors that are not unpacked yet.
        spoiled: it was modified while it was being copied.
    """

    def __init__(self, owner: ActivationOffload, number: int, tensor: Tensor):
        self.number = number
        self.uses = 0
        self.spoiled = False
        self.first: Tensor | None = tensor.detach()
        self.version = tensor._version
        self.here: Tensor | None = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
            tensor.untyped_storage()
        )
        self.event: torch.cuda.Event | None = None
        memory = owner.take(self.here.nbytes)
        self.host = memory[: self.here.nbytes]
        # The host buffer is reused once autograd drops the last tensor in this storage.
        weakref.finalize(self, owner.free[memory.nbytes].append, memory).atexit = False

    def free_device_memory(self) -> None:
        """Free the bytes on the device, after a last look whether they were modified."""
        self.check()
        self.here = self.first = None

    def check(self) -> None:
        """Set ``spoiled`` if the storage was modified after it was saved."""
        self.spoiled = self.spoiled or (
            self.first is not None and self.first._version != self.version
        )

    def holds(self, tensor: Tensor) -> bool:
        """Return True if the tensor is in this storage, which is being copied and is unmodified."""
        if self.first is None or self.version != tensor._version:
            return False
        return self.first.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


@dataclass(frozen=True)
class _Place:
    """The stand-in for a tensor that autograd keeps: a view into a saved storage."""

    memory: _Saved
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


@dataclass(eq=False)
class _Tape:
    """One forward pass and the backward passes through it.

    Attributes:
        owner: makes the host buffers and sets the limits.
        weights: addresses of the module's weights.
        device: the module's device, during this pass.
        streams: of copies to and from the host; None if the device is no GPU.
        saved: offloaded storages in order; autograd keeps them alive.
        leaving: copies to the host that may still run, oldest first.
        coming: bytes being prefetched, by number.
        used: streams with work of this pass; only these may be waited for in a captured graph.
        joins: True if the end of the backward pass is set to wait for the copy streams.
    """

    owner: ActivationOffload
    weights: set[int]
    device: torch.device
    streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None
    saved: list[weakref.ref[_Saved]] = field(default_factory=list)
    leaving: deque[_Saved] = field(default_factory=deque)
    coming: dict[int, int] = field(default_factory=dict)
    used: set[torch.cuda.Stream] = field(default_factory=set)
    joins: bool = False

    # --- forward pass ---

    def pack(self, tensor: Tensor) -> Tensor | _Place:
        """Start to copy a tensor that autograd saves, and return its stand-in.

        Weights, small tensors and those that are not floating-point are returned as they are.
        """
        if (
            type(tensor) is not Tensor
            or not tensor.is_floating_point()
            or tensor.device != self.device
        ):
            return tensor
        memory = tensor.untyped_storage()
        size = min(tensor.nbytes, memory.nbytes())
        if size < self.owner.smallest or memory.data_ptr() in self.weights:
            return tensor
        saved = next((other for other in self.leaving if other.holds(tensor)), None)
        if saved is None:
            if memory.nbytes() > LARGEST_RATIO * tensor.nbytes:
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            saved = _Saved(self.owner, len(self.saved), tensor)
            self.saved.append(weakref.ref(saved))
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
            # The forward pass waits here if copies are slower than computation.
            while sum(other.host.nbytes for other in self.leaving) > self.owner.window:
                oldest = self.leaving.popleft()
                self._wait_for(oldest)
                oldest.free_device_memory()
        saved.uses += 1
        return _Place(saved, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _wait_for(self, saved: _Saved) -> None:
        if saved.event is not None:
            torch.cuda.current_stream(self.device).wait_event(saved.event)

    # --- backward pass ---

    def unpack(self, packed: Tensor | _Place) -> Tensor:
        """Return the tensor for a stand-in, and prefetch the storages that are needed next."""
        if isinstance(packed, Tensor):
            return packed
        saved = packed.memory
        if not self.joins and torch._C._current_graph_task_id() != -1:
            # The current stream waits for the copy streams when the backward pass ends.
            self.joins = True
            torch.autograd.Variable._execution_engine.queue_callback(self._join)  # type: ignore[attr-defined]
        self._prefetch(saved)
        for number in range(saved.number - 1, -1, -1):
            if not self.owner.prefetches_more(self.coming, saved.number):
                break
            other = self.saved[number]()
            if other is not None and other.uses > 0:
                self._prefetch(other)
        if self.coming.pop(saved.number, None):
            self._wait_for(saved)
            self._free_copied()
        saved.check()
        if saved.spoiled:
            raise RuntimeError(
                f"a tensor {list(packed.shape)} that the backward pass needs was changed in place "
                "after it was saved; "
                "without activation_offload autograd says by which operation"
            )
        assert saved.here is not None
        tensor = saved.here.view(packed.dtype).as_strided(
            packed.shape, packed.stride, packed.offset
        )
        saved.uses -= 1
        if saved.uses <= 0 and saved not in self.leaving:
            saved.free_device_memory()
        return tensor

    def _prefetch(self, saved: _Saved) -> None:
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

    def _free_copied(self) -> None:
        """Free storages whose uses ended while their copies ran, once the last copy has ended."""
        if self.leaving:
            self._wait_for(self.leaving[-1])
        for saved in self.leaving:
            if saved.uses <= 0:
                saved.free_device_memory()
        self.leaving.clear()

    def _join(self) -> None:
        self.joins = False
        for stream in self.used:
            torch.cuda.current_stream(self.device).wait_stream(stream)
        self._free_copied()
        self.coming.clear()
        self.used.clear()
