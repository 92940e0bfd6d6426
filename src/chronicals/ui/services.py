"""Services of a server, which all of its pages share; none of them holds what a page shows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from chronicals.config.recipe import METRICS_FILE
from chronicals.ui.chats import Chats
from chronicals.ui.commands import CommandEnd, Commands
from chronicals.ui.drafts import Drafts
from chronicals.ui.fields import FormField, section_fields
from chronicals.ui.jobs import Jobs
from chronicals.ui.metrics import Metrics
from chronicals.ui.place import Place, read_record, write_record
from chronicals.ui.queues import Queues
from chronicals.ui.recipes import RecipeForm, fields_of
from chronicals.ui.runs import RunEntry, Runs
from chronicals.ui.words import Say, words_of

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_STARTS = 1.0
"""Seconds between looks at the queues."""

OBJECTIVES = (
    "pretraining",
    "sft",
    "dpo",
    "orpo",
    "kto",
    "grpo",
    "distill",
    "reward",
    "ipo",
    "simpo",
    "cpo",
    "rloo",
)
"""Stages in the order of the page: what comes first in a model's life comes first."""


@dataclass
class Services:
    """Services that the pages of a place share.

    Attributes:
        place: the root.
        remote_code: True if a model's own code may run.
        in_words: puts the fields that a message names into the form that they have in a recipe.
        schemas: of the objectives' settings, as soon as they were read.
        machine: what ``chronicals doctor --json`` says, likewise.
    """

    place: Place
    remote_code: bool = False
    in_words: Callable[[str], str] = str
    schemas: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    _metrics: dict[str, Metrics] = field(default_factory=dict)

    @cached_property
    def jobs(self) -> Jobs:
        """The jobs of the place."""
        return Jobs(self.place)

    @cached_property
    def queues(self) -> Queues:
        """The queues of the cards."""
        return Queues(self.jobs)

    @cached_property
    def runs(self) -> Runs:
        """The runs in the root."""
        return Runs(self.place, self.jobs)

    @cached_property
    def drafts(self) -> Drafts:
        """Texts that were typed into forms."""
        return Drafts(self.place)

    @cached_property
    def chats(self) -> Chats:
        """The conversation with models."""
        return Chats(self.place)

    @cached_property
    def commands(self) -> Commands:
        """The process of short commands."""
        return Commands(self.place.root)

    async def begin(self) -> None:
        """Look after the queues from now on, and learn what takes seconds to import."""
        self._tasks = [asyncio.create_task(self._start_jobs()), asyncio.create_task(self._learn())]

    async def end(self) -> None:
        """End the process of short commands; jobs go on."""
        for task in self._tasks:
            task.cancel()
        await self.chats.end()
        await self.commands.stop()

    async def _start_jobs(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                self.queues.advance()
            await asyncio.sleep(SECONDS_BETWEEN_STARTS)

    async def _learn(self) -> None:
        found: CommandEnd = await self.commands.run_module("chronicals.ui.settings")
        if found.code == 0:
            self.schemas = json.loads(found.output)
        else:
            logger.warning("settings of objectives cannot be read: %s", found.error)
        doctor = await self.commands.run(["doctor", "--json", "--no-self-test"])
        self.machine = doctor.values or {"error": doctor.error}

    def settings_of(self, objective: str) -> dict[str, FormField]:
        """Return the settings of an objective; none before they were read."""
        schema = self.schemas.get("objectives", {}).get(objective, {})
        return section_fields(objective, schema)

    def form(self, objective: str) -> RecipeForm:
        """Return the form of an objective."""
        fields = fields_of(self.settings_of(objective))
        return RecipeForm(self.place, objective, fields, self.remote_code, self.in_words)

    def cards(self) -> list[str]:
        """Return the cards that a job may wait for; ``cpu`` where there is none."""
        found = self.machine.get("machine", {})
        numbers = [name.split()[1] for name in found if name.startswith("card ")]
        return numbers or ["cpu"]

    def metrics(self, run: RunEntry) -> Metrics:
        """Return the curves of a run, read up to the last line."""
        known = self._metrics.setdefault(run.name, Metrics(run.folder / METRICS_FILE))
        known.read_on()
        return known

    @property
    def preferences(self) -> dict[str, Any]:
        """Language, and dark or light, of this place."""
        return read_record(self.place.kept / "preferences.json", {})

    def prefer(self, **chosen: Any) -> None:
        """Keep preferences."""
        write_record(self.place.kept / "preferences.json", {**self.preferences, **chosen})

    def words(self) -> Say:
        """Return the words of the language that was chosen."""
        return words_of(self.preferences.get("language", "en"))
