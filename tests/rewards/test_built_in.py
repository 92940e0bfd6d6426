"""Built-in rewards by hand-made answers."""

import sys
import types

import pytest

from chronicals.rewards.built_in import BUILT_IN
from chronicals.rewards.calling import reward_function


def values(entry, completions, **columns):
    place, _, argument = entry.partition("(")
    reward = reward_function(place, argument.removesuffix(")") or None)
    given = reward({"completions": completions, **columns})
    assert given.faults == {}
    return given.values


@pytest.mark.parametrize(
    ("question", "answer", "value"),
    [
        ("12 + 7 =", "It is 19.", 1.0),
        ("12 + 7 =", "12 + 7 = 18", 0.0),
        ("What is 2 + 3 * 4?", "first 12, then 14", 1.0),
        ("(2 + 3) \u00d7 4", "20", 1.0),
        ("7 - 10", "\u22123", 1.0),
        ("Compute 1/3 + 1/6.", "1/2", 1.0),
        ("0.1 + 0.2", "0.3", 1.0),
        ("1000 * 1000", "1,000,000", 1.0),
        ("10 / 4 = ?", "2.5", 1.0),
        ("Add 3 + 4", "no number", 0.0),
        ("Add 3 + 4", "7 is the sum of 3 and 4", 0.0),
        ("12 apples", "12", None),
        ("1 / 0", "0", None),
        ("9 ** 9 ** 9 ** 9", "1", None),
        ("no question", "1", None),
        ("1,234 + 5", "1,239", 1.0),
        ("What is it (12 + 7)?", "19", 1.0),
        ("12 + 7 * 3 (2 points)", "33", 1.0),
        ("12 + 7 -- in one word", "19", 1.0),
        ("Add 3 + 4", "of 3,4 the sum is 1,2,7", 1.0),
        ([{"role": "user", "content": "5 - 8"}], [{"role": "assistant", "content": "-3"}], 1.0),
    ],
)
def test_arithmetic(question, answer, value):
    assert values("arithmetic", [answer], prompts=[question], completion_ids=[[1]]) == [value]


def test_arithmetic_by_a_column():
    assert values("arithmetic(right)", ["so 8", "9"], right=["8", 8], prompts=["", ""]) == [
        1.0,
        0.0,
    ]


def test_exact():
    given = [" 42\n", "42.", [{"role": "assistant", "content": "42"}]]
    assert values("exact", given, answer=["42", 42, 42]) == [1.0, 0.0, 1.0]
    assert values("exact(gold)", ["a"], gold=["a "], answer=["b"]) == [1.0]
    assert values("exact", ["None", ""], answer=[None, ""]) == [None, 1.0]


def test_regex_finds_a_pattern_anywhere_over_lines():
    given = ["so <a>\n4</a>.", "<a>4", "a, (b=c)"]
    assert values("regex(<a>.*</a>)", given) == [1.0, 0.0, 0.0]
    assert values(r"regex(\(b=c\))", given) == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("entry", "tokens", "penalty"),
    [
        ("length(100)", [0, 80, 90, 100, 101], [0.0, 0.0, -0.5, -1.0, -1.0]),
        ("length(20480, 4096)", [16384, 18432, 20480], [0.0, -0.5, -1.0]),
        ("length(8,8)", [0, 4, 9], [0.0, -0.5, -1.0]),
    ],
)
def test_length_is_the_penalty_of_dapo(entry, tokens, penalty):
    """The second case has the numbers of the paper, section 3.4."""
    ids = [[1] * count for count in tokens]
    assert values(entry, ["x"] * len(ids), completion_ids=ids) == penalty


@pytest.mark.parametrize("argument", [None, "", "a", "1,2,3", "4,8", "0", "5,0"])
def test_length_takes_one_or_two_numbers(argument):
    with pytest.raises(ValueError, match=r"takes the most tokens .* as length\(512, 128\)"):
        BUILT_IN["length"](argument)


def test_math_is_that_of_math_verify(monkeypatch):
    """A stand-in of its two functions, as TRL's accuracy_reward calls them."""
    library = types.ModuleType("math_verify")
    library.parse = lambda text: [part for part in text.split() if part.strip("$").isdigit()]
    library.verify = lambda gold, answer: gold == answer
    monkeypatch.setitem(sys.modules, "math_verify", library)
    assert values("math", ["it is 4", "5", "6"], answer=["4", 4, "x"]) == [1.0, 0.0, None]


def test_math_says_how_it_is_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ValueError, match=r"pip install 'chronicals\[math\]'"):
        BUILT_IN["math"](None)
