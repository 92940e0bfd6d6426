"""Checkpoints whose optimizer states each rank writes by itself: whole or not there, for any
number of ranks, read by torch.
"""

import json
import random
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

import runs
import tiny
import two_processes
from chronicals.saving import Piece, read_optimizer, write_pieces
from chronicals.training.run.checkpoint import check_checkpoint, checkpoints

sys.path.insert(0, str(Path(__file__).parent))
import killed_ranks

from comparison import equal

pytestmark = [pytest.mark.of_file(4), pytest.mark.slow]

on_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="one process would compute on the card, two on the CPU"
)


def written(folder, count=3):
    """Whole states, of which each of ``count`` ranks wrote its pieces; the last rank has nothing
    of the small one.
    """
    torch.manual_seed(0)
    whole = {
        "w:exp_avg": torch.randn(10, 7),
        "w:low": torch.randint(-9, 9, (10, 7), dtype=torch.int16),
        "v:exp_avg": torch.randn(2),
    }
    for rank in range(count):
        pieces = {}
        for name, state in whole.items():
            width = -(-state.numel() // count)
            begin = min(rank * width, state.numel())
            pieces[name] = Piece(state.reshape(-1)[begin : begin + width], begin, state.shape)
        if rank == 0:
            pieces["w:step"] = Piece(torch.tensor([3.0]), 0, torch.Size())
        write_pieces(pieces, folder, rank, count)
    return {**whole, "w:step": torch.tensor(3.0)}


def test_pieces_are_put_together(tmp_path):
    whole = written(tmp_path)
    found = read_optimizer(tmp_path)
    assert found.keys() == whole.keys() and all(equal(found[name], whole[name]) for name in whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"optimizer-rank-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
    ]


def test_a_missing_piece_is_an_error(tmp_path):
    written(tmp_path)
    (tmp_path / "optimizer-rank-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="optimizer state 'v:exp_avg': 1 of 2 elements are there"):
        read_optimizer(tmp_path)


def test_torchs_distributed_checkpoints_read_them(tmp_path):
    whole = written(tmp_path)
    found = {name: torch.zeros(state.numel(), dtype=state.dtype) for name, state in whole.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert all(equal(found[name], whole[name].reshape(-1)) for name in whole)


def by_two(folder, resume=False, rank=0, kill_at=0, sharding="optimizer"):
    """Exit codes and words of two processes."""
    folder.mkdir(exist_ok=True)
    return two_processes.run(
        killed_ranks.__file__, folder, str(resume), str(rank), str(kill_at), sharding, seconds=150
    )


def whole_run(folder, sharding):
    """Its folder, and how many events each rank had."""
    codes, words = by_two(folder, sharding=sharding)
    assert codes == [0, 0], words
    return folder, [int((folder / f"events.{rank}").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return whole_run(tmp_path_factory.mktemp("ranks") / "run", "optimizer")


@pytest.fixture(scope="module")
def uninterrupted_divided(tmp_path_factory):
    return whole_run(tmp_path_factory.mktemp("divided") / "run", "weights")


@on_cpu
def test_each_rank_writes_its_own(uninterrupted):
    folder, events = uninterrupted
    newest = checkpoints(folder / "run")[0]
    described = json.loads((newest / "manifest.json").read_text())
    names = sorted(name for name in described if name.startswith("optimizer"))
    assert (
        names == [f"optimizer-rank-0000{n}-of-00002.safetensors" for n in (1, 2)]
        and check_checkpoint(newest) is None
    )
    sizes = [described[name]["size"] for name in names]
    assert max(sizes) < 1.2 * min(sizes) and min(events) > 10


@on_cpu
@pytest.mark.parametrize("alone", [False, True], ids=["by two", "by one"])
def test_two_go_on_to_the_bit_and_one_within_the_order_of_sums(alone, uninterrupted, tmp_path):
    """From the checkpoint before the last."""
    import shutil

    whole, _ = uninterrupted
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    newest, *_ = checkpoints(folder / "run")
    for path in (newest, folder / "run" / "model"):
        shutil.rmtree(path)
    if alone:
        runs.train(
            folder,
            rows=tiny.chat_rows(40),
            resume=True,
            **{**killed_ranks.SETTINGS, "gradient_accumulation_steps": 2},
        )
        found, expected = (
            torch.tensor(runs.trajectory(place), dtype=torch.float64) for place in (folder, whole)
        )
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=0)
    else:
        codes, words = by_two(folder, resume=True)
        assert codes == [0, 0], words
        runs.assert_same_bits(folder, whole)


def assert_goes_on_after_a_kill(folder, rank, kill_at, uninterrupted, sharding="optimizer"):
    whole, events = uninterrupted
    what = f"rank {rank} killed at event {kill_at} of {events[rank]}"
    codes, words = by_two(folder, rank=rank, kill_at=kill_at, sharding=sharding)
    assert codes[rank] == -9 and codes[1 - rank] != 0, (what, words)
    for left in checkpoints(folder / "run"):
        assert check_checkpoint(left) is None, what
    codes, words = by_two(folder, resume=True, sharding=sharding)
    assert codes == [0, 0], (what, words)
    runs.assert_same_bits(folder, whole, what)
    assert not [path.name for path in (folder / "run").rglob(".*")], what


@on_cpu
@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_killed_at_a_random_moment(rank, tmp_path, seed, uninterrupted):
    assert_goes_on_after_a_kill(
        tmp_path / "run",
        rank,
        random.Random(seed).randrange(1, uninterrupted[1][rank] + 1),
        uninterrupted,
    )


@on_cpu
@pytest.mark.long
@pytest.mark.parametrize("number", range(20))
def test_ranks_are_killed_at_many_random_moments(number, tmp_path, seed, uninterrupted):
    rank = number % 2
    assert_goes_on_after_a_kill(
        tmp_path / "run",
        rank,
        random.Random(seed + number).randrange(1, uninterrupted[1][rank] + 1),
        uninterrupted,
    )


@on_cpu
@pytest.mark.long
@pytest.mark.parametrize("number", range(6))
def test_ranks_that_divide_the_weights_are_killed_at_random_moments(
    number, tmp_path, seed, uninterrupted_divided
):
    """What neither has whole is in the files of both, or in those of the checkpoint before."""
    rank = number % 2
    moment = random.Random(seed + number).randrange(1, uninterrupted_divided[1][rank] + 1)
    assert_goes_on_after_a_kill(tmp_path / "run", rank, moment, uninterrupted_divided, "weights")
