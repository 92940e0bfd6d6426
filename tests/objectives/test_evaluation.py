"""Evaluation on held-out data: perplexity is that of the cross-entropy alone, whatever else an
objective minimises.
"""

import math

import pytest

import families
import runs
import tiny
from chronicals.training.run.evaluation import evaluate_data
from distillations import fields, sharp
from preferences import rows

PAIRS = rows(8)
CHOSEN = [{"messages": [*row["prompt"], *row["chosen"]]} for row in PAIRS]
"""The chosen answers by themselves, as chats."""


@pytest.mark.parametrize("objective", ["orpo", "cpo", "distill"])
def test_perplexity_is_that_of_the_cross_entropy(objective, teacher, tmp_path):
    """Of the same answers as chats, whose loss is a cross-entropy and nothing else."""
    changes = fields(teacher, alpha=0.5) if objective == "distill" else {"objective": objective}
    given = CHOSEN if objective == "distill" else PAIRS
    model = sharp(tiny.llama())
    plain = evaluate_data(model, tiny.tokenizer(), CHOSEN, runs.config(tmp_path))
    found = evaluate_data(model, tiny.tokenizer(), given, runs.config(tmp_path, **changes))
    assert plain.perplexity == pytest.approx(math.exp(plain.loss))
    assert found.perplexity == pytest.approx(plain.perplexity, rel=1e-4)
    assert abs(found.loss - plain.loss) > 1e-2


@pytest.mark.parametrize("objective", ["dpo", "reward"])
def test_no_perplexity_without_a_cross_entropy(objective, tmp_path):
    result = runs.train(
        tmp_path, PAIRS, objective=objective, max_steps=1, eval_rows=rows(4, seed=5)
    )
    assert result.evaluation.perplexity is None and "perplexity" not in result.evaluation.to_dict()


def test_the_loss_of_routers_is_a_mean_over_packs(tmp_path):
    """However many of them a forward pass has."""
    model = families.routed("Qwen3Moe", vocab_size=300, max_position_embeddings=512)
    model.config.output_router_logits = True
    fields = {"objective": "orpo", "max_seq_length": 192}
    found = [
        evaluate_data(model, tiny.tokenizer(), PAIRS, runs.config(tmp_path, batch_size=n, **fields))
        for n in (1, 3)
    ]
    assert found[0].others["router_loss"] > 0.1
    assert found[1].others == pytest.approx(found[0].others, rel=1e-4)
    assert found[1].loss == pytest.approx(found[0].loss, rel=1e-4)
