"""Processes end with the one that started them; each is started by a process of its own, which
is then killed.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import chronicals
from chronicals.bound_process import BoundProcess
from process_groups import members, wait_until

SOURCE = str(Path(chronicals.__file__).parent.parent)
SECONDS = 5.0
"""Within which processes are gone."""

CHILD = (
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; "
    "time.sleep(600)']); "
    "time.sleep(600)"
)
"""A command that has a child of its own."""


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@needs_proc
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_parent_that_is_killed(how):
    program = (
        "import sys, time; from chronicals.bound_process import BoundProcess; "
        f"process = BoundProcess([sys.executable, '-c', {CHILD!r}]); print(process.pid, "
        "flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": SOURCE},
        stdout=subprocess.PIPE,
        text=True,
    )
    group = int(parent.stdout.readline())
    assert wait_until(lambda: len(members(group)) == 3, 30)  # the guard, the command and its child
    parent.send_signal(how)
    parent.wait()
    assert wait_until(lambda: not members(group), SECONDS), members(group)


@needs_proc
def test_a_command_does_not_outlive_its_guard():
    process = BoundProcess([sys.executable, "-c", "import time; time.sleep(600)"])
    assert wait_until(lambda: len(members(process.pid)) == 2, 30)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert wait_until(lambda: not members(process.pid), SECONDS)


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.abort()", -6),
    ],
)
def test_it_ends_as_its_command_does(command, status):
    assert (
        BoundProcess([sys.executable, "-c", command], stderr=subprocess.DEVNULL).wait(30) == status
    )


def test_its_input_and_output_are_the_commands_alone():
    """The guard holds neither, so that their end is seen as soon as the command closes them."""
    program = (
        "import os, sys, time; print(sys.stdin.read()[::-1], flush=True); os.close(1); "
        "time.sleep(60)"
    )
    process = BoundProcess(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    process.stdin.write("abc")
    process.stdin.close()
    began = time.monotonic()
    assert (
        process.stdout.read() == "cba\n"
        and time.monotonic() - began < 30
        and process.poll() is None
    )
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(30) == -9


def test_no_pipe_stays_open():
    before = len(os.listdir("/dev/fd"))
    process = BoundProcess([sys.executable, "-c", "pass"])
    process.wait(30)
    del process
    with pytest.raises(FileNotFoundError):
        BoundProcess([sys.executable], cwd="/nowhere")
    assert len(os.listdir("/dev/fd")) == before
