"""Short commands: run in copies of a process that has imported what they need."""

import asyncio
import os

import pytest

from chronicals.ui.commands import CommandEnd, Commands

ECHO = """
import os, sys, time
print(sys.argv[1:], os.getcwd())
print("error a: wrong", file=sys.stderr)
time.sleep(float(sys.argv[2]))
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Commands whose process imports nothing, with a module of the test's own."""
    (tmp_path / "echo.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    return Commands(tmp_path, imported=())


@pytest.mark.slow
def test_a_command_runs_in_a_copy_and_its_end_is_told(commands, tmp_path):
    async def ask():
        both = await asyncio.gather(
            commands.run_module("echo", ["0", "0"]), commands.run_module("echo", ["3", "0"])
        )
        await commands.stop()
        return both

    good, bad = asyncio.run(ask())
    assert good.code == 0 and good.output == f"['0', '0'] {tmp_path}\n"
    assert bad.code == 3 and bad.error == "a: wrong" and bad.values is None


@pytest.mark.slow
def test_a_command_that_takes_too_long_is_killed(commands):
    async def ask():
        answer = await commands.run_module("echo", ["0", "60"], seconds=3)
        after = await commands.run_module("echo", ["0", "0"])
        await commands.stop()
        return answer, after

    answer, after = asyncio.run(ask())
    assert answer.code < 0 and answer.error == "no answer in 3 s" and after.code == 0


def test_an_answer_has_values_or_an_error():
    assert CommandEnd(0, '{"a": 1}', "note").values == {"a": 1}
    assert CommandEnd(1, "", "a warning\nerror b: wrong; do this\n").error == "b: wrong; do this"
