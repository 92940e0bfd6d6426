"""Where the prompt stands of a row whose answers have fields of their own: pairs, ranked lists,
judged answers.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from chronicals.data.kinds.rows import (
    PAIRS,
    SPEAKERS,
    asked_of,
    conversation_in,
    is_filled,
    is_object,
    parsed_json,
)
from chronicals.data.reading.gate import DataError
from chronicals.data.reading.plain_values import is_missing, is_null, items_of
from chronicals.data.reading.records import Record

CONVERSATIONS = ("messages", "conversations")
"""Fields of a conversation, which is a prompt where its answers stand elsewhere."""

PROMPTS = (*CONVERSATIONS, "instruction", *dict.fromkeys(prompt for prompt, _ in PAIRS[1:]))
"""Names of the prompt where no field is called so."""

OF_PROMPTS = frozenset({*PROMPTS, "history"})
"""Every field of which a prompt may be made."""


def prompt_names(record: Record, without: Collection[str] = ()) -> list[str]:
    """What the prompt is called, or may be: several names where the row does not say which it is.

    Args:
        without: fields that hold something else.
    """
    if record.get("prompt") is not None:
        return ["prompt"]
    found = [name for name in PROMPTS if name not in without and is_filled(record.get(name))]
    return [name for name in found if name != "input" or "instruction" not in found]


def prompt_called(name: str, record: Record, where: str) -> Any:
    """The prompt in the field ``name``, a text or messages; an ``instruction`` with its ``input``
    and ``history`` is messages, as where it is trained on, and so is any text with a ``history``.

    Raises:
        DataError: a field is of the wrong type, or a conversation ends with the assistant.
    """
    if name == "instruction":
        return asked_of(record, where)
    if name not in CONVERSATIONS:
        value = as_list(record[name])
        if not isinstance(value, str):
            return value
        asked = asked_of({"instruction": value, "history": record.get("history")}, where)
        return asked if len(asked) > 1 else value
    prompt = as_list(conversation_in(record[name], name, where))
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


def asked_in(name: str, record: Record, where: str) -> list[Any]:
    """What a field that may be the prompt asks, as messages; of a conversation what stands before
    its answer.

    Raises:
        DataError: a field is of the wrong type.
    """
    if name == "instruction":
        return asked_of(record, where)
    value = as_list(
        conversation_in(record[name], name, where) if name in CONVERSATIONS else record[name]
    )
    if isinstance(value, list):
        return value[:-1] if value and role_of(value[-1]) == "assistant" else value
    return (
        [] if isinstance(value, str) and not value.strip() else [{"role": "user", "content": value}]
    )


def as_list(value: Any) -> Any:
    """A message by itself as a list of one, arrays and tuples as lists, anything else as it is."""
    if is_object(value):
        return [value]
    items = items_of(value)
    return value if items is None else items


def role_of(message: Any) -> Any:
    """By our names of roles."""
    names = ("role", "from") if is_object(message) else ()
    said = next((message[name] for name in names if is_filled(message.get(name))), None)
    return SPEAKERS.get(said, said) if isinstance(said, str) else said


def words_of(message: Any) -> Any:
    """What is said in a message, parts of text joined, without white space around it."""
    if not is_object(message):
        return message
    said = message.get("value") if is_null(message.get("content")) else message["content"]
    if is_missing(said):
        return ""
    parts = items_of(said) or ()
    if parts and all(is_object(part) and isinstance(part.get("text"), str) for part in parts):
        said = "".join(part["text"] for part in parts)
    return said.strip() if isinstance(said, str) else said


def said_in(messages: list[Any]) -> list[Any]:
    """Messages in a form that is the same where the same is said and called, whatever the
    dialect.
    """
    return [(role_of(message), words_of(message), calls_of(message)) for message in messages]


def calls_of(message: Any) -> list[Any]:
    """The tools that a message calls, with what, in one form of the two that there are."""
    calls = message.get("tool_calls") if is_object(message) else None
    calls = parsed_json(calls) if isinstance(calls, str) else calls
    found = list[Any]()
    for call in items_of(as_list(calls)) or ():
        called = call.get("function", call) if is_object(call) else call
        if is_object(called):
            given = called.get("arguments")
            read = parsed_json(given) if isinstance(given, str) else None
            called = (
                called.get("name"),
                json.dumps(given if read is None else read, sort_keys=True, default=str),
            )
        found.append(called)
    return found
