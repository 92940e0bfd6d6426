"""Ranks that each update a share of every weight end where one process does that updates all."""

import sys
from pathlib import Path

import pytest
import torch

import two_processes
from chronicals.distributed import Mesh, shards
from chronicals.distributed.shards import share_bounds, width_of
from chronicals.kernels.adamw import join_master

sys.path.insert(0, str(Path(__file__).parent))
import sharded_ranks

pytestmark = [
    pytest.mark.of_file(4),
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="the ranks would compute on cards, one process on the CPU"
    ),
]

COUNTS = (2, 3, 4)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("elements", [1, 255, 256, 257, 1024, 5000, 66690])
def test_shares_are_the_whole(elements, count):
    """One behind the other, cut at blocks, the first the widest."""
    shares = [share_bounds(elements, rank, count) for rank in range(count)]
    assert shares[0] == (0, min(width_of(elements, count), elements)) and shares[-1][1] == elements
    for (begin, end), (follows, _) in zip(shares, [*shares[1:], (elements, None)]):
        assert (
            follows == end >= begin
            and (begin % 256 == 0 or begin == elements)
            and end - begin <= width_of(elements, count)
        )


@pytest.mark.parametrize("count", [2, 3, 20])
@pytest.mark.parametrize("elements", [1, 256, 1000, 5120, 66690])
def test_gradients_are_spread_alike_by_rows_and_at_once(elements, count, set_constants):
    gradient = torch.randn(elements)
    found = []
    for rows in (0, 100):
        set_constants(shards, ROWS=rows)
        place = torch.zeros(count, width_of(elements, count) + 7)[:, :-7]
        torch._foreach_copy_(*shards._spread(place, gradient))
        found.append(place.reshape(-1))
    assert torch.equal(found[0][:elements], gradient) and not found[0][elements:].any()
    assert torch.equal(found[0], found[1])


@pytest.fixture(
    scope="module", params=[pytest.param(count, marks=pytest.mark.sample(1)) for count in COUNTS]
)
def seen(request, tmp_path_factory):
    """What every rank returned, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    count = request.param
    codes, words = two_processes.run(
        sharded_ranks.__file__, folder, *sharded_ranks.CASES, count=count
    )
    assert codes == [0] * count, words

    def of(case):
        return [torch.load(folder / f"{case}.{rank}.pt") for rank in range(count)]

    return of, count


EXACT = {
    "fp32": "fp32",
    "bf16": "bf16",
    "8 bits": "8 bits",
    "small buckets": "bf16",
    "strided": "bf16",
}


@pytest.mark.parametrize("case", EXACT)
def test_weights_and_states_are_those_of_one_process(case, seen):
    """To the bit, on every rank."""
    of, count = seen
    expected = sharded_ranks.train(EXACT[case], Mesh(), count, strided=case == "strided")
    first, *others = of(case)
    wrong = [
        name
        for name, value in expected.items()
        if name != "norms" and not torch.equal(first[name], value)
    ]
    assert not wrong
    assert all(
        torch.equal(other[name], first[name])
        for other in others
        for name in (*sharded_ranks.SHAPES, "norms")
    )


def test_the_norm_is_that_of_all_shares_and_clips(seen):
    """fp32 sums of as many squares as torch has deviate by 3e-5 themselves."""
    of, count = seen
    found = of("clipped")[0]
    expected = sharded_ranks.train("bf16", Mesh(), count, clipped=0.5)
    steps = [
        [
            sharded_ranks.gradients(step, name, count).sum(0).flatten().double()
            for name in sharded_ranks.SHAPES
            if name != "idle"
        ]
        for step in range(sharded_ranks.STEPS)
    ]
    norms = torch.stack([torch.cat(parts).norm() for parts in steps])
    torch.testing.assert_close(found["norms"].double(), norms, rtol=5e-5, atol=0)
    for part in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(
            found[f"large:{part}"], expected[f"large:{part}"], rtol=2e-4, atol=1e-9
        )


def test_what_nobody_has_a_gradient_of_stays(seen):
    of, _ = seen
    assert all(
        torch.equal(found["idle"], sharded_ranks.made("bf16")["idle"]) for found in of("bf16")
    )


def test_without_masters_weights_move_as_with_them_in_the_mean(seen):
    of, _ = seen
    (without, *_), (exact, *_) = of("without masters"), of("bf16")
    start = sharded_ranks.made("bf16")["large"].detach().float()
    moved = without["large"].float() - start
    expected = join_master(exact["large"], exact["large:low"]) - start
    assert "large:low" not in without
    assert float((moved * expected).sum() / expected.square().sum()) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("kind", ["bf16", "8 bits"])
def test_states_go_into_another_optimizer_and_written_weights_are_taken_over(kind, seen):
    of, count = seen
    case = "interrupted" if kind == "bf16" else "interrupted in 8 bits"
    expected = sharded_ranks.train(kind, Mesh(), count, interrupted=True)
    undisturbed = sharded_ranks.train(kind, Mesh(), count)
    found = of(case)[0]
    assert not torch.equal(expected["matrix"], undisturbed["matrix"])
    assert not [
        name
        for name, value in expected.items()
        if name != "norms" and not torch.equal(found[name], value)
    ]


def test_each_rank_keeps_a_share_of_the_states(seen):
    """10 bytes a weight of bf16 over all ranks, the first of them with a block of each weight
    more at most.
    """
    of, count = seen
    for found in of("bytes"):
        most = 10 * (int(found["elements"]) / count + 256 * len(sharded_ranks.SHAPES))
        assert int(found["bytes"]) <= most
    assert sum(int(found["bytes"]) for found in of("bytes")) == 10 * int(of("bytes")[0]["elements"])
