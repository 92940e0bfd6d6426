"""FP8 and 4 bits in the layouts of compressed-tensors and bitsandbytes: clients compute what torch does, faults are found."""

import importlib.util
import json

import gguf_models
import pytest
import torch
from safetensors.torch import load_file

import tiny
from chronicals.export import NotExpressible, NotProved, compressed_tensors, export
from chronicals.export.compressed_tensors import FP8, INT4, LAYOUTS

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
READ_BY_TRANSFORMERS = importlib.util.find_spec("compressed_tensors") is not None


def saved(folder, name="llama", **changes):
    gguf_models.build(name, **{**SIZES, **changes}).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "llama with biases", "qwen2", "qwen3", "gemma2", "phi3", "glm4"])
def test_transformers_computes_with_them_what_torch_does(name, layout, tmp_path):
    (exported,) = export(saved(tmp_path, name), layout)
    found = {check.name: check for check in exported.proof.checks}
    assert found["quantised weights"].value < found["quantised weights"].bound
    assert ("logits beside torch with the same weights and inputs" in found) == READ_BY_TRANSFORMERS
    described = json.loads((exported.path / "config.json").read_text())["quantization_config"]
    assert described["format"] == LAYOUTS[layout].name and described["ignore"] == ["lm_head"]
    tensors = load_file(exported.path / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].dtype == tensors["model.norm.weight"].dtype == torch.bfloat16


def test_fp8_by_hand():
    weight = torch.randn(5, 48) * torch.logspace(-3, 3, 5)[:, None]
    weight[2] = 0
    codes, scale = FP8().quantise(weight)
    assert scale.shape == (5, 1) and scale.dtype == torch.bfloat16
    assert torch.isfinite(codes.float()).all() and codes.float().abs().max() <= 448
    found = codes.float() * scale.float()
    assert ((found - weight).norm(dim=1)[[0, 1, 3, 4]] < 0.035 * weight.norm(dim=1)[[0, 1, 3, 4]]).all()
    assert (found[2] == 0).all()


def test_four_bits_by_hand():
    """Eight codes of a row in an int32, the first in its lowest bits, 8 standing for zero."""
    weight = torch.randn(3, 256)
    packed, scale = INT4().quantise(weight)
    assert packed.shape == (3, 32) and packed.dtype == torch.int32 and scale.shape == (3, 2)
    for row in range(3):
        for column in (0, 5, 127, 128, 255):
            code = (int(packed[row, column // 8]) >> (4 * (column % 8))) & 15
            expected = float(weight[row, column]) / float(scale[row, column // 128])
            assert code - 8 == max(-8, min(7, round(expected)))


@pytest.mark.parametrize("planted", ["another scale", "rows exchanged"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_faults_are_found(layout, planted, tmp_path, monkeypatch):
    kind = type(LAYOUTS[layout])
    right = kind.quantise

    def plant(self, weight):
        codes, scale = right(self, weight)
        return (codes, 1.5 * scale) if planted == "another scale" else (codes.flip(0), scale)

    monkeypatch.setattr(kind, "quantise", plant)
    with pytest.raises(NotProved, match="quantised weights, safetensors: FAILED"):
        export(saved(tmp_path), layout)
    assert list((tmp_path / "export").iterdir()) == []


@pytest.mark.skipif(not READ_BY_TRANSFORMERS, reason="needs compressed-tensors")
def test_a_head_that_is_said_to_be_quantised_is_found(tmp_path, monkeypatch):
    right = compressed_tensors._described
    monkeypatch.setattr(compressed_tensors, "_described", lambda *given: {**right(*given), "ignore": []})
    with pytest.raises((NotProved, ValueError)):
        export(saved(tmp_path), "fp8")


def test_what_has_no_layout_is_refused(tmp_path):
    with pytest.raises(NotExpressible, match="float-quantized: the model has experts"):
        export(saved(tmp_path / "experts", "qwen3_moe"), "fp8")
    with pytest.raises(NotExpressible, match=r"down_proj.weight: rows of 96 are no whole groups of 128; export it in FP8"):
        export(saved(tmp_path / "narrow", intermediate_size=96), "int4")


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3"])
def test_nf4_is_what_bitsandbytes_reads(name, tmp_path):
    pytest.importorskip("generic_bitsandbytes")
    (exported,) = export(saved(tmp_path, name), "nf4")
    found = {check.name: check for check in exported.proof.checks}
    assert found["quantised weights"].value < 0.13
    there = importlib.util.find_spec("bitsandbytes") is not None
    assert ("logits beside torch with the same weights" in found) == there
    described = json.loads((exported.path / "config.json").read_text())["quantization_config"]
    assert described["load_in_4bit"] and described["bnb_4bit_quant_type"] == "nf4"


def test_codes_of_another_weight_are_found_in_nf4(tmp_path, monkeypatch):
    from chronicals.export import nf4

    right = nf4.load_model

    def load(place, dtype, quantization=None):
        model = right(place, dtype, quantization=quantization)
        if quantization == "nf4":
            layer = model.model.layers[0].mlp.up_proj
            layer.weight.data = layer.weight.data.flip(0)
        return model

    monkeypatch.setattr(nf4, "load_model", load)
    with pytest.raises(NotProved, match="quantised weights, bitsandbytes: FAILED"):
        export(saved(tmp_path), "nf4")
