"""Writes what was measured of mixtures of experts into docs/moe.md, from
``benchmarks/results/moe-*.json``.

python benchmarks/moe_page.py
"""

import json
from pathlib import Path
from typing import Any

from page_text import laid_out

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "moe.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- moe -->"
END = "<!-- /moe -->"


def table(columns: list[str], rows: list[list[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def exactness(found: dict) -> str:
    rows = [
        [name, f"{found['bars'][name]:g}", f"{value:.2g}"]
        for name, value in found["largest"].items()
    ]
    seeds = len(found["runs"])
    names = ", ".join(found["families"][0])
    said = (
        "The native model and transformers' families, random weights, texts of four windows, "
        "beside their classes; the largest "
        f"value over {seeds} seeds, of families over all of them ({names}):"
    )
    return f"{said}\n\n{table(['what differs', 'bar', 'found'], rows)}"


def lookahead(found: dict) -> str:
    native = found["native"]
    frozen = found["frozen"]
    sides = [run["after"] for run in native], [run["recalls"] for run in frozen]

    def words(values: list[float]) -> str:
        return f"{sum(values) / len(values):.1%}, least {min(values):.1%}"

    def ahead(runs: list[dict], distance: int, name: str) -> str:
        return words([row[distance] for run in runs for row in run[name] if len(row) > distance])

    rows = [
        [f"{d} layers ahead", *(ahead(runs, d, name) for runs in sides for name in HEADS)]
        for d in range(4)
    ]
    for number in range(len(sides[0][0]["token_ahead"])):
        first, second = (
            words([value for run in runs for value in run["token_ahead"][number]]) for runs in sides
        )
        rows.append([f"{number + 1} tokens ahead", first, "-", second, "-"])
    passes = found["about"]["frozen"]["distillation"]["passes"]
    twice = sum(run["d1_among_2k"] for run in frozen) / len(frozen)
    seeds = f"{len(frozen)} seed" + "s" * (len(frozen) > 1)
    head = [
        "recall of the chosen experts",
        "native, heads",
        "native, routers early",
        "Qwen3-MoE, heads",
        "routers early",
    ]
    return (
        "A million parameters, 16 experts of which a token gets 2, 8 layers, the documentation of "
        "Python's standard library; "
        "held-out text, the mean over layers and the least of them. The native model was trained "
        "with its heads for "
        f"{native[0]['steps']} steps, then its heads alone for {native[0]['head_steps']}; the "
        "Qwen3-MoE was trained without, "
        f"and heads learned from a trace of it, gone over {passes} times, while it did not run "
        f"({seeds}; checksum unchanged; "
        f"among twice as many, one layer ahead, {twice:.1%})."
        "\n\n"
        f"{table(head, rows)}"
    )


HEADS = ("layer_ahead", "gate_reuse")

RENAMED = {"log_odds_ratio": "log_odds_chosen"}
"""Metrics that are called otherwise since they were measured."""


def stages(found: dict) -> str:
    rows = []
    runs = found["stages"]
    for key in dict.fromkeys((run["stage"], run["measure"]) for run in runs):
        cells = []
        for family in ("chronicals_moe", "qwen3_moe"):
            for how in ("full", "lora"):
                some = [
                    r
                    for r in runs
                    if (r["stage"], r["measure"], r["family"], r["how"]) == (*key, family, how)
                ]
                before, after = (
                    sum(run[side] for run in some) / max(len(some), 1)
                    for side in ("before", "after")
                )
                count = f"{sum(run['improved'] for run in some)} of {len(some)}"
                cells.append(f"{before:.2f} → {after:.2f} ({count})" if some else "-")
        rows.append([key[0], RENAMED.get(key[1], key[1]), *cells])
    head = [
        "stage",
        "held-out",
        "native, full",
        "native, LoRA",
        "Qwen3-MoE, full",
        "Qwen3-MoE, LoRA",
    ]
    return (
        f"Every stage with losses of routers, {found['about']['steps']} steps of a small model; "
        "held-out rows before and "
        "after, the mean over seeds, and in how many of them it improved:"
        f"\n\n{table(head, rows)}\n\n{anchor(found['anchor'])}"
    )


def anchor(runs: list[dict]) -> str:
    rows = []
    for family in dict.fromkeys(run["family"] for run in runs):
        free, held = (
            [r for r in runs if r["family"] == family and bool(r["weight"]) == on]
            for on in (False, True)
        )
        ratios = [b["drift"] / a["drift"] for a, b in zip(free, held)]
        more = [b["cross_entropy"] / a["cross_entropy"] - 1 for a, b in zip(free, held)]
        first = max(run["anchor_first"] for run in held)
        rows.append(
            [family, f"{min(ratios):.2f} to {max(ratios):.2f}", f"{max(more):+.2%}", f"{first:g}"]
        )
    weight = next(run["weight"] for run in runs if run["weight"])
    head = [f"SFT with `anchor: {weight:g}`", "drift of the routers, of that without"]
    return table([*head, "held-out cross-entropy, most", "anchor at the first step"], rows)


def on_card(found: dict) -> str:
    training = found["training"]
    decoding = found["decoding"]
    arguments = found["about"]["arguments"]
    free = next(iter(training.values()))["tokens_per_second"]
    rows = [
        [
            name,
            f"{run['tokens_per_second']:,.0f}",
            f"{run['tokens_per_second'] / free - 1:+.1%}",
            f"{run['peak_gib']:.1f}",
        ]
        for name, run in training.items()
    ]
    lengths = dict.fromkeys(key.split(", ")[0] for key in decoding)
    cached = [
        [f"{int(n):,}", *(f"{decoding[f'{n}, {how}']:.0f} ms" for how in ("absorbed", "expanded"))]
        for n in lengths
    ]
    apart, whole = found["losses_with_graphs_and_without"]
    said = (
        f"The native model on a card ({found['card'].removeprefix('NVIDIA ')}, "
        f"`{found['about']['commit']}`): "
        f"{found['parameters'] / 1e9:.2f} billion random weights, {arguments['layers']} layers, "
        "64 experts of which a "
        f"token gets 8, whole training steps of {2048 * int(arguments['packs']):,} tokens; CUDA "
        "graphs beside none, losses of "
        f"{len(apart)} steps at most {max(abs(a - b) / b for a, b in zip(apart, whole)):.0e} apart."
    )
    decoded = "A token of one text, decoded by eager steps:"
    head = ["losses of routers", "tokens/s", "beside none", "peak GiB"]
    steps = table(
        ["tokens in the cache", "products with the latent", "keys and values made"], cached
    )
    return f"{said}\n\n{table(head, rows)}\n\n{decoded}\n\n{steps}"


def page() -> str:
    """The text of the page with today's results."""
    parts = []
    kinds = (
        ("exactness-cpu", exactness),
        ("lookahead-cpu", lookahead),
        ("stages-cpu", stages),
        ("card-h100", on_card),
    )
    for name, write in kinds:
        file = RESULTS / f"moe-{name}.json"
        if file.exists():
            parts.append(write(json.loads(file.read_text())))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    made = f"{before}{BEGIN}\n## Measured\n\n" + "\n\n".join(parts) + f"\n{END}{after}"
    return laid_out(made)


if __name__ == "__main__":
    PAGE.write_text(page())
