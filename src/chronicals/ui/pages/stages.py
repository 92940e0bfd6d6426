"""A page for each stage: its data and main fields, the plan, its start, and its newest run."""

from __future__ import annotations

import shutil
from functools import partial

from nicegui import ui

from chronicals.config import ConfigurationError
from chronicals.ui.form import RecipeDraft, recipe_draft
from chronicals.ui.frame import card, command_line, frame, heading
from chronicals.ui.job_panel import card_and_start
from chronicals.ui.jobs import typed_command
from chronicals.ui.panels import PlanPanel, RunPanel
from chronicals.ui.place import replace_file
from chronicals.ui.recipes import Faults
from chronicals.ui.runs import RunEntry
from chronicals.ui.services import OBJECTIVES, Services
from chronicals.ui.words import Say

MAIN_FIELDS = (
    "model",
    "data",
    "validation_data",
    "output_dir",
    "max_steps",
    "num_epochs",
    "learning_rate",
    "batch_size",
    "gradient_accumulation_steps",
    "max_seq_length",
    "use_lora",
    "lora_rank",
    "quantization",
    "validation_split",
    "eval_steps",
    "save_steps",
)
"""Fields of every stage that most recipes set."""

REWARD_FIELDS = ("rewards", "reward_aggregation", "reward_timeout")
REWARDED = ("grpo", "rloo")
"""Objectives whose answers rewards score."""


def add_stages(services: Services) -> None:
    """Add the pages."""

    @ui.page("/train/{objective}")
    def stage(objective: str) -> None:
        if objective not in OBJECTIVES:
            ui.navigate.to("/")
            return
        with frame(services, f"stage.{objective}") as say:
            heading(say(f"stage.{objective}.title"), say(f"stage.{objective}.about"))
            draft = recipe_draft(services, objective, say)
            with ui.element("div").classes("halves"):
                with ui.element("div").classes("half"):
                    _build_form(services, draft, say)
                with ui.element("div").classes("half"):
                    plan = PlanPanel(services, draft, say)
                    plan.build()
                    StartPanel(services, draft, say, plan).build()
            ui.label(say("stage.newest")).classes("section").props('role="heading" aria-level="2"')
            RunPanel(services, partial(newest_run, services, objective), say).build()
            draft.follow()


def _build_form(services: Services, draft: RecipeDraft, say: Say) -> None:
    fields = draft.recipe_form.fields
    names = [*MAIN_FIELDS, *(REWARD_FIELDS if draft.name in REWARDED else ())]
    with card(say("stage.fields")):
        draft.build(fields[name] for name in names)
        ui.link(say("stage.all_fields"), f"/configuration/{draft.name}")
    settings = services.settings_of(draft.name)
    if settings:
        with card(say("stage.settings", name=draft.name)):
            draft.build(settings.values())


def newest_run(services: Services, objective: str) -> RunEntry | None:
    """Return the run of an objective that was started last from the page; None if none was."""
    for job in services.jobs.all():
        if job.kind == objective and job.arguments[0] == "train" and job.output:
            return services.runs.named(job.output)
    return None


class StartPanel:
    """Check and start of a draft: the command, the card, and what is wrong before it begins."""

    def __init__(self, services: Services, draft: RecipeDraft, say: Say, plan: PlanPanel):
        self.services = services
        self.draft = draft
        self.say = say
        self.plan = plan

    def build(self) -> None:
        """Build the panel."""
        with card(self.say("start.title")):
            self.command = command_line()
            with ui.element("div").classes("row"):
                self.card = card_and_start(self.services, self.say, self.start)
                check = ui.button(self.say("start.check"), on_click=self.check)
                check.props("outline no-caps")
            if self.services.cards() == ["cpu"]:
                ui.label(self.say("start.no_card")).classes("quiet")
            self.said = ui.label().classes("pre said").props('role="status"')
        self.draft.changed.append(self._show_command)
        self._show_command()

    def _show_command(self) -> None:
        name = f".chronicals-page/drafts/{self.draft.name}.yaml"
        self.command.set_text(typed_command(["train", name]))

    def _faults(self) -> str:
        """Return what keeps the draft from starting; empty if nothing does."""
        self.draft.strict = True
        faults = self.draft.show_faults()
        if faults is not None:
            return str(faults)
        missing = missing_data(self.services, self.draft)
        trains_on_card = self.services.cards() != ["cpu"]
        if not missing and trains_on_card and self.plan.fits is False:
            return self.say("start.too_much")
        return missing

    def start(self) -> None:
        """Write the recipe, and put the run into the queue of its card."""
        wrong = self._faults()
        self.said.classes(**{"add" if wrong else "remove": "warning"})
        if wrong:
            self.said.set_text(wrong)
            return
        start_run(self.services, self.draft, self.card.value)
        self.said.set_text(self.say("start.started"))

    async def check(self) -> None:
        """Run ``chronicals train --check`` on the draft, and show what it says."""
        wrong = self._faults()
        if wrong:
            self.said.set_text(wrong)
            return
        file = self.services.place.kept / "drafts" / f"{self.draft.name}.yaml"
        replace_file(file, self.draft.recipe_form.yaml(self.draft.texts))
        self.said.set_text(self.say("start.checking"))
        answer = await self.services.commands.run(
            ["train", self.services.place.name(file), "--check"]
        )
        self.said.set_text(f"{answer.errors}\n{answer.output}".strip())


def missing_data(services: Services, draft: RecipeDraft) -> str:
    """Return what is said of data that look like a file and are not there; empty if all are."""
    recipe = draft.recipe_form.recipe(draft.texts)
    for source in recipe.sources[0] if isinstance(recipe.sources[0], list) else [recipe.sources[0]]:
        path = str(getattr(source, "path", source))
        is_file = path.endswith((".jsonl", ".json", ".csv", ".parquet", ".txt"))
        if is_file and not any(mark in path for mark in "*?[") and "://" not in path:
            try:
                if not services.place.inside(path).exists():
                    return f"data={path!r}: {draft.say('start.no_data')}"
            except ConfigurationError as error:
                return str(error)
    return ""


def start_run(services: Services, draft: RecipeDraft, card_name: str) -> None:
    """Write the recipe of a draft into the folder of a new job, and queue the job.

    Raises:
        Faults: the recipe is wrong.
    """
    texts = draft.texts
    output = texts.get("output_dir") or services.runs.free_folder(draft.name)
    recipe = draft.recipe_form.recipe({**texts, "output_dir": output})
    if card_name not in services.cards():
        raise Faults({}, (f"card={card_name!r}: no such card",))
    folder = services.jobs.new_folder(draft.name)
    try:
        recipe.to_yaml(folder / "recipe.yaml")
    except OSError:
        shutil.rmtree(folder)
        raise
    arguments = ["train", services.place.name(folder / "recipe.yaml")]
    name = services.place.name(services.place.inside(output))
    services.queues.add(services.jobs.create(folder, draft.name, arguments, card_name, name))
