"""Where the added tokens of a tokenizer lie in a text and among its ids."""

from __future__ import annotations

import functools
import json
import unicodedata
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Cuts:
    """The added tokens of a tokenizer, which it cuts out of a text before anything else.

    Attributes:
        contents: what each is written as, by id.
        among: for each id, whether it is one of them.
        reversible: no two texts have the same tokens, unless normalised by ``composes``.
        composes: the tokenizer composes letters and their accents (NFC).
    """

    contents: dict[int, str]
    among: np.ndarray
    reversible: bool
    composes: bool
    _alone: dict[int, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Any) -> Cuts | None:
        """None where they cannot be followed in a text: some are taken only between words, or
        take the blanks around.
        """
        added = tokenizer.added_tokens_decoder
        plain = {id: token for id, token in added.items() if not token.normalized}
        stripping = any(token.lstrip or token.rstrip for token in plain.values())
        if not plain or any(
            token.single_word or (stripping and token.content.isspace()) for token in plain.values()
        ):
            return None
        among = np.zeros(max(max(plain) + 1, len(tokenizer)), bool)
        among[list(plain)] = True
        described = json.loads(tokenizer.backend_tokenizer.to_str())
        reversible = len(plain) == len(added) and not stripping and _is_byte_level(described)
        composes = described["normalizer"] is not None
        return cls({id: token.content for id, token in plain.items()}, among, reversible, composes)

    def find(self, text: str, ids: np.ndarray, places: list[int]) -> Row | None:
        """Where each of them lies in the text, given its places among the ids.

        Each is the first of its kind after the one before it: an earlier one would have been cut
            out, too.
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
        return Row(self, text, ids, places, begins, ends)

    def is_exact(self, text: str) -> bool:
        """Whether no other text has this one's tokens."""
        return self.reversible and (not self.composes or unicodedata.is_normalized("NFC", text))

    def stands_alone(self, token: int) -> bool:
        """Whether this is one of them, and no other contains its text: what follows cannot make
        it another.
        """
        if token not in self._alone:
            content = self.contents.get(token)
            found = (
                content is not None
                and sum(content in other for other in self.contents.values()) == 1
            )
            self._alone[token] = found
        return self._alone[token]


@dataclass(frozen=True)
class Row:
    """A text, its ids, and its added tokens: the place of each among the ids, and where it
    begins and ends in the text.
    """

    cuts: Cuts
    text: str
    ids: np.ndarray
    places: list[int]
    begins: list[int]
    ends: list[int]

    @functools.cached_property
    def is_exact(self) -> bool:
        return self.cuts.is_exact(self.text)


def _is_byte_level(described: dict[str, Any]) -> bool:
    """Whether a tokenizer, as its file describes it, maps every byte to a token, and nothing
    else before (but NFC).
    """
    steps = described["pre_tokenizer"] or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    known = all(
        (step.get("type") == "Split" and step["behavior"] != "Removed")
        or step.get("type") == "Digits"
        or (step.get("type") == "ByteLevel" and not step["add_prefix_space"])
        for step in steps
    )
    from tokenizers.pre_tokenizers import ByteLevel

    return (
        known
        and any(step.get("type") == "ByteLevel" for step in steps)
        and described["model"]["type"] == "BPE"
        and described["model"]["vocab"].keys() >= set(ByteLevel.alphabet())
        and (described["normalizer"] is None or described["normalizer"]["type"] == "NFC")
        and (described["decoder"] or {}).get("type") == "ByteLevel"
    )
