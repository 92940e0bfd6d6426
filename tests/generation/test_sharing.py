"""Answers that share the pages of their prompt: who is in a team, and that nothing changes."""

import pytest
import torch

import tiny
from chronicals.generation import sharing
from chronicals.generation.engine import Engine
from chronicals.generation.pages import LayerSizes
from chronicals.generation.requests import Request
from chronicals.generation.sampling import Sampling
from chronicals.generation.schedule import EngineSettings, Prompt, Sample
from chronicals.generation.sharing import PromptSharing
from chronicals.kernels import paged_attention
from interpreted import kernels_run, only_interpreted

PAGE = 4
LAYER = LayerSizes(2, 16, 16, torch.bfloat16, queries=4)


def running(*prompts):
    """Answers of prompts of these lengths and numbers of answers, whose pages are stored."""
    samples = []
    for order, (length, answers) in enumerate(prompts):
        prompt = Prompt(Request([7] * length, 8, answers=answers), order, 8, pages=[order + 1])
        samples += [Sample(prompt, number, 0) for number in range(answers)]
    return samples


def test_answers_of_a_prompt_are_teams():
    """Whole pages are shared; a prompt without one, and one answer, are in no team."""
    found = PromptSharing(3, 1, worth=1).shared_pages(
        running((10, 5), (9, 1), (3, 2), (4, 2)), 12, PAGE, torch.device("cpu")
    )
    assert found.teams.tolist() == [[0, 1, 2], [3, 4, -1], [8, 9, -1], [-1, -1, -1]]
    assert found.lengths.tolist() == [8, 8, 4, 0]
    assert found.starts.tolist() == [8] * 5 + [0] * 3 + [4] * 2 + [0] * 2


def test_answers_whose_prompt_is_not_stored_share_nothing():
    samples = running((10, 4))
    samples[0].prompt.pages = []
    assert PromptSharing(3, 1, worth=0).shared_pages(samples, 4, PAGE, torch.device("cpu")) is None


def test_few_bytes_are_not_worth_a_kernel():
    samples = running((10, 4))  # two teams, of three and of one: 2 x 8 tokens are read less
    device = torch.device("cpu")
    assert PromptSharing(3, 100, worth=1601).shared_pages(samples, 4, PAGE, device) is None
    assert PromptSharing(3, 100, worth=1600).shared_pages(samples, 4, PAGE, device) is not None


def test_layers_with_a_window_share_nothing():
    windowed = LayerSizes(2, 16, 16, torch.bfloat16, window=8, queries=4)
    assert PromptSharing.of([windowed]).members == 0
    both = PromptSharing.of([windowed, LAYER])
    assert (both.members, both.token_bytes) == (32, LAYER.bytes)


@only_interpreted
@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("family", [{}, {"num_key_value_heads": 1}], ids=["groups", "one key head"])
def test_a_prompt_is_read_once_and_nothing_changes(family, monkeypatch, record_calls):
    model = tiny.llama(eos_token_id=None, **family).eval()
    asked = [
        Request(list(range(5, 19)), 6, Sampling(1.0, seed=3), 5, number=0),
        Request([9] * 7, 6, Sampling(), 1, number=1),
        Request([11] * 9, 4, Sampling(1.0), 2, number=2),
    ]
    settings = EngineSettings(page_size=PAGE)
    with kernels_run():
        expected = Engine(model, settings).generate(asked)
        monkeypatch.setattr(PromptSharing, "of", lambda layers: PromptSharing(4, 1, worth=0))
        calls = record_calls(paged_attention, "_paged_attention")
        got = Engine(model, settings).generate(asked)
    teams = [call[6] for call in calls if call[6] is not None]
    assert teams and all(team.shape[1] == 4 for team in teams)
    for group, others in zip(got, expected, strict=True):
        for answer, other in zip(group, others, strict=True):
            assert answer.tokens == other.tokens
            assert answer.log_probabilities == pytest.approx(other.log_probabilities, abs=1e-4)


def test_what_is_worth_sharing_is_more_than_a_small_model_has():
    assert 64 * 256 * LAYER.bytes < sharing.WORTH_SHARING
