"""The frame of every page: bar, navigation, language, dark or light."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from nicegui import ui

from chronicals.ui.services import OBJECTIVES, Services
from chronicals.ui.words import LANGUAGES, Say

ICON = (
    "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 32 32'><rect width='32' height='32' "
    "rx='7' fill='#2757c7'/><path d='M6 9c4 0 5 13 10 13s6-5 10-5' fill='none' stroke='white' "
    "stroke-width='3' stroke-linecap='round'/></svg>"
)
"""A curve that falls and stays down."""

ACCENT = "#2757c7"

TOGGLE_MENU = "() => document.body.classList.toggle('menu-open')"
"""What the button of a narrow page does, where the navigation is hidden at first."""

SHADES = {None: "auto", False: "light", True: "dark"}
"""Names of the icons of what ``ui.dark_mode`` takes."""

NAVIGATION: dict[str, dict[str, str]] = {
    "": {"runs": "/", "chat": "/chat"},
    "prepare": {"data": "/data", "configuration": "/configuration/sft", "mixture": "/mixture"},
    "train": {f"stage.{name}": f"/train/{name}" for name in OBJECTIVES},
    "measure": {"tuner": "/tuner", "benchmark": "/benchmark", "experts": "/experts"},
    "deliver": {"export": "/export", "doctor": "/doctor"},
}
"""Addresses of the pages by the name of their title, by the name of their group's."""


@contextmanager
def frame(services: Services, active: str) -> Iterator[Say]:
    """Build the frame of a page; what is built within the context is its content.

    Args:
        services: of the server.
        active: name of the page's title in ``NAVIGATION``.
    """
    say = services.words()
    preferences = services.preferences
    ui.add_head_html('<link rel="stylesheet" href="/static/page.css">')
    ui.colors(primary=ACCENT)
    ui.dark_mode(preferences.get("dark"))
    ui.page_title(f"{say(f'nav.{active}')} · chronicals")
    with ui.element("header").classes("bar"):
        menu = ui.button(icon="menu").props(f'flat round dense aria-label="{say("menu")}"')
        menu.classes("menu").on("click", js_handler=TOGGLE_MENU)
        ui.link("chronicals", "/").classes("brand")
        ui.label(services.place.root.name).classes("root")
        ui.element("div").classes("space")
        _choose_shade(services, say)
        language = ui.select(LANGUAGES, value=preferences.get("language", "en"))
        language.props(f'dense borderless options-dense aria-label="{say("language")}"')
        language.classes("language")
        language.on_value_change(lambda event: _prefer(services, language=event.value))
    with ui.element("nav").classes("side"):
        for group, entries in NAVIGATION.items():
            if group:
                ui.label(say(f"nav.{group}")).classes("group")
            for name, address in entries.items():
                link = ui.link(say(f"nav.{name}"), address).classes("entry")
                if name == active:
                    link.classes("active").props('aria-current="page"')
    with ui.element("main").classes("content"):
        yield say


def _choose_shade(services: Services, say: Say) -> None:
    """Build the button that goes on to the next of automatic, light and dark."""
    shades = list(SHADES)
    now = services.preferences.get("dark")
    following = shades[(shades.index(now) + 1) % len(shades)]
    icons = {"auto": "brightness_auto", "light": "light_mode", "dark": "dark_mode"}
    name = SHADES[now]
    button = ui.button(icon=icons[name], on_click=partial(_prefer, services, dark=following))
    button.props(f'flat round dense aria-label="{say(f"shade.{name}")}"').classes("shade")
    button.tooltip(say(f"shade.{name}"))


def _prefer(services: Services, **chosen: object) -> None:
    services.prefer(**chosen)
    ui.navigate.reload()


def heading(title: str, about: str = "") -> None:
    """Build the title of a page, and a line on what it is for."""
    ui.label(title).classes("title").props('role="heading" aria-level="1"')
    if about:
        ui.label(about).classes("about")


@contextmanager
def card(title: str = "", *classes: str) -> Iterator[ui.element]:
    """Build a box with a title around what is built within the context."""
    with ui.element("section").classes(" ".join(("card", *classes))) as box:
        if title:
            ui.label(title).classes("card-title").props('role="heading" aria-level="2"')
        yield box


def command_line(text: str = "") -> ui.label:
    """Build the line with the command that a page runs, which can be selected and copied."""
    with ui.element("div").classes("command"):
        return ui.label(text).classes("mono")


def tell_missing(services: Services, extra: str) -> None:
    """Say that the packages of an extra are missing, with the command that brings them."""
    missing = services.machine.get("missing_extras", {}).get(extra)
    if missing is not None:
        about, _, command = missing.rpartition("; ")
        with card():
            ui.label(about).classes("warning")
            command_line(command)


def chip(state: str, say: Say) -> ui.label:
    """Build the word of a state, in its colour."""
    return ui.label(say(f"state.{state}")).classes(f"chip {state}")
