"""One call of a function in the process that it runs in."""

import numpy as np
import pytest
import torch

import reward_examples
from chronicals.rewards.calling import RewardFunction


def called(function, *completions, **columns):
    rows = {"prompts": [""] * len(completions), "completions": list(completions), **columns}
    return RewardFunction.of(function)({**rows, "completion_ids": [[1]] * len(completions)})


@pytest.mark.parametrize(
    "returned",
    [
        [1, 0.5, None],
        (True, 0.5, None),
        iter([np.float32(1), torch.tensor(0.5), None]),
    ],
)
def test_numbers_of_any_kind_are_values(returned):
    given = called(lambda completions: returned, "a", "b", "c")
    assert given.values == [1.0, 0.5, None] and given.faults == {}


@pytest.mark.parametrize("returned", [np.array([1, 2]), torch.tensor([1.0, 2.0])])
def test_an_array_is_a_list(returned):
    assert called(lambda completions: returned, "a", "b").values == [1.0, 2.0]


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (None, "TypeError: it returned NoneType, not a list"),
        (3.0, "TypeError: it returned float, not a list"),
        ({"a": 1}, "TypeError: it returned dict, not a list"),
        ([1.0] * 3, "ValueError: it returned 3 values for 2 rows"),
    ],
)
def test_a_wrong_return_is_a_fault_of_all_rows(returned, reason):
    given = called(lambda completions: returned, "a", "b")
    assert given.values == [None, None] and set(given.faults) == {0, 1}
    assert given.faults[0].startswith(reason)


def test_only_what_is_asked_for_is_given():
    def levels(completions, level=(0,)):
        return level

    assert called(levels, "a", level=[4], hint=["no"]).values == [4.0]
    assert called(levels, "a").values == [0.0]


def test_asynchronous_calls_share_a_loop():
    loops = [called(reward_examples.counting_loops, "a", "b").values for _ in range(3)]
    assert loops == [[1.0, 1.0]] * 3
    ended = called(reward_examples.counting_loops, "exit")
    assert ended.faults[0].startswith("RuntimeError: SystemExit: 5")
    assert called(reward_examples.counting_loops, "a").values == [1.0]


def test_an_asynchronous_function_is_called_where_a_loop_runs_already():
    import asyncio

    async def notebook():
        return called(reward_examples.later, "abc").values

    assert asyncio.run(notebook()) == [3.0]


def test_asynchronous_scores_are_waited_for_together():
    assert called(reward_examples.Patient, "a", "b", "c").values == [3.0, 3.0, 3.0]


def test_a_score_gets_the_messages_of_the_prompt_and_the_text_of_the_answer():
    seen = []

    class Seeing:
        def get_score(self, messages, answer):
            seen.append((messages, answer))
            return 1

    assert called(Seeing(), [{"role": "assistant", "content": "yes"}]).values == [1.0]
    assert seen == [([{"role": "user", "content": ""}], "yes")]
