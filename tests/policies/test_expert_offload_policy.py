"""``memory: [offload_experts]``: whole runs give the same bits, and what cannot be is refused."""

import json
import math
import re

import pytest
import torch

import chronicals
import families
import runs
import tiny
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.patching.patch import patch_parts
from chronicals.policies import Facts, decide
from chronicals.policies.exclusions import conditions, why_excluded
from chronicals.policies.needed_memory import expected_memory
from chronicals.policies.solver import fit_to_memory, settle_sharding
from chronicals.training import ChronicalsTrainer
from chronicals.ui.expert_io import ExpertIO

EXPERTS = ["gate_up_proj", "down_proj"]


def model(name="Qwen3Moe", **changes):
    torch.manual_seed(1)
    sizes = {"vocab_size": len(tiny.tokenizer()), "num_experts": 6, "hidden_size": 64}
    return families.routed(name, **sizes, **changes)


def train(folder, given, **changes):
    """A run of adapters on attention, routers and experts; its losses and what it learned."""
    usual = {
        "use_lora": True,
        "lora_rank": 4,
        "lora_dropout": 0.0,
        "lora_target_modules": ["q_proj", "v_proj"],
        "lora_target_parameters": [*(f"mlp.experts.{name}" for name in EXPERTS), "mlp.gate.weight"],
        "max_steps": 3,
        "use_cuda_graphs": False,  # on a card attention's gradients are summed in any order
    }
    patch_parts(given)
    runs.train(folder, model=given, **{**usual, **changes})
    return runs.trajectory(folder), {
        name: p.detach().clone() for name, p in given.named_parameters() if p.requires_grad
    }


def assert_same_run(expected, got):
    assert expected[0] == got[0] and expected[1].keys() == got[1].keys()
    for name, value in expected[1].items():
        assert torch.equal(value, got[1][name]), name


STREAMED = {"expert_memory": "0.06MiB"}
"""Five of twelve experts in fp32."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"quantization": "nf4"},
        {"memory": ["recompute_layers"]},
        {"router": {"balance": 0.1, "z": 0.01}},
    ],
    ids=str,
)
def test_a_run_gives_the_same_bits(tmp_path, fields):
    expected = train(tmp_path / "resident", model(), **fields)
    streamed = model()
    memory = [*fields.get("memory", []), "offload_experts"]
    size = "0.01MiB" if "quantization" in fields else STREAMED["expert_memory"]
    changes = {**fields, "memory": memory, "expert_memory": size}
    got = train(tmp_path / "streamed", streamed, **changes)
    assert_same_run(expected, got)
    assert all(loss > 0 for _, loss, _ in got[0])
    engine = streamed.offload.engine
    assert engine.slots < engine.experts and streamed.offload.report().misses > 0
    io = ExpertIO(tmp_path / "streamed" / "run" / "io.jsonl")
    streamed.offload.close()
    assert io.read_on() and io.steps > 0 and io.tiers["ram"].moved > 0
    lines = (tmp_path / "streamed" / "run" / "io.jsonl").read_text().splitlines()
    assert json.loads(lines[0]).keys() == {"t", "kind", "tier", "layer", "expert", "bytes", "us"}


def refused(folder, given, **changes):
    fields = {"use_lora": True, "memory": ["offload_experts"], **STREAMED, **changes}
    with pytest.raises(ConfigurationError) as error:
        ChronicalsTrainer(given, tiny.tokenizer(), runs.config(folder, **fields))
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_lora": False}, r"stay as they are, and use_lora=False trains all"),
        ({"sharding": "weights"}, r"sharding='weights': every process would hold a share"),
        ({"mixed_precision": "fp16"}, r"mixed_precision='fp16': runs under autocast"),
        (
            {"expert_memory": "0.04MiB"},
            r"expert_memory=40.96KiB: holds 3 .*the least that works is 48.00KiB",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(tmp_path, changes, words):
    given = model()
    message = refused(tmp_path, given, **changes)
    assert re.search(words, message), message
    given(torch.ones(1, 3, dtype=torch.int64))  # the model is as it was


def test_a_model_without_experts_is_refused(tmp_path):
    message = refused(tmp_path, tiny.llama())
    assert "LlamaForCausalLM has no routed experts" in message


def test_the_fields_belong_together():
    with pytest.raises(ConfigurationError, match="set expert_memory, such as 8GiB"):
        ChronicalsConfig(memory=["offload_experts"])
    with pytest.raises(ConfigurationError, match="is for experts in host memory"):
        ChronicalsConfig(expert_memory="8GiB")


def test_full_training_of_an_offloaded_model_is_refused(tmp_path):
    given = chronicals.offload(model(), vram="60KiB", ram="1GiB", device="cpu")
    with pytest.raises(ConfigurationError, match="chronicals.offload: the experts are in host"):
        runs.train(tmp_path, model=given, use_lora=False)
    given.offload.close()


def test_training_with_stand_ins_is_refused(tmp_path):
    given = model("Qwen2Moe")
    given = chronicals.offload(given, vram="90KiB", ram="1GiB", device="cpu", mode="soft")
    with pytest.raises(ConfigurationError, match="no gradients; offload the model with mode='exa"):
        runs.train(tmp_path, model=given, use_lora=True)
    given.offload.close()


def why_no_graphs(given, *running, **fields):
    """What excludes CUDA graphs beside policies that run; None if nothing does."""
    usual = {"use_lora": True, "lora_dropout": 0.0, "use_cuda_graphs": True}
    facts = Facts(ChronicalsConfig(**{**usual, **fields}), given, total=10**12)
    return why_excluded("use_cuda_graphs", conditions(facts) | {*running}, facts)


EXPERTS_AWAY = {"memory": ["offload_experts"], **STREAMED}
NOT_AS_GRAPHS = {
    "random numbers": ((), {"lora_dropout": 0.1}, "draw other random numbers: set lora_dropout=0"),
    "activations": (("activation_offload",), {}, "activations are copied to host memory"),
    "weights": (("offload_frozen_weights",), {}, "weights are copied from host memory"),
    "answers": ((), {"objective": "grpo"}, "objective='grpo' draws answers by graphs of its own"),
}


@pytest.mark.parametrize("name", NOT_AS_GRAPHS)
def test_what_streamed_experts_as_graphs_do_not_run_with(name):
    running, fields, words = NOT_AS_GRAPHS[name]
    given = model()
    assert why_no_graphs(given, *running, **fields) is None
    assert words in why_no_graphs(given, *running, **EXPERTS_AWAY, **fields)


def test_streamed_experts_run_as_graphs_unless_the_cpu_computes_some():
    assert why_no_graphs(model(), **EXPERTS_AWAY) is None
    for mode, words in (("exact", None), ("numerical", "the CPU computes a share of the experts")):
        given = chronicals.offload(model(), vram="60KiB", ram="1GiB", device="cpu", mode=mode)
        reason = why_no_graphs(given)
        assert reason is None if words is None else words in reason
        given.offload.close()


def test_streamed_experts_run_as_graphs_where_they_are_asked_for():
    config = ChronicalsConfig(use_lora=True, lora_dropout=0.0, **EXPERTS_AWAY)
    decision = decide(Facts(config, model(), total=10**12))["use_cuda_graphs"]
    assert not decision.runs and "use_cuda_graphs=True takes them" in decision.reason


def test_a_plan_counts_the_pool_of_graphs_with_streamed_experts():
    with torch.device("meta"):
        given = model()
    fields = {"use_lora": True, "lora_dropout": 0.0, "use_cuda_graphs": True}
    facts = Facts(ChronicalsConfig(**fields, **EXPERTS_AWAY), given, total=10**12)
    assert decide(facts)["use_cuda_graphs"].runs
    facts, sharding = settle_sharding(facts)
    assert fit_to_memory(facts, sharding, expected_memory(facts)[1]).pool > 0


@pytest.mark.slow
def test_merging_is_refused_and_says_what_to_do(tmp_path):
    given = model()
    train(tmp_path, given, memory=["offload_experts"], max_steps=1, **STREAMED)
    with pytest.raises(ValueError, match="load the base without offload, and merge there"):
        given.merge_and_unload()
    given.offload.close()


def test_the_estimate_has_slots_in_the_place_of_experts(tmp_path):
    from chronicals.models import present

    given = model()
    config = runs.config(tmp_path, use_lora=True)
    asked = runs.config(tmp_path, use_lora=True, memory=["offload_experts"], **STREAMED)
    given.requires_grad_(False)
    before = Facts.of(config, present(given))
    after = Facts.of(asked, present(given))
    experts = sum(p.nbytes for n, p in given.named_parameters() if "experts" in n)
    both = [expected_memory(facts)[1] for facts in (before, after)]
    saved = both[0].peak("nothing", 0).held - both[1].peak("nothing", 0).held
    assert saved == pytest.approx(experts - asked.expert_bytes, rel=0.02)


def test_the_estimate_has_the_dequantised_values_of_a_wave(tmp_path, monkeypatch):
    """Of experts in NF4; those in 16 or 32 bits are read as they are."""
    from chronicals.models import present
    from chronicals.models.four_bits import quantise_experts
    from chronicals.moe.offload import layers
    from chronicals.policies.expert_offload import OFFLOAD_EXPERTS
    from chronicals.policies.policy import MemoryLoad

    def beside_slots(given, memory):
        """Bytes that the policy counts beside the slots, and the engine."""
        fields = {"use_lora": True, "memory": ["offload_experts"], "expert_memory": memory}
        config = runs.config(tmp_path, **fields)
        size = config.expert_bytes
        streamed = chronicals.offload(given, vram=size, ram="1GiB", device="cpu")
        load = MemoryLoad(None, 2, 2, 0, 0, False)
        found = OFFLOAD_EXPERTS.bytes(Facts.of(config, present(streamed)), load)
        streamed.offload.close()
        return found.fixed - size, streamed.offload.engine

    def packed():
        given = model()
        quantise_experts(given)
        return given

    found, opened = beside_slots(packed(), "0.02MiB")
    layer = opened.layers[0]
    dense = sum(math.prod(form.shape[1:]) * 4 for form in layer.formats.values())
    assert opened.slots >= layer.count and found == dense * layer.count
    monkeypatch.setattr(layers, "DENSE_BYTES", 3 * dense + 1)
    assert beside_slots(packed(), "0.02MiB")[0] == 3 * dense
    assert beside_slots(model(), "0.06MiB")[0] == 0
