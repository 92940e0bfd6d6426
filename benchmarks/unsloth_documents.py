"""The longest document of Unsloth under a cap, by bisection: rows of ``long_documents.py``."""

from __future__ import annotations

import gc
import tempfile
import time
from pathlib import Path
from typing import Any

from capped_documents import PUBLISHED, Row
from document_steps import FIELDS, GIB, GIGA, Note
from step_profile import profile_of

PROBE_GRANULE = 2048
"""Tokens between two lengths that the bisection tells apart."""

FIRST_PROBE = 65536
"""Tokens that the bisection begins with where nothing is published."""


def run_unsloth(row: Row, note: Note) -> None:
    """Find the longest document of Unsloth under the cap by bisection, and its seconds a step.

    Args:
        row: the row.
        note: is given the figures of each length that fits.
    """
    began = time.monotonic()
    from unsloth import FastLanguageModel  # before torch  # isort: skip
    import torch
    from long_documents import build_model, train_tokenizer

    from chronicals.benchmark.measurement import Profiler

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
            found = {"seconds": seconds, "loss": loss.item(), "gradient_norm": norm.item()}
            note({"length": length, **found, "peak_gib": torch.cuda.max_memory_allocated() / GIB})
            return found
        except torch.OutOfMemoryError:
            print(f"{length:,} tokens do not fit", flush=True)
            return None
        finally:
            optimizer.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()

    step(PROBE_GRANULE)  # kernels are compiled
    note({"layers": row.layers, "ran_layers": row.layers})
    if row.length:
        step(row.length)
        length, figures = row.length, step(row.length)
    else:
        first = PUBLISHED.get(int(row.cap), FIRST_PROBE)
        length, figures = bisected(step, first, began + row.budget)
    if figures is None:
        note({"error": f"out of memory at {length:,} tokens"})
        return
    note({"length": length, **figures})
    if row.profiles:
        with tempfile.TemporaryDirectory() as name:
            profiler = Profiler(Path(name) / "trace.json")
            traced = step(length)
            events = profiler.events()
        note({**figures, "profile": profile_of(events)})
        if traced is not None:
            note({"traced_seconds": traced["seconds"]})


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
