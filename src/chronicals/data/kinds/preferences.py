"""Compared and judged answers, as rows of prompt and completion.

- A *pair* is a row with a chosen and a rejected answer; it becomes two rows.
- A *ranked list* is a row with several answers to a prompt and a score for each; it becomes a pair
  of the best and the worst.
- A *judged answer* is a row with one answer and a label that calls it good or bad. KTO (Ethayarajh
  et al., 2024) trains on such rows.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from chronicals.data.kinds.messages import (
    MESSAGE_ROLES,
    comparable,
    conversation_in,
    listed_messages,
    parsed_json,
    role_of,
)
from chronicals.data.kinds.prompt_fields import (
    PROMPT_FIELDS,
    OtherPromptError,
    holds_question,
    prompt_in,
    prompt_names,
    shared_messages,
    without_repetition,
)
from chronicals.data.reading.gate import DataError
from chronicals.data.reading.plain_values import list_items
from chronicals.data.reading.records import CONVERSATION_FIELDS, IDENTIFYING_FIELDS, RowRecord

PREFERENCE = "preference"
"""The kind of these rows."""

PAIR_FIELDS = ("chosen", "rejected")
"""Fields of the two answers."""

RANKED_ANSWERS = "responses"
RANKED_SCORES = "scores"
"""Fields of the answers and of their scores."""

JUDGED = "unpaired preference"
"""The kind of these rows."""

ANSWER_FIELDS = ("completion", "response", "output", "answer", *CONVERSATION_FIELDS)
"""Names of the answer; in a conversation it is the last message if no other field holds it."""

LABEL_TEXTS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""Labels as a table of text has them, in lower case."""

ROWS_LOOKED_BACK = 32
"""Rows before a chunk that are searched for one with another prompt."""

_LAST_WHITE_SPACE = re.compile(r"\s\S*\Z")

NotePromptField = Callable[[str], None]
"""Called with the name of the field that is taken for the prompt, if that is not ``prompt``."""


def sides_of(
    record: RowRecord, where: str, note_prompt_field: NotePromptField | None = None
) -> list[RowRecord]:
    """Return rows of prompt and completion, the chosen one first.

    Of a ranked list they are the first answers of the extreme scores.

    Raises:
        DataError: as ``completion_rows``; there is not one finite score for each of at least two
            answers, or all scores are equal.
    """
    if record.get("chosen") is None or record.get("rejected") is None:
        ranked = (RANKED_ANSWERS, RANKED_SCORES)
        columns = []
        for name in ranked:
            value = record[name]
            items = list_items(parsed_json(value) if isinstance(value, str) else value)
            if items is None:
                raise DataError(
                    f"{where}: {name} must be a list, this is {type(value).__name__}", "wrong_type"
                )
            columns.append(items)
        responses, scores = columns
        if len(responses) != len(scores):
            raise DataError(
                f"{where}: {len(responses)} {RANKED_ANSWERS} and {len(scores)} {RANKED_SCORES}",
                "unusable_scores",
            )
        if len(responses) < 2:
            raise DataError(
                f"{where}: {RANKED_ANSWERS} has {len(responses)}, of which no pair can be made",
                "unusable_scores",
            )
        for number, score in enumerate(scores, 1):
            if not isinstance(score, Real) or not math.isfinite(score):
                raise DataError(
                    f"{where}: score {number} is {score!r}, not a finite number", "unusable_scores"
                )
        if max(scores) == min(scores):
            raise DataError(
                f"{where}: all {len(scores)} {RANKED_SCORES} are {scores[0]}", "tied_scores"
            )
        best = responses[scores.index(max(scores))]
        worst = responses[scores.index(min(scores))]
        others = {name: value for name, value in record.items() if name not in ranked}
        record = {**others, "chosen": best, "rejected": worst}
    answers = {name: record[name] for name in PAIR_FIELDS}
    others = {name: value for name, value in record.items() if name not in PAIR_FIELDS}
    return completion_rows(others, answers, where, note_prompt_field)


def completion_rows(
    record: RowRecord,
    answers: Mapping[str, Any],
    where: str,
    note_prompt_field: NotePromptField | None = None,
) -> list[RowRecord]:
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
        where: what errors call the row.
        note_prompt_field: told the name of a prompt field other than ``prompt``.

    Raises:
        DataError: an answer is neither text nor messages, is empty, or does not end with the
            assistant; there is no prompt, none that the answers share, several fields that may be
            it, or another one in an answer.
    """
    listed = {name: listed_messages(answer) for name, answer in answers.items()}
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
    record: RowRecord,
    named: Mapping[str, Any],
    where: str,
    note_prompt_field: NotePromptField | None,
) -> tuple[Any, list[Any]]:
    """Return the prompt, and the answers without it."""
    answers = [*named.values()]
    label = " and ".join(named)
    names = prompt_names(record, named)
    chats = [answer for answer in answers if isinstance(answer, list)]
    all_chats = len(chats) == len(answers)
    shared = chats[0][: shared_messages(chats)] if all_chats else []
    if shared and (not names or any(holds_question(shared, name, record, where) for name in names)):
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


def label_of(record: RowRecord, where: str) -> int:
    """Return 1 if the answer is good and 0 if it is bad.

    Raises:
        DataError: there is no label, or it is neither true nor false.
    """
    label = record.get("label")
    value = LABEL_TEXTS.get(label.strip().lower()) if isinstance(label, str) else label
    if not isinstance(value, (bool, np.bool_, numbers.Real)) or value not in (0, 1):
        remedy = (
            "; where columns are named, name it too: columns={'label': 'label'}"
            if label is None
            else ""
        )
        raise DataError(
            f"{where}: label={label!r}: must be true for a good answer or false for a bad "
            f"one{remedy}",
            "unusable_label",
        )
    return int(value == 1)


def judged_completion(
    record: RowRecord, where: str, note_prompt_field: NotePromptField | None = None
) -> RowRecord:
    """Return the row as one of prompt and completion.

    Raises:
        DataError: as ``completion_rows``; or a conversation does not end with the assistant.
    """
    name = next(name for name in ANSWER_FIELDS if record.get(name) is not None)
    answer = record[name]
    if name in CONVERSATION_FIELDS:
        answer = conversation_in(answer, name, where)
        messages = listed_messages(answer)
        if isinstance(messages, list) and messages and role_of(messages[-1]) != "assistant":
            raise DataError(
                f"{where}: {name} does not end with the assistant, whose answer is judged",
                "no_assistant_turn",
            )
    others = {field: value for field, value in record.items() if field not in ("label", name)}
    (row,) = completion_rows(others, {name: answer}, where, note_prompt_field)
    return row


def nearest_other_prompts(
    rows: Sequence[RowRecord], earlier: Sequence[RowRecord] = ()
) -> list[RowRecord | None]:
    """Return for each row the nearest before it with another prompt, else the nearest behind it.

    Args:
        rows: as ``judged_completion`` gives them.
        earlier: rows before the first.

    Returns:
        None for a row if all have its prompt.
    """
    all_rows = [*earlier, *rows]
    prompts = [
        repr(comparable(row["prompt"])) if isinstance(row["prompt"], list) else row["prompt"]
        for row in all_rows
    ]
    first_other = next((at for at, prompt in enumerate(prompts) if prompt != prompts[0]), None)
    before: list[int | None] = []
    for at, prompt in enumerate(prompts):
        if at == 0:
            before.append(None)
        elif prompts[at - 1] != prompt:
            before.append(at - 1)
        else:
            before.append(before[at - 1])
    nearest = [first_other if at is None else at for at in before[len(earlier) :]]
    return [None if at is None else all_rows[at] for at in nearest]
