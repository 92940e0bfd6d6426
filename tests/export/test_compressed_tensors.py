"""FP8 and 4 bits in the layouts of compressed-tensors and bitsandbytes: clients compute what
torch does, faults are found.
"""

import importlib.util
import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import gguf_models
import tiny
from chronicals.export import NotExpressible, NotProved, compressed_tensors, export, source
from chronicals.export.compressed_tensors import LAYOUTS, CompressedTensors, FP8Layout, INT4Layout
from chronicals.formats import weight_files
from chronicals.models import describe_packed, load_model
from chronicals.quantization import Linear4bit
from chronicals.saving import SavedModel
from chronicals.versions import transformers_before
from comparison import equal_but_for_means

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
READ_BY_TRANSFORMERS = importlib.util.find_spec("compressed_tensors") is not None


def saved(folder, name="llama", **changes):
    gguf_models.build(name, **{**SIZES, **changes}).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name", ["llama", "llama with biases", "qwen2", "qwen3", "gemma2", "phi3", "glm4"]
)
def test_transformers_computes_with_them_what_torch_does(name, layout, tmp_path):
    (exported,) = export(saved(tmp_path, name), layout)
    found = {check.name: check for check in exported.proof.checks}
    assert found["quantised weights"].value < found["quantised weights"].bound
    assert ("logits beside torch with the same weights and inputs" in found) == READ_BY_TRANSFORMERS
    described = json.loads((exported.path / "config.json").read_text())["quantization_config"]
    assert described["format"] == LAYOUTS[layout].name and described["ignore"] == ["lm_head"]
    tensors = load_file(exported.path / "model.safetensors")
    assert (
        tensors["model.embed_tokens.weight"].dtype
        == tensors["model.norm.weight"].dtype
        == torch.bfloat16
    )


OF_EXPERTS = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
ROUTERS = {
    "mixtral": ["block_sparse_moe.gate"],
    "qwen2_moe": ["mlp.gate", "mlp.shared_expert_gate"],
    "qwen3_moe": ["mlp.gate"],
    "olmoe": ["mlp.gate"],
}


def of_experts(folder, name):
    return saved(folder, name, **OF_EXPERTS)


def limit(check, layout):
    """The largest error of a right file's logits.

    transformers below 5.21 adds up experts in another order than torch here. Where an input lies
    between two FP8 codes, the last bit of a sum then decides which it gets, and the logits differ
    by what FP8 rounds.
    """
    return check.bound if layout == "fp8" and transformers_before("5.21") else 1e-5


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ROUTERS)
def test_experts_are_written_one_by_one(name, layout, tmp_path):
    """In the checkpoint's names, which vLLM reads; routers are left out by the same names;
    transformers computes the same.
    """
    (exported,) = export(of_experts(tmp_path, name), layout)
    found = {check.name: check for check in exported.proof.checks}
    same = found.get("logits beside torch with the same weights and inputs")
    assert same.value < limit(same, layout) if READ_BY_TRANSFORMERS else same is None
    described = json.loads((exported.path / "config.json").read_text())["quantization_config"]
    assert described["ignore"] == [
        "lm_head",
        *(f"model.layers.{n}.{router}" for n in range(2) for router in ROUTERS[name]),
    ]
    before = load_file(tmp_path / "model.safetensors")
    tensors = load_file(exported.path / "model.safetensors")
    stored = torch.float8_e4m3fn if layout == "fp8" else torch.int32
    for expert in (key for key in before if ".experts." in key):
        codes = tensors[expert if layout == "fp8" else f"{expert}_packed"]
        scale = tensors[f"{expert}_scale"]
        assert codes.dtype == stored and scale.shape[0] == before[expert].shape[0]
    for router in ROUTERS[name]:
        assert tensors[f"model.layers.1.{router}.weight"].dtype == torch.bfloat16


def exchanged(right, stored):
    """What is written of a matrix, of which two experts' are exchanged."""
    other = {".0.": ".1.", ".1.": ".0."}
    for mine, theirs in other.items():
        if f".experts{mine}" in stored.name and ".layers.1." in stored.name:
            name = stored.name.replace(f".experts{mine}", f".experts{theirs}")
            new = right(stored)
            return [replace(tensor, name=tensor.name.replace(stored.name, name)) for tensor in new]
    return right(stored)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_in_another_order_are_found_in_low_bits(layout, tmp_path, plant):
    plant(
        type(LAYOUTS[layout]),
        "written",
        lambda right, self, stored: exchanged(lambda given: right(self, given), stored),
    )
    with pytest.raises(NotProved, match="quantised weights, safetensors: FAILED"):
        export(of_experts(tmp_path, "qwen3_moe"), layout)


@pytest.mark.slow
@pytest.mark.skipif(not READ_BY_TRANSFORMERS, reason="needs compressed-tensors")
def test_scales_of_another_expert_are_found_by_transformers(tmp_path, plant):
    """A fault in the way there and in the way back: the layout is read as it was written, and is
    another than the package's.
    """

    def quantise(right, *given):
        codes, scale = right(*given)
        return codes, scale / 2

    plant(FP8Layout, "quantise", quantise)
    plant(FP8Layout, "read", lambda right, *given: 2 * right(*given))
    with pytest.raises(NotProved, match="same weights and inputs, transformers: FAILED"):
        export(of_experts(tmp_path, "mixtral"), "fp8")


def test_in_vllm_experts_round_their_inputs_too(tmp_path):
    """Beside the same model whose experts' inputs were rounded by hand: its experts have one
    matrix each.
    """
    given = source.SourceModel(SavedModel.find(of_experts(tmp_path, "qwen3_moe")), tmp_path)
    layout = CompressedTensors("fp8", FP8Layout())
    layout.write(given, tmp_path / "fp8")
    found = {
        stored.name: stored
        for stored in weight_files.tensors_in(tmp_path / "fp8" / "model.safetensors")
    }
    names = layout._quantised_names(given)
    model = layout._simulated(given, found, names, in_vllm=True)
    experts = model.model.layers[1].mlp.experts
    x = torch.randn(5, 128)
    on = experts.down_proj.device
    got = experts(x.to(on), torch.tensor([[3]] * 5, device=on), torch.ones(5, 1, device=on)).cpu()
    gate, up, down = (
        FP8Layout().read(found, f"model.layers.1.mlp.experts.3.{role}_proj.weight")
        for role in ("gate", "up", "down")
    )
    rounded = FP8Layout().round_input(x)
    inner = FP8Layout().round_input(torch.nn.functional.silu(rounded @ gate.T) * (rounded @ up.T))
    assert torch.allclose(got, inner @ down.T, atol=1e-5)


@pytest.mark.slow
def test_no_bars_are_shown(tmp_path, capfd):
    """Of transformers and compressed-tensors; transformers shows its own again afterwards."""
    from transformers.utils import logging

    folder = saved(tmp_path)
    logging.enable_progress_bar()
    capfd.readouterr()
    export(folder, "fp8")
    assert "%|" not in capfd.readouterr().err and logging.is_progress_bar_enabled()


def test_fp8_by_hand():
    weight = torch.randn(5, 48) * torch.logspace(-3, 3, 5)[:, None]
    weight[2] = 0
    codes, scale = FP8Layout().quantise(weight)
    assert scale.shape == (5, 1) and scale.dtype == torch.bfloat16
    assert torch.isfinite(codes.float()).all() and codes.float().abs().max() <= 448
    found = codes.float() * scale.float()
    assert (
        (found - weight).norm(dim=1)[[0, 1, 3, 4]] < 0.035 * weight.norm(dim=1)[[0, 1, 3, 4]]
    ).all()
    assert (found[2] == 0).all()


def test_four_bits_by_hand():
    """Eight codes of a row in an int32, the first in its lowest bits, 8 standing for zero."""
    weight = torch.randn(3, 256)
    packed, scale = INT4Layout().quantise(weight)
    assert packed.shape == (3, 32) and packed.dtype == torch.int32 and scale.shape == (3, 2)
    for row in range(3):
        for column in (0, 5, 127, 128, 255):
            code = (int(packed[row, column // 8]) >> (4 * (column % 8))) & 15
            expected = float(weight[row, column]) / float(scale[row, column // 128])
            assert code - 8 == max(-8, min(7, round(expected)))


@pytest.mark.slow
@pytest.mark.parametrize("planted", ["another scale", "rows exchanged"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_faults_are_found(layout, planted, tmp_path, plant):
    def wrong(right, *given):
        codes, scale = right(*given)
        return (codes, 1.5 * scale) if planted == "another scale" else (codes.flip(0), scale)

    plant(type(LAYOUTS[layout]), "quantise", wrong)
    with pytest.raises(NotProved, match="quantised weights, safetensors: FAILED"):
        export(saved(tmp_path), layout)
    assert list((tmp_path / "export").iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(not READ_BY_TRANSFORMERS, reason="needs compressed-tensors")
def test_a_head_that_is_said_to_be_quantised_is_found(tmp_path, plant):
    def name_dtype(right, folder, kind, quantization_config):
        right(folder, kind, quantization_config={**quantization_config, "ignore": []})

    plant(compressed_tensors, "name_dtype", name_dtype)
    with pytest.raises((NotProved, ValueError)):
        export(saved(tmp_path), "fp8")


def test_what_has_no_layout_is_refused(tmp_path):
    said = r"float-quantized: model.layers.0.mlp.experts.down_proj, \[4, 256, 128\]: .* a matrix an expert, .* \(--to merged\)"
    with pytest.raises(NotExpressible, match=said):
        export(saved(tmp_path / "stacked", "gpt_oss"), "fp8")
    with pytest.raises(
        NotExpressible, match="experts.0.down_proj.weight: rows of 32 are no whole groups of 128"
    ):
        export(saved(tmp_path / "experts", "qwen3_moe"), "int4")
    with pytest.raises(
        NotExpressible,
        match=r"down_proj.weight: rows of 96 are no whole groups of 128; export it in FP8",
    ):
        export(saved(tmp_path / "narrow", intermediate_size=96), "int4")


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3", "mixtral", "qwen2_moe", "gpt_oss"])
def test_nf4_is_what_bitsandbytes_reads(name, tmp_path):
    pytest.importorskip("generic_bitsandbytes")
    (exported,) = export(saved(tmp_path, name), "nf4")
    found = {check.name: check for check in exported.proof.checks}
    assert found["quantised weights"].value < 0.13
    there = importlib.util.find_spec("bitsandbytes") is not None
    assert ("logits beside torch with the same weights" in found) == there
    described = json.loads((exported.path / "config.json").read_text())["quantization_config"]
    assert described["load_in_4bit"] and described["bnb_4bit_quant_type"] == "nf4"
    stored = load_file(exported.path / "model.safetensors")
    experts = [tensor.dtype for key, tensor in stored.items() if ".experts." in key]
    assert set(experts) <= {torch.bfloat16} and bool(experts) == (
        name in ("mixtral", "qwen2_moe", "gpt_oss")
    )
    share = found["ratio of the weights that are in 4 bits"].value
    assert (share < 0.5) == bool(experts)


@pytest.mark.parametrize("name", ["llama", "qwen2", "llama with biases", "qwen2_moe"])
def test_only_linear_layers_of_decoder_layers_are_in_nf4(name, tmp_path):
    """By their names; embeddings, a head, tied or not, norms, biases and routers are in 16 bits."""
    from chronicals.export import nf4

    given = source.SourceModel(SavedModel.find(saved(tmp_path / "model", name)), tmp_path / "model")
    nf4.NF4Folder("nf4").write(given, tmp_path / "ours")
    stored = load_file(tmp_path / "ours" / "model.safetensors")
    linear = re.compile(r"model\.layers\.\d+\.(self_attn|mlp(\.shared_expert)?)\.\w+_proj\.weight")
    expected = {key for key in given.tensors if linear.fullmatch(key)}
    assert (
        expected
        and {key.removesuffix(".absmax") for key in stored if key.endswith(".absmax")} == expected
    )
    others = {key: stored[key].dtype for key in given.tensors.keys() - expected}
    assert set(others.values()) == {torch.bfloat16} and "model.embed_tokens.weight" in others
    assert ("lm_head.weight" in others) == (not given.config.tie_word_embeddings)


@pytest.mark.slow
def test_the_bound_on_nf4_follows_what_bf16_rounds_in_the_model(tmp_path):
    """Gemma 3's norms with an offset amplify it: torch's own bf16 is further from its fp32 than
    the usual bound.
    """
    for package in ("generic_bitsandbytes", "bitsandbytes"):
        pytest.importorskip(package)
    from chronicals.export import nf4

    torch.manual_seed(0)
    (exported,) = export(
        saved(tmp_path, "gemma3", hidden_size=256, intermediate_size=512, num_attention_heads=16),
        "nf4",
    )
    (check,) = [
        check
        for check in exported.proof.checks
        if check.name == "logits beside torch with the same weights"
    ]
    assert nf4.NF4_LOGIT_BOUND < check.bound < 0.3 and check.value < check.bound


@pytest.mark.slow
def test_codes_of_another_weight_are_found_in_nf4(tmp_path, plant):
    from chronicals.export import nf4

    def stored_tensors(right, name, packed):
        found = right(name, packed)
        return {**found, name: found[name].flip(0)} if "layers.0.mlp.up_proj" in name else found

    plant(nf4, "stored_tensors", stored_tensors)
    with pytest.raises(NotProved, match="quantised weights, bitsandbytes: FAILED"):
        export(saved(tmp_path), "nf4")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral"])
def test_tensors_in_nf4_are_those_of_the_model_in_4_bits(name, tmp_path):
    """To the byte, but for blanks after the JSON; experts stay in 16 bits in these files."""
    from chronicals.export import nf4
    from chronicals.models.four_bits import linear_layers

    given = source.SourceModel(SavedModel.find(saved(tmp_path / "whole", name)), tmp_path / "whole")
    nf4.NF4Folder("nf4").write(given, tmp_path / "ours")
    model, exact = (
        load_model(tmp_path / "whole", dtype) for dtype in (torch.bfloat16, torch.float32)
    )
    for path, layer in linear_layers(exact).items():
        # From the values of the files, not from those rounded to 16 bits before.
        model.set_submodule(path, Linear4bit.of(layer).to(torch.bfloat16))
    describe_packed(model)
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "theirs")
    )
    assert ours.keys() == theirs.keys() and sum(
        tensor.nbytes for tensor in ours.values()
    ) == nf4.NF4Folder("nf4").size(given)
    for key, tensor in theirs.items():
        found = ours[key]
        if "quant_state" in key:
            assert len(found) == nf4.DESCRIPTION_BYTES
            found = torch.tensor(list(bytes(found.tolist()).rstrip()), dtype=torch.uint8)
        assert equal_but_for_means(found, tensor), key
    configs = [
        json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("ours", "theirs")
    ]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


@pytest.mark.slow
def test_what_is_quantised_already_is_not_written_in_nf4(tmp_path):
    export(saved(tmp_path / "whole"), "nf4", tmp_path / "out", name="x")
    with pytest.raises(
        NotExpressible, match=r"nf4: its weights are quantised already \(bitsandbytes\)"
    ):
        export(tmp_path / "out" / "x-nf4", "nf4")
