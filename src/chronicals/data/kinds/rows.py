"""What a row is: its kind, told by its fields, and the one form in which each kind goes on to the
chat template.

Conversations arrive in several dialects: OpenAI's messages, ShareGPT's ``from`` and ``value``,
content in parts, tool calls with their arguments as JSON text, and null where a message lacks a
field.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from numbers import Number
from types import NoneType
from typing import Any, NamedTuple

from chronicals.data.reading.gate import DataError
from chronicals.data.reading.plain_values import is_missing, is_null, items_of, plain
from chronicals.data.reading.records import Record

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

ROW_KINDS = (*dict.fromkeys(kind for kind, _ in KINDS),)
"""Names of the kinds; a token store numbers them so."""

WANTED = [
    *KINDS,
    ("preference", frozenset({"responses", "scores"})),
    *(
        ("unpaired preference", frozenset({answer, "label"}))
        for answer in ("completion", "response", "output", "answer")
    ),
    *(
        ("unpaired preference", frozenset({answer, "label"}))
        for answer in ("messages", "conversations")
    ),
]
"""The same where an objective asks for a kind: a ``label`` beside a chat says nothing to the
others.
"""

FIELDS_OF_KINDS = frozenset().union(*(fields for _, fields in WANTED))
"""Every field that may tell a kind."""

TELLING = frozenset().union(*(fields for _, fields in KINDS)) - frozenset().union(*PAIRS[1:]) | {
    "output",
    "response",
}
"""Every field that tells a kind before other names of prompt and completion are looked for."""

OF_TOKENS = ("input_ids", "labels", "attention_mask")
"""Fields of a row of tokens."""

READ = TELLING | frozenset().union(*PAIRS) | {"history", "system", "tools", *OF_TOKENS}
"""Every field that is read."""

TRAINED = ("chat", "completion", "instruction", "text", "tokens")
"""The kinds of which each row is one document."""

CHATS = ("chat", "instruction")
"""The kinds that go through the chat template."""

NOT_TRAINED = {
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

EXPECTED = {
    "preference": "chosen and rejected, or responses and scores",
    "unpaired preference": "an answer (completion, response, output, answer or messages) and its "
    "label",
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

WORDS = ("content", "value")
SPEAKER = ("role", "from")
SPOKEN = (*WORDS, "tool_calls")
"""Fields of a message: who speaks, and what is said."""

SPEAKERS = {
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


def plain_row(record: Record, where: str) -> Record:
    """Return the row with what is read of it as JSON has it, and None for every field that is
    missing.

    A field of another kind of row that holds an empty list is missing, too: tables of several kinds
        are filled up so. Where
    no other fields tell a kind it stays, so that the empty conversation or answer can be named.

    Raises:
        DataError: a field is nested too deeply.
    """
    if not is_object(record):
        return record
    try:
        fields = {
            name: value if type(value) is str else _plain_field(name, value)
            for name, value in record.items()
        }
    except RecursionError:
        raise DataError(
            f"{where}: holds objects nested too deeply to be read", "wrong_type"
        ) from None
    empty = [
        name for name, value in fields.items() if name in FIELDS_OF_KINDS and _is_blank(name, value)
    ]
    if empty and _kind_with(fields_of(fields).difference(empty)) not in (None, "prompt"):
        fields |= dict.fromkeys(empty)
    return fields


def _plain_field(name: str, value: Any) -> Any:
    """Return the value of a field as JSON has it; numbers and pictures stay what they are, and
    so does what nobody reads.
    """
    if name not in READ and name not in MEDIA:
        return value
    if is_null(value) or (name not in FIELDS_OF_KINDS and is_missing(value)):
        return None
    return value if name in (*OF_TOKENS, "scores", *MEDIA) else plain(value)


def _is_blank(name: str, value: Any) -> bool:
    """Return True for an empty list; of a label also for empty text, which is how a table of
    text leaves it out.
    """
    if name == "label" and isinstance(value, str):
        return not value.strip()
    return value is not None and is_missing(value)


def fields_of(record: Mapping[str, Any]) -> frozenset[str]:
    """Names of those that hold something."""
    return frozenset([name for name, value in record.items() if not is_null(value)])


def kind_of(record: Any, where: str, wanted: Collection[str] = ()) -> str:
    """The name in ``KINDS`` of a row; a field that is None is not there.

    Args:
        wanted: kinds that are looked for first: a row may have the fields of several.

    Raises:
        DataError: it is no object, or of no kind; ``where`` says which row.
    """
    if not is_object(record):
        raise DataError(
            f"{where}: a row must be an object with named fields, this is {type(record).__name__}",
            "wrong_type",
        )
    kind = known_kind(record, wanted)
    if kind is None:
        usual = "messages, prompt and completion, instruction and output, text, or input_ids"
        expected = (
            "; or ".join(EXPECTED[wish] for wish in sorted(wanted) if wish in EXPECTED) or usual
        )
        raise DataError(
            f"{where}: unknown kind of row with fields {sorted(map(str, record))}; expected "
            f"{expected}",
            "missing_field",
        )
    return kind


def known_kind(record: Any, wanted: Collection[str] = ()) -> str | None:
    """As ``kind_of``, but None where a row is of no kind."""
    if not is_object(record):
        return None
    there = fields_of(record)
    kind = kind_among(there, wanted) or _kind_with(there)
    return (
        "chat"
        if kind == "completion" and not isinstance(record.get("prompt"), (str, NoneType))
        else kind
    )


def kind_among(there: Collection[str], wanted: Collection[str]) -> str | None:
    """The first of the ``wanted`` kinds that fields tell; None where they tell none of them."""
    return _kind_with(frozenset(there), frozenset(wanted)) if wanted else None


@functools.lru_cache
def _kind_with(there: frozenset[str], of: frozenset[str] | None = None) -> str | None:
    kinds = KINDS if of is None else WANTED
    return next(
        (kind for kind, fields in kinds if fields <= there and (of is None or kind in of)), None
    )


def normalise(record: Record, kind: str, where: str) -> Record:
    """The row in the form in which its ``kind`` is encoded: ``messages`` (and ``tools``),
    ``prompt`` and ``completion`` (both texts, or both messages), ``text``, or ``input_ids`` (with
    ``labels`` and ``attention_mask``).

    Raises:
        DataError: a field is missing, of the wrong type, or the kind is not one that is trained on.
    """
    try:
        return _normalised(record, kind, where)
    except RecursionError:
        raise DataError(
            f"{where}: holds objects nested too deeply to be read", "wrong_type"
        ) from None


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
    told = next(
        (name for name in ("messages", "conversations") if record.get(name) is not None), None
    )
    if told is None:
        sides = {name: _messages(record[name], name, where) for name in ("prompt", "completion")}
        return {
            "prompt": _after_system(record, sides["prompt"], where),
            "completion": sides["completion"],
            "tools": tools,
        }
    said = conversation_in(record[told], told, where)
    return {"messages": _after_system(record, _messages(said, told, where), where), "tools": tools}


def conversation_in(value: Any, name: str, where: str) -> Any:
    """The value of a field of messages, which some write as JSON text."""
    return (
        _parsed(value, name, where)
        if isinstance(value, str) and value.lstrip().startswith("[")
        else value
    )


def with_conversations(record: Record) -> Record:
    """The row with messages in the fields ``WRITTEN`` where they are JSON text; other texts stay
    what they are.
    """
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
    return next(
        (pair for pair in PAIRS if all(record.get(name) is not None for name in pair)), None
    )


MEDIA = ("image", "images", "video", "videos", "audio", "audios")
PARTS_OF_MEDIA = {*MEDIA, "image_url", "input_image", "video_url", "audio_url", "input_audio"}
"""Types of a content's parts that are no text."""

OF_TEMPLATES = ("system", "tools", "history")


def unread_fields(record: Record, kind: str) -> list[str]:
    """Fields that say something which a row of this kind has no place for: a plain completion
    has no chat template.
    """
    return [name for name in OF_TEMPLATES if kind == "completion" and is_filled(record.get(name))]


def refuse_media(record: Record, where: str) -> None:
    """Raises DataError where a row, or a message, has a field with pictures, video or sound."""
    if is_object(record) and (
        name := next((name for name in MEDIA if holds_media(record.get(name))), None)
    ):
        raise DataError(
            f"{where}: {name!r} holds pictures, video or sound; only text is trained on",
            "pictures_or_sound",
        )


def refuse_printed_messages(record: Record, where: str) -> None:
    """Raises DataError where a text is a list of messages as Python prints it, and not JSON: it
    would be trained on as text.
    """
    texts = ((name, record.get(name)) for name in WRITTEN) if is_object(record) else ()
    if (
        name := next(
            (name for name, text in texts if isinstance(text, str) and PRINTED.match(text)), None
        )
    ) is not None:
        raise DataError(
            f"{where}: {name} holds messages as Python prints them; write JSON, "
            "json.dumps(messages) in a table, or JSON lines",
            "wrong_type",
        )


def is_filled(value: Any) -> bool:
    """Return True where an optional field says something: it is not missing, and no empty text."""
    return not is_missing(value) and not (isinstance(value, str) and value == "")


def holds_media(value: Any) -> bool:
    """Return True for pictures and sound, and not for a flag or a count that says there are
    none.
    """
    return is_filled(value) and (hasattr(value, "__len__") or bool(value))


def _after_system(record: Record, messages: list[Message], where: str) -> list[Message]:
    """The row's own ``system``, then its messages, unless they begin with one."""
    if not is_filled(record.get("system")) or messages[0]["role"] in FIRST:
        return messages
    return [{"role": "system", "content": _text(record["system"], "system", where)}, *messages]


def _tools(tools: Any, where: str) -> list[Any] | None:
    """None where none are offered, which templates tell from an empty list."""
    if not is_filled(tools):
        return None
    found = _parsed(tools, "tools", where)
    if is_missing(found):
        return None
    if not isinstance(found, list) or not all(isinstance(tool, Mapping) for tool in found):
        raise DataError(f"{where}: tools must be a list of objects", "wrong_type")
    return found


def texts_of(record: Record) -> list[str]:
    """What people wrote in a normalised row, and what assistants thought."""
    found: list[Any] = []
    for value in map(record.get, ("messages", "prompt", "completion", "text")):
        for message in value if isinstance(value, list) else ():
            if not is_object(message):
                continue  # what is wrong with it is said where it is encoded
            found += (
                [message.get("content")]
                if len(message) == 2
                else map(message.get, ("content", *THOUGHTS))
            )
        found += [] if isinstance(value, list) else [value]
    return [text for text in found if isinstance(text, str)]


def check_answers(messages: Sequence[Message], prompt: int, where: str) -> bool:
    """Whether the assistant answers in a normalised conversation, of which ``prompt`` messages are
    given.

    Raises:
        DataError: an answer is empty that is not set aside by ``train: false``.
    """
    numbered = enumerate(messages[prompt:], prompt + 1)
    answers = [(number, message) for number, message in numbered if message["role"] == "assistant"]
    for number, message in answers:
        if (
            not message.get("tool_calls")
            and not _says_something(message)
            and message.get("train") is not False
        ):
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
    """Taori et al. (2023), Alpaca: instruction, input, output; LLaMA-Factory adds system and
    history.
    """
    answer = "output" if record.get("output") is not None else "response"
    there = is_filled(record.get("system"))
    system = (
        [{"role": "system", "content": _text(record["system"], "system", where)}] if there else []
    )
    said = {"role": "assistant", "content": _text(record[answer], answer, where)}
    return [*system, *asked_of(record, where), said]


def asked_of(record: Record, where: str) -> list[Message]:
    """The messages before the answer to an ``instruction``: its ``history``, and the question with
    its ``input``.

    Raises:
        DataError: a field is of the wrong type.
    """
    asked = [
        _text(record[name], name, where)
        for name in ("instruction", "input")
        if is_filled(record.get(name))
    ]
    return [
        *_turns_before(record.get("history"), where),
        {"role": "user", "content": "\n\n".join(asked)},
    ]


def _turns_before(history: Any, where: str) -> list[Message]:
    """Return the messages of a ``history``, a list of pairs of text, which some write as JSON
    text.
    """
    found = _parsed(history, "history", where) if is_filled(history) else None
    if is_missing(found):
        return []
    turns = list[Message]()
    for turn in items_of(found) or [found]:
        pair = items_of(turn)
        if pair is None or len(pair) != 2:
            raise DataError(f"{where}: history must be a list of [question, answer]", "wrong_type")
        question, answer = (_text(text, "history", where) for text in pair)
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return turns


def _messages(messages: Any, name: str, where: str) -> list[Message]:
    found = items_of(messages)
    if found is None:
        raise DataError(
            f"{where}: {name} must be a list of messages, this is {type(messages).__name__}",
            "wrong_type",
        )
    if not found:
        raise DataError(
            f"{where}: {name} must be a list with at least one message", "empty_conversation"
        )
    return [
        _message(message, f"{where}: message {number}") for number, message in enumerate(found, 1)
    ]


def _message(message: Any, where: str) -> Message:
    if not is_object(message):
        raise DataError(
            f"{where} must be an object with 'role' and 'content', this is "
            f"{type(message).__name__}",
            "wrong_type",
        )
    if (
        len(message) == 2
        and message.get("role") in ROLES
        and isinstance(message.get("content"), str)
    ):
        return dict(message)
    fields = _there(message)
    if isinstance(fields.get("tool_calls"), str):
        fields = _there(
            {**fields, "tool_calls": _parsed(fields["tool_calls"], "tool_calls", where)}
        )
    refuse_media(fields, where)
    speaker = fields.pop("from", None) if "role" not in fields else fields["role"]
    if speaker is None:
        raise DataError(f"{where} has no role, only {sorted(fields)}", "missing_field")
    role = SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker
    if role not in ROLES:
        raise DataError(
            f"{where}: unknown role {speaker!r}; there are {', '.join((*ROLES, *SPEAKERS))}",
            "unknown_role",
        )
    content = fields.pop("value", None) if "content" not in fields else fields["content"]
    if speaker == "function_call":
        calls = _parsed(content, "value", where)
        fields["tool_calls"] = calls if isinstance(calls, list) else [calls]
        content = None
    if fields.get("tool_calls") and is_missing(content):
        content = None
    if content is None and not fields.get("tool_calls"):
        raise DataError(f"{where} ({role}) has no content", "missing_field")
    fields |= {
        "role": role,
        "content": content if content is None else _joined(content, f"{where} ({role})"),
    }
    if "tool_calls" in fields:
        fields["tool_calls"] = _tool_calls(fields["tool_calls"], where)
    if "weight" in fields:
        _weigh(fields, f"{where} ({role})")
    return fields


def _weigh(fields: Message, where: str) -> None:
    """OpenAI's ``weight`` as ``train``: 0 leaves the message out, 1 is what it has without one."""
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


def _joined(content: Any, where: str) -> str:
    """Content as one text; parts of text are joined."""
    if isinstance(content, str):
        return content
    parts = items_of(content)
    if parts is None:
        raise DataError(
            f"{where}: content must be text or a list of parts, this is {type(content).__name__}",
            "wrong_type",
        )
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind in PARTS_OF_MEDIA:
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


def _tool_calls(calls: Any, where: str) -> list[dict]:
    """As the templates of transformers read them: ``{"type": "function", "function": {"name",
    "arguments": object}}``.
    """
    calls = items_of(calls)
    if calls is None or not all(isinstance(call, Mapping) for call in calls):
        raise DataError(f"{where}: tool_calls must be a list of objects", "wrong_type")
    found = []
    for call in map(_there, calls):
        function = call.get("function") or {
            name: call[name] for name in ("name", "arguments") if name in call
        }
        if not isinstance(function, Mapping):
            raise DataError(
                f"{where}: function must be an object with 'name', this is "
                f"{type(function).__name__}",
                "wrong_type",
            )
        function = _there(function)
        if not isinstance(function.get("name"), str):
            raise DataError(f"{where}: a tool call has no name", "missing_field")
        given = _parsed(function.get("arguments") or {}, "the arguments of a call", where)
        function["arguments"] = {} if given is None else given
        if not isinstance(function["arguments"], Mapping):
            kind = type(function["arguments"]).__name__
            raise DataError(
                f"{where}: the arguments of a call must be a JSON object, this is {kind}",
                "wrong_type",
            )
        rest = {
            name: value
            for name, value in call.items()
            if name not in ("function", "name", "arguments")
        }
        found.append({"type": "function", **rest, "function": function})
    return found


def _parsed(value: Any, name: str, where: str) -> Any:
    """JSON where it came as text."""
    if not isinstance(value, str):
        return value
    try:
        return plain(json.loads(value))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {name} cannot be read as JSON: {error}", "wrong_type") from error


def _there(fields: Mapping[str, Any]) -> Message:
    """The fields that are not missing: a message or a call that has nothing in a field was written
    without it.

    Content without parts is there: it says nothing, which may have to be told.
    """
    return {
        name: value
        for name, value in fields.items()
        if not is_missing(value) or (name in WORDS and not is_null(value))
    }


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(
            f"{where}: {name} must be text, this is {type(value).__name__}", "wrong_type"
        )
    return value
