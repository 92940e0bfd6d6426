"""All runs with their curves laid over each other, and one run by itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from urllib.parse import quote

from nicegui import ui

from chronicals.config import ConfigurationError
from chronicals.ui.charts import COLOURS, drawn_metrics, line_chart
from chronicals.ui.frame import card, chip, frame, heading
from chronicals.ui.panels import RunPanel, chart_box, duration, redraw, run_actions
from chronicals.ui.runs import RunEntry
from chronicals.ui.services import Services
from chronicals.ui.words import Say

COMPARED = "compared"
"""Draft with the names of the runs whose curves are shown."""

MOST_COMPARED = 6
"""As many as there are colours."""

MOST_LISTED = 200
"""Runs in the table, the last changed ones."""


def add_runs(services: Services) -> None:
    """Add the pages."""

    @ui.page("/")
    def runs() -> None:
        with frame(services, "runs") as say:
            heading(say("nav.runs"), say("runs.about"))
            _RunTable(services, say).build()

    @ui.page("/run")
    def run(name: str = "") -> None:
        with frame(services, "runs") as say:
            try:
                services.runs.named(name)
            except ConfigurationError as error:
                heading(say("runs.missing"))
                ui.label(str(error)).classes("quiet")
                return
            heading(name)
            RunPanel(services, lambda: services.runs.named(name), say).build()
            _checkpoints(services, name, say)


def _checkpoints(services: Services, name: str, say: Say) -> None:
    found = services.runs.named(name).checkpoints
    if found:
        with card(say("run.checkpoints")), ui.element("div").classes("row"):
            for checkpoint in found[:12]:
                path = f"{name}/checkpoints/{checkpoint}"
                ui.link(checkpoint, f"/chat?model={quote(path)}").classes("mono")


class _RunTable:
    """Table of the runs, queues above it and curves below, all read each second."""

    def __init__(self, services: Services, say: Say):
        self.services = services
        self.say = say
        self.listed: tuple = ()
        self.drawn: tuple = ()
        self.boxes: dict[str, ui.echart] = {}

    def build(self) -> None:
        self.queue = ui.element("div")
        with card():
            self.table = ui.element("div").classes("runs").props('role="table"')
        self.charts = ui.element("div").classes("charts")
        self.update()
        ui.timer(1.0, self.update)

    def update(self) -> None:
        runs = self.services.runs.all()[:MOST_LISTED]
        metrics = {run.name: self.services.metrics(run) for run in runs[:MOST_COMPARED]}
        chosen = self._chosen(runs)
        by_name = {run.name: run for run in runs}
        metrics |= {name: self.services.metrics(by_name[name]) for name in chosen}
        states = {run.name: run.state for run in runs}
        waiting = self.services.queues.waiting()
        steps = {name: (one.step, one.value("loss")) for name, one in metrics.items()}
        listed = (states, steps, chosen, waiting)
        if listed != self.listed:
            self.listed = listed
            self._show_queue(waiting)
            self._show_table(runs, states, chosen)
        self._show_charts(chosen)

    def _chosen(self, runs: list[RunEntry]) -> list[str]:
        """Return the runs that are compared: the newest one before any was chosen."""
        texts = self.services.drafts.texts(COMPARED)
        names = {run.name for run in runs}
        if not texts:
            return [run.name for run in runs[:1]]
        return [name for name in texts if name in names][:MOST_COMPARED]

    def _choose(self, name: str, chosen: bool) -> None:
        names = self._chosen(self.services.runs.all())
        names = [one for one in names if one != name] + ([name] if chosen else [])
        self.services.drafts.write(
            COMPARED, dict.fromkeys(names[-MOST_COMPARED:], "yes") or {"": ""}
        )
        self.update()

    def _show_queue(self, waiting: dict[str, list[str]]) -> None:
        self.queue.clear()
        if not any(waiting.values()):
            return
        with self.queue, card(self.say("queue.title")):
            ui.label(self.say("queue.about")).classes("quiet")
            for card_name, names in waiting.items():
                for number, name in enumerate(names, 1):
                    job = self.services.jobs.named(name)
                    if job is None or job.state != "waiting":
                        continue
                    with ui.element("div").classes("row"):
                        ui.label(f"{card_name} · {number}").classes("quiet")
                        ui.label(job.shown).classes("mono grow")
                        ui.button(self.say("queue.remove"), on_click=job.stop).props(
                            "flat no-caps dense"
                        )

    def _show_table(
        self, runs: list[RunEntry], states: Mapping[str, str], chosen: list[str]
    ) -> None:
        self.table.clear()
        with self.table:
            if not runs:
                ui.label(self.say("runs.none")).classes("quiet")
                ui.link(self.say("runs.begin"), "/train/sft")
                return
            for run in runs:
                with ui.element("div").classes("run-row").props('role="row"'):
                    box = ui.checkbox(value=run.name in chosen).props("dense")
                    box.props(f'aria-label="{self.say("runs.compare")}"')
                    if run.name in chosen:
                        box.props("color=none").style(
                            f"color:{COLOURS[chosen.index(run.name) % len(COLOURS)]}"
                        )
                    box.on_value_change(
                        lambda event, name=run.name: self._choose(name, event.value)
                    )
                    ui.link(run.name, f"/run?name={quote(run.name)}").classes("run-name")
                    ui.label(run.objective).classes("quiet objective")
                    chip(states[run.name], self.say)
                    ui.label(self._progress(run)).classes("number progress")
                    ui.label(self._age(run)).classes("quiet age")
                    with ui.element("div").classes("row actions"):
                        run_actions(self.services, run, self.say)

    def _progress(self, run: RunEntry) -> str:
        metrics = self.services.metrics(run)
        loss = metrics.value("loss")
        step = self.say("runs.step", step=f"{metrics.step:,}")
        return step if loss is None else f"{step} · {loss:.4f}"

    def _age(self, run: RunEntry) -> str:
        seconds = time.time() - run.changed
        if seconds < 86_400:
            return self.say("runs.ago", time=duration(seconds))
        return time.strftime("%Y-%m-%d", time.localtime(run.changed))

    def _show_charts(self, chosen: list[str]) -> None:
        found = {name: self.services.metrics(self.services.runs.named(name)) for name in chosen}
        state = tuple((name, one.step, one.last) for name, one in found.items())
        if state == self.drawn:
            return
        self.drawn = state
        names = drawn_metrics(list(found.values()))
        curves = {
            metric: {name: one.curve(metric) for name, one in found.items() if metric in one.curves}
            for metric in names
        }
        if list(self.boxes) != names:
            self.charts.clear()
            with self.charts:
                self.boxes = {metric: chart_box(metric, curves[metric]) for metric in names}
            return
        for metric, chart in self.boxes.items():
            redraw(chart, line_chart(curves[metric]))
