"""Phases between marks, and hooks that import nothing early."""

import json
import sys

import pytest
import scripts

startup = scripts.script("startup")


def test_phases_are_the_times_between_marks():
    marks = [
        ("imports", 3.0),
        ("model", 5.0),
        ("data", 5.5),
        ("patching", 7.0),
        ("step", 9.0),
        ("step", 10.0),
        ("end", 12.0),
    ]
    found = startup.phases_of(marks, began=1.0, ended=12.5)
    assert {phase: found[phase] for phase in startup.PHASES} == {
        "imports": 2.0,
        "model": 2.0,
        "data": 0.5,
        "patching": 1.5,
        "first step": 2.0,
        "other steps": 1.0,
        "saving": 2.0,
        "exit": 0.5,
    }
    assert (found["to first step"], found["after last step"], found["all"]) == (8.0, 2.5, 11.5)


def test_the_table_says_whether_the_bar_is_held_and_what_failed():
    seconds = {
        "to first step": 11.0,
        **dict.fromkeys(startup.PHASES, 1.0),
        "after last step": 2.0,
        "all": 20.0,
    }
    runs = [
        {"arm": "chronicals", "cache": "cold", "seconds": {**seconds, "to first step": 31.0}},
        {"arm": "chronicals", "cache": "warm", "seconds": seconds},
        {"arm": "trl", "cache": "cold", "last_words": "Traceback\nValueError: no"},
    ]
    cold, warm, failed = startup.table(runs).splitlines()[1:]
    assert "bar 30 s: missed" in cold and "bar 12 s: held" in warm and "ValueError: no" in failed


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "marked_one.py").write_text("def work(n):\n    return n + 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield tmp_path
    sys.modules.pop("marked_one", None)


def test_a_function_is_wrapped_when_somebody_imports_it(package):
    mark = startup.Marks(package / "marks")
    hook = startup.AfterImport(
        {"marked_one": lambda module: startup.marked(module, "work", mark, "before", "after")}
    )
    sys.meta_path.insert(0, hook)
    assert "marked_one" not in sys.modules
    import marked_one

    assert marked_one.work(1) == 2
    assert [json.loads(line)[0] for line in mark.path.read_text().splitlines()] == [
        "before",
        "after",
    ]
