"""Train heads that predict the experts of a mixture, from data or a trace, and measure them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chronicals.config import ChronicalsConfig
from chronicals.moe.lookahead.choosing import SAMPLE, Choice
from chronicals.moe.lookahead.distil_heads import HeadDistillation, distil
from chronicals.moe.lookahead.predictor import ExpertPredictor, HeadSizes, Recalls, measure_recalls
from chronicals.moe.lookahead.recording import Recorded, record_data
from chronicals.moe.lookahead.trace import Trace, checksum
from chronicals.moe.routers import experts_per_token


@dataclass(frozen=True)
class TrainedPredictor:
    """Trained heads and their measurements.

    Attributes:
        losses: loss of each step.
        recalls: recalls on held-out tokens.
        tokens: number of tokens trained on, counted once per pass.
        model: name of the model.
        unchanged: checksum of the model, equal before and after.
    """

    predictor: ExpertPredictor
    losses: list[float]
    recalls: Recalls
    tokens: int
    model: str
    unchanged: str

    def about(self) -> dict[str, Any]:
        """Return a summary as plain JSON values."""
        return {
            "model": self.model,
            "model_sha256": self.unchanged,
            "trained_on_tokens": self.tokens,
            "first_loss": self.losses[0],
            "last_loss": sum(self.losses[-10:]) / len(self.losses[-10:]),
            "recalls": dict(vars(self.recalls)),
        }


def train_predictor(
    model: Any,
    tokenizer: Any,
    data: Any,
    held_out: Any,
    config: ChronicalsConfig,
    sizes: HeadSizes,
    how: HeadDistillation,
    tokens: int,
    held_out_tokens: int,
) -> TrainedPredictor:
    """Train heads while ``model`` runs once over ``data``, and measure them on held-out data.

    Only the recording of one forward pass is in memory at a time.

    Args:
        model: a mixture-of-experts model; its weights stay as they are.
        tokenizer: the model's tokenizer.
        data: training data, as ``train`` takes it.
        held_out: held-out data; None holds out the first ``held_out_tokens`` of ``data``.
        config: pack width, batch size and data settings.
        sizes: sizes of the heads.
        how: settings of the distillation.
        tokens: largest number of tokens to train on.
        held_out_tokens: largest number of tokens to measure on.

    Raises:
        ValueError: the model is not a known mixture, there is too little data, or the weights of
            the model changed.
    """
    if how.passes != 1:
        raise ValueError(
            f"passes={how.passes}: the model runs once over data; record a trace (chronicals moe "
            "trace --features) and train "
            "from it"
        )

    before = checksum(model)
    k = experts_per_token(model)
    kept = held_out_tokens if held_out is None else 0
    recordings = record_data(model, tokenizer, data, config, True, tokens + kept)
    sample = _first_recordings(recordings, SAMPLE)
    if not sample:
        raise ValueError("there is no token to train heads on; give more data")
    predictor = _new_heads(model, sizes, Choice.found(model, sample), how.seed)
    lengths = list[int]()

    def unseen() -> Iterator[Recorded]:
        """Skip the recordings that are held out; yield the rest, and note their lengths.

        Those of ``sample`` come first. They are removed from it, so that none stays in memory.
        """
        seen = 0
        while True:
            recording = sample.pop(0) if sample else next(recordings, None)
            if recording is None:
                return
            if seen >= kept:
                lengths.append(len(recording))
                yield recording
            seen += len(recording)

    steps = max(1, tokens // min(how.rows, config.batch_size * config.max_seq_length))
    found = distil(predictor, unseen(), steps, how)
    unseen_data = data if held_out is None else held_out
    measured = record_data(model, tokenizer, unseen_data, config, True, held_out_tokens)
    recalls = measure_recalls(predictor, measured, k)
    after = checksum(model)
    if after != before:
        raise ValueError(
            f"{type(model).__name__}: its weights changed from {before[:8]} to {after[:8]}, and "
            "they must not"
        )
    return TrainedPredictor(
        predictor, found, recalls, sum(lengths), str(model.config._name_or_path), before
    )


def train_from_trace(
    model: Any,
    trace: Path,
    held_out: Path | None,
    sizes: HeadSizes,
    how: HeadDistillation,
    tokens: int,
    held_out_tokens: int,
) -> TrainedPredictor:
    """Train heads for ``model`` from a trace of it with features, without running the model.

    The trace is read one part at a time.

    Args:
        model: the model that was traced.
        trace: folder of the trace.
        held_out: folder of another trace of the model; None holds out the first parts of ``trace``
            with ``held_out_tokens`` in all.
        sizes: sizes of the heads.
        how: settings of the distillation.
        tokens: largest number of tokens to train on, rounded up to whole parts.
        held_out_tokens: number of tokens to measure on, rounded up to whole parts.

    Raises:
        ValueError: a trace is incomplete, is of another model or has no features, or there are too
            few tokens.
    """
    there = Trace(trace)
    weights = there.check(model)
    parts = list(range(len(there.info.files)))
    if held_out is None:
        measured = there
        kept = there.first(parts, held_out_tokens)
    else:
        measured = Trace(held_out)
        measured.check(model, weights)
        kept = measured.first(range(len(measured.info.files)), held_out_tokens)
    rest = there.first(parts[len(kept) if held_out is None else 0 :], tokens)
    if not rest:
        raise ValueError(
            f"{trace}: its {there.info.tokens:,} tokens are all held out; record more, or hold "
            "out fewer"
        )
    assert there.info.choice is not None
    predictor = _new_heads(model, sizes, Choice(**there.info.choice), how.seed)
    steps = how.passes * sum(how.steps_of(there.info.files[n]["tokens"]) for n in rest)
    generator = torch.Generator().manual_seed(how.seed)
    parts_in_order = (
        there.part(rest[n])
        for _ in range(how.passes)
        for n in torch.randperm(len(rest), generator=generator).tolist()
    )
    found = distil(predictor, parts_in_order, steps, how)
    trained = how.passes * sum(there.info.files[n]["tokens"] for n in rest)
    recalls = measure_recalls(predictor, (measured.part(n) for n in kept), there.info.k)
    return TrainedPredictor(predictor, found, recalls, trained, there.info.model, weights)


def _new_heads(model: Any, sizes: HeadSizes, choice: Choice, seed: int) -> ExpertPredictor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ExpertPredictor.beside(model, sizes, choice)


def _first_recordings(recordings: Iterator[Recorded], tokens: int) -> list[Recorded]:
    """Return the first recordings, of at least so many tokens; no variable keeps one of them."""
    sample = list[Recorded]()
    for recording in recordings:
        sample.append(recording)
        if sum(map(len, sample)) >= tokens:
            break
    return sample
