"""Objectives over pairs and judged answers through fused decoder layers with adapters; answers
share their prompts.
"""

import pytest
import torch

import tiny
from chronicals.models import quantise_layers
from chronicals.patching import decoder_layer, fuse_weights, patch_parts
from chronicals.patching.decoder_layer import FUSED_LAYER
from preferences import OF_ANSWERS, WITH_REFERENCE, assert_close, one_step, rows_of

LORA = {"use_lora": True, "lora_rank": 4, "lora_dropout": 0.0}


def base(weights):
    model = tiny.llama()
    if weights == "NF4":
        quantise_layers(model)
    return model


@torch.no_grad()
def adapt(model):
    """Adapters with an effect, so that the reference, without them, is another policy."""
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.05)


def adapt_and_fuse(model):
    adapt(model)
    patch_parts(model, whole_layers=True)
    fuse_weights(model)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp32", "NF4"])
@pytest.mark.parametrize("objective", OF_ANSWERS)
def test_a_step_through_fused_layers_is_that_of_separate_rows(objective, weights, tmp_path):
    """In one pack, the reference being the base with adapters switched off, beside plain layers
    and a row for each answer.
    """
    given = rows_of(objective, 7)
    usual = {"max_seq_length": 1024, "use_cuda_graphs": False, **LORA}
    terms, gradients = one_step(
        tmp_path, given, objective, {}, base(weights), padded=True, ready=adapt, **usual
    )
    before = decoder_layer.runs[FUSED_LAYER]
    fused = one_step(tmp_path, given, objective, {}, base(weights), ready=adapt_and_fuse, **usual)
    assert decoder_layer.runs[FUSED_LAYER] > before
    assert any("lora_A" in name and gradient.norm() > 0 for name, gradient in gradients.items())
    assert fused[0] == pytest.approx(terms, rel=1e-4, abs=1e-5)
    assert_close(fused[1], gradients, 1e-4)
    if objective in WITH_REFERENCE:
        assert abs(terms["rewards/chosen"]) > 1e-2, "adapters are switched off in the reference"
