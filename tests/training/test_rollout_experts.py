"""How many experts differ between the draws of a mixture and the trainer's pass."""

import json

import pytest
import torch

import families
import mixtures
import rollouts
from chronicals.models.routed_experts import routed_experts
from chronicals.moe.routers import mixture_layers
from chronicals.training.rollouts.rollout_maker import RolloutMaker
from chronicals.training.rollouts.token_passes import TokenPasses
from chronicals.training.run.callbacks import read_metrics

MODELS = {
    "native": lambda: mixtures.mixture(vocab_size=300, num_hidden_layers=2),
    "qwen3_moe": lambda: families.mixture("qwen3_moe", vocab_size=300),
}


def metrics(folder):
    return [line for line in read_metrics(folder / "run" / "metrics.jsonl") if "loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_none_differs_where_nothing_rounds_differently(name, tmp_path):
    section = {"updates": 2, "prompts": 3}
    model = MODELS[name]()
    rollouts.train(tmp_path, model=model, section=section, max_steps=4)
    shown = [line["experts/differ"] for line in metrics(tmp_path) if "experts/differ" in line]
    assert shown == [0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_those_of_another_router_are_counted(name, tmp_path, monkeypatch):
    """The router of the last layer confuses two experts in the trainer's pass."""
    passes = TokenPasses.experts
    compared = RolloutMaker._experts_that_differ
    seen = []

    def confused(self, groups):
        gate = mixture_layers(self.model.model)[-1].gate
        with torch.no_grad():
            gate[[1, 2]] = gate[[2, 1]]
            seen.append(passes(self, groups))
            gate[[1, 2]] = gate[[2, 1]]
        return seen[-1]

    def noting(self, rollout, answers):
        seen.append([one.experts for one in answers])
        return compared(self, rollout, answers)

    monkeypatch.setattr(TokenPasses, "experts", confused)
    monkeypatch.setattr(RolloutMaker, "_experts_that_differ", noting)
    rollouts.train(tmp_path, model=MODELS[name](), max_steps=1)
    drawn, passed = seen
    assert sum(one is not None for one in drawn) == len(passed) == 2 * 4
    differ, count = 0, 0
    for number, others in passed.items():
        for mine, theirs in zip(drawn[number].flatten(0, 1), others.flatten(0, 1), strict=True):
            differ += len(set(mine.tolist()) - set(theirs.tolist()))
            count += len(mine)
    assert len(routed_experts(MODELS[name]())) == 2 and 0 < differ < count / 2
    (line,) = metrics(tmp_path)
    assert line["experts/differ"] == pytest.approx(differ / count)


@pytest.mark.slow
def test_a_dense_model_shows_nothing(tmp_path):
    rollouts.train(tmp_path, max_steps=1)
    assert "experts/differ" not in json.dumps(metrics(tmp_path))
