"""Capture of CUDA graphs that share a memory pool, on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from chronicals.kernels.products import HIGH_PRIORITY
from chronicals.kernels.tensor_lists import tables_looked_up

CapturedResult = TypeVar("CapturedResult")
"""What a captured function returns."""


@dataclass
class Graph:
    """A CUDA graph, and the tables that its launches read."""

    graph: torch.cuda.CUDAGraph
    looked_up: list[Tensor]

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self.graph.replay()


class Recorder:
    """Captures graphs that share one memory pool, on a stream of its own."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)
        self.pool = torch.cuda.graph_pool_handle()

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
                return Graph(graph, tables), run()
        except RuntimeError:
            generator.graphsafe_set_state(
                before
            )  # the generator would stay registered with the failed capture
            raise

    def forget(self) -> None:
        """Use a new memory pool from now on; the old one is freed once its graphs are dropped."""
        torch.cuda.synchronize(self.device)
        self.pool = torch.cuda.graph_pool_handle()
