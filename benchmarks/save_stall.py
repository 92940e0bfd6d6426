"""How long a save holds training: full fine-tuning of random weights, checkpoints midway, the times
of the steps around them.

    python benchmarks/save_stall.py OUTPUT.json [--arms staged direct] [--layers 8] [--steps 240]
    [--save-steps 80]

A step's time runs from the end of the step before to its own end, on the host's clock. The stall of
a save is what the steps from it to the next one take longer than as many median steps before the
first save. The first save is listed apart: it also waits for the memory of the copies, if that is
not there yet. Saves must be far enough apart for one to be written before the next, or the next
waits for it. `direct` is the same without copies: training waits until each checkpoint is written
and hashed, as it once did. An arm is added to what OUTPUT has already.
"""

import argparse
import json
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from chronicals import ChronicalsConfig, ChronicalsTrainer
from chronicals.benchmark.record import current_commit
from chronicals.benchmark.shapes import SHAPES, byte_tokenizer
from chronicals.saving import Staging
from chronicals.training import Callback

ARMS = ("staged", "direct")
BAR = 0.5
"""Seconds that a save may hold training."""


class Times(Callback):
    """When the metrics of each step had arrived, as they do at its end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def step_done(self, metrics: Any) -> None:
        self.ends.append(time.perf_counter())


def measured(
    model: Any, args: argparse.Namespace, batch: int, width: int, folder: Path
) -> dict[str, Any]:
    """A run's step times, and the stall of each save."""
    rows = [{"text": "a text of no meaning " * (width // 21)} for _ in range(batch * args.steps)]
    config = ChronicalsConfig(
        learning_rate=1e-5,
        batch_size=batch,
        gradient_accumulation_steps=1,
        max_seq_length=width,
        max_steps=args.steps,
        save_steps=args.save_steps,
        save_total_limit=1,
        output_dir=folder / "run",
        cache_dir=folder / "tokens",
        report_samples=0,
        optimizer_state_dtype="bf16" if torch.cuda.is_available() else "fp32",
        use_torch_compile=False,
        objective="pretraining",
        mixed_precision="bf16",
    )
    times = Times()
    ChronicalsTrainer(model, byte_tokenizer(), config, callbacks=[times]).train(rows)
    files = (folder / "run" / "checkpoints").rglob("*")
    size = sum(file.stat().st_size for file in files if file.is_file())
    shutil.rmtree(folder / "run")
    durations = [
        after - before for before, after in zip(times.ends, times.ends[1:])
    ]  # of step 2, 3, …
    saves = range(args.save_steps, args.steps, args.save_steps)
    after = {
        step: durations[step - 1 : step - 1 + args.save_steps] for step in saves
    }  # step + 1 and those that follow
    usual = statistics.median(durations[args.save_steps // 2 : args.save_steps - 1])
    stalls = [sum(taken) - usual * len(taken) for taken in after.values()]
    return {
        "seconds_a_step": usual,
        "stalls": stalls,
        "first_stall": stalls[0],
        "stall": statistics.median(stalls[1:] or stalls),
        "worst_step": max(max(taken) for taken in after.values()),
        "checkpoint_gb": size / 1e9,
        "durations": durations,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--save-steps", type=int, default=80)
    parser.add_argument("--commit", help="to record; by default git's")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to be measured; a temporary one by default"
    )
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {**shape.sizes, "num_hidden_layers": args.layers}
    result: dict[str, Any] = {
        "shape": args.shape,
        "layers": args.layers,
        "torch": torch.__version__,
        "card": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "bar": BAR,
    }
    if args.output.exists():
        result |= {
            name: arm for name, arm in json.loads(args.output.read_text()).items() if name in ARMS
        }
    fits = Staging.fits
    for name in args.arms:
        Staging.fits = fits if name == "staged" else lambda self, tensors: False  # type: ignore[method-assign]
        torch.manual_seed(0)
        config = getattr(transformers, shape.config_class)(**sizes)
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            found = measured(model, args, shape.batch_size, shape.max_seq_length, Path(folder))
            result[name] = {"commit": args.commit or current_commit(), **found}
        del model
        args.output.write_text(json.dumps(result, indent=1))
    for name in args.arms:
        found = result[name]
        print(
            f"{name}: {found['checkpoint_gb']:.2f} GB, step {found['seconds_a_step']:.3f} s, "
            f"stall {found['stall']:.2f} s "
            f"(first {found['first_stall']:.2f} s), bar {BAR} s"
        )


if __name__ == "__main__":
    main()
