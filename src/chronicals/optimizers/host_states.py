"""Optimizer states in host memory, of which an update brings a few parts at a time to the device.

The tensors of a launch are cut into parts whose states fill at most one buffer. While one part is
updated, the next comes from host memory on a stream of its own, and the one before goes back on
another:

    coming    in 0   in 1   in 2   in 3 …          in i waits for out i − 3, whose buffer it takes
    current          up 0   up 1   up 2 …          up i waits for in i
    going                   out 0  out 1 …         out i waits for up i

The device holds ``BUFFER_COUNT`` buffers instead of the states. Weights, gradients and step counters stay
on the device, and so do the states of small weights. The order is by events alone; the current
stream waits for all copies when the update ends, so what follows on it, the next update too, finds
the states as they are, and the whole can be captured in a CUDA graph.

Results are bit-equal: parts are cut between chunks of a kernel and know their place in the launch
(``kernels.adamw.Part``). Bytes of a weight that cross the bus, each way: 8 for fp32 moments, 4 for
bf16, 2.03 in 8 bits, and 2 for the lower half of a master. At 50 GB/s each way, both ways at once,
an update of 8 billion weights is so expected to take 1.6 s with fp32 moments and masters, 0.65 s in
8 bits with masters; it was not timed on a card yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.kernels.adamw import Part, Tensors, count_step_, fused_adamw_part_
from chronicals.kernels.adamw_8bit import CHUNK_8BIT as CHUNK_IN_8_BITS
from chronicals.kernels.adamw_8bit import MOMENT_BLOCK, QuantizedTensors, adamw_8bit_part_
from chronicals.kernels.host_memory import PinnedTensors
from chronicals.kernels.tensor_lists import LIST_CHUNK
from chronicals.kernels.two_streams import HIGH_PRIORITY

BUFFER_COUNT = 3
"""Buffers on a device: of a part that comes, one that is updated, and one that goes."""

MAX_BUFFER_BYTES = 1 << 26
"""Bytes of the largest buffer: 1.3 ms at 50 GB/s, which is what the first part and the last one
take beside nothing.
"""

MIN_HOST_ELEMENTS = 1 << 16
"""Weights with fewer elements keep their states on the device: a copy of less takes longer to
launch than to make.
"""

STATE_SHARES = {
    "means": 1,
    "squares": 1,
    "lows": 1,
    "mean_scales": MOMENT_BLOCK,
    "square_scales": MOMENT_BLOCK,
}
"""The states in ``Tensors``, and how many elements of a weight share one of theirs."""

STATE_ALIGNMENT = 256
"""States begin at multiples of so many bytes in a buffer."""

SLICE_SLACK = len(STATE_SHARES) * STATE_ALIGNMENT
"""Bytes that this takes at most for each slice of a weight."""

MIN_BUFFER_BYTES = 1 << 16
"""Bytes of the smallest buffer: a chunk of any states, and ``SLICE_SLACK``, find room in it."""

Move = tuple[Tensor, Tensor]
"""A piece of a buffer, and the states in host memory that it stands for."""


class HostStates:
    """Keeps the states of an optimizer's large weights in host memory, pinned where the weights are
    on a card.

    Without a card states go through the same parts and buffers, by copies that are made at once.

    Args:
        smallest: elements of the smallest weight whose states are here; ``MIN_HOST_ELEMENTS`` by default.
        buffer: bytes of the largest buffer; ``MAX_BUFFER_BYTES`` by default.
    """

    def __init__(self, smallest: int | None = None, buffer: int | None = None):
        self.smallest = MIN_HOST_ELEMENTS if smallest is None else smallest
        self.buffer = MAX_BUFFER_BYTES if buffer is None else max(buffer, MIN_BUFFER_BYTES)
        self._pinned = PinnedTensors()
        self._lanes: dict[torch.device, _Lane] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has memory of its own."""
        return HostStates, (self.smallest, self.buffer)

    def takes(self, weight: Tensor) -> bool:
        """Whether the states of a weight are here."""
        return weight.numel() >= self.smallest

    def full(
        self, shape: Sequence[int], value: float, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A new state, of one value, of a weight on ``device``."""
        on_card = device.type == "cuda"
        state = (
            self._pinned.empty(shape, dtype, device)
            if on_card
            else torch.empty(tuple(shape), dtype=dtype)
        )
        self._lane(device).held += state.nbytes
        return state.fill_(value)

    def wait(self) -> None:
        """Until the states are as the last update left them. Whoever reads or writes them on the
        host calls this before.
        """
        for device in self._lanes:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around the launches of one update, whose copies overlap."""
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
        """``fused_adamw_`` or ``adamw_8bit_`` of tensors whose states may be here, within
        ``updating``; bit-equal to it.
        """
        whole = Part.whole(tensors, betas)
        run = _function(tensors)
        dense = replace(
            tensors, weights=_dense(tensors.weights), gradients=_dense(tensors.gradients)
        )
        for part, slices, moves in self._parts(dense, whole):

            def launch(slices: Tensors = slices, part: Part = part) -> None:
                run(slices, part, lr, betas, eps, weight_decay, factor, apply)

            self._lane(tensors.weights[0].device).run(moves, launch)
        for weight, flat in zip(tensors.weights, dense.weights):
            if not weight.is_contiguous():
                weight.copy_(flat.view(weight.shape))
        count_step_(tensors, apply)

    def parts_of(self, tensors: Tensors) -> list[Tensors]:
        """What the launches of ``update`` take, within ``updating`` as they are; nothing moves."""
        dense = replace(
            tensors, weights=_dense(tensors.weights), gradients=_dense(tensors.gradients)
        )
        return [slices for _, slices, _ in self._parts(dense, Part.whole(tensors, (0.0, 0.0)))]

    def _parts(self, tensors: Tensors, whole: Part) -> Iterator[tuple[Part, Tensors, list[Move]]]:
        """Parts of a launch: where each lies in it, its tensors, and what moves for it."""
        lane = self._lane(tensors.weights[0].device)
        size = CHUNK_IN_8_BITS if isinstance(tensors, QuantizedTensors) else LIST_CHUNK
        rows = {
            name: getattr(tensors, name)[0].element_size() * size // share
            for name, share in _rows(tensors)
        }
        lane.provide(self.buffer)
        chunk = 0
        for cuts in _cut(
            [(w.numel(), self.takes(w)) for w in tensors.weights],
            size,
            sum(rows.values()),
            lane.room,
        ):
            part = replace(whole, tensor=cuts[0].number, begin=cuts[0].begin, chunk=chunk)
            slices, moves = self._slices(tensors, cuts, lane.next())
            yield part, slices, moves
            chunk += sum(cut.chunks(size) for cut in cuts)

    def _slices(
        self, tensors: Tensors, cuts: Sequence[_Cut], buffer: Tensor
    ) -> tuple[Tensors, list[Move]]:
        """Slices of the tensors, their states in ``buffer`` where they are here."""
        slices = type(tensors)()
        moves = list[Move]()
        offset = 0
        for cut in cuts:
            slices.weights.append(tensors.weights[cut.number][cut.begin : cut.end])
            slices.gradients.append(tensors.gradients[cut.number][cut.begin : cut.end])
            for name, share in _rows(tensors):
                kept = getattr(tensors, name)[cut.number]
                state = kept.view(-1)[cut.begin // share : -(-cut.end // share)]
                if self.takes(tensors.weights[cut.number]):
                    here = buffer[offset : offset + state.nbytes].view(state.dtype)
                    offset += -(-state.nbytes // STATE_ALIGNMENT) * STATE_ALIGNMENT
                    moves.append((here, state))
                    state = here
                getattr(slices, name).append(state)
        return slices, moves

    def _lane(self, device: torch.device) -> _Lane:
        if device not in self._lanes:
            self._lanes[device] = _Lane(device)
        return self._lanes[device]


class _Lane:
    """The buffers on a device, and the streams that fill and empty them.

    Attributes:
        held: bytes of states in host memory.
        turn: number of the part that comes next, counted from the beginning of the update.
        forked: whether the streams have work that the current one has not waited for.
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

    @property
    def room(self) -> int:
        """Bytes of a buffer."""
        return len(self.buffers[0])

    def provide(self, largest: int) -> None:
        """Buffers of at most ``largest`` bytes, which together take no more than the states that
        they are for.
        """
        size = max(MIN_BUFFER_BYTES, min(largest, -(-self.held // BUFFER_COUNT)))
        if not self.buffers or (self.room < size and not self.turn):
            self._smaller += self.buffers  # which a captured graph may know
            self.buffers = [
                torch.empty(size, dtype=torch.uint8, device=self.device)
                for _ in range(BUFFER_COUNT)
            ]

    def next(self) -> Tensor:
        """The buffer of the part that comes next."""
        self.turn += 1
        return self.buffers[(self.turn - 1) % BUFFER_COUNT]

    def run(self, moves: list[Move], launch: Callable[[], None]) -> None:
        """Fill the buffer that ``next`` returned, launch, and copy it back; the host does not
        wait for a card.
        """
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
        if (
            not self.forked
        ):  # after all that is on the current stream, the copies of the update before among it
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
        forked, self.turn, self.forked = (
            self.forked,
            0,
            False,
        )  # also where a capture that broke off lets nobody wait
        if forked and self.streams is not None:
            current = torch.cuda.current_stream(self.device)
            for stream in self.streams:
                current.wait_stream(stream)


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Of a priority that nothing else has, for torch has few streams of each, and hands them out
    again and again: what these do may be captured while the others go on."""
    return torch.cuda.Stream(device, priority=3 * HIGH_PRIORITY), torch.cuda.Stream(
        device, priority=3 * HIGH_PRIORITY
    )


@dataclass(frozen=True)
class _Cut:
    """Some elements of tensor ``number`` of a launch; ``begin`` is a multiple of a chunk, and
    ``end`` is one or the last.
    """

    number: int
    begin: int
    end: int

    def chunks(self, size: int) -> int:
        """Of so many elements."""
        return -(-(self.end - self.begin) // size)


def _cut(
    sizes: Sequence[tuple[int, bool]], elements: int, chunk: int, room: int
) -> Iterator[list[_Cut]]:
    """Consecutive tensors in parts, each tensor at most once in a part.

    Args:
        sizes: elements of each tensor, and whether its states take room.
        elements: of a chunk.
        chunk: bytes of its states.
        room: bytes for a part.
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
            part.append(_Cut(number, begin, end))
            left -= (part[-1].chunks(elements) * chunk + SLICE_SLACK) * moves
            begin = end
    if part:
        yield part


def _rows(tensors: Tensors) -> list[tuple[str, int]]:
    """Of ``STATE_SHARES`` those that these tensors have."""
    return [(name, share) for name, share in STATE_SHARES.items() if getattr(tensors, name, None)]


def _dense(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Flat; the tensors themselves where they are dense."""
    return [tensor.detach().contiguous().view(-1) for tensor in tensors]


def _function(tensors: Tensors) -> Callable[..., None]:
    return adamw_8bit_part_ if isinstance(tensors, QuantizedTensors) else fused_adamw_part_


def states_in_host_memory(model: nn.Module) -> list[Tensor]:
    """The trained weights of ``model`` whose states ``HostStates`` takes."""
    return [p for p in model.parameters() if p.requires_grad and p.numel() >= MIN_HOST_ELEMENTS]


def buffer_bytes(held: int) -> int:
    """Of all buffers on a device for so many bytes of states in host memory."""
    return (
        BUFFER_COUNT * max(MIN_BUFFER_BYTES, min(MAX_BUFFER_BYTES, -(-held // BUFFER_COUNT)))
        if held
        else 0
    )
