"""Export of a trained model, with the proof that what was written is what was trained."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nicegui import ui

from chronicals.ui.command_forms import CommandField, CommandForm, fields_by_words
from chronicals.ui.frame import card, frame, heading, tell_missing
from chronicals.ui.job_panel import CommandPanel
from chronicals.ui.place import Place, read_record
from chronicals.ui.services import Services
from chronicals.ui.words import Say

PROOF = ".proof.json"
"""End of the name of an artefact's proof (``export/artefact.py``)."""

FIELDS: tuple[CommandField, ...] = (
    ("model", "text", "", ()),
    ("to", "text", "merged", ()),
    ("output", "text", "", ()),
    ("name", "text", "", ()),
    ("base_model", "text", "", ()),
    ("data", "text", "", ()),
)


def add_export(services: Services) -> None:
    """Add the page."""

    @ui.page("/export")
    def export(model: str = "") -> None:
        if model:
            services.drafts.fill_in("export", "model", model)
        with frame(services, "export") as say:
            heading(say("nav.export"), say("export.about"))
            tell_missing(services, "export")
            fields = fields_by_words(say, "export", FIELDS, ["model"])
            paths = ["model", "output", "base_model", "data"]
            form = CommandForm(services.place, ["export"], fields, ["model"], paths)

            def more(texts: Mapping[str, str]) -> tuple[Sequence[str], str]:
                output = texts.get("output") or f"{texts.get('model', '')}/export"
                return [] if "to" in texts else ["--to=merged"], output

            proofs = ui.element("div").classes("rows")
            panel = CommandPanel(services, say, "export", form, more)

            def show() -> None:
                job = panel.newest()
                proofs.clear()
                if job is not None:
                    with proofs:
                        for artefact, proof in found_proofs(services.place, job.output):
                            show_proof(artefact, proof, say)

            panel.result = show
            panel.build()
            proofs.move(target_index=-1)
            _list_formats(services, say)


def _list_formats(services: Services, say: Say) -> None:
    """Show the formats that ``chronicals export MODEL --to list`` prints."""
    with card(say("export.formats")):
        listed = ui.label(say("doctor.reading")).classes("quiet pre")

    async def ask() -> None:
        answer = await services.commands.run(["export", ".", "--to", "list"])
        listed.set_text(", ".join(answer.output.split()) or answer.error)

    ui.timer(0.1, ask, once=True)


def found_proofs(place: Place, output: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the proofs beside the artefacts in a folder, with the artefacts' names."""
    try:
        entries = sorted(os.scandir(place.root / output), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        proof = read_record(Path(entry.path)) if entry.name.endswith(PROOF) else None
        if isinstance(proof, dict):
            yield f"{output}/{entry.name.removesuffix(PROOF)}", proof


def show_proof(artefact: str, proof: Mapping[str, Any], say: Say) -> None:
    """Show the checks of an artefact."""
    with card(artefact):
        rows = [check_row(check, say) for check in proof.get("checks", [])]
        columns = [
            {"name": name, "label": say(f"export.{name}"), "field": name, "align": "left"}
            for name in ("compared", "client", "result", "measure", "bound")
        ]
        with ui.element("div").classes("table-box"):
            ui.table(columns=columns, rows=rows).props("flat dense").classes("table")


def check_row(check: Mapping[str, Any], say: Say) -> dict[str, str]:
    """Return the row of a check, with the words of the command line."""
    passed, value = check["passed"], check["value"]
    unbounded = "not_run" if value is None else "reported"
    result = {True: "equal", False: "differs"}.get(passed, unbounded)
    return {
        "compared": check["name"],
        "client": check["client"],
        "result": say(f"export.{result}"),
        "measure": check["detail"] if value is None else f"{value:.4g}",
        "bound": "" if check["bound"] is None else f"{check['bound']:.4g}",
    }
