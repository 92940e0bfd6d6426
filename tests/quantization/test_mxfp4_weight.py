"""MXFP4, as gpt-oss ships its experts: read as stored, frozen under adapters, merged, exported."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import gguf_models
import runs
import tiny
from chronicals.export import export
from chronicals.export.merge import merge
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.models import load_model
from chronicals.patching import patch_model
from chronicals.patching.experts import FUSED_EXPERTS
from chronicals.quantization import (
    MXFP4,
    PackedExperts,
    PackedStorage,
    packed_experts,
    packed_modules,
)
from chronicals.quantization.plain import PlainWeight
from interpreted import kernels_run, only_interpreted

STACKS = ("gate_up_proj", "down_proj")
SIZES = {"vocab_size": 300, "max_position_embeddings": 512}


def drawn(experts, rows, blocks, seed=0):
    """``*_blocks`` and ``*_scales`` of ordinary sizes."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (experts, rows, blocks, 16), generator=generator)
    scales = torch.randint(121, 125, (experts, rows, blocks), generator=generator)
    return codes.to(torch.uint8), scales.to(torch.uint8)


def by_transformers(codes, scales, dtype):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(codes, scales, dtype=dtype)


@pytest.fixture
def checkpoint(tmp_path):
    """A tiny gpt-oss as it ships: experts in MXFP4, the rest in bf16."""
    folder = tmp_path / "base"
    model = gguf_models.build("gpt_oss", **SIZES).to(torch.bfloat16)
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for number, name in enumerate(sorted(tensors)):
        if name.endswith(STACKS):
            experts, columns, rows = tensors.pop(name).shape
            codes, scales = drawn(experts, rows, columns // 32, number)
            tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    described = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": described}))
    return folder


def by_class(folder, dtype=torch.float32):
    """The model as transformers dequantises it: below 5.20 to bf16, whatever type is asked for."""
    import transformers

    config = transformers.Mxfp4Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=config
    )
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_are_those_of_transformers_bit_by_bit(dtype):
    codes, scales = drawn(3, 10, 2)
    weight = MXFP4.read("w", {"w_blocks": codes, "w_scales": scales}).to(dtype)
    expected = by_transformers(codes, scales, dtype)
    assert torch.equal(weight.dense().view(3, 10, 64).transpose(1, 2), expected)
    assert torch.equal(weight.dense_reference(), weight.dense())
    found = torch.cat([weight.rows(rank, 5).dense() for rank in range(5)])
    assert torch.equal(found, weight.dense()) and weight.rows(0, 4) is None
    assert weight.bytes == codes.numel() + scales.numel()


def test_what_does_not_fit_is_refused():
    codes, scales = drawn(3, 10, 2)
    for wrong in (
        {"w_blocks": codes, "w_scales": scales[:, :, :1]},
        {"w_blocks": codes.float(), "w_scales": scales},
    ):
        with pytest.raises(ValueError, match="download it again"):
            MXFP4.read("w", wrong)


def test_a_format_that_no_checkpoint_has_says_so():
    said = "w: PlainWeight is not read from tensors of a checkpoint"
    with pytest.raises(ValueError, match=said):
        PlainWeight.read("w", {})
    with pytest.raises(ValueError, match=said):
        PlainWeight.stored_shape("w", {}, dict().__getitem__)


def test_a_checkpoint_is_read_as_it_is_stored(checkpoint):
    stored = load_file(checkpoint / "model.safetensors")
    model = load_model(checkpoint, torch.float32)
    modules = dict(packed_experts(model))
    assert len(modules) == model.config.num_hidden_layers
    plain = dict(by_class(checkpoint).named_parameters())
    for path, experts in modules.items():
        for name in STACKS:
            assert torch.equal(experts.packed(name).codes, stored[f"{path}.{name}_blocks"].view(-1))
            assert torch.equal(experts.stack(name).dense(), plain[f"{path}.{name}"])
            assert torch.equal(experts.reference(name), plain[f"{path}.{name}"])
    ids = torch.randint(0, 300, (2, 9))
    with torch.no_grad():
        found = model(ids).logits
        expected = by_class(checkpoint)(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@only_interpreted
@pytest.mark.slow
def test_few_tokens_read_it_in_place(checkpoint, must_not_call):
    """Its class has the layout ``[E, K, N]``, its codes ``[E, N, K]``."""
    model = load_model(checkpoint, torch.bfloat16)
    plain = by_class(checkpoint)
    assert {experts.dtype for _, experts in packed_experts(model)} == {torch.bfloat16}
    assert patch_model(model).counts()[FUSED_EXPERTS]
    must_not_call(PackedStorage, "filled", "all experts are dequantised")
    path, ours = next(packed_experts(model))
    count, width = ours.stacked["down_proj"][0], ours.stacked["down_proj"][2]
    x = torch.randn(9, width).bfloat16()
    shares, chosen = torch.rand(9, count).topk(2)
    with torch.no_grad(), kernels_run():
        got = ours(x, chosen, shares)
    with torch.no_grad():
        expected = plain.get_submodule(path)(x.float(), chosen, shares)
    assert (got.float() - expected).norm() <= 2**-6 * expected.norm()


@pytest.mark.slow
def test_adapters_learn_over_it_and_are_merged_and_exported(checkpoint, tmp_path):
    model = load_model(checkpoint, torch.float32)
    codes = {
        f"{path}.{name}": weight.codes.clone()
        for path, module in packed_modules(model)
        for name, weight in module.weights.items()
    }
    fields = {
        "use_lora": True,
        "lora_rank": 4,
        "lora_target_modules": "q_proj,v_proj",
        "lora_target_parameters": [f"mlp.experts.{name}" for name in STACKS],
        "learning_rate": 1e-3,
    }
    result = runs.train(tmp_path, model=model, trackers=[], save_steps=None, **fields)
    losses = [loss for _, loss, _ in runs.trajectory(tmp_path)]
    assert losses[-1] < losses[0]
    there = dict(model.named_parameters())
    for name, before in codes.items():
        now = next(value for path, value in there.items() if without_wraps(path) == name)
        assert torch.equal(now.cpu(), before)
    merge(result.model_dir, tmp_path / "merged")
    whole = load_model(tmp_path / "merged", torch.float32)
    assert not dict(packed_modules(whole)) and "quantization_config" not in merged_config(tmp_path)
    ids = torch.randint(0, 300, (2, 9))
    # Every token takes all experts: the rounding to 16 bits may decide between two that are nearly
    # tied, and then the logits differ by more than the rounding.
    for compared in (model, whole):
        routers = [module for module in compared.modules() if hasattr(module, "top_k")]
        assert len(routers) == compared.config.num_hidden_layers
        for router in routers:
            assert router.top_k < router.num_experts
            router.top_k = router.num_experts
    with torch.no_grad():
        expected = model.cpu().eval()(ids).logits
        found = whole.eval()(ids).logits
    assert (found - expected).norm() < 0.02 * expected.norm()


def merged_config(folder):
    return json.loads((folder / "merged" / "config.json").read_text())


def without_wraps(path):
    return ".".join(part for part in path.split(".") if part != "base_layer")


def test_merged_in_memory_it_is_plain(checkpoint):
    model = load_model(checkpoint, torch.float32)
    apply_lora(model, LoRAConfig(rank=2, target_modules=["q_proj"]))
    model.merge_and_unload()
    plain = by_class(checkpoint)
    found = dict(model.named_parameters())
    assert not any(isinstance(module, PackedExperts) for module in model.modules())
    assert all(torch.equal(found[name], value) for name, value in plain.named_parameters())


@pytest.mark.slow
def test_its_values_survive_in_gguf(checkpoint, tmp_path):
    """In the file's own MXFP4 every expert has the very values of the checkpoint."""
    gguf = pytest.importorskip("gguf")
    model = load_model(checkpoint, torch.float32)
    apply_lora(model, LoRAConfig(rank=2, target_modules=["q_proj"]))
    model.merge_and_unload().save_pretrained(tmp_path / "whole")
    tiny.tokenizer().save_pretrained(tmp_path / "whole")
    (made,) = export(tmp_path / "whole", ["gguf-mxfp4"], tmp_path / "exported")
    reader = gguf.GGUFReader(made.path)
    down = next(t for t in reader.tensors if t.name == "blk.0.ffn_down_exps.weight")
    assert down.tensor_type == gguf.GGMLQuantizationType.MXFP4
    values = torch.from_numpy(gguf.quants.dequantize(down.data, down.tensor_type))
    expected = dict(by_class(checkpoint).named_parameters())
    expected = expected["model.layers.0.mlp.experts.down_proj"]
    assert torch.equal(values.view(expected.mT.shape), expected.mT)
