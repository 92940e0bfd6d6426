"""TRL's trainers of preferences, ``DPOTrainer`` and ``ORPOTrainer``, on the work's pairs.

Their own tokenising is left out, so that all arms have the same tokens. Each step has as many pairs
as ours have in the mean, sorted by length. Attention and the pairs of a micro-batch are the fastest
in a trial (``pair_ways``). The reference of DPO is the row's: log-probabilities stored before the
first step, or adapters off.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from chronicals.benchmark.arms.weights import with_peft
from chronicals.benchmark.measurement import COMPARED, ArmPlan, device, reset_peak
from chronicals.benchmark.pairs import Pair, PairSteps, PairWork
from chronicals.benchmark.work import SPARE_STEPS
from chronicals.models import load_tokenizer
from peers.models import PEER_DTYPES, base_of_peers, load_for_peers
from peers.pair_ways import attentions_of, known_or_fastest_way
from peers.trainer import Enough, Watch, usual_arguments
from peers.ways import flash_attention


def trl(work: PairWork, plan: ArmPlan) -> None:
    """Train through TRL's trainer at its best, without recomputation."""
    _trl(work, plan, recompute=False)


def trl_recompute(work: PairWork, plan: ArmPlan) -> None:
    """Train as ``trl``, with gradient checkpointing."""
    _trl(work, plan, recompute=True)


def _trl(work: PairWork, plan: ArmPlan, recompute: bool) -> None:
    model = load_for_peers(
        work, PEER_DTYPES[work.config().mixed_precision], attn_implementation="sdpa"
    )
    attentions = [*filter(None, [flash_attention(model)]), "sdpa"]
    if work.adapts:
        model = with_peft(model, work)
    liger = device().type == "cuda" and find_spec("liger_kernel") is not None
    words = [f"{work.objective.upper()}Trainer", *(["Liger kernels"] if liger else [])]
    words += ["gradient checkpointing"] if recompute else []
    words += [base_of_peers(work)] if work.in_4_bits else []
    options: dict[str, Any] = {
        "use_liger_kernel": liger,
        "bf16": False,
        "fp16": False,
        "use_cpu": device().type == "cpu",
    }
    if recompute:
        options |= {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
        }
    train_pairs(model, work, plan, words, attentions, **options)


def train_pairs(
    model: Any,
    work: PairWork,
    plan: ArmPlan,
    words: Sequence[str],
    attentions: Sequence[str] = (),
    **arguments: Any,
) -> None:
    """Train through TRL's trainer of the row's objective and hand in each round.

    Args:
        words: how it runs.
        attentions: names in transformers to choose between, the safest last; by default the
            model's own.
        arguments: further fields of the trainer's configuration.
    """
    steps = equal_steps([*work.pairs_by_step(plan.in_all + SPARE_STEPS)])
    build = Builder(model, work, {**usual_arguments(work, plan), **arguments})
    given = attentions_of(attentions, device().type == "cuda")
    way, tried = known_or_fastest_way(build, steps, given, work, " ".join(words))
    trainer = build(steps, way.pairs)
    details = [
        f"{way.pairs} pairs x {len(steps[0]) // way.pairs} sorted by length",
        *filter(None, [way.attention.words]),
    ]
    settings = ", ".join(
        [*words, *details, *filter(None, [work.reference_policy, _definition(work)]), *tried]
    )
    expected = [[pairs] for pairs in work.pairs_by_step(COMPARED)]
    watch = PairWatch(trainer, plan, settings, expected)
    watch.objective = work.objective
    reset_peak()
    with contextlib.suppress(Enough):
        trainer.train()
        watch.hand_in()


def _definition(work: PairWork) -> str:
    return (
        "cross-entropy of prompts, too, its mean in each micro-batch"
        if work.objective == "orpo"
        else ""
    )


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
            "beta": self.work.beta,
            "per_device_train_batch_size": pairs,
            "gradient_accumulation_steps": len(steps[0]) // pairs,
        }
        if self.work.objective == "dpo":
            given["precompute_ref_log_probs"] = not self.work.adapts
        rows = Dataset.from_list([row(pair) for step in steps for pair in step])
        trainer = trainer_class(
            model=self.model,
            args=config_class(**given),
            train_dataset=rows,
            processing_class=load_tokenizer(self.work.tokenizer),
        )
        # TRL may have copied the adapters as a reference; here the reference has them off.
        if "ref" in getattr(self.model, "peft_config", {}):
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
    except ImportError:  # its place before TRL 1.0
        from trl import ORPOConfig, ORPOTrainer

    class Tokenised(ORPOTrainer):
        """Takes rows of token ids; the texts are not read."""

        def tokenize_row(self, feature: Any, model: Any = None) -> dict[str, Any]:
            return {}

    def row(pair: Pair) -> dict[str, Any]:
        found: dict[str, Any] = {"prompt": "", "chosen": "", "rejected": ""}
        for side, ids in zip(("chosen", "rejected"), pair.rows):
            labels = [-100] * len(pair.prompt) + ids[len(pair.prompt) :]
            found |= {
                f"{side}_input_ids": ids,
                f"{side}_attention_mask": [1] * len(ids),
                f"{side}_labels": labels,
            }
        return found

    return Tokenised, ORPOConfig, row


class PairWatch(Watch):
    """Records pairs of prompts and answers.

    Attributes:
        objective: of the row.
    """

    objective = "dpo"

    def sizes(self, inputs: dict[str, Any]) -> tuple[Tensor, int]:
        if "input_ids" in inputs:
            return super().sizes(inputs)
        sides = [inputs[f"{side}_attention_mask"] for side in ("chosen", "rejected")]
        return sum((mask.sum() for mask in sides), torch.tensor(0)), 2 * len(sides[0]) * max(
            mask.shape[1] for mask in sides
        )

    def held(self, inputs: dict[str, Any]) -> list[Any]:
        return [pairs_in(inputs)]

    def own_batches(self) -> Any:
        """Return the steps as the reference reads them. DPO's mean over pairs needs no micro-batches;
        ORPO's is over tokens.
        """
        if self.objective == "orpo":
            return PairSteps(self.batches, prompt_is_trained=True).to_json()
        whole = _whole(self.batches)
        expected = _whole(self.expected)
        return None if whole == expected else PairSteps(whole).to_json()

    def begins_alike(self) -> bool:
        return self.objective == "dpo" and _whole(self.batches[:1]) == _whole(self.expected[:1])


def _whole(steps: Sequence[Sequence[Sequence[Pair]]]) -> list[list[list[Pair]]]:
    """Return each step as one micro-batch, in an order that depends on the pairs alone."""
    whole = []
    for step in steps:
        pairs = itertools.chain.from_iterable(step)
        ordered = sorted(pairs, key=lambda pair: (-pair.longest, pair.prompt, pair.chosen))
        whole.append([ordered])
    return whole


def pairs_in(inputs: dict[str, Any]) -> list[Pair]:
    """Return the pairs of a trainer's batch. DPO's has all chosen rows before the rejected ones,
    ORPO's both in tensors of their own.
    """
    if "input_ids" in inputs:
        ids, mask, answers = (
            inputs[name] for name in ("input_ids", "attention_mask", "completion_mask")
        )
        rows = [
            (row[kept.bool()], answer[kept.bool()].bool())
            for row, kept, answer in zip(ids, mask, answers)
        ]
    else:
        rows = []
        for side in ("chosen", "rejected"):
            named = (inputs[f"{side}_{name}"] for name in ("input_ids", "attention_mask", "labels"))
            rows += [
                (row[kept.bool()], label[kept.bool()] != -100) for row, kept, label in zip(*named)
            ]
    half = len(rows) // 2
    sides = [(row[~answer].tolist(), row[answer].tolist()) for row, answer in rows]
    return [
        Pair(prompt, chosen, sides[half + number][1])
        for number, (prompt, chosen) in enumerate(sides[:half])
    ]


def equal_steps(steps: Sequence[Sequence[Pair]]) -> list[list[Pair]]:
    """Return the same pairs in the same order with their mean number in each step, sorted within a
    step, the longest first.

    From three pairs on the number is rounded to a multiple of four, which can be divided into
    micro-batches.
    """
    mean = sum(map(len, steps)) / len(steps)
    size = max(4 * round(mean / 4) if mean >= 3 else round(mean), 1)
    pairs = [pair for step in steps for pair in step]
    whole = range(0, len(pairs) - size + 1, size)
    return [
        sorted(pairs[start : start + size], key=lambda pair: pair.longest, reverse=True)
        for start in whole
    ]
