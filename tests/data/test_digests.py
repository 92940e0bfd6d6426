"""A file is read again exactly when it may have changed."""

import concurrent.futures
import hashlib
import json
import os
import random
import time
from pathlib import Path

import pytest

from chronicals.data import DataError
from chronicals.data.reading import digests as of_digests
from chronicals.data.reading.digests import FileDigests


def digest(folder, file):
    with FileDigests(folder) as digests:
        return digests.of(file)


@pytest.fixture
def read(record_calls):
    """Calls that read the content of a file."""
    return record_calls(of_digests.hashlib, "file_digest")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(random.randbytes(1000))
    time.sleep(2 * of_digests.CLOCK_TICK)
    return path


def test_a_file_is_read_once(tmp_path, file, read):
    expected = hashlib.sha256(file.read_bytes()).hexdigest()
    link = tmp_path / "link.jsonl"
    link.symlink_to(file)
    assert {digest(tmp_path / "tokens", path) for path in (file, file, link)} == {expected}
    assert [Path(content.name).name for content, _ in read] == ["rows.jsonl"]
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == ["file-digests.json"]


@pytest.mark.parametrize(
    "change", ["bytes", "same size", "same size and time", "another file of that name"]
)
def test_a_change_is_seen(tmp_path, file, read, change):
    before = digest(tmp_path, file)
    status = file.stat()
    content = random.randbytes(1001 if change == "bytes" else 1000)
    if change == "another file of that name":
        (tmp_path / "new").write_bytes(content)
        os.replace(tmp_path / "new", file)
    else:
        file.write_bytes(content)
    if change != "same size":
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digest(tmp_path, file) == hashlib.sha256(content).hexdigest() != before
    assert len(read) == 2


def test_a_file_just_written_is_not_remembered(tmp_path, read):
    """Its clock may not have ticked between two contents."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"a")
    os.utime(path, ns=(time.time_ns(), time.time_ns()))
    digest(tmp_path / "tokens", path)
    assert not (tmp_path / "tokens" / "file-digests.json").exists()


def test_a_file_written_to_while_it_is_read_is_refused(tmp_path, file, plant):
    def file_digest(read, content, kind):
        with file.open("ab") as more:
            more.write(b"more")
        return read(content, kind)

    plant(of_digests.hashlib, "file_digest", file_digest)
    with pytest.raises(DataError, match=r"rows\.jsonl: was written to while it was read"):
        digest(tmp_path, file)


def test_a_file_that_is_gone_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.jsonl: cannot be read \(No such file"):
        digest(tmp_path, tmp_path / "gone.jsonl")


@pytest.mark.parametrize("damage", ["{", "", "[]", "\x00"])
def test_a_damaged_memory_is_made_again(tmp_path, file, read, damage):
    (tmp_path / "file-digests.json").write_text(damage)
    assert digest(tmp_path, file) == digest(tmp_path, file)
    assert [Path(content.name).name for content, _ in read] == ["rows.jsonl"]


def test_the_earliest_are_forgotten(tmp_path, file, set_constants):
    set_constants(of_digests, REMEMBERED_FILES=3)
    for number in range(5):
        (tmp_path / f"{number}").write_bytes(b"x")
    time.sleep(2 * of_digests.CLOCK_TICK)
    for number in range(5):
        digest(tmp_path, tmp_path / f"{number}")
    known = json.loads((tmp_path / "file-digests.json").read_text())
    assert [Path(name).name for name in known] == ["2", "3", "4"]


def test_what_is_known_is_kept_when_reading_stops(tmp_path, file):
    with pytest.raises(KeyboardInterrupt), FileDigests(tmp_path) as digests:
        digests.of(file)
        raise KeyboardInterrupt
    assert str(file) in json.loads((tmp_path / "file-digests.json").read_text())


@pytest.mark.slow
def test_many_at_once_leave_a_whole_memory(tmp_path):
    """Each of these knows nothing of the others but the file, as if it were another process."""
    files = [tmp_path / f"{number}" for number in range(8)]
    for path in files:
        path.write_bytes(random.randbytes(100))
    time.sleep(2 * of_digests.CLOCK_TICK)
    memory = tmp_path / "tokens" / "file-digests.json"

    def work(part):
        for path in part * 20:
            with FileDigests(memory.parent) as digests:
                digests._known = {}
                assert digests.of(path) == hashlib.sha256(path.read_bytes()).hexdigest()
            json.loads(memory.read_text())

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, random.sample(files, 8)) for _ in range(4)]:
            done.result()
    assert [entry.name for entry in memory.parent.iterdir()] == ["file-digests.json"]
    assert set(json.loads(memory.read_text())) <= {str(path.resolve()) for path in files}
