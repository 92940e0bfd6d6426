"""The machine: cards, versions, what is not installed and the command that brings it, kernels."""

from __future__ import annotations

import json

from nicegui import ui

from chronicals.ui.frame import card, command_line, frame, heading
from chronicals.ui.jobs import typed_command
from chronicals.ui.services import Services
from chronicals.ui.words import Say

SELF_TEST = ["doctor", "--json"]


def add_doctor(services: Services) -> None:
    """Add the page."""

    @ui.page("/doctor")
    def doctor() -> None:
        with frame(services, "doctor") as say:
            heading(say("nav.doctor"), say("doctor.about"))
            facts = ui.element("div").classes("halves")

            def show() -> None:
                facts.clear()
                with facts:
                    _show_machine(services, say)

            show()
            if not services.machine:
                ui.timer(1.0, show)
            with card(say("doctor.kernels")):
                command_line(typed_command(SELF_TEST))
                table = ui.element("div").classes("table-box")

                async def test() -> None:
                    table.clear()
                    with table:
                        ui.label(say("doctor.testing")).classes("quiet")
                    answer = await services.commands.run(SELF_TEST)
                    table.clear()
                    with table:
                        if not answer.output:
                            ui.label(answer.error).classes("warning pre")
                        else:
                            _show_kernels(answer.output, say)

                ui.button(say("doctor.test"), on_click=test).props("outline no-caps").classes("fit")


def _show_machine(services: Services, say: Say) -> None:
    found = services.machine
    with card(say("doctor.machine")):
        if "error" in found:
            ui.label(found["error"]).classes("warning pre")
        elif not found:
            ui.label(say("doctor.reading")).classes("quiet")
        with ui.element("dl").classes("pairs"):
            for name, value in found.get("machine", {}).items():
                with ui.element("dt"):
                    ui.label(str(name))
                with ui.element("dd"):
                    ui.label(str(value))
    with card(say("doctor.missing")):
        missing = found.get("missing_extras", {})
        if not missing:
            ui.label(say("doctor.complete")).classes("quiet")
        for text in missing.values():
            about, _, command = text.rpartition("; ")
            ui.label(about)
            command_line(command)
        for text in found.get("untested_versions", ()):
            ui.label(text).classes("warning")


def _show_kernels(output: str, say: Say) -> None:
    kernels = json.loads(output)["kernels"]
    failed = [one for one in kernels if not one["passed"]]
    words = say("doctor.failed" if failed else "doctor.passed", count=len(failed or kernels))
    ui.label(words).classes("warning" if failed else "quiet")
    columns = [
        {"name": name, "label": say(f"doctor.{name}"), "field": name, "align": "left"}
        for name in ("name", "runs_as", "error", "plain_error", "result")
    ]
    rows = [
        {
            **one,
            "error": f"{one['error']:.1e}",
            "plain_error": f"{one['plain_error']:.1e}",
            "result": "✓" if one["passed"] else "✗",
        }
        for one in kernels
    ]
    ui.table(columns=columns, rows=rows).props("flat dense").classes("table")
