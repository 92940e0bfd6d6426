"""Decode steps as CUDA graphs, one for each bucket of slots.

A graph works on fixed memory. The first step of a bucket runs eagerly, since kernels are compiled
then; the second one is captured on the tensors of its own slots, and later slots of the bucket are
copied into them. All graphs share one memory pool.

Graphs live for one call of the engine. Between calls weights may be updated or moved, adapters
switched off and pages made again; a graph would go on reading what it was captured with. For the
same reason the first step of a bucket is eager in each call: other adapters, or dense copies where
there were none, are other kernels, which cannot be compiled during a capture.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial

from torch import Tensor

from chronicals.generation.drawing import Choices
from chronicals.kernels.cuda_graphs import Graph, Recorder
from chronicals.kernels.paged_attention import SharedPages
from chronicals.kernels.token_draws import Drawn

logger = logging.getLogger(__name__)

Bucket = tuple[int, int, int, bool, bool]
"""Number of slots, width of the block table, number of teams that share keys, and which operations
the draws take.
"""


@dataclass
class Slots:
    """The tensors of decode steps of N answers, of which the last are padding.

    A step reads them, and writes the next tokens and positions into them. Their shapes are static:
    N is a power of two or the number of slots, the width of the block table a power of two.

    Attributes:
        ids: int64 ``[N]``, each answer's last token.
        positions: int64 ``[N]``, its position.
        pages: int64 ``[N, L]``, the block table.
        choices: settings of the draws.
        seen: bool ``[N, V]``, tokens of each text; None without repetition penalties.
        shared: which answers share the pages of their prompt, or None.
        noted: int64 ``[N]``, where the experts of their tokens are noted, or None.
    """

    ids: Tensor
    positions: Tensor
    pages: Tensor
    choices: Choices
    seen: Tensor | None
    shared: SharedPages | None = None
    noted: Tensor | None = None

    @property
    def bucket(self) -> Bucket:
        """Whatever decides which operations a step consists of."""
        choices = self.choices
        slots, width = self.pages.shape
        teams = 0 if self.shared is None else len(self.shared.teams)
        return slots, width, teams, choices.narrows, choices.penalises

    def fill(self, others: Slots) -> None:
        """Take the values of other slots of the same bucket, in place."""
        for static, given in zip(self._tensors(), others._tensors(), strict=True):
            static.copy_(given, non_blocking=True)

    def _tensors(self) -> list[Tensor]:
        found = [self.ids, self.positions, self.pages, self.seen, self.noted]
        for part in (self.choices, self.shared):
            found += [getattr(part, field.name) for field in fields(part)] if part else []
        return [x for x in found if isinstance(x, Tensor)]


@dataclass
class _Captured:
    """A step's graph, the slots that it reads and writes, and what it draws."""

    graph: Graph
    slots: Slots
    drawn: Drawn

    def replay(self) -> Drawn:
        """Take a step; the next one overwrites the graph's own results."""
        self.graph.replay()
        return Drawn(*(x.clone() for x in self.drawn))


class DecodeGraphs:
    """The graphs of decode steps of an engine.

    Args:
        recorder: captures them.

    Attributes:
        given_up: true once a step could not be captured; all later ones run eagerly.
    """

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.given_up = False
        self._most: int | None = None
        self._met = set[Bucket]()
        self._captured = dict[Bucket, _Captured]()

    @property
    def has_free_padding(self) -> bool:
        """True if more slots cost a step nothing; not where each chooses experts that are copied."""
        return self._most is None

    @contextmanager
    def around_call(self, most: int | None = None) -> Iterator[DecodeGraphs]:
        """Context manager around a call of the engine, at whose end the graphs are dropped.

        Args:
            most: slots of a step that is captured, at most; None without a limit.
        """
        self._most = most
        with self.recorder.on_stream():
            try:
                yield self
            finally:
                self._forget()

    def take(self, slots: Slots, steps: int, step: Callable[[Slots], Drawn]) -> list[Drawn]:
        """Take steps with all answers; returns what each step drew.

        Args:
            slots: tensors of the answers; their values are of no use afterwards.
            steps: number of steps.
            step: takes one eagerly. It reads and writes tensors of static shapes only.
        """
        bucket = slots.bucket
        fits = self._most is None or len(slots.ids) <= self._most
        captured = self._captured.get(bucket)
        if captured is not None:
            captured.slots.fill(slots)
        drawn = list[Drawn]()
        for _ in range(steps):
            if captured is None and bucket in self._met and fits and not self.given_up:
                captured = self._capture(bucket, slots, step)
            self._met.add(bucket)
            drawn.append(step(slots) if captured is None else captured.replay())
        return drawn

    def _capture(
        self, bucket: Bucket, slots: Slots, step: Callable[[Slots], Drawn]
    ) -> _Captured | None:
        """Capture a step on these slots; None, with one warning, if that fails."""
        try:
            graph, drawn = self.recorder.capture(partial(step, slots))
        except RuntimeError as error:
            cause = error.__context__ or error
            self.given_up = True
            self._forget()  # steps without graphs may need the memory that those so far keep
            logger.warning(
                "use_cuda_graphs: answers are generated without graphs from here on, a decode "
                "step could not be captured (%s)",
                str(cause).splitlines()[0],
            )
            return None
        self._captured[bucket] = _Captured(graph, slots, drawn)
        return self._captured[bucket]

    def _forget(self) -> None:
        self.recorder.forget()
        self._captured.clear()
        self._met.clear()
