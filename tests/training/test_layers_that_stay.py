"""The last layers stay gathered between their passes where memory is spare."""

import sys
from pathlib import Path

import pytest
import torch

import runs
import tiny
import two_processes
from chronicals.config import ConfigurationError
from chronicals.distributed import Mesh
from chronicals.memory import CHEAP, LAYERS, NOTHING, Estimate
from chronicals.models import present
from chronicals.planning.traffic import traffic
from chronicals.policies import Facts, facts
from chronicals.policies.needed_memory import expected_memory, gathered_bytes, layers_that_stay
from chronicals.training import session

sys.path.insert(0, str(Path(__file__).parent))
import stay_ranks

from comparison import equal

pytestmark = [pytest.mark.of_file(4), pytest.mark.slow]


@pytest.mark.parametrize(
    "spare, count", [(-1, 0), (0, 0), (95, 0), (105, 1), (350, 3), (10_000, 8)]
)
def test_as_many_stay_as_there_is_room_for(spare, count):
    estimate = Estimate(1000, 8, {NOTHING: 50, CHEAP: 30, LAYERS: 10}, 1)
    total = round((estimate.needed(CHEAP) + spare) / 0.9) + 1
    assert (
        layers_that_stay(
            Estimate(1000, 8, {NOTHING: 50, CHEAP: 30, LAYERS: 10}, total), CHEAP, 0, 100
        )
        == count
    )


def test_none_stays_without_a_card_or_beside_layers_recomputed_whole():
    kept = {NOTHING: 50, CHEAP: 30, LAYERS: 10}
    assert layers_that_stay(Estimate(1000, 8, kept, 0), NOTHING, 0, 100) == 0
    assert layers_that_stay(Estimate(1000, 8, kept, 10**6), NOTHING, None, 100) == 0
    assert layers_that_stay(Estimate(1000, 8, kept, 10**6), CHEAP, 2, 100) == 0


class Cards(Mesh):
    """Two, of which the second has room for as many layers as ``other`` makes of those of the
    first.
    """

    def __init__(self, other):
        super().__init__(0, 2)
        self.other = other
        self.told = []

    def gather_values(self, value):
        if isinstance(value, dict):
            self.told.append(value)
            return [self.told[0], value]
        return [value, self.other(value) if isinstance(value, int) else value]


def decided(folder, let_return, cards, room, **fields):
    """What is decided on a card with room for so many layers and a half."""
    with torch.device("meta"):
        model = tiny.llama(hidden_size=2048, intermediate_size=8192, num_hidden_layers=4)
    usual = {
        "mixed_precision": "bf16",
        "batch_size": 1,
        "max_seq_length": 16,
        "sharding": "weights",
    }
    config = runs.config(folder, **usual, **fields)
    alone = Facts(config, model, 2, total=1, fuses_halves=False)
    needed = expected_memory(alone)[1].needed(NOTHING)
    total = int((needed + (room + 0.5) * gathered_bytes(alone)) / 0.9)
    let_return(facts, card_memory=total)
    return session.decide_together(present(model), config, cards)[1], needed, total


@pytest.mark.parametrize(("other", "stay"), [(1, 1), (4, 3), (0, 0)])
def test_as_many_stay_as_the_smallest_card_has_room_for(other, stay, tmp_path, let_return):
    made, needed, total = decided(tmp_path, let_return, Cards(lambda own: other), 3)
    size = stay * 2 * (2 * 2048**2 + 2 * 2048 * 1024 + 3 * 2048 * 8192 + 2 * 2048)
    said = f"; the last {stay} layers stay gathered between their passes, {size / 2**30:.1f} GiB"
    assert made["sharding"].stay == stay and made["sharding"].reason.endswith(said) == (stay > 0)
    estimated = (
        f"estimated {(needed + size) / 2**30:.1f} of {total / 2**30:.1f} GiB, nothing recomputed"
    )
    assert (
        made["use_gradient_checkpointing"].reason == estimated
        and not made["use_gradient_checkpointing"].runs
    )


def test_cards_on_which_other_layers_would_stay_are_refused(tmp_path, let_return):
    """They would gather other weights, and wait for each other for ever."""
    cards = Cards(lambda own: own)
    decided(tmp_path, let_return, cards, 3)
    with pytest.raises(
        ConfigurationError,
        match=r"do not train the same: sharding is .* 3\] on rank 0 and .* 1\] on rank 1",
    ):
        decided(tmp_path, let_return, cards, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="bytes are those of fp32 on the CPU")
def test_layers_that_stay_train_bit_equal_and_are_gathered_once(tmp_path):
    codes, words = two_processes.run(stay_ranks.__file__, tmp_path, seconds=120)
    assert codes == [0, 0], [said[-2500:] for said in words]
    divided, *others = torch.load(tmp_path / "found.pt")
    config = runs.config(
        tmp_path,
        objective="pretraining",
        gradient_accumulation_steps=stay_ranks.MICRO,
        sharding="weights",
    )
    for stay, found in enumerate([divided, *others]):
        assert found["seen"] == divided["seen"]
        for name, expected in divided["weights"].items():
            assert equal(found["weights"][name], expected), name
        expected = traffic(tiny.llama(), config, 2, False, stay=stay).all_gather
        assert found["gathered"] == pytest.approx(expected, rel=0.01), stay
    assert others[1]["gathered"] < others[0]["gathered"] < divided["gathered"]
    last = [False] * (stay_ranks.LAYERS - 1) + [True, True]
    none = [False] * (stay_ranks.LAYERS + 1)
    for rank, found in enumerate(torch.load(tmp_path / "broken.pt")):
        assert found == {
            "decided": 1,
            "broken": last,
            "left": none,
            "failed": none,
            "falls": True,
        }, rank
