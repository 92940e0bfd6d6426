"""``report.html``: one self-contained page on data, settings and result of a run, with curves."""

from __future__ import annotations

import base64
import dataclasses
import html
import importlib.metadata
import io
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import torch

from chronicals.config import ChronicalsConfig
from chronicals.data import DataReport, Ledger
from chronicals.data.reading.ledger import LEDGER_COLUMNS
from chronicals.training.metrics import StepMetrics

PANELS = {
    "loss": "loss",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm (before clipping)",
    "tokens_per_second": "real tokens per second",
    "fill": "packing fill",
}

"""Titles of the panels of curves, by metric; the objective's own metrics get a panel each too."""

STEP_FIELDS = {field.name for field in dataclasses.fields(StepMetrics)}

_PACKAGES = ("chronicals", "torch", "transformers", "triton")

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem } table { border-collapse: collapse }
th, td { text-align: left; padding: .2rem 1rem .2rem 0; vertical-align: top } thead th { border-bottom: 1px solid #ccc }
th { font-weight: 500; color: #666 } img { width: 100% } pre { white-space: pre-wrap; margin: 0; font: inherit }
.error { color: #b00 } .warning { color: #a60 } details { margin-top: 1rem }
"""


@dataclass(frozen=True)
class Sample:
    """Answers of the model to a prompt before and after training."""

    prompt: str
    before: str
    after: str


@dataclass(frozen=True)
class Report:
    """Content of the report page.

    Attributes:
        title: of the page.
        facts: about the run, by name, for the table at the top.
        metrics: the lines of ``metrics.jsonl``.
        data: what the gate wrote about each data set (``train_dataset.json``,
            ``eval_dataset.json``).
        config: the settings, and which of them were set.
        samples: answers before and after.
    """

    title: str
    facts: Mapping[str, object]
    metrics: Sequence[Mapping]
    data: Sequence[Mapping]
    config: ChronicalsConfig
    samples: Sequence[Sample] = ()

    def write(self, path: Path, device: torch.device) -> None:
        facts = {**self.facts, **_times(self.metrics), **machine(device)}
        title = html.escape(self.title)
        figure = base64.b64encode(_figure(self.metrics)).decode()
        parts = [
            f"<h1>{title}</h1>{_pairs(facts)}",
            *(_section(_named(found), _data(found)) for found in self.data),
            _section(
                "Curves", f'<img alt="curves of the run" src="data:image/svg+xml;base64,{figure}">'
            ),
            _section("Answers before and after", _samples(self.samples)) if self.samples else "",
            _section("Settings", _settings(self.config)),
        ]
        path.write_text(
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
            f"<style>{STYLE}</style></head>\n<body>{''.join(parts)}\n</body></html>\n",
            encoding="utf-8",
        )


def data_reports(output_dir: Path) -> list[dict]:
    """Return the gate's reports on the data of a run, training data first."""
    files = [output_dir / f"{name}.json" for name in ("train_dataset", "eval_dataset")]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def machine(device: torch.device) -> dict[str, str]:
    """Return the GPU or CPU, and the versions of the software that trained."""
    versions = [f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    on_card = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_card else f"CPU ({platform.machine()})",
        "versions": ", ".join(versions),
    }


def _times(metrics: Sequence[Mapping]) -> dict[str, str]:
    """Return when the first and the last line of the metrics were written, and how long the steps
    took.
    """
    told = [line["time"] for line in metrics if "time" in line]
    seconds = sum(
        line["tokens"] / line["tokens_per_second"]
        for line in metrics
        if line.get("tokens_per_second")
    )
    times = {"time in steps": str(timedelta(seconds=round(seconds)))}
    if told:
        first, last = (
            datetime.fromtimestamp(time).astimezone().strftime("%Y-%m-%d %H:%M %Z")
            for time in (told[0], told[-1])
        )
        times = {"first step": first, "finished": last, **times}
    return times


def _named(found: Mapping) -> str:
    return f"Data: {found.get('data', '')}"


def _data(found: Mapping) -> str:
    names = {field.name for field in dataclasses.fields(DataReport)} - {"findings", "left_out"}
    ledger = Ledger(**found["ledger"])
    report = DataReport(**{name: found[name] for name in names})
    share = found["targets"] / max(found["tokens"], 1)
    what = "scored" if ledger.is_scored else "trained"
    facts = {
        "rows": f"{found['rows']:,} ({ledger.kinds})",
        "documents": report.documents_in_words().removesuffix(" documents"),
        "tokens": f"{found['tokens']:,}",
        f"{what} tokens": f"{found['targets']:,} ({share:.0%})",
    }
    findings = [
        (
            one["level"],
            one["rule"],
            f"{one['count']:,}",
            ", ".join(map(str, one["rows"])),
            one["what"],
            one["remedy"],
        )
        for one in found["findings"]
    ]
    columns = ("", "rule", "rows", "the first", "what", "remedy")
    gate = (
        _table(columns, findings, classes=True)
        if findings
        else "<p>The gate found nothing wrong.</p>"
    )
    return _pairs(facts) + _table(LEDGER_COLUMNS, ledger.table()) + gate


def _settings(config: ChronicalsConfig) -> str:
    """Render the settings that were set or fitted; the others are folded away."""
    values = config.to_dict()
    usual = ChronicalsConfig().to_dict()
    rows = []
    for field in dataclasses.fields(config):
        fitted = "fitted to the data" if values[field.name] != usual.get(field.name) else "default"
        rows.append(
            (
                field.name,
                str(values[field.name]),
                "set" if field.name in config.explicit else fitted,
            )
        )
    columns = ("field", "value", "")
    chosen = [row for row in rows if row[2] != "default"]
    defaults = _table(columns, [row for row in rows if row[2] == "default"])
    return (
        _table(columns, chosen)
        + f"<details><summary>left to their defaults</summary>{defaults}</details>"
    )


def _samples(samples: Iterable[Sample]) -> str:
    return _table(
        ("prompt", "before", "after"),
        [(sample.prompt, sample.before, sample.after) for sample in samples],
    )


def _section(title: str, content: str) -> str:
    return f"\n<h2>{html.escape(title)}</h2>\n{content}"


def _pairs(facts: Mapping[str, object]) -> str:
    rows = (
        f"<tr><th>{html.escape(str(k))}</th><td>{html.escape(str(v))}</td></tr>"
        for k, v in facts.items()
    )
    return f"<table>{''.join(rows)}</table>"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], classes: bool = False) -> str:
    """Render a table; the first cell of a row is its class, if asked."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = []
    for row in rows:
        cells = "".join(f"<td><pre>{html.escape(cell)}</pre></td>" for cell in row)
        body.append(
            f'<tr class="{html.escape(row[0])}">{cells}</tr>' if classes else f"<tr>{cells}</tr>"
        )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _figure(metrics: Sequence[Mapping]) -> bytes:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    steps = [line for line in metrics if "loss" in line]
    panels = PANELS | {
        name: name for line in steps for name in line if name not in {*STEP_FIELDS, "time"}
    }
    rows = -(-len(panels) // 2)
    high = 3 * rows  # inches; margins are fixed, since a computed layout takes as long as drawing
    figure = Figure(figsize=(10, high))
    figure.subplots_adjust(
        left=0.08, right=0.99, bottom=0.5 / high, top=1 - 0.3 / high, wspace=0.22, hspace=0.36
    )
    FigureCanvasSVG(figure)
    axes = list(figure.subplots(rows, 2).flat)
    for axis, (name, label) in zip(axes, panels.items()):
        drawn = [line for line in steps if name in line]
        axis.plot(
            [line["step"] for line in drawn],
            [line[name] for line in drawn],
            lw=1.2,
            label="training",
        )
        if evaluations := [line for line in metrics if f"eval_{name}" in line]:
            axis.plot(
                [e["step"] for e in evaluations],
                [e[f"eval_{name}"] for e in evaluations],
                "o-",
                label="held-out",
            )
            axis.legend(frameon=False)
        axis.set_title(label, fontsize=10, loc="left")
        axis.set_xlabel("step", fontsize=8)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    image = io.BytesIO()
    figure.savefig(image, format="svg")
    return image.getvalue()
