"""What a result file derives from its raw data is what the present code derives from them."""

import json

import pytest
import scripts

script = scripts.script("recompute_shares")
PATHS = sorted((scripts.ROOT / "benchmarks" / "results").glob("row-*.json"))


def approximately(value):
    """The same with every number as pytest's approximate one."""
    if isinstance(value, dict):
        return {name: approximately(part) for name, part in value.items()}
    if isinstance(value, list):
        return [approximately(part) for part in value]
    return pytest.approx(value) if isinstance(value, float) else value


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_result_files_are_as_the_script_makes_them(path):
    result = json.loads(path.read_text())
    assert script.recomputed(result) == approximately(result)


def made(**ours):
    rate = {"tokens_per_second": {"median": 1000.0}, "mfu": 0.5, "share_of_floor": 0.1}
    profile = {
        "milliseconds_a_step": {"products": 40.0, "elementwise": 45.0, "gaps": 15.0},
        "share": {},
        "steps": 3,
    }
    profile["kernels"] = [
        {
            "name": "_passing_kernel",
            "kind": "elementwise",
            "calls_a_step": 1,
            "milliseconds_a_step": 5.0,
        }
    ]
    arm = {"settings": "bf16", **rate, "profile": profile, **ours}
    floor = {
        "products": 0.05,
        "attention": 0.01,
        "elementwise": 0.02,
        "loss": 0.005,
        "optimizer": 0.005,
        "tokens": 100,
    }
    return {
        "row": {"fields": {}},
        "floor": floor,
        "arms": {"ours": arm, "liger": {"settings": "sdpa", **rate, "profile": None}},
    }


def test_a_kernel_moves_to_its_present_kind_and_the_best_time_counts():
    found = script.recomputed(made())
    assert found["arms"]["ours"]["profile"]["milliseconds_a_step"] == {
        "products": 45.0,
        "elementwise": 40.0,
        "gaps": 15.0,
    }
    assert (
        found["floor"]["products"] == pytest.approx(0.045)
        and found["floor"]["by_itself"]["products"] == 0.05
    )
    assert found["arms"]["liger"]["share_of_floor"] == pytest.approx(0.85)


def test_a_name_that_was_cut_keeps_its_kind():
    kernel = {
        "name": "x" * script.CUT,
        "kind": "elementwise",
        "calls_a_step": 1,
        "milliseconds_a_step": 5.0,
    }
    found = script.recomputed_profile(
        {"milliseconds_a_step": {"elementwise": 5.0, "other": 0.0}, "kernels": [kernel]}
    )
    assert found["milliseconds_a_step"] == {"elementwise": 5.0, "other": 0.0}


def test_ours_in_fp8_has_no_share_and_no_mfu_and_its_profile_does_not_count():
    found = script.recomputed(made(settings="bf16, use_fp8=True"))
    assert found["floor"]["products"] == 0.05
    assert (found["arms"]["ours"]["mfu"], found["arms"]["ours"]["share_of_floor"]) == (None, None)
    assert found["arms"]["liger"]["mfu"] == 0.5


def test_a_row_whose_reference_step_a_peer_passes_is_to_be_measured_again():
    result = made()
    result["arms"]["liger"]["tokens_per_second"] = {"median": 20000.0}
    with pytest.raises(SystemExit, match="liger ran at 170"):
        script.recomputed(result)
