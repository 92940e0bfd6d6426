"""Draws of tokens by the kernels: those of the plain operation, over settings and sizes."""

import pytest
import torch

from chronicals.kernels import token_draws as module
from chronicals.kernels.launch import runs_triton
from chronicals.kernels.token_draws import draw_tokens, draw_tokens_reference
from mutants import mutant

SIZES = {"one chunk": 23, "several chunks": 5000, "whole chunks": 2 * module.CHUNK}
TYPES = [torch.float32, torch.bfloat16]

NEAR = 1e-6
"""Distance from a bound of the cumulative distribution within which either neighbour is right."""


def drawn(rows, vocabulary, dtype, device, of_scores=True):
    """Logits, scores with tokens left out, settings, keys and positions of rows."""
    logits = (torch.randn(rows, vocabulary, device=device) * 3).to(dtype)
    scores = logits
    if of_scores:
        left_out = torch.rand(rows, vocabulary, device=device) < 0.3
        scores = (logits.float() - 0.5).masked_fill(left_out, float("-inf"))
    temperature = torch.empty(rows, device=device).uniform_(0.3, 2.0)
    temperature[::4] = 0.0
    temperature[1::4] = 1.0
    min_p = torch.where(torch.rand(rows, device=device) < 0.5, 0.02, 0.0)
    keys = torch.randint(-(2**62), 2**62, (rows,), device=device)
    positions = torch.randint(0, 10**5, (rows,), device=device)
    return logits, scores, temperature, min_p, keys, positions


def differences(given, of=module):
    """Assert that draws are those of the plain operation."""
    with torch.no_grad():
        got = of.draw_tokens(*given)
        expected = draw_tokens_reference(
            *(x.double() if x.is_floating_point() else x for x in given)
        )
    scores, temperature, min_p, keys, positions = given[1:]
    shares = module.warped(scores.double(), temperature.double(), min_p.double()).softmax(-1)
    bounds = shares.cumsum(-1)
    numbers = module.uniform(keys, positions)
    at_bound = (bounds - numbers[:, None]).abs().amin(-1) < NEAR
    assert torch.equal(got.tokens[~at_bound], expected.tokens[~at_bound])
    same = got.tokens == expected.tokens
    for name in ("log_probabilities", "full_log_probabilities"):
        ours, exact = getattr(got, name)[same], getattr(expected, name)[same]
        assert torch.allclose(ours.double(), exact.double(), rtol=1e-5, atol=2e-5), name
    assert torch.allclose(got.entropies.double(), expected.entropies, rtol=1e-5, atol=2e-5)
    assert torch.equal(got.finite, expected.finite)


def test_kernels_run_here(device):
    assert runs_triton(torch.zeros(1, device=device))


@pytest.mark.slow
@pytest.mark.parametrize("of_scores", [True, False], ids=["scores", "logits"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_draws_are_those_of_the_plain_operation(size, dtype, of_scores, device):
    differences(drawn(24, SIZES[size], dtype, device, of_scores))


def test_rows_of_views_and_a_chunk_that_is_left_out(device):
    """Rows of a larger tensor; of one row only the last chunk is kept."""
    given = drawn(6, 3 * module.CHUNK + 7, torch.float32, device)
    wide = torch.cat((given[0], given[0]), 1)[:, : given[0].shape[1]]
    given[1][1, : 3 * module.CHUNK] = float("-inf")
    differences((wide, *given[1:]))


def test_rows_that_are_no_numbers_are_told(device):
    given = drawn(4, 3000, torch.float32, device, of_scores=False)
    given[0][0, 5] = float("nan")
    given[0][1, 2900] = float("inf")
    given[0][2] = float("-inf")
    assert draw_tokens(*given).finite.tolist() == [False, False, False, True]
    assert draw_tokens(*given).tokens.max() < 3000


def test_a_row_does_not_depend_on_the_others(device):
    given = drawn(5, 4500, torch.bfloat16, device)
    together = draw_tokens(*given)
    alone = draw_tokens(*(x[3:4] for x in given))
    for x, y in zip(together, alone):
        assert torch.equal(x[3:4], y)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("score / tl.where(temperature > 0.0, temperature, 1.0)", "score"),
        ("moments + apart * sums", "moments"),
        ("weight >= tl.load(min_p_ptr + row)", "weight > 0.0"),
        ("(bounds <= wanted)", "(bounds < 0.9 * wanted)"),
        ("share * tl.sum(weight, axis=0)", "wanted"),
        ("found * CHUNK + tl.minimum(before, last)", "tl.minimum(before, last)"),
        ("(position + 1) * 0x9E3779B97F4A7C15", "position * 0x9E3779B97F4A7C15"),
        ("y - top - tl.log(mass.to(tl.float32))", "y - top"),
        ("x - most - tl.log(total)", "x - most"),
        ("chunk * CHUNK + best", "best"),
        ("of_chunk * kept", "of_chunk"),
        ("tl.exp(y - shift)", "tl.exp(y)"),
    ],
)
@pytest.mark.slow
def test_a_wrong_kernel_is_found(old, new, device):
    wrong = mutant(module, old, new)
    with pytest.raises(AssertionError):
        for _ in range(3):
            differences(drawn(24, 5000, torch.float32, device), of=wrong)
