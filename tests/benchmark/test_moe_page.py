"""The page about mixtures of experts has the figures of the results, and these are within their
bars.
"""

import json

import pytest
import scripts

page = scripts.script("moe_page")


def result(name):
    return json.loads((page.RESULTS / f"moe-{name}-cpu.json").read_text())


def test_the_page_is_of_the_results():
    assert page.PAGE.read_text() == page.page()


def test_exactness_is_within_its_bars():
    found = result("exactness")
    assert all(value <= found["bars"][name] for name, value in found["largest"].items())


def test_experts_are_predicted():
    found = result("lookahead")
    assert all(run["passed"] for run in (*found["native"], *found["frozen"], found["gradients"]))


@pytest.mark.parametrize("family", ["chronicals_moe", "qwen3_moe"])
def test_every_stage_improves_and_anchors_hold(family):
    found = result("stages")
    runs = [run for run in found["stages"] if run["family"] == family]
    asked = {
        (stage, how) for stage in ("sft", "dpo", "orpo", "distill") for how in ("full", "lora")
    }
    assert {(run["stage"], run["how"]) for run in runs} >= asked
    assert len({run["seed"] for run in runs if run["stage"] == "sft"}) >= 3 and all(
        run["improved"] for run in runs
    )
    anchors = [run for run in found["anchor"] if run["family"] == family]
    for free, held in zip(
        *([run for run in anchors if bool(run["weight"]) == on] for on in (False, True)),
        strict=True,
    ):
        assert (
            held["drift"] <= 0.5 * free["drift"]
            and held["cross_entropy"] <= 1.02 * free["cross_entropy"]
        )
        assert held["anchor_first"] == 0.0
