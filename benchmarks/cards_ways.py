"""What one process of ``several_cards.py`` does: trains in one way, and measures it."""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cards_models import batch_of, build, dealt, sizes_of, step_of
from cards_rows import COMPARED, ROWS, SHARED, WARM_UP, Plan, Row


def config_of(
    row: Row,
    way: str,
    accumulation: int,
    packs: int,
    width: int,
    tiny: bool,
    folder: Path,
    cards: int,
) -> Any:
    from chronicals import ChronicalsConfig

    fields = {
        **row.fields,
        **({"optimizer_state_dtype": "fp32"} if tiny and "use_lora" not in row.fields else {}),
    }
    if way in SHARED:
        fields |= {
            "context_parallel": cards,
            "context_heads": 1 if way == "context-keys" else cards,
        }
    return ChronicalsConfig(
        **fields,
        batch_size=packs,
        max_seq_length=width,
        gradient_accumulation_steps=accumulation,
        max_steps=100,
        mixed_precision="bf16",
        sharding="weights" if way == "weights" else "optimizer",
        objective="pretraining",
        output_dir=folder / "run",
        cache_dir=folder / "tokens",
        report_samples=0,
        use_torch_compile=False,
        lr_scheduler="constant",
        warmup_steps=0,
        max_grad_norm=1.0,
    )


def measure(plan: Plan) -> dict[str, Any]:
    """What a way of a row gives, on its first rank."""
    import torch

    from chronicals.distributed import Mesh
    from chronicals.objectives import build_objective
    from chronicals.policies.context_parallel import sharing_packs
    from chronicals.training.session import prepared

    row = ROWS[plan.row]
    ranks = Mesh.current()
    device = ranks.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    packs, width = row.sizes_of_batch(plan.tiny)
    vocabulary = sizes_of(row, plan.tiny)["vocab_size"]
    alone = ranks.count == 1
    began = time.perf_counter()
    model = build(row, plan.tiny, device, ranks, plan.way)
    built = time.perf_counter() - began
    losses = []
    norms = []
    times = []
    turns = (
        [("compared", plan.cards), ("timed", 1)]
        if alone and plan.way == "1x" and not row.shares
        else [("both", 1)]
    )
    together = 1 if row.shares else plan.cards
    found: dict[str, Any] = {"seconds_to_build": built}
    for turn, accumulation in turns:
        config = config_of(
            row, plan.way, accumulation, packs, width, plan.tiny, plan.folder, plan.cards
        )
        ranks = sharing_packs(ranks, config, model)
        with prepared(model, config, build_objective(config), ranks) as session, session.stepping():
            session.model.train()
            found["decisions"] = {
                name: str(decision) for name, decision in session.decisions.items() if decision.runs
            }
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            if turn != "timed":
                for number in range(COMPARED):
                    step = step_of(
                        number,
                        0 if alone else ranks.data_rank,
                        accumulation,
                        together,
                        packs,
                        width,
                        vocabulary,
                    )
                    scalars = session.train_once(dealt(step, ranks))
                    losses.append(float(scalars["loss"]))
                    norms.append(float(scalars["grad_norm"]))
            if turn != "compared":
                times = timed(session, plan, ranks, packs, width, vocabulary)
            if device.type == "cuda":
                found["resident_gib"] = torch.cuda.memory_allocated() / 2**30
                found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
                found["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        del session
        gc.collect()  # states of the optimizer, before the next one makes its own
        if device.type == "cuda":
            torch.cuda.empty_cache()
    tokens = packs * width * ranks.data_count
    return {
        **found,
        "losses": losses,
        "grad_norms": norms,
        "seconds": times,
        "tokens_a_step": tokens,
        "tokens_per_second": tokens / statistics.median(times),
        "processes": ranks.count,
        "peaks_gib": ranks.gather_values(found.get("peak_gib", 0.0)),
    }


def timed(
    session: Any, plan: Plan, ranks: Any, packs: int, width: int, vocabulary: int
) -> list[float]:
    """Seconds of each step after the first few, from the end of one to the end of the next;
    nothing waits between them.
    """
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
        dealt(
            step_of(
                COMPARED + number, ranks.data_rank, 1, ranks.data_count, packs, width, vocabulary
            ),
            ranks,
        )
        for number in range(warm_up + count)
    ]
    marks = []
    for step in steps:
        session.train_once(step)
        marks.append(mark())
    if not on_card:
        return [after - before for before, after in zip(marks[warm_up - 1 :], marks[warm_up:])]
    torch.cuda.synchronize()
    return [
        before.elapsed_time(after) / 1000
        for before, after in zip(marks[warm_up - 1 :], marks[warm_up:])
    ]


def measure_saves(plan: Plan) -> dict[str, Any]:
    """What checkpoints midway hold up: step times around them, and what is written. Before a
    second one the run waits, off the clock, until the first is on the disk: how fast that is
    does not count. It ends without a last one."""
    from chronicals import ChronicalsTrainer
    from chronicals.benchmark.shapes import byte_tokenizer
    from chronicals.distributed import Mesh
    from chronicals.training import Callback, TrainingError

    row = ROWS[plan.row]
    ranks = Mesh.current()
    packs, width = row.sizes_of_batch(plan.tiny)
    every, steps = (4, 12) if plan.tiny else (40, 120)
    ends: list[float] = []
    waited = 0.0
    checkpoints = plan.folder / "run" / "checkpoints"

    class Enough(Exception):
        """All steps are timed."""

    class Times(Callback):
        def step_done(self, metrics: Any) -> None:
            nonlocal waited
            ends.append(time.perf_counter() - waited)
            if len(ends) == steps:
                raise Enough
            saved, left = divmod(len(ends) + 1, every)
            if not left and saved > 1:
                began = time.perf_counter()
                while not (checkpoints / f"step-{every * (saved - 1):08}").exists():
                    time.sleep(0.05)
                waited += time.perf_counter() - began

    rows = [
        {"text": "a text of no meaning " * (width // 21)}
        for _ in range(packs * (steps + 1) * ranks.count)
    ]
    config = config_of(row, plan.way, 1, packs, width, plan.tiny, plan.folder, plan.cards)
    config = config.replace(max_steps=steps + 1, save_steps=every, save_total_limit=1, trackers=[])
    model = build(row, plan.tiny, ranks.device, ranks, plan.way)
    try:
        ChronicalsTrainer(model, byte_tokenizer(), config, callbacks=[Times()]).train(rows)
    except (Enough, TrainingError):  # the second on the other ranks, which have no callbacks
        if ranks.writer and len(ends) < steps:
            raise
    size = sum(file.stat().st_size for file in checkpoints.rglob("*") if file.is_file())
    if not ranks.writer:
        return {}
    durations = [after - before for before, after in zip(ends, ends[1:])]
    return {**held_up(durations, every), "checkpoint_gb": size / 1e9, "durations": durations}


def held_up(durations: list[float], every: int) -> dict[str, Any]:
    """What saves held up, and how much longer the steps beside their writing took.

    Args:
        durations: of each step but the first, in seconds, a save after each ``every`` steps. The
            last one before a second save has no figure, for the card ends that step while the run
            waits off the clock.
    """
    starts = range(every, len(durations) + 1, every)
    usual = statistics.median(durations[every // 2 - 1 : every - 2])
    counted = [durations[start - 1 : start - 2 + every] for start in starts]
    return {
        "seconds_a_step": usual,
        "stalls": [sum(steps) - usual * len(steps) for steps in counted],
        "steps_slower": [statistics.median(steps[1:]) / usual - 1 for steps in counted],
    }


def measure_peer(plan: Plan) -> dict[str, Any]:
    """The same of a peer under FSDP2."""
    import fsdp2_peers
    import torch
    import torch.distributed as dist

    from chronicals.distributed import Mesh

    row = ROWS[plan.row]
    ranks = Mesh.current()
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
    packs, width = row.sizes_of_batch(plan.tiny)
    model = build(row, plan.tiny, ranks.device, ranks, plan.way)
    count = COMPARED + WARM_UP + plan.steps
    batches = [
        batch_of(number * ranks.count + ranks.rank, packs, width, model.config.vocab_size)
        for number in range(count)
    ]
    found = fsdp2_peers.train(model, plan.way, batches, row.fields, COMPARED, WARM_UP)
    peak = torch.cuda.max_memory_allocated() / 2**30 if ranks.device.type == "cuda" else 0.0
    tokens = packs * width * dist.get_world_size()
    return {
        **found,
        "tokens_a_step": tokens,
        "tokens_per_second": tokens / statistics.median(found["seconds"]),
        "processes": ranks.count,
        "peak_gib": peak,
        "peaks_gib": ranks.gather_values(peak),
    }


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
        out = (
            plan.out
            if "failed" not in found
            else plan.out.with_name(f"failed-{time.time_ns()}.json")
        )
        out.write_text(json.dumps(found))
    if dist.is_initialized() and "failed" not in found:
        dist.barrier()
        if dist.get_rank() == 0:
            time.sleep(1)  # the store over which the others leave is here
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0 if "failed" not in found else 1)
