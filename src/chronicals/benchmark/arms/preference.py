"""TRL's trainers of preferences, ``DPOTrainer`` and ``ORPOTrainer``, on the work's pairs.

Their own tokenising is left out, so that all arms have the same tokens. Steps have as many pairs each as ours have in the mean,
sorted by length. Attention and the pairs of a micro-batch are the fastest in a trial before the first step, over steps whose
lengths are new to it: with cuDNN's attention the host makes a plan for each length that it has not met. DPO has its reference
as the row says: log-probabilities stored before the first step, or adapters off.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from chronicals.benchmark.arms.plain import DTYPES
from chronicals.benchmark.arms.trainer import Enough, Watch, usual_arguments
from chronicals.benchmark.arms.ways import FLASH_ATTENTION, flash_attention
from chronicals.benchmark.arms.weights import base_of_peers, load_for_peers, with_peft
from chronicals.benchmark.measurement import COMPARED, ArmPlan, device, reset_peak
from chronicals.benchmark.pairs import Held, Pair, PairWork, equal_steps
from chronicals.benchmark.work import SPARE_STEPS
from chronicals.models import load_tokenizer

MOST, USUAL = 16, 4
"""Pairs of a micro-batch: at most, and where attentions are compared."""

TIMED, ENOUGH = 4, 6.0
"""Usual steps that a way is timed in at most, of which the median counts, and seconds after which no further one begins."""

WARM = 3
"""Other steps before the first way is timed: models that are compiled are compiled anew for the first few lengths."""

OUT_OF_MEMORY = torch.OutOfMemoryError.__name__


def trl(work: PairWork, plan: ArmPlan) -> None:
    """TRL's trainer at its best, without recomputation."""
    _trl(work, plan, recompute=False)


def trl_recompute(work: PairWork, plan: ArmPlan) -> None:
    """The same with gradient checkpointing."""
    _trl(work, plan, recompute=True)


def _trl(work: PairWork, plan: ArmPlan, recompute: bool) -> None:
    model = load_for_peers(work, DTYPES[work.config().mixed_precision], attn_implementation="sdpa")
    attentions = [*filter(None, [flash_attention(model)]), "sdpa"]
    if work.adapts:
        model = with_peft(model, work)
    liger = device().type == "cuda" and find_spec("liger_kernel") is not None
    words = [f"{work.objective.upper()}Trainer", *(["Liger kernels"] if liger else [])]
    words += ["gradient checkpointing"] if recompute else []
    words += [base_of_peers(work)] if work.in_4_bits else []
    options: dict[str, Any] = {"use_liger_kernel": liger, "bf16": False, "fp16": False, "use_cpu": device().type == "cpu"}
    if recompute:
        options |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    train_pairs(model, work, plan, words, attentions, **options)


def train_pairs(
    model: Any, work: PairWork, plan: ArmPlan, words: Sequence[str], attentions: Sequence[str] = (), **arguments: Any
) -> None:
    """Train through TRL's trainer of the row's objective and hand in each round.

    Args:
        words: how it runs.
        attentions: of transformers, to choose between, the safest last; by default the model's own.
        arguments: further fields of the trainer's configuration.
    """
    steps = equal_steps([*work.pairs_by_step(plan.in_all + SPARE_STEPS)])
    build = Builder(model, work, {**usual_arguments(work, plan), **arguments})
    way, tried = fastest_way(build, steps, attentions_of(attentions, device().type == "cuda"))
    trainer = build(steps, way.pairs)
    details = [f"{way.pairs} pairs x {len(steps[0]) // way.pairs} sorted by length", *filter(None, [way.attention.words])]
    settings = ", ".join([*words, *details, *filter(None, [work.reference_policy, _definition(work)]), *tried])
    expected = [[pairs] for pairs in work.pairs_by_step(COMPARED)]
    watch = PairWatch(trainer, plan, settings, expected)
    watch.objective = work.objective
    reset_peak()
    with contextlib.suppress(Enough):
        trainer.train()
        watch.hand_in()


def _definition(work: PairWork) -> str:
    return "cross-entropy of prompts, too, its mean in each micro-batch" if work.objective == "orpo" else ""


@dataclass(frozen=True)
class Builder:
    """Makes trainers of one model.

    Attributes:
        arguments: fields of the trainer's configuration.
    """

    model: Any
    work: PairWork
    arguments: dict[str, Any]

    def __call__(self, steps: Sequence[Sequence[Pair]], pairs: int) -> Any:
        """A trainer of these steps, with so many ``pairs`` in a micro-batch, in their order."""
        from datasets import Dataset
        from torch.utils.data import SequentialSampler

        trainer_class, config_class, row = _of_dpo() if self.work.objective == "dpo" else _of_orpo()
        given = self.arguments | {
            "beta": self.work.beta, "per_device_train_batch_size": pairs,
            "gradient_accumulation_steps": len(steps[0]) // pairs,
        }  # fmt: skip
        if self.work.objective == "dpo":
            given["precompute_ref_log_probs"] = not self.work.adapts
        rows = Dataset.from_list([row(pair) for step in steps for pair in step])
        trainer = trainer_class(
            model=self.model, args=config_class(**given), train_dataset=rows,
            processing_class=load_tokenizer(self.work.tokenizer),
        )  # fmt: skip
        if "ref" in getattr(self.model, "peft_config", {}):  # a copy of the adapters, in the place of having them off
            self.model.delete_adapter("ref")
        trainer._get_train_sampler = lambda *given: SequentialSampler(trainer.train_dataset)
        return trainer


Row = Callable[[Pair], dict[str, Any]]


def _of_dpo() -> tuple[type[Any], type[Any], Row]:
    from trl import DPOConfig, DPOTrainer

    class Tokenised(DPOTrainer):
        """Takes rows of token ids."""

        def _prepare_dataset(self, dataset: Any, *given: Any, **named: Any) -> Any:
            return dataset

    def row(pair: Pair) -> dict[str, Any]:
        return {"prompt_ids": pair.prompt, "chosen_ids": pair.chosen, "rejected_ids": pair.rejected}

    return Tokenised, DPOConfig, row


def _of_orpo() -> tuple[type[Any], type[Any], Row]:
    try:
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer
    except ImportError:  # where it stood before TRL 1.0
        from trl import ORPOConfig, ORPOTrainer

    class Tokenised(ORPOTrainer):
        """Takes rows of token ids; the texts are not read."""

        def tokenize_row(self, feature: Any, model: Any = None) -> dict[str, Any]:
            return {}

    def row(pair: Pair) -> dict[str, Any]:
        found: dict[str, Any] = {"prompt": "", "chosen": "", "rejected": ""}
        for side, ids in zip(("chosen", "rejected"), pair.rows):
            labels = [-100] * len(pair.prompt) + ids[len(pair.prompt) :]
            found |= {f"{side}_input_ids": ids, f"{side}_attention_mask": [1] * len(ids), f"{side}_labels": labels}
        return found

    return Tokenised, ORPOConfig, row


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
    """Those to choose between: by each name, and of torch's own also without cuDNN; the safest last."""
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
    """Times ways of taking a step: first the one with the longest row, which must fit, then some with a usual number of tokens,
    whose lengths no way has met before.

    Attributes:
        failed: words for each way that did not run, with the error.
    """

    def __init__(self, build: Builder, steps: Sequence[Sequence[Pair]]):
        by_tokens = sorted(steps, key=lambda step: sum(pair.tokens for pair in step))
        first = max(len(steps) - TIMED, 0) // 2
        longest, usual = max(steps, key=lambda step: step[0].longest), by_tokens[first : first + TIMED]
        others = [step for step in by_tokens[:first] + by_tokens[first + TIMED :] if step is not longest]
        chosen, size = [longest, *usual, *others[-WARM:]], len(longest)
        self.build, self.trainer = build, build(chosen, 1)
        if getattr(self.trainer.args, "use_liger_kernel", False):  # the trainer does when training begins
            from transformers.integrations.liger import apply_liger_kernel

            apply_liger_kernel(self.trainer.model, self.trainer.args.liger_kernel_config)
        rows = [self.trainer.train_dataset[number] for number in range(sum(map(len, chosen)))]
        self.longest, *steps_of_rows = (rows[start : start + size] for start in range(0, len(rows), size))
        self.usual, self.others = steps_of_rows[: len(usual)], steps_of_rows[len(usual) :]
        self.seconds, self.failed = dict[PairWay, float](), dict[PairWay, str]()

    def run(self, way: PairWay) -> None:
        """Time it, or note why it does not run; one with more pairs than what ran out of memory is not tried."""
        full = [other for other, why in self.failed.items() if why == OUT_OF_MEMORY and other.attention == way.attention]
        if way in self.seconds or way in self.failed or any(other.pairs <= way.pairs for other in full):
            return
        try:
            self.seconds[way] = self._timed(way)
            return
        except Exception as error:  # a peer's own; what it holds is freed behind this block
            self.failed[way] = type(error).__name__
        self.build.model.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _timed(self, way: PairWay) -> float:
        """Seconds of a usual step forward and backward, the median of some that differ in their lengths."""
        model, args = self.build.model, self.trainer.args
        way.attention.take(model)
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs)
        model.train()
        for rows in [self.longest, *([] if self.seconds else self.others)]:
            self._passed(way, rows)
        seconds = list[float]()
        for rows in self.usual:
            if sum(seconds) < ENOUGH:
                seconds.append(self._passed(way, rows))
        return statistics.median(seconds)

    def _passed(self, way: PairWay, rows: Sequence[Any]) -> float:
        trainer, began = self.trainer, _now()
        for start in range(0, len(rows), way.pairs):
            inputs = trainer._prepare_inputs(trainer.data_collator(rows[start : start + way.pairs]))
            trainer.compute_loss(trainer.model, inputs).backward()
        self.build.model.zero_grad(set_to_none=True)
        return _now() - began

    @property
    def fastest(self) -> PairWay | None:
        return min(self.seconds, key=self.seconds.__getitem__, default=None)

    @property
    def words(self) -> list[str]:
        """What came of each way."""
        timed = [f"{way.words} {seconds:.2f} s" for way, seconds in self.seconds.items()]
        tried = [f"passes of a usual step: {', '.join(timed)}"] if len(timed) > 1 else []
        return [*tried, *(f"{way.words} did not run: {why}" for way, why in self.failed.items())]


def fastest_way(build: Builder, steps: Sequence[Sequence[Pair]], attentions: Sequence[Attention]) -> tuple[PairWay, list[str]]:
    """The fastest attention, and with it the fastest number of pairs in a micro-batch; the model is left with that attention.

    Returns:
        the way, and in words what was tried.
    """
    sizes = [size for size in range(1, MOST + 1) if len(steps[0]) % size == 0]
    trial = PairTrial(build, steps)
    for size in sorted((size for size in sizes if size <= USUAL), reverse=True):
        for attention in attentions:
            trial.run(PairWay(size, attention))
        if trial.seconds:
            break
    found = trial.fastest
    if found is not None:
        for size in sizes[1:]:
            trial.run(PairWay(size, found.attention))
    way = trial.fastest or PairWay(1, attentions[-1])
    way.attention.take(build.model)
    return way, trial.words


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class PairWatch(Watch):
    """Sees pairs of prompts and answers.

    Attributes:
        objective: of the row.
    """

    objective = "dpo"

    def sizes(self, inputs: dict[str, Any]) -> tuple[Tensor, int]:
        if "input_ids" in inputs:
            return super().sizes(inputs)
        sides = [inputs[f"{side}_attention_mask"] for side in ("chosen", "rejected")]
        return sum((mask.sum() for mask in sides), torch.tensor(0)), 2 * len(sides[0]) * max(mask.shape[1] for mask in sides)

    def held(self, inputs: dict[str, Any]) -> list[Any]:
        return [pairs_in(inputs)]

    def own_batches(self) -> Any:
        """The steps as the reference reads them: a mean over pairs has no micro-batches; ORPO's is over tokens."""
        if self.objective == "orpo":
            return Held(self.batches, prompt_is_trained=True).to_json()
        whole, expected = _whole(self.batches), _whole(self.expected)
        return None if whole == expected else Held(whole).to_json()

    def begins_alike(self) -> bool:
        return self.objective == "dpo" and _whole(self.batches[:1]) == _whole(self.expected[:1])


def _whole(steps: Sequence[Sequence[Sequence[Pair]]]) -> list[list[list[Pair]]]:
    """Each step as one micro-batch."""
    return [[_in_order(step)] for step in steps]


def _in_order(step: Sequence[Sequence[Pair]]) -> list[Pair]:
    return sorted(itertools.chain.from_iterable(step), key=lambda pair: (-pair.longest, pair.prompt, pair.chosen))


def pairs_in(inputs: dict[str, Any]) -> list[Pair]:
    """The pairs of a trainer's batch: of DPO all chosen rows before the rejected ones, of ORPO both apart."""
    if "input_ids" in inputs:
        ids, mask, answers = (inputs[name] for name in ("input_ids", "attention_mask", "completion_mask"))
        rows = [(row[kept.bool()], answer[kept.bool()].bool()) for row, kept, answer in zip(ids, mask, answers)]
    else:
        rows = []
        for side in ("chosen", "rejected"):
            named = (inputs[f"{side}_{name}"] for name in ("input_ids", "attention_mask", "labels"))
            rows += [(row[kept.bool()], label[kept.bool()] != -100) for row, kept, label in zip(*named)]
    half = len(rows) // 2
    sides = [(row[~answer].tolist(), row[answer].tolist()) for row, answer in rows]
    return [Pair(prompt, chosen, sides[half + number][1]) for number, (prompt, chosen) in enumerate(sides[:half])]
