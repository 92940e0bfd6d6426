"""Capture of CUDA graphs that share a memory pool, on a stream for captures and replays.

Where the host has to decide something in the middle of a captured function, that function cuts the
capture (``cut_capture``): a graph ends there, and another one begins. A replay launches the graphs one
after another and lets the host decide in between.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from chronicals.kernels.products import HIGH_PRIORITY, stream_of_priority
from chronicals.kernels.tensor_lists import tables_looked_up

ERRORS_THAT_END_CAPTURES = "thread_local"
"""Only calls of the capturing thread that cannot be captured: others may copy or allocate meanwhile."""

CapturedResult = TypeVar("CapturedResult")
"""What a captured function returns."""


class Capture(Protocol):
    """A capture that is under way."""

    def cut(self, decide: Callable[[], None], behind: Callable[[], None] | None) -> None:
        """End a graph here and begin another one, as ``cut_capture`` says."""


_capture: Capture | None = None


@contextmanager
def capture_under_way(capture: Capture) -> Iterator[None]:
    """Context manager in which ``cut_capture`` cuts ``capture``."""
    global _capture
    before = _capture
    _capture = capture
    try:
        yield
    finally:
        _capture = before


def is_capture_under_way() -> bool:
    """Return whether a function is being captured that may be cut."""
    return _capture is not None


def cut_capture(decide: Callable[[], None], behind: Callable[[], None] | None = None) -> None:
    """Let the host decide something at this place of the function that is being captured.

    Args:
        decide: called by each replay on the stream of the graphs, when what was captured before is
            queued and nothing behind it. It may wait for the device, and queue work.
        behind: called by each replay once what was captured behind this place, up to the next cut,
            is queued: for work of the host that the device need not wait for.
    """
    assert _capture is not None
    _capture.cut(decide, behind)


class Borrowed:
    """The memory of a tensor, which it does not keep allocated.

    What a graph computes is dropped while it is captured, and later parts of the graph use the memory
    again; a reference would keep it for as long as the graph lives, for each layer anew. The memory
    pool belongs to the graphs, so the address stays theirs. A tensor that exists where a capture is
    cut has its values there at each replay: what was captured before has written them, and what
    overwrites them was captured behind.

    Args:
        tensor: any dense or strided tensor.
    """

    def __init__(self, tensor: Tensor):
        self._address = tensor.data_ptr()
        self._shape = tensor.shape
        self._strides = tensor.stride()
        self._dtype = tensor.dtype
        self._device = tensor.device
        self._view: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """A tensor over the memory, made when it is first asked for, outside of captures."""
        if self._view is None:
            self._view = self._over_memory()
        return self._view

    def _over_memory(self) -> Tensor:
        if 0 in self._shape:
            return torch.empty(self._shape, dtype=self._dtype, device=self._device)
        last = sum((size - 1) * stride for size, stride in zip(self._shape, self._strides))
        count = (last + 1) * self._dtype.itemsize
        if self._device.type == "cuda":
            memory = torch.as_tensor(_CudaBytes(self._address, count), device=self._device)
        else:
            held = (ctypes.c_uint8 * count).from_address(self._address)
            memory = torch.frombuffer(held, dtype=torch.uint8)
        return memory.view(self._dtype).as_strided(self._shape, self._strides)


class _CudaBytes:
    """Bytes on a card, as other libraries give them to torch (CUDA Array Interface, version 2)."""

    def __init__(self, address: int, count: int):
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (count,),
            "typestr": "|u1",
            "version": 2,
        }


def run_on_host(run: Callable[..., None], *values: Any) -> None:
    """Call ``run(*values)`` without gradients, now or at each replay.

    While a function is captured, the capture is cut here. A replay calls ``run`` with tensors over
    the same memory as those among ``values``; what it launches is queued between the two graphs.

    Args:
        run: reads and writes tensors; it may look at their values, and keeps none of them.
        values: its arguments: tensors, tuples of them, or what is the same at each replay.
    """
    if not is_capture_under_way():
        with torch.no_grad():
            run(*values)
        return
    borrowed = _changed(values, Tensor, Borrowed)

    @torch.no_grad()
    def decide() -> None:
        run(*_changed(borrowed, Borrowed, lambda one: one.tensor))

    cut_capture(decide)


def _changed(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return ``value``, or a tuple of values, with what is of a kind changed."""
    if isinstance(value, kind):
        return change(value)
    if not isinstance(value, tuple):
        return value
    parts = [_changed(part, kind, change) for part in value]
    return value._make(parts) if hasattr(value, "_make") else tuple(parts)


class _CudaCapture:
    """A capture on a card.

    Args:
        whole: the context manager of the capture, which ends the last graph.
        pool: the memory pool.
        mode: errors of the driver that end a capture.

    Attributes:
        steps: what a replay does.
    """

    def __init__(self, whole: torch.cuda.graph, pool: Any, mode: str):
        self.whole = whole
        self.pool = pool
        self.mode = mode
        self.steps: list[Callable[[], None]] = [whole.cuda_graph.replay]

    def cut(self, decide: Callable[[], None], behind: Callable[[], None] | None) -> None:
        """End the present graph and begin another one in the same pool."""
        self.whole.cuda_graph.capture_end()
        following = torch.cuda.CUDAGraph()
        self.whole.cuda_graph = following  # which the context manager ends
        following.capture_begin(pool=self.pool, capture_error_mode=self.mode)
        self.steps += [decide, following.replay]
        if behind is not None:
            self.steps.append(behind)


@dataclass(eq=False)
class Graph:
    """A captured function.

    Attributes:
        steps: replays of its CUDA graphs, and what the host decides between them.
        looked_up: the tables that its launches read.
    """

    steps: list[Callable[[], None]]
    looked_up: list[Tensor]

    def replay(self) -> None:
        """Run the function on the current stream."""
        for step in self.steps:
            step()


class Recorder:
    """Captures graphs that share one memory pool, on a stream beside the default one.

    All recorders of a card have the same stream, since cuBLAS keeps a workspace for each (32 MiB on
    Hopper) for as long as the process lives.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = stream_of_priority(device, HIGH_PRIORITY)
        self.pool = torch.cuda.graph_pool_handle()
        self._graphs = WeakSet[Graph]()

    @property
    def has_graphs(self) -> bool:
        """True while a graph keeps memory of the pool."""
        return len(self._graphs) > 0

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Context manager that queues work on the stream of captures and replays."""
        caller = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(caller)
        with torch.cuda.stream(self.stream):
            yield
        caller.wait_stream(self.stream)

    def capture(self, run: Callable[[], CapturedResult]) -> tuple[Graph, CapturedResult]:
        """Capture ``run``; return its graph and its result.

        Tensors of the result are filled by the first replay.

        Raises:
            RuntimeError: it cannot be captured; nothing has run.
        """
        generator = torch.cuda.default_generators[self.device.index or 0]
        before = generator.clone_state()
        try:
            whole = torch.cuda.graph(
                torch.cuda.CUDAGraph(),
                pool=self.pool,
                stream=self.stream,
                capture_error_mode=ERRORS_THAT_END_CAPTURES,
            )
            capture = _CudaCapture(whole, self.pool, ERRORS_THAT_END_CAPTURES)
            with tables_looked_up() as tables, whole, capture_under_way(capture):
                result = run()
        except RuntimeError:
            generator.graphsafe_set_state(
                before
            )  # the generator would stay registered with the failed capture
            raise
        captured = Graph(capture.steps, tables)
        self._graphs.add(captured)
        return captured, result

    def allocating(self) -> AbstractContextManager[None]:
        """Return a context manager in which new tensors lie where they usually do."""
        return nullcontext()

    def forget(self) -> None:
        """Use a new memory pool from now on; the old one is freed once its graphs are dropped."""
        torch.cuda.synchronize(self.device)
        self.pool = torch.cuda.graph_pool_handle()


class SharingRecorder(Recorder):
    """Captures graphs in the memory pool of another recorder, while that has graphs.

    A graph's intermediate values are free memory of its pool between two replays, but nobody
    outside the pool may use it. What is captured here, and tensors made in ``allocating``, lie
    there. The other recorder's graphs overwrite them, and they overwrite what those have computed;
    so both take turns, and take up nothing where the other one left it.

    Args:
        owner: the other recorder, on whose stream everything runs: blocks of a pool belong to a
            stream.
    """

    def __init__(self, owner: Recorder):
        super().__init__(owner.device)
        self.stream = owner.stream
        self.owner = owner

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Context manager around a turn, on the stream of the other recorder."""
        if self.owner.has_graphs:
            self.pool = self.owner.pool
        with super().on_stream():
            yield

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Context manager in which new tensors lie in the pool of the other recorder's graphs."""
        if self.pool != self.owner.pool:
            yield
            return
        # the pool exists, since graphs hold it; torch.cuda.use_mem_pool takes no graph's handle
        number = self.device.index or 0
        torch._C._cuda_beginAllocateCurrentThreadToPool(number, self.pool)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(number, self.pool)
            torch._C._cuda_releasePool(number, self.pool)
