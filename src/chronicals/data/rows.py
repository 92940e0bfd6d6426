"""What a row is: its kind, told by its fields, and the one form in which each kind goes on to the chat template.

Conversations arrive in several dialects: OpenAI's messages, ShareGPT's ``from`` and ``value``, content in parts, tool
calls with their arguments as JSON text, and null where a message lacks a field.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple

from chronicals.data.gate import DataError
from chronicals.data.records import Record

Message = dict[str, Any]

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""What an assistant's thoughts are called in messages, the usual name first."""

PAIRS = (("prompt", "response"), ("question", "answer"), ("query", "response"), ("input", "output"))
"""Other names of ``prompt`` and ``completion``."""

KINDS: list[tuple[str, frozenset[str]]] = [
    ("chat", frozenset({"messages"})),
    ("chat", frozenset({"conversations"})),
    ("unpaired preference", frozenset({"prompt", "completion", "label"})),
    ("completion", frozenset({"prompt", "completion"})),
    ("unpaired preference", frozenset({"prompt", "response", "label"})),
    ("completion", frozenset({"prompt", "response"})),
    ("instruction", frozenset({"instruction", "output"})),
    ("instruction", frozenset({"instruction", "response"})),
    ("preference", frozenset({"chosen", "rejected"})),
    ("preference", frozenset({"prompt", "responses", "scores"})),
    ("tokens", frozenset({"input_ids"})),
    ("text", frozenset({"text"})),
    ("prompt", frozenset({"prompt"})),
    *(("completion", frozenset(pair)) for pair in PAIRS[1:]),
]
"""The kinds of row and the fields that tell them, in the order in which they are looked for."""

WANTED = [
    *KINDS,
    ("preference", frozenset({"responses", "scores"})),
    *(("unpaired preference", frozenset({answer, "label"})) for answer in ("completion", "response", "output", "answer")),
    *(("unpaired preference", frozenset({answer, "label"})) for answer in ("messages", "conversations")),
]
"""The same where an objective asks for a kind: a ``label`` beside a chat says nothing to the others."""

TELLING = frozenset().union(*(fields for _, fields in KINDS)) - frozenset().union(*PAIRS[1:]) | {"output", "response"}
"""Every field that tells a kind before other names of prompt and completion are looked for."""

READ = TELLING | frozenset().union(*PAIRS) | {"history", "system", "tools", "labels", "attention_mask"}
"""Every field that is read."""

TRAINED = ("chat", "completion", "instruction", "text", "tokens")
"""The kinds of which each row is one document."""

CHATS = ("chat", "instruction")
"""The kinds that go through the chat template."""

NOT_TRAINED = {
    "preference": "holds a preference pair (chosen and rejected, or responses and scores), of which this objective would "
    "train one side unasked; to train on what was chosen, map it: columns={'messages': 'chosen'} where it is a conversation, "
    "or columns={'completion': 'chosen'} where it is the answer to a prompt",
    "unpaired preference": "holds a judged answer (prompt, completion, label), which this objective would train whatever the "
    "judgement; drop the label and the bad answers to train on the good ones",
    "prompt": "holds a prompt without an answer, which only objectives with rollouts can use; where another column holds the "
    "answer, map it: columns={'completion': 'THEIR_NAME'}",
}

EXPECTED = {
    "preference": "chosen and rejected, or responses and scores",
    "unpaired preference": "an answer (completion, response, output, answer or messages) and its label",
}
"""The fields of the kinds that an objective may take instead."""

WRITTEN = ("prompt", "completion", "response", "chosen", "rejected")
"""Fields that hold texts, or messages, which some write as JSON text."""

OPENING = re.compile(r"[ \t\n\r]*(?:\[[ \t\n\r]*)?\{")
"""What an object begins with, or a list of them."""

PRINTED = re.compile(
    r"\s*(?:\[\s*\{\s*'(?:role|from|content|value)'\s*:|\{\s*'(?:role|from)'\s*:\s*'\w+'\s*,\s*'(?:content|value)'\s*:)"
)
"""How Python prints a message, or a list of them."""

ROLES = ("system", "developer", "user", "assistant", "tool")
FIRST = ("system", "developer")
"""Roles that belong before all others."""

SPEAKER, SPOKEN = ("role", "from"), ("content", "value", "tool_calls")
"""Fields of a message: who speaks, and what is said."""

SPEAKERS = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
    "observation": "tool", "function_response": "tool", "function": "tool", "ipython": "tool",
    "function_call": "assistant",
}  # fmt: skip
"""Other names of the roles."""


class NormalRow(NamedTuple):
    """A row in the form in which it is encoded.

    Attributes:
        kind: ``chat``, ``completion``, ``text`` or ``tokens``.
        record: as ``normalise`` returns it.
    """

    kind: str
    record: Record

    @classmethod
    def of(cls, record: Record, kind: str, where: str) -> NormalRow:
        """A row of ``kind``, one of ``TRAINED``.

        Raises:
            DataError: as ``normalise``.
        """
        return cls("chat" if kind in CHATS else kind, normalise(record, kind, where))


def is_object(value: Any) -> bool:
    """Whether it has named fields; of a dict this is known sooner than ``Mapping`` can say it."""
    return type(value) is dict or isinstance(value, Mapping)


def fields_of(record: Mapping[str, Any]) -> frozenset[str]:
    """Names of those that hold something."""
    return frozenset([name for name, value in record.items() if value is not None])


def kind_of(record: Any, where: str, wanted: Collection[str] = ()) -> str:
    """The name in ``KINDS`` of a row; a field that is None is not there.

    Args:
        wanted: kinds that are looked for first: a row may have the fields of several.

    Raises:
        DataError: it is no object, or of no kind; ``where`` says which row.
    """
    if not is_object(record):
        raise DataError(f"{where}: a row must be an object with named fields, this is {type(record).__name__}", "wrong_type")
    there = fields_of(record)
    kind = kind_among(there, wanted) or _kind_with(there)
    if kind is None:
        usual = "messages, prompt and completion, instruction and output, text, or input_ids"
        expected = "; or ".join(EXPECTED[wish] for wish in sorted(wanted) if wish in EXPECTED) or usual
        raise DataError(
            f"{where}: unknown kind of row with fields {sorted(map(str, record))}; expected {expected}", "missing_field"
        )
    return "chat" if kind == "completion" and not isinstance(record.get("prompt"), (str, NoneType)) else kind


def kind_among(there: Collection[str], wanted: Collection[str]) -> str | None:
    """The first of the ``wanted`` kinds that fields tell; None where they tell none of them."""
    return _kind_with(frozenset(there), frozenset(wanted)) if wanted else None


@functools.lru_cache
def _kind_with(there: frozenset[str], of: frozenset[str] | None = None) -> str | None:
    kinds = KINDS if of is None else WANTED
    return next((kind for kind, fields in kinds if fields <= there and (of is None or kind in of)), None)


def normalise(record: Record, kind: str, where: str) -> Record:
    """The row in the form in which its ``kind`` is encoded: ``messages`` (and ``tools``), ``prompt`` and ``completion``
    (both texts, or both messages), ``text``, or ``input_ids`` (with ``labels`` and ``attention_mask``).

    Raises:
        DataError: a field is missing, of the wrong type, or the kind is not one that is trained on.
    """
    try:
        return _normalised(record, kind, where)
    except RecursionError:
        raise DataError(f"{where}: holds objects nested too deeply to be read", "wrong_type") from None


def _normalised(record: Record, kind: str, where: str) -> Record:
    if kind in NOT_TRAINED:
        raise DataError(f"{where}: {NOT_TRAINED[kind]}", "unusable_kind")
    if kind in ("text", "tokens"):
        return record
    if kind in ("completion", "chat") and (pair := pair_of(record)):
        record = {**record, **dict(zip(("prompt", "completion"), map(record.get, pair)))}
    if kind == "completion":
        return record
    tools = _tools(record.get("tools"), where)
    if kind == "instruction":
        return {"messages": _from_instruction(record, where), "tools": tools}
    told = next((name for name in ("messages", "conversations") if record.get(name) is not None), None)
    if told is None:
        sides = {name: _messages(record[name], name, where) for name in ("prompt", "completion")}
        return {"prompt": _after_system(record, sides["prompt"], where), "completion": sides["completion"], "tools": tools}
    said = conversation_in(record[told], told, where)
    return {"messages": _after_system(record, _messages(said, told, where), where), "tools": tools}


def conversation_in(value: Any, name: str, where: str) -> Any:
    """The value of a field of messages, which some write as JSON text."""
    return _parsed(value, name, where) if isinstance(value, str) and value.lstrip().startswith("[") else value


def with_conversations(record: Record) -> Record:
    """The row with messages in the fields ``WRITTEN`` where they are JSON text; other texts stay what they are."""
    if not is_object(record):
        return record
    there = [(name, value) for name in WRITTEN if isinstance(value := record.get(name), str)]
    found = {name: said for name, text in there if (said := conversation_or_text(text)) is not text}
    return {**record, **found} if found else record


def conversation_or_text(text: str) -> list[Any] | str:
    """The messages that a JSON text is, one by itself as a list of one, or the text itself."""
    found = parsed_json(text) if OPENING.match(text) else None
    found = [found] if isinstance(found, dict) else found
    return found if isinstance(found, list) and found and all(map(_is_spoken, found)) else text


def json_list(text: str) -> list[Any] | None:
    """The list that a JSON text is; None of any other text."""
    found = parsed_json(text)
    return found if isinstance(found, list) else None


def parsed_json(text: str) -> Any:
    """What a JSON text is; None of any other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_spoken(message: Any) -> bool:
    """Whether it names who speaks, and what is said or called."""
    fields = message.keys() if isinstance(message, dict) else ()
    return any(name in fields for name in SPEAKER) and any(name in fields for name in SPOKEN)


def as_instruction(record: Record) -> Record:
    """A plain completion as a row of kind instruction, which goes through the chat template."""
    prompt, completion = pair_of(record) or ("prompt", "completion")
    kept = {name: record[name] for name in OF_TEMPLATES if name in record}
    return {**kept, "instruction": record[prompt], "output": record[completion]}


def pair_of(record: Record) -> tuple[str, str] | None:
    """What a row calls its prompt and completion, if something else."""
    named = "prompt" in record and "completion" in record
    if named and record["prompt"] is not None and record["completion"] is not None:
        return None
    return next((pair for pair in PAIRS if all(record.get(name) is not None for name in pair)), None)


MEDIA = ("image", "images", "video", "videos", "audio", "audios")
PARTS_OF_MEDIA = {*MEDIA, "image_url", "input_image", "video_url", "audio_url", "input_audio"}
"""Types of a content's parts that are no text."""

OF_TEMPLATES = ("system", "tools", "history")


def unread_fields(record: Record, kind: str) -> list[str]:
    """Fields that say something which a row of this kind has no place for: a plain completion has no chat template."""
    return [name for name in OF_TEMPLATES if kind == "completion" and _is_filled(record.get(name))]


def refuse_media(record: Record, where: str) -> None:
    """Raises DataError where a row, or a message, has a field with pictures, video or sound."""
    if is_object(record) and (name := next((name for name in MEDIA if _is_filled(record.get(name))), None)):
        raise DataError(f"{where}: {name!r} holds pictures, video or sound; only text is trained on", "pictures_or_sound")


def refuse_printed_messages(record: Record, where: str) -> None:
    """Raises DataError where a text is a list of messages as Python prints it, and not JSON: it would be trained on as text."""
    texts = ((name, record.get(name)) for name in WRITTEN) if is_object(record) else ()
    if (name := next((name for name, text in texts if isinstance(text, str) and PRINTED.match(text)), None)) is not None:
        raise DataError(
            f"{where}: {name} holds messages as Python prints them; write JSON, json.dumps(messages) in a table, or JSON lines",
            "wrong_type",
        )


def _is_filled(value: Any) -> bool:
    return len(value) > 0 if hasattr(value, "__len__") else bool(value)


def _after_system(record: Record, messages: list[Message], where: str) -> list[Message]:
    """The row's own ``system``, then its messages, unless they begin with one."""
    if not _is_filled(record.get("system")) or messages[0]["role"] in FIRST:
        return messages
    return [{"role": "system", "content": _text(record["system"], "system", where)}, *messages]


def _tools(tools: Any, where: str) -> list[Any] | None:
    """None where none are offered, which templates tell from an empty list."""
    tools = tools.tolist() if hasattr(tools, "tolist") else tools
    if not tools:
        return None
    found = _parsed(tools, "tools", where) if isinstance(tools, str) else _plain(tools)
    if not isinstance(found, list) or not all(isinstance(tool, Mapping) for tool in found):
        raise DataError(f"{where}: tools must be a list of objects", "wrong_type")
    return found or None


def texts_of(record: Record) -> list[str]:
    """What people wrote in a normalised row, and what assistants thought."""
    found: list[Any] = []
    for value in map(record.get, ("messages", "prompt", "completion", "text")):
        for message in value if isinstance(value, list) else ():
            if not is_object(message):
                continue  # what is wrong with it is said where it is encoded
            found += [message.get("content")] if len(message) == 2 else map(message.get, ("content", *THOUGHTS))
        found += [] if isinstance(value, list) else [value]
    return [text for text in found if isinstance(text, str)]


def check_answers(messages: Sequence[Message], prompt: int, where: str) -> bool:
    """Whether the assistant answers in a normalised conversation, of which ``prompt`` messages are given.

    Raises:
        DataError: an answer is empty that is not set aside by ``train: false``.
    """
    numbered = enumerate(messages[prompt:], prompt + 1)
    answers = [(number, message) for number, message in numbered if message["role"] == "assistant"]
    for number, message in answers:
        if not message.get("tool_calls") and not _says_something(message) and message.get("train") is not False:
            raise DataError(f"{where}: message {number} (assistant) is empty", "empty_answer")
    return bool(answers)


def _says_something(message: Message) -> bool:
    for name in ("content", *THOUGHTS):
        text = message.get(name)
        if isinstance(text, str) and text and not text.isspace():
            return True
    return False


def conversation_oddities(messages: Sequence[Message]) -> list[str]:
    """Rules that a conversation breaks without being wrong for certain."""
    turns = list(itertools.pairwise([message["role"] for message in messages]))
    odd = []
    if ("assistant", "assistant") in turns:
        odd.append("consecutive_answers")
    if any(b in FIRST and a not in FIRST for a, b in turns):
        odd.append("late_system_message")
    return odd


def _from_instruction(record: Record, where: str) -> list[Message]:
    """Taori et al. (2023), Alpaca: instruction, input, output; LLaMA-Factory adds system and history."""
    answer = "output" if record.get("output") is not None else "response"
    there = _is_filled(record.get("system"))
    system = [{"role": "system", "content": _text(record["system"], "system", where)}] if there else []
    said = {"role": "assistant", "content": _text(record[answer], answer, where)}
    return [*system, *asked_of(record, where), said]


def asked_of(record: Record, where: str) -> list[Message]:
    """The messages before the answer to an ``instruction``: its ``history``, and the question with its ``input``.

    Raises:
        DataError: a field is of the wrong type.
    """
    asked = [_text(record[name], name, where) for name in ("instruction", "input") if _is_filled(record.get(name))]
    history = _parsed(_plain(record["history"]), "history", where) if _is_filled(record.get("history")) else []
    if not isinstance(history, Sequence) or not all(isinstance(turn, Sequence) and len(turn) == 2 for turn in history):
        raise DataError(f"{where}: history must be a list of [question, answer]", "wrong_type")
    turns = [
        {"role": role, "content": _text(text, "history", where)}
        for turn in history
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    return [*turns, {"role": "user", "content": "\n\n".join(asked)}]


def _messages(messages: Any, name: str, where: str) -> list[Message]:
    messages = messages.tolist() if hasattr(messages, "tolist") else messages
    if type(messages) is not list and (not isinstance(messages, Sequence) or isinstance(messages, str)):
        raise DataError(f"{where}: {name} must be a list of messages, this is {type(messages).__name__}", "wrong_type")
    if not messages:
        raise DataError(f"{where}: {name} must be a list with at least one message", "empty_conversation")
    return [_message(message, f"{where}: message {number}") for number, message in enumerate(messages, 1)]


def _message(message: Any, where: str) -> Message:
    if not is_object(message):
        raise DataError(f"{where} must be an object with 'role' and 'content', this is {type(message).__name__}", "wrong_type")
    if len(message) == 2 and message.get("role") in ROLES and isinstance(message.get("content"), str):
        return dict(message)
    fields = _there(message)
    refuse_media(fields, where)
    speaker = fields.pop("from", None) if "role" not in fields else fields["role"]
    if speaker is None:
        raise DataError(f"{where} has no role, only {sorted(fields)}", "missing_field")
    role = SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker
    if role not in ROLES:
        raise DataError(f"{where}: unknown role {speaker!r}; there are {', '.join((*ROLES, *SPEAKERS))}", "unknown_role")
    content = fields.pop("value", None) if "content" not in fields else fields["content"]
    if speaker == "function_call":
        calls = _parsed(content, "value", where)
        fields["tool_calls"], content = calls if isinstance(calls, list) else [calls], None
    if content is None and not fields.get("tool_calls"):
        raise DataError(f"{where} ({role}) has no content", "missing_field")
    fields |= {"role": role, "content": content if content is None else _joined(content, f"{where} ({role})")}
    if "tool_calls" in fields:
        fields["tool_calls"] = _tool_calls(fields["tool_calls"], where)
    if "weight" in fields:
        _weigh(fields, f"{where} ({role})")
    return fields


def _weigh(fields: Message, where: str) -> None:
    """OpenAI's ``weight`` as ``train``: 0 leaves the message out, 1 is what it has without one."""
    weight = fields.pop("weight")
    if isinstance(weight, str) or weight not in (0, 1):
        raise DataError(f"{where}: weight={weight!r} is not supported; it must be the number 0 or 1", "wrong_type")
    if weight == 0 and fields.setdefault("train", False) is not False:
        raise DataError(f"{where}: weight=0 contradicts train={fields['train']!r}; keep one of them", "wrong_type")


def _joined(content: Any, where: str) -> str:
    """Content as one text; parts of text are joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise DataError(f"{where}: content must be text or a list of parts, this is {type(content).__name__}", "wrong_type")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind in PARTS_OF_MEDIA:
            raise DataError(f"{where}: content has a part of type {kind!r}; only text is trained on", "pictures_or_sound")
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, str):
            texts.append(part)
        else:
            raise DataError(f"{where}: content has a part of type {kind!r}; only parts of text can be trained on", "wrong_type")
    return "".join(texts)


def _tool_calls(calls: Any, where: str) -> list[dict]:
    """As the templates of transformers read them: ``{"type": "function", "function": {"name", "arguments": object}}``."""
    calls = _parsed(calls, "tool_calls", where)
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise DataError(f"{where}: tool_calls must be a list of objects", "wrong_type")
    found = []
    for call in calls:
        function = call.get("function") or {name: call[name] for name in ("name", "arguments") if name in call}
        if not isinstance(function, Mapping):
            raise DataError(f"{where}: function must be an object with 'name', this is {type(function).__name__}", "wrong_type")
        function = _there(function)
        if not isinstance(function.get("name"), str):
            raise DataError(f"{where}: a tool call has no name", "missing_field")
        function["arguments"] = _plain(_parsed(function.get("arguments") or {}, "the arguments of a call", where))
        if not isinstance(function["arguments"], Mapping):
            kind = type(function["arguments"]).__name__
            raise DataError(f"{where}: the arguments of a call must be a JSON object, this is {kind}", "wrong_type")
        rest = {name: value for name, value in _there(call).items() if name not in ("function", "name", "arguments")}
        found.append({"type": "function", **rest, "function": function})
    return found


def _parsed(value: Any, name: str, where: str) -> Any:
    """JSON where it came as text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {name} cannot be read as JSON: {error}", "wrong_type") from error


def _there(fields: Mapping[str, Any]) -> Message:
    """The fields that are not null: in a message or a call a null is a field that was left out."""
    return {name: value for name, value in fields.items() if value is not None}


def _plain(value: Any) -> Any:
    """As JSON has it, nulls included."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    value = value.tolist() if hasattr(value, "tolist") else value
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} must be text, this is {type(value).__name__}", "wrong_type")
    return value
