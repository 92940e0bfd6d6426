"""The longest document that fits a card whose allocator is capped: rows of ``long_documents.py``.

Each row is a process of its own: a cap in GB and an arm. Ours takes the preset ``long-context`` in
QLoRA of rank 32: the longest document by plan, as one whole step, or with a quarter of the layers, or
fewer, where the plan says that a step takes over ``--step-seconds``. Then the cap is lower by what is
always there of the missing layers. The arms ``unsloth`` and ``unsloth-tiled`` (with its tiled MLP) find theirs
by bisection (``unsloth_documents``). Weights are random. Before a row of ours trains, the parts of a
reference step (``chronicals.benchmark.floor``) are timed on the same card.

A row's process is killed with all that it started when its time is over, and when this process ends.
What it has found is in ``OUTPUT-row-N.json`` after each step, and what it said in ``OUTPUT-row-N.log``:
where all is ended from outside, these files are there. ``--profile`` traces one more step than is
timed, and says its seconds by part (``step_profile``).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from document_steps import FIELDS, GIB, GIGA, Note, Training, train
from step_profile import words_of_profile

from chronicals.bound_process import BoundProcess

ARMS = ("ours", "unsloth", "unsloth-tiled")

WARM_UP_LENGTH = 8192
WARM_UP_LAYERS = 2

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
        attention: backend of ours, or empty for the one that a run takes by itself.
        profiles: one more step is traced.
    """

    cap: float
    arm: str
    shape: str
    layers: int
    length: int
    step_seconds: float
    budget: float
    attention: str = ""
    profiles: bool = False


def run_rows(given: argparse.Namespace) -> None:
    """Run each row in a process of its own within the budget, and write what they found."""
    began = time.monotonic()
    found: list[dict[str, Any]] = []
    asked = [(arm, float(cap)) for arm in given.arms.split(",") for cap in given.caps.split(",")]
    for number, (arm, cap) in enumerate(asked):
        left = given.budget - (time.monotonic() - began)
        row = Row(
            cap,
            arm,
            given.shape,
            given.layers,
            given.length,
            given.step_seconds,
            left,
            given.attention,
            given.profile,
        )
        result = asdict(row)
        if left < LEFT_FOR_LAST:
            result["error"] = f"not begun: {left:.0f} s of the budget of {given.budget:.0f} left"
        else:
            result |= in_a_process(row, given.output.with_name(f"{given.output.stem}-row-{number}"))
        found.append(result)
        given.output.write_text(json.dumps({"commit": given.commit, "rows": found}, indent=1))
        print(words_of(result), flush=True)


def in_a_process(row: Row, place: Path) -> dict[str, Any]:
    """Return what a row found, or why it did not end.

    Args:
        row: the row.
        place: path of its files, without their ``.json`` and ``.log``.
    """
    out = Path(f"{place}.json")
    log = Path(f"{place}.log")
    out.unlink(missing_ok=True)
    command = [sys.executable, __file__, json.dumps(asdict(row)), str(out)]
    with log.open("w") as lines:
        process = BoundProcess(command, stdout=lines, stderr=subprocess.STDOUT)
        late = ""
        try:
            process.wait(row.budget)
        except subprocess.TimeoutExpired:
            late = f"over its {row.budget:.0f} s; "
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    if "seconds" in found and "floor_seconds" in found:
        found["share_of_floor"] = found["floor_seconds"] / found["seconds"]
    if late:
        found["late"] = f"{late}the last lines were {log.read_text()[-500:]}"
    if "loss" not in found and "error" not in found:
        found["error"] = late + log.read_text()[-2000:]
    return found


def noting(out: Path, found: dict[str, Any]) -> Note:
    """Return a function that adds figures to ``found`` and writes all to a file, whole or not at all."""

    def note(figures: dict[str, Any]) -> None:
        found.update(figures)
        draft = out.with_suffix(".draft")
        draft.write_text(json.dumps(found))
        draft.replace(out)

    return note


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
    if "share_of_floor" in result:
        parts.append(f"floor {result['floor_seconds']:.1f} s ({result['share_of_floor']:.2f})")
    parts.append(f"loss {result['loss']:.4f}, gradient norm {result['gradient_norm']:.4f}")
    published = PUBLISHED.get(int(result["cap"]))
    if published and result["shape"] == "8b":
        parts.append(f"{result['length'] / published:.2f}x of what Unsloth publishes")
    if "attention" in result:
        parts.append(f"attention by {result['attention'] or 'what the run takes'}")
    if "profile" in result:
        parts.append(f"profile of {words_of_profile(result['profile'])}")
    parts += [result[name] for name in ("late", "error") if name in result]
    return f"{start} {', '.join(parts)}"


# --- ours ---


def run_ours(row: Row, note: Note) -> None:
    """Plan the longest document, time the floor of a step, train, and note what is found."""
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
        note({"length": length, "layers": row.layers})
        taken, facts = planned(whole, length, cap)
        note({"planned_seconds": taken.seconds, "settings": taken.settings})
        layers = row.layers
        settings = taken.settings
        fixed = taken.fitted.memory.fixed
        while taken.seconds > row.step_seconds and layers >= 4:
            layers = layers // 4 if layers == row.layers else layers // 2
            part = recipe_for(row.shape, layers, folder / f"{layers}", on_card).replace(**settings)
            less, _ = planned(part, length, cap)
            cap = int(row.cap * GIGA) - (fixed - less.fitted.memory.fixed)
            taken, facts = planned(part, length, cap)
        memory = taken.fitted.memory
        note(
            {
                "ran_layers": layers,
                "cap_bytes": cap,
                "card_decides": on_card,
                "planned_gib": taken.fitted.held / GIB,
                "moved_inputs": memory.moved_inputs,
                "results_here": memory.results_here,
            }
        )
        print(f"{length:,} tokens, {layers} layers, {taken.seconds:.0f} s by plan", flush=True)

        settings = settings if on_card else {}
        with attending_by(row.attention):
            floor = timed_floor(facts, length)
        note({"floor": asdict(floor), "floor_seconds": floor.seconds})
        with attending_by(row.attention):
            warm = build_model(row.shape, min(WARM_UP_LAYERS, layers), WARM_UP_LENGTH)
            once = Training(min(WARM_UP_LENGTH, length), 1, 0, settings)
            train(warm, tokenizer, once, folder / "warm", lambda figures: None)
            del warm
            model = build_model(row.shape, layers, length)
            steps = 1 if taken.seconds > LONG_STEP else 3
            long = Training(length, steps, cap, settings, row.profiles)
            train(model, tokenizer, long, folder / "long", note)


@contextmanager
def attending_by(name: str) -> Iterator[None]:
    """Context in which attention runs by a backend, where it can.

    Args:
        name: of ``attention.BACKENDS``; empty for the usual choice.

    Raises:
        RuntimeError: at its end, another one ran.
    """
    from chronicals.attention import backends
    from chronicals.attention.support import LONG_DOCUMENT

    if not name:
        yield
        return
    usual = backends.order
    backends.logged_choices.clear()
    backends.order = lambda needs: (name, *usual(needs))
    try:
        yield
    finally:
        backends.order = usual
    # proofs on small models are in other dtypes, and warm-ups of shorter documents
    half = [(chosen, needs) for chosen, needs, _ in backends.logged_choices if "float16" in needs]
    of_long = {chosen for chosen, needs in half if LONG_DOCUMENT in needs}
    ran = of_long or {chosen for chosen, _ in half}
    if ran != {name}:
        found = ", ".join(sorted(ran)) or "none in 16 bits"
        raise RuntimeError(f"--attention {name}: attention ran by {found}")


def recipe_for(shape: str, layers: int, folder: Path, on_card: bool) -> Any:
    """Return the preset's recipe for a model of which ``folder`` has the configuration alone."""
    from long_documents import config_of

    from chronicals.config import Recipe

    config_of(shape, layers, 1 << 20).save_pretrained(folder)
    fields = {**FIELDS, "model": str(folder), "data": ["not read"], "fit": "settings"}
    if not on_card:  # a run on the CPU recomputes its layers whole, and has no settings to fit
        fields |= {"fit": "off"}
    return Recipe.given("long-context", None, **fields)


def planned(recipe: Any, length: int, cap: int) -> tuple[Any, Any]:
    """Return what ``fit`` takes for a document of this length, and the facts of the run."""
    from chronicals.planning.ways import planned_facts
    from chronicals.policies.fit import fit_settings

    facts = planned_facts(recipe.replace(max_seq_length=length), cap, 1)
    return fit_settings(facts).taken, facts


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


def main() -> None:
    row = Row(**json.loads(sys.argv[1]))
    note = noting(Path(sys.argv[2]), {})
    try:
        if row.arm == "ours":
            run_ours(row, note)
        else:
            from unsloth_documents import run_unsloth

            run_unsloth(row, note)
    except Exception as error:
        note({"error": f"{type(error).__name__}: {error}"[:1000]})
        raise


if __name__ == "__main__":
    main()
