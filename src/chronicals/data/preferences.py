"""Preferences: a row with two answers, the chosen and the rejected one, as two rows of an ordinary kind."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from chronicals.data.gate import DataError
from chronicals.data.ranked_answers import best_and_worst
from chronicals.data.records import Record
from chronicals.data.rows import TELLING

SIDES = ("chosen", "rejected")

LAST_WHITE_SPACE = re.compile(r"\s\S*\Z")


def sides_of(record: Record, where: str) -> list[Record]:
    """Rows of prompt and completion, the chosen one first; of a ranked list, the best answer and the worst.

    Raises:
        DataError: as ``rows_of`` and ``best_and_worst``.
    """
    if record.get("chosen") is None or record.get("rejected") is None:
        record = best_and_worst(record, where)
    answers = {name: record[name] for name in SIDES}
    return rows_of({name: value for name, value in record.items() if name not in SIDES}, answers, where)


def rows_of(record: Record, answers: Mapping[str, Any], where: str) -> list[Record]:
    """A row of prompt and completion for each of ``answers``, which are named for messages.

    The prompt is the record's own, or what all conversations begin with. Of texts without a prompt it is what both begin with,
    up to the last white space in it, so that no word is divided; the answers begin with that white space. Text goes on from
    text; where a prompt or an answer is messages, the others become messages. Fields that tell another kind are left out.

    Raises:
        DataError: an answer is neither text nor a list, or is empty; there is no prompt, and none that the answers share.
    """
    prompt, given = record.get("prompt"), {name: _plain(answer) for name, answer in answers.items()}
    for name, answer in given.items():
        if not isinstance(answer, (str, list)):
            kind = type(answer).__name__
            raise DataError(f"{where}: {name} must be text or a list of messages, this is {kind}", "wrong_type")
        if not answer or (isinstance(answer, str) and not answer.strip()):
            raise DataError(f"{where}: {name} is empty", "empty_answer")
    named, found = " and ".join(given), [*given.values()]
    chats = [answer for answer in found if isinstance(answer, list)]
    if len(chats) == len(found) and (prompt is None or (isinstance(prompt, str) and _asks(chats, prompt))):
        prompt, found = _after_shared_messages(chats, named, where)
    elif prompt is None and chats:
        raise DataError(f"{where}: {named} need a prompt, or must both be conversations or both texts", "missing_field")
    elif prompt is None:
        prompt, found = _after_shared_text(found, named, where)
    prompt, found = alike(prompt, found)
    kept = {name: value for name, value in record.items() if name not in TELLING}
    return [{**kept, "prompt": prompt, "completion": answer} for answer in found]


def alike(prompt: Any, answers: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Prompt and answers as they are where all are texts, else all as messages."""
    if isinstance(prompt, str) and all(isinstance(answer, str) for answer in answers):
        return prompt, [*answers]
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return prompt, [[{"role": "assistant", "content": each}] if isinstance(each, str) else each for each in answers]


def _after_shared_messages(chats: list[list[Any]], named: str, where: str) -> tuple[list[Any], list[Any]]:
    shared = sum(1 for _ in itertools.takewhile(lambda each: all(other == each[0] for other in each), zip(*chats)))
    shared = min(shared, *(len(chat) - 1 for chat in chats))
    if not shared:
        raise DataError(f"{where}: {named} begin with different messages, so that there is no prompt", "no_common_prompt")
    return chats[0][:shared], [chat[shared:] for chat in chats]


def _after_shared_text(texts: list[str], named: str, where: str) -> tuple[str, list[Any]]:
    differs = (at for at, letters in enumerate(zip(*texts)) if len({*letters}) > 1)
    common = texts[0][: next(differs, min(map(len, texts)))]
    last = LAST_WHITE_SPACE.search(common)
    prompt = common[: last.start()] if last else ""
    if not prompt.strip():
        raise DataError(f"{where}: {named} have no prompt, and begin with no words that both have", "no_common_prompt")
    return prompt, [text[len(prompt) :] for text in texts]


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else list(value) if isinstance(value, tuple) else value


def _asks(chats: list[list[Any]], prompt: str) -> bool:
    """Whether the prompt stands in the conversations already, as their first question."""
    return any(
        isinstance(message, dict) and prompt in (message.get("content"), message.get("value")) for message in chats[0][:2]
    )
