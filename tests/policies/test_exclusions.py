"""The table of what excludes what names policies and conditions that there are."""

import pytest

import runs
import tiny
from chronicals.policies import Facts
from chronicals.policies.exclusions import (
    CPU_SHARE,
    DRAWN_ANSWERS,
    EXCLUSIONS,
    NOT_ASKED,
    RANDOM_NUMBERS,
    STREAMED,
    conditions,
    why_excluded,
)
from chronicals.policies.policy import POLICIES

ALL_HOLD = {"shared packs", "divided weights", "divided trained weights", "several processes"}


@pytest.fixture
def facts(tmp_path):
    return Facts(runs.config(tmp_path, sharding="weights"), tiny.llama(), ranks=4, context=2)


def test_conditions_are_read_from_the_facts(facts):
    assert conditions(facts) == ALL_HOLD | {"fused layers"}
    alone = Facts(facts.config, facts.model, unfused="not on a card")
    assert conditions(alone) == set()


def test_conditions_of_streamed_experts_are_read_from_the_configuration(tmp_path):
    away = {"memory": ["offload_experts"], "expert_memory": "1GiB", "use_lora": True}
    config = runs.config(tmp_path, objective="grpo", lora_dropout=0.1, **away)
    found = conditions(Facts(config, tiny.llama(), unfused="not on a card"))
    assert found == {STREAMED, RANDOM_NUMBERS, DRAWN_ANSWERS, NOT_ASKED}


def test_every_name_is_a_policy_or_a_condition(facts):
    of_streamed = {STREAMED, CPU_SHARE, RANDOM_NUMBERS, DRAWN_ANSWERS, NOT_ASKED}
    names = POLICIES.keys() | conditions(facts) | of_streamed
    assert {row.policy for row in EXCLUSIONS} | {row.beside for row in EXCLUSIONS} <= names
    assert {row.within for row in EXCLUSIONS} <= names | {None}


def test_the_first_row_that_holds_gives_the_reason(facts):
    beside = {"fused layers", "use_fp8"}
    assert why_excluded("use_torch_compile", beside, facts) == "decoder layers run fused"
    assert why_excluded("use_torch_compile", {"tiled_mlp"}, facts) is None
    reason = why_excluded("optimizer_in_backward", {"several processes"}, facts)
    assert "the gradients of 4 processes are added up" in reason
