"""Writes what was measured of small mixtures of experts into docs/moe.md, from ``benchmarks/results/moe-*-cpu.json``.

    python benchmarks/moe_page.py
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "moe.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- moe -->", "<!-- /moe -->"


def table(columns: list[str], rows: list[list[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def exactness(found: dict) -> str:
    rows = [[name, f"{found['bars'][name]:g}", f"{value:.2g}"] for name, value in found["largest"].items()]
    seeds = len(found["runs"])
    said = f"The native model, random weights, texts of four windows; the largest value over {seeds} seeds:"
    return f"{said}\n\n{table(['what differs', 'bar', 'found'], rows)}"


def lookahead(found: dict) -> str:
    (native, *_), (frozen, *_) = found["native"], found["frozen"]

    def recalls(said: dict, distance: int, name: str) -> str:
        values = [row[distance] for row in said[name] if len(row) > distance]
        return f"{sum(values) / len(values):.1%}, least {min(values):.1%}"

    rows = [
        [f"{d} layers ahead", *(recalls(run, d, name) for run in (native["after"], frozen["recalls"]) for name in HEADS)]
        for d in range(4)
    ]
    for number, row in enumerate(native["after"]["token_ahead"]):
        other = frozen["recalls"]["token_ahead"][number]
        means = (f"{sum(values) / len(values):.1%}, least {min(values):.1%}" for values in (row, other))
        first, second = means
        rows.append([f"{number + 1} tokens ahead", first, "-", second, "-"])
    head = ["recall of the chosen experts", "native, heads", "native, routers early", "Qwen3-MoE, heads", "routers early"]
    return (
        "A million parameters, 16 experts of which a token gets 2, 8 layers, the documentation of Python's standard library; "
        "held-out text, the mean over layers and the least of them. The native model was trained with its heads for "
        f"{native['steps']} steps, then its heads alone for {native['head_steps']}; the Qwen3-MoE was trained without, and "
        f"heads distilled beside it (checksum unchanged; among twice as many, one layer ahead, {frozen['d1_among_2k']:.1%})."
        "\n\n"
        f"{table(head, rows)}"
    )


HEADS = ("layer_ahead", "gate_reuse")

RENAMED = {"log_odds_ratio": "log_odds_chosen"}
"""Metrics that are called otherwise since they were measured."""


def stages(found: dict) -> str:
    rows, runs = [], found["stages"]
    for key in dict.fromkeys((run["stage"], run["measure"]) for run in runs):
        cells = []
        for family in ("chronicals_moe", "qwen3_moe"):
            for how in ("full", "lora"):
                some = [r for r in runs if (r["stage"], r["measure"], r["family"], r["how"]) == (*key, family, how)]
                before, after = (sum(run[side] for run in some) / max(len(some), 1) for side in ("before", "after"))
                count = f"{sum(run['improved'] for run in some)} of {len(some)}"
                cells.append(f"{before:.2f} → {after:.2f} ({count})" if some else "-")
        rows.append([key[0], RENAMED.get(key[1], key[1]), *cells])
    head = ["stage", "held-out", "native, full", "native, LoRA", "Qwen3-MoE, full", "Qwen3-MoE, LoRA"]
    return (
        f"Every stage with losses of routers, {found['about']['steps']} steps of a small model; held-out rows before and "
        "after, the mean over seeds, and in how many of them it improved:"
        f"\n\n{table(head, rows)}\n\n{anchor(found['anchor'])}"
    )


def anchor(runs: list[dict]) -> str:
    rows = []
    for family in dict.fromkeys(run["family"] for run in runs):
        free, held = ([r for r in runs if r["family"] == family and bool(r["weight"]) == on] for on in (False, True))
        ratios = [b["drift"] / a["drift"] for a, b in zip(free, held)]
        more = [b["cross_entropy"] / a["cross_entropy"] - 1 for a, b in zip(free, held)]
        first = max(run["anchor_first"] for run in held)
        rows.append([family, f"{min(ratios):.2f} to {max(ratios):.2f}", f"{max(more):+.2%}", f"{first:g}"])
    weight = next(run["weight"] for run in runs if run["weight"])
    head = [f"SFT with `anchor: {weight:g}`", "drift of the routers, of that without"]
    return table([*head, "held-out cross-entropy, most", "anchor at the first step"], rows)


def page() -> str:
    """The text of the page with today's results."""
    parts = []
    for name, write in (("exactness", exactness), ("lookahead", lookahead), ("stages", stages)):
        file = RESULTS / f"moe-{name}-cpu.json"
        if file.exists():
            parts.append(write(json.loads(file.read_text())))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n## Measured\n\n" + "\n\n".join(parts) + f"\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page())
