"""Every row of the measured tables, with its frontier of memory and speed, by name: what
`chronicals benchmark` runs for it.

    python benchmarks/rows.py FOLDER [NAME ...] [--time-limit 560] [--work FOLDER] [--commit HASH]
    [--run 2] [--note TEXT]

All of them, or those named, one after the other on the card at hand; a JSON file and bars each in
FOLDER, called after the row and the card (`row-0.5b-full-fixed-h200.json`), and after the run where
it is a further one (`...-h200-2.json`). The time limit is that of all together: each row has an
equal share of what is left, and ends when it is over. A file is written anew after every arm and
round, so a run that is killed leaves what it had. A short table of all rows comes last. Weights and
compilers' caches are shared, with later calls, too, where `--work` names their place. Where another
row is measured on another card of the machine at the same time, `--note` says so in the file. Then
`benchmarks/figures.py` makes the tables from what lies in `benchmarks/results`.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from pathlib import Path

from chronicals.benchmark import record
from chronicals.bound_process import BoundProcess

SMALL = ["--model", "qwen2.5-0.5b"]
LARGE = ["--model", "llama-3.1-8b"]
MIXTURE = ["--model", "qwen3-30b-a3b"]
LORA = ["--mode", "lora"]
QLORA = ["--mode", "qlora"]
RAGGED = ["--data", "ragged"]
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

IN_4_BITS = scouted(
    "memory=[recompute_layers,offload_activations,tiled_mlp],logits_chunk_size=512,optimizer_state_dtype=bf16",
    "memory=[recompute_layers,offload_activations],logits_chunk_size=512",
)
"""What is least beside a base in 4 bits: a layer's input on its way, a tile of an MLP, few rows
of logits.
"""

LEAN_IN_4_BITS = [
    "--memory",
    "recompute_layers",
    "--memory",
    "offload_activations",
    "--logits-chunk-size",
    "512",
    *BF16_STATES,
]
"""Where Unsloth recomputes to have an 8B model below 9 GiB."""

IN_FP8 = scouted(
    "use_fp8=true,memory=[offload_frozen_weights,recompute_layers]",
    "use_fp8=true,memory=[offload_frozen_weights,recompute_elementwise]",
)
"""A byte a frozen weight."""


def on_pairs(objective: str, share: int) -> list[str]:
    """Of a preference row whose prompts are so many percent of their rows' tokens; of the same
    model half is compared in more steps."""
    return [
        "--objective",
        objective,
        "--data",
        f"pairs-{share}",
        *([] if share == 50 else ["--reference-steps", "2"]),
    ]


PEERS_ON_PAIRS = against("trl", "unsloth-alone")
"""Unsloth's recomputation, 5,516 tokens/s beside 10,728 (8B, ORPO, LoRA, H200), is no peer where
memory is not short.
"""

PREFERENCE = {
    f"row-{kind}-{objective}-{share}": [*options, *on_pairs(objective, share), *PEERS_ON_PAIRS]
    for share in (50, 30, 70)
    for objective in ("dpo", "orpo")
    for kind, options in (
        ("0.5b-full", SMALL),
        ("8b-lora", [*LARGE, *LORA]),
        ("8b-qlora", [*LARGE, *QLORA]),
    )
}

ROWS = {
    "row-0.5b-full-fixed": [
        *SMALL,
        *LEANEST,
        *POLICIES,
        *against("torch-compile", "liger", "unsloth"),
    ],
    "row-0.5b-full-ragged": [
        *SMALL,
        *RAGGED,
        *against("liger", "trl", "unsloth-padded", "unsloth"),
    ],
    "row-0.5b-lora-fixed": [
        *SMALL,
        *LORA,
        *variants("lora_dropout=0.05"),
        *POLICIES,
        *against("liger", "unsloth"),
    ],
    "row-0.5b-lora-ragged": [
        *SMALL,
        *LORA,
        *RAGGED,
        *against("liger", "trl", "unsloth-padded", "unsloth-compiled", "unsloth"),
    ],
    "row-0.5b-full-2k": [*SMALL, "--batch-size", "1", *variants("use_cuda_graphs=false")],
    "row-0.5b-full-64k": [*SMALL, "--batch-size", "32", "--steps", "10"],
    "row-8b-full-fixed": [*LARGE, *BF16_STATES, *against("liger", "unsloth")],
    "row-8b-full-fp8-fixed": [*LARGE, *BF16_STATES, "--use-fp8", *against("liger")],
    "row-8b-lora-fixed": [
        *LARGE,
        *LORA,
        *variants("use_fp8=true"),
        *IN_FP8,
        *POLICIES,
        *against("liger", "unsloth"),
    ],
    "row-0.5b-qlora-ragged": [
        *SMALL,
        *QLORA,
        *RAGGED,
        *against("trl", "unsloth-compiled", "unsloth-padded", "unsloth"),
    ],
    "row-8b-qlora-fixed": [
        *LARGE,
        *QLORA,
        *variants("memory=[recompute_layers]"),
        *IN_4_BITS,
        *against("trl", "unsloth"),
    ],
    "row-8b-qlora-lean-fixed": [*LARGE, *QLORA, *LEAN_IN_4_BITS, *against("unsloth-recompute")],
    "row-8b-lora-dora-fixed": [*LARGE, *LORA, *variants("use_dora=true")],
    "row-8b-full-8bit-fixed": [
        *LARGE,
        *BF16_STATES,
        *variants("use_8bit_optimizer=true,optimizer_state_dtype=fp32"),
    ],
    "row-30b-a3b-lora-fixed": [*MIXTURE, *LORA, *against("trl", "unsloth")],
    "row-30b-a3b-qlora-fixed": [*MIXTURE, *QLORA, *against("trl", "unsloth")],
    "row-olmoe-1b-7b-full-fixed": [
        "--model",
        "olmoe-1b-7b",
        *BF16_STATES,
        *variants("master_weights=false"),
        *against(
            "trl-recompute", "unsloth-recompute"
        ),  # weights, gradients and states are 52 GiB, activations 20 to 27
    ],
    "row-0.5b-full-distill-fixed": [
        *SMALL,
        "--objective",
        "distill",
        "--distill.teacher",
        "qwen3-8b",
        *against("liger"),
    ],
    **PREFERENCE,
}


STOPPING = 10
"""Seconds that a row has, when its time is over, for ending its processes, writing and drawing."""


def measure(name: str, output: Path, work: Path, seconds: float, options: list[str]) -> bool:
    """Whether the row was measured to its end."""
    program = [
        sys.executable,
        "-c",
        "from chronicals.cli import main; main()",
        "benchmark",
        *ROWS[name],
    ]
    given = [
        "--output",
        str(output),
        "--folder",
        str(work),
        "--time-limit",
        f"{seconds:.0f}",
        *options,
    ]
    return BoundProcess([*program, *given]).wait() == 0


def add_note(output: Path, note: str) -> None:
    """To those of the row."""
    result = json.loads(output.read_text())
    record.write_row({**result, "notes": [*result["notes"], note]}, output)


def card() -> str:
    """h100, h200, …; what the card is called, or cpu."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    name = torch.cuda.get_device_name().lower()
    model = re.search(r"\b[a-z]{1,2}\d{2,4}\b", name)
    return model.group() if model else re.sub(r"[^a-z0-9]+", "-", name)


def table(files: list[Path]) -> str:
    """An arm a line, of the rows whose files are there."""
    lines = [
        f"{'row, arm':60} {'tokens/s':>9} {'MFU':>6} {'of ref. step':>12} {'GiB':>6} "
        f"{'padding':>8} rounds"
    ]
    for path in filter(Path.exists, files):
        result = json.loads(path.read_text())
        lines.append(f"{path.stem}, {result['commit']}, {result['seconds']:.0f} s")
        for name, arm in result["arms"].items():
            if arm["status"] != "measured":
                lines.append(f"  {name[:57]:58} {arm['status']}: {arm['reason']}"[:160])
                continue
            mfu, share = (
                "-" if part is None else f"{part:.1%}"
                for part in (arm.get("mfu"), arm["share_of_floor"])
            )
            lines.append(
                f"  {name[:57]:58} {arm['tokens_per_second']['median']:9,.0f} {mfu:>6} "
                f"{share:>12} {arm['peak_gib']:6.1f} "
                f"{arm['padding_share']:8.1%} {arm['rounds']}"
            )
        ratios = ", ".join(
            f"{name} {ratio['median']:.3f}" for name, ratio in result["ratios"].items()
        )
        lines += [f"  ours / {ratios}"] * bool(ratios) + [
            f"  {note}"[:160] for note in result["notes"]
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ROWS))
    parser.add_argument(
        "--time-limit", type=float, default=560, help="seconds that all of it may take"
    )
    parser.add_argument(
        "--arm-timeout", type=float, default=180, help="seconds one process of an arm may take"
    )
    parser.add_argument("--rounds", type=int, default=3, help="decisive rounds of a row")
    parser.add_argument("--work", type=Path, help="keep weights and compilers' caches here")
    parser.add_argument("--commit", help="to record")
    parser.add_argument("--run", type=int, help="number of this run on such a card, from 2")
    parser.add_argument("--note", help="what else is to be known of the measurement, for the files")
    parser.add_argument("--model", help="another built-in shape than the row's, to try the script")
    given = parser.parse_args()
    names = given.names or list(ROWS)
    if unknown := set(names) - set(ROWS):
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    given.folder.mkdir(parents=True, exist_ok=True)
    options = [
        "--arm-timeout",
        str(given.arm_timeout),
        "--rounds",
        str(given.rounds),
        *(["--commit", given.commit] if given.commit else []),
    ]
    options += ["--model", given.model, "--mixed-precision", "fp32"] if given.model else []
    ends = time.monotonic() + given.time_limit
    place = "-".join([card(), *([str(given.run)] if given.run else [])])
    files = [given.folder / f"{name}-{place}.json" for name in names]
    with tempfile.TemporaryDirectory(prefix="chronicals-rows-") as folder:
        for number, (name, output) in enumerate(zip(names, files)):
            share = (ends - time.monotonic()) / (len(names) - number)
            if share < STOPPING:
                print(f"not begun, the time limit is reached: {output}", flush=True)
                continue
            complete = measure(name, output, given.work or Path(folder), share - STOPPING, options)
            if given.note and output.exists():
                add_note(output, given.note)
            print(f"{'written' if complete else 'failed'}: {output}", flush=True)
    print(table(files))


if __name__ == "__main__":
    main()
