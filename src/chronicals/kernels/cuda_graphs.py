"""Capture of CUDA graphs that share a memory pool, on a stream for captures and replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from chronicals.kernels.products import HIGH_PRIORITY, stream_of_priority
from chronicals.kernels.tensor_lists import tables_looked_up

CapturedResult = TypeVar("CapturedResult")
"""What a captured function returns."""


@dataclass(eq=False)
class Graph:
    """A CUDA graph, and the tables that its launches read."""

    graph: torch.cuda.CUDAGraph
    looked_up: list[Tensor]

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self.graph.replay()


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
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self.device.index or 0]
        before = generator.clone_state()
        try:
            capture = torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            )
            with tables_looked_up() as tables, capture:
                result = run()
        except RuntimeError:
            generator.graphsafe_set_state(
                before
            )  # the generator would stay registered with the failed capture
            raise
        captured = Graph(graph, tables)
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
