"""The table of what excludes what names policies and conditions that there are."""

import pytest

import runs
import tiny
from chronicals.policies import Facts
from chronicals.policies.exclusions import EXCLUSIONS, STREAMED, conditions, why_excluded
from chronicals.policies.policy import POLICIES

ALL_HOLD = {"shared packs", "divided weights", "divided trained weights", "several processes"}


@pytest.fixture
def facts(tmp_path):
    return Facts(runs.config(tmp_path, sharding="weights"), tiny.llama(), ranks=4, context=2)


def test_conditions_are_read_from_the_facts(facts):
    assert conditions(facts) == ALL_HOLD | {"fused layers"}
    alone = Facts(facts.config, facts.model, unfused="not on a card")
    assert conditions(alone) == set()


def test_every_name_is_a_policy_or_a_condition(facts):
    names = POLICIES.keys() | conditions(facts) | {STREAMED}
    assert {row.policy for row in EXCLUSIONS} | {row.beside for row in EXCLUSIONS} <= names


def test_the_first_row_that_holds_gives_the_reason(facts):
    beside = {"fused layers", "use_fp8"}
    assert why_excluded("use_torch_compile", beside, facts) == "decoder layers run fused"
    assert why_excluded("use_torch_compile", {"tiled_mlp"}, facts) is None
    reason = why_excluded("optimizer_in_backward", {"several processes"}, facts)
    assert "the gradients of 4 processes are added up" in reason
