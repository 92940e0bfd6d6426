"""Fields that hold messages, tools or answers as JSON text, as tables do."""

from __future__ import annotations

import json
import re
from typing import Any

from chronicals.data.reading.gate import DataError
from chronicals.data.reading.plain_values import is_object, plain
from chronicals.data.reading.records import Record

TEXT_OR_MESSAGES = ("prompt", "completion", "response", "chosen", "rejected")
"""Fields that hold a text, or messages, which some write as JSON text."""

MESSAGE_ROLE_FIELDS = ("role", "from")
MESSAGE_CONTENT_FIELDS = ("content", "value")
"""Fields of a message, in the order in which they are read: who speaks, and what is said."""

_JSON_OBJECT = re.compile(r"[ \t\n\r]*(?:\[[ \t\n\r]*)?\{")
"""Beginning of a JSON object, or of a list of them."""

_PRINTED_MESSAGE = re.compile(
    r"\s*(?:\[\s*\{\s*'(?:role|from|content|value)'\s*:"
    r"|\{\s*'(?:role|from)'\s*:\s*'\w+'\s*,\s*'(?:content|value)'\s*:)"
)
"""Beginning of a message, or of a list of them, as Python prints it."""


def with_conversations(record: Record) -> Record:
    """Return the row with messages in the fields ``TEXT_OR_MESSAGES`` that hold them as JSON text.

    Other texts stay as they are.
    """
    if not is_object(record):
        return record
    conversations = {}
    for name in TEXT_OR_MESSAGES:
        text = record.get(name)
        if isinstance(text, str):
            messages = conversation_or_text(text)
            if messages is not text:
                conversations[name] = messages
    return {**record, **conversations} if conversations else record


def conversation_or_text(text: str) -> list[Any] | str:
    """Return the messages that a JSON text holds (one as a list of one), else the text itself."""
    messages = parsed_json(text) if _JSON_OBJECT.match(text) else None
    if isinstance(messages, dict):
        messages = [messages]
    if not isinstance(messages, list) or not messages:
        return text
    for message in messages:
        fields = message.keys() if isinstance(message, dict) else ()
        speaks = any(name in fields for name in MESSAGE_ROLE_FIELDS)
        says = any(name in fields for name in (*MESSAGE_CONTENT_FIELDS, "tool_calls"))
        if not (speaks and says):
            return text
    return messages


def conversation_in(value: Any, name: str, where: str) -> Any:
    """Return the value of a field of messages, read if it is JSON text.

    Raises:
        DataError: it begins like a JSON list and is none.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        return read_json(value, name, where)
    return value


def json_list(text: str) -> list[Any] | None:
    """Return the list that a JSON text holds; None for any other text."""
    value = parsed_json(text)
    return value if isinstance(value, list) else None


def parsed_json(text: str) -> Any:
    """Return the value of a JSON text; None for any other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_json(value: Any, name: str, where: str) -> Any:
    """Return ``value``, read if it is JSON text.

    Args:
        name: of the field, for errors.

    Raises:
        DataError: it is text, but not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return plain(json.loads(value))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {name} cannot be read as JSON: {error}", "wrong_type") from error


def refuse_printed_messages(record: Record, where: str) -> None:
    """Refuse a text that is a list of messages as Python prints it: it would be trained as text.

    Raises:
        DataError: a field holds such a text.
    """
    if not is_object(record):
        return
    for name in TEXT_OR_MESSAGES:
        text = record.get(name)
        if isinstance(text, str) and _PRINTED_MESSAGE.match(text):
            raise DataError(
                f"{where}: {name} holds messages as Python prints them; write JSON, "
                "json.dumps(messages) in a table, or JSON lines",
                "wrong_type",
            )
