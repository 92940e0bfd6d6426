"""The script of offloaded experts: forced routes miss what they should, and rows compute the same."""

import json
import sys
from collections import OrderedDict

import pytest
import scripts


@pytest.fixture(scope="module")
def script():
    return scripts.script("expert_offload")


@pytest.mark.parametrize("missing", [0.1, 0.3, 0.5])
def test_forced_routes_miss_their_share_of_slots_of_the_least_recently_used(script, missing):
    """Of Qwen3-30B-A3B's 128 experts, in as many slots as the script's budget has."""
    layers, experts, each, steps = 4, 128, 8, 200
    table = sys.modules["forced_routes"].routes(layers, experts, each, missing, steps)
    slots = OrderedDict()
    misses = chosen = 0
    for step, of_step in enumerate(table.tolist()):
        for layer, of_layer in enumerate(of_step):
            assert len(set(of_layer)) == each and max(of_layer) < experts
            for expert in of_layer:
                key = layer, expert
                is_timed = step >= script.FEW_TOKENS
                chosen += is_timed
                misses += is_timed and key not in slots
                slots.pop(key, None)
                slots[key] = None
                if len(slots) > layers * script.Sizes(layers).slots:
                    slots.popitem(last=False)
    assert misses / chosen == pytest.approx(missing, abs=0.01)


def test_tokens_a_second_of_all_layers_leave_the_head_alone(script):
    """A head of 1 ms and 8 layers of 0.5 ms each."""
    assert script.of_whole(0.005, 0.001, 8) == pytest.approx(1 / 0.025)


def test_a_row_that_computed_something_else_says_so(script):
    arm = {"seconds": 0.5, "losses": [2.0], "norms": [1.0]}
    row = {"tokens": 100, "arms": {"offloaded": arm}, "share": 0.5, "equal": False}
    said = script.line_of("lora-4k", row)
    assert "share 0.50 (bar 0.8)" in said and "loss 2.000000, norm 1.000000" in said
    assert said.endswith("norms and weights DIFFER")
    assert script.line_of("prompt", {"error": "RuntimeError: no"}) == "prompt: RuntimeError: no"
    decoded = {"equal bits": False, "equal tokens": False, "error": 0.1}
    assert script.same_words(decoded) == "logits off by 1.0e-01, other tokens"


@pytest.mark.long
@pytest.mark.parametrize("name", ["decode-50", "prompt", "lora-4k", "qlora-4k", "whole"])
def test_a_row_of_tiny_sizes(script, name, tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["expert_offload.py", str(out), "--tiny", "--rows", name])
    script.main()
    row = json.loads(out.read_text())[name]
    assert "trace" not in row, row
    if name == "decode-50":
        exact = row["arms"]["exact"]
        assert exact["equal bits"] and exact["equal tokens"]
        assert 0 < exact["missing"] < exact["chosen"] and exact["bytes"] > 0
    elif name == "prompt":
        assert row["equal bits"] and row["bytes"] > 0
    elif name == "whole":
        assert len(row["arms"]["offloaded"]["losses"]) == script.TINY_SIZES.steps
    else:
        assert row["equal"] and row["arms"]["offloaded"]["bytes"] > 0
