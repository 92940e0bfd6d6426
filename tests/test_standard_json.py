"""What is written as JSON can be read by every reader of JSON."""

import json
import math

import pytest

from chronicals.standard_json import to_json


def refuse(name):
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.parametrize("indent", [None, 1])
def test_what_is_no_number_is_null(indent):
    value = {
        "a": math.nan,
        "b": [1.5, (math.inf, -math.inf)],
        "c": {"d": math.nan, "e": "NaN", "f": True},
    }
    read = json.loads(to_json(value, indent), parse_constant=refuse)
    assert read == {"a": None, "b": [1.5, [None, None]], "c": {"d": None, "e": "NaN", "f": True}}


def test_numbers_stay_as_they_are():
    value = {"a": 0.1, "b": 10**20, "c": -0.0, "d": None}
    assert to_json(value, 2) == json.dumps(value, indent=2)
