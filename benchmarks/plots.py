"""Draws the plots of README.md and docs/measured.md from the result files; `figures.py` calls
it.
"""

import json
import statistics
from pathlib import Path

import measured_rows
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from measured_rows import Row

OURS = "tab:blue"
PEERS = "0.7"
SPEED = "speed.png"
MEMORY = "memory.png"
ROWS = "rows.png"


def draw_all() -> None:
    results = measured_rows.RESULTS
    draw_speed(results / SPEED, measured_rows.with_peers())
    draw_memory(results / MEMORY, measured_rows.with_frontier())
    draw_rows(results / ROWS, measured_rows.rows())
    for row in measured_rows.rows():
        if row.scouted:
            draw_frontier(results / frontier_name(row), row)
    for path in sorted(results.glob("fp8-proof*.json")):
        draw_proof(path.with_suffix(".png"), json.loads(path.read_text())["runs"])


def frontier_name(row: Row) -> str:
    return f"frontier-{row.title.replace(' ', '-')}.png"


def new_figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=130, metadata={"Software": None})


def median(arm: dict) -> float:
    return arm["tokens_per_second"]["median"]


def widest(row: Row) -> float:
    """The highest peak of memory of its arms."""
    return max(arm["peak_gib"] for arm in row.arms.values())


def draw_speed(path: Path, found: list[Row]) -> None:
    """Ours and the peers without recomputation, over the fastest peer of the row: a group of
    bars a row.
    """
    figure = new_figure(8, 4.4)
    axis = figure.subplots()
    place = 0.0
    labels = []
    for row in found:
        fastest = median(row.arms[row.peers[0]])
        for name in ["ours", *(peer for peer in row.peers if not peer.endswith("-recompute"))]:
            rate = median(row.arms[name])
            axis.barh(place, rate / fastest, color=OURS if name == "ours" else PEERS, height=0.8)
            axis.text(rate / fastest, place, f" {rate:,.0f} tokens/s", va="center", fontsize=8)
            labels.append((place, f"{row.name}   chronicals" if name == "ours" else name))
            place += 1
        place += 0.7
    axis.axvline(1, color="black", lw=0.8, ls=":")
    axis.set_yticks([at for at, _ in labels], [words for _, words in labels], fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.2)
    axis.set_xlabel("speed over that of the fastest peer", fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def draw_memory(path: Path, found: list[Row]) -> None:
    """Tokens per second over peak memory: a panel a row, what no other arm of ours beats joined
    by a line.
    """
    figure = new_figure(9.5, 3.4)
    for axis, row in zip(figure.subplots(1, len(found), squeeze=False)[0], found):
        ours = sorted(
            (arm["peak_gib"], median(arm))
            for name, arm in row.arms.items()
            if name.startswith("ours")
        )
        best = [
            point for at, point in enumerate(ours) if all(rate < point[1] for _, rate in ours[:at])
        ]
        axis.plot(*zip(*ours), "o", color=OURS, label="chronicals")
        axis.plot(*zip(*best), "-", color=OURS, lw=1)
        for rank, name in enumerate(row.peers):
            point = row.arms[name]["peak_gib"], median(row.arms[name])
            axis.plot(*point, "s", color="0.45")
            axis.annotate(
                name, point, xytext=(3, -10 if rank else 5), textcoords="offset points", fontsize=7
            )
        axis.set_title(row.name, fontsize=9)
        axis.set_xlabel("peak memory, GiB", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.set(ylim=(0, 1.1 * max(map(median, row.arms.values()))), xlim=(0, 1.2 * widest(row)))
        axis.spines[["top", "right"]].set_visible(False)
        axis.yaxis.set_major_formatter("{x:,.0f}")
    figure.axes[0].set_ylabel("tokens per second", fontsize=8)
    figure.axes[0].legend(fontsize=7, loc="lower right", frameon=False)
    save(figure, path)


def draw_rows(path: Path, found: list[Row]) -> None:
    """Bars of the medians of every arm, a panel a row, with the quartiles and the reference
    step.
    """
    heights = [1 + len(row.compared) for row in found]
    figure = new_figure(9, 0.34 * sum(heights) + 0.6)
    panels = figure.subplots(len(found), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[
        :, 0
    ]
    for axis, row in zip(panels, found):
        arms = row.compared
        reference_step = row.result["floor"]
        for place, (name, arm) in enumerate(reversed(arms.items())):
            rate = median(arm)
            low, high = (abs(rate - quartile) for quartile in arm["tokens_per_second"]["quartiles"])
            axis.barh(
                place,
                rate,
                color=OURS if name.startswith("ours") else PEERS,
                xerr=[[low], [high]],
                height=0.7,
            )
            axis.text(
                rate + high,
                place,
                f"  {rate:,.0f} · {arm['peak_gib']:.1f} GiB",
                va="center",
                fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
            )
        if reference_step:
            axis.axvline(reference_step["tokens_per_second"], color="black", ls=":", lw=1.2)
        axis.set_yticks(range(len(arms)), list(reversed(arms)), fontsize=8)
        axis.set_title(f"{row.title} ({row.card})", loc="left", fontsize=9)
        axis.tick_params(axis="x", labelsize=7)
        axis.margins(x=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel(
        "real tokens per second; dotted: reference step, best time seen of each part, not a bound",
        fontsize=8,
    )
    save(figure, path)


def draw_frontier(path: Path, row: Row) -> None:
    """Median tokens per second over peak memory, an arm a numbered point; the numbers are those
    of the table below it.
    """
    figure = new_figure(8, 4)
    axis = figure.subplots()
    for number, (name, arm) in enumerate(row.arms.items(), start=1):
        ours = name.startswith("ours")
        point = (arm["peak_gib"], median(arm))
        axis.plot(*point, "o" if ours else "s", color=OURS if ours else "0.45")
        axis.annotate(
            f"{number}" if ours else f"{number} {name}",
            point,
            xytext=(5, 3),
            textcoords="offset points",
            fontsize=8,
        )
    axis.set(
        xlabel="peak memory, GiB",
        ylabel="real tokens per second",
        title=row.title,
        xlim=(0, 1.15 * widest(row)),
    )
    axis.set_ylim(0, 1.1 * max(map(median, row.arms.values())))
    axis.yaxis.set_major_formatter("{x:,.0f}")
    save(figure, path)


def draw_proof(path: Path, runs: dict[str, dict]) -> None:
    """Losses of FP8 runs over those of bf16, means of 20 steps."""
    figure = new_figure(8, 3.5)
    axis = figure.subplots()
    base = runs["bf16"]["losses"]
    for name, run in runs.items():
        deviations = [100 * (ours / plain - 1) for ours, plain in zip(run["losses"], base)]
        means = [
            statistics.mean(deviations[max(0, step - 19) : step + 1])
            for step in range(len(deviations))
        ]
        axis.plot(
            range(1, len(means) + 1), means, label=name, color="0.5" if name == "bf16" else None
        )
    axis.set(xlabel="step", ylabel="loss over that of bf16, %")
    axis.legend(fontsize=7)
    save(figure, path)
