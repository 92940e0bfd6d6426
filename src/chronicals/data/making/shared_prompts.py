"""Prompts that the answers of an item share: in a pack once, as the item's last document.

An item of several answers to one prompt, p y₀, p y₁ …, becomes the documents z y₀, z y₁ … and x.
Here z is the last token of the prompt p, whose prediction differs from answer to answer, and x is
what comes before it. A document's ``shared`` says how many tokens of x stand before it: it attends
to them, and its positions go on from theirs.
"""

from __future__ import annotations

import numpy as np

from chronicals.data.making.documents import DocumentPiece

SHARED_COLUMN = "shared"
"""Column of the tokens of the item's last document that stand before this one, 0 for none.

That last document has ``IS_SHARED`` here.
"""

IS_SHARED = -1

MIN_SHARED_TOKENS = 16
"""Shorter prompts are not shared: a further document costs attention a tile of rows."""


def share_prompt(item: list[DocumentPiece]) -> list[DocumentPiece]:
    """Return an item with the tokens that all begin with as a document of its own behind them.

    These tokens are not trained in any of the documents. Returns the item unchanged if there are
    too few of them.
    """
    first, *others = (piece.ids for piece in item)
    if not others:
        return item
    common = min(_common_tokens(first, other) for other in others)
    untrained = min(
        int(np.argmax(piece.trained)) if piece.trained.any() else len(piece.ids) for piece in item
    )
    # The token before the first that differs or is trained predicts it, so each answer needs it.
    shared = min(common, untrained) - 1
    if shared < MIN_SHARED_TOKENS:
        return item
    sides = [
        piece._replace(ids=piece.ids[shared:], trained=piece.trained[shared:], shared=shared)
        for piece in item
    ]
    prompt = item[0]._replace(
        side=len(item), ids=first[:shared], trained=item[0].trained[:shared], shared=IS_SHARED
    )
    return [*sides, prompt]


def _common_tokens(left: np.ndarray, right: np.ndarray) -> int:
    """Return the number of tokens that both begin with."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(np.argmax(differs)) if differs.any() else length
