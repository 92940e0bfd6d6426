"""The proofs of docs/mathematics.md, computed."""

import itertools
import math

import numpy as np
import pytest
import torch

import tiny
from chronicals.data.packs.packing import plan_packs
from chronicals.kernels.softmax import softmax_reference
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.optimizers.learning_rates import lora_plus_groups


def online(values):
    """The largest value and the sum of exponentials below it, value by value."""
    largest, total = -math.inf, 0.0
    for value in values:
        raised = max(largest, value)
        total = total * math.exp(largest - raised) + math.exp(value - raised)
        largest = raised
    return largest, total


def joined(first, second):
    largest = max(first[0], second[0])
    return largest, sum(total * math.exp(value - largest) for value, total in (first, second))


def test_the_online_softmax_is_the_softmax_and_joins_in_any_order():
    generator = torch.Generator().manual_seed(5)
    row = 300 * torch.randn(97, generator=generator, dtype=torch.float64)
    largest, total = online(row.tolist())
    assert largest == row.max().item()
    assert torch.allclose((row - largest).exp() / total, softmax_reference(row), atol=1e-15)
    parts = [online(part.tolist()) for part in row.split(20)]
    for order in itertools.islice(itertools.permutations(parts), 20):
        found = order[0]
        for part in order[1:]:
            found = joined(found, part)
        assert found == pytest.approx((largest, total), rel=1e-12)


def test_tiles_move_keys_and_values_once_for_each_tile_of_queries():
    tokens, width, tile = 512, 64, 128
    moved, held = 0, 0
    for _ in range(0, tokens, tile):
        for _ in range(0, tokens, tile):
            moved += 2 * tile * width
            held = max(held, tile * tile)
    assert moved == tokens // tile * 2 * tokens * width
    scores = 2 * tokens * tokens
    assert scores / moved == tile / width and held * (tokens // tile) ** 2 == tokens * tokens


@pytest.mark.parametrize("width", [64, 256, 1024])
def test_a_step_of_a_rate_in_a_changes_the_output_as_the_width_once_b_has_a_size(width):
    """By the sign of the gradient, as Adam's first step; the rates where both steps are alike have
    a ratio that grows with the width.
    """
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(width, generator=generator, dtype=torch.float64)
    rank, size = 512, 0.01  # ranks enough for a mean
    a = torch.randn(rank, width, generator=generator, dtype=torch.float64) / width**0.5
    b = torch.full((rank,), size, dtype=torch.float64)
    of_b = (a @ x).abs().sum()  # a step of rate 1 in B, for one output
    of_a = b.abs().sum() * x.abs().sum()  # the same in A
    mean = (2 / math.pi) ** 0.5  # of the size of a standard normal number
    assert of_b.item() / rank == pytest.approx(mean * (x @ x / width).sqrt().item(), rel=0.15)
    assert of_a.item() / (rank * size * width) == pytest.approx(mean, rel=0.3)


def test_b_learns_at_the_ratio_times_the_rate_of_a():
    model = tiny.llama()
    apply_lora(model, LoRAConfig(rank=2))
    rates = {group["lr"] for group in lora_plus_groups(model, 1e-4, 16.0)}
    assert rates == {1e-4, 16e-4}


def fewest_packs(lengths, width):
    """By trying: whether so many packs hold all, from the least number that could."""
    falling = sorted(lengths, reverse=True)
    packs = -(-sum(lengths) // width)
    while not _holds(falling, [width] * packs):
        packs += 1
    return packs


def _holds(falling, room):
    if not falling:
        return True
    tried = set()
    for number, free in enumerate(room):
        if free >= falling[0] and free not in tried:
            tried.add(free)
            room[number] -= falling[0]
            if _holds(falling[1:], room):
                return True
            room[number] += falling[0]
    return False


@pytest.mark.parametrize("seed", range(20))
def test_packs_are_within_the_bound_of_the_fewest(seed):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(12, 60, size=14)
    fewest = fewest_packs(lengths.tolist(), 100)
    first, best = (
        len(plan_packs(lengths, 100, strategy=strategy)) for strategy in ("first-fit", "best-fit")
    )
    assert fewest <= first <= 11 / 9 * fewest + 6 / 9
    assert fewest <= best <= 11 / 9 * fewest + 4
