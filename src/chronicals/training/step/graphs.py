"""A training step as CUDA graphs: one for each shape of micro-step and one for the update.

All graphs work on fixed memory. A micro-step's graph belongs to a shape: (T, number of document
bounds, ``max_seqlen``, targets rounded up). The first micro-step of a shape runs eagerly, since
kernels are compiled then; the second one is captured. Whatever changes between steps lives on the
device: the batch, the counts, the learning rate, and the random state of dropout, which torch
manages for graphs.

The gradients of the first graph stay allocated and are shared by all graphs. The first micro-step
of an optimizer step overwrites them, directly in that graph and by a copy in the others; later ones
add to them. Sums over ranks run between the graphs, in place. If weights are updated in the
backward pass, a micro-step leaves no gradients and the update is not captured. All graphs share one
memory pool.

Where experts are streamed, the host looks within a micro-step which of them tokens chose. The
capture is cut there, forward and backward: a micro-step is a row of CUDA graphs, between which each
replay lets the host bring the experts and launch their products.

With frozen weights divided among ranks, a micro-step contains collectives, and NCCL requires that
all ranks capture and replay them together (Using NCCL with CUDA Graphs, in its documentation). So
the hosts first exchange their shapes, and all ranks use the largest bounds. If other sizes differ,
all ranks run this micro-step eagerly. If one rank fails, all go on without graphs.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from chronicals.batch import Batch
from chronicals.kernels.cuda_graphs import CapturedResult, Graph, Recorder
from chronicals.kernels.gradient_norm import norm_tables
from chronicals.objectives import Count
from chronicals.optimizers import FusedAdamW
from chronicals.training.step.training_step import EagerStep, gradients_of

logger = logging.getLogger(__name__)

SHARES = 16
"""Targets of a batch are rounded up to a multiple of 1/``SHARES`` of its tokens.

The added rows of the head cost time, but fewer shapes occur.
"""

_MOST = 64
"""Maximum number of shapes that are captured; others run eagerly."""

Exchange = Callable[[Sequence[int]], list[list[int]]]
"""All-gather between hosts: from the numbers of this rank to those of all ranks."""
BatchShape = tuple[
    int, int, int | tuple[int, int], int | None, tuple[tuple[str, torch.Size], ...], bool
]


@dataclass
class _Captured:
    """A micro-step's graph, the batch that it reads and the scalars that it writes."""

    graph: Graph
    batch: Batch
    scalars: dict[str, Tensor]


class GraphedStep:
    """The parts of a step as CUDA graphs, to be called inside ``on_stream``.

    Args:
        parts: the parts to capture; they also run what is not captured.
        weights: all weights of the model; if one of them moves, graphs are captured again.
        parameters: the trained parameters.
        recorder: captures the graphs; by default on the device of the parameters.
        with_update: capture the update too.
        exchange: for micro-steps with collectives: exchange between ranks, all of which must
            capture and replay together.
        cut: the host decides something within a micro-step, forward and backward, where its capture
            is cut (``cut_capture``).
    """

    def __init__(
        self,
        parts: EagerStep,
        weights: Iterable[Tensor],
        parameters: list[Tensor],
        optimizer: FusedAdamW,
        recorder: Recorder | None = None,
        with_update: bool = True,
        exchange: Exchange | None = None,
        cut: bool = False,
    ):
        self.with_update = with_update
        self.cut = cut
        self.exchange = exchange
        self.parts = parts
        self.weights = list(weights)
        self.parameters = parameters
        self.optimizer = optimizer
        self.device = parameters[0].device
        self.recorder = recorder or Recorder(self.device)
        self.on_stream = self.recorder.on_stream
        self.met: set[BatchShape] = set()
        self.of_micro: dict[BatchShape, _Captured] = {}
        self.of_update: tuple[Graph, dict[str, Tensor]] | None = None
        self.counts: dict[str, Tensor] = {}
        self.gradients: list[Tensor | None] | None = None
        self.addresses: tuple[int, ...] = ()
        self.failed = self.given_up = False
        self.releases = 0

    def micro(self, batch: Batch, counts: Mapping[str, Count], first: bool) -> dict[str, Tensor]:
        """Replay the graph of the micro-batch's shape; capture it at the second one of that shape."""
        if first:
            self._begin(counts)
        batch, alike = self._agreed(_rounded(batch), first)
        shape = _shape(batch, first)
        if (
            shape not in self.of_micro
            and shape in self.met
            and len(self.of_micro) < _MOST
            and alike
            and not self.failed
        ):
            self._capture_micro(shape, batch)
        if alike:
            self.met.add(shape)
        if not alike or shape not in self.of_micro:
            if first and self.gradients is not None:
                torch._foreach_zero_([kept for kept in self.gradients if kept is not None])
                self._set_gradients(self.gradients)
            scalars = self.parts.micro(batch, self.counts, first)
            if self._gradients_differ():
                self._give_up("a weight that had no gradient before has one now")
            return scalars
        captured = self.of_micro[shape]
        static = captured.batch
        for name in ("input_ids", "targets", "position_ids", "cu_seqlens"):
            getattr(static, name).copy_(getattr(batch, name), non_blocking=True)
        given = _further(batch)
        for name, tensor in _further(static).items():
            tensor.copy_(given[name], non_blocking=True)
        captured.graph.replay()
        return captured.scalars

    def _agreed(self, batch: Batch, first: bool) -> tuple[Batch, bool]:
        """Return the batch with the largest bounds of all ranks, and whether all have one shape.

        If the shapes differ, the batch is returned unchanged. If one rank has released its graphs
        or given up, this rank does the same.
        """
        if self.exchange is None:
            return batch, True
        told = self.exchange([self.given_up, self.releases, *_bounds(batch), _other_sizes(batch)])
        given_up, releases, *bounds, _ = map(max, zip(*told))
        if self.releases < releases:
            self.release()
            self.releases = releases
        if given_up:
            # All ranks come here in the same micro-step, and exchange no shapes from now on.
            self.exchange = None
            if not self.given_up:
                self._give_up("another process could not go on with graphs")
            if first:
                self._set_gradients(None)  # they are the previous step's
        alike = len({sizes for *_, sizes in told}) == 1
        if not alike:
            return batch, False
        longest, keys, trained, entries = bounds
        ends = batch.cu_seqlens
        if len(ends) < entries:  # added document bounds repeat the last one
            padded = torch.cat([ends, ends[-1:].expand(entries - len(ends))])
            ends = padded.pin_memory() if ends.is_pinned() else padded
        agreed = replace(
            batch,
            max_seqlen=longest,
            trained=None if batch.trained is None else trained,
            cu_seqlens=ends,
            keys=None if batch.keys is None else replace(batch.keys, max_seqlen=keys),
        )
        return agreed, True

    def _begin(self, counts: Mapping[str, Count]) -> None:
        """Copy the values that differ between steps to the device."""
        addresses = tuple(weight.data_ptr() for weight in self.weights)
        if self.of_micro and addresses != self.addresses:
            self.release()
        self.addresses = addresses
        given = torch.tensor([float(count) for count in counts.values()])
        if not self.counts:
            self.held_counts = torch.empty_like(given, device=self.device)
            self.counts = dict(zip(counts, self.held_counts.unbind()))
        self.held_counts.copy_(
            given.pin_memory() if self.held_counts.is_cuda else given, non_blocking=True
        )
        self.optimizer.refresh_rates()
        self.optimizer.settle()

    def _gradients_differ(self) -> bool:
        """Return whether ``grad`` of a parameter is not the tensor that graphs write."""
        return self.gradients is not None and any(
            p.grad is not kept for p, kept in zip(self.parameters, self.gradients)
        )

    def _give_up(self, reason: str) -> None:
        """Stop using graphs; gradients are kept."""
        self.failed = self.given_up = True
        self.gradients = self.of_update = None
        self.of_micro.clear()
        logger.warning("use_cuda_graphs: steps run as usual from here on, %s", reason)

    def _capture_micro(self, shape: BatchShape, batch: Batch) -> None:
        static = batch.to(self.device)
        first = shape[-1]
        held = [p.grad for p in self.parameters]
        if first:
            self._set_gradients(None)

        def run() -> dict[str, Tensor]:
            # CUDA ends a capture only in the thread that began it (thread_local), and autograd runs
            # the backward pass of a card in a thread of its own unless told otherwise.
            with torch.autograd.set_multithreading_enabled(not self.cut):
                scalars = self.parts.micro(static, self.counts, first)
            if first and self.gradients is not None:
                kept: list[Tensor] = []
                new: list[Tensor] = []
                absent: list[Tensor] = []
                for there, parameter in zip(self.gradients, self.parameters):
                    if there is None and parameter.grad is not None:
                        raise RuntimeError("a weight that had no gradient before has one now")
                    if there is not None and parameter.grad is not None:
                        kept.append(there)
                        new.append(parameter.grad)
                    elif there is not None:
                        absent.append(there)
                torch._foreach_copy_(kept, new)
                if absent:
                    torch._foreach_zero_(absent)
            return scalars

        captured = self._captured_by_all(run)
        if captured is not None:
            self.of_micro[shape] = _Captured(captured[0], static, captured[1])
            made = [p.grad for p in self.parameters]
            if self.gradients is None and any(gradient is not None for gradient in made):
                self.gradients = made
        self._set_gradients(held if self.gradients is None else self.gradients)

    def _set_gradients(self, gradients: list[Tensor | None] | None) -> None:
        for number, parameter in enumerate(self.parameters):
            parameter.grad = None if gradients is None else gradients[number]

    def update(self, holders: Tensor | None) -> dict[str, Tensor]:
        """Replay the update.

        It runs eagerly if ``reduce`` gave a zero gradient to a weight without gradient on this
        rank.
        """
        in_place = (
            self.with_update
            and self.gradients is not None
            and (holders is None or not self._gradients_differ())
        )
        if in_place and self.of_update is None and not self.failed:
            self.optimizer.looked_up(self.parameters)
            norm_tables(gradients_of(self.parameters))
            self.of_update = self._captured(
                lambda: self.parts.update(None)
            )  # None: this rank has a gradient of every weight
            self._set_gradients(self.gradients)
        if in_place and self.of_update is not None:
            graph, scalars = self.of_update
            graph.replay()
            return scalars
        scalars = self.parts.update(holders)
        if self.gradients is not None:
            self._set_gradients(self.gradients)
        return scalars

    def _captured(self, run: Callable[[], CapturedResult]) -> tuple[Graph, CapturedResult] | None:
        """Capture ``run``; return its graph and its result.

        It is None, with one warning, if that fails.
        """
        try:
            return self.recorder.capture(run)
        except RuntimeError as error:
            cause = error.__context__ or error
            reason = str(cause).splitlines()[0]
            is_full = isinstance(cause, torch.OutOfMemoryError)
            del cause  # else its frames, and all tensors of the failed capture, would stay
        self._cannot_capture(reason)
        if self.exchange is None and is_full:
            # what the graphs so far keep is needed by steps without them
            self.gradients = self.of_update = None
            self.of_micro.clear()
            torch.cuda.empty_cache()
        return None

    def _captured_by_all(
        self, run: Callable[[], CapturedResult]
    ) -> tuple[Graph, CapturedResult] | None:
        """Return the result of ``_captured``; None if a rank failed that must replay it too."""
        captured = self._captured(run)
        if self.exchange is None or all(
            there for (there,) in self.exchange([captured is not None])
        ):
            return captured
        if captured is not None:
            self._cannot_capture("of another process")
        return None

    def _cannot_capture(self, reason: str) -> None:
        # A failed capture raises the versions of weights without writing them.
        self.optimizer.weights_moved()
        self.failed = True
        logger.warning(
            "use_cuda_graphs: steps run as usual from here on, a step could not be captured (%s)",
            reason,
        )

    def release(self) -> None:
        """Free the graphs' memory.

        Gradients are None afterwards, and later steps are captured again.
        """
        self.recorder.forget()
        self.of_micro.clear()
        self.met.clear()
        self.releases += 1
        self.of_update = self.gradients = None
        self._set_gradients(None)


def _shape(batch: Batch, first: bool) -> BatchShape:
    beside = tuple((name, tensor.shape) for name, tensor in _further(batch).items())
    longest = batch.max_seqlen if batch.keys is None else (batch.max_seqlen, batch.keys.max_seqlen)
    return len(batch), len(batch.cu_seqlens), longest, batch.trained, beside, first


def _bounds(batch: Batch) -> tuple[int, int, int, int]:
    """Return the sizes of a Batch that may be rounded up.

    These are ``max_seqlen`` of queries and of keys, ``trained``, and the number of document bounds
    if no other tensor has one entry for each document.
    """
    entries = 0 if batch.segments or batch.keys else len(batch.cu_seqlens)
    return (
        batch.max_seqlen,
        0 if batch.keys is None else batch.keys.max_seqlen,
        batch.trained or 0,
        entries,
    )


def _other_sizes(batch: Batch) -> int:
    """Return a hash of the sizes in a shape other than ``_bounds``, the same in every process."""
    entries = len(batch.cu_seqlens) if batch.segments or batch.keys else 0
    sizes = [(name, tuple(tensor.shape)) for name, tensor in _further(batch).items()]
    return zlib.crc32(repr((len(batch), entries, batch.trained is None, sizes)).encode())


def _rounded(batch: Batch) -> Batch:
    """Return the Batch with ``trained`` rounded up, so that few shapes occur."""
    if batch.trained is None:
        return batch
    share = -(-len(batch) // SHARES)
    return replace(batch, trained=min(len(batch), -(-batch.trained // share) * share))


def _further(batch: Batch) -> dict[str, Tensor]:
    """Return the optional tensors of a Batch, by name."""
    found = {
        **batch.segments,
        **{f"tokens.{name}": column for name, column in batch.tokens.items()},
    }
    if batch.weights is not None:
        found["weights"] = batch.weights
    if batch.keys is not None:
        found |= {
            f"keys.{name}": getattr(batch.keys, name) for name in ("index", "cu_seqlens", "places")
        }
    return found


def enable_cuda_graphs(trainer: Any) -> None:
    """Make a ``ChronicalsTrainer`` use CUDA graphs, like ``use_cuda_graphs=True``.

    If that is impossible, ``train`` raises ConfigurationError with the reason.
    """
    trainer.config = trainer.config.replace(use_cuda_graphs=True)
