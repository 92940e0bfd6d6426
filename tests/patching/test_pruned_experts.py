"""Checkpoints whose experts were pruned, or made of a dense model: they load, and train patched
as their class does.
"""

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_patch import assert_same, batch, loss_and_gradients
from test_patched_experts import FAMILIES, FUSED_EXPERTS, build, layers_of
from torch import nn

import families
from chronicals import patch_model
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.model_shape import EXPERT_FIELDS
from chronicals.models import load_model

FEW = 4
KEPT = [1, 2, 4, 7]
"""Experts of a pruned checkpoint, and which of 8 they were."""

ROUTERS = re.compile(r".*\.(?:gate|router)\.(?:weight|bias|e_score_correction_bias)")


def prune(folder):
    """The files of a checkpoint: matrices of the others are left out, stacked ones and the
    router's rows are cut.
    """
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if one := re.fullmatch(r"(.*\.experts\.)(\d+)(\..*)", name):
            if int(one[2]) in KEPT:
                tensors[f"{one[1]}{KEPT.index(int(one[2]))}{one[3]}"] = tensor
        else:
            tensors[name] = (
                tensor[KEPT].contiguous()
                if ROUTERS.fullmatch(name) or ".experts." in name
                else tensor
            )
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    number = next(name for name in EXPERT_FIELDS if name in described)
    (folder / "config.json").write_text(json.dumps({**described, number: FEW}))


def trained_once(model, inputs):
    """Loss and gradients, and those after a step."""
    before = loss_and_gradients(model, **inputs)
    model(**inputs).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.3).step()
    return before, loss_and_gradients(model, **inputs)


def assert_as_its_class(load):
    """Of a model that ``load`` loads anew; all its layers of experts are replaced."""
    inputs = batch()
    plain = load().double()
    patched = load().double()
    assert patch_model(patched).counts()[FUSED_EXPERTS] == len(layers_of(plain)) > 0
    for expected, got in zip(
        trained_once(plain, inputs), trained_once(patched, inputs), strict=True
    ):
        assert_same(expected, got)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "GptOss", "DeepseekV3"])
def test_pruned_alike_in_all_layers(name, tmp_path):
    number = next(number for number in EXPERT_FIELDS if number in FAMILIES[name])
    whole = build(name, **{number: 8})
    whole.save_pretrained(tmp_path)
    prune(tmp_path)

    def load():
        model = load_model(tmp_path, torch.float32).train()
        model.set_experts_implementation("eager")
        return model

    layers = layers_of(load())
    assert all(len(layer.down_proj) == layer.num_experts == FEW for layer in layers)
    assert all(
        torch.equal(a.down_proj, b.down_proj[KEPT])
        for a, b in zip(layers, layers_of(whole), strict=True)
    )
    assert_as_its_class(load)


def upcycled(folder):
    """A Llama, and the folder of a Mixtral all of whose experts are its MLPs, whose router has
    only zeros: all are tied.
    """
    dense = families.build("llama")
    config = transformers.MixtralConfig(
        **{
            name: getattr(dense.config, name)
            for name in families.SIZES
            if hasattr(dense.config, name)
        },
        num_local_experts=FEW,
        num_experts_per_tok=2,
        rope_parameters=dense.config.rope_parameters,
        rms_norm_eps=dense.config.rms_norm_eps,
        tie_word_embeddings=dense.config.tie_word_embeddings,
        sliding_window=None,
    )
    model = transformers.MixtralForCausalLM(config)
    weights = dict(dense.state_dict())
    for number, layer in enumerate(dense.model.layers):
        own = {
            name: weights.pop(f"model.layers.{number}.mlp.{name}_proj.weight")
            for name in ("gate", "up", "down")
        }
        experts = f"model.layers.{number}.mlp.experts"
        weights[f"{experts}.gate_up_proj"] = torch.cat((own["gate"], own["up"])).repeat(FEW, 1, 1)
        weights[f"{experts}.down_proj"] = own["down"].repeat(FEW, 1, 1)
        weights[f"model.layers.{number}.mlp.gate.weight"] = torch.zeros(
            FEW, layer.mlp.gate_proj.in_features
        )
    model.load_state_dict(weights)
    model.save_pretrained(folder)
    return dense


@pytest.mark.slow
def test_made_of_a_dense_model(tmp_path):
    dense = upcycled(tmp_path)

    def load():
        model = load_model(tmp_path, torch.float32).train()
        model.set_experts_implementation("eager")
        return model

    assert_as_its_class(load)
    model = load()
    inputs = batch()
    patch_model(model)
    torch.testing.assert_close(model(**inputs).loss, dense(**inputs).loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "adapters"])
def test_pruned_in_one_layer_alone(adapted):
    """No configuration says so: it is done in memory. All layers are replaced, each with its own
    number of experts.
    """

    def load():
        torch.manual_seed(5)
        model = build("Qwen3Moe", num_experts=8)
        mlp = model.model.layers[1].mlp
        for module, names in (
            (mlp.experts, ("gate_up_proj", "down_proj")),
            (mlp.gate, ("weight",)),
        ):
            for name in names:
                setattr(module, name, nn.Parameter(getattr(module, name).detach()[KEPT]))
            module.num_experts = FEW
        if adapted:
            apply_lora(
                model,
                LoRAConfig(2, 2, 0.0, ["q_proj"], target_parameters=["gate_up_proj", "down_proj"]),
            )
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(parameter, std=0.3)
        return model

    assert [len(layer.down_proj) for layer in layers_of(load())] == [8, FEW]
    assert_as_its_class(load)
