"""Are mixtures exact: whatever computes them, with a cache and without, before and after saving?

    python benchmarks/moe_exactness.py OUTPUT.json [--seeds 5]

The native mixture, of random weights, a window of 8 tokens, 2 of 8 experts, texts of 33. For each
seed: the largest difference of logits between implementations of experts and attention,
``patch_model`` among them, and its class (fp32 absolute, bf16 relative to the norm); greedy texts;
what a token changes before it; step by step beside one shot, beyond the window; left-padded beside
alone; saved and loaded. Then transformers' families, 2 of 4 experts: logits and greedy texts. In
bf16 a rounding may choose another expert, so there each implementation is given the same experts,
drawn for each token, and the shares of the class's routers. A model that is patched whole rounds in
other places than its class; it is held against fp32, beside its class. Bars: fp32 1e-5, bf16 2e-2,
of the two errors 1.5, everything else exactly 0 or equal.
"""

import argparse
import copy
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import moe_small as small
import torch
from transformers import AutoModelForCausalLM

from chronicals import patch_model
from chronicals.moe import ChronicalsMoeConfig, ChronicalsMoeForCausalLM
from chronicals.patching import patch_parts
from chronicals.patching.experts import FUSED_EXPERTS

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import families

WINDOW = 8
LENGTH = 33
PAD = 5
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": WINDOW,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_experts": 8,
    "moe_intermediate_size": 24,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
GREEDY = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def random_model(**changes: Any) -> Any:
    model = ChronicalsMoeForCausalLM(ChronicalsMoeConfig(**{**SIZES, **changes})).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(
            parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1 if parameter.ndim == 1 else 0.15
        )
    return model


def logits(
    model: Any, ids: torch.Tensor, attention: str, experts: str, **given: Any
) -> torch.Tensor:
    model.set_attn_implementation(attention)
    model.set_experts_implementation(experts)
    return model(ids, **given).logits.float()


@torch.no_grad()
def measured(seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    model = random_model()
    ids = torch.randint(2, 61, (2, LENGTH))
    found = compared(model, ids, "sdpa")
    found["change before a token"] = _leak(model, ids)
    model.set_experts_implementation("grouped_mm")
    found["steps beside one shot"] = float((_stepwise(model, ids) - model(ids).logits).abs().max())
    mask = (torch.arange(LENGTH) >= torch.tensor([PAD, 0])[:, None]).long()
    padded = model(ids.masked_fill(mask == 0, 0), attention_mask=mask).logits[0, PAD:]
    found["left-padded beside alone"] = float((padded - model(ids[:1, PAD:]).logits[0]).abs().max())
    for dtype in (torch.float32, torch.bfloat16):
        found[f"saved and loaded {str(dtype).removeprefix('torch.')}"] = _drift(
            model.to(dtype), ids
        )
    return found


@torch.no_grad()
def measured_families(seed: int) -> dict[str, dict[str, float]]:
    found = {}
    for name in families.ROUTED:
        torch.manual_seed(seed)
        model = families.routed(name).eval()
        found[name] = compared(model, torch.randint(2, 61, (2, LENGTH)), "eager")
    return found


EXPERTS = ("grouped_mm", "batched_mm")
PATCHED = "patched"
PATCHED_EXPERTS = "patched experts"
ERROR = "bf16 patched: its error over its class's"


def compared(model: Any, ids: torch.Tensor, attention: str) -> dict[str, float]:
    """Each implementation and its class, in fp32 and bf16."""
    exact = logits(model, ids, "eager", "eager")
    ways = {experts: model for experts in EXPERTS} | {PATCHED: patched(model)}
    found = {
        f"fp32 {way}": float((_by(way, of, ids, attention) - exact).abs().max())
        for way, of in ways.items()
    }
    model.set_experts_implementation("eager")
    own = model.generate(ids, **GREEDY)
    found["greedy tokens that differ"] = float(
        sum((_text(way, of, ids) != own).sum() for way, of in ways.items())
    )
    low = copy.deepcopy(model).bfloat16()
    chosen = drawn_experts(low, ids)
    with routed(low, chosen):
        plain = logits(low, ids, "eager", "eager")
    for way, of in (
        {experts: low for experts in EXPERTS} | {PATCHED_EXPERTS: patched(low, all_parts=False)}
    ).items():
        with routed(of, chosen):
            found[f"bf16 {way}"] = _apart(_by(way, of, ids, "eager"), plain)
    wide = copy.deepcopy(low).float()
    all_of_it = patched(low)
    with routed(wide, chosen):
        exact = logits(wide, ids, "eager", "eager")
    with routed(all_of_it, chosen):
        found[ERROR] = _apart(_by(PATCHED, all_of_it, ids, "eager"), exact) / _apart(plain, exact)
    return found


def _apart(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def layers_of(model: Any) -> list[Any]:
    """Modules that hold the experts of a layer."""
    return [
        module
        for module in model.modules()
        if getattr(module, "gate_up_proj", torch.zeros(0)).ndim == 3
    ]


def patched(model: Any, all_parts: bool = True) -> Any:
    """A copy; norms and all other parts are those of its class where not ``all_parts``."""
    model = copy.deepcopy(model)
    model.set_experts_implementation("eager")
    assert (patch_model if all_parts else patch_parts)(model).counts()[FUSED_EXPERTS] == len(
        layers_of(model)
    )
    if not all_parts:
        experts = layers_of(model)
        for module in model.modules():
            if module not in experts:
                vars(module).pop("forward", None)
    return model


def _by(way: str, model: Any, ids: torch.Tensor, attention: str) -> torch.Tensor:
    return model(ids).logits.float() if way not in EXPERTS else logits(model, ids, attention, way)


def _text(way: str, model: Any, ids: torch.Tensor) -> torch.Tensor:
    if way in EXPERTS:
        model.set_experts_implementation(way)
    return model.generate(ids, **GREEDY)


def drawn_experts(model: Any, ids: torch.Tensor) -> list[tuple]:
    """For each layer of experts, experts that are drawn, other ones for each token, and the
    shares that its router gives.
    """
    found: list[tuple] = []

    def note(module: Any, inputs: tuple) -> None:
        _, experts, shares = inputs
        found.append(
            (torch.rand(len(experts), len(module.down_proj)).topk(experts.shape[1]).indices, shares)
        )

    hooks = [layer.register_forward_pre_hook(note) for layer in layers_of(model)]
    model(ids)
    for hook in hooks:
        hook.remove()
    return found


@contextmanager
def routed(model: Any, chosen: list[tuple]) -> Iterator[None]:
    """Within: layers of experts are given these experts and shares, one after the other, for one
    forward pass.
    """
    given = iter(chosen)
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs: (inputs[0], *next(given)))
        for layer in layers_of(model)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _leak(model: Any, ids: torch.Tensor) -> float:
    """What changing token j changes before it, at most; experts are computed a token at a time."""
    worst = 0.0
    for attention in ("eager", "sdpa"):
        first = logits(model, ids, attention, "batched_mm")
        for j in range(1, LENGTH):
            other = ids.clone()
            other[:, j] = 2 + (other[:, j] - 1) % 59
            worst = max(
                worst,
                float((logits(model, other, attention, "batched_mm") - first)[:, :j].abs().max()),
            )
    return worst


def _stepwise(model: Any, ids: torch.Tensor) -> torch.Tensor:
    cache = None
    found = []
    for part in ids.split(1, 1):
        out = model(part, cache=cache, use_cache=True)
        cache = out.cache
        found.append(out.logits)
    return torch.cat(found, 1)


def _drift(model: Any, ids: torch.Tensor) -> float:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        return float((loaded(ids).logits - model(ids).logits).abs().max())


def bar(name: str) -> float:
    exactly = ("greedy", "change", "saved")
    name = name.removeprefix(OF_FAMILIES)
    if name == ERROR:
        return 1.5
    return 0.0 if name.startswith(exactly) else 2e-2 if name.startswith("bf16") else 1e-5


OF_FAMILIES = "families, "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    began = time.perf_counter()
    runs = [measured(seed) for seed in range(given.seeds)]
    of_families = [measured_families(seed) for seed in range(given.seeds)]
    found = {name: max(run[name] for run in runs) for name in runs[0]}
    each = [row for run in of_families for row in run.values()]
    found |= {OF_FAMILIES + name: max(row[name] for row in each) for name in each[0]}
    bars = {name: bar(name) for name in found}
    result = {
        "largest": found,
        "bars": bars,
        "runs": runs,
        "families": of_families,
        "about": small.about(began, sizes=SIZES),
    }
    small.write(given.output, result)
    small.show(
        ["largest over seeds", "bar", "found", "passes"],
        [[n, bar(n), v, v <= bar(n)] for n, v in found.items()],
    )


if __name__ == "__main__":
    main()
