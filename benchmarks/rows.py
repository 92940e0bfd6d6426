"""Every row of the README, with its frontier of memory and speed, by name: what `chronicals benchmark` is given for it.

    python benchmarks/rows.py FOLDER [NAME ...] [--time-limit 440] [--work FOLDER] [--commit HASH]

All of them, or those named, one after the other on the card at hand; a JSON file and bars each in FOLDER, called after the row
and the card. Weights and compilers' caches are shared, with later calls, too, where `--work` names their place. Then
`benchmarks/figures.py` draws what lies in `benchmarks/results`.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

SMALL, LARGE = ["--model", "qwen2.5-0.5b"], ["--model", "llama-3.1-8b"]
LORA, RAGGED = ["--mode", "lora"], ["--data", "ragged"]
BF16_STATES = ["--optimizer-state-dtype", "bf16"]


def against(*peers: str) -> list[str]:
    return ["--against", ",".join(peers)]


def variants(*changes: str, option: str = "--variant") -> list[str]:
    return [word for change in changes for word in (option, change)]


def scouted(*changes: str) -> list[str]:
    """Arms of ours for the frontier of memory and speed."""
    return variants(*changes, option="--scouted-variant")


POLICIES = scouted(
    "memory=[recompute_layers,offload_activations],logits_chunk_size=1024",
    "memory=[recompute_layers]",
    "memory=[recompute_elementwise]",
    "memory=[offload_activations]",
)

LEANEST = scouted(
    "memory=[recompute_layers,offload_activations,optimizer_in_backward],logits_chunk_size=2816,optimizer_state_dtype=bf16,"
    "max_grad_norm=inf",
    "memory=[recompute_layers,offload_activations,optimizer_in_backward],logits_chunk_size=2816,optimizer_state_dtype=bf16,"
    "max_grad_norm=inf,master_weights=false",
)
"""8 bytes a weight, or 6, a few gradients at a time, and of the activations what is on its way."""

IN_FP8 = scouted(
    "use_fp8=true,memory=[offload_frozen_weights,recompute_layers]",
    "use_fp8=true,memory=[offload_frozen_weights,recompute_elementwise]",
)
"""A byte a frozen weight."""

ROWS = {
    "row-0.5b-full-fixed": [*SMALL, *LEANEST, *POLICIES, *against("torch-compile", "liger", "unsloth")],
    "row-0.5b-full-ragged": [*SMALL, *RAGGED, *against("liger", "unsloth")],
    "row-0.5b-lora-fixed": [*SMALL, *LORA, *variants("lora_dropout=0.05"), *POLICIES, *against("liger", "unsloth")],
    "row-0.5b-lora-ragged": [*SMALL, *LORA, *RAGGED, *against("liger", "unsloth")],
    "row-0.5b-full-2k": [*SMALL, "--batch-size", "1", *variants("use_cuda_graphs=false")],
    "row-0.5b-full-64k": [*SMALL, "--batch-size", "32", "--steps", "10"],
    "row-8b-full-fixed": [*LARGE, *BF16_STATES, *against("liger", "unsloth")],
    "row-8b-full-fp8-fixed": [*LARGE, *BF16_STATES, "--use-fp8", *against("liger")],
    "row-8b-lora-fixed": [*LARGE, *LORA, *variants("use_fp8=true"), *IN_FP8, *POLICIES, *against("liger", "unsloth")],
}


def measure(name: str, output: Path, folder: Path, time_limit: float, commit: str | None) -> bool:
    program = [sys.executable, "-c", "from chronicals.cli import main; main()", "benchmark", *ROWS[name]]
    given = ["--output", str(output), "--folder", str(folder), "--time-limit", str(time_limit)]
    return subprocess.run([*program, *given, *(["--commit", commit] if commit else [])]).returncode == 0


def card() -> str:
    import torch

    return torch.cuda.get_device_name().split()[-1].lower()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ROWS))
    parser.add_argument("--time-limit", type=float, default=440, help="seconds after which a row begins nothing new")
    parser.add_argument("--work", type=Path, help="keep weights and compilers' caches here")
    parser.add_argument("--commit", help="to record")
    given = parser.parse_args()
    if unknown := set(given.names) - set(ROWS):
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="chronicals-rows-") as folder:
        for name in given.names or ROWS:
            output = given.folder / f"{name}-{card()}.json"
            words = "written" if measure(name, output, given.work or Path(folder), given.time_limit, given.commit) else "failed"
            print(f"{words}: {output}", flush=True)


if __name__ == "__main__":
    main()
