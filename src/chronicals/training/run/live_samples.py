"""Answers of a run as it goes on: greedy ones to the prompts of the report, in ``samples.jsonl``.

They show people who follow the run what it has learned so far. Where answers are drawn to be trained
on, those are in the file instead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from chronicals.generation import Request, Sampling
from chronicals.training.errors import TrainingError
from chronicals.training.rollouts.samples import SamplesFile
from chronicals.training.rollouts.turns import Turns
from chronicals.training.run.report import NEW_TOKENS, SECONDS, Samples
from chronicals.training.session import Session

logger = logging.getLogger(__name__)

SHARE = 0.01
"""Largest share of the time of a run that its answers take."""


class LiveSamples:
    """Answers between the steps of a run, where it pauses to evaluate or to save.

    Args:
        session: trains the model; answers are generated inside its ``stepping``.
        samples: prompts of the report, with their answers before training.
    """

    def __init__(self, session: Session, samples: Samples):
        self.file = SamplesFile(session.config.output_dir, "step")
        self.trained = samples.asked
        self.prompts = samples.prompts
        self.before = samples.answered
        self.due = 0.0
        self.turns: Turns | None = None
        if session.ranks.writer and self.prompts and not session.objective.draws_answers:
            try:
                self.turns = Turns(session)
            except TrainingError as error:
                logger.info("no answers are shown while the run goes on: %s", error)

    def begin(self) -> None:
        """Write the answers before training, as those of step 0."""
        if self.turns is not None and self.before:
            self._write(0, self.before)

    def after_step(self, step: int) -> None:
        """Write the answers after a step, if earlier ones took no more than their share of the time."""
        began = time.monotonic()
        if self.turns is None or began < self.due:
            return
        ending = self.trained.ending
        requests = [
            Request(prompt, NEW_TOKENS, Sampling(), number=number, ending=ending)
            for number, prompt in enumerate(self.prompts)
        ]
        try:
            found = self.turns.generate(requests, seconds=SECONDS)
        # The model's own code may raise anything, and answers are optional.
        except Exception as error:
            reason = str(error).partition("\n")[0]
            logger.info("no more answers are shown while the run goes on: %s", reason)
            self.turns = None
            return
        self._write(step, [ending.text(answer.tokens) for (answer,) in found])
        ended = time.monotonic()
        self.due = ended + (ended - began) / SHARE

    def _write(self, step: int, answers: Sequence[str]) -> None:
        read = self.trained.tokenizer.decode
        lines = [
            {"prompt": read(prompt), "answers": [{"text": answer}]}
            for prompt, answer in zip(self.prompts, answers)
        ]
        self.file.write(step, lines)
