"""Work by a process of its own: done once, waited for only while it is at work, gone with
whoever started it.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from chronicals import precompilation

SOURCE = str(Path(precompilation.__file__).parent.parent)


@pytest.fixture
def started(tmp_path, monkeypatch, set_constants):
    """Starts a module of these lines, and what it was started with."""
    set_constants(precompilation, MARKS_FOLDER=tmp_path / "done")
    monkeypatch.setattr(precompilation, "_processes", {})
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([SOURCE, str(tmp_path)]))
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    def start(lines, arguments=(), facts=()):
        precompilation._processes.clear()
        (tmp_path / "works.py").write_text("import pathlib\n" + textwrap.dedent(lines))
        precompilation.start_precompilation("works", arguments, facts)
        return precompilation._processes.get("works", (None,))[0]

    return start


def test_it_is_done_once_for_the_same_facts(started, tmp_path):
    writes = f"def main(name):\n    pathlib.Path({str(tmp_path)!r}, name).touch()"
    process = started(writes, ["first"], ["1.0"])
    assert precompilation.running("works") and process.wait(60) == 0
    assert (tmp_path / "first").exists() and not precompilation.running("works")
    assert started(writes, ["first"], ["1.0"]) is None
    assert started(writes, ["second"], ["1.0"]) is not None
    assert started(writes, ["first"], ["1.1"]) is not None


def test_what_failed_is_done_again(started):
    assert started("def main():\n    raise SystemExit(3)").wait(60) == 3
    assert started("def main():\n    raise SystemExit(3)") is not None


def test_only_the_first_process_of_a_machine_starts_it(started, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert started("def main():\n    pass") is None and not precompilation.running("works")


def test_nobody_waits_for_ever(started, set_constants):
    set_constants(precompilation, LONGEST_WAIT=0.0)
    process = started("import time\ndef main():\n    time.sleep(60)")
    assert process.poll() is None and not precompilation.running("works")
    process.kill()


def test_nothing_is_started_where_no_mark_can_be_left(started, tmp_path):
    (tmp_path / "done").write_text("no folder")
    assert started("def main():\n    pass") is None


@pytest.mark.slow
def test_it_imports_nothing_heavy():
    program = (
        "import sys, chronicals.cli.train, chronicals.precompilation; "
        "import chronicals.model_shape, chronicals.data.packs.machine_code; "
        "print({'torch', 'numba', 'numpy'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "set()"
