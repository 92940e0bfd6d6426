"""Runs whose model asks for a router loss."""

import numpy as np
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import runs
import tiny
from chronicals.config import ConfigurationError
from chronicals.models import present
from chronicals.objectives import NextToken, WithRouterLoss, with_router_loss
from chronicals.verification import verify


def mixtral(coefficient=0.5, asked=True):
    torch.manual_seed(0)
    sizes = {name: getattr(tiny.llama().config, name) for name in ("hidden_size", "intermediate_size", "vocab_size")}
    config = MixtralConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=0, num_local_experts=4, num_experts_per_tok=2, output_router_logits=asked,
        router_aux_loss_coef=coefficient,
    )  # fmt: skip
    return MixtralForCausalLM(config)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    runs.train(folder, model=mixtral(), batch_size=4, gradient_accumulation_steps=1, max_steps=4)
    return np.array(runs.trajectory(folder))


@pytest.mark.parametrize(
    "changes",
    [{"batch_size": 1, "gradient_accumulation_steps": 4}, {"batch_size": 2, "gradient_accumulation_steps": 2}],
    ids=["1x4", "2x2"],
)
def test_batch_times_accumulation(whole, changes, tmp_path):
    runs.train(tmp_path, model=mixtral(), max_steps=4, **changes)
    np.testing.assert_allclose(runs.trajectory(tmp_path), whole, rtol=1e-5)


def test_recomputed_layers_train_it_alike(whole, tmp_path):
    changes = {"batch_size": 4, "gradient_accumulation_steps": 1, "memory": ["recompute_layers"]}
    runs.train(tmp_path, model=mixtral(), max_steps=4, **changes)
    np.testing.assert_allclose(runs.trajectory(tmp_path), whole, rtol=1e-5)


def test_it_is_part_of_the_loss_and_trains(whole, tmp_path):
    runs.train(tmp_path, model=mixtral(asked=False), batch_size=4, gradient_accumulation_steps=1, max_steps=4)
    without = np.array(runs.trajectory(tmp_path))
    added = whole[0, 1] - without[0, 1]
    assert 0.5 * 1.5 < added < 0.5 * 4  # k = 2 for experts in balance, and the coefficient
    assert not np.allclose(whole[1:, 2], without[1:, 2], rtol=1e-3)


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_verify_sets_it_beside_the_class_itself(adapters, tmp_path, monkeypatch):
    changes = {"use_lora": True, "lora_rank": 4} if adapters else {}
    config = runs.config(tmp_path, **changes)
    found = verify(mixtral(), tiny.tokenizer(), config, tiny.chat_rows())
    assert found.passed, found.failures
    monkeypatch.setattr("chronicals.verification.path.with_router_loss", lambda objective, *_: objective)
    assert not verify(mixtral(), tiny.tokenizer(), config, tiny.chat_rows()).passed


def test_objectives_of_other_models_stay_as_they_are():
    objective = NextToken()
    assert with_router_loss(objective, present(mixtral(asked=False)), 128) is objective
    assert isinstance(with_router_loss(objective, present(mixtral()), 128), WithRouterLoss)


def test_layers_recomputed_by_re_entrance_are_refused(tmp_path):
    model = mixtral()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ConfigurationError, match="use_reentrant=False"):
        runs.train(tmp_path, model=model)
    model = mixtral(asked=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    runs.train(tmp_path, model=model, max_steps=1)
