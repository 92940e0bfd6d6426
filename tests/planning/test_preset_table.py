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


GIB = 2**30
RESULT = {
    "preset": "lora-24gb",
    "config_class": "Qwen2Config",
    "sizes": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
    },
    "fields": {},
    "gguf": "",
    "taken": {"batch_size": 2, "gradient_accumulation_steps": 4, "memory": ["tiled_mlp"]},
    "planned": {"held": 21 * GIB},
    "peak": 20 * GIB,
    "step_seconds": [1.0, 3.0],
    "tokens": [16384, 16000],
    "targets": [16384, 16000],
    "fill": [1.0, 1.0],
    "mean_length": 900.0,
}


def test_what_a_card_trained_stands_beside_its_plan(script, tmp_path, monkeypatch):
    """With the settings that the run took, which no plan chooses again."""
    results = {
        "machine": {},
        "0.5b lora, 24 GB": RESULT,
        "0.5b full, 8 GB": {"error": "TrainingError: out of memory on cuda:0 (8 GiB). Less is"},
    }
    monkeypatch.setattr(script, "TRAINED", tmp_path / "presets.json")
    assert script.compare_trained() == {}
    script.TRAINED.write_text(json.dumps(results))
    planned = []
    usual = script.plan_of_result
    monkeypatch.setattr(
        script,
        "plan_of_result",
        lambda result, rates: planned.append(result) or usual(result, rates),
    )
    trained = script.compare_trained()
    (given,) = planned
    assert given["fields"] == {**RESULT["taken"], "fit": "off"}
    made = {**json.loads(script.RESULTS.read_text()), "trained": trained}
    text = "".join(script.page(made))
    assert script.SOME_TRAINED in text and script.NONE_TRAINED not in text
    slowest, fastest = trained["0.5b lora, 24 GB"]["planned"]
    row = f"| 21.47 | 22.55 | +5.0% | 8,000 | {slowest:,.0f} to {fastest:,.0f} | `batch_size=2`"
    assert f"| 0.5b lora, 24 GB {row}" in text
    assert "| - | TrainingError: out of memory on cuda:0 (8 GiB) |" in text
