"""The tuner: what is tried, the trials of a study, and the best one laid over a draft."""

from __future__ import annotations

from functools import partial
from typing import Any

from nicegui import ui

from chronicals.ui.form import RecipeDraft, recipe_draft
from chronicals.ui.frame import card, command_line, frame, heading, tell_missing
from chronicals.ui.job_panel import card_and_start, free_name, newest_job, show_job
from chronicals.ui.jobs import last_lines, typed_command
from chronicals.ui.pages.stages import missing_data
from chronicals.ui.recipes import Faults
from chronicals.ui.services import OBJECTIVES, Services
from chronicals.ui.studies import StudyFolder, studies
from chronicals.ui.words import Say

LINES_OF_A_STUDY = 20
"""Lines at the end of a study's output: each trial has a line of its own in the table."""

FIELDS = ("model", "data", "validation_data", "validation_split", "max_steps", "tune")
"""Fields of a recipe that a study needs; the others are those of its stage."""

CHOICE = "tuner"
"""Draft with the stage that is tuned."""


def add_tuner(services: Services) -> None:
    """Add the page."""

    @ui.page("/tuner")
    def tuner() -> None:
        with frame(services, "tuner") as say:
            heading(say("nav.tuner"), say("tuner.about"))
            tell_missing(services, "tune")
            objective = services.drafts.texts(CHOICE).get("objective", "sft")
            draft = recipe_draft(services, objective, say)
            panel = _TunerPanel(services, draft, say)
            panel.build()
            draft.follow()


class _TunerPanel:
    """Form of a study, and its trials, read each second."""

    def __init__(self, services: Services, draft: RecipeDraft, say: Say):
        self.services = services
        self.draft = draft
        self.say = say
        self.seen: Any = None

    def build(self) -> None:
        say = self.say
        with card():
            names = {name: say(f"nav.stage.{name}") for name in OBJECTIVES}
            choice = ui.select(names, value=self.draft.name, label=say("configuration.objective"))
            choice.props("outlined dense options-dense").classes("run-choice")
            choice.on_value_change(lambda event: self._choose(event.value))
            fields = self.draft.recipe_form.fields
            self.draft.build(fields[name] for name in FIELDS)
            ui.link(say("stage.all_fields"), f"/configuration/{self.draft.name}")
            self.command = command_line(typed_command(["tune", "recipe.yaml"]))
            with ui.element("div").classes("row"):
                self.card = card_and_start(self.services, say, self.start)
            self.said = ui.label().classes("warning pre").props('role="status"')
        self.jobs = ui.element("div").classes("rows")
        self.studies = ui.element("div").classes("rows")
        self.update()
        ui.timer(1.0, self.update)

    def _choose(self, objective: str) -> None:
        self.services.drafts.fill_in(CHOICE, "objective", objective)
        ui.navigate.reload()

    def start(self) -> None:
        """Write the recipe, and put the study into the queue of its card."""
        self.draft.strict = True
        faults = self.draft.show_faults()
        wrong = missing_data(self.services, self.draft) if faults is None else str(faults)
        if not wrong and "tune" not in self.draft.texts:
            wrong = self.say("tuner.nothing")
        self.said.set_text(wrong)
        if wrong:
            return
        study = free_name(self.services, "studies", "")
        texts = {**self.draft.texts, "output_dir": f"{study}-run"}
        try:
            recipe = self.draft.recipe_form.recipe(texts)
        except Faults as found:
            self.said.set_text(str(found))
            return
        jobs = self.services.jobs
        folder = jobs.new_folder("tune")
        recipe.to_yaml(folder / "recipe.yaml")
        name = self.services.place.name(folder / "recipe.yaml")
        arguments = ["tune", name, f"--study={study}"]
        self.services.queues.add(jobs.create(folder, "tune", arguments, self.card.value, study))
        self.update()

    def update(self) -> None:
        """Show the studies, and the job that works on the newest."""
        job = newest_job(self.services, "tune")
        found = studies(self.services.place)
        trials = {study.name: study.trials for study in found}
        lines = [] if job is None else last_lines(job.log)[-LINES_OF_A_STUDY:]
        seen = (job and job.name, job and job.state, lines, trials)
        if seen == self.seen:
            return
        self.seen = seen
        self.jobs.clear()
        if job is not None:
            with self.jobs:
                show_job(job, lines, self.say)
        self.studies.clear()
        with self.studies:
            if not found:
                ui.label(self.say("tuner.none")).classes("quiet")
            for study in found:
                self._show_study(study)

    def _show_study(self, study: StudyFolder) -> None:
        best = study.best_first()
        with card(study.name):
            rows = [trial_row(trial) for trial in study.trials]
            with ui.element("div").classes("row"):
                if best:
                    text = self.say("tuner.best", number=best[0]["number"], value=best[0]["value"])
                    ui.label(text).classes("grow")
                    apply = ui.button(
                        self.say("tuner.apply"), on_click=partial(self.apply, best[0]["fields"])
                    )
                    apply.props("outline no-caps dense")
            if rows:
                columns = [
                    {"name": name, "label": self.say(f"tuner.{name}"), "field": name}
                    | {"align": "left"}
                    for name in rows[0]
                ]
                with ui.element("div").classes("table-box"):
                    ui.table(columns=columns, rows=rows).props("flat dense").classes("table")

    def apply(self, values: dict[str, Any]) -> None:
        """Lay the fields of a trial over the draft, without what was tuned."""
        form = self.draft.recipe_form
        texts = {name: form.fields[name].text(value) for name, value in values.items()}
        kept = {name: text for name, text in self.draft.texts.items() if name != "tune"}
        self.services.drafts.write(self.draft.name, {**kept, **texts})
        ui.navigate.to(f"/train/{self.draft.name}")


def trial_row(trial: dict[str, Any]) -> dict[str, str]:
    """Return the row of a trial in the table."""
    params = ", ".join(f"{name}={value}" for name, value in trial["params"].items())
    again = trial["repeats"]
    value = trial["value"]
    return {
        "trial": str(trial["number"]) + ("" if again is None else f" (= {again})"),
        "values": params,
        "state": trial["state"],
        "score": "" if value is None else f"{value:.5g}",
        "reason": trial["reason"],
    }
