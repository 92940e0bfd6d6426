"""Preferences: a row with two answers, the chosen and the rejected one, as two rows of an ordinary kind."""

from __future__ import annotations

import itertools
from typing import Any

from chronicals.data.gate import DataError
from chronicals.data.records import Record

SIDES = ("chosen", "rejected")


def sides_of(record: Record, where: str) -> list[Record]:
    """Rows of prompt and completion, the chosen one first.

    The prompt is the row's own, or what both conversations begin with. Text goes on from text; where one of both is messages,
    the other becomes one.

    Raises:
        DataError: the row has no prompt and its sides are texts, or they are no texts and no lists.
    """
    prompt, sides = record.get("prompt"), [_plain(record[name]) for name in SIDES]
    for name, side in zip(SIDES, sides):
        if not isinstance(side, (str, list)):
            raise DataError(f"{where}: {name} must be text or a list of messages, this is {type(side).__name__}", "wrong_type")
    chats = [side for side in sides if isinstance(side, list)]
    whole = len(chats) == 2 and (prompt is None or (isinstance(prompt, str) and _asks(chats, prompt)))
    if whole:
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*chats)))
        shared = min(shared, *(len(side) - 1 for side in chats))
        prompt, sides = chats[0][:shared], [side[shared:] for side in chats]
    elif prompt is None:
        raise DataError(f"{where}: chosen and rejected need a prompt, or must both be conversations", "missing_field")
    if chats or not isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        sides = [[{"role": "assistant", "content": side}] if isinstance(side, str) else side for side in sides]
    kept = {name: value for name, value in record.items() if name not in ("prompt", *SIDES)}
    return [{**kept, "prompt": prompt, "completion": side} for side in sides]


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else list(value) if isinstance(value, tuple) else value


def _asks(chats: list[list[Any]], prompt: str) -> bool:
    """Whether the prompt stands in the conversations already, as their first question."""
    return any(
        isinstance(message, dict) and prompt in (message.get("content"), message.get("value")) for message in chats[0][:2]
    )
