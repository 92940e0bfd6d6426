"""Sizes and router weights of a native mixture, each trial's model made anew."""

import pytest
import torch
import yaml
from scripted import recipe, tuner

import tiny
from chronicals.config import ConfigurationError
from chronicals.models import load_model
from chronicals.tuning.default_space import default_space
from chronicals.tuning.mixture import make_model
from chronicals.tuning.space import SearchSpace
from mixtures import mixture

pytest.importorskip("optuna")


@pytest.fixture
def native(tmp_path):
    mixture(random=False, vocab_size=300).save_pretrained(tmp_path / "native")
    tiny.tokenizer().save_pretrained(tmp_path / "native")
    return tmp_path / "native"


def of(native, **fields):
    return recipe(native.parent, model=str(native), objective="pretraining", **fields)


@pytest.mark.slow
def test_a_model_of_other_sizes_is_made_with_the_seed(native, tmp_path):
    sizes = {"num_experts": 6, "kv_lora_rank": 24, "num_shared_experts": 2}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_model(of(native), sizes, tmp_path / name, seed)
    a, b, c = (load_model(str(tmp_path / name), torch.float32) for name in "abc")
    assert {name: getattr(a.config, name) for name in sizes} == sizes
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    assert not all(torch.equal(x, y) for x, y in zip(a.parameters(), c.parameters()))
    assert (tmp_path / "a" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    "dimension, said",
    [
        ("moe.expert_count", "has no such size"),
        ("moe.vocab_size", "has no such size"),
    ],
)
def test_a_size_that_there_is_not(native, dimension, said):
    with pytest.raises(ConfigurationError, match=said):
        SearchSpace.of({dimension: [1, 2]}, of(native), "loss")


def test_weights_that_are_trained_are_not_thrown_away(native, tmp_path):
    tuned = {"moe.num_experts": [4, 8]}
    (native / "chronicals.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="is trained, and a model of another size"):
        SearchSpace.of(tuned, of(native), "loss")
    tiny.llama().save_pretrained(tmp_path / "llama")
    with pytest.raises(ConfigurationError, match="is no native mixture"):
        SearchSpace.of(tuned, of(tmp_path / "llama"), "loss")


def test_the_space_of_a_mixture_has_its_sizes_and_router_weights(native):
    space = default_space(of(native), "loss")
    sizes = {name for name in space if name.startswith("moe.")}
    assert sizes == {
        "moe.hidden_size",
        "moe.num_experts",
        "moe.kv_lora_rank",
        "moe.num_shared_experts",
        "moe.lookahead_tokens",
    }
    assert {"router.balance", "router.temporal", "router.token_ahead"} <= space.keys()
    assert SearchSpace.of(space, of(native), "loss").own()["moe.num_experts"] == 5
    assert not any(name.startswith("moe.") for name in default_space(of(native.parent), "loss"))


@pytest.mark.slow
def test_each_trial_trains_a_model_of_its_own(native, tmp_path):
    tune = {"moe.num_experts": [4, 8, 16], "learning_rate": [1e-4, 1e-2, "log"]}
    own = {"model": str(native), "objective": "pretraining"}
    tuned = tuner(tmp_path, tune, own, trials=5, repeats=1)
    tuned.run()
    for trial in tuned.study.trials():
        folder = tuned.study.folder_of(trial)
        read = yaml.safe_load((folder / "run" / "resume.yaml").read_text())
        assert read["model"] == str(folder / "initial-model")
        assert not (folder / "initial-model").exists()  # the trial has ended
    said = tuned.apply(tmp_path / "recipe.yaml")
    best = tuned.results().best[0].trial
    written = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert said.startswith("written"), said
    model = load_model(written["model"], torch.float32)
    assert model.config.num_experts == best.params["moe.num_experts"]


@pytest.mark.slow
def test_sizes_that_do_not_fit_each_other_are_refused(native, tmp_path):
    tune = {"moe.num_experts": [8, 1]}  # of which a token gets two
    own = {"model": str(native), "objective": "pretraining"}
    tuned = tuner(tmp_path, tune, own, trials=2)
    tuned.run()
    last = tuned.study.trials()[1]
    assert last.state == "refused" and "num_experts_per_tok=2: must be between" in last.reason
