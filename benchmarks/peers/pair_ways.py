"""How a peer's trainer takes a step of pairs: attention, and pairs of a micro-batch; the fastest is
found by a trial.

The trial takes steps whose lengths no way has met before, as training does: with cuDNN's attention
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

MOST = 16
USUAL = 4
"""Pairs of a micro-batch: at most, and where attentions are compared."""

TIMED = 4
ENOUGH = 6.0
"""Usual steps that a way is timed in at most, of which the median counts, and seconds after
which no further one begins.
"""

CLOSE = 1.3
"""Times the fastest attention's seconds, with the usual pairs, within which another is tried
with more pairs, too.
"""

WARM = 3
"""Other steps before the first way is timed: models that are compiled are compiled anew for the
first few lengths.
"""

OUT_OF_MEMORY = torch.OutOfMemoryError.__name__


class Build(Protocol):
    """Makes a trainer of ``model`` of these steps, with so many pairs in a micro-batch."""

    @property
    def model(self) -> Any: ...

    def __call__(self, steps: Sequence[Sequence[Pair]], pairs: int) -> Any: ...


@dataclass(frozen=True)
class Attention:
    """Of a peer's model.

    Attributes:
        name: in transformers; None leaves the model as it is.
        cudnn: whether torch's own may be cuDNN's.
    """

    name: str | None = None
    cudnn: bool = True

    def take(self, model: Any) -> None:
        torch.backends.cuda.enable_cudnn_sdp(self.cudnn)
        if self.name:
            model.set_attn_implementation(self.name)

    @property
    def words(self) -> str:
        return (self.name or "") if self.cudnn else f"{self.name or 'attention'} without cuDNN"


def attentions_of(names: Sequence[str], on_card: bool) -> list[Attention]:
    """Those to choose between: by each name, and of torch's own also without cuDNN; the safest
    last.
    """
    found = list[Attention]()
    given: Sequence[str | None] = names or [None]
    for name in given:
        alone = on_card and name not in FLASH_ATTENTION
        found += [*([Attention(name, cudnn=False)] if alone else []), Attention(name)]
    return found


@dataclass(frozen=True)
class PairWay:
    """Pairs of a micro-batch, and the attention."""

    pairs: int
    attention: Attention

    @property
    def words(self) -> str:
        return " ".join(filter(None, [self.attention.words, f"{self.pairs} pairs"]))


class PairTrial:
    """Times ways of taking a step: first the one with the longest row, which must fit, then some
    with a usual number of tokens, whose lengths no way has met before.

    Attributes:
        failed: words for each way that did not run, with the error.
    """

    def __init__(self, build: Build, steps: Sequence[Sequence[Pair]]):
        by_tokens = sorted(steps, key=lambda step: sum(pair.tokens for pair in step))
        first = max(len(steps) - TIMED, 0) // 2
        longest = max(steps, key=lambda step: step[0].longest)
        usual = by_tokens[first : first + TIMED]
        others = [
            step for step in by_tokens[:first] + by_tokens[first + TIMED :] if step is not longest
        ]
        chosen = [longest, *usual, *others[-WARM:]]
        size = len(longest)
        self.build = build
        self.trainer = build(chosen, 1)
        if getattr(
            self.trainer.args, "use_liger_kernel", False
        ):  # the trainer does when training begins
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
        """Time it, or note why it does not run; one with more pairs than what ran out of memory
        is not tried.
        """
        full = [
            other
            for other, why in self.failed.items()
            if why == OUT_OF_MEMORY and other.attention == way.attention
        ]
        if (
            way in self.seconds
            or way in self.failed
            or any(other.pairs <= way.pairs for other in full)
        ):
            return
        try:
            self.seconds[way] = self._timed(way)
            return
        except Exception as error:  # a peer's own; what it holds is freed behind this block
            self.failed[way] = type(error).__name__
        self.build.model.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def run_first_again(self) -> None:
        """The shorter of both times counts: while it is the first, a way may compile more than
        ``WARM`` steps meet. It is not cuDNN's, which is faster where lengths are met again."""
        if len(self.seconds) > 1:
            way = next(iter(self.seconds))
            before = self.seconds.pop(way)
            self.run(way)
            self.failed.pop(way, None)
            again = self.seconds.pop(way, before)
            self.seconds = {way: min(before, again), **self.seconds}

    def _timed(self, way: PairWay) -> float:
        """Seconds of a usual step forward and backward, the median of some that differ in their
        lengths.
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
            if sum(seconds) < ENOUGH:
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
        """Attentions, of those timed so far, that may be the fastest with more pairs; the
        fastest first.
        """
        ways = sorted(self.seconds, key=self.seconds.__getitem__)
        return [way.attention for way in ways if self.seconds[way] <= CLOSE * self.seconds[ways[0]]]

    @property
    def fastest(self) -> PairWay | None:
        return min(self.seconds, key=self.seconds.__getitem__, default=None)

    @property
    def words(self) -> list[str]:
        """What came of each way."""
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
    """What a trial found for another row of the same model, mode and objective, else what one finds
    now: where prompts are another share of built-in rows, a peer's rows are as long. Its steps must
    hold as many pairs: more of them may be divided into micro-batches that the trial did not have.

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
    alike = [str(device()), config.batch_size, config.max_seq_length, len(steps[0])]
    if file.exists():
        found = json.loads(file.read_text())
        if found["alike"] == alike:
            way = PairWay(found["pairs"], Attention(**found["attention"]))
            way.attention.take(build.model)
            return way, [f"as in the trial of {found['data']}", *found["tried"]]
    way, tried = fastest_way(build, steps, attentions)
    file.parent.mkdir(exist_ok=True)
    about = {
        "alike": alike,
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
    """The fastest of the attentions and numbers of pairs in a micro-batch; the model is left with
    that attention.

    Attentions are compared with ``USUAL`` pairs, or as many as fit; the fastest is timed with all
    other numbers, and those that come close with larger ones, for an attention may take the host
    longer and the card less.

    Returns:
        the way, and in words what was tried.
    """
    sizes = [size for size in range(1, MOST + 1) if len(steps[0]) % size == 0]
    trial = PairTrial(build, steps)
    for size in sorted((size for size in sizes if size <= USUAL), reverse=True):
        for attention in attentions:
            trial.run(PairWay(size, attention))
        if trial.seconds:
            trial.run_first_again()
            break
    for place, attention in enumerate(trial.close):
        for size in sizes[1:]:
            if place == 0 or size > USUAL:
                trial.run(PairWay(size, attention))
    way = trial.fastest or PairWay(1, attentions[-1])
    way.attention.take(build.model)
    return way, trial.words


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
