"""CUDA graphs without a card: what was captured runs again, and writes where it wrote when it
was captured.
"""

from contextlib import nullcontext

from chronicals.training.step.graphs import GraphedStep


class _Emulated:
    def __init__(self, recorder, run):
        self.recorder = recorder
        self.run = run
        self.looked_up = []
        self.begun = recorder.gradients()
        before = recorder.values()
        self.result = run()
        self.written = recorder.gradients()
        recorder.restore(before)

    def replay(self):
        self.recorder.replays += 1
        there = self.recorder.gradients()
        self.recorder.set_gradients(self.begun)
        result = self.run()
        pairs = list(zip(self.written, self.recorder.gradients()))
        pairs += (
            zip(self.result.values(), result.values())
            if isinstance(result, dict)
            else [(self.result, result)]
        )
        for kept, new in pairs:
            if kept is not None and kept is not new:
                kept.copy_(new)
        self.recorder.set_gradients(there)


class Recorder:
    """In place of ``graphs.Recorder``, for steps in fp32 that draw no random numbers."""

    replays = 0
    on_stream = staticmethod(nullcontext)

    def __init__(self, parameters, optimizer):
        self.parameters = parameters
        self.optimizer = optimizer

    def capture(self, run):
        graph = _Emulated(self, run)
        return graph, graph.result

    def forget(self):
        pass

    def gradients(self):
        return [parameter.grad for parameter in self.parameters]

    def set_gradients(self, gradients):
        for parameter, gradient in zip(self.parameters, gradients):
            parameter.grad = gradient

    def values(self):
        states = [x for state in self.optimizer.state.values() for x in state.values()]
        held = [
            *(p.data for p in self.parameters),
            *states,
            *(g for g in self.gradients() if g is not None),
        ]
        return [(tensor, tensor.clone()) for tensor in held]

    def restore(self, values):
        for tensor, value in values:
            tensor.copy_(value)


class EmulatedStep(GraphedStep):
    """A ``GraphedStep`` on the CPU; the last one that was made is ``last``."""

    last = None

    def __init__(
        self, parts, weights, parameters, optimizer, with_update=True, exchange=None, cut=False
    ):
        super().__init__(
            parts,
            weights,
            parameters,
            optimizer,
            Recorder(parameters, optimizer),
            with_update,
            exchange,
            cut,
        )
        EmulatedStep.last = self
