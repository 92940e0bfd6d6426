"""Documents longer than a model has positions, or than it was made for."""

import contextlib
import logging

import pytest
import torch

import runs
import tiny
from chronicals.models import check_positions
from comparison import equal
from families import FAMILIES, VOCABULARY, build


def runs_with(model, length):
    try:
        model.eval()(input_ids=torch.randint(1, VOCABULARY, (1, length)), use_cache=False)
    except (IndexError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_refused_where_it_fails_by_itself(family, caplog):
    model = build(family)
    fails = not runs_with(model, 129)
    state = torch.get_rng_state()
    caplog.clear()
    check_positions(model, 128)
    assert not caplog.text
    with (
        pytest.raises(ValueError, match="up to 129: set max_seq_length to at most 128")
        if fails
        else contextlib.nullcontext()
    ):
        check_positions(model, 129)
    stretched = family in ("ministral3", "gpt_oss")
    told = hasattr(model.config, "max_position_embeddings") and not fails and not stretched
    assert (
        "made for 128 positions (max_position_embeddings), documents have up to 129" in caplog.text
    ) == told
    assert fails == (family == "gpt2") and equal(state, torch.get_rng_state())


def test_pefts_wrapping_is_looked_through():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build("gpt2"), peft.LoraConfig(r=2, target_modules=["c_attn"]))
    with pytest.raises(ValueError, match="GPT2LMHeadModel is made for 128 positions.*at most 128"):
        check_positions(model, 129)


def test_a_class_that_knows_no_bound_may_say_so_with_a_negative_one(caplog):
    model = build("llama")
    model.config.max_position_embeddings = -1
    check_positions(model, 1000)
    assert not caplog.text


def test_a_table_with_places_before_the_first_position():
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
    }
    model = OPTForCausalLM(OPTConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=128))
    assert runs_with(model, 128) and not runs_with(model, 129)
    with pytest.raises(ValueError, match="OPTForCausalLM is made for 128 positions"):
        check_positions(model, 129)


@pytest.mark.parametrize(("longest", "told"), [(512, False), (513, True)])
def test_stretched_rotary_positions_reach_further(longest, told, caplog):
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    check_positions(build("llama", rope_parameters=rope), longest)
    assert ("LlamaForCausalLM is made for 128 positions" in caplog.text) == told


def test_a_run_tells_and_a_class_without_a_twin_is_taken(tmp_path, caplog):
    rows = [{"text": "the answer to life is forty two " * 9}]
    with caplog.at_level(logging.WARNING):
        runs.train(tmp_path, rows, model=tiny.llama(max_position_embeddings=64), max_steps=1)
    assert "LlamaForCausalLM is made for 64 positions" in caplog.text
