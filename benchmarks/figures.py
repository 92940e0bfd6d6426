"""Writes the figures of README.md, between its marks, and the bars beside them, from the result files.

python benchmarks/figures.py
"""

import json
import statistics
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BARS = RESULTS / "rows.png"
BEGIN, END = "<!-- figures -->\n", "<!-- /figures -->"
PICKED = [
    "rmsnorm 4096 forward", "rmsnorm 4096 backward", "add_rmsnorm 4096 backward", "swiglu 14336 forward",
    "swiglu 14336 backward", "qk_rope 32/8x128 forward",
]  # fmt: skip
OPTIMIZERS = [
    "fused_adamw_ bfloat16 weights, bfloat16 states",
    "fused_adamw_ bfloat16 weights, float32 states",
    "gradient_norm bfloat16",
]
FP8_LAYERS = ["fp8_linear 4096 to 14336", "fp8_linear 14336 to 4096", "fp8_linear 4096 to 4096", "fp8_linear 2048 to 8192"]
HEADS = ["linear_cross_entropy bf16 dW 8192x4096x128256", "linear_cross_entropy bf16 dW 16384x896x151936"]


def load(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def measured_rows() -> dict[str, tuple[dict, dict[str, dict]]]:
    """By title: what was measured beside its peers, and its arms that have a speed, the fastest first."""
    found = {}
    for path in sorted(RESULTS.glob("row-*-h200.json")):
        row = json.loads(path.read_text())
        arms = {name: arm for name, arm in row["arms"].items() if arm["status"] == "measured"}
        arms = dict(sorted(arms.items(), key=lambda item: -item[1]["tokens_per_second"]["median"]))
        found[path.stem.removeprefix("row-").removesuffix("-h200").replace("-", " ")] = row, arms
    return found


def compared_rows() -> dict[str, tuple[dict, dict[str, dict]]]:
    """Those without arms of ours that were only scouted."""
    return {
        title: (row, {name: arm for name, arm in arms.items() if not is_scouted(name, arm)})
        for title, (row, arms) in measured_rows().items()
    }


def is_scouted(name: str, arm: dict) -> bool:
    """A point of a frontier."""
    return name.startswith("ours ") and not arm["rounds"]


def rows() -> list[str]:
    """An arm a line."""
    lines = [
        "`chronicals benchmark` on one H200, random weights, whole steps, every arm on the same weights, documents, order and "
        "labels; only documents' tokens count. Rounds: decisive ones, in turning order; an arm without one ran in the scouting "
        "round alone. A floor is measured by its own steps, at the clocks that those leave, so that a share may pass 100 % "
        "([notes](benchmarks/NOTES.md)).",
        "",
        f"![real tokens per second by row and arm]({BARS.relative_to(ROOT)})",
        "",
        "| row | arm | real tokens/s | share of the floor | peak GiB | loss | last gradient norm | trained | rounds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for title, (_, arms) in compared_rows().items():
        for name, arm in arms.items():
            norms = [norm for norm in arm["grad_norms"] if norm is not None]
            lines.append(
                f"| {title} | {name} | {arm['tokens_per_second']['median']:,.0f} | {share(arm)} "
                f"| {arm['peak_gib']:.1f} | {arm['first_loss']:.3f} → {arm['last_loss']:.3f} | {norms[-1]:.2f} "
                f"| {arm['trained_share']:.1%} | {arm['rounds'] or 'scouting'} |"
            )
            title = ""
    return lines


def share(arm: dict) -> str:
    """Of the floor, which is one of products in 16 bit."""
    return "-" if arm["share_of_floor"] is None else f"{arm['share_of_floor']:.0%}"


def draw_rows() -> None:
    """Bars of the medians, a panel a row, with the quartiles and the floor."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = compared_rows()
    heights = [1 + len(arms) for _, arms in found.values()]
    figure = Figure(figsize=(9, 0.34 * sum(heights) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(found), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axis, (title, (row, arms)) in zip(panels, found.items()):
        for place, (name, arm) in enumerate(reversed(arms.items())):
            rate = arm["tokens_per_second"]
            low, high = (abs(rate["median"] - quartile) for quartile in rate["quartiles"])
            color = "tab:blue" if name.startswith("ours") else "0.7"
            axis.barh(place, rate["median"], color=color, xerr=[[low], [high]], height=0.7)
            axis.text(
                rate["median"] + high,
                place,
                f"  {rate['median']:,.0f} · {arm['peak_gib']:.1f} GiB",
                va="center",
                fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
            )
        if row["floor"]:
            axis.axvline(row["floor"]["tokens_per_second"], color="black", ls=":", lw=1.2)
        axis.set_yticks(range(len(arms)), list(reversed(arms)), fontsize=8)
        axis.set_title(title, loc="left", fontsize=9)
        axis.tick_params(axis="x", labelsize=7)
        axis.margins(x=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("real tokens per second; dotted: the floor of our step", fontsize=8)
    figure.savefig(BARS, dpi=130, metadata={"Software": None})


def ladders() -> list[str]:
    """One lever after the other."""
    lines: list[str] = []
    for path in sorted(RESULTS.glob("ladder-*-h200.json")):
        result = json.loads(path.read_text())
        lines += [
            "",
            f"One lever after the other, {result['kind']}, the 0.5B shape on real text, 8 packs of 2048 a step "
            "(padded rows hold other documents in a step):",
            "",
            "| and with it | real tokens/s | peak GiB | first loss | last gradient norm |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {name} | {rung['tokens_per_second']['median']:,.0f} | {rung['peak_gib']:.1f} | {rung['losses'][0]:.4f} "
            f"| {rung['grad_norms'][-1]:.3f} |"
            for name, rung in result["rungs"].items()
        ]
    return lines


def frontiers() -> list[str]:
    """What each policy of memory costs and saves, and where the peers stand."""
    lines: list[str] = []
    for title, (_, arms) in measured_rows().items():
        if not any(is_scouted(name, arm) for name, arm in arms.items()):
            continue
        picture = draw_frontier(title, arms).relative_to(ROOT)
        lines += ["", f"Memory and speed, {title}:", "", f"![tokens per second over peak memory]({picture})", ""]
        lines += ["| | real tokens/s | peak GiB |", "|---|---|---|"]
        for name, arm in arms.items():
            lines.append(f"| {name} | {arm['tokens_per_second']['median']:,.0f} | {arm['peak_gib']:.1f} |")
    return lines


def draw_frontier(title: str, arms: dict[str, dict]) -> Path:
    """Median tokens per second over peak memory, an arm a point."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for name, arm in arms.items():
        place = arm["peak_gib"], arm["tokens_per_second"]["median"]
        axis.plot(*place, "o", color="tab:blue" if name.startswith("ours") else "0.5")
        axis.annotate(name, place, xytext=(5, 3), textcoords="offset points", fontsize=7)
    right, top = (
        max(values) for values in zip(*((arm["peak_gib"], arm["tokens_per_second"]["median"]) for arm in arms.values()))
    )
    axis.set(xlabel="peak GiB", ylabel="real tokens per second", title=title, ylim=(0, 1.1 * top), xlim=(0, 1.4 * right))
    path = RESULTS / f"frontier-{title.replace(' ', '-')}.png"
    figure.savefig(path, dpi=130, metadata={"Software": None})
    return path


def proofs() -> list[str]:
    """What FP8 does to training, whether it holds or not."""
    lines: list[str] = []
    for path in sorted(RESULTS.glob("fp8-proof*-h200.json")):
        result = json.loads(path.read_text())
        steps, start = len(result["runs"]["bf16"]["losses"]), "trained" if "pretraining" in result else "random"
        picture = draw_proof(path.with_suffix(".png"), result["runs"]).relative_to(ROOT)
        lines += [
            "",
            f"Training in FP8 beside bf16 from the same {start} weights over the same real text, {steps} steps, 1.04 billion "
            "parameters of width 2048; it holds where losses differ by at most 0.5 % and twice what other kernels make, "
            "and every layer's gradient has a cosine of 0.99 with that in fp32 and its norm within 10 %:",
            "",
            f"![losses over those of bf16]({picture})",
            "",
            "| | difference of losses, last third | between runs in bf16 | lowest cosine | norm off by | holds |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {name} | {one['paired_loss_difference']:.2%} | {one['between_bf16_runs']:.2%} | {one['lowest_cosine']:.3f} "
            f"| {one['norm_deviation']:.0%} | {'yes' if one['holds'] else 'no'} |"
            for name, one in result["verdicts"].items()
        ]
    return lines


def draw_proof(path: Path, runs: dict[str, dict]) -> Path:
    """Losses over those of bf16, means of 20 steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    base = runs["bf16"]["losses"]
    for name, run in runs.items():
        shares = [100 * (ours / plain - 1) for ours, plain in zip(run["losses"], base)]
        means = [statistics.mean(shares[max(0, step - 19) : step + 1]) for step in range(len(shares))]
        axis.plot(range(1, len(means) + 1), means, label=name, color="0.5" if name == "bf16" else None)
    axis.set(xlabel="step", ylabel="loss over that of bf16, %")
    axis.legend(fontsize=7)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    return path


def patched_step() -> list[str]:
    rows = load("patched-step-h200.json")["rows"]
    lines = [
        "",
        "A plain loop around a model of transformers, the same shape in bf16, torch's AdamW, 16,384 tokens a step, with "
        "`flash-attn-4` installed; loss and gradient norm are those of the first step on the same weights:",
        "",
        "| | tokens/s | peak GiB | loss | gradient norm |",
        "|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        rate = row["tokens"] / statistics.median(row["milliseconds"]) * 1e3
        name = name.replace("patched", "`patch_model`")
        lines.append(f"| {name} | {rate:,.0f} | {row['peak_gib']:.1f} | {row['loss']:.4f} | {row['grad_norm']:.3f} |")
    return lines


def kernels() -> list[str]:
    rows = load("kernels-h200.json")
    rate = rows["copy_bytes_per_second"]
    lines = [
        "",
        f"Kernels on the same card, bf16, cold cache (copy {rate / 1e12:.2f} TB/s), Liger 0.8.5 or torch in the same run:",
        "",
        "| kernel | | times as fast |",
        "|---|---|---|",
    ]
    for name in PICKED:
        row = rows["rows"][name]
        times = {arm: statistics.median(samples) for arm, samples in row["milliseconds"].items()}
        share = row["bytes"] / (times["ours"] * 1e-3) / rate
        lines.append(f"| {name} | {share:.0%} of the copy rate | {times['liger'] / times['ours']:.2f} (Liger) |")
    optimizers = load("optimizers-h200.json")
    for name in OPTIMIZERS:
        row = optimizers["rows"][name]
        times = {arm: statistics.median(samples) for arm, samples in row["milliseconds"].items()}
        share = row["bytes"] / (times["ours"] * 1e-3) / optimizers["copy_bytes_per_second"]
        without = ", which keeps no master and states in bf16" if "adamw" in name else ""
        lines.append(f"| {name} | {share:.0%} of the copy rate | {times['torch'] / times['ours']:.2f} (torch{without}) |")
    for name in HEADS:
        times = {arm: statistics.median(samples) for arm, samples in rows["rows"][name]["milliseconds"].items()}
        beside = f"{times['liger'] / times['ours']:.2f} (Liger)" if "liger" in times else "-"
        lines.append(f"| {name} | {times['ours'] / times['products']:.2f} times its three products | {beside} |")
    fp8 = load("fp8-h200.json")
    for name, row in fp8["rows"].items():
        times = {arm: statistics.median(samples) for arm, samples in row["milliseconds"].items()}
        if name.startswith("fp8 "):
            share = row["bytes"] / (times["ours"] * 1e-3) / fp8["copy_bytes_per_second"]
            if "compile" in times:
                name, beside = f"quantising to {name}", f"{times['compile'] / times['ours']:.2f} (torch.compile)"
            else:
                beside = "-"
            lines.append(f"| {name} | {share:.0%} of the copy rate | {beside} |")
        elif name in FP8_LAYERS:
            lines.append(f"| {name} | {times['ours'] / times['products']:.2f} times its three products in bf16 | - |")
    for name, row in load("layers-h200.json")["rows"].items():
        times = {arm: statistics.median(samples) for arm, samples in row["milliseconds"].items()}
        lines.append(f"| {name}, adapters of rank 16 | {times['ours'] / times['products']:.3f} times the frozen layers | - |")
    return lines


def data() -> list[str]:
    rates = load("data-rates-cpu.json")
    plan, assembly = rates["plans"][0], rates["assembly"][0]
    lines = [
        "",
        f"The data path on {rates['machine']['cores']} CPU cores; tokenising beside the bare tokenizer's `encode_batch` over "
        "the same texts and beside `datasets`, each from the file to Arrow:",
        "",
        "| | |",
        "|---|---|",
        f"| plan of packs, {plan['strategy']}, {plan['sequences']:,} documents at {plan['max_seq_length']} "
        f"| {plan['sequences_per_second']['median'] / 1e6:.1f} million/s, {plan['fill']['lowest']:.2%} full |",
        f"| assembly of Batches, one thread | {assembly['bytes_per_second']['median'] / 1e9:.1f} GB/s |",
    ]
    return lines + token_stores(load("token-store-cpu.json")) + token_stores(load("token-store-16-cores.json"))


def token_stores(stores: dict) -> list[str]:
    """A row each rate, and each whole store."""
    lines, cores = [], stores["machine"]["cores"]
    for kind, arms in stores["rates"].items():
        ours, compared = arms["ours"], stores["samples"][kind]["ours"][0]["rows"]
        lines.append(
            f"| store of {compared:,} {kind}, {cores} cores | {ours:,.0f} rows/s: "
            f"{ours / arms['encode_batch']:.2f} of `encode_batch`, {ours / arms['datasets.map']:.2f} times `datasets.map` |"
        )
    for kind, run in stores["whole"].items():
        lines.append(
            f"| {run['rows']:,} {kind}, {cores} cores | {run['seconds']:.0f} s, {run['peak_anonymous_mib']:,.0f} MiB beside "
            f"the page cache, opened again in {run['reopened_seconds']:.2f} s |"
        )
    return lines


def figures() -> str:
    return "\n".join([*rows(), *ladders(), *frontiers(), *proofs(), *patched_step(), *kernels(), *data()]) + "\n"


def with_figures(text: str) -> str:
    """``text`` with what stands between the marks made anew."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + figures() + END + rest.split(END)[1]


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(with_figures(readme.read_text()))
    draw_rows()
