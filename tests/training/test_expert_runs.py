"""Runs of mixtures whose experts are grouped products, beside runs in which the class computes
them.
"""

import logging

import pytest
import torch

import families
import runs
from chronicals.config import ConfigurationError
from chronicals.models import quantise_experts
from chronicals.patching import experts, experts_in_fp8, fp8_experts, layer_policies, patch_parts
from chronicals.policies import Facts, facts, fp8
from chronicals.policies.exclusions import why_excluded
from chronicals.policies.policy import Course
from comparison import equal


def trained(folder, name, monkeypatch, patched, **fields):
    """Losses and gradient norms of a run, of a model patched as on a card or not, and how often
    experts were computed by their products."""
    calls = []
    keep = experts._compute
    with monkeypatch.context() as patch:
        patch.setattr(experts, "_compute", lambda *given: (calls.append(1), keep(*given))[1])
        model = families.mixture(name, vocab_size=300, max_position_embeddings=512)
        if patched:
            patch_parts(model, whole_layers=True)
        else:
            fields = {**fields, "use_fused_kernels": False}  # a run patches by itself on a card
        runs.train(folder, model=model, trackers=[], save_steps=None, max_steps=3, **fields)
    return runs.trajectory(folder), len(calls)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_the_same_run(name, lora, tmp_path, monkeypatch):
    fields = {}
    if lora:
        fields = {
            "use_lora": True,
            "lora_rank": 4,
            "lora_dropout": 0.0,
            "lora_target_modules": "q_proj",
            "lora_target_parameters": "mlp.experts.gate_up_proj,mlp.experts.down_proj",
        }
    own, calls = trained(tmp_path / "own", name, monkeypatch, False, **fields)
    assert calls == 0
    fused, calls = trained(tmp_path / "fused", name, monkeypatch, True, **fields)
    assert calls >= 3 * 2 * 2  # steps, micro-steps, layers
    for (step, loss, norm), (other_step, other_loss, other_norm) in zip(own, fused, strict=True):
        assert step == other_step
        assert loss == pytest.approx(other_loss, rel=2e-5) and norm == pytest.approx(
            other_norm, rel=2e-4
        )


@pytest.fixture
def anywhere(set_constants, let_return):
    """Fused layers and FP8, which a run has on a card only, for products of every size."""
    let_return(facts, why_not_fused=None)
    set_constants(fp8_experts, MIN_MEAN_WIDTH=1, MIN_EXPERT_ROWS=1)


SIZES = {"vocab_size": 300, "max_position_embeddings": 512}


def mixture(name, **sizes):
    model = families.mixture(
        name, **SIZES, **({"moe_intermediate_size": 32} if name == "qwen3_moe" else {}), **sizes
    )
    patch_parts(model, whole_layers=True)
    return model


IN_EXPERTS = {
    "use_lora": True,
    "lora_rank": 4,
    "lora_dropout": 0.0,
    "lora_target_modules": "q_proj",
    "use_lora_plus": False,
    "lora_target_parameters": "mlp.experts.gate_up_proj,mlp.experts.down_proj",
}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.usefixtures("anywhere")
def test_in_fp8_it_trains_as_without(name, lora, tmp_path, caplog):
    fields = {
        "mixed_precision": "bf16",
        "max_steps": 12,
        "learning_rate": 3e-3,
        "trackers": [],
        "save_steps": None,
    }
    fields |= IN_EXPERTS if lora else {}
    runs.train(tmp_path / "without", model=mixture(name), **fields)
    with caplog.at_level(logging.INFO):
        model = mixture(name)
        runs.train(tmp_path / "with", model=model, use_fp8=True, **fields)
    assert (
        "use_fp8: both products of the experts of 2 layers; gradients of their weights in 16 bit"
        in caplog.text
    )
    without, ours = (runs.trajectory(tmp_path / arm) for arm in ("without", "with"))
    assert ours != without and ours[-1][1] < ours[0][1]
    for (_, loss, norm), (_, our_loss, our_norm) in zip(without, ours, strict=True):
        assert our_loss == pytest.approx(loss, rel=0.01) and our_norm == pytest.approx(
            norm, rel=0.1
        )
    assert not experts_in_fp8(model)  # the run is over


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "adapters"])
@pytest.mark.usefixtures("anywhere")
def test_in_fp8_policies_of_memory_change_nothing(lora, tmp_path, caplog):
    fields = {
        "mixed_precision": "bf16",
        "max_steps": 4,
        "use_fp8": True,
        "trackers": [],
        "save_steps": None,
    }
    fields |= IN_EXPERTS if lora else {}
    arms = {"kept": [], "again": ["recompute_layers"]}
    arms |= {"away": ["offload_frozen_weights", "recompute_layers"]} if lora else {}
    with caplog.at_level(logging.INFO):
        for arm, memory in arms.items():
            model = mixture("qwen3_moe")
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            runs.train(tmp_path / arm, model=model, memory=memory, **fields)
    kept, *others = (runs.trajectory(tmp_path / arm) for arm in arms)
    assert all(other == kept for other in others)
    if lora:
        assert len([line for line in caplog.messages if "GiB wait in host memory" in line]) == 1
        after = {
            name.replace(".base_layer", ""): p
            for name, p in model.named_parameters()
            if "lora_" not in name
        }
        assert all(equal(p, before[name].to(p)) for name, p in after.items())


@pytest.mark.gpu
@pytest.mark.parametrize("lora", [False, True], ids=["full", "adapters"])
@pytest.mark.usefixtures("anywhere")
def test_in_fp8_replayed_and_offloaded_is_as_usual(lora, tmp_path, caplog):
    """CUDA graphs, and activations that wait in host memory."""
    fields = {
        "mixed_precision": "bf16",
        "max_steps": 4,
        "use_fp8": True,
        "trackers": [],
        "save_steps": None,
    }
    fields |= IN_EXPERTS if lora else {}
    arms = {
        "usual": {"use_cuda_graphs": False},
        "graphs": {},
        "offloaded": {"activation_offload": True},
    }
    with caplog.at_level(logging.WARNING):
        for arm, changes in arms.items():
            runs.train(tmp_path / arm, model=mixture("qwen3_moe").cuda(), **fields, **changes)
    assert "could not be captured" not in caplog.text
    usual, *others = (runs.trajectory(tmp_path / arm) for arm in arms)
    for other in others:
        for (_, loss, norm), (_, other_loss, other_norm) in zip(usual, other, strict=True):
            assert other_loss == pytest.approx(loss, rel=2e-3) and other_norm == pytest.approx(
                norm, rel=2e-2
            )


@pytest.mark.slow
@pytest.mark.usefixtures("anywhere")
def test_experts_that_stay_in_16_bit_are_named(tmp_path, set_constants, caplog):
    set_constants(layer_policies, MIN_FP8_WIDTH=16)
    fields = {
        "mixed_precision": "bf16",
        "max_steps": 1,
        "use_fp8": True,
        "trackers": [],
        "save_steps": None,
    }
    set_constants(fp8_experts, MIN_EXPERT_ROWS=4096)
    runs.train(tmp_path / "few", model=mixture("qwen3_moe"), **fields)
    assert (
        "use_fp8: some experts stay in 16 bit: Qwen3MoeExperts (" in caplog.text
        and "rows an expert" in caplog.text
    )
    set_constants(layer_policies, MIN_FP8_WIDTH=4096)
    with pytest.raises(
        ConfigurationError,
        match="use_fp8=True.*no product.*its experts stay in 16 bit: Qwen3MoeExperts",
    ):
        runs.train(tmp_path / "none", model=mixture("qwen3_moe"), **fields)


@pytest.mark.slow
def test_in_fp8_without_fused_layers(tmp_path, let_return):
    """As gpt-oss, whose layers are of no known form: its experts suffice, unless they do not run
    as products either.
    """
    config = runs.config(tmp_path, use_fp8=True, mixed_precision="bf16")
    asked = Facts(config, families.mixture("gpt_oss", **SIZES), unfused="none were proved")
    course = Course(frozenset(), None, False, None)
    in_fp8 = fp8.ProductsInFP8()
    with pytest.raises(
        ConfigurationError,
        match="only fused decoder layers and experts have FP8 products, and none run",
    ):
        in_fp8.decide(asked, course)
    let_return(facts, input_device=torch.device("cuda", 0))
    let_return(fp8, lacks_fp8="")
    assert in_fp8.decide(asked, course).runs
    dense = Facts(config, families.build("llama"), unfused="not on a card")
    with pytest.raises(ConfigurationError, match="and none run"):
        in_fp8.decide(dense, course)
    reason = why_excluded("use_torch_compile", {"use_fp8"}, asked)
    assert reason == "weights in FP8 are kept between calls"


@pytest.mark.slow
def test_adapters_beside_experts_in_4_bits(tmp_path, monkeypatch):
    """They learn, the codes stay, and what is saved is the adapter alone."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
    model = families.mixture("qwen3_moe", vocab_size=300, max_position_embeddings=512, **sizes)
    quantise_experts(model)
    codes = {name: p.clone() for name, p in model.named_parameters() if p.dtype == torch.uint8}
    patch_parts(model, whole_layers=True)
    fields = {
        "use_lora": True,
        "lora_rank": 4,
        "lora_target_modules": "q_proj,o_proj",
        "mixed_precision": "bf16",
    }
    runs.train(tmp_path, model=model, trackers=[], save_steps=None, learning_rate=1e-2, **fields)
    losses = [loss for _, loss, _ in runs.trajectory(tmp_path)]
    assert losses[-1] < losses[0]
    there = dict(model.named_parameters())
    assert len(codes) == 4 and all(equal(there[name].cpu(), value) for name, value in codes.items())
    assert all(".lora_" in name for name in runs.weights(tmp_path))
