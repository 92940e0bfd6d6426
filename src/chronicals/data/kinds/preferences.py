"""Preferences: a row with two answers, the chosen and the rejected one, as two rows of an
ordinary kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from chronicals.data.kinds.prompt_fields import (
    OF_PROMPTS,
    as_list,
    asked_in,
    prompt_called,
    prompt_names,
    role_of,
)
from chronicals.data.kinds.ranked_answers import best_and_worst
from chronicals.data.kinds.repeated_prompts import (
    OtherPromptError,
    holds,
    shared_messages,
    taken_once,
)
from chronicals.data.kinds.rows import ROLES, TELLING
from chronicals.data.reading.gate import DataError
from chronicals.data.reading.records import Record

PREFERENCE = "preference"
"""The kind of these rows."""

SIDES = ("chosen", "rejected")

LAST_WHITE_SPACE = re.compile(r"\s\S*\Z")


Tell = Callable[[str], None]
"""Is told the name of the field that was taken for the prompt, where it is not called so."""


def sides_of(record: Record, where: str, tell: Tell | None = None) -> list[Record]:
    """Rows of prompt and completion, the chosen one first; of a ranked list, the best answer and
    the worst.

    Raises:
        DataError: as ``rows_of`` and ``best_and_worst``.
    """
    if record.get("chosen") is None or record.get("rejected") is None:
        record = best_and_worst(record, where)
    answers = {name: record[name] for name in SIDES}
    return rows_of(
        {name: value for name, value in record.items() if name not in SIDES}, answers, where, tell
    )


def rows_of(
    record: Record, answers: Mapping[str, Any], where: str, tell: Tell | None = None
) -> list[Record]:
    """A row of prompt and completion for each of ``answers``, which are named for messages.

    The prompt is what all conversations begin with, or the record's own: ``prompt``, or one of
    ``PROMPTS``. Where conversations begin with messages that hold it, these are the prompt; what
    they repeat of its end stands once. Of texts without a prompt it is what both begin with, up to
    the last white space in it, so that no word is divided; the answers begin with that white space.
    Text goes on from text; where a prompt or an answer is messages, the others become messages. A
    message by itself is a list of one. Fields that tell another kind are left out.

    Raises:
        DataError: an answer is neither text nor messages, is empty, or does not end with the
            assistant; there is no prompt, none that the answers share, several fields that may be
            it, or another one in an answer.
    """
    given = {name: as_list(answer) for name, answer in answers.items()}
    for name, answer in given.items():
        if not isinstance(answer, (str, list)):
            kind = type(answer).__name__
            raise DataError(
                f"{where}: {name} must be text or a list of messages, this is {kind}", "wrong_type"
            )
        if not answer or (isinstance(answer, str) and not answer.strip()):
            raise DataError(f"{where}: {name} is empty", "empty_answer")
    named = " and ".join(given)
    found = [*given.values()]
    prompt, found = alike(
        *_divided(record, prompt_names(record, answers), found, named, where, tell)
    )
    for name, answer in zip(given, found):
        if (
            isinstance(answer, list)
            and (role := role_of(answer[-1])) in ROLES
            and role != "assistant"
        ):
            raise DataError(
                f"{where}: {name} does not end with the assistant, whose answer counts, but with "
                f"a message of role {role!r}; "
                "leave that message out",
                "no_assistant_turn",
            )
    kept = {name: value for name, value in record.items() if name not in TELLING | OF_PROMPTS}
    return [{**kept, "prompt": prompt, "completion": answer} for answer in found]


def _divided(
    record: Record, names: list[str], found: list[Any], named: str, where: str, tell: Tell | None
) -> tuple[Any, list[Any]]:
    """The prompt, and the answers without it."""
    chats = [answer for answer in found if isinstance(answer, list)]
    shared = chats[0][: shared_messages(chats)] if len(chats) == len(found) else []
    if shared and (
        not names or any(holds(shared, asked_in(name, record, where)) for name in names)
    ):
        return shared, [chat[len(shared) :] for chat in chats]
    if len(names) > 1:
        raise DataError(
            f"{where}: {' and '.join(names)} may both be the prompt; name it: columns={{'prompt': "
            f"{names[-1]!r}}}",
            "missing_field",
        )
    if names:
        if names[0] != "prompt" and tell is not None:
            tell(names[0])
        return _after_prompt(names[0], record, found, shared, named, where)
    if len(chats) == len(found):
        differ = (
            "begin with different messages, so that there is no prompt"
            if len(chats) > 1
            else "has no prompt before it"
        )
        raise DataError(f"{where}: {named} {differ}", "no_common_prompt")
    if chats or len(found) == 1:
        both = (
            "need a prompt, or must both be conversations or both texts"
            if chats
            else "needs a prompt"
        )
        raise DataError(f"{where}: {named} {both}", "missing_field")
    return _after_shared_text(found, named, where)


def _after_prompt(
    name: str, record: Record, found: list[Any], shared: list[Any], named: str, where: str
) -> tuple[Any, list[Any]]:
    """The prompt in the field ``name``, and the answers without what they repeat of it."""
    prompt, answers = alike(prompt_called(name, record, where), found)
    if not isinstance(prompt, list):
        return prompt, answers
    try:
        return taken_once(prompt, answers, shared)
    except OtherPromptError:
        raise DataError(
            f"{where}: {named}: the question before the answer is not that of {name}; leave "
            f"{name} out where the conversation "
            "holds it all, or let the answer begin behind it",
            "other_prompt",
        ) from None


def alike(prompt: Any, answers: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Prompt and answers as they are where all are texts, else all as messages."""
    if isinstance(prompt, str) and all(isinstance(answer, str) for answer in answers):
        return prompt, [*answers]
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return prompt, [
        [{"role": "assistant", "content": each}] if isinstance(each, str) else each
        for each in answers
    ]


def _after_shared_text(texts: list[str], named: str, where: str) -> tuple[str, list[Any]]:
    differs = (at for at, letters in enumerate(zip(*texts)) if len({*letters}) > 1)
    common = texts[0][: next(differs, min(map(len, texts)))]
    last = LAST_WHITE_SPACE.search(common)
    prompt = common[: last.start()] if last else ""
    if not prompt.strip():
        raise DataError(
            f"{where}: {named} have no prompt, and begin with no words that both have",
            "no_common_prompt",
        )
    return prompt, [text[len(prompt) :] for text in texts]
