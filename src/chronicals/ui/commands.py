"""Short commands of ours, run at once and waited for: plans, checks, what the machine has."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

SECONDS = 120.0
"""Longest time of a short command: a check tokenises its data first."""

COMMAND_LINE = "chronicals.cli"

IMPORTED = (
    "chronicals.planning",
    "chronicals.objectives",
    "chronicals.verification",
    "chronicals.training",
    "chronicals.moe",
    "typer",
    "rich.table",
)
"""Modules that commands of the page begin with."""


@dataclass(frozen=True)
class CommandEnd:
    """End of a command.

    Attributes:
        code: exit code; negative if a signal ended it.
        output: standard output.
        errors: standard error.
    """

    code: int
    output: str
    errors: str

    @property
    def values(self) -> Any:
        """JSON values of the output; None if the command failed."""
        return json.loads(self.output) if self.code == 0 else None

    @property
    def error(self) -> str:
        """Message of a command that failed."""
        text = self.errors.strip()
        return text[text.rfind("error ") :].removeprefix("error ") if "error " in text else text


@dataclass
class Commands:
    """The process that runs short commands; it is started at the first one.

    Attributes:
        root: folder that commands run in.
        imported: modules that the process imports before the first command.
    """

    root: Path
    imported: Sequence[str] = IMPORTED
    _process: asyncio.subprocess.Process | None = None
    _reader: asyncio.Task[None] | None = None
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _pids: dict[int, int] = field(default_factory=dict)
    _ends: dict[int, asyncio.Future[int]] = field(default_factory=dict)
    _last: int = 0

    async def start(self) -> asyncio.subprocess.Process:
        """Start the process, unless it runs; its imports go on while it returns."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "chronicals.ui.prefork", *self.imported),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                )
                self._reader = asyncio.create_task(self._read(self._process))
            return self._process

    async def run(self, arguments: Sequence[str], seconds: float = SECONDS) -> CommandEnd:
        """Run ``chronicals`` with these arguments, and wait for its end."""
        return await self.run_module(COMMAND_LINE, arguments, seconds)

    async def run_module(
        self, module: str, arguments: Sequence[str] = (), seconds: float = SECONDS
    ) -> CommandEnd:
        """Run a module as ``python -m`` does; the process is killed where nobody waits any more."""
        process = await self.start()
        self._last += 1
        number = self._last
        self._ends[number] = asyncio.get_running_loop().create_future()
        with TemporaryDirectory() as folder:
            output, errors = Path(folder) / "output", Path(folder) / "errors"
            request = {
                "id": number,
                "module": module,
                "arguments": list(arguments),
                "root": str(self.root),
                "output": str(output),
                "errors": str(errors),
            }
            assert process.stdin is not None
            try:
                process.stdin.write((json.dumps(request) + "\n").encode())
                await process.stdin.drain()
                code = await asyncio.wait_for(self._ends[number], seconds)
            except TimeoutError:
                return CommandEnd(-signal.SIGKILL, "", f"no answer in {seconds:.0f} s")
            except ConnectionError:
                return CommandEnd(-signal.SIGPIPE, "", "the process of short commands has ended")
            finally:
                self._ends.pop(number, None)
                self._kill(number)
            return CommandEnd(code, _text(output), _text(errors))

    def _kill(self, number: int) -> None:
        """Kill a command that still runs, with its processes."""
        pid = self._pids.pop(number, None)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Read what is said of commands, until the process ends."""
        assert process.stdout is not None
        async for line in process.stdout:
            said = json.loads(line)
            number = said["id"]
            if "pid" in said:
                self._pids[number] = said["pid"]
            else:
                self._pids.pop(number, None)
                end = self._ends.get(number)
                if end is not None and not end.done():
                    end.set_result(said["code"])
        for end in self._ends.values():
            if not end.done():
                end.set_exception(ConnectionError("ended"))

    async def stop(self) -> None:
        """End the process: its input ends."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await self._process.wait()


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
