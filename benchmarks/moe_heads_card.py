"""Heads from a trace on a card: is what is recorded and learned there right, and how long does it
take?

    python benchmarks/moe_heads_card.py OUTPUT.json [--tokens 60000] [--passes 4] [--device cuda]
    [--small]

Two mixtures of random weights in bf16, a Qwen3-MoE and a DeepSeek-V3 with groups and corrections,
run over the documentation of Python's standard library; heads learn from the trace, which is read
from disk part by part.

Checked: the rule by which experts are chosen is found; heads lie on the device; the first loss is
that on the CPU from the same trace, to 2e-2; recall of the next layer is above gate reuse by 5
points; weights are the same; and beside the model and the heads with their optimizer the device
holds no more than two parts of the trace and 2 GiB of activations.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import moe_small as small
import torch

from chronicals.moe.lookahead.choosing import Choice
from chronicals.moe.lookahead.distil_heads import HeadDistillation, head_loss
from chronicals.moe.lookahead.predictor import ExpertPredictor, HeadSizes
from chronicals.moe.lookahead.trace import Trace, checksum, record_trace
from chronicals.moe.lookahead.train_predictor import train_from_trace
from chronicals.moe.routers import mixture_layers

SIZES = HeadSizes(furthest=2, tokens=1, rank=128)
SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "moe_intermediate_size": 32}
LARGE = {"hidden_size": 2048, "num_hidden_layers": 8, "moe_intermediate_size": 768}
EVERY = {
    "num_attention_heads": 16,
    "intermediate_size": 256,
    "num_experts_per_tok": 8,
    "vocab_size": small.VOCABULARY,
}
GROUPED = {
    "n_routed_experts": 64,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 16,
}
LATENT = {
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
EXPECTED = {"qwen3_moe": Choice(), "deepseek_v3": Choice("sigmoid", True, 8, 4, 2)}


@torch.no_grad()
def model(family: str, sizes: dict, device: str):
    """Random weights; routers whose logits differ, and corrections."""
    import transformers as hf

    torch.manual_seed(0)
    if family == "qwen3_moe":
        own = {"num_experts": 64, "num_key_value_heads": 4, "head_dim": 32, "norm_topk_prob": True}
        made = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**EVERY, **sizes, **own))
    else:
        made = hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**EVERY, **sizes, **GROUPED, **LATENT))
    for layer in mixture_layers(made):
        layer.gate.normal_(std=2.0 * layer.gate.shape[1] ** -0.5)
        if layer.correction is not None:
            layer.correction.normal_(std=0.2)
    return made.to(device, torch.bfloat16).eval()


def heads(family: str, sizes: dict, device: str, tokens: int, passes: int, folder: Path) -> dict:
    rows, held = small.rows()
    tokenizer = small.tokenizer_of(rows)
    mixture = model(family, sizes, device)
    config = small.configuration(folder, objective="pretraining")
    before = checksum(mixture)
    began = time.perf_counter()
    for name, source, most in (("trace", rows, tokens), ("held-out", held, tokens // 10)):
        record_trace(mixture, tokenizer, small.as_texts(source), config, folder / name, True, most)
    recorded = time.perf_counter() - began
    card = mixture.device.type == "cuda"
    trace = Trace(folder / "trace")
    how = HeadDistillation(learning_rate=5e-3, rows=512, temperature=0.5, passes=passes)
    held_before = torch.cuda.memory_allocated() if card else 0
    if card:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    found = train_from_trace(
        mixture, folder / "trace", folder / "held-out", SIZES, how, tokens, tokens
    )
    seconds = time.perf_counter() - began
    recalls = found.recalls
    held_most = (torch.cuda.max_memory_allocated() - held_before) / 2**30 if card else 0.0
    part = (
        max((folder / "trace" / file["name"]).stat().st_size for file in trace.info.files) / 2**30
    )
    weights = sum(p.numel() * 4 for p in found.predictor.parameters()) / 2**30

    losses = []
    for place in (mixture.device, torch.device("cpu")):
        torch.manual_seed(1)
        new = ExpertPredictor.beside(mixture.to(place), SIZES, Choice(**trace.info.choice))
        losses.append(
            float(
                head_loss(
                    new, trace.part(0).to(place).part(0, 256), replace(how, rows=256)
                ).detach()
            )
        )
    gain = recalls.mean(1) - recalls.mean(1, "gate_reuse")
    checks = {
        "rule": found.predictor.choice == EXPECTED[family],
        "device": found.predictor.gates.device.type == device,
        "first loss as on the CPU": abs(losses[0] - losses[1]) <= 2e-2 * abs(losses[1]),
        "one layer ahead above gate reuse": gain >= 0.05,
        "weights": checksum(mixture) == before == found.unchanged,
        "memory": not card or held_most <= 5 * weights + 2 * part + 2.0,
    }
    return {
        "family": family,
        "tokens": found.tokens,
        "seconds_of_recording": recorded,
        "seconds_of_heads": seconds,
        "tokens_per_second": found.tokens / seconds,
        "GiB_beside_the_model": held_most,
        "GiB_of_a_part": part,
        "GiB_of_heads": weights,
        "losses": found.losses,
        "first_loss_card_and_cpu": losses,
        "recalls": dict(vars(recalls)),
        "d0": recalls.mean(0),
        "d1": recalls.mean(1),
        "d1_gate_reuse": recalls.mean(1, "gate_reuse"),
        "checks": checks,
        "passed": all(checks.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tokens", type=int, default=60_000)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--small", action="store_true", help="tiny widths, to try the script without a card"
    )
    given = parser.parse_args()
    began = time.perf_counter()
    sizes = SMALL if given.small else LARGE
    runs = []
    for family in EXPECTED:
        with tempfile.TemporaryDirectory() as name:
            runs.append(heads(family, sizes, given.device, given.tokens, given.passes, Path(name)))
    card = torch.cuda.get_device_name() if given.device == "cuda" else "none"
    small.write(
        given.output, {"runs": runs, "about": {**small.about(began, sizes=sizes), "card": card}}
    )
    names = (
        "d0",
        "d1",
        "d1_gate_reuse",
        "seconds_of_recording",
        "seconds_of_heads",
        "tokens_per_second",
        "GiB_beside_the_model",
    )
    lines = [[run["family"], *(float(run[name]) for name in names)] for run in runs]
    small.show(["family", *names], lines)
    small.show(
        ["check", *EXPECTED],
        [[name, *(str(run["checks"][name]) for run in runs)] for name in runs[0]["checks"]],
    )
    if not all(run["passed"] for run in runs):
        raise SystemExit("a check failed")


if __name__ == "__main__":
    main()
