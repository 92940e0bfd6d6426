"""The page of presets is what the script makes of its results, of every size, way and card."""

import importlib.util
import json
from pathlib import Path

import pytest

from chronicals.config.presets import CARDS, WAYS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location(
        "preset_table", ROOT / "benchmarks/preset_table.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_of_the_results(script):
    made = json.loads(script.RESULTS.read_text())
    assert script.PAGE.read_text() == script.laid_out("".join(script.page(made)))


def test_each_preset_is_planned_and_what_fits_none_says_what_would_do(script):
    rows = json.loads(script.RESULTS.read_text())["rows"]
    combined = len(script.OBJECTIVES) * len(script.SIZES) * len(WAYS) * len(CARDS)
    assert len({script.key(row) for row in rows}) == len(rows) == combined
    for row in rows:
        assert row["fits"] == (row["held"] <= 0.9 * row["card"] * 10**9)
        assert row["fits"] or " card" in row["enough"]
