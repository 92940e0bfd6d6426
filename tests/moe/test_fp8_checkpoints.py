"""Checkpoints in FP8 with a scale a block: their experts stay so in records, and give the same bits."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file

import chronicals
import runs
from chronicals.models.loading import load_model
from chronicals.patching.patch import patch_parts
from chronicals.quantization import FP8Blocks
from fp8_checkpoints import MIXTURES, in_blocks, refuse_to_keep, saved_mixture
from mutants import mutant

EACH = 2
HOST = {"ram": "1GiB", "device": "cpu"}
IDS = torch.arange(1, 25).view(2, 12)


def folder_budget(folder, slots, dtype):
    streamed = chronicals.offload(folder, vram="64MiB", dtype=dtype, **HOST)
    size = streamed.offload.engine.slot_bytes
    streamed.offload.close()
    return slots * size


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MIXTURES)
def test_a_folder_gives_the_same_bits_in_half_the_memory(name, dtype, tmp_path, monkeypatch):
    refuse_to_keep(monkeypatch)
    folder = saved_mixture(tmp_path, name)
    expected = load_model(folder, dtype)
    patch_parts(expected)
    values = sum(
        p.numel()
        for path, p in expected.named_parameters()
        if path.endswith("_proj") and p.ndim > 2
    )
    for slots in (EACH + 2, 8):
        streamed = chronicals.offload(
            folder, vram=folder_budget(folder, slots, dtype), dtype=dtype, **HOST
        )
        patch_parts(streamed)
        assert "FP8 in blocks" in repr(streamed)
        report = streamed.offload.report()
        assert report.slots == min(slots, streamed.offload.engine.experts)
        assert values <= report.host_bytes < 1.05 * values  # a byte a value, scales, pages
        with torch.no_grad():
            for ids in (IDS, IDS[:1, :1]):
                assert torch.equal(streamed(ids).logits, expected(ids).logits)
        streamed.offload.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_a_loaded_model_gives_the_same_bits(name, tmp_path, monkeypatch):
    """Loading dequantises it; its experts are in 16 bits then."""
    refuse_to_keep(monkeypatch)
    loaded = load_model(saved_mixture(tmp_path, name), torch.bfloat16)
    expected = copy.deepcopy(loaded)
    patch_parts(expected)
    for slots in (EACH + 2, 8):
        streamed = chronicals.offload(copy.deepcopy(loaded), vram="64MiB", **HOST)
        size = streamed.offload.engine.slot_bytes
        streamed.offload.close()
        streamed = chronicals.offload(copy.deepcopy(loaded), vram=slots * size, **HOST)
        patch_parts(streamed)
        with torch.no_grad():
            assert torch.equal(streamed(IDS).logits, expected(IDS).logits)
        streamed.offload.close()


ADAPTERS = {
    "use_lora": True,
    "lora_rank": 4,
    "lora_dropout": 0.0,
    "lora_target_modules": ["o_proj"],
    "lora_target_parameters": [
        *(f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")),
        "mlp.gate.weight",
    ],
    "max_steps": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_a_run_of_adapters_gives_the_same_bits(name, tmp_path, monkeypatch):
    refuse_to_keep(monkeypatch)
    folder = saved_mixture(tmp_path / "base", name, max_position_embeddings=256)
    expected = load_model(folder, torch.float32)
    size = folder_budget(folder, EACH + 3, torch.float32)
    streamed = chronicals.offload(folder, vram=size, dtype=torch.float32, **HOST)
    learned = []
    for place, model in (("resident", expected), ("streamed", streamed)):
        patch_parts(model)
        runs.train(tmp_path / place, model=model, **ADAPTERS)
        learned.append({n: p for n, p in model.named_parameters() if p.requires_grad})
    assert runs.trajectory(tmp_path / "resident") == runs.trajectory(tmp_path / "streamed")
    assert learned[0].keys() == learned[1].keys() and any("experts" in n for n in learned[0])
    for path, value in learned[0].items():
        assert torch.equal(value, learned[1][path]), path
    assert streamed.offload.report().misses > 0
    streamed.offload.close()


def test_blocks_are_their_values_times_their_scales():
    weights = [torch.randn(256, 384), torch.randn(256, 384)]
    stored = [in_blocks(weight) for weight in weights]
    pairs = [(values.view(torch.uint8), scales) for values, scales, _ in stored]
    meant = torch.cat([means for _, _, means in stored])
    packed = FP8Blocks.of_matrices(pairs, torch.float32)
    assert packed.shape == (512, 384) and torch.equal(packed.dense(), meant)
    assert torch.equal(packed.to(torch.bfloat16).dense(), meant.bfloat16())
    assert torch.equal(torch.cat([packed.rows(rank, 4).dense() for rank in range(4)]), meant)
    assert packed.rows(0, 8) is None  # half a block
    from chronicals.quantization import fp8_blocks

    wrong = mutant(
        fp8_blocks, "self.scales.view(down, 1, across, 1)", "self.scales.view(across, 1, down, 1)"
    )
    with pytest.raises((AssertionError, RuntimeError)):
        assert torch.equal(wrong.FP8Blocks.of_matrices(pairs, torch.float32).dense(), meant)


def test_what_cannot_be_read_is_named(tmp_path):
    folder = saved_mixture(tmp_path, "Qwen3Moe")
    with pytest.raises(ValueError, match=r"quantization='nf4': its weights are quantised already"):
        chronicals.offload(folder, vram="64MiB", quantization="nf4", **HOST)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
    scales = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"layers.1.mlp.experts.gate_up_proj: not every expert is"):
        chronicals.offload(folder, vram="64MiB", **HOST)
    tensors[name] = scales.repeat(3, 1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"gate_up_proj, expert 3: .*blocks do not fill a matrix"):
        chronicals.offload(folder, vram="64MiB", **HOST)
