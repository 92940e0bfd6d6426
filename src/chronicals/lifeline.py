"""Processes that never outlive the one that started them, however that one ends: by an error,
SIGKILL, or for want of memory.

Between them is a pipe whose write end the parent alone holds. The system closes it when the parent
ends, and a guard at the other end then kills the command and all that it started. The guard is this
file as a program of its own, a bare interpreter,

    python lifeline.py READ_END COMMAND [ARGUMENT ...]

which starts the command and ends as it does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

PR_SET_PDEATHSIG = 1


class BoundProcess(subprocess.Popen):
    """``subprocess.Popen`` in a session of its own, of which nothing is left when this process has
    ended.

    ``pid`` is the guard's and that of the process group; the exit status is the command's.

    Args:
        command: program and arguments.
        pass_fds: further file descriptors of the command.
        options: others of ``Popen``.
    """

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int] = (), **options: Any):
        waits, self._holds = os.pipe()
        guarded = [sys.executable, "-I", "-S", __file__, str(waits), *command]
        try:
            super().__init__(
                guarded, start_new_session=True, pass_fds=[*pass_fds, waits], **options
            )
        except BaseException:
            self._let_go()
            raise
        finally:
            os.close(waits)

    def _let_go(self) -> None:
        holds = self._holds
        self._holds = -1
        if holds >= 0:
            os.close(holds)

    def __del__(self, *arguments: Any) -> None:
        self._let_go()
        super().__del__(*arguments)  # type: ignore[misc]


def guard(waits: int, command: list[str]) -> None:
    """Run the command to its end and end like it, or end the whole process group when ``waits``
    is closed.
    """
    own = os.getpid()
    if not (running := os.fork()):
        os.close(waits)
        end_with_parent(own)
        os.execvp(command[0], command)
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # sent to the group; what the command makes of it counts
        signal.signal(number, signal.SIG_IGN)
    os.closerange(0, waits)
    os.closerange(waits + 1, os.sysconf("SC_OPEN_MAX"))
    threading.Thread(target=_kill_at_end_of, args=(waits,), daemon=True).start()
    _, status = os.waitpid(running, 0)
    if os.WIFSIGNALED(status):
        with contextlib.suppress(OSError):  # of SIGKILL, which has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(own, os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def end_with_parent(parent: int) -> None:
    """On Linux, be killed when ``parent`` ends, which started this process; elsewhere the end of a
    pipe must do.

    The system means the thread of the parent that started it, which must live as long.
    """
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended meanwhile
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_at_end_of(waits: int) -> None:
    os.read(waits, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    guard(int(sys.argv[1]), sys.argv[2:])
