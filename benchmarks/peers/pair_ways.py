"""Ways to train a step of pairs in a peer's trainer: attention, and pairs of a micro-batch. A trial
finds the fastest.

The trial takes steps of lengths that are new to every way, as training does: with cuDNN's attention
the host makes a plan for each of them.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from chronicals.benchmark.measurement import device
from chronicals.benchmark.pairs import PROMPT_SHARES, Pair, PairWork
from peers.ways import FLASH_ATTENTION

MOST_PAIRS = 16
"""Largest number of pairs in a micro-batch."""

USUAL_PAIRS = 4
"""Pairs of a micro-batch when attentions are compared."""

TIMED_STEPS = 4
"""Largest number of usual steps in which a way is timed; the median counts."""

ENOUGH_SECONDS = 6.0
"""Seconds of these steps after which no further one begins."""

CLOSE_RATIO = 1.3
"""An attention is also tried with more pairs if its time, with the usual pairs, is at most so many
times that of the fastest."""

WARM_UP_STEPS = 3
"""Other steps before the first way is timed: compiled models are compiled anew for the first few
lengths."""

OUT_OF_MEMORY = torch.OutOfMemoryError.__name__


class Build(Protocol):
    """Makes a trainer of ``model`` over the given steps, with ``pairs`` in a micro-batch."""

    @property
    def model(self) -> Any: ...

    def __call__(self, steps: Sequence[Sequence[Pair]], pairs: int) -> Any: ...


@dataclass(frozen=True)
class Attention:
    """An attention of a peer's model.

    Attributes:
        name: in transformers; None leaves the model as it is.
        cudnn: True if torch's attention may take cuDNN's kernels.
    """

    name: str | None = None
    cudnn: bool = True

    def take(self, model: Any) -> None:
        """Let the model use it."""
        torch.backends.cuda.enable_cudnn_sdp(self.cudnn)
        if self.name:
            model.set_attn_implementation(self.name)

    @property
    def words(self) -> str:
        return (self.name or "") if self.cudnn else f"{self.name or 'attention'} without cuDNN"


def attentions_of(names: Sequence[str], on_card: bool) -> list[Attention]:
    """Return the attentions to choose between: each name, and torch's own also without cuDNN; the
    safest last.
    """
    attentions = list[Attention]()
    choices: Sequence[str | None] = names or [None]
    for name in choices:
        if on_card and name not in FLASH_ATTENTION:
            attentions.append(Attention(name, cudnn=False))
        attentions.append(Attention(name))
    return attentions


@dataclass(frozen=True)
class PairWay:
    """A number of pairs in a micro-batch, and an attention."""

    pairs: int
    attention: Attention

    @property
    def words(self) -> str:
        return " ".join(filter(None, [self.attention.words, f"{self.pairs} pairs"]))


class PairTrial:
    """Times ways of training a step: first the one with the longest row, which must fit, then some
    with a usual number of tokens, of lengths that are new to every way.

    Attributes:
        seconds: of a usual step, for each way that ran.
        failed: the error of each way that did not run.
    """

    def __init__(self, build: Build, steps: Sequence[Sequence[Pair]]):
        by_tokens = sorted(steps, key=lambda step: sum(pair.tokens for pair in step))
        first = max(len(steps) - TIMED_STEPS, 0) // 2
        last = first + TIMED_STEPS
        longest = max(steps, key=lambda step: step[0].longest)
        usual = by_tokens[first:last]
        others = [step for step in by_tokens[:first] + by_tokens[last:] if step is not longest]
        chosen = [longest, *usual, *others[-WARM_UP_STEPS:]]
        size = len(longest)
        self.build = build
        self.trainer = build(chosen, 1)
        if getattr(self.trainer.args, "use_liger_kernel", False):
            # The trainer itself applies them when training begins.
            from transformers.integrations.liger import apply_liger_kernel

            apply_liger_kernel(self.trainer.model, self.trainer.args.liger_kernel_config)
        rows = [self.trainer.train_dataset[number] for number in range(sum(map(len, chosen)))]
        self.longest, *steps_of_rows = (
            rows[start : start + size] for start in range(0, len(rows), size)
        )
        self.usual = steps_of_rows[: len(usual)]
        self.others = steps_of_rows[len(usual) :]
        self.seconds = dict[PairWay, float]()
        self.failed = dict[PairWay, str]()

    def run(self, way: PairWay) -> None:
        """Time a way, or note why it does not run. A way with more pairs than one that ran out of
        memory is not tried.
        """
        if way in self.seconds or way in self.failed:
            return
        for other, reason in self.failed.items():
            same_attention = other.attention == way.attention
            if reason == OUT_OF_MEMORY and same_attention and other.pairs <= way.pairs:
                return
        try:
            self.seconds[way] = self._timed(way)
            return
        except Exception as error:  # its tensors are freed when this block ends
            self.failed[way] = type(error).__name__
        self.build.model.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def run_first_again(self) -> None:
        """Time the first way again, and take the shorter time: a model may be compiled in more than
        ``WARM_UP_STEPS`` steps. The first way is not cuDNN's, which is faster for lengths that it
        has seen.
        """
        if len(self.seconds) > 1:
            way = next(iter(self.seconds))
            before = self.seconds.pop(way)
            self.run(way)
            self.failed.pop(way, None)
            again = self.seconds.pop(way, before)
            self.seconds = {way: min(before, again), **self.seconds}

    def _timed(self, way: PairWay) -> float:
        """Return the seconds of a usual step forward and backward, the median of some that differ
        in their lengths.
        """
        model = self.build.model
        args = self.trainer.args
        way.attention.take(model)
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs
            )
        model.train()
        for rows in [self.longest, *([] if self.seconds else self.others)]:
            self._passed(way, rows)
        seconds = list[float]()
        for rows in self.usual:
            if sum(seconds) < ENOUGH_SECONDS:
                seconds.append(self._passed(way, rows))
        return statistics.median(seconds)

    def _passed(self, way: PairWay, rows: Sequence[Any]) -> float:
        trainer = self.trainer
        began = _now()
        for start in range(0, len(rows), way.pairs):
            inputs = trainer._prepare_inputs(trainer.data_collator(rows[start : start + way.pairs]))
            trainer.compute_loss(trainer.model, inputs).backward()
        self.build.model.zero_grad(set_to_none=True)
        return _now() - began

    @property
    def close(self) -> list[Attention]:
        """Attentions, of those timed so far, that may be the fastest with more pairs; the fastest
        first.
        """
        ways = sorted(self.seconds, key=self.seconds.__getitem__)
        limit = CLOSE_RATIO * min(self.seconds.values(), default=0.0)
        return [way.attention for way in ways if self.seconds[way] <= limit]

    @property
    def fastest(self) -> PairWay | None:
        return min(self.seconds, key=self.seconds.__getitem__, default=None)

    @property
    def words(self) -> list[str]:
        """Result of each way."""
        timed = [f"{way.words} {seconds:.2f} s" for way, seconds in self.seconds.items()]
        tried = [f"passes of a usual step: {', '.join(timed)}"] if len(timed) > 1 else []
        return [*tried, *(f"{way.words} did not run: {why}" for way, why in self.failed.items())]


def known_or_fastest_way(
    build: Build,
    steps: Sequence[Sequence[Pair]],
    attentions: Sequence[Attention],
    work: PairWork,
    arm: str,
) -> tuple[PairWay, list[str]]:
    """Return the result of an earlier trial for another row of the same model, mode and objective,
    or of a trial now.

    Built-in rows have the same lengths whatever the share of their prompts. The steps must hold as
    many pairs: other numbers are divided into other micro-batches.

    Args:
        arm: in words.

    Returns:
        the way, and in words what was tried.
    """
    if work.data not in PROMPT_SHARES:
        return fastest_way(build, steps, attentions)
    name = re.sub(r"[^a-z0-9]+", "-", f"{work.name} {work.mode} {work.objective} {arm}".lower())
    file = work.folder.parent / "ways" / f"{name}.json"
    config = work.config()
    conditions = [str(device()), config.batch_size, config.max_seq_length, len(steps[0])]
    if file.exists():
        earlier = json.loads(file.read_text())
        if earlier["alike"] == conditions:
            way = PairWay(earlier["pairs"], Attention(**earlier["attention"]))
            way.attention.take(build.model)
            return way, [f"as in the trial of {earlier['data']}", *earlier["tried"]]
    way, tried = fastest_way(build, steps, attentions)
    file.parent.mkdir(exist_ok=True)
    about = {
        "alike": conditions,
        "data": work.data,
        "pairs": way.pairs,
        "attention": asdict(way.attention),
        "tried": tried,
    }
    file.write_text(json.dumps(about, indent=1))
    return way, tried


def fastest_way(
    build: Build, steps: Sequence[Sequence[Pair]], attentions: Sequence[Attention]
) -> tuple[PairWay, list[str]]:
    """Find the fastest attention and number of pairs in a micro-batch. The model is left with that
    attention.

    Attentions are compared with ``USUAL_PAIRS``, or as many as fit. The fastest is timed with all
    other numbers, and those that come close with larger ones, because an attention may cost the
    host more time and the card less.

    Returns:
        the way, and in words what was tried.
    """
    sizes = [size for size in range(1, MOST_PAIRS + 1) if len(steps[0]) % size == 0]
    trial = PairTrial(build, steps)
    for size in sorted((size for size in sizes if size <= USUAL_PAIRS), reverse=True):
        for attention in attentions:
            trial.run(PairWay(size, attention))
        if trial.seconds:
            trial.run_first_again()
            break
    for place, attention in enumerate(trial.close):
        for size in sizes[1:]:
            if place == 0 or size > USUAL_PAIRS:
                trial.run(PairWay(size, attention))
    way = trial.fastest or PairWay(1, attentions[-1])
    way.attention.take(build.model)
    return way, trial.words


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
