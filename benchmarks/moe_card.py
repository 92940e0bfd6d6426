"""The native mixture on a card: built, checked, timed, once.

    python benchmarks/moe_card.py OUTPUT.json [--layers 12] [--hidden 1024] [--steps 30]

A model of random weights (bf16, 64 experts of which 8 for a token, window 1024). Checked first: its
logits beside the same weights in fp32; experts and attention of every implementation beside eager;
a step with losses of routers, replayed as CUDA graphs, beside the same step without graphs. Then
timed, in tokens a second of whole training steps of 16,384 tokens (medians): without losses of
routers, with metrics alone, with balance and z, with the heads, with the anchor; and decoding of
one text: absorbed products beside expanded ones, at several lengths of the cache. One table last.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import moe_small as small
import torch

from chronicals import ChronicalsConfig, ChronicalsTrainer
from chronicals.moe import ChronicalsMoeConfig, ChronicalsMoeForCausalLM
from chronicals.moe.attention import LatentAttention

ARMS: dict[str, dict[str, Any]] = {
    "without losses of routers": {},
    "metrics alone": {"metrics": True},
    "balance, z": {"balance": 0.01, "z": 0.001},
    "balance, z, temporal, locality": {
        "balance": 0.01,
        "z": 0.001,
        "temporal": 0.01,
        "locality": 0.01,
    },
    "balance and heads": {"balance": 0.01, "layer_ahead": 0.3, "token_ahead": 0.1},
    "balance and anchor": {"balance": 0.01, "anchor": 0.1},
}
WARM = 5


def build(tokenizer: Any, layers: int, hidden: int, device: str) -> Any:
    torch.manual_seed(0)
    config = ChronicalsMoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        head_dim=64,
        sliding_window=1024,
        kv_lora_rank=256,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=hidden // 2,
        max_position_embeddings=65536,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return ChronicalsMoeForCausalLM(config).to(device, torch.bfloat16)


@torch.no_grad()
def checked(model: Any) -> dict[str, float]:
    """Relative errors of logits of a text beyond the window."""
    ids = torch.randint(3, model.config.vocab_size, (1, 1500), device=model.device)
    wide = ChronicalsMoeForCausalLM(model.config).to(model.device).eval()
    wide.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    model.eval()
    wide.set_attn_implementation("eager")
    wide.set_experts_implementation("eager")
    exact = wide(ids).logits
    found = {}
    for attention in ("eager", "sdpa"):
        for experts in ("eager", "grouped_mm"):
            model.set_attn_implementation(attention)
            model.set_experts_implementation(experts)
            out = model(ids).logits.float()
            found[f"bf16 beside fp32, {attention}, {experts}"] = float(
                (out - exact).norm() / exact.norm()
            )
    wide.set_attn_implementation("sdpa")
    wide.set_experts_implementation("grouped_mm")
    cache = wide(ids[:, :-8], use_cache=True).past_key_values
    steps = []
    for token in ids[:, -8:].split(1, 1):
        out = wide(token, past_key_values=cache, use_cache=True)
        steps.append(out.logits)
    found["fp32 steps beside one shot"] = float(
        (torch.cat(steps, 1) - exact[:, -8:]).norm() / exact[:, -8:].norm()
    )
    return found


def train(
    model: Any, tokenizer: Any, folder: Path, router: dict, steps: int, **changes: Any
) -> list[dict]:
    """Metrics of a run's steps."""
    rows = [{"text": text["text"]} for text in small.as_texts(small.rows()[0])]
    fields: dict[str, Any] = {
        "objective": "pretraining",
        "learning_rate": 1e-4,
        "batch_size": 8,
        "gradient_accumulation_steps": 1,
        "max_seq_length": 2048,
        "max_steps": steps,
        "save_steps": None,
        "report_samples": 0,
        "trackers": [],
        "keep": "last",
        "output_dir": folder / "run",
        "cache_dir": folder / "tokens",
    }
    if router:
        fields["router"] = router
    ChronicalsTrainer(model, tokenizer, ChronicalsConfig(**{**fields, **changes})).train(rows)
    lines = (
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    )
    return [line for line in lines if "loss" in line]


def wait(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def decoding(model: Any, length: int, absorbed: bool, tokens: int = 32) -> float:
    """Milliseconds of a token behind so many, the median."""
    model.eval()
    usual = LatentAttention._absorbs
    if not absorbed:
        LatentAttention._absorbs = lambda *_: False  # type: ignore[method-assign]
    try:
        ids = torch.randint(3, model.config.vocab_size, (1, length), device=model.device)
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
        times = []
        for _ in range(tokens):
            wait(model)
            began = time.perf_counter()
            model(ids[:, :1], past_key_values=cache, use_cache=True)
            wait(model)
            times.append(1000 * (time.perf_counter() - began))
        return statistics.median(times[4:])
    finally:
        LatentAttention._absorbs = usual  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--packs", type=int, default=8, help="of 2048 tokens in a step")
    parser.add_argument(
        "--cached", type=int, nargs="+", default=[1024, 8192, 32768], help="lengths of the cache"
    )
    parser.add_argument(
        "--device", default="cuda", help="cpu tries the script, and times nothing worth keeping"
    )
    given = parser.parse_args()
    began = time.perf_counter()
    tokenizer = small.tokenizer_of(small.rows()[0])
    result: dict[str, Any] = {"training": {}, "decoding": {}, "errors": {}}
    model = build(tokenizer, given.layers, given.hidden, given.device)
    result["parameters"] = model.num_parameters()
    result["checks"] = checked(model)
    on_card = given.device == "cuda"
    result["card"] = torch.cuda.get_device_name(0) if on_card else given.device
    for length in given.cached:
        for absorbed in (True, False):
            result["decoding"][f"{length}, {'absorbed' if absorbed else 'expanded'}"] = decoding(
                model, length, absorbed
            )
        small.write(given.output, result)
    del model
    with tempfile.TemporaryDirectory() as name:
        for arm, router in ARMS.items():
            try:
                fresh = None
                gc.collect()  # a model that was trained is in cycles
                fresh = build(tokenizer, given.layers, given.hidden, given.device)
                if on_card:
                    torch.cuda.reset_peak_memory_stats()
                folder = Path(name) / arm.replace(" ", "-")
                lines = train(fresh, tokenizer, folder, router, given.steps, batch_size=given.packs)
                rate = statistics.median(line["tokens_per_second"] for line in lines[WARM:])
                peak = torch.cuda.max_memory_allocated() / 2**30 if on_card else 0.0
                result["training"][arm] = {
                    "tokens_per_second": rate,
                    "peak_gib": peak,
                    "last": lines[-1],
                }
            except Exception as error:  # the other arms are worth having
                result["errors"][arm] = f"{type(error).__name__}: {error}"
            small.write(given.output, result)
        both = list[list[float]]()
        for graphs in (True, False):
            fresh = None
            gc.collect()
            fresh = build(tokenizer, 2, given.hidden, given.device)
            changes: dict[str, Any] = {"use_torch_compile": False, "batch_size": given.packs}
            if on_card:
                changes["use_cuda_graphs"] = graphs
            folder = Path(name) / f"graphs-{graphs}"
            try:
                lines = train(fresh, tokenizer, folder, ARMS["balance and anchor"], 8, **changes)
                both.append([line["loss"] for line in lines])
            except Exception as error:
                result["errors"][f"use_cuda_graphs={graphs}"] = f"{type(error).__name__}: {error}"
        result["losses_with_graphs_and_without"] = both
    result["about"] = small.about(
        began, arguments={name: str(value) for name, value in vars(given).items()}
    )
    small.write(given.output, result)
    lines = [[f"error: {name}", value] for name, value in result["checks"].items()]
    if len(both) == 2:
        lines += [
            [
                "loss, CUDA graphs beside none, last step",
                abs(both[0][-1] - both[1][-1]) / both[1][-1],
            ]
        ]
    lines += [[f"ms a token, cache of {name}", value] for name, value in result["decoding"].items()]
    lines += [
        [f"tokens/s, {arm}", found["tokens_per_second"]]
        for arm, found in result["training"].items()
    ]
    lines += [[f"failed: {arm}", error[:90]] for arm, error in result["errors"].items()]
    small.show([f"{result['parameters']:,} parameters, {result['card']}", "found"], lines)


if __name__ == "__main__":
    main()
