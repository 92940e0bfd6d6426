"""The step as CUDA graphs: one of a micro-step and one of the update, replayed over memory that stays where it is.

A micro-step's graph belongs to a shape: (T, entries of the bounds, ``max_seqlen``, targets rounded up). A shape is run as
usual when it is first met, for kernels are compiled then, and captured when it is met again. What changes between steps
lives on the device: the batch, the counts, the learning rate, the random state of dropout, which torch keeps for graphs.

The first graph's gradients stay and are everybody's: the first micro-step of an optimizer step lays them there, by itself
in that graph and by a copy in the others; later ones add to them. Where weights are updated in the backward pass, a
micro-step is the whole step and leaves none. All graphs share one pool of memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from chronicals.batch import Batch
from chronicals.data.loader import Step
from chronicals.distributed import Ranks
from chronicals.kernels.gradient_norm import norm_tables
from chronicals.kernels.tensor_lists import tables_looked_up
from chronicals.kernels.two_streams import FIRST
from chronicals.models import PresentedModel
from chronicals.objectives import Count, Objective
from chronicals.optimizers import FusedAdamW
from chronicals.training.in_backward import UpdatesInBackward
from chronicals.training.precision import Precision
from chronicals.training.step import counts_of, gradients_of, micro_step, update

logger = logging.getLogger(__name__)

SHARES = 16
"""Targets of a batch are rounded up to a multiple of such a share of its tokens: rows of the head that cost, but are the
same in many batches."""

MOST = 64
"""Shapes that are captured; further ones run as usual."""

Result = TypeVar("Result")
Shape = tuple[int, int, int, int | None, tuple[str, ...], bool]


@dataclass
class _Graph:
    """A graph with the tables that its launches look up."""

    graph: torch.cuda.CUDAGraph
    looked_up: list[Tensor]

    def replay(self) -> None:
        self.graph.replay()


@dataclass
class _Captured:
    """A micro-step's graph, the batch that it reads and the loss that it leaves."""

    graph: _Graph
    batch: Batch
    loss: Tensor


class GraphedStep:
    """In place of ``train_step``, on one card.

    Args:
        model, objective, parameters, optimizer, precision, max_grad_norm, in_backward: as of ``train_step``.
    """

    def __init__(
        self, model: PresentedModel, objective: Objective, parameters: list[Tensor], optimizer: FusedAdamW,
        precision: Precision, max_grad_norm: float | None, in_backward: UpdatesInBackward | None = None,
    ):  # fmt: skip
        self.model, self.objective, self.precision = model, objective, precision
        self.parameters, self.optimizer, self.max_grad_norm = parameters, optimizer, max_grad_norm
        self.in_backward = in_backward
        self.stream = torch.cuda.Stream(precision.device, priority=FIRST)
        self.pool = torch.cuda.graph_pool_handle()
        self.met: set[Shape] = set()
        self.micro: dict[Shape, _Captured] = {}
        self.counts: dict[str, Tensor] = {}
        self.total = torch.zeros((), device=precision.device)
        self.gradients: list[Tensor | None] | None = None
        self.of_update: tuple[_Graph, dict[str, Tensor]] | None = None
        self.weights = list(model.model.parameters())
        self.addresses: tuple[int, ...] = ()
        self.failed = False

    def __call__(self, step: Step) -> dict[str, Tensor]:
        """One optimizer step; scalars on the device, as ``train_step`` returns them."""
        self._look_where_weights_are()
        caller = torch.cuda.current_stream(self.precision.device)
        self.stream.wait_stream(caller)
        with torch.cuda.stream(self.stream):
            self._bring_counts(counts_of(self.objective, step, Ranks()))
            self.optimizer.refresh_rates()
            self.optimizer.settle()
            self.total.zero_()
            for number, batch in enumerate(step.batches):
                self.total += self._micro_step(_rounded(batch), first=number == 0)
            scalars = {"loss": self.total, **self._update()}
        caller.wait_stream(self.stream)
        return scalars

    def _look_where_weights_are(self) -> None:
        """Graphs read and write weights where they were; moved since, as adapters that are turned off and on again move what
        they ride in, they need others."""
        addresses = tuple(weight.data_ptr() for weight in self.weights)
        if self.micro and addresses != self.addresses:
            self.release()
        self.addresses = addresses

    def _bring_counts(self, counts: Mapping[str, Count]) -> None:
        for name, count in counts.items():
            held = self.counts.setdefault(name, torch.empty((), device=self.precision.device))
            held.copy_(torch.tensor(float(count)).pin_memory(), non_blocking=True)

    def _micro_step(self, batch: Batch, first: bool) -> Tensor:
        beside = (*batch.segments, *([] if batch.weights is None else ["weights"]))
        shape = (len(batch), len(batch.cu_seqlens), batch.max_seqlen, batch.trained, beside, first)
        if shape not in self.micro and shape in self.met and len(self.micro) < MOST and not self.failed:
            self._capture_micro_step(shape, batch)
        self.met.add(shape)
        if shape not in self.micro:
            return self._as_usual(batch, first)
        captured = self.micro[shape]
        _fill(captured.batch, batch)
        captured.graph.replay()
        return captured.loss

    def _as_usual(self, batch: Batch, first: bool) -> Tensor:
        if first and self.gradients is not None:
            torch._foreach_zero_(_there(self.gradients))
            self._set_gradients(self.gradients)
        moved = batch.to(self.precision.device, non_blocking=True)
        loss = self._train(moved)
        if self.gradients is not None and any(p.grad is not kept for p, kept in zip(self.parameters, self.gradients)):
            self._give_up("a weight that had no gradient before has one now")
        return loss

    def _train(self, batch: Batch) -> Tensor:
        if self.in_backward is None:
            return micro_step(self.model, self.objective, batch, self.counts, self.precision)
        self.in_backward.begin()
        loss = micro_step(self.model, self.objective, batch, self.counts, self.precision)
        self.in_backward.end()
        return loss

    def _give_up(self, reason: str) -> None:
        """Go on without graphs; gradients stay as they are."""
        self.failed, self.gradients, self.of_update = True, None, None
        self.micro.clear()
        logger.warning("use_cuda_graphs: steps run as usual from here on, %s", reason)

    def _capture_micro_step(self, shape: Shape, batch: Batch) -> None:
        static, first = batch.to(self.precision.device), shape[-1]
        held = [p.grad for p in self.parameters]
        if first:
            self._set_gradients(None)
        for parameter in self.parameters if self.in_backward is not None else ():
            self.optimizer.state_of(parameter)  # what is made once must not be made in every replay

        def run() -> Tensor:
            loss = self._train(static)
            if first and self.gradients is not None:
                _lay(self.gradients, [p.grad for p in self.parameters])
            return loss

        captured = self._captured(run)
        if captured is not None:
            self.micro[shape] = _Captured(captured[0], static, captured[1])
            if self.in_backward is None:
                self.gradients = self.gradients or [p.grad for p in self.parameters]
        if captured is None:
            self._set_gradients(self.gradients if first else held)
        elif first:
            self._set_gradients(self.gradients)

    def _set_gradients(self, gradients: list[Tensor | None] | None) -> None:
        for number, parameter in enumerate(self.parameters):
            parameter.grad = None if gradients is None else gradients[number]

    def _update(self) -> dict[str, Tensor]:
        if self.in_backward is not None:
            return self.in_backward.scalars()
        given = self.parameters, self.optimizer, self.precision, self.max_grad_norm
        if self.gradients is not None and self.of_update is None and not self.failed:
            self.optimizer.looked_up(self.parameters)
            norm_tables(gradients_of(self.parameters))
            self.of_update = self._captured(lambda: update(*given))
        if self.of_update is not None:
            graph, scalars = self.of_update
            graph.replay()
            return scalars
        scalars = update(*given)
        if self.gradients is None:
            self.optimizer.zero_grad()
        return scalars

    def _captured(self, run: Callable[[], Result]) -> tuple[_Graph, Result] | None:
        """The graph of ``run`` and what it returns, not yet filled; None, said once, where it cannot be captured."""
        graph, generator = torch.cuda.CUDAGraph(), torch.cuda.default_generators[self.precision.device.index or 0]
        before = generator.clone_state()
        try:
            capture = torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local")
            with tables_looked_up() as tables, capture:
                return _Graph(graph, tables), run()
        except RuntimeError as error:
            self.optimizer.weights_moved()  # which were not written, though their versions say so
            generator.graphsafe_set_state(before)  # the one that took part would go on waiting for the capture
            self.failed = True
            first = error.__context__ or error
            reason = str(first).splitlines()[0]
            logger.warning("use_cuda_graphs: steps run as usual from here on, a step could not be captured (%s)", reason)
            return None

    def release(self) -> None:
        """Give the memory of the graphs back; gradients are none afterwards, and steps are captured anew."""
        torch.cuda.synchronize(self.precision.device)
        self.pool = torch.cuda.graph_pool_handle()
        self.micro.clear()
        self.met.clear()
        self.of_update = self.gradients = None
        self._set_gradients(None)


def _there(gradients: Iterable[Tensor | None]) -> list[Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


def _lay(kept: list[Tensor | None], new: list[Tensor | None]) -> None:
    """Copy gradients to where they stay; zero where a weight has none this time.

    Raises:
        RuntimeError: a weight has one that had none when the first graph was captured.
    """
    pairs = list(zip(kept, new))
    if any(there is None and given is not None for there, given in pairs):
        raise RuntimeError("a weight that had no gradient before has one now")
    found = [(there, given) for there, given in pairs if there is not None and given is not None]
    torch._foreach_copy_([there for there, _ in found], [given for _, given in found])
    absent = [there for there, given in pairs if there is not None and given is None]
    if absent:
        torch._foreach_zero_(absent)


def _rounded(batch: Batch) -> Batch:
    """With ``trained`` rounded up, so that few shapes occur."""
    if batch.trained is None:
        return batch
    share = -(-len(batch) // SHARES)
    return replace(batch, trained=min(len(batch), -(-batch.trained // share) * share))


def _fill(static: Batch, batch: Batch) -> None:
    for name in ("input_ids", "targets", "position_ids", "cu_seqlens"):
        getattr(static, name).copy_(getattr(batch, name), non_blocking=True)
    if static.weights is not None and batch.weights is not None:
        static.weights.copy_(batch.weights, non_blocking=True)
    for name, tensor in static.segments.items():
        tensor.copy_(batch.segments[name], non_blocking=True)


def enable_cuda_graphs(trainer: Any) -> None:
    """Ask a ``ChronicalsTrainer`` for CUDA graphs, as ``use_cuda_graphs=True`` in its configuration does.

    Raises:
        ConfigurationError: by ``train``, where they cannot be had; the message says why.
    """
    trainer.config = trainer.config.replace(use_cuda_graphs=True)
