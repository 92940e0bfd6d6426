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

FILE = "samples.json"
"""In the folder of a run: prompts, and the answers before training, which a resumed run could
not make again.
"""

NEW_TOKENS = 32
LONGEST_PROMPT = 512
OF_A_TEXT = 16
LOOKED_AT = 100
SECONDS = 1.0
"""That all answers together may take before training, and again after it: an answer that is not
done by then ends there, and prompts that are left have none."""

SMALL = 200_000_000
"""Parameters up to which answers are cheap without a card."""


class Samples:
    """Greedy answers of a model in training to the first prompts of its held-out data, or of its
    training data.

    Args:
        count: of prompts; none where answers take long: without a card, of a model that is not
            small.
        store: where the prompts are from.
        output_dir: of the run.
    """

    def __init__(self, model: Any, tokenizer: Any, store: TokenStore, count: int, output_dir: Path):
        on_card = input_device(model).type == "cuda"
        cheap = on_card or sum(parameter.numel() for parameter in model.parameters()) <= SMALL
        self.file = output_dir / FILE
        self.asked = Trained(model, tokenizer, tuple(store.kinds))
        self.prompts = _prompts(store, count) if cheap else []
        self.answered: list[str] = []

    def before(self) -> None:
        """Answer before training."""
        self.answered = self._answers(self.prompts)

    def keep(self) -> None:
        """Write the answers of before beside the run, once it begins."""
        self.file.unlink(missing_ok=True)
        if self.answered:
            kept = [
                {"prompt": prompt, "before": answer}
                for prompt, answer in zip(self.prompts, self.answered)
            ]
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(kept))

    def after(self) -> list[Sample]:
        """Answer again; none where there was no answer before."""
        if not self.prompts or not self.file.exists():
            return []
        kept = json.loads(self.file.read_text())
        answers = self._answers([one["prompt"] for one in kept])
        read = self.asked.tokenizer.decode
        return [
            Sample(read(one["prompt"]), one["before"], answer) for one, answer in zip(kept, answers)
        ]

    def _answers(self, prompts: Sequence[list[int]]) -> list[str]:
        """Texts, as many as there is time for; none where the model cannot generate, which the
        log says.
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
        ) as error:  # of the model's own code: whatever it is, the run needs no answers
            logger.info("the report has no sample answers: %s", str(error).partition("\n")[0])
            return []
        return texts


def _prompts(store: TokenStore, count: int) -> list[list[int]]:
    """Token ids up to the first that is trained, of the first of several answers; of a text,
    which is trained whole, its beginning."""
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
