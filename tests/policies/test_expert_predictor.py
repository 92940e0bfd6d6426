"""``expert_predictor`` of a recipe: the engine has it, no bit depends on it, what cannot be is refused."""

import re

import pytest
import torch
from test_expert_offload_policy import STREAMED, assert_same_run, model, refused, train
from test_expert_offload_runs import ADAPTERS, NATIVE

import chronicals
import mixtures
import runs
import tiny
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.models import present
from chronicals.moe.lookahead.predictor import ExpertPredictor, HeadSizes
from chronicals.moe.offload.heads import FromHeads
from chronicals.moe.offload.prediction import Repeating
from chronicals.patching.patch import patch_parts
from chronicals.policies import Facts
from chronicals.policies.expert_offload import OFFLOAD_EXPERTS
from chronicals.policies.policy import MemoryLoad
from chronicals.training import ChronicalsTrainer

ASKED = {"memory": ["offload_experts"], **STREAMED}


def heads_in(folder, given, **sizes):
    """A folder with heads for a model, which name something."""
    made = ExpertPredictor.beside(
        given, HeadSizes(**{"furthest": 1, "tokens": 0, "rank": 2, **sizes})
    )
    torch.nn.init.normal_(made.layer_ahead.up, std=0.3)
    made.save(folder, {})
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"memory": ["recompute_layers"]}], ids=str)
def test_a_run_has_the_predictor_that_it_asks_for(tmp_path, fields):
    """And gives the same bits whatever that is."""
    expected = train(tmp_path / "resident", model(), **fields)
    folder = heads_in(tmp_path / "heads", model())
    memory = [*fields.get("memory", []), "offload_experts"]
    prefetched = {}
    for name, kind in (("last", Repeating), ("none", type(None)), (folder, FromHeads)):
        streamed = model()
        changes = {**ASKED, "memory": memory, "expert_predictor": name}
        got = train(tmp_path / kind.__name__, streamed, **changes)
        assert_same_run(expected, got)
        assert type(streamed.offload.engine.predictor) is kind
        layers = streamed.offload.report().layers
        prefetched[kind] = sum(layer.prefetched for layer in layers)
        streamed.offload.close()
    assert prefetched[type(None)] == 0 < min(prefetched[Repeating], prefetched[FromHeads])


@pytest.mark.slow
def test_a_run_of_the_native_model_with_its_own_heads(tmp_path):
    def native():
        given = mixtures.mixture(**NATIVE, lookahead_layers=1)
        patch_parts(given)
        return given

    def learned(folder, given, **fields):
        targets = {"lora_target_modules": ["q_proj", "o_proj", "kv_b_proj"]}
        runs.train(folder, model=given, **{**ADAPTERS, **targets, **fields})
        trained = {n: p.detach() for n, p in given.named_parameters() if p.requires_grad}
        return runs.trajectory(folder), trained

    expected = learned(tmp_path / "resident", native())
    streamed = native()
    got = learned(tmp_path / "streamed", streamed, **ASKED, expert_predictor="heads")
    assert_same_run(expected, got)
    assert isinstance(streamed.offload.engine.predictor, FromHeads)
    streamed.offload.close()


def test_what_cannot_be_is_refused(tmp_path):
    other = heads_in(tmp_path / "other", model(num_hidden_layers=3))
    for name, words in (
        ("oracle", r"^expert_predictor='oracle': expected 'last', 'none', 'heads', or a folder"),
        ("heads", r"^expert_predictor='heads': Qwen3MoeForCausalLM has no heads of its own"),
        (other, r"^expert_predictor='.*other': its heads are for .* \[3, 6, 64\]"),
    ):
        message = refused(tmp_path, model(), expert_predictor=name)
        assert re.search(words, message), message


def test_heads_whose_weights_are_missing_or_damaged_are_refused(tmp_path):
    folder = heads_in(tmp_path / "heads", model())
    weights = tmp_path / "heads" / "predictor.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    message = refused(tmp_path, model(), expert_predictor=folder)
    assert re.search(r"^expert_predictor='.*heads': .*no predictor is there", message), message
    weights.unlink()
    message = refused(tmp_path, model(), expert_predictor=folder)
    assert re.search(r"^expert_predictor='.*heads': expected .* or a folder", message), message


def test_it_belongs_to_experts_in_host_memory():
    for name in ("none", "heads"):
        with pytest.raises(
            ConfigurationError, match=f"^expert_predictor='{name}': is for experts in"
        ):
            ChronicalsConfig(expert_predictor=name)
    assert ChronicalsConfig(expert_predictor="last").expert_predictor == "last"  # the default
    assert (
        ChronicalsConfig(memory=["offload_experts"], expert_memory="8GiB").expert_predictor
        == "last"
    )


def test_a_model_that_was_offloaded_keeps_its_predictor(tmp_path):
    given = chronicals.offload(model(), vram="60KiB", ram="1GiB", device="cpu", predictor="none")
    message = refused(tmp_path, given, expert_predictor="last")
    assert message.startswith("expert_predictor='last': the model was offloaded with another one")
    assert "chronicals.offload(predictor='last')" in message
    for fields in ({}, {"expert_predictor": "none"}):
        config = runs.config(tmp_path, use_lora=True, **ASKED, **fields)
        ChronicalsTrainer(given, tiny.tokenizer(), config)
    assert given.offload.engine.predictor is None
    given.offload.close()


def test_a_plan_counts_heads_and_refuses_unknown_names(tmp_path):
    given = model()
    folder = heads_in(tmp_path / "heads", given)

    def planned(name):
        config = runs.config(tmp_path, use_lora=True, **ASKED, expert_predictor=name)
        return Facts.of(config, present(given))

    def fixed(name):
        load = MemoryLoad(None, 4, 4, 0, 0, False)
        return OFFLOAD_EXPERTS.bytes(planned(name), load).fixed

    assert fixed("last") == fixed("none")
    size = (tmp_path / "heads" / "predictor.safetensors").stat().st_size
    assert fixed(folder) - fixed("last") == size > 0
    assert "expected 'last'" in OFFLOAD_EXPERTS.why_not(planned("oracle"))
    assert OFFLOAD_EXPERTS.why_not(planned(folder)) is None
