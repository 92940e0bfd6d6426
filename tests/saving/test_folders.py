"""A folder is whole or not there, whatever fails while it is written."""

import errno
import os

import pytest

from chronicals.saving import CheckpointError, write_folder


def test_failure_while_writing_leaves_nothing(tmp_path):
    def broken(aside):
        (aside / "half").write_text("half")
        raise KeyError("broken")

    with pytest.raises(KeyError):
        write_folder(tmp_path / "folder", broken)
    assert list(tmp_path.iterdir()) == []


def test_only_what_was_left_aside_is_removed(tmp_path):
    """Whatever process has its number now: a container's restart has the same."""
    gone = max(int(name) for name in os.listdir("/proc") if name.isdigit()) + 1_000_000
    left = [
        f".model.{gone}",
        f".replaced-model.{gone}",
        f".model.{os.getppid()}",
        f".model.{os.getpid()}",
    ]
    others = [".venv3.12", f".venv-3.{gone}", f".step-00000002.{gone}"]
    for name in (*left, *others):
        (tmp_path / name).mkdir()
    write_folder(tmp_path / "model", lambda aside: (aside / "file").write_text("whole"))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["model", *others])
    write_folder(tmp_path / "step-00000004", lambda aside: (aside / "file").write_text("whole"))
    assert not (tmp_path / others[-1]).exists()


def test_what_was_to_be_replaced_stays_where_the_new_cannot_take_its_place(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").write_text("old")
    rename = os.rename

    def refuse(source, target):
        if f".model.{os.getpid()}" == source.name:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_folder(tmp_path / "model", lambda aside: (aside / "new").write_text("new"))
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "old"]


def test_what_a_killed_process_had_put_aside_has_its_name_back(tmp_path):
    for name in (
        ".replaced-step-00000002.77",
        ".replaced-step-00000004.77",
        ".step-00000004.77",
        "step-00000004",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "from").write_text(name)
    write_folder(tmp_path / "step-00000006", lambda aside: (aside / "new").write_text("new"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step-0000000{step}" for step in (2, 4, 6)
    ]
    assert (tmp_path / "step-00000004" / "from").read_text() == "step-00000004"
