"""Training on two cards beside one: tokens a second, memory, and whether both train the same.

    python benchmarks/several_cards.py --list
    python benchmarks/several_cards.py --rows 0.5b-full,8b-lora [--seconds 150] [--cards 2] [--steps 8]
    python benchmarks/several_cards.py --rows all --tiny          # on the CPU, by two processes over gloo

Of each row every way runs in processes of its own, bounded in time: ``1x`` on one card, and on all cards ``optimizer``
(weights on every card, shares of the optimizer states) and ``weights`` (shares of the weights too), and of some rows peers
under FSDP2 (``fsdp2_peers.py``). Weights and tokens are
random, drawn on the device, the same in every way. First some steps are compared: one card takes as many micro-batches as
there are cards, on the documents that these take side by side, so losses and gradient norms must agree. Then steps are timed,
each card with one micro-batch, on the device's clock. A way that fails or takes too long has its reason in the table.

Rows with one long document have the ways ``context`` and ``context-keys``: all cards share it (``context_parallel``), by heads
that are exchanged or by keys that are gathered, and one card takes the same document. Such steps take long: give --seconds 300.

Results are added to ``benchmarks/results/several-cards-CARD.json``, with the time of every step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

LORA = {
    "use_lora": True, "lora_rank": 32, "lora_alpha": 32, "lora_dropout": 0.0, "use_lora_plus": False,
    "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "learning_rate": 1e-4,
}  # fmt: skip
FULL = {"learning_rate": 1e-6, "optimizer_state_dtype": "bf16"}
EIGHT = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False, "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rms_norm_eps": 1e-5,
}  # fmt: skip
SEVENTY = {**EIGHT, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
HALF = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
TINY = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 512, "max_position_embeddings": 512,
}  # fmt: skip

SHARED = ("context", "context-keys")
"""Ways in which all cards share each document."""

COMPARED, WARM_UP = 2, 3
"""Steps that are compared, and steps before those that are timed: a micro-batch is captured when it is met again."""


@dataclass(frozen=True)
class Row:
    """Attributes:
    config_class, sizes: of the model.
    fields: of the configuration.
    ways: that are run.
    packs, width: documents of a micro-batch, and their tokens.
    base: ``dense``, ``nf4`` (quantised), or ``codes`` (NF4 that is drawn).
    saves: times what a checkpoint holds up in place of steps.
    steps: that are timed at most, after one more; for rows whose steps take long.
    """

    config_class: str
    sizes: dict[str, Any]
    fields: dict[str, Any]
    ways: tuple[str, ...] = ("1x", "optimizer", "weights")
    packs: int = 4
    width: int = 2048
    base: str = "dense"
    saves: bool = False
    steps: int | None = None

    @property
    def shares(self) -> bool:
        """Whether cards share documents."""
        return any(way in SHARED for way in self.ways)

    def sizes_of_batch(self, tiny: bool) -> tuple[int, int]:
        """Documents of a micro-batch, and their tokens."""
        return (min(self.packs, 2), 64) if tiny else (self.packs, self.width)


ROWS = {
    "16-layers-full": Row("LlamaConfig", {**EIGHT, "num_hidden_layers": 16}, FULL),
    "16-layers-full-4k": Row("LlamaConfig", {**EIGHT, "num_hidden_layers": 16}, FULL, packs=2),
    "8b-lora": Row("LlamaConfig", EIGHT, LORA),
    "8b-qlora": Row("LlamaConfig", EIGHT, LORA, base="nf4"),
    "0.5b-full": Row("Qwen2Config", HALF, FULL, ("1x", "optimizer", "weights"), packs=8),
    "0.5b-lora": Row("Qwen2Config", HALF, LORA, ("1x", "optimizer"), packs=8),
    "8b-full": Row("LlamaConfig", EIGHT, FULL, ("weights", "fsdp2-liger", "fsdp2-liger-compile", "fsdp2-recompute")),
    "70b-qlora": Row("LlamaConfig", SEVENTY, LORA, packs=1, base="codes"),
    "save": Row("LlamaConfig", {**EIGHT, "num_hidden_layers": 8}, FULL, ("optimizer", "weights"), saves=True),
    "8b-qlora-64k": Row(
        "LlamaConfig", {**EIGHT, "max_position_embeddings": 65536},
        {**LORA, "memory": ["recompute_layers"], "use_cuda_graphs": False}, ("1x", *SHARED), packs=1, width=65536, base="nf4",
        steps=3,
    ),
}
"""By name; of 70B the share of a card's own time is that of the way ``1x`` with the same micro-batch."""


@dataclass
class Plan:
    """What a process is told.

    Attributes:
        out: where the first one writes what it measured.
    """

    row: str
    way: str
    cards: int
    steps: int
    tiny: bool
    out: Path
    folder: Path
    extra: dict[str, Any] = field(default_factory=dict)


# --- in the processes of a way -------------------------------------------------------------------------------------------


def sizes_of(row: Row, tiny: bool) -> dict[str, Any]:
    return {**row.sizes, **TINY} if tiny else row.sizes


def build(row: Row, tiny: bool, device: Any, ranks: Any, way: str) -> Any:
    """The model on its device, weights drawn with one seed on every rank."""
    import torch
    import transformers

    from chronicals.models import quantise_layers

    torch.manual_seed(0)
    config = getattr(transformers, row.config_class)(**sizes_of(row, tiny))
    if row.base == "codes":
        return drawn_in_codes(config, device, ranks, way)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if row.base == "nf4":
        quantise_layers(model)
    return model


def drawn_in_codes(config: Any, device: Any, ranks: Any, way: str) -> Any:
    """A model whose frozen layers are random codes of NF4, drawn on the device; in shards where weights are, so that no rank
    ever has them whole."""
    import torch
    import transformers
    from torch import nn

    from chronicals.distributed import PackedRows, shard_frozen
    from chronicals.memory import decoder_layers
    from chronicals.models.four_bits import linear_layers
    from chronicals.quantization import Linear4bit

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.requires_grad_(False)
    numbers = {layer: number for number, layer in enumerate(linear_layers(model).values())}

    def rows(layer: nn.Linear, rank: int, count: int, dtype: torch.dtype) -> PackedRows:
        return PackedRows(drawn(layer, numbers[layer], rank, count, dtype, device))

    if way == "weights":
        shard_frozen(decoder_layers(model), ranks, ranks.count, device, torch.bfloat16, rows)
    else:
        for path, layer in linear_layers(model).items():
            model.set_submodule(path, Linear4bit(drawn(layer, numbers[layer], 0, 1, torch.bfloat16, device)))
    generator = torch.Generator(device).manual_seed(1)
    made: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        if "inv_freq" in module._buffers:
            fresh = type(module)(config=config).to(device)
            for name, buffer in fresh._buffers.items():
                module._buffers[name] = buffer
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                value = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
                value = value.fill_(1.0) if parameter.ndim == 1 else value.normal_(0, 0.02, generator=generator)
                made[id(parameter)] = nn.Parameter(value)
            module._parameters[name] = made[id(parameter)]
    return model


PARTS = 2
"""Parts that codes are drawn in, so that one rank of two can draw its own."""


def drawn(layer: Any, number: int, rank: int, count: int, dtype: Any, device: Any) -> Any:
    """Random codes of a rank's rows, the same whoever has them, of values with a deviation of about 0.02."""
    import torch

    from chronicals.kernels.nf4 import SCALE_BLOCK, Scales, dynamic_code
    from chronicals.quantization import Packed
    from chronicals.quantization.nf4 import BLOCK

    outputs, width = layer.out_features, layer.in_features
    if PARTS % count:
        raise ValueError(f"codes are drawn in {PARTS} parts, which {count} processes cannot share")
    parts = range(rank * PARTS // count, (rank + 1) * PARTS // count)
    values = outputs // PARTS * width
    codes, absmax, absmax2 = [], [], []
    for part in parts:
        generator = torch.Generator(device).manual_seed(1000 + number * PARTS + part)
        codes.append(torch.randint(0, 256, (values // 2,), dtype=torch.uint8, device=device, generator=generator))
        absmax.append(torch.randint(0, 256, (values // BLOCK,), dtype=torch.uint8, device=device, generator=generator))
        blocks = -(-values // (BLOCK * SCALE_BLOCK))
        absmax2.append(torch.full((blocks,), 0.005, device=device))
    scales = Scales(torch.cat(absmax), torch.cat(absmax2), dynamic_code(device), torch.tensor(0.03, device=device))
    return Packed(torch.cat(codes), scales, (outputs // PARTS * len(parts), width), dtype)


def batch_of(number: int, packs: int, width: int, vocabulary: int) -> Any:
    """Documents of ``width`` tokens, drawn by their number."""
    import torch

    from chronicals.batch import IGNORED, Batch

    tokens = packs * width
    ids = torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(number))
    targets = ids.roll(-1)
    targets[width - 1 :: width] = IGNORED
    bounds = torch.arange(0, tokens + 1, width, dtype=torch.int32)
    positions = torch.arange(width).repeat(packs)
    found = Batch(ids, targets, positions, bounds, width, trained=tokens - packs)
    return found.pin_memory() if torch.cuda.is_available() else found


def step_of(number: int, first: int, count: int, together: int, packs: int, width: int, vocabulary: int) -> Any:
    """The batches ``first`` to ``first + count`` of those of a step, of which there are ``together``."""
    from chronicals.data.steps import Step

    batches = [batch_of(number * together + first + n, packs, width, vocabulary) for n in range(count)]
    targets, tokens = together * packs * (width - 1), together * packs * width
    counts = {
        "targets": targets, "tokens": tokens, "documents": together * packs, "items": together * packs,
        "first_targets": targets, "packs": together * packs, "slots": tokens,
    }  # fmt: skip
    return Step(batches, counts, None, None)


def dealt(step: Any, ranks: Any) -> Any:
    """What this rank has of a step, of which every document is split where cards share them."""
    import dataclasses

    import numpy as np

    from chronicals.data.dealing import part_of
    from chronicals.data.parts import SPLIT

    if ranks.context is None:
        return step
    batches = [part_of(batch, np.full(len(batch.cu_seqlens) - 1, SPLIT), ranks.context) for batch in step.batches]
    on_card = ranks.device.type == "cuda"
    return dataclasses.replace(step, batches=[batch.pin_memory() for batch in batches] if on_card else batches)


def config_of(
    row: Row, way: str, accumulation: int, packs: int, width: int, tiny: bool, folder: Path, cards: int
) -> Any:  # fmt: skip
    from chronicals import ChronicalsConfig

    fields = {**row.fields, **({"optimizer_state_dtype": "fp32"} if tiny and "use_lora" not in row.fields else {})}
    if way in SHARED:
        fields |= {"context_parallel": cards, "context_heads": 1 if way == "context-keys" else cards}
    return ChronicalsConfig(
        **fields, batch_size=packs, max_seq_length=width, gradient_accumulation_steps=accumulation, max_steps=100,
        mixed_precision="bf16", sharding="weights" if way == "weights" else "optimizer", objective="pretraining",
        output_dir=folder / "run", cache_dir=folder / "tokens", report_samples=0, use_torch_compile=False,
        lr_scheduler="constant", warmup_steps=0, max_grad_norm=1.0,
    )  # fmt: skip


def measure(plan: Plan) -> dict[str, Any]:
    """What a way of a row gives, on its first rank."""
    import torch

    from chronicals.distributed import Mesh
    from chronicals.objectives import build_objective
    from chronicals.training.context import sharing_packs
    from chronicals.training.session import prepared

    row, ranks = ROWS[plan.row], Mesh.current()
    device = ranks.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    packs, width = row.sizes_of_batch(plan.tiny)
    vocabulary = sizes_of(row, plan.tiny)["vocab_size"]
    alone = ranks.count == 1
    began = time.perf_counter()
    model = build(row, plan.tiny, device, ranks, plan.way)
    built = time.perf_counter() - began
    losses, norms, times = [], [], []
    turns = [("compared", plan.cards), ("timed", 1)] if alone and plan.way == "1x" and not row.shares else [("both", 1)]
    together = 1 if row.shares else plan.cards
    found: dict[str, Any] = {"seconds_to_build": built}
    for turn, accumulation in turns:
        config = config_of(row, plan.way, accumulation, packs, width, plan.tiny, plan.folder, plan.cards)
        ranks = sharing_packs(ranks, config, model)
        with prepared(model, config, build_objective(config), ranks) as session, session.stepping():
            session.model.train()
            found["decisions"] = {name: str(decision) for name, decision in session.decisions.items() if decision.runs}
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            if turn != "timed":
                for number in range(COMPARED):
                    step = step_of(number, 0 if alone else ranks.data_rank, accumulation, together, packs, width, vocabulary)
                    scalars = session.train_once(dealt(step, ranks))
                    losses.append(float(scalars["loss"]))
                    norms.append(float(scalars["grad_norm"]))
            if turn != "compared":
                times = timed(session, plan, ranks, packs, width, vocabulary)
            if device.type == "cuda":
                found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
                found["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        del session
        gc.collect()  # states of the optimizer, before the next one makes its own
        if device.type == "cuda":
            torch.cuda.empty_cache()
    tokens = packs * width * ranks.data_count
    return {
        **found, "losses": losses, "grad_norms": norms, "seconds": times, "tokens_a_step": tokens,
        "tokens_per_second": tokens / statistics.median(times), "processes": ranks.count,
        "peaks_gib": ranks.gather_values(found.get("peak_gib", 0.0)),
    }  # fmt: skip


def timed(session: Any, plan: Plan, ranks: Any, packs: int, width: int, vocabulary: int) -> list[float]:
    """Seconds of each step after the first few, from the end of one to the end of the next; nothing waits between them."""
    import torch

    on_card = ranks.device.type == "cuda"

    def mark() -> Any:
        if not on_card:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    row = ROWS[plan.row]
    warm_up, count = (WARM_UP, plan.steps) if row.steps is None else (1, min(row.steps, plan.steps))
    steps = [
        dealt(step_of(COMPARED + number, ranks.data_rank, 1, ranks.data_count, packs, width, vocabulary), ranks)
        for number in range(warm_up + count)
    ]
    marks = []
    for step in steps:
        session.train_once(step)
        marks.append(mark())
    if not on_card:
        return [after - before for before, after in zip(marks[warm_up - 1 :], marks[warm_up:])]
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1000 for before, after in zip(marks[warm_up - 1 :], marks[warm_up:])]


def measure_saves(plan: Plan) -> dict[str, Any]:
    """What checkpoints midway hold up: step times around them, and what is written."""
    from chronicals import ChronicalsTrainer
    from chronicals.benchmark.shapes import byte_tokenizer
    from chronicals.distributed import Mesh
    from chronicals.training import Callback

    row, ranks = ROWS[plan.row], Mesh.current()
    packs, width = row.sizes_of_batch(plan.tiny)
    every, steps = (4, 12) if plan.tiny else (40, 120)
    ends: list[float] = []

    class Times(Callback):
        def step_done(self, metrics: Any) -> None:
            ends.append(time.perf_counter())

    rows = [{"text": "a text of no meaning " * (width // 21)} for _ in range(packs * steps * ranks.count)]
    config = config_of(row, plan.way, 1, packs, width, plan.tiny, plan.folder, plan.cards)
    config = config.replace(max_steps=steps, save_steps=every, save_total_limit=1, trackers=[])
    model = build(row, plan.tiny, ranks.device, ranks, plan.way)
    ChronicalsTrainer(model, byte_tokenizer(), config, callbacks=[Times()]).train(rows)
    size = sum(file.stat().st_size for file in (plan.folder / "run" / "checkpoints").rglob("*") if file.is_file())
    if not ranks.writer:
        return {}
    durations = [after - before for before, after in zip(ends, ends[1:])]
    usual = statistics.median(durations[every // 2 : every - 1])
    stalls = [sum(durations[n - 1 : n - 1 + every]) - usual * every for n in range(every, steps, every)]
    beside = [statistics.median(durations[n : n - 1 + every]) / usual - 1 for n in range(every, steps, every)]
    found = {"seconds_a_step": usual, "stalls": stalls, "steps_slower": beside}
    return {**found, "checkpoint_gb": size / 1e9, "durations": durations}


def measure_peer(plan: Plan) -> dict[str, Any]:
    """The same of a peer under FSDP2."""
    import fsdp2_peers
    import torch
    import torch.distributed as dist

    from chronicals.distributed import Mesh

    row, ranks = ROWS[plan.row], Mesh.current()
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
    packs, width = row.sizes_of_batch(plan.tiny)
    model = build(row, plan.tiny, ranks.device, ranks, plan.way)
    count = COMPARED + WARM_UP + plan.steps
    batches = [
        batch_of(number * ranks.count + ranks.rank, packs, width, model.config.vocab_size) for number in range(count)
    ]
    found = fsdp2_peers.train(model, plan.way, batches, row.fields, COMPARED, WARM_UP)
    peak = torch.cuda.max_memory_allocated() / 2**30 if ranks.device.type == "cuda" else 0.0
    tokens = packs * width * dist.get_world_size()
    return {
        **found, "tokens_a_step": tokens, "tokens_per_second": tokens / statistics.median(found["seconds"]),
        "processes": ranks.count, "peak_gib": peak, "peaks_gib": ranks.gather_values(peak),
    }  # fmt: skip


def _measure_of(plan: Plan) -> Callable[[Plan], dict[str, Any]]:
    from fsdp2_peers import is_peer

    if ROWS[plan.row].saves:
        return measure_saves
    return measure_peer if is_peer(plan.way) else measure


def child(plan: Plan) -> None:
    import torch.distributed as dist

    if plan.tiny:
        import torch

        torch.set_num_threads(1)
    try:
        found = _measure_of(plan)(plan)
    except Exception:
        found = {"failed": traceback.format_exc()[-3000:]}
        print(found["failed"], file=sys.stderr, flush=True)
    if os.environ.get("RANK", "0") == "0" or "failed" in found:
        out = plan.out if "failed" not in found else plan.out.with_name(f"failed-{time.time_ns()}.json")
        out.write_text(json.dumps(found))
    if dist.is_initialized() and "failed" not in found:
        dist.barrier()
        if dist.get_rank() == 0:
            time.sleep(1)  # the store over which the others leave is here
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0 if "failed" not in found else 1)


# --- in the process that starts them -----------------------------------------------------------------------------------------


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
    launch = {} if count == 1 else {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    logs = [plan.folder / f"{plan.row}-{plan.way}-{rank}.log" for rank in range(count)]
    began = time.monotonic()
    processes = []
    for rank, log in enumerate(logs):
        own = {} if count == 1 else {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
        environment = {**usual, **os.environ, "PYTHONPATH": paths, **launch, **own}
        if plan.tiny:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        command = [sys.executable, __file__, "--child", given]
        processes.append(subprocess.Popen(command, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT))
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() - began < seconds:
            if any(process.poll() not in (None, 0) for process in processes):
                time.sleep(2)  # the others say why they end
                break
            time.sleep(0.2)
    finally:
        late = any(process.poll() is None for process in processes)
        for process in processes:
            process.kill()
            process.wait()
    failed = sorted(plan.out.parent.glob("failed-*.json"))  # the first that failed knows why, others miss it
    found = json.loads((failed[0] if failed else plan.out).read_text()) if failed or plan.out.exists() else {}
    if not found:
        words = [line for log in logs for line in log.read_text(errors="replace").splitlines()[-12:]]
        reason = f"took longer than {seconds:.0f} s" if late else "ended without a result"
        found = {"failed": f"{reason}; {' | '.join(words)[-1500:]}"}
    return {**found, "seconds_in_all": time.monotonic() - began}


def shown(name: str, ways: dict[str, Any], cards: int) -> list[str]:
    """A row of the table for each way."""
    lines = []
    alone = ways.get("1x", {})
    for way, found in ways.items():
        if "failed" in found:
            lines.append(f"{name:18s} {way:12s} failed: {found['failed'].strip().splitlines()[-1][:140]}")
        elif "stalls" in found:
            stalls = ", ".join(f"{stall:.2f}" for stall in found["stalls"])
            lines.append(
                f"{name:18s} {way:12s} step {found['seconds_a_step']:.3f} s, stalls {stalls} s, checkpoint "
                f"{found['checkpoint_gb']:.1f} GB, steps beside it {max(found['steps_slower']):+.1%}"
            )
        else:
            share = ""
            if way != "1x" and "tokens_per_second" in alone:
                share = f"{found['tokens_per_second'] / (cards * alone['tokens_per_second']):.3f}"
            peak = max(found["peaks_gib"])
            losses = " ".join(f"{loss:.4f}/{norm:.4f}" for loss, norm in zip(found["losses"], found["grad_norms"]))
            lines.append(f"{name:18s} {way:12s} {found['tokens_per_second']:12,.0f} {share:>7s} {peak:9.1f}   {losses}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="all", help=f"with commas: {', '.join(ROWS)}")
    parser.add_argument("--ways", help="with commas, of 1x, optimizer, weights, context, context-keys; by default all")
    parser.add_argument("--cards", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="that are timed")
    parser.add_argument("--seconds", type=float, default=150, help="that a way may take in all")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU: whether it works")
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
            for way in ROWS[name].ways if args.ways is None else [w for w in ROWS[name].ways if w in args.ways.split(",")]:
                folder = Path(tempfile.mkdtemp(prefix="several-cards-"))
                plan = Plan(name, way, args.cards, args.steps, args.tiny, folder / "found.json", folder)
                found = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **run(plan, args.seconds)}
                shutil.rmtree(folder, ignore_errors=True)
                result["rows"].setdefault(name, {})[way] = found
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text(json.dumps(result, indent=1))
                print(f"{name} {way}: {found['seconds_in_all']:.0f} s", file=sys.stderr, flush=True)
    finally:
        share = f"of {args.cards}x"
        print(f"{'row':18s} {'way':12s} {'tokens/s':>12s} {share:>7s} {'peak GiB':>9s}   loss/norm of the first steps")
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
    short = next((known for known in ("h100", "h200", "a100", "b200") if known in card.lower()), "cpu")
    output = args.output or RESULTS / f"several-cards-{short}.json"
    result: dict[str, Any] = {"rows": {}}
    if output.exists():
        result = json.loads(output.read_text())
    about = {"card": card, "cards": args.cards, "commit": args.commit or current_commit(), "versions": versions()}
    return output, {**result, **about, "python": platform.python_version()}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
    main()
