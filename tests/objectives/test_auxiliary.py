"""Auxiliary terms of a model: runs whose class asks for a router loss."""

import numpy as np
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import preferences
import runs
import tiny
from chronicals.config import ConfigurationError
from chronicals.data.making import documents
from chronicals.models import RouterLoss, present
from chronicals.objectives import NextToken, Term
from chronicals.verification import verify
from families import hand_made_batch


def mixtral(coefficient=0.5, asked=True):
    torch.manual_seed(0)
    sizes = {
        name: getattr(tiny.llama().config, name)
        for name in ("hidden_size", "intermediate_size", "vocab_size")
    }
    config = MixtralConfig(
        **sizes,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=0,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=asked,
        router_aux_loss_coef=coefficient,
    )
    return MixtralForCausalLM(config)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    runs.train(folder, model=mixtral(), batch_size=4, gradient_accumulation_steps=1, max_steps=4)
    return np.array(runs.trajectory(folder))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 1, "gradient_accumulation_steps": 4},
        {"batch_size": 2, "gradient_accumulation_steps": 2},
    ],
    ids=["1x4", "2x2"],
)
def test_batch_times_accumulation(whole, changes, tmp_path):
    runs.train(tmp_path, model=mixtral(), max_steps=4, **changes)
    np.testing.assert_allclose(runs.trajectory(tmp_path), whole, rtol=1e-5)


@pytest.mark.slow
def test_recomputed_layers_train_it_alike(whole, tmp_path):
    changes = {"batch_size": 4, "gradient_accumulation_steps": 1, "memory": ["recompute_layers"]}
    runs.train(tmp_path, model=mixtral(), max_steps=4, **changes)
    np.testing.assert_allclose(runs.trajectory(tmp_path), whole, rtol=1e-5)


@pytest.mark.slow
def test_it_is_part_of_the_loss_and_trains(whole, tmp_path):
    runs.train(
        tmp_path,
        model=mixtral(asked=False),
        batch_size=4,
        gradient_accumulation_steps=1,
        max_steps=4,
    )
    without = np.array(runs.trajectory(tmp_path))
    added = whole[0, 1] - without[0, 1]
    assert 0.5 * 1.5 < added < 0.5 * 4  # k = 2 for experts in balance, and the coefficient
    assert not np.allclose(whole[1:, 2], without[1:, 2], rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_verify_sets_it_beside_the_class_itself(adapters, tmp_path, let_return):
    changes = {"use_lora": True, "lora_rank": 4} if adapters else {}
    config = runs.config(tmp_path, **changes)
    found = verify(mixtral(), tiny.tokenizer(), config, tiny.chat_rows())
    assert found.passed, found.failures
    let_return(RouterLoss, term=Term(torch.zeros(()), 0.0))
    assert not verify(mixtral(), tiny.tokenizer(), config, tiny.chat_rows()).passed


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["orpo", "kto"])
def test_answers_that_share_a_prompt_are_set_beside_the_class_itself(objective, tmp_path):
    """Which sees the prompt once for each of them; of judged answers the row's own is trained
    alone.
    """
    given = preferences.judged_rows(24) if objective == "kto" else preferences.rows(24)
    config = runs.config(tmp_path, objective=objective, max_seq_length=256, learning_rate=1e-3)
    found = verify(mixtral(), tiny.tokenizer(), config, given)
    assert found.passed, found.failures


@pytest.mark.slow
@pytest.mark.parametrize("how", ["packed", "padded"])
def test_whether_a_prompt_is_shared_changes_no_loss_of_routers(how, tmp_path, set_constants):
    """But for that of neighbours, which an answer's first token and the prompt's last one are
    not where they lie apart.
    """
    given = preferences.rows(6)
    settings = {"router": {"z": 0.1}, "max_seq_length": 1024}

    def step(folder):
        found = preferences.one_step(
            tmp_path / folder, given, "orpo", {}, mixtral(), padded=how == "padded", **settings
        )
        return {name: torch.as_tensor(value) for part in found for name, value in part.items()}

    shared = step("shared")
    set_constants(documents, MIN_SHARED_TOKENS=10**9)
    apart = step("apart")
    assert shared.keys() == apart.keys() and {"router_loss", "router/z"} <= shared.keys()
    for name, value in apart.items():
        torch.testing.assert_close(shared[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("fused_head", [True, False])
def test_an_objective_gets_it_beside_the_states(fused_head):
    batch = hand_made_batch([torch.arange(1, 10), torch.arange(20, 27)])
    for asked, names in ((True, {"cross_entropy", "router_loss"}), (False, {"cross_entropy"})):
        presented = present(mixtral(asked=asked), fused_head)
        with presented.attending_documents():
            terms = NextToken()(presented, batch)
            scores = NextToken().score(presented, batch)
        assert terms.keys() == names and scores.keys() == {"cross_entropy", "token_accuracy"}
        assert {(term.coefficient, term.per) for term in terms.values()} <= {
            (1.0, "weight"),
            (0.5, "packs"),
        }


@pytest.mark.slow
def test_layers_recomputed_by_re_entrance_are_refused(tmp_path):
    model = mixtral()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ConfigurationError, match="use_reentrant=False"):
        runs.train(tmp_path, model=model)
    model = mixtral(asked=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    runs.train(tmp_path, model=model, max_steps=1)
