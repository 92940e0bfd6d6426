"""The road from token store to Batches on the CPU: plans, assembly, and Batches while Python keeps
the main thread busy.

python benchmarks/data_rates.py OUTPUT.json

Lengths are lognormal (median 400, σ 0.8, 2 to the width). Rates of Batches are measured in two
ways, each with the main thread idle and with the main thread in a loop of pure Python, which gives
the GIL away only every ``sys.getswitchinterval()``:

- ``trained``: the main thread takes a step, as a trainer does, and then idles or spins for a fixed
  time.
- ``drained``: a second thread takes steps as fast as it can, without end. Here the consumer itself
  needs the GIL: dropping a tensor gives it away, so this rate falls however Batches are made.
"""

import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import pyarrow as pa
import torch

from chronicals.batch import IGNORED
from chronicals.config import ChronicalsConfig
from chronicals.data import BatchStream, Tokenizer, TokenStore, build_store, plan_packs
from chronicals.data.packs.assembly import ENTRIES_FACT
from chronicals.data.packs.step_memory import StepMemory
from chronicals.data.packs.strategies import STRATEGIES
from chronicals.data.tokens.tokenizer_training import train_tokenizer

SEQUENCES = 1_000_000
PLANS = 9
DOCUMENTS = 20_000
ROUNDS = 5
SECONDS = 1.0
STEP_SECONDS = 0.002
"""What a step takes the trained consumer, less than that of any model we know."""

SHAPES = [(4, 2048), (8, 2048), (4, 8192)]
"""Packs in a micro-batch and their width; four micro-batches a step."""


def lengths_of(count: int, width: int, random: np.random.Generator) -> np.ndarray:
    return np.exp(random.normal(np.log(400), 0.8, count)).clip(2, width).astype(np.int64)


def plans(strategy: str, width: int) -> dict:
    random = np.random.default_rng(0)
    start = time.perf_counter()
    plan_packs([1, 2], width, strategy=strategy)
    first_call = time.perf_counter() - start
    rates = []
    fills = []
    for _ in range(PLANS):
        lengths = lengths_of(SEQUENCES, width, random)
        start = time.perf_counter()
        plan = plan_packs(lengths, width, strategy=strategy)
        rates.append(SEQUENCES / (time.perf_counter() - start))
        fills.append(plan.fill)
    return {
        "strategy": strategy,
        "max_seq_length": width,
        "sequences": SEQUENCES,
        "first_call_s": first_call,
        "sequences_per_second": {"median": statistics.median(rates), "samples": rates},
        "fill": {"lowest": min(fills), "samples": fills},
    }


def make_store(folder: Path) -> TokenStore:
    random = np.random.default_rng(1)
    rows = []
    for length in lengths_of(DOCUMENTS, 2048, random):
        ids = random.integers(0, 150_000, length).tolist()
        rows.append({"input_ids": ids, "labels": [IGNORED] * (length // 3) + ids[length // 3 :]})
    tokenizer = train_tokenizer(
        ["a tokenizer that is asked for nothing but its name"] * 9, vocab_size=300
    )
    return build_store(rows, Tokenizer(tokenizer), 2048, folder)


def settings(batch_size: int, width: int) -> ChronicalsConfig:
    return ChronicalsConfig(
        batch_size=batch_size, max_seq_length=width, gradient_accumulation_steps=4
    )


def assembly(store: TokenStore, batch_size: int, width: int) -> dict:
    """Bytes written into Batches in a second by one thread, memory allocated afresh for each
    step as in the stream.
    """
    stream = BatchStream(store, settings(batch_size, width))
    shape = stream._sizes
    rates = []
    for step in range(400):
        packs = stream._packs_at(step * stream.packs_a_step)
        memory = StepMemory(shape, 1, pin=False)
        start = time.perf_counter()
        assert memory.assemble(packs[None], stream._documents) == (1, -1)
        took = time.perf_counter() - start
        entries = int(memory.facts[..., ENTRIES_FACT].sum()) + shape.batches
        rates.append((shape.batches * shape.tokens * 24 + entries * 4) / took)
    rates = rates[20:]
    return {
        "batch_size": batch_size,
        "max_seq_length": width,
        "bytes_per_second": {"median": statistics.median(rates), "samples": rates},
    }


def idle(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        time.sleep(0)  # lets the GIL go


def spin(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def trained(stream: BatchStream, wait: Callable[[float], None]) -> float:
    """Batches a second of a consumer in the main thread that takes ``STEP_SECONDS`` over a step."""
    count = 0
    start = 0.0
    for number, step in enumerate(stream.steps()):
        if number == 100:
            count = 0
            start = time.perf_counter()
        count += len(step.batches)
        wait(STEP_SECONDS)
        if number > 100 and time.perf_counter() - start > SECONDS:
            break
    return count / (time.perf_counter() - start)


def drained(stream: BatchStream, wait: Callable[[float], None]) -> float:
    """Batches that a second thread receives in a second."""
    begun = threading.Event()
    stop = threading.Event()
    counted = []

    def consume() -> None:
        count = 0
        start = 0.0
        for number, step in enumerate(stream.steps()):
            if number == 100:
                begun.set()
                count = 0
                start = time.perf_counter()
            count += len(step.batches)
            if stop.is_set():
                break
        counted.append(count / (time.perf_counter() - start))

    thread = threading.Thread(target=consume)
    thread.start()
    begun.wait()
    time.sleep(SECONDS) if wait is idle else wait(SECONDS)
    stop.set()
    thread.join()
    return counted[0]


def batches(store: TokenStore, batch_size: int, width: int, measure: Callable[..., float]) -> dict:
    stream = BatchStream(store, settings(batch_size, width))
    rates: dict[Callable[[float], None], list[float]] = {idle: [], spin: []}
    measure(stream, spin)
    for round_ in range(ROUNDS):
        for wait in (idle, spin) if round_ % 2 == 0 else (spin, idle):
            rates[wait].append(measure(stream, wait))
    medians = {wait: statistics.median(samples) for wait, samples in rates.items()}
    return {
        "consumer": measure.__name__,
        "batch_size": batch_size,
        "max_seq_length": width,
        "idle_batches_per_second": {"median": medians[idle], "samples": rates[idle]},
        "spinning_batches_per_second": {"median": medians[spin], "samples": rates[spin]},
        "fall": 1 - medians[spin] / medians[idle],
    }


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine()
    )


def main() -> None:
    result: dict = {
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "load_before": os.getloadavg()[0],
        },
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "numba": numba.__version__,
            "pyarrow": pa.__version__,
            "torch": torch.__version__,
        },
        "plans": [plans(strategy, width) for strategy in STRATEGIES for width in (2048, 8192)],
    }
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(Path(folder))
        result["assembly"] = [assembly(store, *shape) for shape in SHAPES]
        result["batches"] = [
            batches(store, *shape, measure) for measure in (trained, drained) for shape in SHAPES
        ]
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1))
    for row in result["plans"]:
        rate = row["sequences_per_second"]["median"] / 1e6
        print(
            f"{row['strategy']:10} {row['max_seq_length']}: {rate:.1f} million sequences/s, fill "
            f"{row['fill']['lowest']:.4f}"
        )
    for row in result["assembly"]:
        print(
            f"{row['batch_size']} x {row['max_seq_length']}: "
            f"{row['bytes_per_second']['median'] / 1e9:.1f} GB/s"
        )
    for row in result["batches"]:
        rates = [row[f"{name}_batches_per_second"]["median"] for name in ("idle", "spinning")]
        shape = f"{row['batch_size']} x {row['max_seq_length']}"
        print(
            f"{row['consumer']} {shape}: {rates[0]:.0f} Batches/s idle, {rates[1]:.0f} spinning, "
            f"fall {row['fall']:.1%}"
        )


if __name__ == "__main__":
    main()
