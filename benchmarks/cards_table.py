"""The table of training on two cards beside one, from what ``several_cards.py`` wrote."""

import json
from typing import Any

from measured_rows import RESULTS

ROWS = {
    "16-layers-full": "8B widths, 16 layers, full, states in bf16",
    "16-layers-full-4k": "8B widths, 16 layers, full, 4,096 tokens a card",
    "8b-full": "8B full, states in bf16",
    "8b-lora": "8B LoRA",
    "8b-qlora": "8B QLoRA",
    "0.5b-full": "0.5B full, states in bf16",
    "0.5b-lora": "0.5B LoRA",
    "70b-qlora": "70B QLoRA, 2,048 tokens a card",
    "8b-qlora-64k": "8B QLoRA, one document of 65,536 tokens, layers recomputed",
}
WAYS = {
    "optimizer": "optimizer states",
    "weights": "weights too",
    "context": "the document, heads exchanged",
    "context-keys": "the document, keys gathered",
    "fsdp2-liger": "FSDP2, Liger",
    "fsdp2-liger-compile": "FSDP2, Liger, compiled",
    "fsdp2-liger-recompute": "FSDP2, Liger, recomputed",
    "fsdp2-liger-compile-recompute": "FSDP2, Liger, compiled, recomputed",
    "fsdp2-recompute": "FSDP2, recomputed",
    "fsdp2-compile-recompute": "FSDP2, compiled, recomputed",
}


def several_cards() -> list[str]:
    """Lines of Markdown; none where nothing was measured."""
    lines: list[str] = []
    for path in sorted(RESULTS.glob("several-cards-*.json")):
        result = json.loads(path.read_text())
        card = result["card"].removeprefix("NVIDIA ")
        cards = result["cards"]
        where = f"{cards} x {card}, torch {result['versions']['torch']}, `{result['commit']}`"
        lines += ["", f"{where}, `benchmarks/several_cards.py`:", *_table(result, cards)]
        lines += [
            line
            for way, found in result["rows"].get("save", {}).items()
            for line in _saving(WAYS[way], found)
        ]
    return lines


def _table(result: dict[str, Any], cards: int) -> list[str]:
    """Speeds beside one card's, with what they are; none where none was measured."""
    measured = [
        (title, result["rows"][name]) for name, title in ROWS.items() if name in result["rows"]
    ]
    lines = [
        _line(title, WAYS[way], ways.get("1x"), found, cards)
        for title, ways in measured
        for way, found in ways.items()
        if way in WAYS
    ]
    note = f" ({result['note']})" if "note" in result else ""
    head = [
        "documents of 2,048 tokens, 8,192 tokens a card and step (the 0.5B: 16,384), rank 32, "
        "nothing recomputed where it does "
        "not say so; medians of 8 steps. Losses of the first two steps beside those of one card "
        "with as many micro-batches as "
        f"there are cards{note}.",
        "",
        "| | shared among cards | tokens/s, one card | all cards | of their own rates | peak GiB "
        "a card | losses apart |",
        "|---|---|---|---|---|---|---|",
    ]
    return [*head, *lines] if lines else []


def _saving(shared: str, found: dict[str, Any]) -> list[str]:
    """How long checkpoints of a model of 8 layers hold steps that share so much; none where that
    failed.
    """
    if "failed" in found:
        return []
    stalls = ", ".join(f"{stall:.2f}" for stall in found["stalls"])
    size = f"{found['checkpoint_gb']:.1f} GB"
    beside = f"{max(found['steps_slower']):+.1%}"
    told = (
        f"a checkpoint of {size} holds steps for {stalls} s, and those beside it take {beside} "
        "longer (bars 0.5 s, 3%)"
    )
    return [
        "",
        f"8B widths, 8 layers, full, shared {shared}, {found['seconds_a_step']:.3f} s a step: "
        f"{told}.",
    ]


def _line(
    title: str, shared: str, alone: dict[str, Any] | None, found: dict[str, Any], cards: int
) -> str:
    if "failed" in found:
        return f"| {title} | {shared} | - | failed | - | - | - |"
    rate = found["tokens_per_second"]
    peak = max(found["peaks_gib"])
    one = "-"
    share = "-"
    apart = "-"
    if alone is not None and "tokens_per_second" in alone:
        one = f"{alone['tokens_per_second']:,.0f}"
        share = f"{rate / (cards * alone['tokens_per_second']):.3f}"
        apart = f"{max(abs(a - b) / b for a, b in zip(found['losses'], alone['losses'])):.0e}"
    return f"| {title} | {shared} | {one} | {rate:,.0f} | {share} | {peak:.1f} | {apart} |"
