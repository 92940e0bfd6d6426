"""Gradients that are summed over the ranks within the backward pass are those that are summed
after it.
"""

import copy
import sys
from pathlib import Path

import pytest
import torch

import runs
import tiny
import two_processes
from chronicals.config import ConfigurationError
from chronicals.memory import RESERVE
from chronicals.models import present
from chronicals.policies import Decision, Facts, decide, facts, needed_memory
from chronicals.policies.cuda_graphs import CudaGraphs
from chronicals.policies.policy import Course
from chronicals.policies.reduce_in_backward import ReduceInBackward

sys.path.insert(0, str(Path(__file__).parent))
import scattered_ranks

from comparison import equal

pytestmark = [
    pytest.mark.of_file(3),
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks would compute on cards"),
]


@pytest.fixture(
    scope="module", params=[pytest.param(count, marks=pytest.mark.sample(1)) for count in (2, 3)]
)
def seen(request, tmp_path_factory):
    """What every rank returned, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    count = request.param
    codes, words = two_processes.run(
        scattered_ranks.__file__, folder, *scattered_ranks.CASES, count=count
    )
    assert codes == [0] * count, words
    return lambda case: [torch.load(folder / f"{case}.{rank}.pt") for rank in range(count)]


def assert_agree(found, expected, **tolerance):
    for part in ("weights", "states"):
        assert found[part].keys() == expected[part].keys()
        for name, value in expected[part].items():
            torch.testing.assert_close(found[part][name], value, **tolerance)
    torch.testing.assert_close(found["norms"], expected["norms"], **tolerance)
    assert equal(found["holders"], expected["holders"])


def test_one_micro_batch_to_the_bit(seen):
    for rank in seen("one micro-batch"):
        assert_agree(rank[True], rank[False], rtol=0.0, atol=0.0)


@pytest.mark.parametrize("part", ["weights", "states", "norms", "holders"])
def test_a_difference_of_one_bit_is_found(part, seen):
    """In what the comparisons of this file read."""
    expected = seen("one micro-batch")[0][False]
    tensors = copy.deepcopy(expected[part])
    one = next(iter(tensors.values())) if isinstance(tensors, dict) else tensors
    assert_agree({**expected, part: tensors}, expected, rtol=0.0, atol=0.0)
    one.view(-1)[:1].view(torch.uint8)[0] ^= 1
    with pytest.raises(AssertionError):
        assert_agree({**expected, part: tensors}, expected, rtol=0.0, atol=0.0)


def test_several_micro_batches_but_for_the_order_of_sums(seen):
    for rank in seen("two micro-batches"):
        assert_agree(rank[True], rank[False], rtol=1e-4, atol=1e-6)
        assert rank[True]["holders"][0][-1] == 0 < rank[True]["holders"][0][0]


def test_gradients_are_never_there_all_at_once(seen):
    for rank in seen("one micro-batch"):
        assert rank[True]["buckets"] > 2
        assert rank[True]["alive"] < rank[False]["alive"]
    assert min(rank[True]["alive"] for rank in seen("one micro-batch")) <= 2


def test_a_gradient_that_grows_after_it_was_sent_is_refused(seen):
    assert all("memory=['reduce_in_backward']" in rank["words"] for rank in seen("twice"))


def test_where_it_runs(tmp_path):
    def decided(graphs=False, sharded=True, context=1, **fields):
        sharding = Decision("sharding", sharded, "why")
        standing = frozenset({"use_cuda_graphs"} if graphs else ())
        course = Course(standing, None, "memory" in fields, sharding)
        asked = Facts(runs.config(tmp_path, **fields), None, 2, context)
        return ReduceInBackward().decide(asked, course)

    asked = {"memory": ["reduce_in_backward"]}
    assert decided().runs and decided(**asked).runs
    assert (
        not decided(graphs=True).runs
        and not decided(sharded=False).runs
        and not decided(context=2).runs
    )
    with pytest.raises(
        ConfigurationError, match="wait for heads, with context_parallel=2; leave one out"
    ):
        decided(context=2, **asked)
    assert decided(sharded=False, **asked).matters
    with pytest.raises(
        ConfigurationError,
        match=r"memory=\['reduce_in_backward'\]: .* sharding='none'; leave one out",
    ):
        decided(sharded=False, sharding="none", **asked)


@pytest.mark.parametrize(
    ("room", "memory", "runs_in_backward"),
    [(1.0, None, False), (0.6, None, True), (0.6, [], False)],
)
def test_a_card_without_room_for_all_gradients_decides_for_it(
    room, memory, runs_in_backward, tmp_path, monkeypatch, let_return
):
    """``room`` of what two ranks take with all gradients; ``memory`` leaves nothing to decide."""
    model = tiny.llama()
    estimates = []

    def estimate(*given):
        estimates.append(own(*given))
        return estimates[-1]

    own = needed_memory.estimate
    let_return(CudaGraphs, why_not=None)
    config = runs.config(
        tmp_path,
        batch_size=1,
        max_seq_length=8,
        logits_chunk_size=8,
        memory=memory,
        check_memory=False,
    )
    presented = present(model, True, True, pack_width=8)
    _, whole = needed_memory.expected_memory(Facts.of(config, presented, ranks=2))
    total = int(room * whole.needed(*whole.choice()) / RESERVE) + 1
    let_return(facts, card_memory=total)
    monkeypatch.setattr(needed_memory, "estimate", estimate)
    made = decide(Facts.of(config, presented, ranks=2))
    assert made["reduce_in_backward"].runs == runs_in_backward == (not made["use_cuda_graphs"].runs)
    assert len(estimates) == (2 if runs_in_backward else 1)
    weights = sum(p.numel() for p in model.parameters())
    if runs_in_backward:
        assert estimates[0].fixed - estimates[1].fixed == pytest.approx(4 * weights, rel=0.01)
        assert "would not fit" in made["reduce_in_backward"].reason
