"""Which rewards a configuration may name, and where they run."""

import logging

import pytest

import reward_examples
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.rewards import build_rewards
from reward_examples import column, rollout


def test_a_lambda_runs_here_which_is_said_once(rewards_of, caplog):
    rewards = rewards_of((lambda completions: [2.0] * len(completions), 0.25))
    assert column(rewards.score(rollout("a", "b"))) == [2.0, 2.0]
    rewards.score(rollout("a", "b"))
    (said,) = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert "<lambda> cannot be imported" in said and "neither timed" in said
    assert rewards.weights == [0.25]


def test_a_function_that_can_be_imported_runs_apart(rewards_of, caplog):
    rewards = rewards_of(reward_examples.letters)
    assert column(rewards.score(rollout("a", "bb"))) == [1.0, 2.0]
    assert reward_examples.calls == [] and caplog.records == []


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("nowhere:f", "cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ("nowhere.py:f", "cannot be imported: FileNotFoundError: there is no file nowhere.py"),
        ("reward_examples:f", "has no attribute 'f'"),
        ("reward_examples:NUMBER", "is int, and neither a function nor an object with get_score"),
        ("reward_examples:Unmade", "is a class, and cannot be made without arguments"),
        ("reward_examples:of_verl", "and not completions, the answers; a reward is reward(prompts"),
        ("reward_examples:by_place", "some of it without a name"),
        ("reward_examples:of_the_trainer", "trainer_state of TRL's trainer does not exist here"),
        ("exakt", "there is no such built-in reward; there are arithmetic, exact,"),
        ("regex", "has no pattern; give one in brackets"),
    ],
)
def test_a_reward_that_cannot_be_had_is_an_error_before_a_model_is_loaded(entry, said):
    with pytest.raises(ConfigurationError) as error:
        build_rewards(ChronicalsConfig(rewards=[entry]))
    assert str(error.value).startswith(f"rewards={entry!r}: ") and said in str(error.value)


def test_all_that_is_wrong_is_a_line_each():
    with pytest.raises(ConfigurationError) as error:
        build_rewards(ChronicalsConfig(rewards=["exakt", "length(512)", "regex(()"]))
    assert [line.partition(":")[0] for line in str(error.value).splitlines()] == [
        "rewards='exakt'",
        "rewards='regex(()'",
    ]


def test_no_reward_is_an_error():
    with pytest.raises(ConfigurationError, match="^rewards: none is given, .* rewards="):
        build_rewards(ChronicalsConfig())


def test_names_tell_rewards_apart(rewards_of):
    here = [(lambda value: lambda completions: [value] * len(completions))(n) for n in (1.0, 2.0)]
    rewards = rewards_of("exact", "exact(solution)", "reward_examples:letters", *here)
    assert rewards.names == ["exact", "exact_2", "letters", "<lambda>", "<lambda>_2"]
    assert rewards.columns_wanted == {"answer", "solution"}
    outcome = rewards.score(rollout("abc", "d", answer=["abc", ""], solution=["", "d"]))
    assert outcome.values.tolist() == [[1.0, 0.0, 3.0, 1.0, 2.0], [0.0, 1.0, 1.0, 1.0, 2.0]]
