"""Conversations: their messages, and which of them are trained."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from chronicals.config import Turns
from chronicals.data.kinds.messages import THOUGHT_FIELDS, Message
from chronicals.data.reading.gate import DataError
from chronicals.data.reading.records import Record


@dataclass(frozen=True)
class Conversation:
    """The conversation of a row.

    Attributes:
        messages: as the template takes them.
        tools: that the row offers the model to call.
        trained: numbers of the messages that are trained, from 0.
    """

    messages: list[Message]
    tools: Any
    trained: list[int]


def messages_of(record: Record) -> tuple[list[Message], int]:
    """Return the messages of a normalised row, and the number of those that are its prompt.

    Messages of the prompt are not trained unless they say so.
    """
    if "messages" in record:
        return record["messages"], 0
    return [*record["prompt"], *record["completion"]], len(record["prompt"])


def chosen(
    messages: list[Message], prompt: int, roles: Collection[str], turns: Turns, where: str
) -> list[int]:
    """Return the numbers of the messages to train.

    They are those of ``roles`` after the prompt, all or the last. A message's own ``train`` wins.

    Args:
        prompt: number of messages that are the prompt.

    Raises:
        DataError: a ``train`` is neither true nor false.
    """
    numbers = [
        number
        for number, message in enumerate(messages)
        if number >= prompt and message["role"] in roles
    ]
    selected = set(numbers if turns == "all" else numbers[-1:])
    for number, message in enumerate(messages):
        wish = message.get("train")
        if wish is None:
            continue
        if not isinstance(wish, bool):
            raise DataError(
                f"{where}: message {number + 1} ({message['role']}): train={wish!r} must be true "
                "or false"
            )
        if wish:
            selected.add(number)
        else:
            selected.discard(number)
    return sorted(selected)


def texts_said(message: Message) -> list[str]:
    """Return the texts that the trained part of an assistant's message must hold.

    They are its thoughts, its answer, and the names of the tools that it calls.
    """
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    before_answer, _, answer = content.rpartition("</think>")
    if not before_answer and message.keys() == {"role", "content"}:
        return [answer.strip()]
    thoughts = [before_answer.split("<think>")[-1]]
    thoughts += [message.get(name) for name in THOUGHT_FIELDS]
    texts = dict.fromkeys(str(thought).strip() for thought in thoughts if thought)
    calls = message.get("tool_calls") or []
    names = [str(call.get("function", call).get("name", "")) for call in calls]
    return [*texts, answer.strip(), *names]


def first_unsaid(texts: list[str], said: str, as_read: Callable[[str], str] = str) -> str | None:
    """Return the longest of ``texts`` that has no place of its own in ``said``; None if all have.

    Args:
        as_read: gives another form in which a text may stand there.
    """
    for text in sorted(texts, key=len, reverse=True):
        form = text if text in said else as_read(text)
        if form not in said:
            return text
        said = said.replace(form, "\0", 1)
    return None
