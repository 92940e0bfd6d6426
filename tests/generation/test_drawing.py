"""Draws against the distributions of transformers' processors, and their random numbers."""

import pytest
import torch
from transformers.generation import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from chronicals.generation.drawing import Choices, draw, narrowed, stream_keys
from chronicals.generation.sampling import Sampling
from chronicals.kernels.token_draws import inverse_cumulative, uniform, warped

TOKENS = 23
DRAWS = 10_000
SEEN = [3, 5, 7, 11]

SETTINGS = {
    "temperature": Sampling(0.7),
    "hot": Sampling(2.5),
    "top_k": Sampling(1.0, top_k=6),
    "top_p": Sampling(1.0, top_p=0.8),
    "min_p": Sampling(1.0, min_p=0.15),
    "penalty": Sampling(1.0, repetition_penalty=1.8),
    "all": Sampling(1.3, top_k=15, top_p=0.95, min_p=0.02, repetition_penalty=1.3),
}


def by_transformers(logits, sampling):
    """Logits of the distribution to draw from, in transformers' order."""
    ids = torch.tensor([SEEN])
    processors = []
    if sampling.repetition_penalty is not None:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    for name, kind in (
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
        ("min_p", MinPLogitsWarper),
    ):
        if getattr(sampling, name) is not None:
            processors.append(kind(getattr(sampling, name)))
    scores = logits[None]
    for processor in processors:
        scores = processor(ids, scores)
    return scores[0]


def drawn(logits, sampling, count, seed=0):
    """``count`` draws from the same logits, at different positions."""
    keys = stream_keys(*(torch.tensor([x]) for x in (seed, 4, 2))).tolist() * count
    seen = torch.zeros(count, len(logits), dtype=torch.bool)
    seen[:, SEEN] = True
    choices = Choices.of([sampling] * count, keys)
    return draw(logits.expand(count, -1), choices, torch.arange(count), seen)


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_have_the_distribution_of_transformers(name):
    """Chi-square of 10,000 draws, at a level that fails once in a million runs."""
    logits = torch.randn(TOKENS) * 2
    logits[[2, 5]] = logits.max() + 0.1  # at least two are drawn
    expected = by_transformers(logits, SETTINGS[name]).softmax(-1).double()
    got = drawn(logits, SETTINGS[name], DRAWS, seed=int(torch.randint(10**6, (1,))))
    counts = torch.bincount(got.tokens, minlength=TOKENS).double()
    assert counts[expected == 0].sum() == 0
    # rare tokens are pooled, so that the statistic has its distribution
    rare = expected * DRAWS < 8
    pooled = [torch.cat((x[~rare], x[rare].sum()[None])) for x in (counts, expected * DRAWS)]
    kept = pooled[1] > 0
    statistic = ((pooled[0] - pooled[1]) ** 2 / pooled[1])[kept].sum()
    freedom = int(kept.sum()) - 1
    # Wilson and Hilferty's approximation of the quantile; 4.75 is that of the normal distribution
    limit = freedom * (1 - 2 / (9 * freedom) + 4.75 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < limit
    assert torch.allclose(got.log_probabilities, expected.log()[got.tokens].float(), atol=1e-5)


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_left_out_is_what_transformers_leaves_out(name):
    logits = torch.randn(50, TOKENS) * 3
    logits[:, 4] = logits[:, 9]
    sampling = SETTINGS[name]
    choices = Choices.of([sampling] * 50, [0] * 50)
    got = warped(narrowed(logits, choices), choices.temperature, choices.min_p)
    for row, scores in zip(logits, got):
        plain = Sampling(
            sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p
        )
        expected = by_transformers(row, plain)
        for one in (expected, scores):  # of two equal ones at the edge either may stay
            one[[4, 9]] = one[[4, 9]].sort().values
        assert torch.equal(expected.isinf(), scores.isinf())
        assert torch.allclose(expected, scores)


def test_probabilities_and_entropies_are_those_of_the_logits_as_they_are():
    logits = torch.randn(TOKENS) * 2
    logits[3] = float("-inf")
    got = drawn(logits, SETTINGS["all"], 100)
    assert torch.allclose(got.full_log_probabilities, logits.log_softmax(-1)[got.tokens])
    expected = torch.distributions.Categorical(logits=logits).entropy()
    assert torch.allclose(got.entropies, expected.expand(100), atol=1e-6) and got.finite.all()


def test_the_likeliest_token_is_certain():
    logits = torch.randn(TOKENS)
    got = drawn(logits, Sampling(), 3)
    assert (got.tokens == logits.argmax()).all() and not got.log_probabilities.any()
    penalty = Sampling(repetition_penalty=4.0)
    expected = RepetitionPenaltyLogitsProcessor(4.0)(torch.tensor([SEEN]), logits[None]).argmax()
    assert (drawn(logits, penalty, 3).tokens == expected).all()


def test_rows_do_not_depend_on_each_other():
    """Each row has its own settings; greedy ones stand among others."""
    logits = torch.randn(8, TOKENS)
    rows = [*SETTINGS.values(), Sampling()]
    seen = torch.rand(8, TOKENS) < 0.3
    together = draw(logits, Choices.of(rows, [*range(8)]), torch.arange(8), seen)
    for n, row in enumerate(rows):
        choices = Choices.of([row], [n])
        alone = draw(logits[n : n + 1], choices, torch.tensor([n]), seen[n : n + 1])
        for x, y in zip(together, alone):
            assert torch.equal(x[n], y[0])


def test_random_numbers_are_those_of_splitmix64():
    """The first outputs for seed 1234567 of the published generator."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    got = uniform(torch.tensor([1234567] * 3), torch.arange(3))
    expected = torch.tensor([(n >> 11) * 2.0**-53 for n in published], dtype=torch.float64)
    assert torch.equal(got, expected)


def test_random_numbers_differ_by_seed_request_answer_and_position():
    grid = torch.cartesian_prod(*[torch.arange(10)] * 4)
    numbers = uniform(stream_keys(*grid[:, :3].T), grid[:, 3])
    assert len(numbers.unique()) == len(grid)
    assert abs(float(numbers.mean()) - 0.5) < 0.02 and numbers.min() >= 0 and numbers.max() < 1


def test_tokens_without_probability_are_never_drawn():
    shares = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).expand(4, -1)
    numbers = torch.tensor([0.0, 0.249, 0.25, 1 - 2**-53], dtype=torch.float64)
    assert inverse_cumulative(shares, numbers).tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_told(value):
    logits = torch.randn(3, TOKENS)
    logits[1, 5] = value
    got = draw(logits, Choices.of([Sampling(0.7)] * 3, [0] * 3), torch.arange(3), None)
    assert got.finite.tolist() == [True, False, True]
