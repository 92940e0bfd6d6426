"""Added tokens of a tokenizer: their places in a text and among its ids."""

from __future__ import annotations

import json
import unicodedata
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class AddedTokens:
    """The added tokens of a tokenizer, which it cuts out of a text before anything else.

    Attributes:
        contents: text of each, by id.
        is_added: bool, by id.
        reversible: no two texts have the same tokens, unless they are equal in NFC.
        composes: the tokenizer composes letters and their accents (NFC).
    """

    contents: dict[int, str]
    is_added: np.ndarray
    reversible: bool
    composes: bool
    _unmistakable: dict[int, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Any) -> AddedTokens | None:
        """Return the tokens that are not normalised; None if they cannot be followed in a text.

        They cannot if some are recognised only between words, or take the blanks around them.
        """
        added = tokenizer.added_tokens_decoder
        plain = {id: token for id, token in added.items() if not token.normalized}
        if not plain:
            return None
        stripping = any(token.lstrip or token.rstrip for token in plain.values())
        for token in plain.values():
            if token.single_word or (stripping and token.content.isspace()):
                return None
        is_added = np.zeros(max(max(plain) + 1, len(tokenizer)), bool)
        is_added[list(plain)] = True
        described = json.loads(tokenizer.backend_tokenizer.to_str())
        reversible = len(plain) == len(added) and not stripping and _is_byte_level(described)
        contents = {id: token.content for id, token in plain.items()}
        return cls(contents, is_added, reversible, described["normalizer"] is not None)

    def find(self, text: str, ids: np.ndarray, places: list[int]) -> CutText | None:
        """Return the places of the added tokens in a text; None if they do not lie there.

        Each is the first of its kind after the one before it: an earlier one would have been cut
        out, too.

        Args:
            text: what was tokenised.
            ids: of the text.
            places: of the added tokens among the ids.
        """
        begins = []
        ends = []
        end = 0
        for token in ids[places].tolist():
            content = self.contents[token]
            begin = text.find(content, end)
            if begin < 0:
                return None
            end = begin + len(content)
            begins.append(begin)
            ends.append(end)
        return CutText(self, text, ids, places, begins, ends, self.is_exact(text))

    def is_exact(self, text: str) -> bool:
        """Return whether no other text has this one's tokens."""
        return self.reversible and (not self.composes or unicodedata.is_normalized("NFC", text))

    def is_unmistakable(self, token: int) -> bool:
        """Return whether this is an added token whose text no other one contains.

        What follows it then cannot make it another token.
        """
        if token not in self._unmistakable:
            content = self.contents.get(token)
            others = self.contents.values()
            holding = [other for other in others if content is not None and content in other]
            self._unmistakable[token] = content is not None and len(holding) == 1
        return self._unmistakable[token]


@dataclass(frozen=True)
class CutText:
    """A text, its ids, and its added tokens.

    Attributes:
        places: of the added tokens among the ids.
        begins, ends: of each in the text.
        is_exact: True if no other text has these tokens.
    """

    added_tokens: AddedTokens
    text: str
    ids: np.ndarray
    places: list[int]
    begins: list[int]
    ends: list[int]
    is_exact: bool


def _is_byte_level(described: dict[str, Any]) -> bool:
    """Return whether a tokenizer maps every byte to a token, after nothing else but NFC.

    Args:
        described: the tokenizer as its file describes it.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    steps = described["pre_tokenizer"] or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    for step in steps:
        kind = step.get("type")
        lossless = (
            (kind == "Split" and step["behavior"] != "Removed")
            or kind == "Digits"
            or (kind == "ByteLevel" and not step["add_prefix_space"])
        )
        if not lossless:
            return False
    normalizer = described["normalizer"]
    return (
        any(step.get("type") == "ByteLevel" for step in steps)
        and described["model"]["type"] == "BPE"
        and described["model"]["vocab"].keys() >= set(ByteLevel.alphabet())
        and (normalizer is None or normalizer["type"] == "NFC")
        and (described["decoder"] or {}).get("type") == "ByteLevel"
    )
