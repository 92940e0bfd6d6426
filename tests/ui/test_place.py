"""Paths that the page may name."""

import pytest

from chronicals.ui.place import OutsideRoot, Place, read_record, write_record


@pytest.fixture
def place(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret").write_text("x")
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "circle").symlink_to(root / "circle")
    return Place(root.resolve())


@pytest.mark.parametrize(
    "path", ["../secret", "a/../../secret", "/etc/passwd", "out", "~root", "a\0b"]
)
def test_what_leads_out_of_the_root_is_refused(place, path):
    with pytest.raises(OutsideRoot):
        place.inside(path)


def test_paths_in_the_root_are_those_of_the_root(place):
    assert place.inside("a/b") == place.root / "a" / "b"
    assert place.inside(place.root / "a") == place.root / "a"
    assert place.name(place.inside("a/../b")) == "b"


def test_a_record_is_whole_or_missing(place):
    file = place.kept / "record.json"
    assert read_record(file, []) == []
    write_record(file, {"a": 1})
    assert read_record(file) == {"a": 1}
    file.write_text('{"a"')
    assert read_record(file, "torn") == "torn"
    assert place.kept.stat().st_mode & 0o077 == 0
