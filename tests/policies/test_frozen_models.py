"""Reward models on the card, as plans and runs count them."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import rollouts
import tiny
from chronicals.config import ConfigurationError
from chronicals.models import attach_score
from chronicals.objectives import build_objective
from chronicals.policies.frozen_models import held_by, held_by_rewards, planned_frozen
from chronicals.saving import save_model
from chronicals.saving.model_files import text_files
from chronicals.training.session import prepared


@pytest.fixture
def judge(tmp_path):
    """A reward model's folder."""
    model = tiny.llama()
    attach_score(model, 1)
    save_model(tmp_path / "judge" / "model", model, text_files(model, tiny.tokenizer()), {})
    return tmp_path / "judge"


def test_a_reward_model_is_held_beside_the_steps_and_has_no_pass_in_them(judge, tmp_path):
    tiny.llama().save_pretrained(tmp_path / "base")
    config = rollouts.config(
        tmp_path,
        section={"reference_model": str(tmp_path / "base"), "beta": 0.1},
        rewards=["arithmetic", f"{judge}=0.5"],
        mixed_precision="bf16",
    )
    objective = build_objective(config)
    loaded = AutoModelForSequenceClassification.from_pretrained(
        judge / "model", dtype=torch.bfloat16
    )
    name = f"reward model {judge}"
    planned = held_by_rewards(objective, config)
    assert list(planned) == [name] and planned[name].size == held_by(loaded)
    assert list(planned_frozen(objective, config)) == ["reference", name]
    assert objective.forward_passes(config) == ["reference"]
    with prepared(tiny.llama(), config, objective, tokenizer=tiny.tokenizer()) as session:
        assert name in session.facts.frozen_models


def test_a_run_without_reward_models_plans_none(tmp_path):
    config = rollouts.config(tmp_path, rewards=["arithmetic", "mine:f"])
    assert held_by_rewards(build_objective(config), config) == {}


def test_an_adapter_of_a_reward_model_is_held_with_its_base(tmp_path):
    tiny.llama().save_pretrained(tmp_path / "base")
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(
        f'{{"base_model_name_or_path": "{tmp_path / "base"}", "task_type": "SEQ_CLS"}}'
    )
    config = rollouts.config(tmp_path, rewards=[str(folder)])
    (held,) = held_by_rewards(build_objective(config), config).values()
    assert held.size == held_by(tiny.llama())


def test_a_reward_model_that_cannot_be_read_is_named(tmp_path):
    config = rollouts.config(tmp_path, rewards=[f"{tmp_path}/none=2"])
    with pytest.raises(ConfigurationError, match=r"^rewards='.*/none=2.0': "):
        held_by_rewards(build_objective(config), config)
