"""The longest document that fits a card whose allocator is capped: rows of ``long_documents.py``.

Each row is a process of its own: a cap in GB and an arm. Ours takes the preset ``long-context`` in
QLoRA of rank 32: the longest document by plan, as one whole step, or with a quarter of the layers, or
fewer, where the plan says that a step takes over ``--step-seconds``. Then the cap is lower by what is
always there of the missing layers. The arms ``unsloth`` and ``unsloth-tiled`` (with its tiled MLP) find theirs
by bisection. Weights are random. After a row of ours the parts of a reference step
(``chronicals.benchmark.floor``) are timed on the same card.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

GIGA = 10**9
GIB = 2**30

ARMS = ("ours", "unsloth", "unsloth-tiled")

WARM_UP_LENGTH = 8192
WARM_UP_LAYERS = 2

PROBE_GRANULE = 2048
"""Tokens between two lengths that the bisection of a peer tells apart."""

FIRST_PROBE = 65536
"""Tokens that the bisection begins with where nothing is published."""

PUBLISHED = {8: 2972, 12: 21848, 16: 40724, 24: 78475, 48: 191728, 80: 342733}
"""Tokens that Unsloth publishes for an 8B in QLoRA r32, batch 1, by GB (unsloth.ai/blog)."""

LONG_STEP = 20.0
"""Seconds of a step, by plan, from which one is taken, and not the fastest of three."""

LEFT_FOR_LAST = 20.0
"""Seconds of the budget that no new row begins in."""


@dataclass(frozen=True)
class Row:
    """What is measured in one process.

    Attributes:
        cap: GB of the card that may be used.
        arm: one of ``ARMS``.
        shape: name of the model's shape.
        layers: of the whole model.
        length: tokens of the document; 0 for the longest.
        step_seconds: longest step, by plan, that runs with all layers.
        budget: seconds that the row may take.
    """

    cap: float
    arm: str
    shape: str
    layers: int
    length: int
    step_seconds: float
    budget: float


def run_rows(given: argparse.Namespace) -> None:
    """Run each row in a process of its own within the budget, and write what they found."""
    began = time.monotonic()
    found: list[dict[str, Any]] = []
    for arm in given.arms.split(","):
        for cap in given.caps.split(","):
            left = given.budget - (time.monotonic() - began)
            row = Row(
                float(cap), arm, given.shape, given.layers, given.length, given.step_seconds, left
            )
            result = asdict(row)
            if left < LEFT_FOR_LAST:
                result["error"] = (
                    f"not begun: {left:.0f} s of the budget of {given.budget:.0f} left"
                )
            else:
                result |= in_a_process(row)
            found.append(result)
            given.output.write_text(json.dumps({"commit": given.commit, "rows": found}, indent=1))
            print(words_of(result), flush=True)


def in_a_process(row: Row) -> dict[str, Any]:
    """Return what a row found, or why it did not end."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        log = Path(folder) / "log.txt"
        command = [sys.executable, __file__, json.dumps(asdict(row)), str(out)]
        with log.open("w") as lines:
            # In a session of its own, so that its compilers end with it.
            process = subprocess.Popen(
                command, stdout=lines, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                process.wait(row.budget)
                late = ""
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                late = f"over its {row.budget:.0f} s; "
        found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
        if "loss" not in found and "error" not in found:
            found["error"] = late + log.read_text()[-2000:]
        return found


def words_of(result: dict[str, Any]) -> str:
    """Return a row of the table that is printed."""
    start = f"{result['cap']:>5.0f} GB {result['arm']:<13}"
    if "loss" not in result:
        return f"{start} {result.get('error', '')[-600:]}"
    parts = [
        f"{result['length']:>9,} tokens",
        f"{result['ran_layers']} of {result['layers']} layers",
        f"peak {result['peak_gib']:.2f} GiB",
    ]
    if "planned_gib" in result:
        off = result["peak_gib"] and result["planned_gib"] / result["peak_gib"] - 1
        parts.append(f"plan {result['planned_gib']:.2f} ({off:+.1%})")
    parts.append(f"{result['seconds']:.1f} s")
    parts.append(f"{result['length'] / result['seconds']:,.0f} tokens/s")
    if "floor_seconds" in result:
        parts.append(f"floor {result['floor_seconds']:.1f} s ({result['share_of_floor']:.2f})")
    parts.append(f"loss {result['loss']:.4f}, gradient norm {result['gradient_norm']:.4f}")
    published = PUBLISHED.get(int(result["cap"]))
    if published and result["shape"] == "8b":
        parts.append(f"{result['length'] / published:.2f}x of what Unsloth publishes")
    return f"{start} {', '.join(parts)}"


# --- ours ---


def run_ours(row: Row, out: Path) -> None:
    """Plan the longest document, train on it, time the floor, and write what was found."""
    import torch
    from long_documents import build_model, train_tokenizer

    from chronicals.planning.longest import longest_document

    on_card = torch.cuda.is_available()
    tokenizer = train_tokenizer(
        ["the quick brown fox takes the long way home"] * 20, vocab_size=300
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cap = int(row.cap * GIGA)
        whole = recipe_for(row.shape, row.layers, folder / "whole", on_card)
        length = row.length or longest_document(whole, cap)
        found: dict[str, Any] = {"length": length, "layers": row.layers}
        taken, facts = planned(whole, length, cap)
        found |= {"planned_seconds": taken.seconds, "settings": taken.settings}
        layers = row.layers
        settings = taken.settings
        fixed = taken.fitted.memory.fixed
        while taken.seconds > row.step_seconds and layers >= 4:
            layers = layers // 4 if layers == row.layers else layers // 2
            part = recipe_for(row.shape, layers, folder / f"{layers}", on_card).replace(**settings)
            less, _ = planned(part, length, cap)
            cap = int(row.cap * GIGA) - (fixed - less.fitted.memory.fixed)
            taken, facts = planned(part, length, cap)
        found |= {"ran_layers": layers, "cap_bytes": cap, "card_decides": on_card}
        found["planned_gib"] = taken.fitted.held / GIB
        found["moved_inputs"] = taken.fitted.memory.moved_inputs
        out.write_text(json.dumps(found))
        print(f"{length:,} tokens, {layers} layers, {taken.seconds:.0f} s by plan", flush=True)

        settings = settings if on_card else {}
        warm = build_model(row.shape, min(WARM_UP_LAYERS, layers), WARM_UP_LENGTH)
        train(warm, tokenizer, min(WARM_UP_LENGTH, length), 1, 0, folder / "warm", settings)
        del warm
        model = build_model(row.shape, layers, length)
        steps = 1 if taken.seconds > LONG_STEP else 3
        found |= train(model, tokenizer, length, steps, cap, folder / "long", settings)
        del model
        gc.collect()
        out.write_text(json.dumps(found))
        floor = timed_floor(facts, length)
        found |= {"floor": asdict(floor), "floor_seconds": floor.seconds}
        found["share_of_floor"] = floor.seconds / found["seconds"]
        out.write_text(json.dumps(found))


def recipe_for(shape: str, layers: int, folder: Path, on_card: bool) -> Any:
    """Return the preset's recipe for a model of which ``folder`` has the configuration alone."""
    from long_documents import config_of

    from chronicals.config import Recipe

    config_of(shape, layers, 1 << 20).save_pretrained(folder)
    fields = {**FIELDS, "model": str(folder), "data": ["not read"], "fit": "settings"}
    if not on_card:  # a run on the CPU recomputes its layers whole, and has no settings to fit
        fields |= {"fit": "off"}
    return Recipe.given("long-context", None, **fields)


FIELDS: dict[str, Any] = {
    "use_lora": True,
    "lora_rank": 32,
    "lora_alpha": 32,
    "lora_dropout": 0.0,
    "quantization": "nf4",
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "objective": "pretraining",
}


def planned(recipe: Any, length: int, cap: int) -> tuple[Any, Any]:
    """Return what ``fit`` takes for a document of this length, and the facts of the run."""
    from chronicals.planning.ways import planned_facts
    from chronicals.policies.fit import fit_settings

    facts = planned_facts(recipe.replace(max_seq_length=length), cap, 1)
    return fit_settings(facts).taken, facts


def train(
    model: Any,
    tokenizer: Any,
    length: int,
    steps: int,
    cap: int,
    folder: Path,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Train on one document, and return peak, seconds of a step, loss and gradient norm.

    Args:
        model: with random weights in 16 bits.
        tokenizer: any.
        length: tokens of the document.
        steps: number of steps.
        cap: bytes that the allocator may reserve from the first step on; 0 for all.
        folder: for the run's files.
        settings: fields of the configuration.
    """
    import torch

    from chronicals import ChronicalsConfig, ChronicalsTrainer
    from chronicals.training import Callback

    on_card = torch.cuda.is_available()
    pinned = PinnedSeconds()
    logging.getLogger("chronicals.memory").addHandler(pinned)
    logging.getLogger("chronicals.memory").setLevel(logging.INFO)

    class Steps(Callback):
        """Caps the allocator when the model is ready, and notes when the last step is done."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def run_began(self, run: Any) -> None:
            gc.collect()
            if on_card:
                torch.cuda.empty_cache()
                if cap:
                    total = torch.cuda.get_device_properties(0).total_memory
                    torch.cuda.set_per_process_memory_fraction(min(cap / total, 1.0))
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
            self.times.append(time.monotonic())

        def step_done(self, metrics: Any) -> None:
            self.times.append(time.monotonic())
            print(f"step after {self.times[-1] - self.times[-2]:.1f} s", flush=True)

    fields = {**FIELDS, "use_gradient_checkpointing": True, **settings}
    config = ChronicalsConfig(
        **fields,
        max_seq_length=length,
        max_steps=steps,
        warmup_steps=0,
        trackers=[],
        report_samples=0,
        save_steps=None,
        output_dir=folder / "run",
        cache_dir=folder / "tokens",
        check_memory=False,
        **({"gpu_memory": cap / GIGA} if cap and on_card else {}),
    )
    document = [5 + (i * i + i // 7) % 290 for i in range(length)]
    clock = Steps()
    result = ChronicalsTrainer(model, tokenizer, config, callbacks=[clock]).train(
        [{"input_ids": document}]
    )
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    seconds = [end - begin for begin, end in pairwise(clock.times)]
    seconds[0] -= pinned.seconds
    if steps > 1:  # metrics of a step come while the next one runs, so the run's own clock is taken
        rates = [json.loads(line)["tokens_per_second"] for line in lines[1:]]
        seconds = [length / rate for rate in rates]
    return {
        "loss": result.loss,
        "gradient_norm": last["grad_norm"],
        "steps": steps,
        "pinned_seconds": pinned.seconds,
        "seconds": min(seconds),
        "all_seconds": seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if on_card else 0.0,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB if on_card else 0.0,
    }


class PinnedSeconds(logging.Handler):
    """Sums the seconds that a run says it took to pin host memory, which its first step does."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if "pinned" in record.msg:
            assert isinstance(record.args, tuple)
            self.seconds += float(record.args[-1])  # type: ignore[arg-type]


def timed_floor(facts: Any, length: int) -> Any:
    """Return the reference step of a document, from parts timed here.

    Attention is timed over the whole document for one key head and its queries, products over at
    most 16,384 rows.
    """
    import torch

    from chronicals.attention import document_attention
    from chronicals.benchmark.floor import reference_step
    from chronicals.policies.model_sizes import ModelSizes
    from chronicals.policies.step_time import AS_LONG_AS_PACKS, job_of

    on_card = torch.cuda.is_available()
    device = "cuda" if on_card else "cpu"
    dtype = torch.bfloat16 if on_card else torch.float32
    if on_card:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)
    job = job_of(facts, ModelSizes.of(facts.model), AS_LONG_AS_PACKS)
    size = 1 << 30 if on_card else 1 << 24
    source = torch.empty(size, dtype=torch.uint8, device=device)
    copy = 2 * size / timed(partial(torch.empty_like(source).copy_, source), 5)
    del source

    def product_seconds(product: Any) -> float:
        rows = min(product.rows, 16384)
        if product.kind == "dW":
            left = torch.randn(product.outputs, rows, device=device, dtype=dtype)
            right = torch.randn(rows, product.inputs, device=device, dtype=dtype)
        else:
            inner, outer = product.inputs, product.outputs
            if product.kind == "dX":
                inner, outer = outer, inner
            left = torch.randn(rows, inner, device=device, dtype=dtype)
            right = torch.randn(inner, outer, device=device, dtype=dtype)
        return timed(partial(torch.mm, left, right), 3) * product.rows / rows

    shape = job.shape
    queries = shape.heads // shape.kv_heads
    drawn = [
        torch.randn(length, heads, shape.head_dim, device=device, dtype=dtype, requires_grad=True)
        for heads in (queries, 1, 1)
    ]
    bounds = torch.tensor([0, length], dtype=torch.int32, device=device)
    upstream = torch.randn_like(drawn[0])

    def attend() -> None:
        out = document_attention(*drawn, bounds, length)
        torch.autograd.grad(out, drawn, upstream)

    attention = timed(attend, 1) * shape.kv_heads
    return reference_step(job, copy, product_seconds, attention)


def timed(run: Any, times: int) -> float:
    """Return the seconds of a call, the mean of several after one that is not counted."""
    import torch

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    run()
    wait()
    began = time.perf_counter()
    for _ in range(times):
        run()
    wait()
    return (time.perf_counter() - began) / times


# --- Unsloth ---


def run_unsloth(row: Row, out: Path) -> None:
    """Find the longest document of Unsloth under the cap by bisection, and its seconds a step."""
    began = time.monotonic()
    from unsloth import FastLanguageModel  # before torch  # isort: skip
    import torch
    from long_documents import build_model, train_tokenizer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        made = build_model(row.shape, row.layers, 1 << 20)
        made.save_pretrained(folder)
        tokenizer = train_tokenizer(
            ["the quick brown fox takes the long way home"] * 20, vocab_size=300
        )
        tokenizer.save_pretrained(folder)
        del made, tokenizer
        gc.collect()
        torch.cuda.empty_cache()
        tiled = {"unsloth_tiled_mlp": True} if row.arm == "unsloth-tiled" else {}
        model, _ = FastLanguageModel.from_pretrained(
            str(folder),
            max_seq_length=1 << 19,
            dtype=torch.bfloat16,
            load_in_4bit=True,
            use_gradient_checkpointing="unsloth",
            **tiled,
        )
    model = FastLanguageModel.get_peft_model(
        model,
        r=FIELDS["lora_rank"],
        lora_alpha=FIELDS["lora_alpha"],
        lora_dropout=0,
        bias="none",
        target_modules=[
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ],
        use_gradient_checkpointing="unsloth",
    )
    FastLanguageModel.for_training(model)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(row.cap * GIGA / total, 1.0))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    torch.cuda.reset_peak_memory_stats()

    def step(length: int) -> dict[str, Any] | None:
        """Return a step's figures, None where it runs out of memory."""
        ids = torch.arange(length, device="cuda").remainder(290).add(5)[None]
        torch.cuda.synchronize()
        start = time.perf_counter()
        try:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            print(f"{length:,} tokens in {seconds:.1f} s", flush=True)
            return {"seconds": seconds, "loss": loss.item(), "gradient_norm": norm.item()}
        except torch.OutOfMemoryError:
            print(f"{length:,} tokens do not fit", flush=True)
            return None
        finally:
            optimizer.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()

    step(PROBE_GRANULE)  # kernels are compiled
    found: dict[str, Any] = {"layers": row.layers, "ran_layers": row.layers}
    if row.length:
        step(row.length)
        best = (row.length, step(row.length))
    else:
        best = bisected(step, PUBLISHED.get(int(row.cap), FIRST_PROBE), began + row.budget)
    length, figures = best
    if figures is None:
        found["error"] = f"out of memory at {length:,} tokens"
    else:
        found |= {"length": length, **figures, "peak_gib": torch.cuda.max_memory_allocated() / GIB}
    out.write_text(json.dumps(found))


def bisected(step: Any, first: int, ends: float) -> tuple[int, dict[str, Any] | None]:
    """Return the longest length whose step fits, and that step's figures.

    Args:
        step: runs a step of a length; None where it does not fit.
        first: length that is tried first.
        ends: when no more may be tried, by ``time.monotonic``.
    """
    fits, figures = 0, None
    fails = 0
    length = first
    longest_probe = 0.0
    while fails == 0 or fails - fits > PROBE_GRANULE:
        if time.monotonic() + 2 * longest_probe > ends:
            break
        began = time.monotonic()
        found = step(length)
        longest_probe = max(longest_probe, time.monotonic() - began)
        if found is None:
            fails = length
        else:
            fits, figures = length, found
        length = 2 * fits if fails == 0 else (fits + fails) // 2
        if length < PROBE_GRANULE:
            break
    return fits or fails, figures


def main() -> None:
    row = Row(**json.loads(sys.argv[1]))
    run = run_ours if row.arm == "ours" else run_unsloth
    run(row, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
