"""The folder in which artefacts are made: one that a killed process left is removed, one that is
used stays.
"""

import errno
import fcntl
import signal
import subprocess
import sys
import threading

import pytest

import tiny
from chronicals.export import export
from chronicals.export.artefact import files_of_others, workspace

PROGRAM = """
import os, sys
from pathlib import Path
from chronicals.export.artefact import workspace
with workspace(Path(sys.argv[1])) as place:
    (place / "half").write_bytes(b"weights")
    print(place, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process with a folder, and that folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process, tmp_path / process.stdout.readline().strip().rpartition("/")[2]
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_what_a_killed_process_left_is_removed_at_the_next_export(other, tmp_path):
    process, place = other
    with workspace(tmp_path) as mine:
        assert (
            (place / "half").exists() and mine.exists() and mine != place
        )  # the other one is alive
    assert not mine.exists() and (place / "half").exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (place / "half").exists()
    tiny.llama().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    (exported,) = export(tmp_path / "model", "merged", tmp_path, name="new")
    assert not place.exists() and exported.path.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model",
        "new-bf16",
        "new-bf16.proof.json",
    ]


def test_without_locks_nothing_is_taken_for_left(tmp_path, monkeypatch):
    (tmp_path / ".export-1").mkdir()

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with workspace(tmp_path) as place:
        assert place.exists()
    assert [path.name for path in tmp_path.iterdir()] == [".export-1"]


def test_many_at_a_time_leave_each_other_alone(tmp_path):
    """Each finds its own folder there for as long as it needs it, though all look for what was
    left.
    """
    found = []

    def use():
        for _ in range(30):
            with workspace(tmp_path) as place:
                (place / "half").touch()
                found.append((place / "half").exists())

    threads = [threading.Thread(target=use) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 180 and not list(tmp_path.iterdir())


def test_what_an_export_wrote_is_told_from_what_is_somebodys(tmp_path):
    for name in ("m-bf16.proof.json", "m-q8_0.gguf", "m-q8_0.gguf.proof.json", "m-q8_0.Modelfile"):
        (tmp_path / name).touch()
    (tmp_path / "m-bf16").mkdir()
    (tmp_path / ".export-1").mkdir()
    assert files_of_others(tmp_path) == []
    (tmp_path / "other.gguf").touch()
    (tmp_path / "notes.txt").touch()
    assert files_of_others(tmp_path) == ["notes.txt", "other.gguf"]
