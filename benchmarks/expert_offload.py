"""Experts in host memory beside experts on the card: decoding, a prompt, training.

    python benchmarks/expert_offload.py OUT.json [--rows NAME ...] [--layers 8] [--each 200]
    python benchmarks/expert_offload.py OUT.json --tiny      # tiny sizes, also without a card

Qwen3-30B-A3B's shape with random weights, the bus measured in the same call. Each row runs in a
process of its own; what is in OUT.json is run again only if it is named.

- ``decode-10``, ``-30``, ``-50``: a token's time in bf16 where routes are forced so that this
  percentage of its experts is missing, over that of the same harness with all experts on the card.
- ``prompt``: a pass over 8,192 tokens.
- ``cpu-50``: as ``decode-50``, with a share of the misses computed by the CPU.
- ``map-50``: as ``decode-50``, with transformers' ``device_map``: experts on the CPU.
- ``lora-4k``, ``-16k``, ``-64k``, ``qlora-…``: steps with frozen experts in 4 GiB, over resident ones.
- ``whole``: QLoRA of all 48 layers on 4,096 tokens, and its peak.

Bound of a row: the larger of its time with everything on the card and of its copied bytes over the
measured bus; ``share`` is the bound over the time. All rows but ``whole`` have ``--layers`` of the 48
layers: layers do the same work one after another, so a token's time is that of head and embedding
and a multiple of a layer's, from which ``tokens/s of 48 layers`` and the share of decoding are
computed. Budgets are scaled likewise. Rows are printed only with what shows that they computed the
same: greedy tokens and logits of decoding, losses, gradient norms and weights of training.

Not run here: llama.cpp's ``--n-cpu-moe``, which needs a build with CUDA, and kt-kernel, which needs a
processor with AMX.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from cards_models import step_of
from forced_routes import ForcedRoutes
from recipes_on_card import GIB, forked, machine
from torch import Tensor

import chronicals
from chronicals.benchmark.shapes import SHAPES
from chronicals.config import ChronicalsConfig
from chronicals.generation import EngineSettings, Request
from chronicals.generation.engine import Engine
from chronicals.models import quantise_layers
from chronicals.objectives import build_objective
from chronicals.training.session import prepared

WHOLE_LAYERS = 48
TINY = {
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
}

FEW_TOKENS = 8
"""Tokens of a short answer."""

HEAD_CALLS = 20
"""Calls of the head one after another, which the host launches faster than a device takes them."""

SAME_STEPS = 3
"""Steps whose losses and gradient norms are compared."""

COPIES = 30
"""Copies whose median is the rate of the bus."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the rows.

    Attributes:
        layers: decoder layers of all rows but that of the whole model.
        whole: decoder layers of that.
        prompt: tokens of the prompt's row.
        tokens: decode steps that are timed.
        slots: slots of decoding and of the prompt by the number of layers: a quarter of the experts.
        width: tokens of a document of training.
        steps: training steps.
        warm: of these the first ones, which are not timed.
        experts: GiB of experts in training with ``whole`` layers, and in that of the whole model.
        tiny: the model is tiny.
    """

    layers: int
    whole: int = WHOLE_LAYERS
    prompt: int = 8192
    tokens: int = 256
    slots: int = 32
    width: int = 2048
    steps: int = 8
    warm: int = 3
    experts: tuple[float, float] = (4.0, 2.0)
    tiny: bool = False

    @property
    def model(self) -> dict[str, Any]:
        """Fields of the configuration, but for the number of layers."""
        sizes = SHAPES["qwen3-30b-a3b"].sizes
        return {**sizes, **TINY} if self.tiny else sizes

    def config(self, layers: int) -> Any:
        """Return the configuration of the model."""
        return transformers.Qwen3MoeConfig(**{**self.model, "num_hidden_layers": layers})

    def expert_memory(self, whole: float, layers: int) -> str:
        """Return the memory of experts, as recipes name it.

        Args:
            whole: its GiB with all layers.
            layers: decoder layers, whose share of it is taken.
        """
        return f"{1024 * whole * layers / self.whole}MiB"

    @property
    def record(self) -> int:
        """Bytes of an expert in bf16."""
        return 2 * 3 * self.model["hidden_size"] * self.model["moe_intermediate_size"]


TINY_SIZES = Sizes(
    layers=2,
    whole=3,
    prompt=96,
    tokens=6,
    slots=10,
    width=64,
    steps=3,
    warm=1,
    experts=(0.28125 / 1024, 0.09375 / 1024),
    tiny=True,
)


def where() -> str:
    """Return the device; asked for in the process of a row alone, since a card once asked for cannot
    be used by processes that are forked later.
    """
    return "cuda" if torch.cuda.is_available() else "cpu"


def wait() -> None:
    """Wait until the card has done what it was given."""
    if where() == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], Any]) -> float:
    """Return the seconds of a call, to the end of what it gives the card."""
    wait()
    began = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - began


def bus_rate(record: int) -> float:
    """Return bytes a second of copies of a record's size from pinned memory to the card."""
    own = torch.empty(64 * record, dtype=torch.uint8, pin_memory=where() == "cuda").fill_(1)
    there = torch.empty(64 * record, dtype=torch.uint8, device=where())

    def copy() -> None:
        for source, place in zip(own.split(record), there.split(record)):
            place.copy_(source, non_blocking=True)

    copy()
    return len(own) / statistics.median(seconds(copy) for _ in range(COPIES))


def built(sizes: Sizes, layers: int, quantised: bool = False) -> Any:
    """Return the model on the card, random weights of one seed."""
    torch.manual_seed(0)
    with torch.device(where()):
        model = transformers.AutoModelForCausalLM.from_config(
            sizes.config(layers), dtype=torch.bfloat16
        )
    model.generation_config.eos_token_id = None
    if quantised:
        quantise_layers(model)
    return model


def offloaded(model: Any, sizes: Sizes, **options: Any) -> Any:
    """Return the model with ``sizes.slots`` of its experts a layer in slots."""
    budget = sizes.slots * len(model.model.layers) * sizes.record
    model = chronicals.offload(model, vram=budget, **options)
    model.offload.engine.verify()  # else each record's first copy would wait for its checksum
    return model


@torch.no_grad()
def logits_of(model: Any, steps: int = 6) -> tuple[list[int], Tensor]:
    """Return greedy tokens behind a prompt of 32, and all logits on the host, routes unforced."""
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


def decode_step(model: Any, sizes: Sizes) -> dict[str, float]:
    """Return seconds, chosen and missing experts of a decode step of the engine.

    They are the difference between long and short answers, so that neither the prompt counts nor
    the first steps behind it, in which experts of the routes come back to their slots.
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
    return {name: (long[name] - short[name]) / sizes.tokens for name in short}


def chosen_by(model: Any) -> dict[str, int]:
    """Return chosen experts, missing ones and copied bytes of an offloaded model so far."""
    if not hasattr(model, "offload"):
        return {}
    report = model.offload.report()
    return {
        "chosen": report.hits + report.misses,
        "missing": report.misses,
        "bytes": report.bytes,
    }


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


def free(*models: Any) -> None:
    """Close engines of models and let their memory go."""
    for model in models:
        if hasattr(model, "offload"):
            model.offload.close()
    gc.collect()
    if where() == "cuda":
        torch.cuda.empty_cache()


def resident_decoding(sizes: Sizes, missing: float) -> dict[str, Any]:
    """Return tokens, logits and times of the model with all experts on the card."""
    model = built(sizes, sizes.layers).eval()
    chronicals.patch_model(model)
    found = {"logits": logits_of(model), "head": head_seconds(model)}
    ForcedRoutes(model, missing, where())
    found |= decode_step(model, sizes)
    free()
    return found


def decoded(missing: float, sizes: Sizes, mode: str = "exact") -> dict[str, Any]:
    """Return the row of decoding with a share of missing experts."""
    bus = bus_rate(sizes.record)
    resident = resident_decoding(sizes, missing)
    free()  # the model is in cycles
    arms: dict[str, Any] = {}
    for arm in dict.fromkeys(["exact", mode]):
        options = {} if arm == "exact" else {"mode": arm}
        model = offloaded(built(sizes, sizes.layers).eval(), sizes, **options)
        chronicals.patch_model(model)
        same = compared(resident["logits"], logits_of(model))
        ForcedRoutes(model, missing, where())
        step = decode_step(model, sizes)
        report = model.offload.report()
        arms[arm] = {
            **step,
            **same,
            "slot bytes": report.slot_bytes,
            "tokens/s of 48 layers": of_whole(step["seconds"], resident["head"], sizes.layers),
        }
        free(model)
        del model
    copies = arms["exact"]["missing"] * sizes.record / bus
    head = resident["head"]
    resident_rate = of_whole(resident["seconds"], head, sizes.layers)
    bound = max(1 / resident_rate, copies * WHOLE_LAYERS / sizes.layers)
    found = {
        "bus": bus,
        "head": head,
        "resident": resident["seconds"],
        "resident tokens/s of 48 layers": resident_rate,
        "copies": copies,
        "arms": arms,
        "share": bound * arms["exact"]["tokens/s of 48 layers"],
    }
    if mode != "exact":
        found["gain"] = arms["exact"]["seconds"] / arms[mode]["seconds"]
    return found


@torch.no_grad()
def prompted(sizes: Sizes) -> dict[str, Any]:
    """Return the row of a pass over a prompt, with the routes of the router."""
    bus = bus_rate(sizes.record)
    generator = torch.Generator().manual_seed(3)
    vocabulary = sizes.model["vocab_size"]
    ids = torch.randint(0, vocabulary, (1, sizes.prompt), generator=generator).to(where())
    times, lasts = {}, {}
    copied = 0
    for arm in ("resident", "offloaded"):
        model = built(sizes, sizes.layers).eval()
        if arm == "offloaded":
            model = offloaded(model, sizes)
        chronicals.patch_model(model)

        def run(model: Any = model) -> Tensor:
            return model(ids, use_cache=False, logits_to_keep=1).logits

        lasts[arm] = run().float().cpu()
        times[arm] = statistics.median(seconds(run) for _ in range(5))
        if arm == "offloaded":
            before = chosen_by(model)["bytes"]
            run()
            copied = chosen_by(model)["bytes"] - before
        free(model)
        del model, run
    return {
        "bus": bus,
        **times,
        "bytes": copied,
        "copies": copied / bus,
        "equal bits": torch.equal(*lasts.values()),
        "share": max(times["resident"], copied / bus) / times["offloaded"],
    }


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
    ForcedRoutes(model, missing, where())
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


def trained(packs: int, quantised: bool, sizes: Sizes) -> dict[str, Any]:
    """Return the row of training steps of so many documents, frozen experts streamed.

    Attention's backward pass sums in any order unless it is told otherwise, so whether both arms give
    the same bits is seen over steps of their own, with deterministic algorithms and without graphs,
    which streamed experts do not have; beside them are steps of the resident arm as graphs.
    """
    bus = bus_rate(sizes.record)
    memory = {"resident": None, "offloaded": sizes.expert_memory(sizes.experts[0], sizes.layers)}
    arms = {
        arm: steps_of(packs, quantised, sizes, sizes.layers, experts)
        for arm, experts in memory.items()
    }
    few = replace(sizes, steps=SAME_STEPS, warm=1)
    eager = {"use_cuda_graphs": False}
    with deterministic():
        compared = {
            arm: steps_of(packs, quantised, few, sizes.layers, experts, eager)
            for arm, experts in memory.items()
        }
        compared["resident as graphs"] = steps_of(packs, quantised, few, sizes.layers, None)
    ours = arms["offloaded"]
    copies = ours["bytes"] / bus
    return {
        "bus": bus,
        "copies": copies,
        "arms": arms,
        "compared": {
            arm: {name: found[name] for name in ("losses", "norms", "weights")}
            for arm, found in compared.items()
        },
        "tokens": packs * sizes.width,
        "equal": all(
            compared["resident"][name] == compared["offloaded"][name]
            for name in ("norms", "weights")
        ),
        "share": max(arms["resident"]["seconds"], copies) / ours["seconds"],
        "of resident": arms["resident"]["seconds"] / ours["seconds"],
    }


@contextmanager
def deterministic() -> Iterator[None]:
    """Context manager in which attention's backward pass sums in one order."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it torch refuses cuBLAS's products
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def of_whole_model(sizes: Sizes) -> dict[str, Any]:
    """Return the row of QLoRA of all layers, and its peak."""
    packs = max(1, 4096 // sizes.width) if not sizes.tiny else 1
    bus = bus_rate(sizes.record)
    memory = sizes.expert_memory(sizes.experts[1], sizes.whole)
    lean = {"memory": ["recompute_layers", "offload_experts"], "logits_chunk_size": 512}
    ours = steps_of(packs, True, sizes, sizes.whole, memory, lean)
    return {
        "bus": bus,
        "copies": ours["bytes"] / bus,
        "arms": {"offloaded": ours},
        "tokens": packs * sizes.width,
        "peak GiB": ours["peak"] / GIB,
    }


def steps_of(
    packs: int,
    quantised: bool,
    sizes: Sizes,
    layers: int,
    experts: str | None,
    fields: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return losses, gradient norms, seconds and peak of training steps.

    Args:
        packs: documents of the one micro-batch of a step.
        quantised: the base is in NF4.
        sizes: sizes.
        layers: decoder layers.
        experts: memory of the experts' slots; None if all are on the card.
        fields: further fields of the configuration.
    """
    model = built(sizes, layers, quantised)
    model.config.use_cache = False
    streamed = dict(fields or {})
    if experts is not None:
        model = chronicals.offload(model, vram=experts)
        streamed = {"memory": ["offload_experts"], "expert_memory": experts, **streamed}
    if where() == "cpu":
        chronicals.patch_model(model)  # sessions do that on a card alone
    config = ChronicalsConfig(
        output_dir=tempfile.mkdtemp(),
        batch_size=packs,
        gradient_accumulation_steps=1,
        max_seq_length=sizes.width,
        use_lora=True,
        lora_rank=16,
        lora_dropout=0.0,
        mixed_precision="bf16",
        **streamed,
    )
    losses, norms, times = [], [], []
    copied = [0]
    with prepared(model, config, build_objective(config)) as session, session.stepping():
        session.model.train()
        free()
        for number in range(sizes.steps):
            step = step_of(number, 0, 1, 1, packs, sizes.width, sizes.model["vocab_size"])
            if number == sizes.warm and where() == "cuda":
                torch.cuda.reset_peak_memory_stats()
            scalars: dict[str, Any] = {}
            times.append(seconds(partial(train, session, step, scalars)))
            losses.append(float(scalars["loss"]))
            norms.append(float(scalars["grad_norm"]))
            if experts is not None:
                copied.append(chosen_by(model)["bytes"])
        peak = torch.cuda.max_memory_allocated() if where() == "cuda" else 0
        weights = [checksum(p) for p in model.parameters() if p.requires_grad]
    free(model)
    return {
        "losses": losses,
        "norms": norms,
        "weights": weights,
        "seconds": statistics.median(times[sizes.warm :]),
        "all seconds": times,
        "bytes": (copied[-1] - copied[sizes.warm]) / (sizes.steps - sizes.warm)
        if experts is not None
        else 0,
        "peak": peak,
    }


def checksum(x: Tensor) -> int:
    """Return the sum of the bits of a tensor, in words of its elements' size."""
    words = {2: torch.int16, 4: torch.int32}[x.element_size()]
    return int(x.detach().contiguous().view(words).long().sum())


def train(session: Any, step: Any, scalars: dict[str, Any]) -> None:
    """Take a step, and write what it returns to ``scalars``."""
    scalars.update(session.train_once(step))


def rows() -> dict[str, Callable[[Sizes], dict[str, Any]]]:
    """Return the function of each row by its name."""
    found: dict[str, Callable[[Sizes], dict[str, Any]]] = {
        f"decode-{round(100 * missing)}": partial(decoded, missing) for missing in (0.1, 0.3, 0.5)
    }
    found["prompt"] = prompted
    found["cpu-50"] = partial(decoded, 0.5, mode="numerical")
    found["map-50"] = partial(mapped, 0.5)
    for name, quantised in (("lora", False), ("qlora", True)):
        for thousands in (4, 16, 64):
            found[f"{name}-{thousands}k"] = partial(trained, thousands // 2, quantised)
    found["whole"] = of_whole_model
    return found


BARS = {
    **{f"decode-{missing}": ("share", 0.80) for missing in (10, 30, 50)},
    "prompt": ("share", 0.85),
    "cpu-50": ("gain", 1.5),
    **{f"{name}-{size}k": ("share", 0.80) for name in ("lora", "qlora") for size in (4, 16, 64)},
}
"""What a row must reach."""


def line_of(name: str, row: dict[str, Any]) -> str:
    """Return a row for the terminal, with what shows that both arms computed the same."""
    if "error" in row and not isinstance(row["error"], float):
        return f"{name}: {str(row['error'])[:300]}"
    parts = []
    if name in BARS:
        field, bar = BARS[name]
        parts.append(f"{field} {row[field]:.2f} (bar {bar})")
    arms = row.get("arms", {})
    for arm, found in arms.items():
        if "losses" in found:
            parts.append(
                f"{arm} {row['tokens'] / found['seconds']:,.0f} tokens/s, loss "
                f"{found['losses'][-1]:.6f}, norm {found['norms'][-1]:.6f}"
            )
        else:
            parts.append(
                f"{arm} {found['tokens/s of 48 layers']:.1f} tokens/s of 48 layers, "
                f"{found['missing'] / found['chosen']:.1%} missing, {same_words(found)}"
            )
    if "equal" in row:
        parts.append("norms and weights " + ("equal" if row["equal"] else "DIFFER"))
    if "peak GiB" in row:
        parts.append(f"peak {row['peak GiB']:.2f} GiB (bar 7)")
    if not arms:
        parts.append(f"{row.get('offloaded', row.get('seconds')):.4f} s, {same_words(row)}")
    return f"{name}: " + "; ".join(parts)


def same_words(found: dict[str, Any]) -> str:
    """Return how far an arm's logits are from those with all experts on the card."""
    if found["equal bits"]:
        return "logits bit-equal"
    tokens = "" if found.get("equal tokens", True) else ", other tokens"
    return f"logits off by {found.get('error', float('nan')):.1e}{tokens}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", nargs="*", choices=[*rows(), []], default=[], metavar="NAME")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--each", type=float, default=200, help="seconds of a row, at most")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    sizes = TINY_SIZES if given.tiny else Sizes(given.layers)
    results: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    results["machine"] = forked(machine, 60)
    results["layers"] = sizes.layers
    chosen = {name: run for name, run in rows().items() if not given.rows or name in given.rows}
    for name, run in chosen.items():
        if name in results and not given.rows:
            continue
        results[name] = forked(partial(run, sizes), given.each)
        given.out.write_text(json.dumps(results, indent=1))
        print(line_of(name, results[name]), flush=True)


if __name__ == "__main__":
    main()
