"""A measured row as JSON and as bars."""

from __future__ import annotations

import math
import platform
import statistics
import subprocess
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from chronicals.benchmark.floor import STEP_PARTS, ReferenceStep, mfu
from chronicals.benchmark.parity import comparison
from chronicals.benchmark.rounds import MeasuredRow
from chronicals.standard_json import to_json
from chronicals.step_work import needed_flops
from chronicals.versions import installed

RECORDED_PACKAGES = (
    "chronicals",
    "torch",
    "triton",
    "transformers",
    "peft",
    "flash-attn-4",
    "liger-kernel",
    "unsloth",
    "unsloth-zoo",
    "xformers",
    "trl",
    "bitsandbytes",
    "accelerate",
)
"""Packages whose versions are recorded."""

REFERENCE_FIELDS = ("losses", "grad_norms", "settings", "seconds")
"""Fields of the reference's measurement that are recorded."""


def to_dict(row: MeasuredRow, commit: str | None = None) -> dict[str, Any]:
    """Return everything that was measured, raw samples included.

    A refused arm has its losses and no speed.
    """
    work = row.work
    job = row.job
    arms = {name: _arm(row, name) for name in row.runs}
    for name, reason in row.failed.items():
        arms.setdefault(name, {"status": "failed", "reason": reason})
    for name, reason in row.absent.items():
        arms[name] = {"status": "absent", "reason": reason}
    reference = row.reference
    floor, remarks = _floor(row)
    return {
        "row": {
            "model": work.name,
            "mode": work.mode,
            "data": work.data,
            "fields": work.fields,
            "steps": work.steps,
            "warm_up": work.warm_up,
            "tokens_a_step": job.tokens,
            "mean_length": job.mean_length,
            "labelled": job.labelled,
            "trained_parameters": None if job.uneven else job.trained_parameters,
            "optimizer_bytes": job.optimizer_bytes,
            **work.described,
        },
        "machine": row.rates.get("machine", {}),
        "python": platform.python_version(),
        "versions": versions(),
        "commit": commit or current_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "needed_flops_a_token": None if job.why_uncounted else needed_flops(job),
        "floor": floor,
        "rates": {
            name: row.rates.get(name) for name in ("copy_bytes_per_second", "products", "attention")
        },
        "reference": reference and {name: getattr(reference, name) for name in REFERENCE_FIELDS},
        "arms": arms,
        "ratios": _ratios(row),
        "orders": row.orders,
        "notes": [*row.notes, *remarks],
        "seconds": row.seconds,
    }


def write_row(result: dict[str, Any], path: Path) -> None:
    """Write to another file, then rename: a killed run leaves the last whole file."""
    aside = path.with_suffix(".part")
    aside.write_text(to_json(result, indent=1))
    aside.replace(path)


def _floor(row: MeasuredRow) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the reference step, and notes on arms that are faster than it.

    Each part has the best time seen: that by itself, or in our own step if its products are in 16
    bit. Those measured by themselves are under ``by_itself``. There is no reference step if a peer
    in 16 bit, or ours without a variant's fields, is faster; then the note says so.
    """
    if row.job.why_uncounted or "floor" not in row.rates:
        return None, []
    floor = ReferenceStep.from_dict(row.rates["floor"])
    ours = row.runs.get("ours")
    profile = (ours[0].profile or {}).get("milliseconds_a_step") if ours else None
    if ours and profile and "ours" not in row.refused and not ours[0].extra.get("fp8"):
        step_seconds = row.job.tokens / statistics.median(_rates(row, "ours"))
        floor = floor.best_seen({kind: time / 1000 for kind, time in profile.items()}, step_seconds)
    notes = []
    for name, runs in row.runs.items():
        if name in row.refused or runs[0].extra.get("fp8"):
            continue
        ratio = statistics.median(_rates(row, name)) / floor.tokens_per_second
        if ratio > 1 and not name.startswith("ours "):
            return None, [
                f"no reference step: {name} ran at {ratio:.1%} of it, so its parts were measured "
                "too slow; run the row again"
            ]
        if ratio > 1:
            notes.append(
                f"{name} ran at {ratio:.1%} of the reference step, which is that of the row's own "
                "fields: no share"
            )
    by_itself = {part: row.rates["floor"][part] for part in STEP_PARTS}
    return {**asdict(floor), "by_itself": by_itself}, notes


def _rates(row: MeasuredRow, name: str) -> list[float]:
    """Return the tokens per second of each sampled step."""
    return [rate for run in row.decisive(name) for rate in run.rates]


def _arm(row: MeasuredRow, name: str) -> dict[str, Any]:
    """Return the record of an arm that ran."""
    first = row.runs[name][0]
    other_reference = first.extra.get("reference")
    reference = row.reference
    if other_reference:
        reference = replace(first, **other_reference)
    status = "measured"
    if name in row.refused:
        status = "refused"
    elif name in row.failed:
        status = "failed"
    arm: dict[str, Any] = {
        "status": status,
        "reason": row.refused.get(name) or row.failed.get(name),
        "settings": first.settings,
        "fp8": bool(first.extra.get("fp8")),
        "parity": comparison(first, reference),
        "first_loss": first.losses[0],
        "last_loss": first.losses[-1],
        "grad_norms": first.grad_norms,
        "losses": first.losses,
        "trained_share": first.trained_share,
        "moved_share": min(run.moved_share for run in row.runs[name]),
        "tokens_a_step": statistics.mean(first.tokens),
        "padding_share": 1 - sum(first.computed or first.tokens) / sum(first.slots),
        "tokens_saved": 1 - sum(first.computed) / sum(first.tokens) if first.computed else None,
        "positions_a_step": statistics.mean(first.slots),
        "peak_gib": max(run.peak_gib for run in row.runs[name]),
    }
    return arm if status == "refused" else arm | _speed(row, name)


def _speed(row: MeasuredRow, name: str) -> dict[str, Any]:
    """Return the figures of an arm that was not refused, with the raw samples."""
    first = row.runs[name][0]
    samples = _rates(row, name)
    rate = statistics.median(samples)
    quarters = statistics.quantiles(samples, n=4) if len(samples) > 1 else [rate] * 3
    mfu_of_arm = share = None
    if not first.extra.get("fp8"):
        card = str(row.rates.get("machine", {}).get("card", ""))
        if row.work.config().mixed_precision != "fp32":
            mfu_of_arm = mfu(row.job, rate, card)
        floor, _ = _floor(row)
        ratio = rate / floor["tokens_per_second"] if floor else math.inf
        share = ratio if ratio <= 1 else None  # a note says that the arm is faster
    return {
        "tokens_per_second": {
            "median": rate,
            "lowest": min(samples),
            "highest": max(samples),
            "quartiles": [quarters[0], quarters[2]],
        },
        "mfu": mfu_of_arm,
        "share_of_floor": share,
        "rounds": len(row.runs[name]) - 1,
        "round_medians": [statistics.median(run.rates) for run in row.decisive(name)],
        "load_seconds": first.load_seconds,
        "first_step_seconds": first.seconds[0],
        "warm_up_seconds": sum(first.seconds[: first.warm_up]),
        "samples": [
            {"tokens": run.tokens[run.warm_up :], "seconds": run.seconds[run.warm_up :]}
            for run in row.runs[name]
        ],
        "profile": first.profile,
    }


def _ratios(row: MeasuredRow) -> dict[str, Any]:
    """Return our speed over that of each arm in the same decisive rounds.

    Ratios are by round and in the median.
    """
    ours = row.runs.get("ours", [])[1:]
    if "ours" in row.refused:
        return {}
    ratios = {}
    for name, runs in row.runs.items():
        pairs = list(zip(ours, runs[1:]))
        if name == "ours" or name in row.refused or not pairs:
            continue
        by_round = [statistics.median(a.rates) / statistics.median(b.rates) for a, b in pairs]
        ratios[name] = {"median": statistics.median(by_round), "by_round": by_round}
    return ratios


def versions() -> dict[str, str]:
    """Return the versions of the recorded packages."""
    return {name: installed(name) or "not installed" for name in RECORDED_PACKAGES}


def current_commit() -> str:
    """Return the commit of the source that runs; ``unknown`` without git."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def draw_row(result: dict[str, Any], path: Path) -> None:
    """Draw bars of the medians with the quartiles, and the reference step as a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    arms = {name: arm for name, arm in result["arms"].items() if "tokens_per_second" in arm}
    arms = dict(sorted(arms.items(), key=lambda item: item[1]["tokens_per_second"]["median"]))
    figure = Figure(figsize=(9, 1.6 + 0.5 * len(arms)), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for place, (name, arm) in enumerate(arms.items()):
        rate = arm["tokens_per_second"]
        low, high = rate["quartiles"]
        spread = [[max(rate["median"] - low, 0)], [max(high - rate["median"], 0)]]
        axis.barh(
            place,
            rate["median"],
            color="tab:blue" if name.startswith("ours") else "0.65",
            xerr=spread,
            height=0.6,
        )
        axis.text(
            max(high, rate["median"]),
            place,
            f"  {rate['median']:,.0f} · {arm['peak_gib']:.1f} GiB",
            va="center",
            fontsize=9,
        )
    if result["floor"]:
        axis.axvline(
            result["floor"]["tokens_per_second"],
            color="black",
            ls=":",
            lw=1.2,
            label="reference step, not a bound",
        )
        axis.legend(frameon=False, fontsize=9, loc="lower right")
    row = result["row"]
    axis.set_yticks(range(len(arms)), list(arms))
    axis.set_xlabel("real tokens per second")
    axis.set_title(
        f"{row['model']}, {row['mode']}, {row['data']} ({result['machine'].get('card', 'CPU')})",
        loc="left",
    )
    axis.margins(x=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
