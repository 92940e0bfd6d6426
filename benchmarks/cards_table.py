"""The table of training on two cards beside one, from what ``several_cards.py`` wrote."""

import json
from typing import Any

from measured_rows import RESULTS

ROWS = {
    "16-layers-full": "8B widths, 16 layers, full, states in bf16",
    "16-layers-full-4k": "the same, 4,096 tokens a card",
    "8b-full": "8B full, states in bf16",
    "8b-lora": "8B LoRA",
    "8b-qlora": "8B QLoRA",
    "0.5b-full": "0.5B full, states in bf16",
    "0.5b-lora": "0.5B LoRA",
    "70b-qlora": "70B QLoRA, 2,048 tokens a card",
}
WAYS = {"optimizer": "optimizer states", "weights": "weights too"}


def several_cards() -> list[str]:
    """Lines of Markdown; none where nothing was measured."""
    lines: list[str] = []
    for path in sorted(RESULTS.glob("several-cards-*.json")):
        result = json.loads(path.read_text())
        card, cards = result["card"].removeprefix("NVIDIA "), result["cards"]
        lines += [
            "",
            f"{cards} x {card}, torch {result['versions']['torch']}, `{result['commit']}`, `benchmarks/several_cards.py`: "
            "documents of 2,048 tokens, 8,192 tokens a card and step (the 0.5B: 16,384), rank 32, nothing recomputed; medians "
            "of 8 steps. Losses of the first two steps beside those of one card with as many micro-batches as there are cards:",
            "",
            "| | shared among cards | tokens/s, one card | all cards | of their own rates | peak GiB a card | losses apart |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, title in ROWS.items():
            ways = result["rows"].get(name, {})
            lines += [_line(title, WAYS[way], ways.get("1x"), found, cards) for way, found in ways.items() if way in WAYS]
    return lines


def _line(title: str, shared: str, alone: dict[str, Any] | None, found: dict[str, Any], cards: int) -> str:
    if "failed" in found:
        return f"| {title} | {shared} | - | failed | - | - | - |"
    rate, peak = found["tokens_per_second"], max(found["peaks_gib"])
    one, share, apart = "-", "-", "-"
    if alone is not None and "tokens_per_second" in alone:
        one, share = f"{alone['tokens_per_second']:,.0f}", f"{rate / (cards * alone['tokens_per_second']):.3f}"
        apart = f"{max(abs(a - b) / b for a, b in zip(found['losses'], alone['losses'])):.0e}"
    return f"| {title} | {shared} | {one} | {rate:,.0f} | {share} | {peak:.1f} | {apart} |"
