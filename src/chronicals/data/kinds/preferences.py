"""Preferences: a row with a chosen and a rejected answer, as two rows of prompt and completion."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from chronicals.data.kinds.messages import MESSAGE_ROLES, as_list, role_of
from chronicals.data.kinds.prompt_fields import (
    PROMPT_FIELDS,
    prompt_in,
    prompt_names,
    question_in,
)
from chronicals.data.kinds.ranked_answers import best_and_worst
from chronicals.data.kinds.repeated_prompts import (
    OtherPromptError,
    holds,
    shared_messages,
    without_repetition,
)
from chronicals.data.reading.gate import DataError
from chronicals.data.reading.records import Record
from chronicals.data.reading.row_fields import IDENTIFYING_FIELDS

PREFERENCE = "preference"
"""The kind of these rows."""

SIDES = ("chosen", "rejected")
"""Fields of the two answers."""

_LAST_WHITE_SPACE = re.compile(r"\s\S*\Z")

NotePromptField = Callable[[str], None]
"""Called with the name of the field that is taken for the prompt, if that is not ``prompt``."""


def sides_of(
    record: Record, where: str, note_prompt_field: NotePromptField | None = None
) -> list[Record]:
    """Return rows of prompt and completion, the chosen one first.

    Of a ranked list they are the best answer and the worst.

    Raises:
        DataError: as ``completion_rows`` and ``best_and_worst``.
    """
    if record.get("chosen") is None or record.get("rejected") is None:
        record = best_and_worst(record, where)
    answers = {name: record[name] for name in SIDES}
    others = {name: value for name, value in record.items() if name not in SIDES}
    return completion_rows(others, answers, where, note_prompt_field)


def completion_rows(
    record: Record,
    answers: Mapping[str, Any],
    where: str,
    note_prompt_field: NotePromptField | None = None,
) -> list[Record]:
    """Return a row of prompt and completion for each of ``answers``.

    The prompt is what all conversations begin with, or a field of the record. If the conversations
    begin with messages that hold that field, these messages are the prompt; what they repeat of its
    end stands once. Texts without a prompt field share what both begin with, up to the last white
    space in it, so that no word is divided.

    Text goes on from text. If the prompt or an answer is messages, the others become messages. A
    message by itself is a list of one. Fields that identify other kinds are left out.

    Args:
        record: the row without its answers.
        answers: by the names that errors call them.

    Raises:
        DataError: an answer is neither text nor messages, is empty, or does not end with the
            assistant; there is no prompt, none that the answers share, several fields that may be
            it, or another one in an answer.
    """
    listed = {name: as_list(answer) for name, answer in answers.items()}
    for name, answer in listed.items():
        if not isinstance(answer, (str, list)):
            kind = type(answer).__name__
            raise DataError(
                f"{where}: {name} must be text or a list of messages, this is {kind}", "wrong_type"
            )
        if not answer or (isinstance(answer, str) and not answer.strip()):
            raise DataError(f"{where}: {name} is empty", "empty_answer")
    prompt, completions = in_one_form(*_divided(record, listed, where, note_prompt_field))
    for name, completion in zip(listed, completions):
        role = role_of(completion[-1]) if isinstance(completion, list) else "assistant"
        if role in MESSAGE_ROLES and role != "assistant":
            raise DataError(
                f"{where}: {name} does not end with the assistant, whose answer counts, but with "
                f"a message of role {role!r}; "
                "leave that message out",
                "no_assistant_turn",
            )
    used = IDENTIFYING_FIELDS | PROMPT_FIELDS
    others = {name: value for name, value in record.items() if name not in used}
    return [{**others, "prompt": prompt, "completion": completion} for completion in completions]


def _divided(
    record: Record, named: Mapping[str, Any], where: str, note_prompt_field: NotePromptField | None
) -> tuple[Any, list[Any]]:
    """Return the prompt, and the answers without it."""
    answers = [*named.values()]
    label = " and ".join(named)
    names = prompt_names(record, named)
    chats = [answer for answer in answers if isinstance(answer, list)]
    all_chats = len(chats) == len(answers)
    shared = chats[0][: shared_messages(chats)] if all_chats else []
    if shared and (
        not names or any(holds(shared, question_in(name, record, where)) for name in names)
    ):
        return shared, [chat[len(shared) :] for chat in chats]
    if len(names) > 1:
        raise DataError(
            f"{where}: {' and '.join(names)} may both be the prompt; name it: columns={{'prompt': "
            f"{names[-1]!r}}}",
            "missing_field",
        )
    if names:
        (name,) = names
        if name != "prompt" and note_prompt_field is not None:
            note_prompt_field(name)
        return _after_prompt(name, record, answers, shared, label, where)
    if all_chats:
        several = "begin with different messages, so that there is no prompt"
        reason = several if len(chats) > 1 else "has no prompt before it"
        raise DataError(f"{where}: {label} {reason}", "no_common_prompt")
    if chats:
        reason = "need a prompt, or must both be conversations or both texts"
        raise DataError(f"{where}: {label} {reason}", "missing_field")
    if len(answers) == 1:
        raise DataError(f"{where}: {label} needs a prompt", "missing_field")
    return _after_shared_text(answers, label, where)


def _after_prompt(
    name: str, record: Record, answers: list[Any], shared: list[Any], label: str, where: str
) -> tuple[Any, list[Any]]:
    """Return the prompt in the field ``name``, and the answers without what they repeat of it."""
    prompt, answers = in_one_form(prompt_in(name, record, where), answers)
    if not isinstance(prompt, list):
        return prompt, answers
    try:
        return without_repetition(prompt, answers, shared)
    except OtherPromptError:
        raise DataError(
            f"{where}: {label}: the question before the answer is not that of {name}; leave "
            f"{name} out where the conversation "
            "holds it all, or let the answer begin behind it",
            "other_prompt",
        ) from None


def _after_shared_text(texts: list[str], label: str, where: str) -> tuple[str, list[Any]]:
    """Return the words that all texts begin with, and the texts without them."""
    common = 0
    for letters in zip(*texts):
        if len({*letters}) > 1:
            break
        common += 1
    last_space = _LAST_WHITE_SPACE.search(texts[0][:common])
    prompt = texts[0][: last_space.start()] if last_space else ""
    if not prompt.strip():
        raise DataError(
            f"{where}: {label} have no prompt, and begin with no words that both have",
            "no_common_prompt",
        )
    return prompt, [text[len(prompt) :] for text in texts]


def in_one_form(prompt: Any, answers: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return prompt and answers as texts if all are texts, else all as messages."""
    if isinstance(prompt, str) and all(isinstance(answer, str) for answer in answers):
        return prompt, [*answers]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    messages = [
        [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        for answer in answers
    ]
    return prompt, messages
