"""A run whose memory was too small is planned again in smaller micro-batches of the same steps."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

import tiny
from chronicals import ChronicalsConfig
from chronicals.memory import NOTHING
from chronicals.policies import Decision, smaller_steps
from chronicals.policies.facts import Facts
from chronicals.policies.policy import POLICIES
from chronicals.policies.smaller_steps import in_smaller_batches, saved_in_words

AS_IT_IS = {
    "use_gradient_checkpointing": Decision("use_gradient_checkpointing", False, "", NOTHING)
}
GIB = 2**30


@pytest.fixture
def by_packs(monkeypatch):
    """A run of 12 packs a step, of which each takes a GiB beside two that stay."""

    def planned_peak(facts, decisions):
        return SimpleNamespace(held=(2 + facts.config.batch_size) * GIB)

    monkeypatch.setattr(smaller_steps, "planned_peak", planned_peak)
    config = ChronicalsConfig(batch_size=6, gradient_accumulation_steps=2)
    return Facts(config, tiny.llama(), total=10 * GIB)


@pytest.mark.parametrize(
    "needed, batch, accumulation", [(0, 4, 3), (8, 4, 3), (12, 4, 3), (16, 2, 6), (99, 1, 12)]
)
def test_the_largest_batch_that_fits_by_the_measured_peak(by_packs, needed, batch, accumulation):
    """9.5 GiB can be filled, and what was expected, 8 for 6 packs, grows by the measured excess."""
    smaller = in_smaller_batches(by_packs, AS_IT_IS, needed * GIB)
    assert (smaller.batch_size, smaller.gradient_accumulation_steps) == (batch, accumulation)


def test_half_where_no_card_limits_it(by_packs):
    smaller = in_smaller_batches(replace(by_packs, total=0), AS_IT_IS, 0)
    assert (smaller.batch_size, smaller.gradient_accumulation_steps) == (3, 4)


def test_what_runs_must_take_the_batch(by_packs, monkeypatch):
    """As products in FP8 take some numbers of tokens only."""

    def why_not(facts):
        return "odd" if facts.config.batch_size % 2 else None

    monkeypatch.setattr(POLICIES["use_fp8"], "why_not", why_not)
    running = AS_IT_IS | {"use_fp8": Decision("use_fp8", True, "")}
    assert in_smaller_batches(by_packs, running, 99 * GIB).batch_size == 2
    pair = replace(by_packs, config=by_packs.config.fitted(batch_size=2))
    assert in_smaller_batches(pair, running, 0) is None


def test_a_single_pack_has_no_smaller_batch(by_packs):
    alone = replace(by_packs, config=by_packs.config.fitted(batch_size=1))
    assert in_smaller_batches(alone, AS_IT_IS, 0) is None


@pytest.mark.parametrize(
    ("batch", "words"), [(3, "saves about 3.00 GiB"), (6, None), (8, None)], ids=str
)
def test_what_saves_nothing_is_no_remedy(by_packs, batch, words):
    fields = {"batch_size": batch, "gradient_accumulation_steps": 24 // batch}
    assert saved_in_words(by_packs, AS_IT_IS, fields) == words
