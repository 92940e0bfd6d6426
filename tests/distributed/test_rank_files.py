"""Files of several ranks in a folder that one writes, also from machines that do not see it;
ranks are threads here.
"""

import json
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from chronicals.distributed import Mesh, RankFiles, rank_files
from chronicals.saving import CheckpointError

COUNT = 3


class OtherDisk:
    """The store as a rank sees it on whose machine the folder of this name is another one."""

    def __init__(self, store):
        self.store = store

    def __getattr__(self, name):
        return getattr(self.store, name)

    def get(self, key):
        said = self.store.get(key)
        if not key.endswith("/place") or said == b"null":
            return said
        folder, _ = json.loads(said)
        return json.dumps([folder, ".of another machine"]).encode()


def of_all(count=COUNT, blind=(), store=None):
    """As the ranks make them, in the same order; those of ``blind`` do not see the folder."""
    number = next(rank_files._folders)
    store = store or dist.HashStore()
    made = []
    for rank in range(count):
        seen = OtherDisk(store) if rank in blind else store
        made.append(RankFiles(Mesh(rank, count), CheckpointError, seen))
        made[-1]._key = f"files/{number}"
    return made


def delivering(files, write, share=None):
    """Threads of all but the first, and what each raised."""
    raised = {}

    def run(own):
        try:
            own.deliver(lambda folder: write(own.ranks.rank, folder), share)
        except Exception as error:
            raised[own.ranks.rank] = error

    threads = [threading.Thread(target=run, args=(own,), daemon=True) for own in files[1:]]
    for thread in threads:
        thread.start()
    return threads, raised


def written(rank: int, folder: Path):
    (folder / f"small-{rank}").write_bytes(bytes([rank]) * 5)
    (folder / f"large-{rank}").write_bytes(bytes(range(256)) * (20 * rank + 1))
    (folder / f"empty-{rank}").write_bytes(b"")


@pytest.mark.parametrize("seen", [True, False], ids=["one disk", "disks of their own"])
def test_all_files_are_there_and_nothing_else(seen, tmp_path, set_constants):
    set_constants(rank_files, SENT_PIECE=1000)
    files = of_all(blind=() if seen else range(1, COUNT))
    aside = tmp_path / "aside"
    places = []
    aside.mkdir()
    threads, raised = delivering(
        files, lambda rank, folder: (places.append(folder), written(rank, folder))
    )
    with files[0].collecting(aside):
        pass
    for thread in threads:
        thread.join(10)
    for rank in range(1, COUNT):
        written(rank, tmp_path)
        for kind in ("small", "large", "empty"):
            assert (aside / f"{kind}-{rank}").read_bytes() == (
                tmp_path / f"{kind}-{rank}"
            ).read_bytes()
    assert not raised and len(list(aside.iterdir())) == 3 * (COUNT - 1)
    assert (set(places) == {aside}) == seen and all(
        place == aside or not place.exists() for place in places
    )


@pytest.mark.parametrize("seen", [True, False], ids=["one disk", "disks of their own"])
def test_a_rank_that_cannot_write_is_named_and_nobody_waits(seen, tmp_path):
    files = of_all(blind=() if seen else range(1, COUNT))

    def write(rank, folder):
        if rank == 1:
            raise OSError(28, "No space left on device")
        written(rank, folder)

    threads, raised = delivering(files, write)
    said = "rank 1 could not write its part: OSError: .*No space left"
    with pytest.raises(CheckpointError, match=said), files[0].collecting(tmp_path):
        pass
    files[0].give_up()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert isinstance(raised[1], OSError) and (seen or "given this folder up" in str(raised[2]))


def shared(folder, turn, turns):
    """Which reads what all wrote."""
    content = b"".join((folder / f"small-{rank}").read_bytes() for rank in range(COUNT))
    (folder / f"share-{turn}-of-{turns}").write_bytes(content)


@pytest.mark.parametrize(
    "blind", [set(), {1}, {1, 2}], ids=["one disk", "two see it", "the first alone"]
)
def test_those_that_see_the_folder_share_what_is_written_of_all_files(blind, tmp_path):
    files = of_all(blind=blind)
    threads, raised = delivering(files, written, shared)
    with files[0].collecting(tmp_path):
        written(0, tmp_path)
    # In a thread, too, so that a rank that is waited for in vain fails the test
    first = threading.Thread(target=files[0].share, args=(tmp_path, shared), daemon=True)
    first.start()
    for thread in [first, *threads]:
        thread.join(10)
        assert not thread.is_alive()
    assert not raised
    turns = COUNT - len(blind)
    shares = {f"share-{turn}-of-{turns}" for turn in range(turns)}
    assert {file.name for file in tmp_path.glob("share-*")} == shares
    assert all(
        (tmp_path / name).read_bytes() == bytes([r for r in range(COUNT) for _ in range(5)])
        for name in shares
    )


def test_a_rank_that_cannot_write_its_share_is_named(tmp_path):
    files = of_all()

    def share(folder, turn, turns):
        if turn == 2:
            raise OSError(28, "No space left on device")

    threads, raised = delivering(files, written, share)
    with files[0].collecting(tmp_path):
        written(0, tmp_path)
    with pytest.raises(
        CheckpointError, match="rank 2 could not write its part: OSError: .*No space left"
    ):
        files[0].share(tmp_path, share)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert isinstance(raised[2], OSError) and 1 not in raised


def test_nobody_waits_for_a_share_of_what_the_first_gave_up(tmp_path):
    files = of_all()
    threads, raised = delivering(files, written, lambda *_: pytest.fail("was called"))
    with files[0].collecting(tmp_path):
        written(0, tmp_path)
    files[0].give_up()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert not raised


def test_where_the_first_fails_before_the_others_heard_of_a_folder_they_do_nothing():
    files = of_all()
    threads, raised = delivering(files, lambda rank, folder: pytest.fail("was called"))
    files[0].give_up()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert not raised


@pytest.mark.parametrize("blind", [set(), {1}], ids=["the folder", "another of its name"])
def test_a_folder_of_the_same_name_on_another_machine_is_not_taken_for_it(blind, tmp_path):
    places = []
    files = of_all(2, blind)
    threads, raised = delivering(files, lambda rank, folder: places.append(folder))
    with files[0].collecting(tmp_path):
        pass
    threads[0].join(10)
    assert not raised and (places == [tmp_path]) == (not blind) and len(places) == 1


def test_torchs_own_store_takes_large_files(tmp_path):
    """It refuses values of more than 8 MiB; and keeps none of what was fetched."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    files = of_all(2, {1}, store)
    content = bytes(range(256)) * 40_000
    threads, raised = delivering(
        files, lambda rank, folder: (folder / "large").write_bytes(content)
    )
    before = store.num_keys()
    with files[0].collecting(tmp_path):
        pass
    threads[0].join(10)
    assert (
        (tmp_path / "large").read_bytes() == content
        and not raised
        and store.num_keys() <= before + 1
    )
