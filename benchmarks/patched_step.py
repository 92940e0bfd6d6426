"""A plain training step of a Hugging Face model with and without ``patch_model``: memory, speed,
the same loss.

    python benchmarks/patched_step.py OUTPUT.json [--commit HASH]

The Qwen2.5-0.5B shape, random weights in bf16, 16,384 random tokens a step: 8 rows of 2048, or one
row of 16,384 that holds documents of 64 to 2048 tokens with restarting positions. torch's fused
AdamW, clipping, no recomputation. The loss and the gradient norm of the first step are those of
both models on the same weights; medians, with the samples in the file.
"""

import argparse
import gc
import json
import platform
import statistics
from pathlib import Path

import torch
import transformers
import triton
from baseline import SHAPE

from chronicals import patch_model

STEPS = 12
WARM_UP = 4
TOKENS = 16384


def rows() -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(10, SHAPE["vocab_size"], (8, TOKENS // 8), generator=generator)
    lengths: list[int] = []
    while sum(lengths) < TOKENS:
        lengths.append(
            min(int(torch.randint(64, 2049, (), generator=generator)), TOKENS - sum(lengths))
        )
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = ids.view(1, -1)
    return {
        "8 rows of 2048": {"input_ids": ids, "labels": ids},
        "documents in one row": {
            "input_ids": packed,
            "labels": packed.masked_fill(positions == 0, -100),
            "position_ids": positions,
        },
    }


def measure(inputs: dict[str, torch.Tensor], patched: bool) -> dict:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.Qwen2Config(**SHAPE), dtype=torch.bfloat16
        ).train()
    if patched:
        patch_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    inputs = {name: x.cuda() for name, x in inputs.items()}
    first: dict[str, float] = {}
    times = []
    for step in range(STEPS + WARM_UP):
        if step == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        loss = model(**inputs).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        end.record()
        end.synchronize()
        first = first or {"loss": loss.item(), "grad_norm": norm.item()}
        del loss
        times.append(start.elapsed_time(end))
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {**first, "peak_gib": peak, "milliseconds": times[WARM_UP:], "tokens": TOKENS}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--commit", default="unknown")
    given = parser.parse_args()
    versions = {
        name: module.__version__
        for name, module in (("torch", torch), ("triton", triton), ("transformers", transformers))
    }
    results: dict = {
        "card": torch.cuda.get_device_name(0),
        "versions": {"python": platform.python_version(), **versions},
        "commit": given.commit,
        "rows": {},
    }
    for kind, inputs in rows().items():
        for patched in (False, True):
            name = f"{kind}, {'patched' if patched else 'plain'}"
            results["rows"][name] = row = measure(inputs, patched)
            given.output.write_text(json.dumps(results))
            gc.collect()
            torch.cuda.empty_cache()
            rate = TOKENS / statistics.median(row["milliseconds"])
            print(
                f"{name:32} {rate:6.1f}k tokens/s  {row['peak_gib']:6.1f} GiB  loss "
                f"{row['loss']:.4f}  "
                f"gradient norm {row['grad_norm']:.4f}",
                flush=True,
            )
    for kind in rows():
        plain, patched = (results["rows"][f"{kind}, {arm}"] for arm in ("plain", "patched"))
        for field in ("loss", "grad_norm"):
            if abs(plain[field] - patched[field]) > 0.01 * abs(plain[field]):
                raise SystemExit(
                    f"{kind}: {field} {patched[field]} where the plain model has {plain[field]}"
                )


if __name__ == "__main__":
    main()
