"""A conversation with one or two models, each a process that answers lines of JSON.

What was said is in a file. The processes know nothing between two questions: each question brings
the messages before it, so that a conversation goes on after its server was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chronicals.ui.jobs import command_of, last_lines
from chronicals.ui.place import Place, read_record, write_record

SECONDS_BETWEEN_WRITES = 0.2
"""A long answer is written to the file while it is made, as often as this."""

MODELS_AT_ONCE = 2
"""Models side by side; others' processes are ended, for each holds a model in memory."""

LONGEST_LINE = 1 << 24
"""Bytes of an answer in one line."""


@dataclass
class Speaker:
    """The process of a model, ``chronicals generate MODEL --json-lines``.

    Attributes:
        place: its root is where the process runs.
        arguments: of the command.
    """

    place: Place
    arguments: Sequence[str]
    _process: asyncio.subprocess.Process | None = None
    _busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def _errors(self) -> Path:
        return self.place.kept / "chats" / "errors.log"

    async def ask(
        self, question: str, messages: Sequence[Any], said: Callable[[str], None]
    ) -> tuple[str, str]:
        """Return the answer to a question, and an error; one of them is empty.

        Args:
            question: the question.
            messages: what was said before.
            said: called with each new part of the answer.
        """
        async with self._busy:
            try:
                process = await self._started()
                assert process.stdin is not None and process.stdout is not None
                asked = {"prompt": question, "messages": list(messages)}
                process.stdin.write((json.dumps(asked) + "\n").encode())
                await process.stdin.drain()
                async for line in process.stdout:
                    values = json.loads(line)
                    if "part" in values:
                        said(values["part"])
                    elif "answer" in values:
                        return values["answer"], ""
                    elif "error" in values:
                        return "", values["error"]
            except (OSError, ValueError) as error:
                await self.end()
                return "", str(error)
            # Its output is closed, but its exit status may not be known yet. The next question
            # has to start a new process and not be written to this one.
            await self.end()
            lines = last_lines(self._errors)
            return "", "\n".join(lines[-5:]) or "the process of the model has ended"

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._errors.parent.mkdir(exist_ok=True)
            with self._errors.open("wb") as errors:
                self._process = await asyncio.create_subprocess_exec(
                    *command_of(self.arguments),
                    cwd=self.place.root,
                    env={**os.environ, "PYTHONUNBUFFERED": "1"},
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=errors,
                    limit=LONGEST_LINE,
                )
        return self._process

    async def end(self) -> None:
        """End the process, which frees the model's memory."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


@dataclass
class Chats:
    """The conversation of a place, and the processes that take part in it."""

    place: Place
    _speakers: dict[tuple[str, ...], Speaker] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def file(self) -> Path:
        """File with the turns: a question, and for each model its answer."""
        folder = self.place.kept / "chats"
        folder.mkdir(exist_ok=True)
        return folder / "conversation.json"

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The turns so far."""
        return read_record(self.file, [])

    @property
    def is_answering(self) -> bool:
        """True while this server waits for an answer."""
        return any(not task.done() for task in self._tasks)

    def clear(self) -> None:
        """Begin a new conversation."""
        write_record(self.file, [])

    async def end(self) -> None:
        """End all processes."""
        await asyncio.gather(*(speaker.end() for speaker in self._speakers.values()))

    def ask(self, question: str, models: Sequence[str], options: Sequence[str] = ()) -> None:
        """Ask models a question; their answers are written to the file as they come.

        Args:
            question: the question.
            models: what ``chronicals generate`` takes, one or two.
            options: of ``chronicals generate``.
        """
        number = len(self.turns)
        answers = [{"model": model, "text": "", "done": False} for model in models]
        write_record(self.file, [*self.turns, {"question": question, "answers": answers}])
        for side, model in enumerate(models[:MODELS_AT_ONCE]):
            self._keep(self._answer(number, side, model, options))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin work that nobody waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, side: int, model: str, options: Sequence[str]) -> None:
        turns = self.turns
        messages = conversation_of(turns[:number], side)
        speaker = self._speaker(("generate", model, "--json-lines", *options))
        text: list[str] = []
        written = 0.0

        def said(part: str) -> None:
            nonlocal written
            text.append(part)
            if time.monotonic() - written > SECONDS_BETWEEN_WRITES:
                written = time.monotonic()
                self._write(number, side, text="".join(text))

        answer, error = await speaker.ask(turns[number]["question"], messages, said)
        self._write(number, side, text=answer or "".join(text), error=error, done=True)

    def _write(self, number: int, side: int, **values: Any) -> None:
        """Change an answer in the file, unless the conversation began anew meanwhile."""
        turns = self.turns
        if number < len(turns) and side < len(turns[number]["answers"]):
            turns[number]["answers"][side] |= values
            write_record(self.file, turns)

    def _speaker(self, arguments: tuple[str, ...]) -> Speaker:
        """Return the process of a model, and end the oldest of too many."""
        speaker = self._speakers.pop(arguments, None) or Speaker(self.place, arguments)
        self._speakers[arguments] = speaker
        while len(self._speakers) > MODELS_AT_ONCE:
            self._keep(self._speakers.pop(next(iter(self._speakers))).end())
        return speaker


def conversation_of(turns: Sequence[dict[str, Any]], side: int) -> list[dict[str, str]]:
    """Return the messages between a user and the model of one side, without failed answers."""
    messages: list[dict[str, str]] = []
    for turn in turns:
        answers = turn["answers"]
        if side < len(answers) and answers[side]["done"] and not answers[side].get("error"):
            messages.append({"role": "user", "content": turn["question"]})
            messages.append({"role": "assistant", "content": answers[side]["text"]})
    return messages
