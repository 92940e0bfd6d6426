"""A chat with a run, a checkpoint or a model, beside another one."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

from nicegui import ui

from chronicals.config import ConfigurationError, Recipe
from chronicals.config.recipe import RESUME_FILE
from chronicals.ui.command_forms import CommandField, CommandForm, fields_by_words
from chronicals.ui.form import CommandDraft
from chronicals.ui.frame import card, command_line, frame, heading
from chronicals.ui.jobs import typed_command
from chronicals.ui.recipes import Faults
from chronicals.ui.services import Services
from chronicals.ui.words import Say

DRAFT = "chat"
MODELS = ("model", "beside")

FIELDS: tuple[CommandField, ...] = (
    ("model", "text", "", ()),
    ("beside", "text", "", ()),
    ("system", "text", "", ()),
    ("max_new_tokens", "number", "256", ()),
    ("temperature", "number", "0", ()),
    ("top_p", "number", "", ()),
    ("seed", "number", "0", ()),
)

CHECKPOINTS_LISTED = 3
"""Newest checkpoints of a run among the models."""

SECONDS_BETWEEN_LOOKS = 0.3


def add_chat(services: Services) -> None:
    """Add the page."""

    @ui.page("/chat")
    def chat(model: str = "") -> None:
        if model:
            services.drafts.fill_in(DRAFT, "model", model)
            services.drafts.fill_in(DRAFT, "beside", base_of(services, model))
        with frame(services, "chat") as say:
            heading(say("nav.chat"), say("chat.about"))
            _ChatPanel(services, say).build()


def base_of(services: Services, model: str) -> str:
    """Return the model that a run, or the run of a checkpoint, began from; empty if unknown."""
    run = model.partition("/checkpoints/")[0]
    try:
        folder = services.place.inside(run)
        base = Recipe.read_yaml(folder / RESUME_FILE).get("model", "")
        inside = services.place.name(services.place.inside(base))
        return inside if (services.place.root / inside).exists() else base
    except ConfigurationError:
        return ""


def models(services: Services) -> list[str]:
    """Return what can be asked: runs with a model, their newest checkpoints, and their bases."""
    found: dict[str, None] = {}
    for run in services.runs.all():
        if (run.folder / "model").exists():
            found[run.name] = None
        for checkpoint in itertools.islice(run.checkpoints, CHECKPOINTS_LISTED):
            found[f"{run.name}/checkpoints/{checkpoint}"] = None
    bases = [base_of(services, name) for name in found]
    return list(found | dict.fromkeys(base for base in bases if base))


def chat_form(services: Services, say: Say) -> CommandForm:
    """Return the form of ``chronicals generate``, with a second model beside the first."""
    fields = fields_by_words(say, "chat", FIELDS, ["model"])
    return CommandForm(services.place, ["generate"], fields, ["model"], ["model", "beside"])


class _ChatPanel:
    """Choice of the models, the conversation, and the question."""

    def __init__(self, services: Services, say: Say):
        self.services = services
        self.say = say
        self.seen: Any = None

    def build(self) -> None:
        services, say = self.services, self.say
        form = chat_form(services, say)
        self.draft = CommandDraft(services, DRAFT, lambda: form, say)
        with card():
            with ui.element("div").classes("row chips"):
                for name in models(services):
                    choose = ui.button(name, on_click=partial(self.choose, name))
                    choose.props("outline no-caps")
            self.draft.build(form.fields[name] for name in MODELS)
            with ui.expansion(say("chat.settings")).classes("inner"):
                others = (field for name, field in form.fields.items() if name not in MODELS)
                self.draft.build(others)
            self.command = command_line()
        with card("", "conversation"):
            self.turns = ui.element("div").classes("turns").props('role="log" aria-live="polite"')
            with ui.element("div").classes("ask"):
                self.question = ui.textarea(placeholder=say("chat.question"))
                self.question.props('outlined dense autogrow data-field="question"').classes("grow")
                self.question.on("keydown.enter.exact.prevent", self.ask)
                send = ui.button(say("chat.ask"), on_click=self.ask)
                send.props("unelevated no-caps").classes("primary")
                ui.button(say("chat.anew"), on_click=services.chats.clear).props("flat no-caps")
            self.said = ui.label().classes("warning pre").props('role="status"')
        self.draft.changed.append(self._show_command)
        self.draft.follow()
        self.update()
        ui.timer(SECONDS_BETWEEN_LOOKS, self.update)

    def choose(self, name: str) -> None:
        """Take a model, and what it was trained from beside it."""
        self.services.drafts.fill_in(DRAFT, "model", name)
        self.services.drafts.fill_in(DRAFT, "beside", base_of(self.services, name))
        self.draft.look()

    def _arguments(self) -> list[str]:
        texts = {name: text for name, text in self.draft.texts.items() if name != "beside"}
        return self.draft.command_form.arguments(texts)

    def _show_command(self) -> None:
        try:
            self.command.set_text(typed_command(self._arguments()))
        except Faults:
            self.command.set_text("")

    def ask(self) -> None:
        """Ask the model, and the one beside it."""
        question = (self.question.value or "").strip()
        self.draft.strict = True
        faults = self.draft.show_faults()
        if faults is not None or not question:
            self.said.set_text("" if faults is None else str(faults))
            return
        if self.services.chats.is_answering:
            self.said.set_text(self.say("chat.busy"))
            return
        self.said.set_text("")
        texts = self.draft.texts
        chosen = [texts[name] for name in ("model", "beside") if texts.get(name)]
        self.services.chats.ask(question, chosen, self._arguments()[2:])
        self.question.set_value("")
        self.update()

    def update(self) -> None:
        """Show what was said so far."""
        turns = self.services.chats.turns
        answering = self.services.chats.is_answering
        if (turns, answering) == self.seen:
            return
        self.seen = (turns, answering)
        self.turns.clear()
        with self.turns:
            if not turns:
                ui.label(self.say("chat.none")).classes("quiet")
            for turn in turns:
                ui.label(turn["question"]).classes("question pre-text")
                with ui.element("div").classes("answers"):
                    for answer in turn["answers"]:
                        self._show_answer(answer, answering)

    def _show_answer(self, answer: dict[str, Any], answering: bool) -> None:
        with ui.element("div").classes("answer"):
            ui.label(answer["model"]).classes("quiet mono")
            ui.label(answer["text"]).classes("pre-text")
            if answer.get("error"):
                ui.label(answer["error"]).classes("warning pre")
            elif not answer["done"]:
                ui.label(self.say("chat.waits" if answering else "chat.broken")).classes("quiet")
