"""The benchmark: its form, and its results as bars with their spread beside loss and gradient norm."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nicegui import ui

from chronicals.ui.charts import bars
from chronicals.ui.command_forms import CommandField, CommandForm, fields_by_words
from chronicals.ui.frame import card, frame, heading
from chronicals.ui.job_panel import CommandPanel, free_name
from chronicals.ui.place import Place, read_record
from chronicals.ui.services import Services
from chronicals.ui.words import Say

FOLDER = "benchmarks"
"""Folder in the root with the results of the page."""

MOST_RESULTS = 12
BAR_HEIGHT = 38
"""Pixels of a bar with the space around it."""

FIELDS: tuple[CommandField, ...] = (
    ("model", "text", "qwen2.5-0.5b", ()),
    ("data", "text", "fixed", ()),
    ("mode", "choice", "full", ("full", "lora", "qlora")),
    ("steps", "number", "20", ()),
    ("batch_size", "number", "4", ()),
    ("max_seq_length", "number", "2048", ()),
    ("rounds", "number", "3", ()),
    ("against", "text", "", ()),
    ("time_limit", "number", "", ()),
)


def add_benchmark(services: Services) -> None:
    """Add the page."""

    @ui.page("/benchmark")
    def benchmark() -> None:
        with frame(services, "benchmark") as say:
            heading(say("nav.benchmark"), say("benchmark.about"))
            fields = fields_by_words(say, "benchmark", FIELDS)
            form = CommandForm(services.place, ["benchmark"], fields, (), ["model", "data"])

            def more(texts: Mapping[str, str]) -> tuple[Sequence[str], str]:
                output = free_name(services, FOLDER, ".json")
                return [f"--output={output}"], output

            shown = ui.element("div").classes("rows")

            def result() -> None:
                shown.clear()
                with shown:
                    for path, record in results(services.place):
                        show_result(path, record, say)

            CommandPanel(services, say, "benchmark", form, more, result).build()
            shown.move(target_index=-1)


def results(place: Place) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the results in the folder of benchmarks with their names, the newest first."""
    try:
        found = [Path(entry.path) for entry in os.scandir(place.root / FOLDER)]
    except OSError:
        return
    files = sorted(
        (file for file in found if file.suffix == ".json" and not file.is_symlink()),
        key=lambda file: file.stat().st_mtime,
        reverse=True,
    )
    for file in files[:MOST_RESULTS]:
        record = read_record(file)
        if isinstance(record, dict) and isinstance(record.get("arms"), dict):
            yield place.name(file), record


def measured(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the arms that have a speed, the fastest first."""
    arms = {name: arm for name, arm in record["arms"].items() if "tokens_per_second" in arm}
    return dict(sorted(arms.items(), key=lambda arm: -arm[1]["tokens_per_second"]["median"]))


def show_result(path: str, record: Mapping[str, Any], say: Say) -> None:
    """Show a result: bars, and under them what an arm lost and how it was refused."""
    row = record["row"]
    with card(f"{row['model']} · {row['mode']} · {row['data']}"):
        ui.label(" · ".join(filter(None, (path, record.get("date"))))).classes("quiet")
        fast = measured(record)
        if fast:
            rates = [arm["tokens_per_second"] for arm in fast.values()]
            spread = [(rate["median"], rate["lowest"], rate["highest"]) for rate in rates]
            chart = ui.echart(bars(list(fast), spread)).classes("bars")
            chart.style(f"height: {BAR_HEIGHT * len(fast) + 50}px")
            ui.label(say("benchmark.unit")).classes("quiet")
        rows = [arm_row(name, arm) for name, arm in {**fast, **record["arms"]}.items()]
        columns = [
            {"name": name, "label": say(f"benchmark.{name}"), "field": name, "align": "left"}
            for name in rows[0]
        ]
        with ui.element("div").classes("table-box"):
            ui.table(columns=columns, rows=rows).props("flat dense").classes("table")


def arm_row(name: str, arm: Mapping[str, Any]) -> dict[str, str]:
    """Return the row of an arm in the table; a speed stands beside loss and gradient norm."""
    rate = arm.get("tokens_per_second", {}).get("median")
    norms = arm.get("grad_norms") or []
    return {
        "arm": name,
        "rate": "" if rate is None else f"{rate:,.0f}",
        "loss": "" if "last_loss" not in arm else f"{arm['last_loss']:.4f}",
        "grad_norm": f"{norms[-1]:.3f}" if norms else "",
        "trained_share": "" if "trained_share" not in arm else f"{arm['trained_share']:.1%}",
        "memory": "" if "peak_gib" not in arm else f"{arm['peak_gib']:.2f} GiB",
        "status": " ".join(filter(None, (arm.get("status"), arm.get("reason")))),
    }
