"""Plans the longest document of QLoRA on cards of several sizes, and writes `docs/long-documents.md`.

    python benchmarks/longest_table.py [--rows 8B-24,70B-80]
    python benchmarks/longest_table.py --page   # writes the page again from the results

Half a minute a row on a CPU. Nothing is trained: a row is the plan of the preset
``long-context`` for a model without memory, one document a step. Each is written to
``results/longest-documents.json`` as it comes, in the place of an earlier one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from page_text import laid_out
from preset_table import GIGA, RATES, SIZES, TIED
from transformers import LlamaConfig

from chronicals.benchmark.record import current_commit
from chronicals.cards import rates_of
from chronicals.config import ConfigurationError, Recipe
from chronicals.planning.longest import longest_document
from chronicals.planning.ways import planned_facts
from chronicals.policies.fit import fit_settings

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "longest-documents.json"
TRAINED = RESULTS.with_name("long-documents-h200.json")
PAGE = ROOT / "docs" / "long-documents.md"

GIB = 2**30

ROWS = [*(("8B", card) for card in (8, 12, 16, 24, 48, 80)), ("70B", 48), ("70B", 80)]
"""Sizes of models and GB of cards."""

PUBLISHED = {
    ("8B", 8): 2972,
    ("8B", 12): 21848,
    ("8B", 16): 40724,
    ("8B", 24): 78475,
    ("8B", 48): 191728,
    ("8B", 80): 342733,
    ("70B", 48): 12106,
    ("70B", 80): 89389,
}
"""Tokens that Unsloth publishes for QLoRA of rank 32 at batch 1 (its page on long context, 2025)."""

FIELDS: dict[str, Any] = {
    "use_lora": True,
    "lora_rank": 32,
    "lora_alpha": 32,
    "lora_dropout": 0.0,
    "quantization": "nf4",
    "gradient_accumulation_steps": 1,
    "fit": "settings",
}

INTRODUCTION = """\
# Long documents on one card

`chronicals plan --preset long-context --gpu-memory 80 --model …` tells the longest document that fits a card, and the
seconds of a step; `--output` writes its recipe, which `train` takes. These are its answers for the shapes of Llama 3,
QLoRA of rank 32 on all linear layers, one document a step. They are plans; what was trained stands below.

A step's time is mostly attention, whose work grows with the square of the length; it is told at the rates of {cards}. In host
memory are inputs of layers, optimizer states, and the embedding and the head: a host that has less holds fewer of them, and
the document is shorter ([memory](memory.md#long-documents)). What fits is what a run takes by itself, at most 90 % of the
card. Unsloth's lengths are those that it publishes.

| model | card | longest document | Unsloth | | seconds a step | held | in host memory | settings |
|---|---|---|---|---|---|---|---|---|
"""

MEASURED = """
Trained on an H200 whose allocator was capped, an 8B with random weights (`benchmarks/long_documents.py OUT.json --caps
24`). Where not all 32 layers were there, the cap is lower by what is always held of the others. A step's floor is its
products and its attention, each timed by itself. Seconds are those of the fastest step behind the first; where one step
alone was run they are left out.

| card | tokens | of Unsloth's | layers | peak | planned | s a step | of the floor |
|---|---|---|---|---|---|---|---|
"""

END = """
This page is written by `python benchmarks/longest_table.py`, from `benchmarks/results/longest-documents.json` ({date}).
"""


def planned(size: str, card: int) -> dict[str, Any]:
    """Return the longest document of a model's size on a card, and the plan of a step of it."""
    width, inner, layers, heads, keys, vocabulary = SIZES[size]
    row: dict[str, Any] = {"size": size, "card": card, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    row["commit"] = current_commit()
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=keys,
            vocab_size=vocabulary,
            max_position_embeddings=131072,
            tie_word_embeddings=size in TIED,
            architectures=["LlamaForCausalLM"],
        ).save_pretrained(folder)
        recipe = Recipe.given("long-context", None, model=folder, data=["not read"], **FIELDS)
        try:
            longest = longest_document(recipe, card * GIGA)
        except ConfigurationError as error:
            return {**row, "longest": 0, "words": str(error).rpartition("; ")[2]}
        facts = planned_facts(recipe.replace(max_seq_length=longest), card * GIGA, 1)
        taken = fit_settings(facts, rates=rates_of(RATES[card])).taken
    away = taken.fitted.memory.in_host_memory(*taken.fitted.plan)
    return {
        **row,
        "longest": longest,
        "seconds": taken.seconds,
        "held": taken.fitted.held,
        "host": sum(away.values()),
        "settings": taken.settings,
    }


def page(rows: list[dict[str, Any]]) -> str:
    """Return the page."""
    cards = ", ".join(dict.fromkeys(RATES[row["card"]] for row in rows))
    date = max(row["date"] for row in rows)
    trained = [row for row in json.loads(TRAINED.read_text())["caps"] if row["arm"] == "ours"]
    parts = [
        laid_out(INTRODUCTION.format(cards=cards)).rstrip("\n"),
        *[line_of(row) for row in rows],
        laid_out(MEASURED).rstrip("\n"),
        *[trained_line(row) for row in trained],
        laid_out(END.format(date=date)).rstrip("\n"),
    ]
    return "\n".join(parts) + "\n"


def line_of(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    published = PUBLISHED[row["size"], row["card"]]
    start = f"| {row['size']} | {row['card']} GB"
    if not row["longest"]:
        return f"{start} | none: {row['words']} | {published:,} | | | | | |"
    entries = [entry for entry in row["settings"].pop("memory", []) if entry != "auto"]
    fields = [f"`memory: [{', '.join(entries)}]`"] if entries else []
    fields += [f"`{name}: {value}`" for name, value in row["settings"].items()]
    return (
        f"{start} | {row['longest']:,} | {published:,} | {row['longest'] / published:.1f}x "
        f"| {row['seconds']:,.0f} | {row['held'] / GIB:.1f} GiB | {row['host'] / GIB:.0f} GiB "
        f"| {', '.join(fields)} |"
    )


def trained_line(row: dict[str, Any]) -> str:
    """Return a row of the table of what was trained."""
    # a cap that was lowered by hand for fewer layers stands for the card above it
    card = min(size for name, size in PUBLISHED if name == "8B" and size >= row["cap"])
    published = PUBLISHED["8B", card]
    off = row["planned_gib"] / row["peak_gib"] - 1
    timed = row["steps"] > 1
    seconds = f"{row['seconds']:,.1f}" if timed else ""
    share = f"{row['floor_seconds'] / row['seconds']:.2f}" if timed else ""
    return (
        f"| {card} GB | {row['length']:,} | {row['length'] / published:.1f}x "
        f"| {row['ran_layers']} of 32 | {row['peak_gib']:.2f} GiB "
        f"| {row['planned_gib']:.2f} GiB ({off:+.1%}) | {seconds} | {share} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="", help="as 8B-24,70B-80; all by default")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    given = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    asked = given.rows.split(",") if given.rows else [f"{size}-{card}" for size, card in ROWS]
    for size, card in [] if given.page else ROWS:
        if f"{size}-{card}" not in asked:
            continue
        row = planned(size, card)
        print(row, flush=True)
        kept = [one for one in found if (one["size"], one["card"]) != (size, card)]
        found = sorted([*kept, row], key=lambda one: ROWS.index((one["size"], one["card"])))
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
