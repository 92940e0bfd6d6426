"""Answers that are conversations and repeat the prompt, or its end, which then stands once.

Messages are the same if role and words are, whatever the dialect and the white space around them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chronicals.data.kinds.messages import SYSTEM_ROLES, comparable, role_of
from chronicals.data.reading.plain_values import is_missing, is_object


class OtherPromptError(ValueError):
    """An answer begins with a question that is not the end of the prompt."""


def shared_messages(chats: Sequence[list[Any]]) -> int:
    """Return the number of messages that all chats begin with, one being left to each as answer."""
    shared = 0
    for first, *others in zip(*chats):
        if not all(_is_same(other, first) for other in others):
            break
        shared += 1
    return min(shared, *(len(chat) - 1 for chat in chats))


def _is_same(one: Any, other: Any) -> bool:
    if not (is_object(one) and is_object(other)):
        return one == other
    return comparable([one]) == comparable([other]) and _other_fields(one) == _other_fields(other)


def _other_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a message beside its role and its words."""
    usual = ("role", "from", "content", "value")
    return {
        name: value
        for name, value in message.items()
        if name not in usual and not is_missing(value)
    }


def holds(messages: list[Any], question: list[Any]) -> bool:
    """Return whether ``question`` is a contiguous part of ``messages``; True if it is empty."""
    spoken = comparable(messages)
    asked = comparable(question)
    starts = range(len(spoken) - len(asked) + 1)
    return any(spoken[start : start + len(asked)] == asked for start in starts)


def without_repetition(
    prompt: list[Any], answers: Sequence[Any], shared: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Return the prompt, and the answers (text or messages) without what they repeat of its end.

    Args:
        shared: messages that all answers begin with.

    Raises:
        OtherPromptError: an answer asks something else before it answers.
    """
    repeated = _repeated(prompt, shared)
    if repeated:
        return [*prompt[:-repeated], *shared], [answer[len(shared) :] for answer in answers]
    behind = []
    for answer in answers:
        if isinstance(answer, list):
            repeated = _repeated(prompt, answer[:-1])
            if not repeated:
                _check_continues(prompt, answer)
            answer = answer[repeated:]
        behind.append(answer)
    return prompt, behind


def _repeated(prompt: list[Any], messages: list[Any]) -> int:
    """Return how many of the prompt's last messages are the first of ``messages``."""
    asked = comparable(prompt)
    spoken = comparable(messages)
    for count in range(min(len(asked), len(spoken)), 0, -1):
        if asked[-count:] == spoken[:count]:
            return count
    return 0


def _check_continues(prompt: list[Any], chat: list[Any]) -> None:
    """Raise OtherPromptError if a chat asks something instead of going on from the prompt."""
    first = role_of(chat[0])
    asks_again = first == "user" and prompt and role_of(prompt[-1]) == "user"
    if first in SYSTEM_ROLES or asks_again:
        raise OtherPromptError
