"""Pairs of answers to one prompt as a unit of work, for DPO and ORPO.

Built-in pairs are random words. The length of a row, prompt and answer, is lognormal. The prompt is
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
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from chronicals.benchmark.shapes import (
    LENGTH_SPREAD,
    MEDIAN_LENGTH,
    SHORTEST_LENGTH,
    BuiltIn,
    word_tokenizer,
    zipf_ids,
)
from chronicals.benchmark.work import Document, Work
from chronicals.config import ConfigurationError

PAIR_OBJECTIVES = ("dpo", "orpo")
"""Objectives over pairs that are measured."""

PROMPT_SHARES = {"pairs-30": 0.3, "pairs-50": 0.5, "pairs-70": 0.7}
"""Built-in pairs, and the prompt's share of a row's tokens."""

ANSWER_SPREAD = 0.3
"""Largest deviation of an answer's length from the mean of both answers, as a share of it."""

TOKENS_BESIDE_ROWS = 4
"""Tokens of an item besides two whole rows: the ends of both answers, and tokens repeated because
the prompt is shared."""

DPO_LEARNING_RATES = {"full": 5e-8, "lora": 2e-6, "qlora": 2e-6}
"""Learning rates of DPO by mode. It sums over an answer what SFT averages over a step.

They are so small that weights in bf16, which lose such updates, stay within the tolerance, and so
large that adapters move the loss by more than that. ORPO has those of SFT.
"""

_DEFAULT_BETA = 0.1
"""β of DPO and λ of ORPO if none is set: the default of ours and of TRL."""


@dataclass(frozen=True)
class Pair:
    """Token ids of a prompt and of both answers, ends included."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    @property
    def rows(self) -> tuple[list[int], list[int]]:
        """Prompt and answer of both sides, the chosen one first."""
        return self.prompt + self.chosen, self.prompt + self.rejected

    @property
    def tokens(self) -> int:
        """Tokens of both rows, the prompt counted in each."""
        return 2 * len(self.prompt) + len(self.chosen) + len(self.rejected)

    @property
    def longest(self) -> int:
        """Tokens of the longer row."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


@dataclass(frozen=True)
class PairSteps:
    """The pairs of an arm's first steps, for its reference.

    Attributes:
        steps: pairs of each micro-batch of each step; a loss is the mean over the micro-batches.
        prompt_is_trained: True if the cross-entropy of ORPO includes the prompts, as in TRL.
    """

    steps: Sequence[Sequence[Sequence[Pair]]]
    prompt_is_trained: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the steps as JSON values."""
        steps = []
        for step in self.steps:
            micro_batches = []
            for pairs in step:
                micro_batches.append([[pair.prompt, pair.chosen, pair.rejected] for pair in pairs])
            steps.append(micro_batches)
        return {"prompt_is_trained": self.prompt_is_trained, "steps": steps}

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> PairSteps:
        """Return the steps that ``to_json`` described."""
        steps = []
        for step in fields["steps"]:
            micro_batches = []
            for pairs in step:
                micro_batches.append([Pair(*sides) for sides in pairs])
            steps.append(micro_batches)
        return cls(steps, fields["prompt_is_trained"])


@dataclass(frozen=True)
class PairWork(Work):
    """A work whose steps hold pairs of answers."""

    kind: ClassVar[str] = "pairs"
    built_in: ClassVar[tuple[str, ...]] = tuple(PROMPT_SHARES)
    store_options: ClassVar[dict[str, Any]] = {"kinds": ("preference",)}

    @property
    def objective(self) -> str:
        """Name of the objective, of ``PAIR_OBJECTIVES``."""
        return str(self.fields["objective"])

    @property
    def beta(self) -> float:
        """β of DPO or λ of ORPO.

        Raises:
            ConfigurationError: other settings of the objective are set, which not every arm has.
        """
        settings = dict(self.config().sections.get(self.objective, {}))
        beta = settings.pop("beta", _DEFAULT_BETA)
        if settings:
            name, value = next(iter(settings.items()))
            raise ConfigurationError(
                f"{self.objective}.{name}={value!r}: not every arm has it; a benchmark takes "
                f"{self.objective}.beta alone"
            )
        return float(beta)

    @property
    def reference_policy(self) -> str:
        """Source of every arm's reference policy, in words; empty without one."""
        if self.objective != "dpo":
            return ""
        if self.adapts:
            return "reference: adapters off, within the step"
        return "reference's log-probabilities stored before the first step"

    @property
    def tokenizer(self) -> str:
        """Folder of the tokenizer of words for built-in pairs, else the model's."""
        return str(self.folder / "tokenizer") if self.data in PROMPT_SHARES else self.model

    def write_tokenizer(self) -> None:
        """Write the tokenizer of words, if the pairs are built in."""
        if self.data in PROMPT_SHARES:
            from transformers import AutoConfig

            from chronicals.model_shape import ModelShape

            vocabulary = ModelShape.of(AutoConfig.from_pretrained(self.model)).vocabulary
            word_tokenizer(vocabulary).save_pretrained(self.tokenizer)

    def pairs_by_step(self, count: int, first: int = 0) -> Iterator[list[Pair]]:
        """Yield the pairs of each of ``count`` steps of ours, from number ``first`` on.

        Raises:
            ConfigurationError: more or less than the answer of a row is trained.
        """
        from chronicals.data.making.store import SIDE_COLUMN

        stream = self.stream()
        store = stream.store
        sides = store.columns[SIDE_COLUMN]
        size = stream.packs_a_step
        for step in range(first, first + count):
            documents = np.concatenate(stream.packs_of(step * size))
            pairs = []
            for first_answer in documents[sides[documents] == 0].tolist():
                rows = []
                for document in (first_answer, first_answer + 1):  # both answers are neighbours
                    ids, trained = store.whole_document(document)
                    prompt_end = int(np.argmax(trained))
                    if not trained[prompt_end:].all():
                        raise ConfigurationError(
                            "data: trains more or less than one whole answer of a row, which not "
                            "every arm can"
                        )
                    rows.append((ids[:prompt_end].tolist(), ids[prompt_end:].tolist()))
                (prompt, chosen), (other, rejected) = rows
                if prompt != other:
                    raise ConfigurationError("data: both answers of a pair must follow one prompt")
                pairs.append(Pair(prompt, chosen, rejected))
            yield pairs

    def documents_by_step(self, count: int) -> Iterator[list[Document]]:
        """Yield both rows of the pairs of each step, their answers labelled."""
        for pairs in self.pairs_by_step(count):
            documents = []
            for pair in pairs:
                prompt = len(pair.prompt)
                for row in pair.rows:
                    labels = np.array([-100] * prompt + row[prompt:])
                    documents.append(Document(np.array(row), labels))
            yield documents

    def real_tokens(self, first: int, computed: Sequence[int]) -> list[int]:
        """Return the tokens of both rows of each step's pairs, the prompt counted in each."""
        tokens = []
        for pairs in self.pairs_by_step(len(computed), first):
            tokens.append(sum(pair.tokens for pair in pairs))
        return tokens

    @functools.cached_property
    def described(self) -> dict[str, Any]:
        """The objective, and sizes of the pairs; a record asks for it after every arm."""
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
        """Return sizes and fields as for documents, with wider packs.

        Packs are twice as wide and half as many, because an item has two answers.
        """
        usual = super().usual_fields(shape, mode, fields)
        if shape:
            usual |= {
                "batch_size": max(shape.batch_size // 2, 1),
                "max_seq_length": 2 * shape.max_seq_length,
            }
        if fields["objective"] == "dpo":
            usual["learning_rate"] = DPO_LEARNING_RATES[mode]
        return usual

    def write_documents(self, vocabulary: int) -> None:
        """Write the built-in pairs."""
        share = PROMPT_SHARES[self.data]
        width = self.config().max_seq_length
        rows = random_pairs(share, self.written_slots, width, vocabulary)
        self.documents.write_text("".join(json.dumps(row) + "\n" for row in rows))


def random_pairs(
    share: float, slots: int, width: int, vocabulary: int, seed: int = 1
) -> list[dict[str, str]]:
    """Make rows of prompt, chosen and rejected answer, as texts of ``word_tokenizer``.

    Lengths of rows are lognormal as those of ragged documents, and at most half of ``width``, so
    that no pair is cut. Words are rarer in rejected answers than in chosen ones, so there is
    something to learn.

    Args:
        share: of the prompt in a row, in the mean of both rows.
        slots: tokens of all rows at least, with the prompt of a pair counted once.
        width: tokens of a pack.
        vocabulary: number of words and special tokens.
        seed: of the generator.
    """
    generator = np.random.default_rng(seed)
    rows: list[dict[str, str]] = []
    longest = width // 2 - TOKENS_BESIDE_ROWS
    shortest = min(SHORTEST_LENGTH, longest // 8)
    median = min(MEDIAN_LENGTH, longest // 2)
    while slots > 0:
        drawn = int(np.exp(generator.normal(math.log(median), LENGTH_SPREAD)))
        length = min(max(drawn, shortest), longest)
        prompt = min(max(round(share * length), 1), length - 2)
        answer = length - prompt
        more = min(round(generator.uniform(-ANSWER_SPREAD, ANSWER_SPREAD) * answer), answer - 1)
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
