"""Runs of mixtures whose experts are grouped products, beside runs in which the class computes them."""

import logging

import pytest
import torch

import families
import runs
import tiny
from chronicals.models import quantise_experts
from chronicals.patching import experts, patch_parts
from chronicals.training import session


def trained(folder, name, monkeypatch, patched, **fields):
    """Losses and gradient norms of a run, of a model patched as on a card or not, and how often experts were computed by
    their products."""
    calls = []
    keep = experts._compute
    with monkeypatch.context() as patch:
        patch.setattr(experts, "_compute", lambda *given: (calls.append(1), keep(*given))[1])
        model = families.mixture(name, vocab_size=300, max_position_embeddings=512)
        if patched:
            patch_parts(model, whole_layers=True)
        runs.train(folder, model=model, trackers=[], save_steps=None, max_steps=3, **fields)
    return runs.trajectory(folder), len(calls)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_the_same_run(name, lora, tmp_path, monkeypatch):
    fields = {}
    if lora:
        fields = {
            "use_lora": True, "lora_rank": 4, "lora_dropout": 0.0, "lora_target_modules": "q_proj",
            "lora_target_parameters": "mlp.experts.gate_up_proj,mlp.experts.down_proj",
        }  # fmt: skip
    own, calls = trained(tmp_path / "own", name, monkeypatch, False, **fields)
    assert calls == 0
    fused, calls = trained(tmp_path / "fused", name, monkeypatch, True, **fields)
    assert calls >= 3 * 2 * 2  # steps, micro-steps, layers
    for (step, loss, norm), (other_step, other_loss, other_norm) in zip(own, fused, strict=True):
        assert step == other_step
        assert loss == pytest.approx(other_loss, rel=2e-5) and norm == pytest.approx(other_norm, rel=2e-4)


def test_experts_that_stay_in_16_bit_are_named(caplog):
    caplog.set_level(logging.WARNING)
    session._name_experts(tiny.llama())
    assert not caplog.text
    session._name_experts(families.mixture("qwen3_moe"))
    assert "these experts stay in 16 bit: Qwen3MoeExperts" in caplog.text


def test_adapters_beside_experts_in_4_bits(tmp_path, monkeypatch):
    """They learn, the codes stay, and what is saved is the adapter alone."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
    model = families.mixture("qwen3_moe", vocab_size=300, max_position_embeddings=512, **sizes)
    quantise_experts(model)
    codes = {name: p.clone() for name, p in model.named_parameters() if p.dtype == torch.uint8}
    patch_parts(model, whole_layers=True)
    fields = {"use_lora": True, "lora_rank": 4, "lora_target_modules": "q_proj,o_proj", "mixed_precision": "bf16"}
    runs.train(tmp_path, model=model, trackers=[], save_steps=None, learning_rate=1e-2, **fields)
    losses = [loss for _, loss, _ in runs.trajectory(tmp_path)]
    assert losses[-1] < losses[0]
    there = dict(model.named_parameters())
    assert len(codes) == 4 and all(torch.equal(there[name].cpu(), value) for name, value in codes.items())
    assert all(".lora_" in name for name in runs.weights(tmp_path))
