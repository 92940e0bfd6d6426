"""Keep optimizer states in host memory; an update copies a few parts at a time to the device.

The tensors of a launch are cut into parts whose states fill at most one buffer. While one part is
updated, the next is copied from host memory on a second stream, and the previous one is copied back
on a third:

    coming    in 0   in 1   in 2   in 3 …          in i waits for out i − 3, whose buffer it takes
    current          up 0   up 1   up 2 …          up i waits for in i
    going                   out 0  out 1 …         out i waits for up i

The device holds ``BUFFER_COUNT`` buffers instead of the states. Weights, gradients, step counters
and the states of small weights stay on the device. Streams are ordered by events, and the host does
not wait. At the end of an update the current stream waits for all copies, so later work on it, the
next update too, sees the new states, and a CUDA graph can capture the whole.

Results are bit-equal to an update on the device: parts are cut between chunks of a kernel and know
their position in the launch (``kernels.adamw.LaunchPart``). Bytes of a weight that cross the bus in each
direction: 8 for fp32 moments, 4 for bf16, 2.03 in 8 bits, and 2 for the lower half of a master. At
50 GB/s in both directions at once, an update of 8 billion weights should take 1.6 s with fp32
moments and masters, 0.65 s in 8 bits with masters. This was not yet measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.kernels.adamw import LaunchPart, Tensors, count_step_, fused_adamw_
from chronicals.kernels.adamw_8bit import MOMENT_BLOCK, QuantizedTensors, adamw_8bit_
from chronicals.kernels.host_memory import PinnedTensors
from chronicals.kernels.products import HIGH_PRIORITY

BUFFER_COUNT = 3
"""Buffers on a device: one for a part that arrives, one that is updated, and one that leaves."""

# A copy of 64 MiB takes 1.3 ms at 50 GB/s. The first copy in and the last copy out overlap with
# nothing, so a larger buffer would cost more.
MAX_BUFFER_BYTES = 1 << 26
"""Bytes of the largest buffer."""

# Launching a smaller copy takes longer than the copy itself.
MIN_HOST_ELEMENTS = 1 << 16
"""Weights with fewer elements keep their states on the device."""

STATE_SHARES = {
    "means": 1,
    "squares": 1,
    "lows": 1,
    "mean_scales": MOMENT_BLOCK,
    "square_scales": MOMENT_BLOCK,
}
"""Number of a weight's elements that share one value of a state, by the state's field in
``Tensors``.
"""

STATE_ALIGNMENT = 256
"""States begin at multiples of this many bytes in a buffer."""

SLICE_SLACK = len(STATE_SHARES) * STATE_ALIGNMENT
"""Bytes that the alignment costs for each slice of a weight, at most."""

MIN_BUFFER_BYTES = 1 << 16
"""Bytes of the smallest buffer; it has room for a chunk of any states and ``SLICE_SLACK``."""

Move = tuple[Tensor, Tensor]
"""A piece of a buffer, and the states in host memory that it is a copy of."""


class HostStates:
    """Keeper of the states of an optimizer's large weights in host memory.

    The memory is pinned if the weights are on a card. Without a card, states pass through the same
    parts and buffers, by synchronous copies.

    Args:
        smallest: elements of the smallest weight whose states are in host memory;
            ``MIN_HOST_ELEMENTS`` by default.
        buffer: bytes of the largest buffer; ``MAX_BUFFER_BYTES`` by default.
    """

    def __init__(self, smallest: int | None = None, buffer: int | None = None):
        self.smallest = MIN_HOST_ELEMENTS if smallest is None else smallest
        self.buffer = MAX_BUFFER_BYTES if buffer is None else max(buffer, MIN_BUFFER_BYTES)
        self._pinned = PinnedTensors()
        self._lanes: dict[torch.device, _Lane] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy the settings only; a copy gets memory of its own."""
        return HostStates, (self.smallest, self.buffer)

    def takes(self, weight: Tensor) -> bool:
        """Return whether the states of a weight are in host memory."""
        return weight.numel() >= self.smallest

    def full(
        self, shape: Sequence[int], value: float, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return a new state filled with one value, for a weight on ``device``."""
        on_card = device.type == "cuda"
        state = (
            self._pinned.empty(shape, dtype, device)
            if on_card
            else torch.empty(tuple(shape), dtype=dtype)
        )
        self._lane(device).held += state.nbytes
        return state.fill_(value)

    def wait(self) -> None:
        """Wait until the last update has written all states. Call before the host uses them."""
        for device in self._lanes:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Enclose the launches of one update, whose copies overlap; wait for all at the end."""
        try:
            yield
        finally:
            for lane in self._lanes.values():
                lane.join()

    def update(
        self,
        tensors: Tensors,
        lr: float | Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        factor: Tensor | None = None,
        apply: Tensor | None = None,
    ) -> None:
        """Run ``fused_adamw_`` or ``adamw_8bit_`` on tensors whose states may be in host memory.

        Arguments and results are those of these functions. Call it inside ``updating``.
        """
        whole = LaunchPart.whole(tensors, betas)
        run: Callable[..., None] = fused_adamw_
        if isinstance(tensors, QuantizedTensors):
            run = adamw_8bit_
        lane = self._lane(tensors.weights[0].device)
        dense = replace(
            tensors, weights=_dense(tensors.weights), gradients=_dense(tensors.gradients)
        )
        options = lr, betas, eps, weight_decay, factor, apply
        for part, slices, moves in self._parts(dense, whole):
            lane.run(moves, functools.partial(run, slices, *options, part))
        for weight, flat in zip(tensors.weights, dense.weights):
            if not weight.is_contiguous():
                weight.copy_(flat.view(weight.shape))
        count_step_(tensors, apply)

    def parts_of(self, tensors: Tensors) -> list[Tensors]:
        """Return the tensors of each launch of ``update``, without copying or launching.

        Call it inside ``updating``.
        """
        dense = replace(
            tensors, weights=_dense(tensors.weights), gradients=_dense(tensors.gradients)
        )
        return [
            slices for _, slices, _ in self._parts(dense, LaunchPart.whole(tensors, (0.0, 0.0)))
        ]

    def _parts(
        self, tensors: Tensors, whole: LaunchPart
    ) -> Iterator[tuple[LaunchPart, Tensors, list[Move]]]:
        """Yield the parts of a launch: position, tensors with states in a buffer, copies to make."""
        lane = self._lane(tensors.weights[0].device)
        shares = {
            name: share for name, share in STATE_SHARES.items() if getattr(tensors, name, None)
        }
        bytes_of_chunk = sum(
            getattr(tensors, name)[0].element_size() * tensors.CHUNK // share
            for name, share in shares.items()
        )
        lane.provide(self.buffer)
        chunk = 0
        for cuts in _cut(
            [(w.numel(), self.takes(w)) for w in tensors.weights],
            tensors.CHUNK,
            bytes_of_chunk,
            len(lane.buffers[0]),
        ):
            buffer = lane.next()
            slices = type(tensors)()
            moves = list[Move]()
            offset = 0
            for cut in cuts:
                slices.weights.append(tensors.weights[cut.number][cut.begin : cut.end])
                slices.gradients.append(tensors.gradients[cut.number][cut.begin : cut.end])
                for name, share in shares.items():
                    whole_state = getattr(tensors, name)[cut.number].view(-1)
                    state = whole_state[cut.begin // share : -(-cut.end // share)]
                    if self.takes(tensors.weights[cut.number]):
                        here = buffer[offset : offset + state.nbytes].view(state.dtype)
                        offset += -(-state.nbytes // STATE_ALIGNMENT) * STATE_ALIGNMENT
                        moves.append((here, state))
                        state = here
                    getattr(slices, name).append(state)
            part = replace(whole, tensor=cuts[0].number, begin=cuts[0].begin, chunk=chunk)
            yield part, slices, moves
            chunk += sum(cut.chunks for cut in cuts)

    def _lane(self, device: torch.device) -> _Lane:
        if device not in self._lanes:
            self._lanes[device] = _Lane(device)
        return self._lanes[device]


class _Lane:
    """The buffers of one device, and the streams that fill and empty them.

    Attributes:
        held: bytes of states in host memory.
        turn: number of the next part, counted from the beginning of the update.
        forked: whether the streams have work that the current stream has not waited for.
        emptied: for each buffer, the event after which it may be filled again.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.held = 0
        self.turn = 0
        self.forked = False
        self.buffers: list[Tensor] = []
        self._smaller: list[Tensor] = []
        self.emptied: list[torch.cuda.Event | None] = [None] * BUFFER_COUNT
        self.streams = _streams(device) if device.type == "cuda" else None

    def provide(self, largest: int) -> None:
        """Allocate buffers of at most ``largest`` bytes each, together not more than all states.

        Existing buffers are replaced only if they are too small and no update is running.
        """
        size = max(MIN_BUFFER_BYTES, min(largest, -(-self.held // BUFFER_COUNT)))
        if not self.buffers or (len(self.buffers[0]) < size and not self.turn):
            self._smaller += self.buffers  # kept, since a captured graph may use them
            self.buffers = [
                torch.empty(size, dtype=torch.uint8, device=self.device)
                for _ in range(BUFFER_COUNT)
            ]

    def next(self) -> Tensor:
        """Return the buffer of the next part."""
        self.turn += 1
        return self.buffers[(self.turn - 1) % BUFFER_COUNT]

    def run(self, moves: list[Move], launch: Callable[[], None]) -> None:
        """Fill the buffer that ``next`` returned, launch, and copy it back, without a host wait."""
        if self.streams is None or not moves:
            for here, state in moves:
                here.copy_(state)
            launch()
            for here, state in moves:
                state.copy_(here)
            return
        coming, going = self.streams
        current = torch.cuda.current_stream(self.device)
        place = (self.turn - 1) % BUFFER_COUNT
        if not self.forked:
            # The first copy follows all earlier work, including the previous update's copies.
            coming.wait_stream(current)
            self.forked = True
            self.emptied = [None] * BUFFER_COUNT
        with torch.cuda.stream(coming):
            emptied = self.emptied[place]
            if emptied is not None:
                coming.wait_event(emptied)
            for here, state in moves:
                here.copy_(state, non_blocking=True)
            current.wait_event(coming.record_event())
        launch()
        going.wait_event(current.record_event())
        with torch.cuda.stream(going):
            for here, state in moves:
                state.copy_(here, non_blocking=True)
            self.emptied[place] = going.record_event()

    def join(self) -> None:
        """Let the current stream wait for all copies; the next part takes the first buffer."""
        forked = self.forked
        # Reset before waiting, which raises after a failed capture.
        self.turn = 0
        self.forked = False
        if forked and self.streams is not None:
            current = torch.cuda.current_stream(self.device)
            for stream in self.streams:
                current.wait_stream(stream)


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return the streams for copies to and from a device."""
    # torch has few streams of each priority and hands them out in turn. These have a priority that
    # nothing else uses, so they can be captured without capturing other work.
    return torch.cuda.Stream(device, priority=3 * HIGH_PRIORITY), torch.cuda.Stream(
        device, priority=3 * HIGH_PRIORITY
    )


@dataclass(frozen=True)
class _Cut:
    """Elements ``begin:end`` of tensor ``number`` of a launch, in ``chunks`` chunks.

    Both bounds are multiples of a chunk, or the end of the tensor.
    """

    number: int
    begin: int
    end: int
    chunks: int


def _cut(
    sizes: Sequence[tuple[int, bool]], elements: int, chunk: int, room: int
) -> Iterator[list[_Cut]]:
    """Cut consecutive tensors into parts, with each tensor at most once in a part.

    Args:
        sizes: elements of each tensor, and whether its states go through a buffer.
        elements: elements of a chunk.
        chunk: bytes of the states of a chunk.
        room: bytes of a buffer.
    """
    part = list[_Cut]()
    left = room
    for number, (size, moves) in enumerate(sizes):
        begin = 0
        end = -1
        while end < size:
            if moves and left < chunk + SLICE_SLACK:
                yield part
                part = []
                left = room
            end = min(size, begin + (left - SLICE_SLACK) // chunk * elements) if moves else size
            chunks = -(-(end - begin) // elements)
            part.append(_Cut(number, begin, end, chunks))
            left -= (chunks * chunk + SLICE_SLACK) * moves
            begin = end
    if part:
        yield part


def _dense(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return flat dense tensors: views if the tensors are dense, else copies."""
    return [tensor.detach().contiguous().view(-1) for tensor in tensors]


def states_in_host_memory(model: nn.Module) -> list[Tensor]:
    """Return the trained weights of ``model`` whose states ``HostStates`` takes."""
    return [p for p in model.parameters() if p.requires_grad and p.numel() >= MIN_HOST_ELEMENTS]


def buffer_bytes(held: int) -> int:
    """Return the bytes of all buffers on a device for ``held`` bytes of states in host memory."""
    return (
        BUFFER_COUNT * max(MIN_BUFFER_BYTES, min(MAX_BUFFER_BYTES, -(-held // BUFFER_COUNT)))
        if held
        else 0
    )
