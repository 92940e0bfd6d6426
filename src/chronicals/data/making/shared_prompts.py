"""Prompts that the answers of an item share: in a pack once, as the item's last document.

An item of several answers to one prompt, x y₀, x y₁ …, becomes the documents  x₋ y₀,  x₋ y₁ …  and
x,  where x₋ is the last token of the prompt, whose prediction differs from answer to answer, and x
what comes before it. A document's ``shared`` says how many tokens of x stand before it: it attends
to them, and its positions go on from theirs.
"""

from __future__ import annotations

import numpy as np

from chronicals.data.making.documents import Piece

SHARED = "shared"
"""Column: tokens of the item's last document that stand before this one, 0 for none;
``IS_SHARED`` for that document.
"""

IS_SHARED = -1

SHORTEST = 16
"""Tokens of a prompt from which on it is shared: a further document costs attention a tile of
rows.
"""


def share_prompt(item: list[Piece]) -> list[Piece]:
    """The documents of an item with what all begin with, and none trains, as a document of its
    own behind them.
    """
    first, *others = (piece.ids for piece in item)
    if not others:
        return item
    common = min(_common(first, other) for other in others)
    untrained = min(
        int(np.argmax(piece.trained)) if piece.trained.any() else len(piece.ids) for piece in item
    )
    shared = (
        min(common, untrained) - 1
    )  # the token before the first that differs or is trained predicts it
    if shared < SHORTEST:
        return item
    sides = [
        piece._replace(ids=piece.ids[shared:], trained=piece.trained[shared:], shared=shared)
        for piece in item
    ]
    return [
        *sides,
        item[0]._replace(
            side=len(item), ids=first[:shared], trained=item[0].trained[:shared], shared=IS_SHARED
        ),
    ]


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Tokens that both begin with."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(np.argmax(differs)) if differs.any() else length
