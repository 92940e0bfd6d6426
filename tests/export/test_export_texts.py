"""Greedy text as a check of a proof: what passes, what fails, and whose text it is."""

import logging

import pytest
import torch

import families
from chronicals.export.proof import Proof
from chronicals.export.texts import LARGEST_ERROR, NEW_TOKENS, GreedyText, greedy_texts, prove_texts
from chronicals.log_once import LOGGED

DOCUMENTS = [[5, 6, 7], [], [9, 8, 7, 6, 5], [3, 4]]


def built(family):
    model = families.build(family).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_the_text_is_that_of_transformers(family, caplog):
    """By the engine, or by transformers for a class that it cannot serve, which is named once."""
    caplog.set_level(logging.INFO)
    LOGGED.clear()
    model = built(family)
    for _ in range(2):
        found = greedy_texts(model, DOCUMENTS)
    assert len(found) == 2
    for text, ids in zip(found, (DOCUMENTS[0], DOCUMENTS[2])):
        prompt = torch.tensor([ids])
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        assert text.tokens == out[0, len(ids) :].tolist()
        with torch.no_grad():
            logits = model(out[:, :-1]).logits[0, len(ids) - 1 :].log_softmax(-1)
        expected = logits.gather(1, out[0, len(ids) :, None])[:, 0].tolist()
        assert text.log_probabilities == pytest.approx(expected, abs=1e-3)
    said = [record.message for record in caplog.records if "greedy text of" in record.message]
    assert len(said) == (family == "mamba")


def check(tokens, log_probabilities, bound=0.1):
    expected = GreedyText([1, 2, 3, 4], [-1.0, -1.0, -1.0, -1.0])
    proof = Proof({})
    prove_texts([GreedyText(tokens, log_probabilities)], [expected], bound, "torch", proof)
    (found,) = proof.checks
    return found


def test_tokens_may_differ_where_two_are_as_likely():
    """What comes behind the first that differs is of another text."""
    found = check([1, 2, 9, 9], [-1.0, -1.0, -1.25, -7.0])
    assert found.passed and found.value == pytest.approx(0.25)
    assert found.detail == "2 of 4 tokens before the first that differs"
    assert found.bound == LARGEST_ERROR * 0.1
    assert check([1, 2, 3, 4], [-1.0] * 4).value == 0.0


@pytest.mark.parametrize(
    "log_probabilities",
    [[-1.0, -1.0, -1.6, -1.0], [-1.0, -1.0, -1.0, float("nan")], [-0.4, -1.0, -1.0, -1.0]],
)
def test_a_likeliest_token_of_another_probability_fails(log_probabilities):
    assert check([1, 2, 3, 4], log_probabilities).passed is False
    assert check([1, 2, 3, 9], log_probabilities).passed is False
