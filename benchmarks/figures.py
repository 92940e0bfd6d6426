"""Writes the tables of README.md and docs/measured.md, between their marks, and the pictures, from the result files.

    python benchmarks/figures.py

A row may have been measured several times: `results/row-NAME-CARD.json`, `results/row-NAME-CARD-2.json` and so on, CARD being
h100, h200 or another. Tables show the newest of them, with the range over all of them.
"""

import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BARS = RESULTS / "rows.png"
BEGIN, END = "<!-- figures -->\n", "<!-- /figures -->"
MEASURED_ROW = re.compile(r"row-(?P<row>.+)-(?P<card>[a-z]{1,2}\d{2,4})(?:-(?P<run>\d+))?\.json")
BEFORE_PADDING_WAS_MENDED = frozenset({"cec05f6", "90d3c13", "d6d7d10", "7b0e1e0"})
"""Commits of ragged rows older than 706fd1a, since which padded peers have a step's documents sorted by length."""

LEANEST_OF = ("0.5b full fixed", "0.5b lora fixed", "8b lora fixed")
"""Rows with a frontier of memory and speed."""

UNLIKE_PEERS = ("use_fp8=True", "max_grad_norm=inf")
"""Settings of ours that no peer has: they multiply in 16 bit and clip."""

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


@dataclass(frozen=True)
class Row:
    """A row of the tables.

    Attributes:
        result: the newest measurement.
        others: earlier ones, and those on other cards.
        arms: of the newest, those that have a speed, the fastest first.
    """

    title: str
    result: dict
    others: list[dict]
    arms: dict[str, dict]

    @property
    def compared(self) -> dict[str, dict]:
        """Without arms of ours that were only scouted."""
        return {name: arm for name, arm in self.arms.items() if not is_scouted(name, arm)}

    @property
    def scouted(self) -> bool:
        return any(is_scouted(name, arm) for name, arm in self.arms.items())

    @property
    def old_padding(self) -> bool:
        """Whether its padded peers had documents in arrival order, most of their positions padding."""
        return "ragged" in self.title and self.result["commit"] in BEFORE_PADDING_WAS_MENDED

    @property
    def place(self) -> str:
        """Card, torch and commit."""
        card = self.result["machine"]["card"].removeprefix("NVIDIA ")
        return f"{card}, torch {self.result['versions']['torch']}, `{self.result['commit']}`"

    def rates(self, name: str) -> list[float]:
        """Tokens per second of an arm in all measurements that it has a speed in."""
        arms = [result["arms"].get(name, {}) for result in (self.result, *self.others)]
        return [arm["tokens_per_second"]["median"] for arm in arms if arm.get("status") == "measured"]

    def ratios(self, name: str) -> list[float]:
        """Ours over an arm in all measurements that compare them in the same rounds."""
        results = (self.result, *self.others)
        return [result["ratios"][name]["median"] for result in results if name in result["ratios"]]


def rows() -> list[Row]:
    """What lies in the results; of measurements without a date, the one without a number is the newest."""
    found: dict[str, list[tuple[str, int, dict]]] = {}
    for path in sorted(RESULTS.glob("row-*.json")):
        parts = MEASURED_ROW.fullmatch(path.name)
        if parts is None:
            raise SystemExit(f"{path.name}: expected row-NAME-CARD.json or row-NAME-CARD-2.json")
        result = json.loads(path.read_text())
        found.setdefault(parts["row"].replace("-", " "), []).append((result.get("date", ""), -int(parts["run"] or 1), result))
    return [
        row_of(title, [result for *_, result in sorted(measured, key=lambda one: one[:2])]) for title, measured in found.items()
    ]


def row_of(title: str, results: list[dict]) -> Row:
    *others, newest = results
    arms = {name: arm for name, arm in newest["arms"].items() if arm["status"] == "measured"}
    arms = dict(sorted(arms.items(), key=lambda item: -item[1]["tokens_per_second"]["median"]))
    return Row(title, newest, others, arms)


def is_scouted(name: str, arm: dict) -> bool:
    """A point of a frontier."""
    return name.startswith("ours ") and not arm["rounds"]


def several_commits(found: list[Row]) -> list[str]:
    """What must be said of a table whose rows are of different commits."""
    if len({result["commit"] for row in found for result in (row.result, *row.others)}) == 1:
        return []
    return ["", "Not all of it was measured at one commit: compare the arms of a row, not rows with each other."]


def with_range(values: list[float], form: str) -> str:
    """The first of them, and the range where there are others."""
    words = format(values[0], form)
    low, high = format(min(values), form), format(max(values), form)
    return words if low == high else f"{words} ({low} to {high})"


def peers_of(row: Row) -> list[str]:
    """Arms that are not ours, the fastest first."""
    return [name for name in row.arms if not name.startswith("ours")]


def speeds() -> list[str]:
    """Ours beside the fastest peer, a row a line; without rows whose peers were padded as they are no longer."""
    compared = [row for row in rows() if peers_of(row) and "ours" in row.arms]
    found = [row for row in compared if not row.old_padding]
    lines = [
        "| row | real tokens/s | fastest peer | times as fast | MFU | of the reference step | measured on |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        best = peers_of(row)[0]
        rate, peer = row.rates("ours"), row.rates(best)
        cells = [
            row.title, with_range(rate, ",.0f"), f"{best} {with_range(peer, ',.0f')}{in_16_bit(row)}",
            with_range(row.ratios(best) or [rate[0] / peer[0]], ".2f"),
            mfu(row.arms["ours"]), share(row.arms["ours"]), row.place,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    if left_out := [f"`{row.title}`" for row in compared if row.old_padding]:
        lines += [
            "",
            f"Left out until they are run again: {', '.join(left_out)}, measured before the padding of peers was mended.",
        ]
    return lines + several_commits(found)


def in_16_bit(row: Row) -> str:
    """What must be said of a peer beside ours in FP8."""
    return " in bf16" if row.result.get("row", {}).get("fields", {}).get("use_fp8") else ""


def memories() -> list[str]:
    """Our leanest way beside the leanest peer, a row a line; ways that a peer has no like of have a line of their own."""
    found = [row for row in rows() if row.title in LEANEST_OF and row.scouted and peers_of(row)]
    lines = [
        "| row | ours, nothing saved | ours, least memory | peer with the least memory |",
        "|---|---|---|---|",
    ]
    for row in found:
        ours = [name for name in row.arms if name.startswith("ours")]
        peer, plain = least(row, peers_of(row)), memory_and_speed(row.arms["ours"])
        like, other = ([name for name in ours if bool(unlike_peers(row, name)) == unlike] for unlike in (False, True))
        if like:
            lines.append(f"| {row.title} | {plain} | {with_settings(row, least(row, like))} | {with_settings(row, peer)} |")
        if other:
            name = least(row, other)
            lines.append(f"| {row.title}, {' and '.join(unlike_peers(row, name))} | {plain} | {with_settings(row, name)} | - |")
    return lines + several_commits(found)


def least(row: Row, names: list[str]) -> str:
    """The arm with the lowest peak of memory."""
    return min(names, key=lambda name: row.arms[name]["peak_gib"])


def with_settings(row: Row, name: str) -> str:
    """Memory and speed of an arm, and how it ran; a peer's name."""
    peer = "" if name.startswith("ours") else f"{name}, "
    return f"{memory_and_speed(row.arms[name])} ({peer}{row.arms[name]['settings']})"


def unlike_peers(row: Row, name: str) -> list[str]:
    """Settings of an arm of ours that no peer has."""
    settings = row.arms[name]["settings"] + (", use_fp8=True" if row.arms[name].get("fp8") else "")
    return [words for words in UNLIKE_PEERS if words in settings]


def memory_and_speed(arm: dict) -> str:
    return f"{arm['peak_gib']:.1f} GiB, {arm['tokens_per_second']['median']:,.0f} tokens/s"


def summary() -> str:
    """What stands in README.md: a table of speed and one of memory, with a picture each."""
    picture = RESULTS / "frontier-0.5b-full-fixed.png"
    lines = [
        "Whole training steps with random weights, every arm on the same weights, documents, order and labels; only documents' "
        "tokens count. `fixed` has documents of 2048 tokens, `ragged` of 32 to 2048. In brackets the range over several "
        "measurements. MFU is that of ours. The reference step has for each part the best time seen, by itself or in our own "
        "step; it is not a bound.",
        "",
        f"![real tokens per second by row and arm]({BARS.relative_to(ROOT)})",
        "",
        *speeds(),
        "",
        f"![tokens per second over peak memory]({picture.relative_to(ROOT)})",
        "",
        *memories(),
        "",
        "All arms and rows, the levers one by one, FP8, kernels, the data path: [docs/measured.md](docs/measured.md). "
        "How it is measured: [docs/benchmark.md](docs/benchmark.md).",
    ]
    return "\n".join(lines) + "\n"


def arms() -> list[str]:
    """An arm a line."""
    lines = [
        "## Rows",
        "",
        "`chronicals benchmark`, random weights, whole steps, every arm on the same weights, documents, order and labels; only "
        "documents' tokens count. Rounds: decisive ones, in turning order; an arm without one ran in the scouting round alone. "
        "Padding: share of the positions computed. The reference step has for each part (products, attention, elementwise "
        "bytes, loss, optimizer) the best time seen, by itself or in our own step; it is not a bound ([how](benchmark.md)). It "
        "and MFU are those of 16 bit: an arm in FP8 has neither. In brackets: the range over several measurements.",
        "",
        "| row | arm | real tokens/s | ours, times as fast | MFU | of the reference step | peak GiB | padding | loss "
        "| last gradient norm | trained | rounds |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    found = rows()
    for row in found:
        first = f"{row.title}{' (old padding)' if row.old_padding else ''}: {row.place}"
        for name, arm in row.compared.items():
            norms = [norm for norm in arm["grad_norms"] if norm is not None]
            ratios = row.ratios(name)
            lines.append(
                f"| {first} | {name} | {with_range(row.rates(name), ',.0f')} | {with_range(ratios, '.2f') if ratios else '-'} "
                f"| {mfu(arm)} | {share(arm)} | {arm['peak_gib']:.1f} | {arm['padding_share']:.0%} "
                f"| {arm['first_loss']:.3f} → {arm['last_loss']:.3f} | {norms[-1]:.2f} "
                f"| {arm['trained_share']:.1%} | {arm['rounds'] or 'scouting'} |"
            )
            first = ""
    return lines + old_padding(found) + several_commits(found) + without_speed(found)


def old_padding(found: list[Row]) -> list[str]:
    """What must be said of ragged rows measured before the padding of peers was mended."""
    if not any(row.old_padding for row in found):
        return []
    return [
        "",
        "Old padding: measured before 706fd1a, when padded peers had documents in arrival order, so that most of their "
        "positions were padding, and Unsloth's packed LoRA one call of attention a document. Such rows favour ours and "
        "are to be run again.",
    ]


def without_speed(found: list[Row]) -> list[str]:
    """Arms that failed or were refused, with the reason; those that were not installed are no result."""
    lines = []
    for row in found:
        for name, arm in row.result["arms"].items():
            if arm["status"] in ("failed", "refused"):
                lines.append(f"- {row.title}, {name}: {arm['status']}: {' '.join(str(arm['reason']).split())[:300]}")
    return ["", "Without a speed:", "", *lines] if lines else []


def mfu(arm: dict) -> str:
    """Over the peak of bf16, which says nothing of an arm in FP8."""
    return "-" if arm.get("mfu") is None or arm.get("fp8") else f"{arm['mfu']:.0%}"


def share(arm: dict) -> str:
    """Of the reference step, which is one of products in 16 bit."""
    return "-" if arm["share_of_floor"] is None else f"{arm['share_of_floor']:.0%}"


def draw_rows() -> None:
    """Bars of the medians, a panel a row, with the quartiles and the reference step; without rows of the old padding."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = [row for row in rows() if not row.old_padding]
    heights = [1 + len(row.compared) for row in found]
    figure = Figure(figsize=(9, 0.34 * sum(heights) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(found), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axis, row in zip(panels, found):
        arms, floor = row.compared, row.result["floor"]
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
        if floor:
            axis.axvline(floor["tokens_per_second"], color="black", ls=":", lw=1.2)
        axis.set_yticks(range(len(arms)), list(reversed(arms)), fontsize=8)
        axis.set_title(f"{row.title} ({row.result['machine']['card'].removeprefix('NVIDIA ')})", loc="left", fontsize=9)
        axis.tick_params(axis="x", labelsize=7)
        axis.margins(x=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel(
        "real tokens per second; dotted: reference step, best time seen of each part, not a bound", fontsize=8
    )
    figure.savefig(BARS, dpi=130, metadata={"Software": None})


def shown(picture: Path) -> str:
    """A picture's address in docs/measured.md."""
    return f"../{picture.relative_to(ROOT)}"


def ladders() -> list[str]:
    """One lever after the other."""
    lines: list[str] = []
    for path in sorted(RESULTS.glob("ladder-*-h200.json")):
        result = json.loads(path.read_text())
        lines += [
            "",
            "## One lever after the other",
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
    for row in rows():
        if not row.scouted:
            continue
        picture = shown(draw_frontier(row.title, row.arms))
        lines += [
            "",
            f"Memory and speed, {row.title} ({row.place}):",
            "",
            f"![tokens per second over peak memory]({picture})",
            "",
        ]
        lines += ["| | real tokens/s | peak GiB |", "|---|---|---|"]
        for name, arm in row.arms.items():
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
        picture = shown(draw_proof(path.with_suffix(".png"), result["runs"]))
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


def startups() -> list[str]:
    """Seconds from the command to the first step and from the last to the end."""
    lines: list[str] = []
    for path in sorted(RESULTS.glob("startup-*.json")):
        result = json.loads(path.read_text())
        card = result["card"].removeprefix("NVIDIA ")
        note = f"{result['note']}; " if "note" in result else ""
        lines += [
            "",
            f"{card}, torch {result['versions']['torch']}, `{result['commit']}`, the {result['shape']} shape, "
            f"{result['mode']}, {result['steps']} steps; cold: without any cache; {note}seconds in the median:",
            "",
            "| | caches | runs | to the first step | imports | model | data | patching | first step | after the last step |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for arm, cache in dict.fromkeys((run["arm"], run["cache"]) for run in result["runs"]):
            runs = [run["seconds"] for run in result["runs"] if (run["arm"], run["cache"]) == (arm, cache) and "seconds" in run]
            names = ("to first step", "imports", "model", "data", "patching", "first step", "after last step")
            cells = [f"{statistics.median(run[name] for run in runs):.1f}" for name in names] if runs else ["failed"]
            lines.append(f"| {arm} | {cache} | {len(runs)} | {' | '.join(cells)} |")
    return ["", "## Start-up", *lines] if lines else []


def figures() -> str:
    """What stands in docs/measured.md: everything."""
    sections = {
        "## Memory": frontiers(), "## FP8": proofs(), "## Patched models of transformers": patched_step(),
        "## Kernels": kernels(), "## Data": data(),
    }  # fmt: skip
    titled = [line for title, lines in sections.items() for line in ("", title, *lines)]
    return "\n".join([*arms(), *startups(), *ladders(), *titled]) + "\n"


def with_figures(text: str, made: str) -> str:
    """``text`` with what stands between the marks made anew."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + made + END + rest.split(END)[1]


PAGES = {"README.md": summary, "docs/measured.md": figures}

if __name__ == "__main__":
    for name, make in PAGES.items():
        page = ROOT / name
        page.write_text(with_figures(page.read_text(), make()))
    draw_rows()
