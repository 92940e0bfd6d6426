"""Documents beyond the positions of a model: refused with the field to set, or stretched by YaRN."""

import copy
import logging

import pytest
import torch

import families
import runs
import tiny
from chronicals.models import reach_positions
from chronicals.models import rope_scaling as module
from chronicals.models.rope_scaling import scaling_factor
from mutants import mutant


def test_it_is_refused_with_the_field_and_its_factor():
    model = families.build("llama")
    before = copy.deepcopy(model.config.to_dict())
    reach_positions(model, 128, None)
    with pytest.raises(ValueError, match=r"set rope_scaling='yarn' \(its factor would be 3\)"):
        reach_positions(model, 300, None)
    assert model.config.to_dict() == before


def test_off_trains_beyond_with_a_warning(caplog):
    reach_positions(families.build("llama"), 300, "off")
    assert "made for 128 positions" in caplog.text


def test_yarn_is_that_of_transformers(caplog):
    """A model loaded with such a configuration has the same states."""
    model = families.build("qwen2")
    rope = {**model.config.rope_parameters, "rope_type": "yarn", "factor": 3.0}
    rope["original_max_position_embeddings"] = 128
    theirs = families.build("qwen2", rope_parameters=rope, max_position_embeddings=384)
    theirs.load_state_dict(model.state_dict())
    with caplog.at_level(logging.INFO):
        reach_positions(model, 300, "yarn")
    assert "yarn with factor 3, from 128 to 384 positions" in caplog.text
    assert model.config.max_position_embeddings == 384
    assert model.config.rope_parameters == theirs.config.rope_parameters
    ids = torch.randint(1, families.VOCABULARY, (1, 300))
    plain = families.build("qwen2")
    plain.load_state_dict(model.state_dict())
    states = [one(input_ids=ids).logits for one in (model, theirs, plain)]
    assert torch.equal(states[0], states[1]) and not torch.allclose(states[0], states[2])


def test_yarn_that_reaches_is_left_and_one_that_does_not_grows():
    model = families.build("llama")
    reach_positions(model, 128, "yarn")
    assert model.config.rope_parameters["rope_type"] == "default"
    for longest, factor in ((200, 2.0), (256, 2.0), (700, 6.0)):
        reach_positions(model, longest, "yarn")
        assert model.config.rope_parameters["factor"] == factor
    assert model.config.rope_parameters["original_max_position_embeddings"] == 128


LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
"""As of Llama 3.1, whose model was trained with 16 times as many positions."""


def llama31(**changes):
    rope = {**LLAMA31, **changes}
    return families.build("llama", rope_parameters=rope, max_position_embeddings=256)


def test_the_table_of_llama_3_is_a_limit_of_its_training_alone():
    """transformers computes its frequencies for any position; the factor is within the 256."""
    model = llama31()
    reach_positions(model, 256, None)
    with pytest.raises(
        ValueError, match=r"rope_scaling='llama3' \(its factor would be 24\), rope_s"
    ):
        reach_positions(model, 669, None)
    with pytest.raises(ValueError, match="rope_scaling='off' to train beyond them as they are"):
        reach_positions(model, 669, None)
    assert model.config.rope_parameters == LLAMA31
    ids = torch.randint(1, families.VOCABULARY, (1, 669))
    reach_positions(model, 669, "off")
    assert model(input_ids=ids).logits.isfinite().all()


def compare_with_theirs(reach, caplog):
    model = llama31()
    theirs = llama31(factor=24.0)
    theirs.load_state_dict(model.state_dict())
    with caplog.at_level(logging.INFO):
        reach(model, 669, "llama3")
    assert "llama3 with factor 24, from 256 to 768 positions" in caplog.text
    assert model.config.rope_parameters == {**LLAMA31, "factor": 24.0}
    ids = torch.randint(1, families.VOCABULARY, (1, 669))
    states = [one(input_ids=ids).logits for one in (model, theirs, llama31())]
    assert torch.equal(states[0], states[1])
    reach(model, 768, None)
    # the slowest pair turns over 768 positions as far as it did over 256
    slow = [one.get_decoder().rotary_emb.inv_freq[-1].item() for one in (model, llama31())]
    assert slow[0] * 768 == pytest.approx(slow[1] * 256)


def test_llama_3_grows_its_own_factor(caplog):
    compare_with_theirs(reach_positions, caplog)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "factor * math.ceil(longest / int(text.max_position_embeddings))",
            "1.0 * math.ceil(longest / int(text.max_position_embeddings))",
        ),
        ("type(decoder.rotary_emb)(config=text).to(device)", "decoder.rotary_emb"),
    ],
)
def test_planted_faults_of_llama_3_are_found(old, new, caplog):
    broken = mutant(module, old, new)
    with pytest.raises(AssertionError):
        compare_with_theirs(broken.reach_positions, caplog)


def test_a_scaling_starts_from_its_own_frequencies():
    with pytest.raises(
        ValueError, match="rope_type llama3.*plain frequencies; set rope_scaling='llama3'"
    ):
        reach_positions(llama31(), 1000, "yarn")
    with pytest.raises(ValueError, match="rope_type default.*set rope_scaling='yarn'"):
        reach_positions(families.build("llama"), 1000, "llama3")
    gemma = families.build("gemma3")
    with pytest.raises(ValueError, match="no single rotary embedding"):
        reach_positions(gemma, 1000, "yarn")


def test_a_table_of_positions_ends_whatever_is_asked_for():
    with pytest.raises(ValueError, match="set max_seq_length to at most 128"):
        reach_positions(families.build("gpt2"), 129, "off")


@pytest.mark.slow
def test_a_run_stretches_and_its_model_says_so(tmp_path):
    rows = [{"text": "the answer to life is forty two " * 9}]
    model = tiny.llama(max_position_embeddings=64)
    with pytest.raises(ValueError, match="rope_scaling='yarn'"):
        runs.train(tmp_path / "refused", rows, model=model, max_steps=1)
    runs.train(tmp_path / "run", rows, model=model, max_steps=1, rope_scaling="yarn")
    factor = scaling_factor(model, 65)
    assert factor == 2 and model.config.rope_parameters["factor"] >= factor
