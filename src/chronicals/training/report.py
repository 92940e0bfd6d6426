"""``report.html``: one file, readable without anything else, with the curves of the run."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

PANELS = {
    "loss": "loss",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm (before clipping)",
    "tokens_per_second": "real tokens per second",
    "fill": "packing fill",
}


def write_report(path: Path, title: str, metrics: Sequence[Mapping], facts: Mapping[str, object]) -> None:
    """Write the report.

    Args:
        metrics: the lines of ``metrics.jsonl``.
        facts: what the table at the top says.
    """
    rows = "\n".join(f"<tr><th>{html.escape(str(k))}</th><td>{html.escape(str(v))}</td></tr>" for k, v in facts.items())
    figure = base64.b64encode(_figure(metrics)).decode()
    path.write_text(
        f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse }} th, td {{ text-align: left; padding: .2rem 1rem .2rem 0; vertical-align: top }}
th {{ font-weight: 500; color: #666 }} img {{ width: 100%; margin-top: 1.5rem }}
</style></head>
<body><h1>{html.escape(title)}</h1>
<table>{rows}</table>
<img alt="curves of the run" src="data:image/svg+xml;base64,{figure}">
</body></html>
"""
    )


def _figure(metrics: Sequence[Mapping]) -> bytes:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    steps = [line for line in metrics if "loss" in line]
    evaluations = [line for line in metrics if "eval_loss" in line]
    figure = Figure(figsize=(10, 9), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots(3, 2).flat
    for axis, (name, label) in zip(axes, PANELS.items()):
        axis.plot([line["step"] for line in steps], [line[name] for line in steps], lw=1.2, label="training")
        if name == "loss" and evaluations:
            axis.plot([e["step"] for e in evaluations], [e["eval_loss"] for e in evaluations], "o-", label="held-out")
            axis.legend(frameon=False)
        axis.set_title(label, fontsize=10, loc="left")
        axis.set_xlabel("step", fontsize=8)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in list(axes)[len(PANELS) :]:
        axis.set_visible(False)
    figure.axes[-1].set_visible(False)
    image = io.BytesIO()
    figure.savefig(image, format="svg")
    return image.getvalue()
