"""A weight format that nothing knows, made here, passes through a run, merging, export and a plan:
outside of ``quantization/`` nobody asks which format a weight has.
"""

import logging
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import families
import runs
import tiny
from chronicals.distributed import can_be_cut, shard_frozen
from chronicals.distributed import frozen_shards as shards
from chronicals.distributed.mesh import Mesh
from chronicals.export import export
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.memory import decoder_layers
from chronicals.models import count_values
from chronicals.models.four_bits import describe_packed, linear_layers, stacked_experts
from chronicals.planning import Machines, plan
from chronicals.quantization import PackedExperts, PackedWeight, packed_modules

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@dataclass(frozen=True)
class Bytes(PackedWeight):
    """Eight bits a value and a scale for each row: ``W[n, k] = scale[n] · (code[n, k] − 128)``."""

    codes: torch.Tensor
    scale: torch.Tensor
    shape: tuple[int, int]
    dtype: torch.dtype

    PARTS: ClassVar = ("scale",)
    DIVIDED: ClassVar = ("codes", "scale")

    @classmethod
    def of(cls, weight):
        scale = weight.float().abs().amax(1).clamp(min=1e-6) / 127
        codes = (weight.float() / scale[:, None]).round().add(128).to(torch.uint8)
        return cls(codes, scale, tuple(weight.shape), weight.dtype)

    @property
    def options(self):
        return ()

    @property
    def tensors(self):
        return {"codes": self.codes, "scale": self.scale}

    @classmethod
    def of_tensors(cls, options, tensors, shape, dtype):
        codes, scale = tensors
        return cls(codes, scale, shape, dtype)

    def into(self, out):
        values = (self.codes.view(self.shape).float() - 128) * self.scale[:, None]
        return out.copy_(values)

    @property
    def label(self):
        return "bytes of a test"


def packed(model):
    """The model with linear layers and experts of its decoder layers in ``Bytes``."""
    for path, layer in linear_layers(model).items():
        weight = Bytes.of(layer.weight.detach())
        model.set_submodule(path, weight.layer(layer.bias))
    for path, experts in stacked_experts(model).items():
        model.set_submodule(path, PackedExperts.of(experts, Bytes.of))
    return model


def plain(model):
    """The model of the values that ``packed`` makes its products with."""
    packed(model)
    for path, module in list(packed_modules(model)):
        model.set_submodule(path, module.plain())
    return model


def mixture():
    return families.mixture("qwen3_moe", vocab_size=300, max_position_embeddings=512)


MODELS = {"llama": (tiny.llama, None), "mixture": (mixture, EXPERTS)}


@pytest.mark.slow
def test_a_layer_is_the_plain_layer_of_its_values(device):
    linear = nn.Linear(37, 29, device=device)
    ours = Bytes.of(linear.weight.detach()).layer(linear.bias)
    x = torch.randn(3, 37, device=device, requires_grad=True)
    dy = torch.randn(3, 29, device=device)
    found, expected = ([y := of(x), *torch.autograd.grad(y, x, dy)] for of in (ours, ours.plain()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), ours(x))
    again = Bytes.of(torch.randn(29, 37, device=device)).layer(torch.zeros(29, device=device))
    again.load_state_dict(ours.state_dict())
    assert torch.equal(again(x), ours(x))
    update = torch.randn(29, 37, device=device)
    updated = ours.packed.with_update(lambda weight: weight + update)
    assert torch.equal(updated, ours.packed.dense() + update)
    assert ours.packed.bytes == 29 * 37 + 4 * 29


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_run_is_that_over_its_values(name, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    build, parameters = MODELS[name]
    fields = {
        "use_lora": True,
        "lora_rank": 4,
        "lora_target_modules": "q_proj,o_proj",
        "lora_target_parameters": parameters,
        "max_steps": 3,
        "save_steps": None,
        "trackers": [],
    }
    model = packed(build())
    codes = {key: p.clone() for key, p in model.named_parameters() if p.dtype == torch.uint8}
    runs.train(tmp_path / "ours", model=model, **fields)
    assert "bytes of a test" in caplog.text
    there = {without_wraps(key): p for key, p in model.named_parameters()}
    assert all(torch.equal(there[key].cpu(), before) for key, before in codes.items())
    runs.train(tmp_path / "plain", model=plain(build()), **fields)
    ours, expected = (runs.trajectory(tmp_path / kind) for kind in ("ours", "plain"))
    for (step, *one), (_, *two) in zip(ours, expected, strict=True):
        assert one == pytest.approx(two, rel=1e-5 if step == 1 else 2e-4), step


def without_wraps(path):
    return ".".join(part for part in path.split(".") if part != "base_layer")


@pytest.mark.parametrize("name", MODELS)
def test_merged_it_is_its_values_and_the_adapter(name):
    build, parameters = MODELS[name]
    config = LoRAConfig(
        rank=2, dropout=0.0, target_modules=["q_proj"], target_parameters=parameters
    )
    found = []
    for way in (packed, plain):
        torch.manual_seed(3)
        model = apply_lora(way(build()), config)
        for key, parameter in model.named_parameters():
            if key.endswith("lora_B"):
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(key)))
        found.append(dict(model.merge_and_unload().named_parameters()))
    ours, expected = found
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_it_is_exported_once_it_is_merged(tmp_path):
    gguf = pytest.importorskip("gguf")
    model = packed(tiny.llama())
    values = dict(packed_modules(model))["model.layers.1.mlp.down_proj"].packed.dense()
    with pytest.raises(ValueError, match="has layers in bytes of a test, which no file"):
        describe_packed(model)
    merged = apply_lora(model, LoRAConfig(rank=2, target_modules=["q_proj"])).merge_and_unload()
    (made,) = export(merged, "gguf-f32", tmp_path, tokenizer=tiny.tokenizer())
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(made.path).tensors}
    assert torch.equal(torch.from_numpy(tensors["blk.1.ffn_down.weight"].copy()), values)


@pytest.mark.slow
def test_a_plan_counts_its_values(tmp_path):
    fields = {"lora_rank": 4, "use_lora": True, "mixed_precision": "bf16", "batch_size": 1}
    config = runs.config(tmp_path, **fields)
    machines = Machines(80 * 10**9, 8, 370 * 10**9, 46 * 10**9, flops=600 * 10**12)
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6}
    plans = []
    for way in (packed, plain):
        with torch.device("meta"):
            model = way(tiny.llama(**sizes))
        apply_lora(model, LoRAConfig(rank=4, target_modules=["q_proj"]))
        plans.append((count_values(model), plan(model, config, 2, machines)))
    (values, ours), (expected, dense) = plans
    assert values == expected
    assert ours.computing == pytest.approx(dense.computing) and ours.held < dense.held


def test_its_rows_are_divided_among_ranks(monkeypatch):
    weight = Bytes.of(torch.randn(12, 8))
    parts = [weight.rows(rank, 3).dense() for rank in range(3)]
    assert torch.equal(torch.cat(parts), weight.dense()) and weight.rows(0, 5) is None
    model = packed(tiny.llama()).requires_grad_(False)
    layers = decoder_layers(model)
    assert all(can_be_cut(layer, 2) for _, layer in shards.frozen_linears(layers))
    x = torch.randn(2, 64)
    expected = model.model.layers[0].self_attn.q_proj(x)

    def gather(out, own, group=None, async_op=False):
        out.view(2, -1).copy_(own)
        return Done()

    class Done:
        def wait(self):
            pass

    monkeypatch.setattr(shards.dist, "all_gather_into_tensor", gather)
    shard_frozen(layers, Mesh(0, 2), 2, torch.device("cpu"), torch.float32)
    found = model.model.layers[0].self_attn.q_proj(x)
    assert torch.equal(found[:, :32], expected[:, :32]), "the rows of this rank"
    assert "bytes of a test, 1/2 of the rows here" in repr(model)
