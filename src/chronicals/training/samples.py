"""Answers of the model to a few rows before and after training, for the report."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chronicals.data import TokenStore
from chronicals.data.making.store import SIDE_COLUMN
from chronicals.generation import Trained, generate
from chronicals.models import input_device
from chronicals.training.report import Sample

logger = logging.getLogger(__name__)

_FILE = "samples.json"
"""File in the folder of a run: prompts with the answers before training.

A resumed run could not generate these answers again.
"""

NEW_TOKENS = 32
LONGEST_PROMPT = 512
OF_A_TEXT = 16
LOOKED_AT = 100
SECONDS = 1.0
"""Maximum seconds for all answers, before training and again after it.

An answer that is not finished by then is cut, and the remaining prompts get none.
"""

_SMALL = 200_000_000
"""Maximum number of parameters for which answers are cheap on a CPU."""


class Samples:
    """Greedy answers of a model, before and after training, to prompts of its held-out or training
    data.

    Args:
        count: number of prompts; 0 is used if answers take long: on a CPU, for a model that is not
            small.
        store: data that the prompts are taken from.
        output_dir: folder of the run.
    """

    def __init__(self, model: Any, tokenizer: Any, store: TokenStore, count: int, output_dir: Path):
        on_card = input_device(model).type == "cuda"
        cheap = on_card or sum(parameter.numel() for parameter in model.parameters()) <= _SMALL
        self.file = output_dir / _FILE
        self.asked = Trained(model, tokenizer, tuple(store.kinds))
        self.prompts = _prompts(store, count) if cheap else []
        self.answered: list[str] = []

    def before(self) -> None:
        """Generate the answers before training."""
        self.answered = self._answers(self.prompts)

    def keep(self) -> None:
        """Write the answers before training to the folder of the run, once it begins."""
        self.file.unlink(missing_ok=True)
        if self.answered:
            kept = [
                {"prompt": prompt, "before": answer}
                for prompt, answer in zip(self.prompts, self.answered)
            ]
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(kept))

    def after(self) -> list[Sample]:
        """Generate the answers after training, to prompts that have an answer before it."""
        if not self.prompts or not self.file.exists():
            return []
        kept = json.loads(self.file.read_text())
        answers = self._answers([one["prompt"] for one in kept])
        read = self.asked.tokenizer.decode
        return [
            Sample(read(one["prompt"]), one["before"], answer) for one, answer in zip(kept, answers)
        ]

    def _answers(self, prompts: Sequence[list[int]]) -> list[str]:
        """Return the texts for as many prompts as there is time for.

        Empty, with a log message, if the model cannot generate.
        """
        end = time.monotonic() + SECONDS
        texts = list[str]()
        try:
            for number, prompt in enumerate(prompts):
                left = end - time.monotonic()
                if left > 0:
                    each = left / (len(prompts) - number)
                    texts.append(
                        self.asked.ending.text(
                            generate(self.asked, prompt, NEW_TOKENS, seconds=each)
                        )
                    )
        except (
            Exception
        ) as error:  # the model's own code may raise anything, and answers are optional
            logger.info("the report has no sample answers: %s", str(error).partition("\n")[0])
            return []
        return texts


def _prompts(store: TokenStore, count: int) -> list[list[int]]:
    """Return the token ids of the first prompts, each up to its first trained token.

    A text that is trained whole contributes its beginning.
    """
    prompts: list[list[int]] = []
    sides = store.columns.get(SIDE_COLUMN)
    for number in range(min(len(store), LOOKED_AT)):
        if sides is not None and sides[number] != 0:
            continue
        ids, trained = store.whole_document(number)
        begin = int(trained.argmax()) if trained.any() else len(ids)
        begin = begin if begin > 1 or sides is not None else min(OF_A_TEXT, len(ids) - 1)
        if 0 < begin <= LONGEST_PROMPT and len(prompts) < count:
            prompts.append(ids[:begin].tolist())
    return prompts
