"""A measured row as JSON and as bars."""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from chronicals.benchmark.floor import PARTS, ReferenceStep, mfu, needed_flops
from chronicals.benchmark.measurement import Measurement
from chronicals.benchmark.parity import comparison
from chronicals.benchmark.rounds import Row
from chronicals.standard_json import to_json

PACKAGES = (
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
OF_REFERENCE = ("losses", "grad_norms", "settings", "seconds")
"""What is kept of the fp32 steps."""


def to_dict(row: Row, commit: str | None = None) -> dict[str, Any]:
    """Everything that was measured, raw samples included; an arm that was refused has its losses
    and no speed.
    """
    work = row.work
    job = row.job
    arms = {name: _arm(row, name) for name in row.runs}
    arms |= {
        name: {"status": "failed", "reason": reason}
        for name, reason in row.failed.items()
        if name not in arms
    }
    arms |= {name: {"status": "absent", "reason": reason} for name, reason in row.absent.items()}
    reference = row.reference
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
            **work.described(),
        },
        "machine": row.rates.get("machine", {}),
        "python": platform.python_version(),
        "versions": versions(),
        "commit": commit or current_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "needed_flops_a_token": needed_flops(job) if job.counted else None,
        "floor": _floor(row),
        "rates": {
            name: row.rates.get(name) for name in ("copy_bytes_per_second", "products", "attention")
        },
        "reference": reference and {name: getattr(reference, name) for name in OF_REFERENCE},
        "arms": arms,
        "ratios": _ratios(row),
        "orders": row.orders,
        "notes": [*row.notes, *_doubts(row), *_beyond(row)],
        "seconds": row.seconds,
    }


def write(result: dict[str, Any], path: Path) -> None:
    """Write to another file, then rename: a killed run leaves the last whole file."""
    aside = path.with_suffix(".part")
    aside.write_text(to_json(result, indent=1))
    aside.replace(path)


def _floor(row: Row) -> dict[str, Any] | None:
    """The reference step, and under ``by_itself`` its parts as measured by themselves; None if
    there is none.
    """
    floor = None if _doubts(row) else _reference_step(row)
    if floor is None:
        return None
    return {**floor.to_dict(), "by_itself": {part: row.rates["floor"][part] for part in PARTS}}


def _reference_step(row: Row) -> ReferenceStep | None:
    """The best time seen of each part: by itself, or in our own step if its products are in 16
    bit.
    """
    if not row.job.counted or "floor" not in row.rates:
        return None
    floor = ReferenceStep.from_dict(row.rates["floor"])
    ours = row.runs.get("ours")
    profile = (ours[0].profile or {}).get("milliseconds_a_step") if ours else None
    if not ours or not profile or "ours" in row.refused or ours[0].extra.get("fp8"):
        return floor
    step_seconds = row.job.tokens / statistics.median(_rates(row, "ours"))
    return floor.best_seen({kind: time / 1000 for kind, time in profile.items()}, step_seconds)


def _doubts(row: Row) -> list[str]:
    """Why the reference step is dropped: a peer in 16 bit, or ours without a variant's fields,
    is faster than it.
    """
    floor = _reference_step(row)
    doubts = []
    if floor is None:
        return []
    for name, runs in row.runs.items():
        if name in row.refused or name.startswith("ours ") or runs[0].extra.get("fp8"):
            continue
        ratio = statistics.median(_rates(row, name)) / floor.tokens_per_second
        if ratio > 1:
            doubts.append(
                f"no reference step: {name} ran at {ratio:.1%} of it, so its parts were measured "
                "too slow; run the row again"
            )
    return doubts[:1]


def _beyond(row: Row) -> list[str]:
    """Notes on variants of ours that are faster than the reference step."""
    floor = _floor(row)
    notes = []
    for name, runs in row.runs.items():
        if (
            floor is None
            or not name.startswith("ours ")
            or name in row.refused
            or runs[0].extra.get("fp8")
        ):
            continue
        ratio = statistics.median(_rates(row, name)) / floor["tokens_per_second"]
        if ratio > 1:
            notes.append(
                f"{name} ran at {ratio:.1%} of the reference step, which is that of the row's own "
                "fields: no share"
            )
    return notes


def _rates(row: Row, name: str) -> list[float]:
    """Tokens per second of each sampled step."""
    return [rate for run in row.decisive(name) for rate in run.rates]


def _arm(row: Row, name: str) -> dict[str, Any]:
    first = row.runs[name][0]
    reference = first.extra.get("reference")
    beside = Measurement(**{**first.__dict__, **reference}) if reference else row.reference
    status = "refused" if name in row.refused else "failed" if name in row.failed else "measured"
    found: dict[str, Any] = {
        "status": status,
        "reason": row.refused.get(name) or row.failed.get(name),
        "settings": first.settings,
        "fp8": bool(first.extra.get("fp8")),
        "parity": comparison(first, beside),
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
    if status == "refused":
        return found
    samples = _rates(row, name)
    rate = statistics.median(samples)
    floor = None if first.extra.get("fp8") else _floor(row)
    card = str(row.rates.get("machine", {}).get("card", ""))
    quarters = statistics.quantiles(samples, n=4) if len(samples) > 1 else [rate] * 3
    return found | {
        "tokens_per_second": {
            "median": rate,
            "lowest": min(samples),
            "highest": max(samples),
            "quartiles": [quarters[0], quarters[2]],
        },
        "mfu": None
        if first.extra.get("fp8") or row.work.config().mixed_precision == "fp32"
        else mfu(row.job, rate, card),
        "share_of_floor": _share(rate, floor),
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


def _share(rate: float, floor: dict[str, Any] | None) -> float | None:
    """A rate over that of the reference step; None if there is none, or it is slower (a note
    says so).
    """
    ratio = rate / floor["tokens_per_second"] if floor else None
    return None if ratio is None or ratio > 1 else ratio


def _ratios(row: Row) -> dict[str, Any]:
    """Our speed over that of each arm in the same decisive rounds, by round and in the median."""
    ours = row.runs.get("ours", [])[1:]
    if "ours" in row.refused:
        return {}
    found = {}
    for name, runs in row.runs.items():
        pairs = list(zip(ours, runs[1:]))
        if name == "ours" or name in row.refused or not pairs:
            continue
        by_round = [statistics.median(a.rates) / statistics.median(b.rates) for a, b in pairs]
        found[name] = {"median": statistics.median(by_round), "by_round": by_round}
    return found


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def current_commit() -> str:
    """The commit of the source that runs; ``unknown`` without git."""
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


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars of the medians with the quartiles, and the reference step as a line."""
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
