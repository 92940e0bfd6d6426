"""A mixture in 4 bits on a card: read, checked, trained, once.

    python benchmarks/experts_in_4_bits.py OUTPUT.json [--shape qwen3-30b-a3b] [--layers 4] [--steps
    20] [--quick]

A built-in shape with fewer layers and random bf16 weights is written to files and read with
``quantization="nf4"``: the seconds and the most memory of host and card meanwhile, beside what the
codes take. Checked: codes and scales are those of the same model quantised after it was read;
logits and gradients of adapters beside the plain model of the dequantised values; the same steps
with and without CUDA graphs. Then trained on 16,384 tokens a step (medians): adapters on attention
over 16 bits, over 4 with frozen experts, over 4 with adapters on experts, and all layers
recomputed. One table last.
"""

import argparse
import dataclasses
import gc
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from chronicals import ChronicalsConfig, ChronicalsTrainer
from chronicals.benchmark.shapes import SHAPES, build_model, random_documents
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.models import load_model, load_tokenizer, quantise_layers
from chronicals.quantization import Experts4bit, Linear4bit
from chronicals.training.run.callbacks import read_metrics

ON_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ON_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ARMS: dict[str, dict[str, Any]] = {
    "16 bits": {"use_lora": True},
    "4 bits": {"quantization": "nf4"},
    "4 bits, no graphs": {"quantization": "nf4", "use_cuda_graphs": False},
    "4 bits, layers recomputed": {"quantization": "nf4", "memory": ["recompute_layers"]},
    "4 bits, experts adapted": {"quantization": "nf4", "lora_target_parameters": ON_EXPERTS},
}
WARM = 5
GIB = 2**30


def write(shape: str, layers: int, folder: Path, device: str, quick: bool) -> None:
    own = SHAPES[shape]
    sizes = {**own.sizes, "num_hidden_layers": layers}
    if quick:
        sizes |= {
            "hidden_size": 128,
            "moe_intermediate_size": 64,
            "num_experts": 8,
            "vocab_size": 512,
            "head_dim": 32,
        }
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    SHAPES["written"] = dataclasses.replace(own, sizes=sizes)
    build_model("written", folder, device)


def most_of_host(anew: bool = False) -> float:
    """Bytes of this process in memory at most, of what is resident; with ``anew`` counted from
    here on. NaN where the system does not tell."""
    try:
        if anew:
            Path("/proc/self/clear_refs").write_text("5")
        line = next(
            line
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("VmHWM")
        )
    except (OSError, StopIteration):
        return math.nan
    return int(line.split()[1]) * 1024


def read(folder: Path, device: str) -> tuple[Any, dict[str, float]]:
    """The model in 4 bits on the card; seconds, and GiB at most."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = most_of_host(anew=True)
    began = time.perf_counter()
    model = load_model(folder, torch.bfloat16, quantization="nf4")
    seconds = time.perf_counter() - began
    host = (most_of_host() - before) / GIB
    card = torch.cuda.max_memory_allocated() / GIB if device == "cuda" else 0.0
    packed = sum(m.bytes for m in model.modules() if isinstance(m, Experts4bit))
    packed += sum(m.packed.bytes for m in model.modules() if isinstance(m, Linear4bit))
    largest = max(
        2 * torch.Size(s).numel()
        for m in model.modules()
        if isinstance(m, Experts4bit)
        for s in m.stacked.values()
    )
    found = {"seconds": seconds, "host GiB more": host, "card GiB": card, "codes GiB": packed / GIB}
    return model.to(device), {**found, "largest stack in 16 bits, GiB": largest / GIB}


def same_codes(model: Any, folder: Path, device: str) -> int:
    """Tensors that differ from those of a model that was quantised after it was read."""
    other = load_model(folder, torch.bfloat16).to(device)
    quantise_layers(other)
    ours = model.state_dict()
    theirs = other.state_dict()
    assert ours.keys() == theirs.keys()
    return sum(not torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def beside_dequantised(folder: Path, device: str) -> dict[str, float]:
    """Relative errors of logits and of gradients of adapters, patched, in bf16, beside the plain
    model in fp32.
    """
    from chronicals import patch_model

    def adapted(model: Any) -> Any:
        torch.manual_seed(1)
        shape = LoRAConfig(8, 16, 0.0, ON_ATTENTION, target_parameters=ON_EXPERTS)
        apply_lora(model.to(device), shape)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                torch.nn.init.normal_(parameter, std=0.02)
        return model

    plain = load_model(folder, torch.bfloat16, quantization="nf4").to(device)
    for path, module in list(plain.named_modules()):
        if isinstance(module, (Linear4bit, Experts4bit)):
            plain.set_submodule(path, module.plain())
    ids = torch.randint(3, 500, (1, 512), device=device)
    found = {}
    for name, model in (
        ("plain fp32", adapted(plain.float())),
        ("plain bf16", None),
        ("4 bits", None),
    ):
        if name == "plain bf16":
            model = plain.bfloat16()
        elif name == "4 bits":
            model = adapted(load_model(folder, torch.bfloat16, quantization="nf4"))
            patch_model(model)
        out = model(input_ids=ids, labels=ids, use_cache=False)
        trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(out.loss, list(trained.values()))
        found[name] = (
            out.loss.detach().float(),
            {key: g.float() for key, g in zip(trained, gradients)},
        )
    exact = found.pop("plain fp32")
    errors = {}
    for name, (loss, gradients) in found.items():
        errors[f"loss, {name}"] = float((loss - exact[0]).abs() / exact[0].abs())
        off = [
            float((g - exact[1][key]).norm() / exact[1][key].norm()) for key, g in gradients.items()
        ]
        errors[f"gradients, {name}, median"] = statistics.median(off)
    return errors


def train(
    folder: Path, place: Path, steps: int, width: int, fields: dict[str, Any], device: str
) -> dict[str, Any]:
    """Tokens a second, GiB at most, and losses."""
    quantization = fields.get("quantization")
    model = load_model(folder, torch.bfloat16, quantization=quantization).to(device)
    config = ChronicalsConfig(
        **{
            "learning_rate": 1e-4,
            "lora_rank": 16,
            "lora_dropout": 0.0,
            "lora_target_modules": ON_ATTENTION,
            "batch_size": 8,
            "gradient_accumulation_steps": 1,
            "max_seq_length": width,
            "max_steps": steps + WARM,
            "save_steps": None,
            "trackers": [],
            "report_samples": 0,
            "keep": "last",
            "objective": "pretraining",
            "output_dir": place / "run",
            "cache_dir": place.parent / "tokens",
            **fields,
        }
    )
    rows = [
        {"input_ids": ids}
        for ids in random_documents("fixed", (steps + WARM + 2) * 8 * width, width, 500)
    ]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ChronicalsTrainer(model, load_tokenizer(folder), config).train(rows)
    lines = [line for line in read_metrics(place / "run" / "metrics.jsonl") if "loss" in line]
    rates = [line["tokens_per_second"] for line in lines[WARM:]]
    peak = torch.cuda.max_memory_allocated() / GIB if device == "cuda" else 0.0
    return {
        "tokens/s": statistics.median(rates),
        "GiB": peak,
        "losses": [line["loss"] for line in lines],
        "rates": rates,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to try the script on a CPU"
    )
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width = 2048 if device == "cuda" else 64
    result: dict[str, Any] = {
        "shape": given.shape,
        "layers": given.layers,
        "torch": torch.__version__,
    }
    result["device"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "model"
        write(given.shape, given.layers, folder, device, given.quick)
        model, result["reading"] = read(folder, device)
        result["tensors that differ"] = same_codes(model, folder, device)
        del model
        given.output.write_text(json.dumps(result, indent=1))
        result["beside dequantised"] = beside_dequantised(folder, device)
        result["trained"] = {}
        for name, fields in ARMS.items():
            try:
                result["trained"][name] = train(
                    folder, Path(made) / name, given.steps, width, fields, device
                )
            except Exception as error:  # the other arms are measured
                result["trained"][name] = {"failed": f"{type(error).__name__}: {error}"}
            gc.collect()  # a model that was trained is in cycles
            if device == "cuda":
                torch.cuda.empty_cache()
            given.output.write_text(json.dumps(result, indent=1))
    graphs, none = (
        result["trained"][name].get("losses", []) for name in ("4 bits", "4 bits, no graphs")
    )
    result["graphs beside none"] = max(
        (abs(a - b) / abs(b) for a, b in zip(graphs, none)), default=float("nan")
    )
    given.output.write_text(json.dumps(result, indent=1))
    print("\nreading     ", {name: round(value, 2) for name, value in result["reading"].items()})
    print(
        "differ      ",
        result["tensors that differ"],
        "| losses, graphs beside none:",
        result["graphs beside none"],
    )
    print(
        "beside plain",
        {name: f"{value:.1e}" for name, value in result["beside dequantised"].items()},
    )
    for name, arm in result["trained"].items():
        told = (
            arm.get("failed")
            or f"{arm['tokens/s']:9,.0f} tokens/s {arm['GiB']:6.1f} GiB, loss "
            f"{arm['losses'][-1]:.3f}"
        )
        print(f"{name:28} {told}")
    sys.exit(result["tensors that differ"] > 0)


if __name__ == "__main__":
    main()
