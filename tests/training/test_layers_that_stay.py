"""The last layers stay gathered between their passes where memory is spare."""

import sys
from pathlib import Path

import pytest
import torch

import runs
import tiny
import two_processes
from chronicals.memory import CHEAP, LAYERS, NOTHING, Estimate
from chronicals.planning.traffic import traffic
from chronicals.training.needed_memory import layers_that_stay

sys.path.insert(0, str(Path(__file__).parent))
import stay_ranks

pytestmark = pytest.mark.of_file(4)


@pytest.mark.parametrize("spare, count", [(-1, 0), (0, 0), (95, 0), (105, 1), (350, 3), (10_000, 8)])
def test_as_many_stay_as_there_is_room_for(spare, count):
    estimate = Estimate(1000, 8, {NOTHING: 50, CHEAP: 30, LAYERS: 10}, 1)
    total = round((estimate.needed(CHEAP) + spare) / 0.9) + 1
    assert layers_that_stay(Estimate(1000, 8, {NOTHING: 50, CHEAP: 30, LAYERS: 10}, total), CHEAP, 0, 100) == count


def test_none_stays_without_a_card_or_beside_layers_recomputed_whole():
    kept = {NOTHING: 50, CHEAP: 30, LAYERS: 10}
    assert layers_that_stay(Estimate(1000, 8, kept, 0), NOTHING, 0, 100) == 0
    assert layers_that_stay(Estimate(1000, 8, kept, 10**6), NOTHING, None, 100) == 0
    assert layers_that_stay(Estimate(1000, 8, kept, 10**6), CHEAP, 2, 100) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="bytes are those of fp32 on the CPU")
def test_layers_that_stay_train_bit_equal_and_are_gathered_once(tmp_path):
    codes, words = two_processes.run(stay_ranks.__file__, tmp_path, seconds=120)
    assert codes == [0, 0], [said[-2500:] for said in words]
    divided, *others = torch.load(tmp_path / "found.pt")
    config = runs.config(
        tmp_path, objective="pretraining", gradient_accumulation_steps=stay_ranks.MICRO, sharding="weights"
    )
    for stay, found in enumerate([divided, *others]):
        assert found["seen"] == divided["seen"]
        for name, expected in divided["weights"].items():
            assert torch.equal(found["weights"][name], expected), name
        expected = traffic(tiny.llama(), config, 2, False, stay=stay).all_gather
        assert found["gathered"] == pytest.approx(expected, rel=0.01), stay
    assert others[1]["gathered"] < others[0]["gathered"] < divided["gathered"]
