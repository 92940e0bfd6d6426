"""Writes the figures of README.md, between its marks, from the result files.

python benchmarks/figures.py
"""

import json
import statistics
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures -->\n", "<!-- /figures -->"
PICKED = [
    "rmsnorm 4096 forward", "rmsnorm 4096 backward", "add_rmsnorm 4096 backward", "swiglu 14336 forward",
    "swiglu 14336 backward", "qk_rope 32/8x128 forward",
]  # fmt: skip
HEADS = ["linear_cross_entropy bf16 dW 8192x4096x128256", "linear_cross_entropy bf16 dW 16384x896x151936"]


def load(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def rows() -> list[str]:
    """Every row that was measured beside its peers, an arm a line."""
    found = sorted(RESULTS.glob("row-*.json"))
    lines = [
        "`chronicals benchmark` on one H200, random weights, whole steps, every arm on the same weights, documents, order and "
        "labels; only documents' tokens count. Rounds: decisive ones, in turning order; an arm without one ran in the scouting "
        "round alone.",
        "",
        "| row | arm | real tokens/s | share of the floor | peak GiB | loss | last gradient norm | trained | rounds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for path in found:
        row = json.loads(path.read_text())
        title = path.stem.removeprefix("row-").removesuffix("-h200").replace("-", " ")
        measured = {name: arm for name, arm in row["arms"].items() if arm["status"] == "measured"}
        for name, arm in sorted(measured.items(), key=lambda item: -item[1]["tokens_per_second"]["median"]):
            norms = [norm for norm in arm["grad_norms"] if norm is not None]
            lines.append(
                f"| {title} | {name} | {arm['tokens_per_second']['median']:,.0f} | {arm['share_of_floor']:.0%} "
                f"| {arm['peak_gib']:.1f} | {arm['first_loss']:.3f} → {arm['last_loss']:.3f} | {norms[-1]:.2f} "
                f"| {arm['trained_share']:.1%} | {arm['rounds'] or 'scouting'} |"
            )
            title = ""
    return lines if found else []


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
        f"Kernels on the same card, bf16, cold cache (copy {rate / 1e12:.2f} TB/s), Liger 0.8.5 in the same run:",
        "",
        "| kernel | | times as fast as Liger |",
        "|---|---|---|",
    ]
    for name in PICKED:
        row = rows["rows"][name]
        times = {arm: statistics.median(samples) for arm, samples in row["milliseconds"].items()}
        share = row["bytes"] / (times["ours"] * 1e-3) / rate
        lines.append(f"| {name} | {share:.0%} of the copy rate | {times['liger'] / times['ours']:.2f} |")
    for name in HEADS:
        times = {arm: statistics.median(samples) for arm, samples in rows["rows"][name]["milliseconds"].items()}
        beside = f"{times['liger'] / times['ours']:.2f}" if "liger" in times else "-"
        lines.append(f"| {name} | {times['ours'] / times['products']:.2f} times its three products | {beside} |")
    return lines


def data() -> list[str]:
    rates, stores = load("data-rates-cpu.json"), load("token-store-cpu.json")
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
    for kind, arms in stores["rates"].items():
        ours = arms["ours"]
        lines.append(
            f"| store of {kind} | {ours:,.0f} rows/s: {ours / arms['encode_batch']:.2f} of `encode_batch`, "
            f"{ours / arms['datasets.map']:.2f} times `datasets.map` |"
        )
    for kind, run in stores["whole"].items():
        lines.append(
            f"| {run['rows']:,} {kind} | {run['seconds']:.0f} s, {run['peak_anonymous_mib']:.0f} MiB beside the page cache, "
            f"opened again in {run['reopened_seconds']:.2f} s |"
        )
    return lines


def figures() -> str:
    return "\n".join([*rows(), *patched_step(), *kernels(), *data()]) + "\n"


def with_figures(text: str) -> str:
    """``text`` with what stands between the marks made anew."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + figures() + END + rest.split(END)[1]


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(with_figures(readme.read_text()))
