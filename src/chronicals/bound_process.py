"""Processes that end with the process that started them, however that one ends.

It may end by an error, by SIGKILL, or out of memory. Between them is a pipe whose write end only
the parent holds. The system closes it when the parent ends, and a guard at the other end then kills
the command and all processes that it started. The guard is this file as a program of its own, a
bare interpreter,

    python bound_process.py READ_END COMMAND [ARGUMENT ...]

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
    """``subprocess.Popen`` in a session of its own, which is killed when this process ends.

    ``pid`` is that of the guard and of the process group; the exit status is the command's.

    Args:
        command: program and arguments.
        pass_fds: further file descriptors of the command.
        options: others of ``Popen``.
    """

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int] = (), **options: Any):
        read_end, self._write_end = os.pipe()
        guarded = [sys.executable, "-I", "-S", __file__, str(read_end), *command]
        try:
            super().__init__(
                guarded, start_new_session=True, pass_fds=[*pass_fds, read_end], **options
            )
        except BaseException:  # Ctrl-C too: the guard would wait for this end
            self._close_write_end()
            raise
        finally:
            os.close(read_end)

    def _close_write_end(self) -> None:
        write_end = self._write_end
        self._write_end = -1
        if write_end >= 0:
            os.close(write_end)

    def __del__(self, *arguments: Any) -> None:
        self._close_write_end()
        super().__del__(*arguments)  # type: ignore[misc]


def guard(read_end: int, command: list[str]) -> None:
    """Run the command and end with its exit status, or kill all when the pipe is closed.

    Args:
        read_end: read end of the pipe, whose write end only the parent holds.
        command: program and arguments; it and what it starts are the process group.
    """
    own_pid = os.getpid()
    child = os.fork()
    if not child:
        os.close(read_end)
        end_with_parent(own_pid)
        os.execvp(command[0], command)
    # These signals reach the whole group; only what the command makes of them counts.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.closerange(0, read_end)
    os.closerange(read_end + 1, os.sysconf("SC_OPEN_MAX"))
    threading.Thread(target=_kill_at_end_of, args=(read_end,), daemon=True).start()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(own_pid, os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def end_with_parent(parent: int) -> None:
    """Have this process killed when ``parent``, which started it, ends; only on Linux.

    On other systems the end of a pipe must do this. Linux watches the thread of the parent that
    started this process, so that thread must live as long as the parent.
    """
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_at_end_of(read_end: int) -> None:
    os.read(read_end, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    guard(int(sys.argv[1]), sys.argv[2:])
