"""Kinds of rows, and the one form in which each kind goes on to the tokenizer.

A row comes as a mapping of fields. ``plain_row`` makes its values plain, ``kind_of`` finds its kind
by its fields, and ``normalise`` gives it the form of that kind.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from types import NoneType
from typing import Any, NamedTuple

from chronicals.data.kinds.messages import (
    SYSTEM_ROLES,
    THOUGHT_FIELDS,
    Message,
    conversation_in,
    normal_messages,
    read_json,
)
from chronicals.data.reading.gate import DataError
from chronicals.data.reading.plain_values import (
    is_filled,
    is_missing,
    is_null,
    is_object,
    list_items,
    plain,
)
from chronicals.data.reading.records import (
    ALL_KIND_FIELDS,
    CONVERSATION_FIELDS,
    KIND_FIELDS,
    MEDIA_FIELDS,
    PROMPT_COMPLETION_PAIRS,
    READ_FIELDS,
    REQUESTED_KIND_FIELDS,
    TEMPLATE_FIELDS,
    TOKEN_FIELDS,
    RowRecord,
)

ROW_KINDS = (*dict.fromkeys(kind for kind, _ in KIND_FIELDS),)
"""Names of the kinds. Token stores hold a kind as its index here, so the order is fixed."""

DOCUMENT_KINDS = ("chat", "completion", "instruction", "text", "tokens")
"""The kinds of which each row is one document."""

CHAT_KINDS = ("chat", "instruction")
"""The kinds that go through the chat template."""

PROMPT = "prompt"
"""The kind of a row whose answer the model draws."""

UNTRAINED_KINDS = {
    "preference": "holds a preference pair (chosen and rejected, or responses and scores), of "
    "which this objective would "
    "train one side unasked; to train on what was chosen, map it: columns={'messages': 'chosen'} "
    "where it is a conversation, "
    "or columns={'completion': 'chosen'} where it is the answer to a prompt",
    "unpaired preference": "holds a judged answer (prompt, completion, label), which this "
    "objective would train whatever the "
    "judgement; drop the label and the bad answers to train on the good ones",
    "prompt": "holds a prompt without an answer, which only objectives with rollouts can use; "
    "where another column holds the "
    "answer, map it: columns={'completion': 'THEIR_NAME'}",
}
"""Error texts for the kinds that are not one document."""

EXPECTED_FIELDS = {
    "preference": "chosen and rejected, or responses and scores",
    "unpaired preference": "an answer (completion, response, output, answer or messages) and its "
    "label",
    PROMPT: "prompt, a text or messages",
}
"""Fields of the kinds that an objective may ask for, in words for errors."""


class NormalRow(NamedTuple):
    """A row in the form in which it is encoded.

    Attributes:
        kind: ``chat``, ``completion``, ``text``, ``tokens`` or ``prompt``.
        record: ``messages`` (and ``tools``), ``prompt`` and ``completion`` (both texts, or both
            messages), ``text``, or ``input_ids`` (with ``labels`` and ``attention_mask``). A
            prompt has ``prompt``, or ``messages`` (and ``tools``).
    """

    kind: str
    record: RowRecord


def plain_row(record: RowRecord, where: str) -> RowRecord:
    """Return the row with plain values in the fields that are read, and None for missing ones.

    A field of another kind of row that holds an empty list counts as missing, for tables of several
    kinds are filled up so. If no other field identifies a kind, it stays: the gate then names the
    empty conversation or answer.

    Raises:
        DataError: a field is nested too deeply.
    """
    if not is_object(record):
        return record
    # Numbers, media and unread fields stay as they are.
    kept = (*TOKEN_FIELDS, "scores", *MEDIA_FIELDS)
    fields = dict[str, Any]()
    try:
        for name, value in record.items():
            if type(value) is not str and (name in READ_FIELDS or name in MEDIA_FIELDS):
                if is_null(value) or (name not in ALL_KIND_FIELDS and is_missing(value)):
                    value = None
                elif name not in kept:
                    value = plain(value)
            fields[name] = value
    except RecursionError:
        raise DataError(
            f"{where}: holds objects nested too deeply to be read", "wrong_type"
        ) from None
    blank = []
    for name, value in fields.items():
        if name not in ALL_KIND_FIELDS or value is None:
            continue
        # A table of text leaves a label out as empty text.
        empty_label = name == "label" and isinstance(value, str) and not value.strip()
        if empty_label or is_missing(value):
            blank.append(name)
    if blank and kind_with(non_null_fields(fields).difference(blank)) not in (None, "prompt"):
        fields |= dict.fromkeys(blank)
    return fields


def non_null_fields(record: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the fields that are not null."""
    return frozenset([name for name, value in record.items() if not is_null(value)])


def kind_of(record: Any, where: str, wanted: Collection[str] = ()) -> str:
    """Return the kind of a row, a name in ``ROW_KINDS``; fields that are None do not count.

    Args:
        record: the row; anything but an object is refused.
        where: what errors call the row.
        wanted: kinds that are tried first: a row may have the fields of several.

    Raises:
        DataError: it is no object, or of no kind.
    """
    if not is_object(record):
        raise DataError(
            f"{where}: a row must be an object with named fields, this is {type(record).__name__}",
            "wrong_type",
        )
    kind = known_kind(record, wanted)
    if kind is None:
        usual = "messages, prompt and completion, instruction and output, text, or input_ids"
        requested = [EXPECTED_FIELDS[wish] for wish in sorted(wanted) if wish in EXPECTED_FIELDS]
        raise DataError(
            f"{where}: unknown kind of row with fields {sorted(map(str, record))}; expected "
            f"{'; or '.join(requested) or usual}",
            "missing_field",
        )
    return kind


def known_kind(record: Any, wanted: Collection[str] = ()) -> str | None:
    """Return the kind of a row as ``kind_of`` does, but None for a row of no kind."""
    if not is_object(record):
        return None
    names = non_null_fields(record)
    kind = kind_with(names, frozenset(wanted)) or kind_with(names)
    if kind == "completion" and not isinstance(record.get("prompt"), (str, NoneType)):
        return "chat"  # its prompt is a list of messages
    return kind


@functools.lru_cache
def kind_with(names: frozenset[str], wanted: frozenset[str] | None = None) -> str | None:
    """Return the first kind that fields of these names identify, or None.

    Args:
        names: of the fields.
        wanted: kinds that are tried; by default the usual ones.
    """
    for kind, fields in KIND_FIELDS if wanted is None else REQUESTED_KIND_FIELDS:
        if fields <= names and (wanted is None or kind in wanted):
            return kind
    return None


def normalise(record: RowRecord, kind: str, where: str) -> NormalRow:
    """Return the row in the form in which its ``kind`` is encoded.

    Fields of an instruction are Alpaca's (Taori et al., 2023): instruction, input and output;
    LLaMA-Factory adds system and history.

    Raises:
        DataError: a field is missing or of the wrong type, or the kind is none of
            ``DOCUMENT_KINDS``.
    """
    if kind in UNTRAINED_KINDS:
        raise DataError(f"{where}: {UNTRAINED_KINDS[kind]}", "unusable_kind")
    if kind in ("text", "tokens"):
        return NormalRow(kind, record)
    if kind in ("completion", "chat"):
        pair = pair_of(record)
        if pair:
            record = {**record, "prompt": record[pair[0]], "completion": record[pair[1]]}
    if kind == "completion":
        return NormalRow(kind, record)
    try:
        tools = _tools_of(record, where)
        if kind == "instruction":
            messages = list[Message]()
            if is_filled(record.get("system")):
                content = _text(record["system"], "system", where)
                messages.append({"role": "system", "content": content})
            name = "output" if record.get("output") is not None else "response"
            answer = {"role": "assistant", "content": _text(record[name], name, where)}
            messages += [*question_messages(record, where), answer]
            return NormalRow("chat", {"messages": messages, "tools": tools})
        for name in CONVERSATION_FIELDS:
            if record.get(name) is not None:
                listed = conversation_in(record[name], name, where)
                messages = _after_system(record, normal_messages(listed, name, where), where)
                return NormalRow("chat", {"messages": messages, "tools": tools})
        prompt = normal_messages(record["prompt"], "prompt", where)
        completion = normal_messages(record["completion"], "completion", where)
        prompt = _after_system(record, prompt, where)
        return NormalRow("chat", {"prompt": prompt, "completion": completion, "tools": tools})
    except RecursionError:
        raise DataError(
            f"{where}: holds objects nested too deeply to be read", "wrong_type"
        ) from None


def _tools_of(record: RowRecord, where: str) -> list[Any] | None:
    """Return the tools that a row offers; None without any.

    Raises:
        DataError: they are no list of objects.
    """
    tools = read_json(record["tools"], "tools", where) if is_filled(record.get("tools")) else None
    if is_missing(tools):
        return None  # templates treat an empty list otherwise
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"{where}: tools must be a list of objects", "wrong_type")
    return tools


def normal_prompt(record: RowRecord, as_chat: bool, where: str) -> NormalRow:
    """Return a row of kind ``prompt`` in the form in which it is encoded.

    Args:
        record: with a ``prompt``, a text or messages, or with ``messages``.
        as_chat: whether a text is the message of a user.
        where: what errors call the row.

    Raises:
        DataError: it is empty, ends with an answer, or a field is of the wrong type.
    """
    name = "prompt" if record.get("prompt") is not None else "messages"
    asked = record[name]
    if isinstance(asked, str):
        if not asked.strip():
            raise DataError(f"{where}: {name} is empty", "empty_prompt")
        if not as_chat:
            return NormalRow(PROMPT, {"prompt": asked})
        asked = [{"role": "user", "content": asked}]
    try:
        if name == "messages":
            asked = conversation_in(asked, name, where)
        messages = _after_system(record, normal_messages(asked, name, where), where)
        tools = _tools_of(record, where)
    except RecursionError:
        raise DataError(
            f"{where}: holds objects nested too deeply to be read", "wrong_type"
        ) from None
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{where}: {name} ends with the assistant's answer", "answered_prompt")
    if not any(is_filled(message.get("content")) for message in messages):
        raise DataError(f"{where}: {name} has no message with a text", "empty_prompt")
    return NormalRow(PROMPT, {"messages": messages, "tools": tools})


def _after_system(record: RowRecord, messages: list[Message], where: str) -> list[Message]:
    """Return the messages behind the row's own ``system``, unless they begin with one."""
    if not is_filled(record.get("system")) or messages[0]["role"] in SYSTEM_ROLES:
        return messages
    return [{"role": "system", "content": _text(record["system"], "system", where)}, *messages]


def question_messages(record: RowRecord, where: str) -> list[Message]:
    """Return the messages before the answer to an ``instruction``.

    They are the turns of its ``history``, and the question with its ``input``.

    Raises:
        DataError: a field is of the wrong type.
    """
    question = [
        _text(record[name], name, where)
        for name in ("instruction", "input")
        if is_filled(record.get(name))
    ]
    messages = list[Message]()
    history = record.get("history")
    turns = read_json(history, "history", where) if is_filled(history) else None
    if not is_missing(turns):
        for turn in list_items(turns) or [turns]:
            pair = list_items(turn)
            if pair is None or len(pair) != 2:
                raise DataError(
                    f"{where}: history must be a list of [question, answer]", "wrong_type"
                )
            asked, answered = (_text(text, "history", where) for text in pair)
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": answered})
    return [*messages, {"role": "user", "content": "\n\n".join(question)}]


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(
            f"{where}: {name} must be text, this is {type(value).__name__}", "wrong_type"
        )
    return value


def pair_of(record: RowRecord) -> tuple[str, str] | None:
    """Return other names that a row has for its prompt and completion; None if it needs none."""
    usual = "prompt" in record and "completion" in record
    if usual and record["prompt"] is not None and record["completion"] is not None:
        return None
    for prompt, completion in PROMPT_COMPLETION_PAIRS:
        if record.get(prompt) is not None and record.get(completion) is not None:
            return prompt, completion
    return None


def as_instruction(record: RowRecord) -> RowRecord:
    """Return a plain completion as an instruction, which goes through the chat template."""
    prompt, completion = pair_of(record) or ("prompt", "completion")
    fields = {name: record[name] for name in TEMPLATE_FIELDS if name in record}
    return {**fields, "instruction": record[prompt], "output": record[completion]}


def unread_fields(record: RowRecord, kind: str) -> list[str]:
    """Return the filled fields that a row of this kind has no place for.

    A plain completion is rendered without a chat template, so its system message, tools and history
    are lost.
    """
    if kind != "completion":
        return []
    return [name for name in TEMPLATE_FIELDS if is_filled(record.get(name))]


def texts_of(record: RowRecord) -> list[str]:
    """Return the texts that people wrote in a normalised row, and the assistants' thoughts."""
    texts: list[Any] = []
    for field in ("messages", "prompt", "completion", "text"):
        value = record.get(field)
        if not isinstance(value, list):
            texts.append(value)
            continue
        for message in value:
            if not is_object(message):
                continue  # its fault is reported when the row is encoded
            texts.append(message.get("content"))
            if len(message) != 2:  # most have a role and a content only
                texts += [message.get(name) for name in THOUGHT_FIELDS]
    return [text for text in texts if isinstance(text, str)]
