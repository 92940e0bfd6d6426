"""Keeper of one job, ``python -m chronicals.ui.keeper FOLDER``: a program of its own.

It starts the command of ``job.json``, with its output in a file, and writes down when the command
began and how it ended. Because it is in a session of its own, neither the end of the server nor a
closed terminal reaches it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from chronicals.ui.place import read_record, write_record
from chronicals.ui.processes import start_time

JOB = "job.json"
STARTED = "started.json"
ENDED = "ended.json"
OUTPUT = "output.log"


def keep_job(folder: Path) -> int:
    """Run the job of a folder, and return the exit code of its command."""
    # A handler, unlike SIG_IGN, is not inherited by the command.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    job = read_record(folder / JOB)
    with (folder / OUTPUT).open("ab") as output:
        try:
            process = subprocess.Popen(
                job["command"],
                cwd=job["root"],
                env={**os.environ, **job["environment"]},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            output.write(f"{error}\n".encode())
            write_record(folder / ENDED, {"code": 127, "time": time.time()})
            return 127
    both = {"pid": process.pid, "keeper": os.getpid()}
    began = {f"{name}_began": start_time(number) for name, number in both.items()}
    write_record(folder / STARTED, {**both, **began, "time": round(time.time(), 3)})
    code = process.wait()
    write_record(folder / ENDED, {"code": code, "time": round(time.time(), 3)})
    return code


if __name__ == "__main__":
    sys.exit(keep_job(Path(sys.argv[1])))
