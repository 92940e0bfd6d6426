"""Parts proved by themselves where the model has no twin; and models that are more than text."""

import copy

import pytest
import torch
from torch import nn

import families
from chronicals import patch_model, unpatch_model
from chronicals.patching import attention, plan
from chronicals.patching.forms import NoShell, shell_of
from chronicals.patching.gated_mlps import recognise_gated_mlp
from chronicals.patching.norms import recognise_norm
from patching.test_patch import assert_same, batch, loss_and_gradients


@pytest.fixture
def no_twins(monkeypatch):
    def refuse(cls, config):
        raise ValueError("no twin in this test")

    monkeypatch.setattr(plan, "build_twin", refuse)
    monkeypatch.setattr(plan, "_PLANS", {})


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "cohere", "phi"])
def test_without_a_twin(family, no_twins):
    plain = families.build(family).double()
    patched = copy.deepcopy(plain)
    report = patch_model(patched)
    assert sum(report.counts().values()) >= 3
    assert {"loss", "attention"} <= {
        entry.part for entry in report.left if "no twin in this test" in entry.reason
    }
    rows = batch()
    assert_same(loss_and_gradients(plain, **rows), loss_and_gradients(patched, **rows))


def test_the_shell_of_a_part_is_small_and_shares_nothing():
    with torch.device("meta"):
        model = families.build("llama", random=False, hidden_size=4096, intermediate_size=14336)
    layer = model.model.layers[0]
    for module, recognise in (
        (layer.mlp, recognise_gated_mlp),
        (layer.input_layernorm, recognise_norm),
    ):
        shell = shell_of(module)
        assert all(p.device.type == "cpu" and p.dtype == torch.float32 for p in shell.parameters())
        assert sum(p.numel() for p in shell.parameters()) < 10_000
        assert recognise(shell) is not None
        assert all(p.device.type == "meta" for p in module.parameters())


def test_what_a_shell_cannot_stand_for():
    with pytest.raises(NoShell, match="buffers"):
        shell_of(nn.BatchNorm1d(4))
    with pytest.raises(NoShell, match="no linear layers"):
        shell_of(nn.Sequential(nn.Conv1d(3, 3, 3)))


def llava():
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=8,
        patch_size=4,
    )
    config = LlavaConfig(
        text_config=families.configuration("llama"), vision_config=vision, image_token_index=3
    )
    return families.randomise(LlavaForConditionalGeneration(config).double())


def test_with_an_image():
    plain = llava()
    patched = copy.deepcopy(plain)
    report = patch_model(patched)
    assert {
        "fused_rmsnorm",
        "fused_swiglu",
        "fused_layernorm",
        "linear_cross_entropy",
    } <= report.counts().keys()
    ids = torch.randint(4, families.VOCABULARY, (2, 11))
    ids[:, 1:5] = 3
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    rows = {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": torch.randn(2, 3, 8, 8).double(),
        "labels": ids.masked_fill((mask == 0) | (ids == 3), -100),
    }
    before = attention.runs[0]
    assert_same(loss_and_gradients(plain, **rows), loss_and_gradients(patched, **rows))
    assert attention.runs[0] > before
    assert not patched.config.vision_config._attn_implementation.startswith(attention.MASK_PREFIX)
    unpatch_model(patched)
    assert (
        patched.config.text_config._attn_implementation
        == plain.config.text_config._attn_implementation
    )
