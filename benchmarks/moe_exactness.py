"""Is the native mixture exact: whatever computes it, with a cache and without, before and after saving?

    python benchmarks/moe_exactness.py OUTPUT.json [--seeds 5]

Models of random weights, a window of 8 tokens, texts of 33. For each seed: the largest difference of logits between
implementations of experts and attention (fp32 absolute, bf16 relative to the norm); greedy texts; what a token changes before
it; step by step beside one shot, beyond the window; left-padded beside alone; saved and loaded. Bars: fp32 1e-5, bf16 2e-2,
everything else exactly 0 or equal.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import moe_small as small
import torch
from transformers import AutoModelForCausalLM

from chronicals.moe import ChronicalsMoeConfig, ChronicalsMoeForCausalLM

WINDOW, LENGTH, PAD = 8, 33, 5
SIZES = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "sliding_window": WINDOW, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_experts": 8, "moe_intermediate_size": 24, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
GREEDY = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None}


def random_model(**changes: Any) -> Any:
    model = ChronicalsMoeForCausalLM(ChronicalsMoeConfig(**{**SIZES, **changes})).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1 if parameter.ndim == 1 else 0.15)
    return model


def logits(model: Any, ids: torch.Tensor, attention: str, experts: str, **given: Any) -> torch.Tensor:
    model.set_attn_implementation(attention)
    model.set_experts_implementation(experts)
    return model(ids, **given).logits.float()


@torch.no_grad()
def measured(seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    model = random_model()
    ids = torch.randint(2, 61, (2, LENGTH))
    exact = logits(model, ids, "eager", "eager")
    found = {f"fp32 {experts}": float((logits(model, ids, "sdpa", experts) - exact).abs().max()) for experts in EXPERTS}
    texts = {experts: _text(model, ids, experts) for experts in ("eager", *EXPERTS)}
    found["greedy tokens that differ"] = float(sum((texts[e] != texts["eager"]).sum() for e in EXPERTS))
    low = random_model(num_experts=2).bfloat16()  # all experts of a token, for a rounding may choose another one
    plain = logits(low, ids, "eager", "eager")
    for experts in EXPERTS:
        found[f"bf16 {experts}"] = float((logits(low, ids, "eager", experts) - plain).norm() / plain.norm())
    found["change before a token"] = _leak(model, ids)
    model.set_experts_implementation("grouped_mm")
    found["steps beside one shot"] = float((_stepwise(model, ids) - model(ids).logits).abs().max())
    mask = (torch.arange(LENGTH) >= torch.tensor([PAD, 0])[:, None]).long()
    padded = model(ids.masked_fill(mask == 0, 0), attention_mask=mask).logits[0, PAD:]
    found["left-padded beside alone"] = float((padded - model(ids[:1, PAD:]).logits[0]).abs().max())
    for dtype in (torch.float32, torch.bfloat16):
        found[f"saved and loaded {str(dtype).removeprefix('torch.')}"] = _drift(model.to(dtype), ids)
    return found


EXPERTS = ("grouped_mm", "batched_mm")


def _text(model: Any, ids: torch.Tensor, experts: str) -> torch.Tensor:
    model.set_experts_implementation(experts)
    return model.generate(ids, **GREEDY)


def _leak(model: Any, ids: torch.Tensor) -> float:
    """What changing token j changes before it, at most; experts are computed a token at a time."""
    worst = 0.0
    for attention in ("eager", "sdpa"):
        first = logits(model, ids, attention, "batched_mm")
        for j in range(1, LENGTH):
            other = ids.clone()
            other[:, j] = 2 + (other[:, j] - 1) % 59
            worst = max(worst, float((logits(model, other, attention, "batched_mm") - first)[:, :j].abs().max()))
    return worst


def _stepwise(model: Any, ids: torch.Tensor) -> torch.Tensor:
    cache, found = None, []
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
    return 0.0 if name.startswith(exactly) else 2e-2 if name.startswith("bf16") else 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    began = time.perf_counter()
    runs = [measured(seed) for seed in range(given.seeds)]
    found = {name: max(run[name] for run in runs) for name in runs[0]}
    bars = {name: bar(name) for name in found}
    result = {"largest": found, "bars": bars, "runs": runs, "about": small.about(began, sizes=SIZES)}
    small.write(given.output, result)
    small.show(["largest over seeds", "bar", "found", "passes"], [[n, bar(n), v, v <= bar(n)] for n, v in found.items()])


if __name__ == "__main__":
    main()
