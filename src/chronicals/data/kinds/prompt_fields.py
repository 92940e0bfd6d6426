"""The prompt in rows whose answers have fields of their own: pairs, ranked and judged answers.

It is in a field, whose name tells it. Answers that are conversations may repeat it, or its end,
which then stands once. Messages are the same if role and words are, whatever the dialect and the
white space around them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from chronicals.data.kinds.messages import (
    SYSTEM_ROLES,
    comparable,
    conversation_in,
    listed_messages,
    role_of,
)
from chronicals.data.kinds.rows import question_messages
from chronicals.data.reading.gate import DataError
from chronicals.data.reading.plain_values import is_filled, is_missing, is_object
from chronicals.data.reading.records import CONVERSATION_FIELDS, PROMPT_COMPLETION_PAIRS, RowRecord

_PROMPT_NAMES = (
    *CONVERSATION_FIELDS,
    "instruction",
    *dict.fromkeys(prompt for prompt, _ in PROMPT_COMPLETION_PAIRS[1:]),
)
"""Names of the prompt in a row without a field ``prompt``."""

PROMPT_FIELDS = frozenset({*_PROMPT_NAMES, "history"})
"""Every other field of which a prompt may be made."""


def prompt_names(record: RowRecord, without: Collection[str] = ()) -> list[str]:
    """Return the fields that may hold the prompt: several if the row does not say which does.

    Args:
        record: the row.
        without: fields that hold something else.
    """
    if record.get("prompt") is not None:
        return ["prompt"]
    names = [name for name in _PROMPT_NAMES if name not in without and is_filled(record.get(name))]
    # Beside an instruction, ``input`` is a part of it.
    return [name for name in names if name != "input" or "instruction" not in names]


def prompt_in(name: str, record: RowRecord, where: str) -> Any:
    """Return the prompt in the field ``name``, a text or messages.

    An ``instruction`` with its ``input`` and ``history`` is messages, as in fine-tuning, and so is
    any text with a ``history``.

    Raises:
        DataError: a field is of the wrong type, or a conversation ends with the assistant.
    """
    if name == "instruction":
        return question_messages(record, where)
    if name not in CONVERSATION_FIELDS:
        prompt = listed_messages(record[name])
        if not isinstance(prompt, str):
            return prompt
        messages = question_messages(
            {"instruction": prompt, "history": record.get("history")}, where
        )
        return messages if len(messages) > 1 else prompt
    prompt = listed_messages(conversation_in(record[name], name, where))
    if not isinstance(prompt, list):
        raise DataError(
            f"{where}: {name} must be a list of messages, this is {type(prompt).__name__}",
            "wrong_type",
        )
    if role_of(prompt[-1]) == "assistant":
        raise DataError(
            f"{where}: {name} ends with the assistant, so that it is not the prompt of the "
            "answers; give them a prompt, or "
            "leave that message out",
            "missing_field",
        )
    return prompt


def holds_question(messages: list[Any], name: str, record: RowRecord, where: str) -> bool:
    """Return whether the question in a possible prompt field is a contiguous part of ``messages``.

    Of a conversation it is the messages before its answer. Nothing asked is part of all messages.

    Raises:
        DataError: a field is of the wrong type.
    """
    value = record[name]
    if name in CONVERSATION_FIELDS:
        value = conversation_in(value, name, where)
    question = question_messages(record, where) if name == "instruction" else listed_messages(value)
    if isinstance(question, list):
        if question and role_of(question[-1]) == "assistant":
            question = question[:-1]
    elif isinstance(question, str) and not question.strip():
        question = []
    else:
        question = [{"role": "user", "content": question}]
    spoken = comparable(messages)
    asked = comparable(question)
    starts = range(len(spoken) - len(asked) + 1)
    return any(spoken[start : start + len(asked)] == asked for start in starts)


class OtherPromptError(ValueError):
    """An answer begins with a question that is not the end of the prompt."""


def shared_messages(chats: Sequence[list[Any]]) -> int:
    """Return the number of messages that all chats begin with, one being left to each as answer.

    Messages are shared if they say the same and their other fields are equal.
    """
    shared = 0
    for first, *others in zip(*chats):
        if others and any(
            _with_other_fields(other) != _with_other_fields(first) for other in others
        ):
            break
        shared += 1
    return min(shared, *(len(chat) - 1 for chat in chats))


def _with_other_fields(message: Any) -> Any:
    """Return what a message says in any dialect, and its fields beside its role and words."""
    if not is_object(message):
        return message
    usual = ("role", "from", "content", "value")
    others = {
        name: value
        for name, value in message.items()
        if name not in usual and not is_missing(value)
    }
    return comparable([message]), others


def without_repetition(
    prompt: list[Any], answers: Sequence[Any], shared: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Return the prompt, and the answers (text or messages) without what they repeat of its end.

    Args:
        prompt: messages.
        answers: each a text or messages.
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
                first = role_of(answer[0])
                asks_again = first == "user" and prompt and role_of(prompt[-1]) == "user"
                if first in SYSTEM_ROLES or asks_again:
                    raise OtherPromptError
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
