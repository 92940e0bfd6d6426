"""Fused decoder layers over weights in 4 bits: what the class computes with the weights that
these stand for.
"""

import pytest
import torch
from torch import nn

import families
from chronicals.models.linear import read_linear
from chronicals.patching import decoder_layer, patch_parts, run_in_fp8, unfuse_weights
from chronicals.patching import fused_weights as weights_module
from chronicals.patching.decoder_layer import FUSED_LAYER
from families import four_bit_pair

FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "phi3"]


def compared(model, plain, batch):
    found = families.states_and_gradients(model, batch)
    expected = families.states_and_gradients(plain, batch)
    families.assert_same(expected, {name: found[name] for name in found})
    return found


@pytest.mark.parametrize("adapted", [False, True], ids=["frozen", "adapters"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_layers_compute_what_the_class_computes(family, adapted):
    (model, plain) = four_bit_pair(family, adapted)
    batch = families.documents_batch()
    if (
        not adapted
    ):  # norms, embedding and head are trained; the plain model's linear layers are not
        for layer in plain.get_decoder().layers:
            for child in layer.modules():
                if isinstance(child, nn.Linear):
                    child.requires_grad_(False)
    compared(model, plain, batch)
    patch_parts(model, whole_layers=True)
    before = decoder_layer.runs[FUSED_LAYER]
    layers = len(model.get_decoder().layers)
    found = compared(model, plain, batch)
    assert decoder_layer.runs[FUSED_LAYER] == before + layers
    assert any("lora_B" in name for name in found) == adapted
    assert run_in_fp8(model).chosen == 0, "in their own format"
    codes = {name: p.data_ptr() for name, p in model.named_parameters() if p.dtype == torch.uint8}
    unfuse_weights(model)
    assert codes and codes == {
        name: p.data_ptr() for name, p in model.named_parameters() if p.dtype == torch.uint8
    }
    compared(model, plain, batch)


def test_dora_over_4_bits():
    (model, plain) = four_bit_pair("llama", True, use_dora=True)
    batch = families.documents_batch()
    patch_parts(model, whole_layers=True)
    assert any("magnitude" in name for name in compared(model, plain, batch))


def test_layers_of_one_shape_share_what_they_are_dequantised_to():
    model, _ = four_bit_pair("llama", adapted=True)
    patch_parts(model, whole_layers=True)
    decoder_layer.fuse_weights(model)
    first, second = (
        [
            merged.base.buffer
            for part in layer.children()
            for merged in vars(part).get(weights_module.MERGED, {}).values()
        ]
        for layer in model.get_decoder().layers
    )
    assert len(first) == 4 and all(one is other for one, other in zip(first, second))


def test_a_cast_model_is_dequantised_to_the_new_type():
    (model, plain) = four_bit_pair("llama", adapted=True)
    batch = families.documents_batch()
    patch_parts(model, whole_layers=True)
    compared(model, plain, batch)
    model.float(), model.double()
    compared(model, plain, batch)
    group = weights_module.Group(model.get_decoder().layers[0].mlp, ("down_proj",))
    model.float()
    assert group.dtype == torch.float64
    assert (
        weights_module.Group(model.get_decoder().layers[0].mlp, ("down_proj",)).dtype
        == torch.float32
    )


def test_partly_in_4_bits_runs_part_by_part():
    model, _ = four_bit_pair("llama", adapted=False)
    attention = model.get_decoder().layers[0].self_attn
    attention.q_proj = attention.q_proj.plain()
    with pytest.raises(weights_module.Unmerged, match="differ in type"):
        weights_module.Group(attention, ("q_proj", "k_proj", "v_proj"))
    assert read_linear(attention.k_proj).layer is attention.k_proj
