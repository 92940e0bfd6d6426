"""The script of offloaded experts: forced routes miss what they should, and rows compute the same."""

import json
import sys
from collections import OrderedDict

import pytest
import scripts
import torch


@pytest.fixture(scope="module")
def script():
    return scripts.script("expert_offload")


@pytest.fixture(scope="module")
def decoding(script):
    return sys.modules["offload_decoding"]


@pytest.fixture(scope="module")
def forced(script):
    return sys.modules["forced_routes"]


@pytest.mark.parametrize("missing", [0.1, 0.3, 0.5])
def test_forced_routes_miss_their_share_of_slots_of_the_least_recently_used(
    script, decoding, forced, missing
):
    """Of Qwen3-30B-A3B's 128 experts, in as many slots as the script's budget has."""
    layers, experts, each, steps = 4, 128, 8, 200
    table = forced.routes(layers, experts, each, missing, steps)
    slots = OrderedDict()
    misses = chosen = 0
    for step, of_step in enumerate(table.tolist()):
        for layer, of_layer in enumerate(of_step):
            assert len(set(of_layer)) == each and max(of_layer) < experts
            for expert in of_layer:
                key = layer, expert
                is_timed = step >= decoding.FEW_TOKENS
                chosen += is_timed
                misses += is_timed and key not in slots
                slots.pop(key, None)
                slots[key] = None
                if len(slots) > layers * script.Sizes(layers).slots:
                    slots.popitem(last=False)
    assert misses / chosen == pytest.approx(missing, abs=0.01)


@pytest.mark.parametrize("recall", [0.9, 0.75])
def test_a_forced_prediction_names_its_share_of_the_missing_experts(forced, recall):
    """Wrong names are of experts that are not chosen while they could still be in slots."""
    layers, experts, each, steps = 3, 128, 8, 400
    hot = forced.hot_of(experts)
    table = forced.routes(layers, experts, each, 0.5, steps).tolist()
    prediction = forced.ForcedPrediction(torch.tensor(table), experts, recall)
    right = missing = 0
    for number, step in enumerate(table[:300]):
        for layer, chosen in enumerate(step):
            named = prediction.expect(layer, sorted(chosen), [])
            if layer + 1 == layers:
                assert named == []
                continue
            following = step[layer + 1]
            assert len(named) == each and set(named) >= {e for e in following if e < hot}
            soon = {e for later in table[number : number + 8] for e in later[layer + 1]}
            assert all(e in following or e not in soon for e in named)
            missing += sum(e >= hot for e in following)
            right += sum(e >= hot and e in named for e in following)
    assert right / missing == pytest.approx(recall, abs=0.03)


def test_a_forced_prediction_says_nothing_of_other_routes(forced):
    """Of a prompt between two decode steps, after which it goes on where it was."""
    table = forced.routes(2, 16, 4, 0.5, 5)
    prediction = forced.ForcedPrediction(table, 16, 1.0)

    def named(chosen):
        return [prediction.expect(layer, sorted(of), []) for layer, of in enumerate(chosen)]

    for step in (0, 1):
        assert named(table[step].tolist())[0] == table[step, 1].tolist()
    assert named([[0, 1, 2, 3, 4], list(range(16))]) == [[], []]
    assert prediction.position == 2
    for step in (2, 3, 4, 0):
        assert named(table[step].tolist())[0] == table[step, 1].tolist()


def test_tokens_a_second_of_all_layers_leave_the_head_alone(decoding):
    """A head of 1 ms and 8 layers of 0.5 ms each."""
    assert decoding.of_whole(0.005, 0.001, 8) == pytest.approx(1 / 0.025)


def test_a_row_that_computed_something_else_says_so(script):
    arm = {"seconds": 0.5, "losses": [2.0], "norms": [1.0]}
    row = {"tokens": 100, "arms": {"offloaded": arm}, "share": 0.5, "equal": False}
    said = script.line_of("lora-4k", row)
    assert "share 0.50 (bar 0.8)" in said and "loss 2.000000, norm 1.000000" in said
    assert said.endswith("norms and weights DIFFER")
    assert script.line_of("prompt", {"error": "RuntimeError: no"}) == "prompt: RuntimeError: no"
    decoded = {"equal bits": False, "equal tokens": False, "error": 0.1}
    assert script.same_words(decoded) == "logits off by 1.0e-01, other tokens"
    graphs = {"equal bits": True, "equal tokens of graphs": False, "error": 0.0}
    assert script.same_words(graphs) == "logits off by 0.0e+00, other tokens"


def test_a_row_says_the_recall_of_its_prediction(script):
    same = {"equal bits": True}
    arm = {
        **same,
        "forced": same,
        "tokens/s of 48 layers": 30.0,
        "chosen": 200,
        "missing": 10,
        "prefetched": 100,
        "used": 90,
        "recall": 0.9,
    }
    said = script.line_of("decode-50-predicted", {"arms": {"exact": arm}, "share": 0.8})
    assert "share 0.80 (bar 0.8)" in said and "5.0% missing, 50.0% prefetched, recall 0.90" in said
    assert said.endswith("logits bit-equal, with forced routes logits bit-equal")
    without = {**arm, "recall": None}
    assert "recall" not in script.line_of("decode-50", {"arms": {"exact": without}, "share": 0.8})


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "decode-50",
        "decode-50-predicted",
        "decode-30-predicted-75",
        "prompt",
        "lora-4k",
        "qlora-4k",
        "whole",
    ],
)
def test_a_row_of_tiny_sizes(script, name, tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["expert_offload.py", str(out), "--tiny", "--rows", name])
    script.main()
    row = json.loads(out.read_text())[name]
    assert "trace" not in row, row
    if name.startswith("decode"):
        exact = row["arms"]["exact"]
        assert exact["equal bits"] and exact["equal tokens"] and len(set(exact["tokens"])) > 1
        assert exact["forced"]["equal bits"] and exact["forced"]["equal tokens of graphs"]
        assert 0 < exact["missing"] < exact["chosen"] and exact["bytes"] > 0
        predicted = name != "decode-50"
        # Without a forced prediction a few experts are those of the step before, by chance.
        assert predicted == (exact["recall"] is not None) and (exact["used"] > 0 or not predicted)
    elif name == "prompt":
        assert row["equal bits"] and row["bytes"] > 0
    elif name == "whole":
        assert len(row["arms"]["offloaded"]["losses"]) == script.TINY_SIZES.steps
    else:
        assert row["equal"] and row["arms"]["offloaded"]["bytes"] > 0
