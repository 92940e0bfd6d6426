"""A conversation: its messages, and which of them are trained."""

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
    """What one row says.

    Attributes:
        messages: as the template takes them.
        tools: what the row offers the model to call.
        trained: numbers of the messages that are trained, from 0.
    """

    messages: list[Message]
    tools: Any
    trained: list[int]


def messages_of(record: Record) -> tuple[list[Message], int]:
    """The messages of a normalised row, and how many of them are a prompt, not trained unless
    they say so.
    """
    if "messages" in record:
        return record["messages"], 0
    return [*record["prompt"], *record["completion"]], len(record["prompt"])


def chosen(
    messages: list[Message], prompt: int, roles: Collection[str], turns: Turns, where: str
) -> list[int]:
    """Numbers of the messages to train: those of ``roles`` after the prompt, all or the last;
    ``train`` of a message wins.
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
        (selected.add if wish else selected.discard)(number)
    return sorted(selected)


def texts_said(message: Message) -> list[str]:
    """Texts that must be in what is trained of an assistant's message: thoughts, answer, names
    of what it calls.
    """
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    inside, _, answer = content.rpartition("</think>")
    if not inside and message.keys() == {"role", "content"}:
        return [answer.strip()]
    thoughts = (message.get(name) for name in THOUGHT_FIELDS)
    calls = message.get("tool_calls") or []
    return [
        *dict.fromkeys(
            str(thought).strip() for thought in [inside.split("<think>")[-1], *thoughts] if thought
        ),
        answer.strip(),
        *(str(call.get("function", call).get("name", "")) for call in calls),
    ]


def first_unsaid(texts: list[str], said: str, as_read: Callable[[str], str] = str) -> str | None:
    """The longest text that has no place of its own in what is said, neither as it is nor as
    ``as_read`` gives it.
    """
    for text in sorted(texts, key=len, reverse=True):
        form = text if text in said else as_read(text)
        if form not in said:
            return text
        said = said.replace(form, "\0", 1)
    return None
