"""Prints what the presets of a way and a card take, by `chronicals plan`, for models of seven sizes.

``python benchmarks/preset_table.py [--sizes 0.5B,8B] [--ways qlora] [--cards 16,24]
[--objective dpo]``; a second or a few a row on a CPU. Nothing is trained: a row is a plan, on a model
without memory, with the settings that ``fit`` takes on such a card. A card on which no settings fit
has no tokens/s; what would do stands behind the last of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from chronicals.config import preset
from chronicals.config.presets import CARDS, WAYS
from chronicals.models import quantise_layers
from chronicals.objectives import build_objective
from chronicals.planning import Machines, Plan, plan, planned_frozen
from chronicals.training.adapters import attach_adapters

GIGA = 1e9

SIZES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936),
    "1.5B": (1536, 8960, 28, 12, 2, 151936),
    "3B": (2048, 11008, 36, 16, 2, 151936),
    "8B": (4096, 14336, 32, 32, 8, 128256),
    "14B": (5120, 13824, 48, 40, 8, 152064),
    "32B": (5120, 27648, 64, 40, 8, 152064),
    "70B": (8192, 28672, 80, 64, 8, 128256),
}
"""Width, inner width, layers, query heads, key heads and vocabulary: those of Qwen2.5 and Llama 3."""

TIED = ("0.5B", "1.5B", "3B")
"""Sizes whose embedding is the head, too."""

HEADING = (
    "| model | way | card | fits | GB held | tokens/s | settings |\n|---|---|---|---|---|---|---|\n"
)


def planned(size: str, way: str, card: int, objective: str) -> Plan:
    """Return the plan of a preset for a model of a size."""
    config = preset(f"{way}-{card}gb", objective=objective)
    width, inner, layers, heads, keys, vocabulary = SIZES[size]
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=width,
                intermediate_size=inner,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=keys,
                vocab_size=vocabulary,
                tie_word_embeddings=size in TIED,
            )
        )
    if config.quantization:
        quantise_layers(model)
    attach_adapters(model, config, None)
    frozen = planned_frozen(build_objective(config), config)
    return plan(model, config, 1, Machines(memory=card * 10**9), frozen)


def row(size: str, way: str, card: int, one: Plan) -> str:
    """Return the row of a plan."""
    settings = ", ".join(f"{name}={value}" for name, value in one.settings.items())
    fits = "fit: " not in one.words[-1] or not one.words[-1].endswith("would do")
    words = settings or "as they are" if fits else one.words[-1].removeprefix("fit: ")
    speed = f"{one.tokens_per_second:,.0f}" if fits else "-"
    cells = (size, way, f"{card} GB", "yes" if fits else "no", f"{one.held / GIGA:.1f}", speed)
    return f"| {' | '.join((*cells, words))} |\n"


def rows(sizes: list[str], ways: list[str], cards: list[int], objective: str) -> Iterator[str]:
    """Yield a row for each preset and size, as it is planned."""
    for size in sizes:
        for way in ways:
            for card in cards:
                yield row(size, way, card, planned(size, way, card, objective))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--cards", default=",".join(map(str, CARDS)))
    parser.add_argument("--objective", default="sft")
    given = parser.parse_args()
    print(HEADING, end="")
    cards = [int(card) for card in given.cards.split(",")]
    for line in rows(given.sizes.split(","), given.ways.split(","), cards, given.objective):
        print(line, end="", flush=True)


if __name__ == "__main__":
    main()
