"""The field that holds the prompt, in rows whose answers have fields of their own.

Such rows are pairs, ranked answers and judged answers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from chronicals.data.kinds.json_fields import conversation_in
from chronicals.data.kinds.messages import as_list, role_of
from chronicals.data.kinds.rows import question_messages
from chronicals.data.reading.gate import DataError
from chronicals.data.reading.plain_values import is_filled
from chronicals.data.reading.records import Record
from chronicals.data.reading.row_fields import CONVERSATION_FIELDS, PROMPT_COMPLETION_PAIRS

_PROMPT_NAMES = (
    *CONVERSATION_FIELDS,
    "instruction",
    *dict.fromkeys(prompt for prompt, _ in PROMPT_COMPLETION_PAIRS[1:]),
)
"""Names of the prompt in a row without a field ``prompt``."""

PROMPT_FIELDS = frozenset({*_PROMPT_NAMES, "history"})
"""Every other field of which a prompt may be made."""


def prompt_names(record: Record, without: Collection[str] = ()) -> list[str]:
    """Return the fields that may hold the prompt: several if the row does not say which does.

    Args:
        without: fields that hold something else.
    """
    if record.get("prompt") is not None:
        return ["prompt"]
    names = [name for name in _PROMPT_NAMES if name not in without and is_filled(record.get(name))]
    # Beside an instruction, ``input`` is a part of it.
    return [name for name in names if name != "input" or "instruction" not in names]


def prompt_in(name: str, record: Record, where: str) -> Any:
    """Return the prompt in the field ``name``, a text or messages.

    An ``instruction`` with its ``input`` and ``history`` is messages, as in fine-tuning, and so is
    any text with a ``history``.

    Raises:
        DataError: a field is of the wrong type, or a conversation ends with the assistant.
    """
    if name == "instruction":
        return question_messages(record, where)
    if name not in CONVERSATION_FIELDS:
        prompt = as_list(record[name])
        if not isinstance(prompt, str):
            return prompt
        messages = question_messages(
            {"instruction": prompt, "history": record.get("history")}, where
        )
        return messages if len(messages) > 1 else prompt
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


def question_in(name: str, record: Record, where: str) -> list[Any]:
    """Return the messages that a possible prompt field asks.

    Of a conversation these are the messages before its answer.

    Raises:
        DataError: a field is of the wrong type.
    """
    if name == "instruction":
        return question_messages(record, where)
    value = record[name]
    if name in CONVERSATION_FIELDS:
        value = conversation_in(value, name, where)
    messages = as_list(value)
    if isinstance(messages, list):
        answered = messages and role_of(messages[-1]) == "assistant"
        return messages[:-1] if answered else messages
    if isinstance(messages, str) and not messages.strip():
        return []
    return [{"role": "user", "content": messages}]
