"""Rows of decoding with experts in host memory (``expert_offload.py``).

Routes are forced, so that a known share of a token's experts is missing. Where a prediction is forced
too, a known share of those is named while the layer before runs, and as many wrong experts are as
would make a predictor of that recall.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from forced_routes import ForcedPrediction, ForcedRoutes, routes
from offload_sizes import (
    WHOLE_LAYERS,
    Sizes,
    built,
    bus_rate,
    chosen_by,
    free,
    offloaded,
    seconds,
    where,
)
from torch import Tensor

import chronicals
from chronicals.generation import EngineSettings, Request
from chronicals.generation.engine import Engine
from chronicals.moe.offload.cpu_products import TorchProducts
from chronicals.moe.offload.kt_products import KtProducts, why_it_does_not_run

FEW_TOKENS = 8
"""Tokens of a short answer."""

HEAD_CALLS = 20
"""Calls of the head one after another, which the host launches faster than a device takes them."""

ROUTED_STEPS = 512
"""Decode steps before forced routes begin anew."""


@torch.no_grad()
def logits_of(model: Any, steps: int = 6) -> tuple[list[int], Tensor]:
    """Return greedy tokens behind a prompt of 32, and all logits on the host."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (1, 32), generator=generator).to(where())
    found, tokens = [], list[int]()
    cache = None
    for _ in range(steps):
        out = model(ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        found.append(out.logits[0].float().cpu())
        ids = out.logits[:, -1:].argmax(-1)
        tokens.append(int(ids))
    return tokens, torch.cat(found)


def decode_step(model: Any, sizes: Sizes, forced: ForcedRoutes) -> dict[str, Any]:
    """Return seconds, chosen and missing experts of a decode step of the engine, and ``tokens``.

    They are the difference between long and short answers, so that neither the prompt counts nor
    the first steps behind it, in which experts of the routes come back to their slots. The tokens
    are those of an answer whose routes are the first ones.
    """
    generator = torch.Generator().manual_seed(2)
    prompt = torch.randint(0, model.config.vocab_size, (128,), generator=generator).tolist()
    engine = Engine(model, EngineSettings(slots=1))

    def answer(new: int) -> dict[str, float]:
        before = chosen_by(model)
        taken = seconds(lambda: engine.generate([Request(prompt, new)]))
        after = chosen_by(model)
        return {"seconds": taken, **{name: after[name] - before[name] for name in after}}

    answer(FEW_TOKENS)  # compiles, and captures graphs
    both = [
        min((answer(new) for _ in range(2)), key=lambda one: one["seconds"])
        for new in (FEW_TOKENS, FEW_TOKENS + sizes.tokens)
    ]
    short, long = both
    forced.begin_anew()
    [[one]] = engine.generate([Request(prompt, FEW_TOKENS + sizes.tokens)])
    step = {name: (long[name] - short[name]) / sizes.tokens for name in short}
    return {**step, "tokens": one.tokens}


@torch.no_grad()
def head_seconds(model: Any) -> float:
    """Return the seconds of embedding, last norm and head for a token, as the device takes them."""
    ids = torch.zeros(1, 1, dtype=torch.int64, device=where())
    inner = model.model

    def calls() -> None:
        for _ in range(HEAD_CALLS):
            model.lm_head(inner.norm(inner.embed_tokens(ids)))

    calls()
    return statistics.median(seconds(calls) for _ in range(5)) / HEAD_CALLS


def of_whole(token: float, head: float, layers: int) -> float:
    """Return tokens a second of 48 layers, given the time of a token with ``layers``."""
    return 1 / (head + (token - head) * WHOLE_LAYERS / layers)


def compared(expected: tuple[list[int], Tensor], got: tuple[list[int], Tensor]) -> dict[str, Any]:
    """Return whether tokens and logits are the same, and the relative error of the logits."""
    difference = (got[1] - expected[1]).norm() / expected[1].norm()
    return {
        "equal tokens": got[0] == expected[0],
        "equal bits": torch.equal(got[1], expected[1]),
        "error": float(difference),
    }


def routes_of(sizes: Sizes, missing: float) -> Tensor:
    """Return the forced routes of a share of missing experts, int64 ``[steps, layers, k]``."""
    experts, each = (sizes.model[name] for name in ("num_experts", "num_experts_per_tok"))
    return routes(sizes.layers, experts, each, missing, ROUTED_STEPS)


def resident_decoding(sizes: Sizes, missing: float) -> dict[str, Any]:
    """Return logits, tokens and times of the model with all experts on the card."""
    model = built(sizes, sizes.layers).eval()
    chronicals.patch_model(model)
    found = {"logits": logits_of(model), "head": head_seconds(model)}
    forced = ForcedRoutes(model, routes_of(sizes, missing), where())
    found |= decode_step(model, sizes, forced)
    forced.begin_anew()
    found["forced logits"] = logits_of(model)
    free()
    return found


def compute_by(model: Any, name: str) -> None:
    """Let the CPU compute its share by the products of that name: ``torch`` or ``kt``.

    Raises:
        ValueError: kt-kernel is not installed, or does not run on this CPU.
    """
    cpu = model.offload.engine.cpu
    is_kt = isinstance(cpu.products, KtProducts)
    if name == "kt" and not is_kt:
        raise ValueError(f"kt-kernel: is not installed, or {why_it_does_not_run()}")
    if name == "torch" and is_kt:
        cpu.products.close()
        cpu.products = TorchProducts()


def offloaded_decoding(
    sizes: Sizes,
    missing: float,
    resident: dict[str, Any],
    prediction: ForcedPrediction | None = None,
    by_cpu: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return times of the model with experts in host memory, and whether it computes the same.

    Args:
        sizes: sizes.
        missing: share of the experts of a token that are not in slots.
        resident: what ``resident_decoding`` returned.
        prediction: names the experts of the routes; None for what a layer chose last.
        by_cpu: products by which the CPU computes a share, as of ``compute_by``.
        **options: of ``chronicals.offload``.
    """
    named = {} if prediction is None else {"predictor": prediction}
    model = offloaded(built(sizes, sizes.layers).eval(), sizes, **named, **options)
    if by_cpu is not None:
        compute_by(model, by_cpu)
    chronicals.patch_model(model)
    same = compared(resident["logits"], logits_of(model))
    forced = ForcedRoutes(model, routes_of(sizes, missing), where(), prediction)
    step = decode_step(model, sizes, forced)
    forced.begin_anew()
    of_forced = compared(resident["forced logits"], logits_of(model))
    came = step["used"] + step["missing"]
    cpu = model.offload.engine.cpu
    found = {
        **step,
        **same,
        "forced": {**of_forced, "equal tokens of graphs": step["tokens"] == resident["tokens"]},
        "recall": step["used"] / came if prediction is not None else None,
        "seconds of an expert": cpu and {"bus": cpu.bus_seconds, "cpu": cpu.cpu_seconds},
        "slot bytes": model.offload.report().slot_bytes,
        "tokens/s of 48 layers": of_whole(step["seconds"], resident["head"], sizes.layers),
    }
    free(model)
    return found


def decoded(
    missing: float, sizes: Sizes, by_cpu: str | None = None, recall: float | None = None
) -> dict[str, Any]:
    """Return the row of decoding with a share of missing experts.

    Args:
        missing: that share.
        sizes: sizes.
        by_cpu: products of a second arm in ``mode="numerical"``; None for no such arm.
        recall: share of the missing experts that a prediction names; None for no prediction.
    """
    bus = bus_rate(sizes.record)
    resident = resident_decoding(sizes, missing)
    free()  # the model is in cycles
    prediction = None
    if recall is not None:
        table = routes_of(sizes, missing)
        prediction = ForcedPrediction(table, sizes.model["num_experts"], recall)
    arms = {"exact": offloaded_decoding(sizes, missing, resident, prediction)}
    free()
    if by_cpu is not None:
        arms[by_cpu] = offloaded_decoding(sizes, missing, resident, by_cpu=by_cpu, mode="numerical")
    exact = arms["exact"]
    # Wrong experts that a prediction named are no part of the bound.
    copies = (exact["missing"] + exact["used"]) * sizes.record / bus
    resident_rate = of_whole(resident["seconds"], resident["head"], sizes.layers)
    bound = max(1 / resident_rate, copies * WHOLE_LAYERS / sizes.layers)
    found = {
        "bus": bus,
        "head": resident["head"],
        "resident": resident["seconds"],
        "resident tokens/s of 48 layers": resident_rate,
        "stated recall": recall,
        "copies": copies,
        "arms": arms,
        "share": bound * exact["tokens/s of 48 layers"],
    }
    if by_cpu is not None:
        found["gain"] = exact["seconds"] / arms[by_cpu]["seconds"]
    return found


@torch.no_grad()
def mapped(missing: float, sizes: Sizes) -> dict[str, Any]:
    """Return the row of transformers' ``device_map``, with all experts on the CPU."""
    from accelerate import dispatch_model

    if where() == "cpu":
        raise ValueError("device_map moves experts to a card, and there is none")
    resident = resident_decoding(sizes, missing)
    model = built(sizes, sizes.layers).eval()
    places: dict[str, Any] = {
        "model.embed_tokens": 0,
        "model.norm": 0,
        "model.rotary_emb": 0,
        "lm_head": 0,
    }
    for number in range(sizes.layers):
        for part in ("self_attn", "input_layernorm", "post_attention_layernorm", "mlp.gate"):
            places[f"model.layers.{number}.{part}"] = 0
        places[f"model.layers.{number}.mlp.experts"] = "cpu"
    model = dispatch_model(model, places, main_device=0)
    same = compared(resident["logits"], logits_of(model))
    ForcedRoutes(model, routes_of(sizes, missing), where())
    ids = torch.zeros(1, 1, dtype=torch.int64, device=where())
    cache = model(ids, use_cache=True).past_key_values
    times = [seconds(lambda: model(ids, past_key_values=cache, use_cache=True)) for _ in range(12)]
    token = statistics.median(times[2:])
    return {
        "resident": resident["seconds"],
        "seconds": token,
        **same,
        "tokens/s of 48 layers": of_whole(token, resident["head"], sizes.layers),
    }
