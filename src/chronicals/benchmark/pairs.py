"""Pairs of answers to one prompt as a unit of work: what DPO and ORPO are measured on.

Built-in pairs are random words. The length of a row, prompt and answer, is lognormal; the prompt is
a share of it, in the mean of both rows:

    pairs-30, pairs-50, pairs-70    30, 50 or 70 % of the tokens of prompt and answer

A step of ours holds the pairs of its packs, as many as fit in. A peer's trainer takes the same
pairs in the same order, so many in every step, and is compared with a reference on its own steps.
Real tokens are those of both rows, the prompt counted in each, as peers compute them.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from chronicals.benchmark.floor import Job
from chronicals.benchmark.shapes import MEDIAN, SHORTEST, SPREAD, BuiltIn, word_tokenizer, zipf_ids
from chronicals.benchmark.work import MODES, Document, Work
from chronicals.config import ConfigurationError

PAIRED = ("dpo", "orpo")
"""Objectives over pairs that are measured."""

SHARES = {"pairs-30": 0.3, "pairs-50": 0.5, "pairs-70": 0.7}
"""Built-in pairs, and the prompt's share of a row's tokens."""

UNLIKE = 0.3
"""An answer is up to so much longer than the mean of both, the other one as much shorter."""

BESIDE_A_ROW = 4
"""Tokens of an item besides two whole rows: ends of both answers, and what sharing the prompt
repeats.
"""

LEARNING_RATES = {"full": 5e-8, "lora": 2e-6, "qlora": 2e-6}
"""Of DPO, which sums over an answer what SFT averages over a step: so small that weights in
bf16, which lose such updates, stay within the tolerance, and so large that adapters move the
loss by more than that. ORPO has those of SFT."""

BETA = 0.1
"""β of DPO and λ of ORPO, where none is set: the default of ours and of TRL."""

Side = list[int]


@dataclass(frozen=True)
class Pair:
    """Token ids of a prompt and of both answers, ends included."""

    prompt: Side
    chosen: Side
    rejected: Side

    @property
    def rows(self) -> tuple[Side, Side]:
        """Prompt and answer of both sides, the chosen one first."""
        return self.prompt + self.chosen, self.prompt + self.rejected

    @property
    def tokens(self) -> int:
        """Of both rows."""
        return 2 * len(self.prompt) + len(self.chosen) + len(self.rejected)

    @property
    def longest(self) -> int:
        """Tokens of the longer row."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


@dataclass(frozen=True)
class Held:
    """What the first steps of an arm held, as the reference trains them.

    Attributes:
        steps: pairs of each micro-batch of each step; a loss is the mean over the micro-batches.
        prompt_is_trained: whether the cross-entropy of ORPO is that of the prompts, too, as in TRL.
    """

    steps: Sequence[Sequence[Sequence[Pair]]]
    prompt_is_trained: bool = False

    def to_json(self) -> dict[str, Any]:
        steps = [
            [[[pair.prompt, pair.chosen, pair.rejected] for pair in part] for part in step]
            for step in self.steps
        ]
        return {"prompt_is_trained": self.prompt_is_trained, "steps": steps}

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> Held:
        steps = [[[Pair(*sides) for sides in part] for part in step] for step in found["steps"]]
        return cls(steps, found["prompt_is_trained"])


@dataclass(frozen=True)
class PairWork(Work):
    """A work of pairs."""

    kind: ClassVar[str] = "pairs"
    built_in: ClassVar[tuple[str, ...]] = tuple(SHARES)

    @property
    def objective(self) -> str:
        return str(self.fields["objective"])

    @property
    def beta(self) -> float:
        """β or λ.

        Raises:
            ConfigurationError: other settings of the objective are set, which not every arm has.
        """
        given = dict(self.config().sections.get(self.objective, {}))
        beta = given.pop("beta", BETA)
        if given:
            name, value = next(iter(given.items()))
            raise ConfigurationError(
                f"{self.objective}.{name}={value!r}: not every arm has it; a benchmark takes "
                f"{self.objective}.beta alone"
            )
        return float(beta)

    def check_settings(self) -> None:
        _ = self.beta

    @property
    def reference_policy(self) -> str:
        if self.objective != "dpo":
            return ""
        if self.adapts:
            return "reference: adapters off, within the step"
        return "reference's log-probabilities stored before the first step"

    @property
    def tokenizer(self) -> str:
        return str(self.folder / "tokenizer") if self.data in SHARES else self.model

    def write_tokenizer(self) -> None:
        if self.data in SHARES:
            from transformers import AutoConfig

            from chronicals.model_shape import ModelShape

            vocabulary = ModelShape.of(AutoConfig.from_pretrained(self.model)).vocabulary
            word_tokenizer(vocabulary).save_pretrained(self.tokenizer)

    def _of_rows(self) -> dict[str, Any]:
        return {"kinds": ("preference",)}

    def pairs_by_step(self, count: int, first: int = 0) -> Iterator[list[Pair]]:
        """The pairs of ``count`` steps of ours, from number ``first`` on, in order.

        Raises:
            ConfigurationError: of a row more or less than its answer is trained.
        """
        from chronicals.data.making.store import SIDE_COLUMN

        stream = self.stream()
        sides = stream.store.columns[SIDE_COLUMN]
        size = stream.packs_a_step
        for step in range(first, first + count):
            held = [int(number) for pack in stream.packs_of(step * size) for number in pack]
            yield [_pair_at(stream.store, number) for number in held if sides[number] == 0]

    def documents_by_step(self, count: int) -> Iterator[list[Document]]:
        """Both rows of the pairs of each step, their answers labelled."""
        for pairs in self.pairs_by_step(count):
            rows = [(row, len(pair.prompt)) for pair in pairs for row in pair.rows]
            yield [
                Document(np.array(row), np.array([-100] * prompt + row[prompt:]))
                for row, prompt in rows
            ]

    def real_tokens(self, first: int, computed: Sequence[int]) -> list[int]:
        return [
            sum(pair.tokens for pair in pairs) for pairs in self.pairs_by_step(len(computed), first)
        ]

    def job(self) -> Job:
        return replace(super().job(), pairs=True)

    def described(self) -> dict[str, Any]:
        return self._described

    @functools.cached_property
    def _described(self) -> dict[str, Any]:
        steps = [*self.pairs_by_step(self.warm_up + self.steps)][self.warm_up :]
        pairs = [pair for step in steps for pair in step]
        return {
            "objective": self.objective,
            "pairs_a_step": len(pairs) / len(steps),
            "prompt_share": sum(2 * len(pair.prompt) for pair in pairs)
            / sum(pair.tokens for pair in pairs),
            "reference_policy": self.reference_policy,
        }

    @classmethod
    def usual_fields(
        cls, shape: BuiltIn | None, mode: str, fields: dict[str, Any]
    ) -> dict[str, Any]:
        """Packs are twice as wide and half as many as those of documents, for an item has two
        answers.
        """
        usual = super().usual_fields(shape, mode, fields)
        if shape:
            usual |= {
                "batch_size": max(shape.batch_size // 2, 1),
                "max_seq_length": 2 * shape.max_seq_length,
            }
        rate = (
            LEARNING_RATES[mode] if fields["objective"] == "dpo" else MODES[mode]["learning_rate"]
        )
        return {**usual, "learning_rate": rate}

    def write_documents(self, vocabulary: int) -> None:
        config = self.config()
        slots = (
            config.batch_size
            * config.gradient_accumulation_steps
            * config.max_seq_length
            * self.written_steps
        )
        rows = random_pairs(SHARES[self.data], slots, config.max_seq_length, vocabulary)
        self.documents.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _pair_at(store: Any, number: int) -> Pair:
    """The pair of the item that begins with document ``number`` of the store."""
    sides = []
    for document in (number, number + 1):
        ids, trained = store.whole_document(document)
        prompt = int(np.argmax(trained))
        if not trained[prompt:].all():
            raise ConfigurationError(
                "data: trains more or less than one whole answer of a row, which not every arm can"
            )
        sides.append((ids[:prompt].tolist(), ids[prompt:].tolist()))
    (prompt, chosen), (other, rejected) = sides
    if prompt != other:
        raise ConfigurationError("data: both answers of a pair must follow one prompt")
    return Pair(prompt, chosen, rejected)


def random_pairs(
    share: float, slots: int, width: int, vocabulary: int, seed: int = 1
) -> list[dict[str, str]]:
    """Rows of prompt, chosen and rejected, as texts of ``word_tokenizer``, that fill at least so
    many ``slots`` where a prompt is there once.

    Lengths of rows are lognormal as those of ragged documents, and at most half of ``width``, so
    that no pair is cut. Words are rarer in rejected answers than in chosen ones, so there is
    something to learn.

    Args:
        share: of the prompt in a row, in the mean of both rows.
        width: tokens of a pack.
    """
    generator = np.random.default_rng(seed)
    rows: list[dict[str, str]] = []
    longest = width // 2 - BESIDE_A_ROW
    shortest = min(SHORTEST, longest // 8)
    median = min(MEDIAN, longest // 2)
    while slots > 0:
        length = min(
            max(int(np.exp(generator.normal(math.log(median), SPREAD))), shortest), longest
        )
        prompt = min(max(round(share * length), 1), length - 2)
        answer = length - prompt
        more = min(round(generator.uniform(-UNLIKE, UNLIKE) * answer), answer - 1)
        chosen, rejected = (generator.random(size) for size in (answer + more, answer - more))
        rarer = np.maximum(rejected, generator.random(len(rejected)))
        rows.append(
            {
                "prompt": _words(zipf_ids(generator.random(prompt), vocabulary)),
                "chosen": " " + _words(zipf_ids(chosen, vocabulary)),
                "rejected": " " + _words(zipf_ids(rarer, vocabulary)),
            }
        )
        slots -= prompt + 2 * answer
    return rows


def _words(ids: Sequence[int]) -> str:
    return " ".join(f"t{number}" for number in ids)


def equal_steps(steps: Sequence[Sequence[Pair]]) -> list[list[Pair]]:
    """The same pairs in the same order, as many in each step as there are in the mean, which are
    sorted, the longest first.

    The number is a multiple of four where there are so many, so that it can be divided into
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
