"""Runs that adapt stacked experts and the embedding: resumed bit-equal, continued, and the model
that PEFT loads.
"""

import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file

import families
import runs
from chronicals.config import ConfigurationError
from chronicals.lora import adapters, load_adapter
from chronicals.models import load_model
from comparison import equal

EXPERTS = "mlp.experts.gate_up_proj,mlp.experts.down_proj"
FIELDS = {
    "use_lora": True,
    "lora_rank": 4,
    "save_steps": 3,
    "trackers": [],
    "learning_rate": 1e-2,
    "mixed_precision": "bf16",
    "lora_target_modules": "q_proj,embed_tokens",
    "lora_target_parameters": EXPERTS,
}


def base(folder, name="qwen3_moe"):
    if not (folder / "base").exists():
        families.mixture(name, vocab_size=300, max_position_embeddings=512).save_pretrained(
            folder / "base"
        )
    return load_model(folder / "base", torch.bfloat16)


def stored(folder):
    return load_file(folder / "run" / "model" / "adapter_model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_a_resumed_run_ends_bit_equal(tmp_path, name, caplog):
    caplog.set_level(logging.INFO)
    whole = tmp_path / "whole"
    broken = tmp_path / "broken"
    model = base(tmp_path, name)
    result = runs.train(whole, model=model, **FIELDS)
    assert "experts have no adapters" not in caplog.text and "got no gradient" not in caplog.text
    assert "follow in step 2" in caplog.text
    first = "run/checkpoints/step-00000003"
    shutil.copytree(whole / first, broken / first)
    runs.train(broken, model=base(tmp_path, name), resume=True, **FIELDS)
    once = stored(whole)
    twice = stored(broken)
    assert len(once) == 4 + 8 + 2 and once.keys() == twice.keys()
    assert all(equal(once[key], twice[key]) for key in once)
    losses = [loss for _, loss, _ in runs.trajectory(whole)]
    assert losses[-1] < 0.9 * losses[0] and result is not None
    plain = base(tmp_path, name)
    for key, weight in plain.state_dict().items():
        inside = key.replace("experts.", "experts.base_layer.base_layer.").replace(
            "embed_tokens.", "embed_tokens.base_layer."
        )
        assert equal(
            model.state_dict()[inside.replace("q_proj.", "q_proj.base_layer.")].cpu(), weight
        ), key


@pytest.mark.slow
def test_peft_loads_what_a_run_leaves(tmp_path):
    peft = pytest.importorskip("peft", "0.20", reason="PEFT 0.19 loads no adapter over experts")
    model = base(tmp_path)
    runs.train(tmp_path, model=model, **FIELDS)
    other = peft.PeftModel.from_pretrained(
        base(tmp_path).float(), tmp_path / "run" / "model"
    ).eval()
    ids = torch.randint(1, 300, (2, 13))
    with torch.no_grad():
        expected = other(ids).logits
        got = model.float().cpu().eval()(ids).logits
    assert (got - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.slow
def test_a_run_continues_the_adapters_of_a_folder(tmp_path):
    first = tmp_path / "first"
    second = tmp_path / "second"
    runs.train(first, model=base(tmp_path), **FIELDS)
    model = load_adapter(base(tmp_path), first / "run" / "model")
    runs.train(second, model=model, **{**FIELDS, "learning_rate": 1e-3})
    assert stored(first).keys() == stored(second).keys()
    assert any(not equal(tensor, stored(second)[key]) for key, tensor in stored(first).items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [{"lora_target_parameters": "mlp.experts.down_proj"}, {"lora_target_modules": "q_proj"}],
    ids=str,
)
def test_adapters_that_are_there_are_not_others(tmp_path, asked):
    first = tmp_path / "first"
    runs.train(first, model=base(tmp_path), **FIELDS)
    model = load_adapter(base(tmp_path), first / "run" / "model")
    with pytest.raises(
        ConfigurationError, match=f"{next(iter(asked))}=.*the model has adapters already"
    ):
        runs.train(tmp_path / "second", model=model, **{**FIELDS, **asked})


@pytest.mark.slow
def test_the_embedding_alone(tmp_path, caplog):
    """LoRA+, which is on by default, has no B of a linear layer to act on."""
    fields = {**FIELDS, "lora_target_modules": "embed_tokens", "lora_target_parameters": None}
    model = base(tmp_path)
    runs.train(tmp_path, model=model, **fields)
    assert [path for path, _ in adapters(model)] == ["model.embed_tokens"]
    assert (
        all(tensor.any() for tensor in stored(tmp_path).values())
        and "got no gradient" not in caplog.text
    )


@pytest.mark.slow
def test_parameters_alone(tmp_path):
    model = base(tmp_path)
    runs.train(tmp_path, model=model, **{**FIELDS, "lora_target_modules": "none"})
    assert {layer.parameter_name for _, layer in adapters(model)} == {"gate_up_proj", "down_proj"}
    assert all(tensor.any() for tensor in stored(tmp_path).values())
