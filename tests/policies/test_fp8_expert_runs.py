"""Recipes over a folder in FP8 with experts in host memory: they stay in FP8, and give the same bits."""

import json

import pytest
import torch
from test_expert_offload_runs import trained_by_command

import chronicals
import tiny
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.distributed import Mesh
from chronicals.models.loading import load_model, load_without_weights
from chronicals.moe.offload.errors import NotExpertByExpert
from chronicals.moe.offload.files import ExpertFiles
from chronicals.moe.offload.module import streamed_experts_of
from chronicals.patching.patch import patch_parts
from chronicals.policies import Facts
from chronicals.policies.expert_offload import OFFLOAD_EXPERTS, load_experts_as_asked
from chronicals.policies.policy import MemoryLoad
from chronicals.training import ChronicalsTrainer
from fp8_checkpoints import MIXTURES, mixture, refuse_to_keep, saved_mixture


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_a_recipe_keeps_experts_in_fp8(name, tmp_path, monkeypatch, caplog):
    """The same bits as with all experts on the device, which are dequantised as they are read."""
    refuse_to_keep(monkeypatch)
    made = ChronicalsTrainer.__init__
    trained = []

    def with_products(self, given, *more, **named):
        patch_parts(given)  # as on a card
        made(self, given, *more, **named)
        trained.append(given)

    monkeypatch.setattr(ChronicalsTrainer, "__init__", with_products)
    saved_mixture(tmp_path / "base", name, max_position_embeddings=256)
    lines = (f"{json.dumps(row)}\n" for row in tiny.chat_rows())
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    expected, weights = trained_by_command(tmp_path, "resident")
    offload = ("--memory", "offload_experts", "--expert-memory", "0.5MiB")
    got, learned = trained_by_command(tmp_path, "streamed", *offload)
    assert got == expected and learned.keys() == weights.keys()
    assert any("experts" in path for path in learned)
    for path, value in weights.items():
        assert torch.equal(learned[path], value), path
    resident, streamed = trained
    assert not hasattr(resident, "offload") and "FP8 in blocks" in repr(streamed)
    assert streamed.config._name_or_path == str(tmp_path / "base")
    report = streamed.offload.report()
    assert report.misses > 0 and report.slots < streamed.offload.engine.experts
    values = sum(module.values for _, module in streamed_experts_of(streamed))
    assert report.host_bytes < 1.05 * values
    assert "dequantised" not in caplog.text
    streamed.offload.close()


def held(folder, **fields):
    """What ``load_experts_as_asked`` makes of a folder."""
    usual = {"use_lora": True, "memory": ["offload_experts"], "expert_memory": "1MiB"}
    config = ChronicalsConfig(**{**usual, "mixed_precision": "fp32", **fields})
    return load_experts_as_asked(folder, config, Mesh(), False)


def test_what_else_a_recipe_asks_for_is_loaded_as_otherwise(tmp_path, monkeypatch, caplog):
    folder = saved_mixture(tmp_path / "fp8", "Qwen3Moe")
    mixture("Qwen3Moe").save_pretrained(tmp_path / "16")
    assert held(tmp_path / "16") is None
    for fields in (
        {"memory": None, "expert_memory": None},
        {"use_fp8": True, "mixed_precision": "bf16"},
        {"use_lora": False},
        {"sharding": "weights"},
        {"mixed_precision": "fp16"},
        {"quantization": "nf4"},
    ):
        assert held(folder, **fields) is None, fields
    with pytest.raises(ConfigurationError, match="expert_predictor='oracle': expected 'last'"):
        held(folder, expert_predictor="oracle")
    with pytest.raises(ConfigurationError, match=r"'\]: expert_memory=10.25KiB: holds 0 exp"):
        held(folder, expert_memory="0.01MiB")

    def unknown(*_):
        raise NotExpertByExpert("mlp.experts.gate_up_proj: is not in the files under a known name")

    monkeypatch.setattr(ExpertFiles, "formats", unknown)
    assert held(folder) is None
    assert "take twice the memory; mlp.experts.gate_up_proj: is not in" in caplog.text


def test_a_plan_counts_a_byte_a_weight_in_host_memory(tmp_path):
    """Of experts that stay in FP8; nothing else of it differs."""
    folder = saved_mixture(tmp_path / "fp8", "Qwen3Moe")

    def planned(**fields):
        model = load_without_weights(folder)
        usual = {"use_lora": True, "memory": ["offload_experts"], "expert_memory": "0.5MiB"}
        config = ChronicalsConfig(**{**usual, **fields})
        load = OFFLOAD_EXPERTS.bytes(Facts(config, model), MemoryLoad(None, 2, 2, 0, 0, False))
        experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
        return load.host[OFFLOAD_EXPERTS.title] / experts, load.fixed + 2 * experts

    (kept, held), (dequantised, same) = planned(), planned(use_fp8=True)
    assert (kept, dequantised) == (1, 2) and held == same == 2**19


def test_experts_that_were_dequantised_are_said(tmp_path, monkeypatch, caplog):
    refuse_to_keep(monkeypatch)
    loaded = load_model(saved_mixture(tmp_path, "Qwen3Moe"), torch.bfloat16)
    streamed = chronicals.offload(loaded, vram="64MiB", ram="1GiB", device="cpu")
    assert "chronicals.offload(folder) keeps them in FP8" in caplog.text
    streamed.offload.close()
