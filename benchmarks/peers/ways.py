"""Ways to train a step's documents in a peer: attention and micro-batches. A trial before the first
step finds the fastest.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chronicals.benchmark.arms.loop import MICRO_BATCH_OVERHEAD, PaddedStep, padded
from chronicals.benchmark.measurement import device
from chronicals.benchmark.work import Document
from peers.packing import flash_lengths, packed

FLASH_ATTENTION = ("flash_attention_4", "flash_attention_3", "flash_attention_2")
"""Names in transformers, the fastest first; packed rows need one of them."""

TRIED_OVERHEADS = (512, MICRO_BATCH_OVERHEAD, 8192)
"""Overheads between which a trial chooses: many small micro-batches, or few with more padding."""


def flash_attention(model: Any) -> str | None:
    """Find the first flash attention that trains two packed documents here. The model is left with
    it, or with sdpa.
    """
    if device().type != "cuda" or model.dtype == torch.float32:
        return None
    ids = torch.arange(64, device=device())[None]
    positions = ids % 32
    for name in FLASH_ATTENTION:
        with contextlib.suppress(Exception):
            model.set_attn_implementation(name)
            model.train()
            model(
                input_ids=ids, position_ids=positions, labels=ids, **flash_lengths(positions)
            ).loss.backward()
            torch.cuda.synchronize()
            model.zero_grad(set_to_none=True)
            return name
    model.set_attn_implementation("sdpa")
    model.zero_grad(set_to_none=True)
    return None


def keeps_documents_apart(model: Any) -> bool:
    """Return whether the logits of the second of two packed documents are bit-equal for any tokens
    in the first.
    """
    ids = torch.arange(64, device=device())[None]
    changed = torch.where(ids < 32, ids + 1, ids)
    positions = ids % 32
    arguments = {"position_ids": positions, **flash_lengths(positions)}
    with torch.no_grad():
        logits = model(input_ids=ids, **arguments).logits[:, 32:]
        logits_of_changed = model(input_ids=changed, **arguments).logits[:, 32:]
    return torch.equal(logits, logits_of_changed)


@dataclass(frozen=True)
class Way:
    """An attention, and how a step is cut into micro-batches.

    Attributes:
        attention: its name in transformers; None leaves the model as it is.
        overhead: of padded rows, see ``padded``; None packs the step into one row.
    """

    attention: str | None = None
    overhead: int | None = MICRO_BATCH_OVERHEAD

    @property
    def words(self) -> str:
        return ", ".join(
            filter(None, [self.attention, "packed rows" if self.overhead is None else ""])
        )

    def cut(self, documents: Sequence[Document], rows: int) -> PaddedStep:
        """Return the micro-batches of a step, of at most ``rows`` padded rows."""
        if self.overhead is None:
            return packed(documents, device())
        return padded(documents, rows, device(), self.overhead)


class Trial:
    """Times ways of training the first step and that with the most tokens, forward and backward.

    Attributes:
        seconds: of each way that ran.
        failed: the error of each way that did not run, in words.
    """

    def __init__(self, model: Any, steps: Sequence[Sequence[Document]], rows: int):
        largest = max(steps, key=lambda documents: sum(len(document) for document in documents))
        self.model = model
        self.steps = [steps[0], largest]
        self.rows = rows
        self.seconds = dict[Way, float]()
        self.failed = dict[Way, str]()

    def run(self, way: Way) -> None:
        """Time a way, or note why it does not run.

        Raises:
            Exception: padded rows with sdpa, or with the model as it is, do not run; there is no
                other way left.
        """
        try:
            if way.attention:
                self.model.set_attn_implementation(way.attention)
            if way.overhead is None and not keeps_documents_apart(self.model):
                self.failed[way] = "its documents see each other"
                return
            batches = [way.cut(documents, self.rows) for documents in self.steps]
            _forward_and_backward(self.model, batches)  # compiles and picks kernels
            began = _now()
            _forward_and_backward(self.model, batches)
            self.seconds[way] = _now() - began
            return
        except torch.OutOfMemoryError:
            self.failed[way] = "out of memory"
        except Exception as error:
            if way.attention in (None, "sdpa") and way.overhead is not None:
                raise
            self.failed[way] = type(error).__name__
        self.model.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def fastest(self, ways: Sequence[Way]) -> Way:
        """Return the fastest of the ways that run; the last if none does."""
        for way in ways:
            if way not in self.seconds and way not in self.failed:
                self.run(way)
        return min(
            (way for way in ways if way in self.seconds),
            key=self.seconds.__getitem__,
            default=ways[-1],
        )


def fastest_way(
    model: Any, steps: Sequence[Sequence[Document]], rows: int, attentions: Sequence[str] = ()
) -> tuple[Way, list[str]]:
    """Find the fastest attention, and with it the fastest micro-batches. The model is left with that
    attention.

    If rows differ in length, an attention that keeps packed documents apart is also tried with
    packed rows: it may be the slowest over padded ones.

    Args:
        rows: rows of a micro-batch, at most.
        attentions: names to choose between, the safest last; without any the model is left as it is.

    Returns:
        the way, and in words the attentions and packed rows that did not run.
    """
    trial = Trial(model, steps, rows)
    names: list[str | None] = [*attentions] or [None]
    shapes = set()
    for overhead in TRIED_OVERHEADS:
        way = Way(names[-1], overhead)
        shapes.add(str([way.cut(documents, rows).shapes for documents in trial.steps]))
    ragged = len(shapes) > 1
    ways = [Way(name, None) for name in names if name in FLASH_ATTENTION and ragged]
    ways += [Way(name) for name in names]
    way = trial.fastest(ways) if len(ways) > 1 else ways[0]
    if ragged and way.overhead is not None:
        way = trial.fastest(
            [Way(way.attention, overhead) for overhead in sorted(TRIED_OVERHEADS, reverse=True)]
        )
    if way.attention:
        model.set_attn_implementation(way.attention)
    remarks = [
        f"{failed.words} did not run: {reason}"
        for failed, reason in trial.failed.items()
        if failed != way and (failed.attention != way.attention or failed.overhead is None)
    ]
    return way, remarks


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Make the states of AdamW as they are before its first step, so that a trial needs the memory
    of a real step.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate
    for state in optimizer.state.values():
        state["step"].zero_()


def _forward_and_backward(model: Any, batches: Sequence[PaddedStep]) -> None:
    for batch in batches:
        for given, share in batch.micro_batches:
            (model(**given).loss * share).backward()
        model.zero_grad(set_to_none=True)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
