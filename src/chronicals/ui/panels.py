"""Panels that several pages have: the plan of a recipe, its start, and a run as it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

import yaml
from nicegui import ui

from chronicals.ui.charts import TITLES, drawn_metrics, line_chart
from chronicals.ui.form import RecipeDraft
from chronicals.ui.frame import card, chip, command_line
from chronicals.ui.jobs import Job, last_lines, typed_command
from chronicals.ui.metrics import Curve, Metrics
from chronicals.ui.place import replace_file
from chronicals.ui.recipes import Faults
from chronicals.ui.runs import SAMPLES, RunEntry, last_records
from chronicals.ui.services import Services
from chronicals.ui.words import Say

SECONDS_OF_STILLNESS = 0.5
"""A plan is computed when nothing was typed for so long."""

SHOWN_SAMPLES = 2
"""Prompts whose last answers are shown."""

SHOWN_LINES = 200
"""Lines at the end of an output that a page shows; the whole one is behind a link."""


def amount(count: float) -> str:
    """Return a count with three digits and its unit: ``1.24 B``."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g}"


def size(count: float) -> str:
    """Return bytes with three digits and their unit: ``1.24 GB``."""
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def short_time(seconds: float) -> str:
    """Return seconds with three digits and their unit: ``12.4 ms``."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def duration(seconds: float) -> str:
    """Return seconds as ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


@dataclass
class PlanPanel:
    """Parameters, memory and time of a draft, as ``chronicals plan`` tells them.

    Attributes:
        fits: what the plan of the draft as it stands says; None before it is there.
    """

    services: Services
    draft: RecipeDraft
    say: Say

    def build(self) -> None:
        """Build the panel, which follows the draft."""
        self.fits: bool | None = None
        self._due: float | None = None
        self._number = 0
        with card(self.say("plan.title"), "plan"):
            self.command = command_line()
            self.body = ui.element("div").classes("plan-body")
        self.draft.changed.append(self._touch)
        ui.timer(0.2, self._when_still)
        self._touch()

    def _touch(self) -> None:
        self.fits = None
        self._due = time.monotonic() + SECONDS_OF_STILLNESS

    async def _when_still(self) -> None:
        if self._due is None or time.monotonic() < self._due:
            return
        self._due = None
        self._number += 1
        number = self._number
        texts = self.draft.texts
        if "model" not in texts:
            self._say(self.say("plan.needs_model"))
            return
        file = self.services.place.kept / "drafts" / f"{self.draft.name}.yaml"
        try:
            self.draft.recipe_form.recipe({"data": "not-read", **texts})
            values = self.draft.recipe_form.values(texts)
        except Faults as faults:
            self._say(str(faults))
            return
        replace_file(file, yaml.safe_dump(values, sort_keys=False))
        arguments = ["plan", self.services.place.name(file), "--json"]
        self.command.set_text(typed_command(arguments))
        answer = await self.services.commands.run(arguments)
        if number != self._number:
            return
        if answer.code:
            self._say(answer.error)
        else:
            self._show(answer.values[0])

    def _say(self, text: str) -> None:
        self.body.clear()
        with self.body:
            ui.label(text).classes("quiet pre")

    def _show(self, plan: dict[str, Any]) -> None:
        self.fits = plan["fits"]
        space = plan["space"]
        self.body.clear()
        with self.body:
            with ui.element("div").classes("facts"):
                counted = plan["parameters"]
                fact(amount(counted["total"]), self.say("plan.parameters"))
                fact(amount(counted["trained"]), self.say("plan.trained"))
                fact(size(plan["held"]), self.say("plan.held"))
                seconds = plan["computing"] + plan["exposed"] + plan["slowed"]
                fact(short_time(seconds), self.say("plan.step"))
                fact(amount(plan["tokens_per_second"]), self.say("plan.speed"))
            self._bar(space)
            if not plan["fits"]:
                ui.label(self.say("plan.too_much")).classes("warning")
            card_name = plan["time"]["card"] if plan["time"] else ""
            ui.label(self.say("plan.rates", card=card_name)).classes("quiet")

    def _bar(self, space: dict[str, Any]) -> None:
        """Show the parts of the largest moment, as shares of it."""
        parts = sorted(space["parts"].items(), key=lambda part: -part[1])
        whole = max(sum(held for _, held in parts), 1)
        with ui.element("div").classes("memory").props('aria-hidden="true"'):
            for number, (_, held) in enumerate(parts):
                ui.element("i").classes(f"part-{number % 8}").style(
                    f"width:{100 * held / whole:.2f}%"
                )
        with ui.element("div").classes("legend"):
            for number, (name, held) in enumerate(parts):
                if held >= whole / 100:
                    ui.element("i").classes(f"part-{number % 8}")
                    ui.label(name)
                    ui.label(size(held)).classes("number")


def fact(value: str, name: str) -> ui.label:
    """Build a number with its name under it; return the number."""
    with ui.element("div").classes("fact"):
        number = ui.label(value).classes("fact-value")
        ui.label(name).classes("fact-name")
    return number


@dataclass
class RunPanel:
    """A run as it goes on: state, numbers, curves, output; read from its files each second.

    Attributes:
        services: of the server.
        find: returns the run; None where there is none yet.
        say: words of the page.
    """

    services: Services
    find: Callable[[], RunEntry | None]
    say: Say

    def build(self) -> None:
        """Build the panel, which follows the run."""
        self._shown: tuple[Any, ...] = ()
        self._charts: dict[str, ui.echart] = {}
        self.top = ui.element("div").classes("run-top")
        self.charts = ui.element("div").classes("charts")
        self.samples = ui.element("div").classes("rows")
        with card(self.say("run.output")):
            self.link = ui.element("div")
            self.output = ui.label().classes("log").props('tabindex="0" role="log"')
        self.update()
        ui.timer(1.0, self.update)

    def update(self) -> None:
        """Show the run as it is now."""
        run = self.find()
        if run is None:
            self._empty()
            return
        metrics = self.services.metrics(run)
        state = run.state
        now = (run.name, state, metrics.step, metrics.last, run.job and run.job.name)
        if now != self._shown:
            anew = self._shown[:1] != now[:1]
            self._shown = now
            self._show_top(run, state, metrics)
            self._show_charts(run, metrics, anew)
            self._show_samples(run)
        self._show_output(run.job)

    def _empty(self) -> None:
        if self._shown != ("",):
            self._shown = ("",)
            self.top.clear()
            with self.top:
                ui.label(self.say("run.none")).classes("quiet")

    def _show_top(self, run: RunEntry, state: str, metrics: Metrics) -> None:
        self.top.clear()
        with self.top:
            with ui.element("div").classes("run-head"):
                ui.link(run.name, f"/run?name={quote(run.name)}").classes("run-name")
                chip(state, self.say)
                ui.element("div").classes("space")
                run_actions(self.services, run, self.say)
            with ui.element("div").classes("facts"):
                fact(f"{metrics.step:,}", self.say("run.step"))
                for name in ("loss", "eval_loss", "grad_norm", "tokens_per_second"):
                    value = metrics.value(name)
                    if value is not None:
                        fact(f"{value:,.4g}", TITLES[name])
                if metrics.began and metrics.last:
                    fact(duration(metrics.last - metrics.began), self.say("run.time"))
            if run.job is not None:
                command_line(run.job.shown)
            if state == "failed" and run.job is not None:
                with ui.element("div").classes("failure").props('role="alert"'):
                    ui.label(self.say("run.failed", code=run.job.code)).classes("failure-title")
                    ui.label(run.job.reason()).classes("pre")

    def _show_charts(self, run: RunEntry, metrics: Metrics, anew: bool) -> None:
        names = drawn_metrics([metrics])
        if anew or list(self._charts) != names:
            self.charts.clear()
            self._charts = {}
            with self.charts:
                for name in names:
                    self._charts[name] = chart_box(name, {run.name: metrics.curve(name)})
            return
        for name, chart in self._charts.items():
            redraw(chart, line_chart({run.name: metrics.curve(name)}))

    def _show_samples(self, run: RunEntry) -> None:
        """Show the last answers of the run, with their rewards where it was trained on them."""
        samples = last_records(run.folder / SAMPLES, SHOWN_SAMPLES)
        self.samples.clear()
        if not samples:
            return
        step = samples[-1].get("step")
        title = "run.samples" if step is None else "run.answers"
        with self.samples, card(self.say(title, step=step)):
            for sample in samples:
                if sample.get("step") != step:
                    continue
                ui.label(str(sample.get("prompt", ""))).classes("quiet pre-text")
                with ui.element("div").classes("answers"):
                    for answer in sample.get("answers", []):
                        with ui.element("div").classes("answer"):
                            ui.label(str(answer.get("text", ""))).classes("pre-text")
                            rewards = rewards_in_words(answer)
                            if rewards:
                                ui.label(rewards).classes("quiet number")

    def _show_output(self, job: Job | None) -> None:
        if job is None:
            text = self.say("run.no_output")
        else:
            text = "\n".join(last_lines(job.log)[-SHOWN_LINES:]) or self.say("run.waits")
        if text == self.output.text:
            return
        self.output.set_text(text)
        self.link.clear()
        if job is not None:
            with self.link:
                ui.link(self.say("run.whole"), f"/file/log?job={quote(job.name)}", new_tab=True)


def rewards_in_words(answer: Mapping[str, Any]) -> str:
    """Return the reward and the advantage of an answer, and the single rewards if several."""
    named = answer.get("rewards") or {}
    values = {name: answer.get(name) for name in ("reward", "advantage")}
    values |= named if len(named) > 1 else {}
    return " · ".join(
        f"{name} {value:.3g}" for name, value in values.items() if isinstance(value, (int, float))
    )


def chart_box(metric: str, curves: Mapping[str, Curve]) -> ui.echart:
    """Build the chart of a metric, with its title."""
    with ui.element("figure").classes("chart"):
        ui.label(TITLES.get(metric, metric)).classes("chart-title")
        return ui.echart(line_chart(curves)).classes("chart-canvas")


def redraw(chart: ui.echart, options: dict[str, Any]) -> None:
    """Replace the options of a chart."""
    chart.options.clear()
    chart.options.update(options)
    chart.update()


def run_actions(services: Services, run: RunEntry, say: Say) -> None:
    """Build the buttons that change a run: stop and resume; and links to what it left."""
    job = run.job
    if job is not None and run.state in ("running", "starting", "waiting"):
        ui.button(say("run.stop"), on_click=job.stop).props("flat no-caps dense").classes("stop")
    if run.can_resume:
        resume = ui.button(say("run.resume"), on_click=partial(resume_run, services, run.name))
        resume.props("flat no-caps dense")
    if (run.folder / "report.html").is_file():
        ui.link(say("run.report"), f"/file/report?run={quote(run.name)}", new_tab=True)
    if run.state == "finished":
        ui.link(say("run.chat"), f"/chat?model={quote(run.name)}")


def resume_run(services: Services, name: str) -> None:
    """Put a run that can go on into the queue of the first card."""
    run = services.runs.named(name)
    if not run.can_resume:
        return
    arguments = ["train", "--resume", "--output-dir", name]
    card_name = run.job.card if run.job is not None else services.cards()[0]
    folder = services.jobs.new_folder("resume")
    services.queues.add(services.jobs.create(folder, run.objective, arguments, card_name, name))
