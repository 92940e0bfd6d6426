"""Rewards of a rollout: by which rows a function fails, and what that costs."""

from dataclasses import replace

import pytest

from chronicals.config import ConfigurationError
from chronicals.rewards import RewardsFailed, Scored
from reward_examples import column, rollout


def test_a_function_of_trl_runs_unchanged_in_a_process_of_its_own(rewards_of):
    rewards = rewards_of("reward_examples:of_trl=0.5")
    outcome = rewards.score(rollout("a", "bb", "c", "d", answer=["a", "b", None, "d"]))
    assert column(outcome) == [11.0, 20.0, None, 11.0]
    assert outcome.values.dtype.is_floating_point and outcome.values.element_size() == 8
    assert not outcome.dropped.any() and outcome.failures == []
    assert rewards.names == ["of_trl"] and rewards.weights == [0.5]
    assert rewards.columns_wanted == {"answer"}


def test_rewards_stand_beside_each_other_in_the_order_given(rewards_of):
    rewards = rewards_of("reward_examples:later=2", "reward_examples:judge", "length(2, 1)=-1")
    messages = [[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]] * 2
    answers = [[{"role": "assistant", "content": text}] for text in ("abc", "d")]
    outcome = rewards.score(Scored(messages, answers, [[1] * 3, [1]], {}, [0, 0]))
    assert outcome.values.tolist() == [[1.0, 203.0, -1.0], [1.0, 201.0, 0.0]]
    assert rewards.weights == [2.0, 1.0, -1.0]


FAULTS = {
    "raise": "KeyError: 'a field' (reward_examples.py, line ",
    "exit": "SystemExit: 2",
    "die": "it ended with status 3: the last words",
    "shorter": "it returned 1 values for 2 rows",
    "text": "it returned str, not a list",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_call_that_fails_costs_the_rows_of_its_group(rewards_of, fault, caplog):
    rewards = rewards_of("reward_examples:misbehaving")
    outcome = rewards.score(rollout("a", "b", fault, "c", "none", "d"))
    assert column(outcome) == [1.0, 1.0, None, None, None, 1.0]
    assert outcome.dropped.tolist() == [False, False, True, True, False, False]
    assert [failure.row for failure in outcome.failures] == [2, 3]
    assert FAULTS[fault] in outcome.failures[0].reason
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("reward misbehaving: failed for 2 of 6 answers (rows 2, 3), the first")
    # It is as before for the next rollout.
    assert column(rewards.score(rollout("a", "b"))) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("nan", "it returned nan"), ("inf", "it returned inf"), ("words", "it returned 'good'")],
)
def test_a_value_that_is_none_costs_its_row(rewards_of, fault, reason):
    rewards = rewards_of("reward_examples:misbehaving")
    outcome = rewards.score(rollout("a", "b", fault, "c"))
    assert column(outcome) == [1.0, 1.0, None, 1.0]
    assert outcome.dropped.tolist() == [False, False, True, False]
    assert outcome.failures[0].reason == reason


@pytest.mark.slow
def test_a_function_that_hangs_is_ended_and_started_anew(rewards_of):
    rewards = rewards_of("reward_examples:misbehaving", "reward_examples:letters")
    rewards._rewards["misbehaving"]._timeout = 0.15  # the other has its 5 s
    outcome = rewards.score(rollout("a", "b", "hang", "c", "d", "ee"))
    assert column(outcome) == [1.0, 1.0, None, None, 1.0, 1.0]
    assert column(outcome, 1) == [1.0, 1.0, 4.0, 1.0, 1.0, 2.0]
    assert outcome.dropped.tolist() == [False, False, True, True, False, False]
    assert {failure.reason for failure in outcome.failures} == {"it gave no answer within 0.3 s"}


def test_a_number_is_the_reward_of_an_answer_whose_function_fails(rewards_of):
    rewards = rewards_of("reward_examples:misbehaving", reward_on_error=-2)
    outcome = rewards.score(rollout("a", "nan", "b", "c"))
    assert column(outcome) == [1.0, -2.0, 1.0, 1.0]
    assert not outcome.dropped.any() and len(outcome.failures) == 1


def test_more_than_half_of_the_rows_end_the_run(rewards_of):
    rewards = rewards_of("reward_examples:misbehaving")
    half = rewards.score(rollout("nan", "nan", "a", "b"))
    assert half.dropped.tolist() == [True, True, False, False]
    with pytest.raises(RewardsFailed, match=r"misbehaving: failed for 3 of 4 .* returned nan"):
        rewards.score(rollout("nan", "nan", "nan", "b"))


def test_rows_that_are_drawn_again_are_a_part_of_their_rollout(rewards_of):
    rewards = rewards_of("reward_examples:misbehaving")
    again = rollout("nan", "nan")
    assert rewards.score(replace(again, among=4)).dropped.tolist() == [True, True]
    with pytest.raises(RewardsFailed, match="more than half"):
        rewards.score(replace(again, among=3))


def test_rows_of_several_rewards_are_counted_together(rewards_of):
    rewards = rewards_of("reward_examples:misbehaving", lambda completions: [1.0, "x", 2.0, "x"])
    with pytest.raises(RewardsFailed, match="rewards fail for 3 of 4 answers, more than half"):
        rewards.score(rollout("nan", "b", "c", "d", groups=[0, 0, 0, 0]))


def test_groups_need_not_be_neighbours(rewards_of):
    rewards = rewards_of("reward_examples:misbehaving")
    outcome = rewards.score(rollout("a", "shorter", "b", "c", "d", groups=[5, 2, 5, 2, 5]))
    assert outcome.dropped.tolist() == [False, True, False, True, False]


def test_one_call_for_all_rows_and_no_second_one(rewards_of):
    calls = []
    rewards = rewards_of(lambda completions: calls.append(completions) or [1.0] * len(completions))
    rewards.score(rollout("a", "b", "c", "d"))
    assert calls == [["a", "b", "c", "d"]]


def test_a_column_that_rows_lack_is_named(rewards_of):
    rewards = rewards_of("reward_examples:asking_for", "length(9)")
    assert rewards.columns_wanted == {"difficulty"}
    rewards.check_columns({"difficulty", "answer"})
    with pytest.raises(ConfigurationError) as error:
        rewards.check_columns({"level"})
    assert str(error.value) == (
        "rewards: asking_for asks for the column 'difficulty', which rows do not have (beside the "
        "prompt they have level); map theirs to it: columns={'difficulty': 'THEIR_NAME'}"
    )
