"""A process that has imported what commands need, and runs each in a copy of itself.

``python -m chronicals.ui.prefork MODULE ...`` imports these modules, and reads lines of JSON with a
module and its arguments. For each it forks; the copy runs the module as ``python -m`` would, with
its output in files, and ends. Imports take seconds and the plan of a run a part of one, so a plan
can follow what is typed. Nothing is computed before the fork, so that no thread of a library is
lost by it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import sys
import traceback
from typing import Any


def main() -> None:
    """Answer requests until the input ends, with the server."""
    for name in sys.argv[1:]:
        # A package that is too old is an error of the command, which says so.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    for line in sys.stdin:
        if os.fork() == 0:
            _attend(json.loads(line))
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _attend(request: dict[str, Any]) -> None:
    """Run a request in another copy, and say when it began and how it ended."""
    process = os.fork()
    if process == 0:
        os._exit(_run(request))
    _say({"id": request["id"], "pid": process})
    status = os.waitpid(process, 0)[1]
    _say({"id": request["id"], "code": os.waitstatus_to_exitcode(status)})
    os._exit(0)


def _say(record: dict[str, Any]) -> None:
    os.write(1, (json.dumps(record) + "\n").encode())  # in one piece: others write there, too


def _run(request: dict[str, Any]) -> int:
    """Run the module of a request, and return its exit code."""
    os.setsid()
    os.chdir(request["root"])
    for stream, name in ((0, os.devnull), (1, request["output"]), (2, request["errors"])):
        opened = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, stream)
    sys.argv = [request["module"], *request["arguments"]]
    code: Any = 0
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except (Exception, KeyboardInterrupt):
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    main()
