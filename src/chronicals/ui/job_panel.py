"""The newest job of a kind: its command, its state, its output, and what it left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from nicegui import ui

from chronicals.ui.command_forms import CommandForm
from chronicals.ui.form import CommandDraft
from chronicals.ui.frame import card, chip, command_line
from chronicals.ui.jobs import Job, last_lines, typed_command
from chronicals.ui.panels import SHOWN_LINES
from chronicals.ui.recipes import Faults
from chronicals.ui.services import Services
from chronicals.ui.words import Say


class CommandPanel:
    """Form of a command, its start as a job, and its newest job.

    Args:
        services: of the server.
        say: words of the page.
        kind: of the job, and name of the draft.
        form: of the command.
        more: returns the flags that the form has no field for, and the job's output.
        result: shows what is in the root's files, beside the job; called after each change.
    """

    def __init__(
        self,
        services: Services,
        say: Say,
        kind: str,
        form: CommandForm,
        more: Callable[[Mapping[str, str]], tuple[Sequence[str], str]],
        result: Callable[[], None] | None = None,
    ):
        self.services = services
        self.say = say
        self.kind = kind
        self.form = form
        self.more = more
        self.result = result
        self.seen: Any = None

    def build(self) -> None:
        """Build the panel."""
        self.draft = CommandDraft(self.services, self.kind, lambda: self.form, self.say)
        with card():
            self.draft.build(self.form.fields.values())
            self.command = command_line()
            with ui.element("div").classes("row"):
                self.card = card_and_start(self.services, self.say, self.start)
            self.said = ui.label().classes("warning pre").props('role="status"')
        self.job = ui.element("div")
        self.draft.changed.append(self._show_command)
        self.draft.follow()
        self.update()
        ui.timer(1.0, self.update)

    def _arguments(self) -> tuple[list[str], str]:
        more, output = self.more(self.draft.texts)
        return self.draft.arguments(more), output

    def _show_command(self) -> None:
        try:
            self.command.set_text(typed_command(self._arguments()[0]))
        except Faults:
            self.command.set_text("")

    def start(self) -> None:
        """Put the command into the queue of its card."""
        self.draft.strict = True
        faults = self.draft.show_faults()
        self.said.set_text("" if faults is None else str(faults))
        if faults is not None:
            return
        arguments, output = self._arguments()
        folder = self.services.jobs.new_folder(self.kind)
        job = self.services.jobs.create(folder, self.kind, arguments, self.card.value, output)
        self.services.queues.add(job)
        self.update()

    def newest(self) -> Job | None:
        """Return the newest job of the kind."""
        return newest_job(self.services, self.kind)

    def update(self) -> None:
        """Show the job as it is now, and the result after a change."""
        job = self.newest()
        lines = [] if job is None else last_lines(job.log)[-SHOWN_LINES:]
        seen = (job and job.name, job and job.state, lines)
        if seen == self.seen:
            return
        self.seen = seen
        self.job.clear()
        if job is not None:
            with self.job:
                show_job(job, lines, self.say)
        if self.result is not None:
            self.result()


def card_and_start(services: Services, say: Say, start: Callable[[], None]) -> ui.select:
    """Build the choice of a card and the button that starts; return the choice."""
    cards = services.cards()
    chosen = ui.select(cards, value=cards[0], label=say("start.card"))
    chosen.props("outlined dense options-dense").classes("card-choice")
    button = ui.button(say("start.start"), on_click=start)
    button.props("unelevated no-caps").classes("primary")
    return chosen


def newest_job(services: Services, kind: str) -> Job | None:
    """Return the newest job of a kind; None if there is none."""
    return next((job for job in services.jobs.all() if job.kind == kind), None)


def show_job(job: Job, lines: Sequence[str], say: Say) -> None:
    """Build a box with a job's state, command and output.

    Args:
        job: as it is now.
        lines: the last of its output.
        say: words of the page.
    """
    with card():
        with ui.element("div").classes("run-head"):
            chip(job.state, say)
            command_line(job.shown)
            if job.is_alive or job.state == "waiting":
                stop = ui.button(say("run.stop"), on_click=job.stop)
                stop.props("flat no-caps dense").classes("stop")
        if job.state == "failed":
            with ui.element("div").classes("failure").props('role="alert"'):
                ui.label(job.reason()).classes("pre")
        if lines:
            ui.label("\n".join(lines)).classes("log").props('tabindex="0" role="log"')
            address = f"/file/log?job={quote(job.name)}"
            ui.link(say("run.whole"), address, new_tab=True)


def free_name(services: Services, folder: str, ending: str) -> str:
    """Return a path that no file and no job has: ``benchmarks/3.json``."""
    taken = {job.output for job in services.jobs.all()}
    number = 1
    while (name := f"{folder}/{number}{ending}") in taken or (services.place.root / name).exists():
        number += 1
    return name
