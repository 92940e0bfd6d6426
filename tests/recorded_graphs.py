"""CUDA graphs without a card, operation by operation, for captures that are cut.

A replay runs the operations that were recorded on the tensors of the capture, and what the host
decides between them. Python code of the captured function does not run again, as on a card.
"""

from contextlib import contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chronicals.kernels.cuda_graphs import capture_under_way
from chronicals.training.step.graphs import GraphedStep


def tensors_of(values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def storages(tensors):
    return {tensor.untyped_storage()._cdata for tensor in tensors}


class Operation:
    """An operation whose results are written where they were when it was recorded."""

    def __init__(self, function, inputs, named, results):
        self.function = function
        self.inputs = inputs
        self.named = named
        there = storages(tensors_of((inputs, named)))
        self.results = tensors_of(results)
        self.writes = [not storages([result]) & there for result in self.results]

    def replay(self):
        results = tensors_of(self.function(*self.inputs, **self.named))
        for kept, new, writes in zip(self.results, results, self.writes, strict=True):
            if writes:
                kept.copy_(new)


class _Recording(TorchDispatchMode):
    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def __torch_dispatch__(self, function, types, inputs=(), named=None):
        named = named or {}
        results = function(*inputs, **named)
        self.steps.append(Operation(function, inputs, named, results).replay)
        return results


class RecordedGraph:
    """What was captured, and what the host decides in between."""

    def __init__(self, recorder):
        self.recorder = recorder
        self.looked_up = []
        self.steps = []
        self.decisions = []

    def cut(self, decide, behind):
        self.recorder.cuts += 1
        self.steps.append(decide)
        self.decisions.append(decide)
        assert behind is None

    @torch.no_grad()
    def replay(self):
        self.recorder.replays += 1
        for step in self.steps:
            step()


_ALL_GRAPHS = []
"""So that their memory stays: a test that fails is reported with tensors over it."""


class Recorder:
    """In place of ``cuda_graphs.Recorder``; nothing that is captured changes a gradient."""

    on_stream = staticmethod(nullcontext)

    def __init__(self, parameters):
        self.parameters = parameters
        self.cuts = self.replays = 0
        self.graphs = []

    def capture(self, run):
        graph = RecordedGraph(self)
        with self.unchanged(), capture_under_way(graph), _Recording(graph.steps):
            result = run()
        self.graphs.append(graph)
        _ALL_GRAPHS.append((graph, result))
        return graph, result

    @contextmanager
    def unchanged(self):
        before = [(p.grad, p.grad.clone()) for p in self.parameters if p.grad is not None]
        yield
        for gradient, value in before:
            gradient.copy_(value)

    def forget(self):
        pass


class RecordedStep(GraphedStep):
    """A ``GraphedStep`` on the CPU whose updates run as usual; the last one made is ``last``."""

    last = None

    def __init__(
        self, parts, weights, parameters, optimizer, with_update=True, exchange=None, cut=False
    ):
        recorder = Recorder(parameters)
        super().__init__(parts, weights, parameters, optimizer, recorder, False, exchange, cut)
        RecordedStep.last = self
