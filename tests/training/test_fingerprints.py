"""A fingerprint of weights tells them apart by their bits, their places and their order."""

from types import SimpleNamespace

import pytest
import torch

import tiny
from chronicals.distributed import rank_agreement
from chronicals.distributed.rank_agreement import fingerprint_here, fingerprint_over
from chronicals.training.columns.start_columns import model_config_digest

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.bool,
    torch.float8_e4m3fn,
]


@pytest.fixture(autouse=True)
def few_at_a_time(set_constants):
    set_constants(rank_agreement, SUMMED_AT_A_TIME=7)


def drawn(dtype, *shape):
    return (torch.randn(*shape) * 20).abs().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_elements_that_change_places_are_another_tensor(dtype):
    """Near each other or far; the sum of the bytes does not see it."""
    given = drawn(dtype, 5, 9)
    flat = given.view(-1)
    for other in (1, 20, 44):
        changed = flat.clone()
        changed[other] = (
            ~flat[0] if dtype == torch.bool else 2 * flat[0].float() + 1
        )  # by more than is rounded off
        exchanged = changed.clone()
        exchanged[0], exchanged[other] = changed[other], changed[0]
        one = fingerprint_over([changed])
        two = fingerprint_over([exchanged])
        assert one.values == two.values and one.places != two.places
    assert (
        fingerprint_here([given])
        == fingerprint_here([given.clone()])
        != fingerprint_here([given, given])
    )


def test_rows_and_whole_tensors_that_change_places_are_others():
    a = drawn(torch.float32, 4, 6)
    b = drawn(torch.float32, 4, 6)
    assert fingerprint_here([a]) != fingerprint_here([a.flip(0)]) and fingerprint_here(
        [a]
    ) != fingerprint_here([a.t().contiguous().view(4, 6)])
    assert fingerprint_here([a, b]) != fingerprint_here([b, a])
    assert fingerprint_here([a.t()]) == fingerprint_here([a.t().contiguous()])


@pytest.mark.parametrize("at_a_time", [1, 3, 24, 1000])
def test_it_is_the_same_however_many_elements_are_summed_at_a_time(at_a_time, set_constants):
    given = [drawn(torch.float32, 4, 6), drawn(torch.bfloat16, 23), torch.zeros(0)]
    expected = fingerprint_over(given)
    set_constants(rank_agreement, SUMMED_AT_A_TIME=at_a_time)
    assert fingerprint_over(given) == expected


def test_values_of_bf16_in_fp32_are_the_same_values():
    given = torch.randn(5, 9).bfloat16()
    assert fingerprint_over([given]).values == fingerprint_over([given.float()]).values


class Ranks:
    """Two that have half of the rows each; ``other`` is what the second one sends."""

    count = 2

    def __init__(self, other=None):
        self.other = other
        self.sent = None

    def gather(self, tensor):
        self.sent = tensor
        return [tensor, tensor if self.other is None else self.other]


def divided(given, monkeypatch):
    monkeypatch.setattr(rank_agreement, "copies_of", lambda tensor, ranks: int(ranks == 2))
    second = Ranks()
    fingerprint_over([given[2:]], second)
    return fingerprint_over([given[:2]], Ranks(second.sent))


def test_values_are_the_same_among_however_many_ranks(monkeypatch):
    """Places are compared among as many only, and tell rows that two ranks exchanged."""
    given = drawn(torch.float32, 4, 6)
    found = divided(given, monkeypatch)
    whole = fingerprint_over([given])
    assert found.values == whole.values and (found.divided, whole.divided) == (2, 1)
    exchanged = divided(given.roll(2, 0), monkeypatch)
    assert exchanged.values == found.values and exchanged.places != found.places


def test_a_part_of_a_configuration_is_told_so_too():
    """As the language part of a model of images and text."""
    parts = [
        {"_name_or_path": "here", "rms_norm_eps": 1e-6},
        {"_name_or_path": "there", "rms_norm_eps": 1e-6},
    ]
    parts.append({**parts[0], "rms_norm_eps": 1e-5})
    whole = [SimpleNamespace(to_dict=lambda part=part: {"text_config": part}) for part in parts]
    here, there, other = map(model_config_digest, whole)
    assert here == there != other


def test_a_configuration_is_told_by_what_changes_predictions():
    config = tiny.llama().config
    told = model_config_digest(config)
    config._name_or_path = "elsewhere"
    config.use_cache = False
    config.eos_token_id = 7
    assert model_config_digest(config) == told
    for name, value in (("rope_theta", 123.0), ("rms_norm_eps", 1e-2), ("num_attention_heads", 8)):
        other = tiny.llama().config
        if name == "rope_theta" and not hasattr(other, name):
            other.rope_parameters = {**other.rope_parameters, name: value}
        else:
            setattr(other, name, value)
        assert model_config_digest(other) != told, name
