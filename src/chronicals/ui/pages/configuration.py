"""Configuration and designer in one: every field, presets, the plan, YAML in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

from nicegui import ui

from chronicals.config import PRESETS, ConfigurationError, Recipe
from chronicals.config.presets import AUTO_PRESET, CARDS, WAYS, preset_fields
from chronicals.ui.fields import FormField
from chronicals.ui.form import RecipeDraft, recipe_draft
from chronicals.ui.frame import card, frame, heading
from chronicals.ui.pages.stages import StartPanel
from chronicals.ui.panels import PlanPanel
from chronicals.ui.recipes import Faults
from chronicals.ui.services import OBJECTIVES, Services
from chronicals.ui.words import Say

OPEN = ("Model and data", "Length, batch and learning rate")
"""Groups that are open at first."""


def add_configuration(services: Services) -> None:
    """Add the page."""

    @ui.page("/configuration/{objective}")
    def configuration(objective: str) -> None:
        if objective not in OBJECTIVES:
            ui.navigate.to("/configuration/sft")
            return
        with frame(services, "configuration") as say:
            heading(say("nav.configuration"), say("configuration.about"))
            draft = recipe_draft(services, objective, say)
            with ui.element("div").classes("halves"):
                with ui.element("div").classes("half"):
                    _build_choices(services, draft, say)
                    _build_groups(services, draft, say)
                with ui.element("div").classes("half sticky"):
                    plan = PlanPanel(services, draft, say)
                    plan.build()
                    StartPanel(services, draft, say, plan).build()
                    YamlPanel(draft, say).build()
            draft.follow()


def presets() -> list[str]:
    """Return the names of all presets that need no look at the model."""
    ways = [f"{way}-{size}gb" for way in WAYS for size in CARDS]
    return [name for name in (*PRESETS, *ways) if name != AUTO_PRESET]


def _build_choices(services: Services, draft: RecipeDraft, say: Say) -> None:
    """Build the choices of the objective and of a preset."""
    with card(), ui.element("div").classes("row"):
        names = {name: say(f"nav.stage.{name}") for name in OBJECTIVES}
        objective = ui.select(names, value=draft.name, label=say("configuration.objective"))
        objective.props("outlined dense options-dense").classes("grow")
        objective.on_value_change(lambda event: ui.navigate.to(f"/configuration/{event.value}"))
        preset = ui.select(presets(), label=say("configuration.preset"), with_input=True)
        preset.props("outlined dense options-dense").classes("grow")
        preset.on_value_change(lambda event: lay_preset_over(draft, event.value))
        clear = ui.button(say("configuration.clear"), on_click=lambda: _clear(draft))
        clear.props("flat no-caps dense")


def lay_preset_over(draft: RecipeDraft, name: str | None) -> None:
    """Set the fields of a preset in a draft; others keep what was typed."""
    if not name:
        return
    fields = draft.recipe_form.fields
    texts = {key: fields[key].text(value) for key, value in preset_fields(name).items()}
    draft.services.drafts.write(draft.name, {**draft.texts, **texts})
    draft.look()


def _clear(draft: RecipeDraft) -> None:
    draft.services.drafts.write(draft.name, {})
    draft.look()


def _build_groups(services: Services, draft: RecipeDraft, say: Say) -> None:
    """Build the groups of fields, the objective's settings first."""
    own = services.settings_of(draft.name)
    if own:
        _Group(say("stage.settings", name=draft.name), list(own.values()), draft).build(True)
    fields = draft.recipe_form.fields.values()
    shared = [field for field in fields if field.name not in own]
    for title, members in groupby(shared, key=lambda field: field.heading):
        shown = say.translated(f"heading.{title}", title or say("configuration.others"))
        _Group(shown, list(members), draft).build(title in OPEN)


class _Group:
    """A group of fields, whose inputs are built when it is opened: a recipe has a hundred fields."""

    def __init__(self, title: str, fields: list[FormField], draft: RecipeDraft):
        self.title = title
        self.fields = fields
        self.draft = draft
        self.is_built = False

    def build(self, is_open: bool) -> None:
        """Build the group, open if that is asked for or a field of it is set."""
        self.box = ui.expansion(self.title).classes("group-box")
        self.box.on_value_change(lambda event: self._open() if event.value else None)
        if is_open:
            self.box.set_value(True)
        self.draft.changed.append(self._open_if_set)
        self._open_if_set()

    def _open_if_set(self) -> None:
        texts = self.draft.texts
        if not self.is_built and any(field.name in texts for field in self.fields):
            self.box.set_value(True)

    def _open(self) -> None:
        if not self.is_built:
            self.is_built = True
            with self.box:
                self.draft.build(self.fields)
            self.draft.show_faults()


class YamlPanel:
    """The draft as YAML, and YAML as the draft."""

    def __init__(self, draft: RecipeDraft, say: Say):
        self.draft = draft
        self.say = say

    def build(self) -> None:
        """Build the panel, which follows the draft until its text is edited."""
        with card(self.say("yaml.title")):
            self.text = ui.textarea().props('outlined dense autogrow spellcheck="false"')
            self.text.classes("yaml").props(f'aria-label="{self.say("yaml.title")}"')
            with ui.element("div").classes("row"):
                take = ui.button(self.say("yaml.take"), on_click=self.take)
                take.props("outline no-caps dense")
                show = ui.button(self.say("yaml.show"), on_click=self.show)
                show.props("flat no-caps dense")
            self.said = ui.label().classes("pre said").props('role="status"')
        self.draft.changed.append(self.show)

    def show(self) -> None:
        """Show the draft as YAML; of a wrong one the message is at its field already."""
        try:
            self.text.set_value(self.draft.recipe_form.yaml(self.draft.texts))
        except Faults:
            return

    def take(self) -> None:
        """Replace the draft by the YAML, if it has only fields of the form."""
        try:
            fields = read_yaml(self.text.value or "")
            objective = fields.get("objective", self.draft.name)
            if objective != self.draft.name:
                texts = self.draft.services.form(objective).texts(fields)
                self.draft.services.drafts.write(objective, texts)
                ui.navigate.to(f"/configuration/{objective}")
                return
            texts = self.draft.recipe_form.texts(fields)
        except (ConfigurationError, Faults) as error:
            self.said.set_text(str(error))
            self.said.classes("warning")
            return
        self.said.set_text("")
        self.draft.services.drafts.write(self.draft.name, texts)
        self.draft.look()


def read_yaml(text: str) -> Mapping:
    """Return the fields of a recipe in YAML, read as the command line reads a file.

    Raises:
        ConfigurationError: it is no YAML, or no mapping.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(text)
        try:
            return Recipe.read_yaml(file)
        except ConfigurationError as error:
            raise ConfigurationError(str(error).replace(f"{file}: ", "")) from None
