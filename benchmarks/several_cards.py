"""Training on two cards beside one: tokens a second, memory, and whether both train the same.

    python benchmarks/several_cards.py --list python benchmarks/several_cards.py --rows
    0.5b-full,8b-lora [--seconds 150] [--cards 2] [--steps 8]
    python benchmarks/several_cards.py --rows all --tiny          # on the CPU, by two processes over gloo

Of each row every way runs in processes of its own, bounded in time: ``1x`` on one card, and on all
cards ``optimizer`` (weights on every card, shares of the optimizer states) and ``weights`` (shares
of the weights too), and of some rows peers under FSDP2 (``fsdp2_peers.py``), the most that a card
may hold first: what does not fit fails. Weights and tokens are random, drawn on the device, the
same in every way. First some steps are compared: one card takes as many micro-batches as there are
cards, on the documents that these take side by side, so losses and gradient norms must agree. Then
steps are timed, each card with one micro-batch, on the device's clock. A way that fails or takes
too long has its reason in the table.

Rows with one long document have the ways ``context`` and ``context-keys``: all cards share it
(``context_parallel``), by heads that are exchanged or by keys that are gathered, and one card takes
the same document. Such steps take long, as ``save`` does: give --seconds 300.

Results are added to ``benchmarks/results/several-cards-CARD.json``, with the time of every step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cards_rows import ROWS, Plan
from cards_ways import child

RESULTS = Path(__file__).parent / "results"


def run(plan: Plan, seconds: float) -> dict[str, Any]:
    """Start the processes of a way, and end them when one fails or time is up."""
    count = 1 if plan.way == "1x" else plan.cards
    plan.out.unlink(missing_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = json.dumps({**vars(plan), "out": str(plan.out), "folder": str(plan.folder)})
    threads = str(max(1, (os.cpu_count() or 1) // count))
    usual = {"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    source = str(Path(__file__).parent.parent / "src")
    paths = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    launch = (
        {}
        if count == 1
        else {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    )
    logs = [plan.folder / f"{plan.row}-{plan.way}-{rank}.log" for rank in range(count)]
    began = time.monotonic()
    processes = []
    for rank, log in enumerate(logs):
        own = (
            {}
            if count == 1
            else {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
        )
        environment = {**usual, **os.environ, "PYTHONPATH": paths, **launch, **own}
        if plan.tiny:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        command = [sys.executable, __file__, "--child", given]
        processes.append(
            subprocess.Popen(
                command, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT
            )
        )
    try:
        while (
            any(process.poll() is None for process in processes)
            and time.monotonic() - began < seconds
        ):
            if any(process.poll() not in (None, 0) for process in processes):
                time.sleep(2)  # the others say why they end
                break
            time.sleep(0.2)
    finally:
        late = any(process.poll() is None for process in processes)
        for process in processes:
            process.kill()
            process.wait()
    failed = sorted(
        plan.out.parent.glob("failed-*.json")
    )  # the first that failed knows why, others miss it
    found = (
        json.loads((failed[0] if failed else plan.out).read_text())
        if failed or plan.out.exists()
        else {}
    )
    if not found:
        words = [
            line for log in logs for line in log.read_text(errors="replace").splitlines()[-12:]
        ]
        reason = f"took longer than {seconds:.0f} s" if late else "ended without a result"
        found = {"failed": f"{reason}; {' | '.join(words)[-1500:]}"}
    return {**found, "seconds_in_all": time.monotonic() - began}


def shown(name: str, ways: dict[str, Any], cards: int) -> list[str]:
    """A row of the table for each way."""
    lines = []
    alone = ways.get("1x", {})
    for way, found in ways.items():
        if "failed" in found:
            lines.append(
                f"{name:18s} {way:12s} failed: {found['failed'].strip().splitlines()[-1][:140]}"
            )
        elif "stalls" in found:
            stalls = ", ".join(f"{stall:.2f}" for stall in found["stalls"])
            lines.append(
                f"{name:18s} {way:12s} step {found['seconds_a_step']:.3f} s, stalls {stalls} s, "
                "checkpoint "
                f"{found['checkpoint_gb']:.1f} GB, steps beside it "
                f"{max(found['steps_slower']):+.1%}"
            )
        else:
            share = ""
            if way != "1x" and "tokens_per_second" in alone:
                share = f"{found['tokens_per_second'] / (cards * alone['tokens_per_second']):.3f}"
            peak = max(found["peaks_gib"])
            losses = " ".join(
                f"{loss:.4f}/{norm:.4f}" for loss, norm in zip(found["losses"], found["grad_norms"])
            )
            lines.append(
                f"{name:18s} {way:12s} {found['tokens_per_second']:12,.0f} {share:>7s} "
                f"{peak:9.1f}   {losses}"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="all", help=f"with commas: {', '.join(ROWS)}")
    parser.add_argument("--ways", help="with commas, of those that --list names; by default all")
    parser.add_argument("--cards", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="that are timed")
    parser.add_argument("--seconds", type=float, default=150, help="that a way may take in all")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model on the CPU: whether it works"
    )
    parser.add_argument("--output", type=Path, help="by default in benchmarks/results")
    parser.add_argument("--commit", help="to record; by default git's")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        given = json.loads(args.child)
        child(Plan(**{**given, "out": Path(given["out"]), "folder": Path(given["folder"])}))
    if args.list:
        print("\n".join(f"{name}: {', '.join(row.ways)}" for name, row in ROWS.items()))
        return
    names = list(ROWS) if args.rows == "all" else args.rows.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"no row {unknown[0]!r}; there are {', '.join(ROWS)}")
    output, result = opened(args)
    try:
        for name in names:
            for way in (
                ROWS[name].ways
                if args.ways is None
                else [w for w in ROWS[name].ways if w in args.ways.split(",")]
            ):
                folder = Path(tempfile.mkdtemp(prefix="several-cards-"))
                plan = Plan(
                    name, way, args.cards, args.steps, args.tiny, folder / "found.json", folder
                )
                found = {
                    "date": datetime.now(UTC).isoformat(timespec="seconds"),
                    **run(plan, args.seconds),
                }
                shutil.rmtree(folder, ignore_errors=True)
                result["rows"].setdefault(name, {})[way] = found
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text(json.dumps(result, indent=1))
                print(f"{name} {way}: {found['seconds_in_all']:.0f} s", file=sys.stderr, flush=True)
    finally:
        share = f"of {args.cards}x"
        print(
            f"{'row':18s} {'way':12s} {'tokens/s':>12s} {share:>7s} {'peak GiB':>9s}   loss/norm "
            "of the first steps"
        )
        for name in names:
            print("\n".join(shown(name, result["rows"].get(name, {}), args.cards)))
        print(f"written to {output}")


def _name_of_card() -> str:
    """Asked in a process of its own: this one must take no memory of a card."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def opened(args: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Where results go, and what is there already."""
    import torch

    from chronicals.benchmark.record import current_commit, versions

    on_card = torch.cuda.is_available() and not args.tiny
    card = _name_of_card() if on_card else platform.processor() or "cpu"
    short = next(
        (known for known in ("h100", "h200", "a100", "b200") if known in card.lower()), "cpu"
    )
    output = args.output or RESULTS / f"several-cards-{short}.json"
    result: dict[str, Any] = {"rows": {}}
    if output.exists():
        result = json.loads(output.read_text())
    about = {
        "card": card,
        "cards": args.cards,
        "commit": args.commit or current_commit(),
        "versions": versions(),
    }
    return output, {**result, **about, "python": platform.python_version()}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
    main()
