"""Answers that are conversations and hold the prompt, too: whole, or the end of it, which then
stands once.

Messages are the same where role and words are, whatever the dialect and the white space around
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from chronicals.data.kinds.prompt_fields import role_of, said_in
from chronicals.data.kinds.rows import FIRST, is_object
from chronicals.data.reading.plain_values import is_missing


class OtherPromptError(ValueError):
    """An answer begins with a question that is not the end of the prompt."""


def shared_messages(chats: Sequence[list[Any]]) -> int:
    """How many messages all begin with, an answer being left to each."""
    shared = sum(
        1
        for _ in itertools.takewhile(
            lambda each: all(_is_same(other, each[0]) for other in each), zip(*chats)
        )
    )
    return min(shared, *(len(chat) - 1 for chat in chats))


def holds(messages: list[Any], asked: list[Any]) -> bool:
    """Whether ``asked`` stands in ``messages``, side by side; nothing stands in all."""
    there = said_in(messages)
    wanted = said_in(asked)
    return any(there[at : at + len(wanted)] == wanted for at in range(len(there) - len(wanted) + 1))


def taken_once(
    prompt: list[Any], answers: Sequence[Any], shared: list[Any]
) -> tuple[list[Any], list[Any]]:
    """The prompt, and the answers (text or messages) without what they repeat of its end.

    Args:
        shared: messages that all answers begin with.

    Raises:
        OtherPromptError: one asks something else before it answers.
    """
    if again := _repeated(prompt, shared):
        return [*prompt[:-again], *shared], [answer[len(shared) :] for answer in answers]
    return prompt, [
        _behind(prompt, answer) if isinstance(answer, list) else answer for answer in answers
    ]


def _behind(prompt: list[Any], chat: list[Any]) -> list[Any]:
    """What goes on from the prompt."""
    if again := _repeated(prompt, chat[:-1]):
        return chat[again:]
    if (first := role_of(chat[0])) in FIRST or (
        first == "user" and prompt and role_of(prompt[-1]) == "user"
    ):
        raise OtherPromptError
    return chat


def _repeated(prompt: list[Any], messages: list[Any]) -> int:
    """How many of the last messages of the prompt are the first of others."""
    asked = said_in(prompt)
    there = said_in(messages)
    return next(
        (n for n in range(min(len(asked), len(there)), 0, -1) if asked[-n:] == there[:n]), 0
    )


def _is_same(one: Any, other: Any) -> bool:
    if not (is_object(one) and is_object(other)):
        return one == other
    return said_in([one]) == said_in([other]) and _beside_words(one) == _beside_words(other)


def _beside_words(message: Mapping[str, Any]) -> dict[str, Any]:
    """What a message has beside its role and what is said."""
    said = ("role", "from", "content", "value")
    return {
        name: value for name, value in message.items() if name not in said and not is_missing(value)
    }
