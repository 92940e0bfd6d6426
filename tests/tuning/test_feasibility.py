"""What the plan drops before it is run."""

import pytest
from scripted import recipe

import tiny
from chronicals.tuning.feasibility import why_too_large


@pytest.fixture
def model(tmp_path):
    tiny.llama().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def why(tmp_path, model, **fields):
    return why_too_large(recipe(tmp_path, model=model, max_seq_length=128, **fields))


@pytest.mark.slow
def test_a_run_larger_than_the_card_is_dropped(tmp_path, model):
    assert why(tmp_path, model, gpu_memory="8GB") is None
    said = why(tmp_path, model, gpu_memory="1MB")
    assert said.startswith("it would hold ") and said.endswith("and the card has 0.0")
    said = why(tmp_path, model, gpu_memory="1MB", fit="settings")
    assert said.startswith("no settings that change no result fit")


def test_on_the_cpu_nothing_is_dropped(tmp_path):
    assert why(tmp_path, "no such model") is None
