"""Fused decoder layers over weights in blocks of GGUF: what the class computes with the weights
that these stand for.
"""

import pytest
import torch
from torch import nn

import families
from chronicals.models.four_bits import linear_layers
from chronicals.patching import decoder_layer, patch_parts, run_in_fp8, unfuse_weights
from chronicals.patching.decoder_layer import FUSED_LAYER
from chronicals.quantization import LinearGGUF
from drawn_blocks import by_gguf


def pair(family, **config):
    """A model in blocks of two kinds and the plain one that it stands for, in fp64, with the
    same adapters.
    """
    model, plain = (families.build(family, hidden_size=64, intermediate_size=96) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    for number, (path, layer) in enumerate(linear_layers(model).items()):
        packed = LinearGGUF(by_gguf(layer.weight, ("Q8_0", "Q4_0")[number % 2]), layer.bias)
        model.set_submodule(path, packed)
        plain.set_submodule(path, packed.to(torch.float64).plain())
    return families.adapted_alike(model, plain, **config)


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_fused_layers_compute_what_the_class_computes(family, dora):
    (model, plain) = pair(family, use_dora=dora)
    batch = families.documents_batch()

    def compare():
        found = families.states_and_gradients(model, batch)
        expected = families.states_and_gradients(plain, batch)
        families.assert_same(expected, {name: found[name] for name in found})
        return found

    compare()
    patch_parts(model, whole_layers=True)
    before = decoder_layer.runs[FUSED_LAYER]
    layers = len(model.get_decoder().layers)
    assert any("lora_B" in name for name in compare())
    assert decoder_layer.runs[FUSED_LAYER] == before + layers
    assert run_in_fp8(model).chosen == 0, "in their own format"
    unfuse_weights(model)
    compare()
    assert not any(type(layer) is nn.Linear for layer in linear_layers(model).values())
