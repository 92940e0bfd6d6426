"""How a peer takes a step's documents: attention, and micro-batches; the fastest is found by a
trial before the first step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chronicals.benchmark.arms.padding import MICRO_BATCH_OVERHEAD, PaddedStep, padded
from chronicals.benchmark.measurement import device
from chronicals.benchmark.work import Document
from peers.packing import flash_lengths, packed

FLASH_ATTENTION = ("flash_attention_4", "flash_attention_3", "flash_attention_2")
"""Names in transformers, the fastest first; packed rows need one of them."""

TRIED_OVERHEADS = (512, MICRO_BATCH_OVERHEAD, 8192)
"""Overheads between which a trial chooses: many small micro-batches, or few with more padding."""


def flash_attention(model: Any) -> str | None:
    """The first of them that trains two packed documents here; the model is left with it, or
    with sdpa.
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
    """Whether other tokens in the first of two packed documents leave the second one's logits
    the same bits.
    """
    ids = torch.arange(64, device=device())[None]
    other = torch.where(ids < 32, ids + 1, ids)
    positions = ids % 32
    given = {"position_ids": positions, **flash_lengths(positions)}
    with torch.no_grad():
        first, second = (model(input_ids=x, **given).logits[:, 32:] for x in (ids, other))
    return torch.equal(first, second)


@dataclass(frozen=True)
class Way:
    """An attention with a way to cut a step into micro-batches.

    Attributes:
        attention: by its name in transformers; None leaves the model as it is.
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
        if self.overhead is None:
            return packed(documents, device())
        return padded(documents, rows, device(), self.overhead)


class Trial:
    """Times ways of taking the first step and that with the most tokens, forward and backward.

    Attributes:
        failed: words for each way that did not run, with the error.
    """

    def __init__(self, model: Any, steps: Sequence[Sequence[Document]], rows: int):
        largest = max(steps, key=lambda documents: sum(len(document) for document in documents))
        self.model = model
        self.steps = [steps[0], largest]
        self.rows = rows
        self.seconds = dict[Way, float]()
        self.failed = dict[Way, str]()

    def run(self, way: Way) -> None:
        """Time it, or note why it does not run.

        Raises:
            Exception: of a model that is left as it is or has sdpa, over padded rows; what else is
                there to take.
        """
        try:
            if way.attention:
                self.model.set_attn_implementation(way.attention)
            if way.overhead is None and not keeps_documents_apart(self.model):
                self.failed[way] = "its documents see each other"
                return
            batches = [way.cut(documents, self.rows) for documents in self.steps]
            _forward_and_backward(
                self.model, batches
            )  # compiles, and picks kernels for these shapes
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
        """Of those that run; where none does, the last."""
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
    """The fastest attention, and with it the fastest micro-batches; the model is left with that
    attention.

    Where rows differ in length, an attention that keeps packed documents apart is tried with packed
        rows, too: it may be the
    slowest over padded ones.

    Args:
        rows: in a micro-batch at most.
        attentions: to choose between, the safest last; by none the model stays as it is.

    Returns:
        the way, and in words what did not run: attentions, and packed rows.
    """
    trial = Trial(model, steps, rows)
    names: list[str | None] = [*attentions] or [None]
    cuts = [Way(names[-1], overhead).cut for overhead in TRIED_OVERHEADS]
    ragged = (
        len({str([cut(documents, rows).shapes for documents in trial.steps]) for cut in cuts}) > 1
    )
    ways = [Way(name, None) for name in names if name in FLASH_ATTENTION and ragged] + [
        Way(name) for name in names
    ]
    way = trial.fastest(ways) if len(ways) > 1 else ways[0]
    if ragged and way.overhead is not None:
        way = trial.fastest(
            [Way(way.attention, overhead) for overhead in sorted(TRIED_OVERHEADS, reverse=True)]
        )
    if way.attention:
        model.set_attn_implementation(way.attention)
    told = [
        name
        for name in trial.failed
        if name != way and (name.attention != way.attention or name.overhead is None)
    ]
    return way, [f"{name.words} did not run: {trial.failed[name]}" for name in told]


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Make the states of AdamW as they are before its first step, so that a trial has the memory
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
