"""LoRA+ beside LoRA at equal steps: the held-out loss of each at the best of five learning rates of
its own.

    python benchmarks/lora_plus.py OUTPUT.json [--steps 60] [--base-steps 200] [--seeds 5] [--rates
    5]

The base is a model of the quickstart's size (``training/quickstart.py``), trained whole on the
questions about one half of the standard library's modules. Adapters are then trained over it on
questions about the other half, of which a tenth is held out. Each method takes the learning rate
with the lowest held-out loss on the first seed, of rates that are a factor of 3 apart and the same
for both; then the other seeds follow at that rate. A seed decides the adapters' start and the order
of the packs. With LoRA+ B learns 16 times faster than A (Hayou, Ghosh and Yu, 2024).

OUTPUT.json holds every loss of every run, and what it was measured on; beside it is a plot of the
same name. A best rate at an end of the five is reported, since a better one may lie beyond. On one
core the whole takes about half an hour.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from plots import new_figure, save

from chronicals import ChronicalsConfig, ChronicalsTrainer
from chronicals.benchmark.record import current_commit, versions
from chronicals.data.tokens.tokenizer_training import questions_and_answers
from chronicals.models import load_model, load_tokenizer
from chronicals.training.quickstart import CPU, _write_model
from chronicals.training.run.callbacks import read_metrics

METHODS: dict[str, dict[str, Any]] = {
    "LoRA": {"use_lora_plus": False},
    "LoRA+": {"use_lora_plus": True, "lora_plus_ratio": 16.0},
}
RATES = [1e-4, 3e-4, 1e-3, 3e-3, 1e-2]
HELD_OUT = 10
"""One row in so many is held out."""

RANK = 16
WIDTH = 512


def halves() -> tuple[list[dict], list[dict], list[dict]]:
    """Rows for the base, for the adapters, and those held out; a module's questions are in one
    half.
    """
    base = []
    adapted = []
    held = []
    for number, row in enumerate(questions_and_answers()):
        module = row["messages"][0]["content"].partition(".")[0]
        if zlib.crc32(module.encode()) % 2:
            base.append(row)
        else:
            (adapted if number % HELD_OUT else held).append(row)
    return base, adapted, held


def configuration(folder: Path, steps: int, **changes: Any) -> ChronicalsConfig:
    return ChronicalsConfig(
        **{
            "batch_size": 2,
            "gradient_accumulation_steps": 1,
            "max_seq_length": WIDTH,
            "max_steps": steps,
            "warmup_steps": max(1, steps // 10),
            "mixed_precision": "fp32",
            "adam_beta2": 0.98,
            "save_steps": None,
            "trackers": [],
            "report_samples": 0,
            "keep": "last",
            "output_dir": folder / "run",
            "cache_dir": folder.parent / "tokens",
            **changes,
        }
    )


def make_base(folder: Path, rows: list[dict], every: list[dict], steps: int, size: Any) -> Path:
    """A trained model and its tokenizer, which has seen all texts."""
    _write_model(folder / "untrained", every, size, seed=0)
    model = load_model(folder / "untrained", torch.float32)
    tokenizer = load_tokenizer(folder / "untrained")
    config = configuration(
        folder / "base", steps, learning_rate=size.learning_rate, weight_decay=0.1
    )
    return ChronicalsTrainer(model, tokenizer, config).train(rows).model_dir


def adapt(
    folder: Path,
    base: Path,
    rows: list[dict],
    held: list[dict],
    args: argparse.Namespace,
    **changes: Any,
) -> dict:
    """One run: its losses, and the loss of the held-out rows afterwards."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        config = configuration(
            Path(place),
            args.steps,
            use_lora=True,
            lora_rank=RANK,
            lora_alpha=2 * RANK,
            lora_dropout=0.0,
            **changes,
        )
        model = load_model(base, torch.float32)
        tokenizer = load_tokenizer(base)
        began = time.perf_counter()
        result = ChronicalsTrainer(model, tokenizer, config).train(rows, held)
        lines = [
            line for line in read_metrics(Path(place) / "run" / "metrics.jsonl") if "loss" in line
        ]
    assert result.evaluation is not None
    return {
        "rate": config.learning_rate,
        "seed": config.seed,
        "held_out": result.evaluation.loss,
        "losses": [line["loss"] for line in lines],
        "grad_norms": [line["grad_norm"] for line in lines],
        "seconds": time.perf_counter() - began,
    }


def compare(
    name: str,
    folder: Path,
    base: Path,
    data: tuple[list[dict], list[dict]],
    args: argparse.Namespace,
) -> dict:
    """The search and the seeds of one method."""
    rates = RATES[: args.rates]
    search = [
        adapt(folder, base, *data, args, learning_rate=rate, seed=1, **METHODS[name])
        for rate in rates
    ]
    best = min(search, key=lambda run: run["held_out"])
    more = [
        adapt(folder, base, *data, args, learning_rate=best["rate"], seed=seed, **METHODS[name])
        for seed in range(2, args.seeds + 1)
    ]
    runs = [best, *more]
    losses = [run["held_out"] for run in runs]
    return {
        "rate": best["rate"],
        "rate_is_at_an_end": best["rate"] in (rates[0], rates[-1]),
        "held_out": losses,
        "mean": statistics.mean(losses),
        "deviation": statistics.stdev(losses) if len(losses) > 1 else None,
        "search": search,
        "runs": runs,
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Held-out loss over the learning rate, and the mean training loss over the steps."""
    figure = new_figure(9, 3.4)
    rates, steps = figure.subplots(1, 2)
    for name, found in result["methods"].items():
        search = found["search"]
        rates.plot(
            [run["rate"] for run in search], [run["held_out"] for run in search], "o-", label=name
        )
        losses = [statistics.mean(at) for at in zip(*(run["losses"] for run in found["runs"]))]
        steps.plot(range(1, len(losses) + 1), losses, label=f"{name}, rate {found['rate']:g}")
    rates.set(xscale="log", xlabel="learning rate", ylabel="held-out loss, first seed")
    steps.set(xlabel="step", ylabel=f"training loss, mean of {result['seeds']} seeds")
    for axes in (rates, steps):
        axes.legend(frameon=False)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=60, help="of every run with adapters")
    parser.add_argument("--base-steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rates", type=int, default=len(RATES), choices=range(1, len(RATES) + 1))
    parser.add_argument("--width", type=int, default=CPU.width, help="of the model")
    args = parser.parse_args()
    base_rows, rows, held = halves()
    result: dict[str, Any] = {
        "steps": args.steps,
        "base_steps": args.base_steps,
        "seeds": args.seeds,
        "rank": RANK,
        "alpha": 2 * RANK,
        "width": args.width,
        "rows": {"base": len(base_rows), "adapters": len(rows), "held_out": len(held)},
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "commit": current_commit(),
        "methods": {},
    }
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        base = make_base(
            folder, base_rows, [*base_rows, *rows], args.base_steps, replace(CPU, width=args.width)
        )
        for name in METHODS:
            result["methods"][name] = compare(name, folder, base, (rows, held), args)
            args.output.write_text(json.dumps(result, indent=1))
    draw(result, args.output.with_suffix(".png"))
    for name, found in result["methods"].items():
        spread = "" if found["deviation"] is None else f" ± {found['deviation']:.4f}"
        end = ", at an end of the rates" if found["rate_is_at_an_end"] else ""
        print(
            f"{name}: held-out loss {found['mean']:.4f}{spread} over {args.seeds} seeds, rate "
            f"{found['rate']:g}{end}"
        )


if __name__ == "__main__":
    main()
