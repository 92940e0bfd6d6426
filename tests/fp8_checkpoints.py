"""Checkpoints in FP8 with a scale a block, as DeepSeek V3's are."""

import json

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import families
import tiny

MIXTURES = {"Qwen3Moe": "num_experts", "DeepseekV3": "n_routed_experts"}
"""Families, and the field of each with the number of experts."""

MIXTURE_SIZES = {"hidden_size": 256, "moe_intermediate_size": 128}
MIXTURE_EXPERTS = 6


def in_blocks(weight):
    """e4m3 with a scale of each 128 × 128, and what that stands for (DeepSeek-AI, 2024, section
    3.3.2).
    """
    rows, columns = weight.shape
    padded = (
        F.pad(weight.float(), (0, -columns % 128, 0, -rows % 128))
        .unflatten(1, (-1, 128))
        .unflatten(0, (-1, 128))
    )
    scale = padded.abs().amax((1, 3)).clamp(min=1e-12) / 448
    values = (padded / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    means = (values.float() * scale[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return values.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous(), scale, means


def saved_in_fp8(folder, model, kept=()):
    """As such checkpoints are; what each weight stands for."""
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    written = {}
    meant = {}
    for name, weight in weights.items():
        written[name] = meant[name] = weight
        if weight.ndim == 2 and "_proj" in name and not any(word in name for word in kept):
            written[name], written[f"{name}_scale_inv"], meant[name] = in_blocks(weight)
    save_file(written, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    described = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    config["quantization_config"] = described | {"modules_to_not_convert": [*kept, "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return meant


def mixture(name, **changes):
    """A mixture of random weights, whose experts have whole blocks."""
    torch.manual_seed(3)
    sizes = {**MIXTURE_SIZES, "vocab_size": len(tiny.tokenizer()), MIXTURES[name]: MIXTURE_EXPERTS}
    return families.routed(name, **{**sizes, **changes})


def saved_mixture(folder, name, **changes):
    """A folder with a mixture in FP8, and its tokenizer."""
    saved_in_fp8(folder, mixture(name, **changes).bfloat16(), kept=["o_proj"])
    tiny.tokenizer().save_pretrained(folder)
    return folder


def refuse_to_keep(monkeypatch):
    """As on a card: what is not asked to be dequantised would stay in FP8."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    def validate(self, *given, **named):
        assert self.quantization_config.dequantize

    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", validate)
