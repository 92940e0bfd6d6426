"""Messages of conversations: several dialects in, one form out.

Dialects are OpenAI's messages, ShareGPT's ``from`` and ``value``, content in parts, tool calls with
their arguments as JSON text, and null for a field that a message lacks. Tables hold messages, tools
and answers as JSON text.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

from chronicals.data.reading.gate import DataError
from chronicals.data.reading.plain_values import (
    is_filled,
    is_missing,
    is_null,
    is_object,
    list_items,
    plain,
)
from chronicals.data.reading.records import MEDIA_FIELDS, RowRecord

Message = dict[str, Any]

TEXT_OR_MESSAGES = ("prompt", "completion", "response", "chosen", "rejected")
"""Fields that hold a text, or messages, which some write as JSON text."""

MESSAGE_ROLE_FIELDS = ("role", "from")
MESSAGE_CONTENT_FIELDS = ("content", "value")
"""Fields of a message, in the order in which they are read: who speaks, and what is said."""

THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of an assistant's thoughts in messages, the usual one first."""

MESSAGE_ROLES = ("system", "developer", "user", "assistant", "tool")

SYSTEM_ROLES = ("system", "developer")
"""Roles of messages that belong before all others."""

ROLE_ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "function": "tool",
    "ipython": "tool",
    "function_call": "assistant",
}
"""Other names of the roles."""

MEDIA_PART_TYPES = {
    *MEDIA_FIELDS,
    "image_url",
    "input_image",
    "video_url",
    "audio_url",
    "input_audio",
}
"""Types of the parts of a content that are no text."""

_JSON_OBJECT = re.compile(r"[ \t\n\r]*(?:\[[ \t\n\r]*)?\{")
"""Beginning of a JSON object, or of a list of them."""

_PRINTED_MESSAGE = re.compile(
    r"\s*(?:\[\s*\{\s*'(?:role|from|content|value)'\s*:"
    r"|\{\s*'(?:role|from)'\s*:\s*'\w+'\s*,\s*'(?:content|value)'\s*:)"
)
"""Beginning of a message, or of a list of them, as Python prints it."""


def normal_messages(messages: Any, name: str, where: str) -> list[Message]:
    """Return messages in the form that chat templates read.

    Each has a ``role`` of ``MESSAGE_ROLES`` and a ``content``: text, or None beside tool calls.

    Args:
        messages: the list as the row has it.
        name: of its field, for errors.
        where: what errors call the row.

    Raises:
        DataError: a message lacks a field, or a field is of the wrong type.
    """
    listed = list_items(messages)
    if listed is None:
        raise DataError(
            f"{where}: {name} must be a list of messages, this is {type(messages).__name__}",
            "wrong_type",
        )
    if not listed:
        raise DataError(
            f"{where}: {name} must be a list with at least one message", "empty_conversation"
        )
    return [
        _normal_message(message, f"{where}: message {number}")
        for number, message in enumerate(listed, 1)
    ]


def _normal_message(message: Any, where: str) -> Message:
    if not is_object(message):
        raise DataError(
            f"{where} must be an object with 'role' and 'content', this is "
            f"{type(message).__name__}",
            "wrong_type",
        )
    usual = len(message) == 2 and message.get("role") in MESSAGE_ROLES
    if usual and isinstance(message.get("content"), str):
        return dict(message)
    fields = _present_fields(message)
    if isinstance(fields.get("tool_calls"), str):
        calls = read_json(fields["tool_calls"], "tool_calls", where)
        fields = _present_fields({**fields, "tool_calls": calls})
    refuse_media(fields, where)
    speaker = fields["role"] if "role" in fields else fields.pop("from", None)
    if speaker is None:
        raise DataError(f"{where} has no role, only {sorted(fields)}", "missing_field")
    role = _role_of(speaker, where)
    content = fields["content"] if "content" in fields else fields.pop("value", None)
    if speaker == "function_call":
        calls = read_json(content, "value", where)
        fields["tool_calls"] = calls if isinstance(calls, list) else [calls]
        content = None
    if fields.get("tool_calls") and is_missing(content):
        content = None
    if content is None and not fields.get("tool_calls"):
        raise DataError(f"{where} ({role}) has no content", "missing_field")
    if content is not None:
        content = _joined_text(content, f"{where} ({role})")
    fields |= {"role": role, "content": content}
    if "tool_calls" in fields:
        fields["tool_calls"] = _normal_calls(fields["tool_calls"], where)
    if "weight" in fields:
        _apply_weight(fields, f"{where} ({role})")
    return fields


def _role_of(speaker: Any, where: str) -> Any:
    """Return the role of a speaker, who may have a name of another format.

    Raises:
        DataError: there is no such role.
    """
    role = ROLE_ALIASES.get(speaker, speaker) if isinstance(speaker, str) else speaker
    if role not in MESSAGE_ROLES:
        raise DataError(
            f"{where}: unknown role {speaker!r}; there are "
            f"{', '.join((*MESSAGE_ROLES, *ROLE_ALIASES))}",
            "unknown_role",
        )
    return role


def _apply_weight(fields: Message, where: str) -> None:
    """Put ``train`` in the place of OpenAI's weight: 0 is ``train: false``, 1 the same as none.

    Raises:
        DataError: the weight is another one, or contradicts ``train``.
    """
    weight = fields.pop("weight")
    if not isinstance(weight, Number) or weight not in (0, 1):
        raise DataError(
            f"{where}: weight={weight!r} is not supported; it must be the number 0 or 1",
            "wrong_type",
        )
    if weight == 0 and fields.setdefault("train", False) is not False:
        raise DataError(
            f"{where}: weight=0 contradicts train={fields['train']!r}; keep one of them",
            "wrong_type",
        )


def _present_fields(fields: Mapping[str, Any]) -> Message:
    """Return the fields of a message or a call that hold something.

    Content without parts is kept: it says nothing, which the gate may have to report.
    """
    return {
        name: value
        for name, value in fields.items()
        if not is_missing(value) or (name in MESSAGE_CONTENT_FIELDS and not is_null(value))
    }


def _joined_text(content: Any, where: str) -> str:
    """Return a content as one text; its parts of text are joined."""
    if isinstance(content, str):
        return content
    parts = list_items(content)
    if parts is None:
        raise DataError(
            f"{where}: content must be text or a list of parts, this is {type(content).__name__}",
            "wrong_type",
        )
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind in MEDIA_PART_TYPES:
            raise DataError(
                f"{where}: content has a part of type {kind!r}; only text is trained on",
                "pictures_or_sound",
            )
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, str):
            texts.append(part)
        else:
            raise DataError(
                f"{where}: content has a part of type {kind!r}; only parts of text can be trained "
                "on",
                "wrong_type",
            )
    return "".join(texts)


def _normal_calls(calls: Any, where: str) -> list[dict]:
    """Return tool calls as the templates of transformers read them.

    Each is ``{"type": "function", "function": {"name", "arguments": object}}``.
    """
    calls = list_items(calls)
    if calls is None or not all(isinstance(call, Mapping) for call in calls):
        raise DataError(f"{where}: tool_calls must be a list of objects", "wrong_type")
    normal = []
    for call in map(_present_fields, calls):
        function = call.get("function") or {
            name: call[name] for name in ("name", "arguments") if name in call
        }
        if not isinstance(function, Mapping):
            raise DataError(
                f"{where}: function must be an object with 'name', this is "
                f"{type(function).__name__}",
                "wrong_type",
            )
        function = _present_fields(function)
        if not isinstance(function.get("name"), str):
            raise DataError(f"{where}: a tool call has no name", "missing_field")
        arguments = read_json(function.get("arguments") or {}, "the arguments of a call", where)
        function["arguments"] = {} if arguments is None else arguments
        if not isinstance(function["arguments"], Mapping):
            kind = type(function["arguments"]).__name__
            raise DataError(
                f"{where}: the arguments of a call must be a JSON object, this is {kind}",
                "wrong_type",
            )
        others = {
            name: value
            for name, value in call.items()
            if name not in ("function", "name", "arguments")
        }
        normal.append({"type": "function", **others, "function": function})
    return normal


def refuse_media(fields: RowRecord, where: str) -> None:
    """Refuse a row or a message with a field of pictures, video or sound.

    Raises:
        DataError: there is such a field, and it holds something.
    """
    if not is_object(fields):
        return
    for name in MEDIA_FIELDS:
        if holds_media(fields.get(name)):
            raise DataError(
                f"{where}: {name!r} holds pictures, video or sound; only text is trained on",
                "pictures_or_sound",
            )


def holds_media(value: Any) -> bool:
    """Return True for pictures and sound, not for a flag or a count that says there are none."""
    return is_filled(value) and (hasattr(value, "__len__") or bool(value))


def check_answers(messages: Sequence[Message], prompt: int, where: str) -> bool:
    """Return whether the assistant answers in a normalised conversation.

    Args:
        messages: of the conversation, in their normal form.
        prompt: number of messages that are its prompt.
        where: what errors call the row.

    Raises:
        DataError: an answer is empty, and not set aside by ``train: false``.
    """
    answered = False
    for number, message in enumerate(messages[prompt:], prompt + 1):
        if message["role"] != "assistant":
            continue
        answered = True
        texts = (message.get(name) for name in ("content", *THOUGHT_FIELDS))
        says_something = any(
            isinstance(text, str) and text and not text.isspace() for text in texts
        )
        called = message.get("tool_calls")
        if not called and not says_something and message.get("train") is not False:
            raise DataError(f"{where}: message {number} (assistant) is empty", "empty_answer")
    return answered


def conversation_oddities(messages: Sequence[Message]) -> list[str]:
    """Return the gate's rules that a conversation breaks without being wrong for certain."""
    turns = list(itertools.pairwise([message["role"] for message in messages]))
    rules = []
    if ("assistant", "assistant") in turns:
        rules.append("consecutive_answers")
    if any(role in SYSTEM_ROLES and before not in SYSTEM_ROLES for before, role in turns):
        rules.append("late_system_message")
    return rules


def listed_messages(value: Any) -> Any:
    """Return a message by itself as a list of one, arrays and tuples as lists, else ``value``."""
    if is_object(value):
        return [value]
    items = list_items(value)
    return value if items is None else items


def role_of(message: Any) -> Any:
    """Return the role of a message of any dialect, one of ``MESSAGE_ROLES`` if it is known."""
    for name in MESSAGE_ROLE_FIELDS if is_object(message) else ():
        if is_filled(message.get(name)):
            role = message[name]
            return ROLE_ALIASES.get(role, role) if isinstance(role, str) else role
    return None


def comparable(messages: list[Any]) -> list[Any]:
    """Return (role, words, calls) of each message: equal if they say the same in any dialect.

    Words are parts of text joined, without white space around them. A call is its name and its
    arguments as sorted JSON.
    """
    said = list[Any]()
    for message in messages:
        if not is_object(message):
            said.append((None, message, []))
            continue
        words = message.get("value") if is_null(message.get("content")) else message["content"]
        if is_missing(words):
            words = ""
        parts = list_items(words) or ()
        if parts and all(is_object(part) and isinstance(part.get("text"), str) for part in parts):
            words = "".join(part["text"] for part in parts)
        if isinstance(words, str):
            words = words.strip()
        calls = message.get("tool_calls")
        if isinstance(calls, str):
            calls = parsed_json(calls)
        comparable_calls = list[Any]()
        for call in list_items(listed_messages(calls)) or ():
            function = call.get("function", call) if is_object(call) else call
            if is_object(function):
                arguments = function.get("arguments")
                read = parsed_json(arguments) if isinstance(arguments, str) else None
                if read is not None:
                    arguments = read
                function = function.get("name"), json.dumps(arguments, sort_keys=True, default=str)
            comparable_calls.append(function)
        said.append((role_of(message), words, comparable_calls))
    return said


def with_conversations(record: RowRecord) -> RowRecord:
    """Return the row with messages in the fields ``TEXT_OR_MESSAGES`` that hold them as JSON text.

    Other texts stay as they are.
    """
    if not is_object(record):
        return record
    conversations = {}
    for name in TEXT_OR_MESSAGES:
        text = record.get(name)
        messages = None
        if isinstance(text, str) and _JSON_OBJECT.match(text):
            messages = parsed_json(text)
        if isinstance(messages, dict):
            messages = [messages]
        if not isinstance(messages, list) or not messages:
            continue
        if all(
            isinstance(message, dict)
            and not message.keys().isdisjoint(MESSAGE_ROLE_FIELDS)
            and not message.keys().isdisjoint((*MESSAGE_CONTENT_FIELDS, "tool_calls"))
            for message in messages
        ):
            conversations[name] = messages
    return {**record, **conversations} if conversations else record


def conversation_in(value: Any, name: str, where: str) -> Any:
    """Return the value of a field of messages, read if it is JSON text.

    Raises:
        DataError: it begins like a JSON list and is none.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        return read_json(value, name, where)
    return value


def parsed_json(text: str) -> Any:
    """Return the value of a JSON text; None for any other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_json(value: Any, name: str, where: str) -> Any:
    """Return ``value``, read if it is JSON text.

    Args:
        value: the field's value: JSON text, or what such a text holds.
        name: of the field, for errors.
        where: what errors call the row.

    Raises:
        DataError: it is text, but not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return plain(json.loads(value))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {name} cannot be read as JSON: {error}", "wrong_type") from error


def refuse_printed_messages(record: RowRecord, where: str) -> None:
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
