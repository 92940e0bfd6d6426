"""Writes docs/planning.md: what an 8B and a 70B take on 8 to 1,024 cards, by `chronicals plan`,
and the memory of plans beside that of the recorded rows.

``python benchmarks/plan_table.py [--measured] [--out docs/planning.md]``; some minutes on a CPU.
With ``--measured`` it prints the comparison alone, with the parts of each row.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from measured_rows import RESULTS
from memory_table import compared, section
from page_text import laid_out
from transformers import LlamaConfig, LlamaForCausalLM

from chronicals.config import ChronicalsConfig
from chronicals.models import quantise_layers
from chronicals.planning import Machines, Plan, plan
from chronicals.training.adapters import attach_adapters

ROOT = Path(__file__).parent.parent
CARDS = (8, 64, 256, 1024)
GIGA = 1e9
REACHED = 6e14
"""FLOP/s of a card in the table."""
SIZES = {
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
USUAL = {"batch_size": 4, "max_seq_length": 2048, "gradient_accumulation_steps": 1}
WORKS = {
    "8B full, states in bf16": ("8B", {"use_lora": False, "optimizer_state_dtype": "bf16"}, CARDS),
    "the same, 16 micro-batches": (
        "8B",
        {"use_lora": False, "optimizer_state_dtype": "bf16", "gradient_accumulation_steps": 16},
        CARDS,
    ),
    "8B LoRA, rank 32": ("8B", {"use_lora": True, "lora_rank": 32}, CARDS),
    "8B LoRA, packs of 131,072 on 8 cards each": (
        "8B",
        {
            "use_lora": True,
            "lora_rank": 32,
            "batch_size": 1,
            "max_seq_length": 131072,
            "context_parallel": 8,
        },
        CARDS,
    ),
    "70B QLoRA, rank 32": ("70B", {"quantization": "nf4", "lora_rank": 32}, CARDS),
    "8B full, states in bf16, weights divided": (
        "8B",
        {"use_lora": False, "optimizer_state_dtype": "bf16", "sharding": "weights"},
        CARDS,
    ),
    "70B full, states in bf16": (
        "70B",
        {"use_lora": False, "optimizer_state_dtype": "bf16"},
        CARDS,
    ),
}

INTRODUCTION = """\
# What a run takes

```
chronicals plan recipe.yaml                                  # one card, by part
chronicals plan --model MODEL --gpus 2,8,64                  # and any field of train: --use-lora, --batch-size, recipe.yaml
chronicals plan --model MODEL --gpus 8 --gpu-memory 24 --link 20
chronicals plan --model MODEL --gpus 1 --gpu-memory 16GiB --fit settings --output fitted.yaml
```

No card is needed, data are not read, and of the models their configurations alone. For one card it prints what fills it at the
largest moment of a step: the loss, the gradient of the head, the backward pass of the last or of the first layer, or the
gradient of the embedding.
Each is a sum of parts: weights by format, gradients, optimizer states and masters, activations that layers keep, one layer in
its backward pass, logits of a chunk, dequantised weights, workspaces, frozen models (a teacher, a reference model), the
allocator's rounding of weights, the pool of CUDA graphs, and the driver's own, which `nvidia-smi` shows beside torch. Host
memory (pinned copies, frozen weights that left the card, staging of a checkpoint) and disk (checkpoints, the model) stand
below, then what no part counts.

All graphs share one pool with what a micro-step makes, and it stays while a micro-step of a shape that no graph has makes the
same outside of it. Where all documents have one length there is one shape, and no second time. With several micro-batches
the pool has gradients of its own, too, of each step's first one.

It is the estimate from which a run decides what it recomputes; `train --check` prints it for the card at hand, an out-of-memory
names its parts, and a run whose peak differs by more than 5 % logs both.

Without a card `train --check` counts the same parts in host memory, as a run on the CPU has them: layers keep what their own
classes save, and an update copies the largest weight. The resident set of runs of 90 MB grows by what is planned within 10 %
(full, LoRA, 8-bit states); blocks that the C library keeps after they were freed come on top.

For each of several numbers of cards it prints:

- **What a card holds at most**, by the estimate from which a run decides what it recomputes, how many layers are computed
  again, and how many of divided ones stay gathered between their passes.
- **What a card sends** in an optimizer step. The sums and updates of training run in one process that plays the first of many,
  on tensors without memory, and the bytes of every collective are added up. They are within 1 % of the formulas, which are
  4 N (W - 1) / W for gradients and 2 N (W - 1) / W for bf16 weights, of N weights on W cards; gradients of divided weights take
  2 N (W - 1) / W, and these are gathered
  for both passes of each micro-batch, but once where they stay gathered: embedding, head and the last layers that memory is
  spare for, of frozen ones the last two layers.
- **Time of the computation** by part: products, attention, elementwise bytes, loss, optimizer, copies that nothing hides and
  launches, each at the rates of a card (`--card`). An interval is printed: 10 % to either side where rates were measured, 15 %
  where they follow from a data sheet (planned and measured [recipes](planned-recipes.md) and [steps](planned-times.md)).
  `--tflops` sets one rate instead.

  `chronicals doctor --rates` measures those of this machine's card in less than a minute and keeps them by card and versions in
  the cache folder (`$XDG_CACHE_HOME` or `~/.cache`, `chronicals/rates`). The H200's come with the package as
  measured, the H100's by records of measured steps, others by their makers' figures. Data are not read: `--document-length` and
  `--labelled` say what is known of them.
- **Time of what is sent** over the link (`--link` within a machine, `--network` between machines, GB/s a card). A sum
  within the backward pass is hidden beside it as far as that is long enough;
  what comes after it is not. What is gathered for a pass is hidden beside that pass, and copies of divided weights on several
  machines are summed beside the last backward pass. What is hidden slows what it is hidden beside by the time that it takes
  over the link of a machine, and a step takes 12 ms more: so it was in eight of nine rows
  [on two cards](measured.md#several-cards) within 11 ms a step; 16 layers of an 8B whose weights are not divided had 0.81 of
  two cards where the plan has 0.87.

With `--fit settings` a plan takes the settings that a run would take ([memory](memory.md#settings-taken-for-you)), and
`--output` writes its recipe. Settings are compared by the same times, at the rates of the card of the plan, also with
`--tflops`, which knows of no bytes and no copies.

A teacher and a reference model are counted: their bytes on the card, and in the time their forward passes, or those of
the base where adapters are switched off. What reads all data once before the first step is named under the table.

`--json` gives all figures. The table is such plans, for cards of 80 GB, 8 a machine, 370 GB/s within and 46 between machines,
600 TFLOP/s reached (about what an 8B reaches on one H200, [measured](measured.md)), 4 packs of 2048 tokens a micro-batch, and
documents as long as packs. More than two cards were not measured. Weights are on every card where they fit, as a run
chooses; where they do not, or as said, they are divided among the cards of a machine or, if those are too few, all.
Between machines one adapter a card is slow for full fine-tuning, and more micro-batches a step make up for it: with 16 an 8B
has 91 % at 64 cards and at 1,024. `--sharding weights` is faster with few micro-batches, but gathers and sums in each of them:
85 to 88 %, with one or with 16.

This page is written by `python benchmarks/plan_table.py`.

| work | cards | GB held | layers again | layers stay | GB sent a step | computing | waiting | slowed | efficiency | tokens/s |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def planned(size: str, fields: dict, gpus: int) -> Plan:
    config = ChronicalsConfig(**{**USUAL, **fields})
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(**SIZES[size], num_key_value_heads=8, vocab_size=128256)
        )
    if config.quantization:
        quantise_layers(model)
    attach_adapters(model, config, None)
    return plan(model, config, gpus, Machines(flops=REACHED))


def row(work: str, one: Plan) -> str:
    held = f"{one.held / GIGA:.0f}" + ("" if one.fits else ", too much")
    times = (f"{seconds:.2f} s" for seconds in (one.computing, one.exposed, one.slowed))
    rest = (*times, f"{one.efficiency:.0%}", f"{one.tokens_per_second:,.0f}")
    cells = (
        work,
        f"{one.gpus:,}",
        held,
        one.recomputed or "-",
        one.stay or "-",
        f"{one.sent.total / GIGA:.1f}",
    )
    return f"| {' | '.join(map(str, (*cells, *(rest if one.fits else ('-',) * 5))))} |\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "planning.md")
    parser.add_argument("--measured", action="store_true")
    given = parser.parse_args()
    measured = list(compared(RESULTS))
    if given.measured:
        print(section(measured))
        for one in measured:
            print(f"{one.row} {one.changes}: {one.planned.words()}")
        return
    rows = [
        row(work, planned(size, fields, gpus))
        for work, (size, fields, cards) in WORKS.items()
        for gpus in cards
    ]
    given.out.write_text(laid_out(INTRODUCTION + "".join(rows) + section(measured)))


if __name__ == "__main__":
    main()
