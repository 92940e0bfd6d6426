"""Byte-level BPE by tiktoken, with the ids that a fast tokenizer's Rust part gives.

It takes a third of the Rust part's time.
The two programs give the same ids if they agree in each of three steps. Texts and tokenizers that
are not known to agree are left to the Rust part, such as texts that its normaliser would change.

- Added tokens are cut out of the text first, the leftmost and of these the longest, here by a
  regular expression.
- Each part is split into pieces: by ``GPT2``, ``GPT2_DIGITS`` or one of ``SPLIT_PATTERNS``. Both programs
  split it in the same way if its characters are ``SETTLED``: later versions of Unicode gave others
  a class, and each program has its own version.
- In each piece neighbours are merged: by tokenizers the pair that stands first in its list of
  merges, by tiktoken the one whose union has the lowest id, of equal ones the leftmost. Two
  neighbours were merged from their own bytes without regard to anything outside them, so they come
  about as they would if the bytes of their union were a whole piece. There are three cases:

  - The bytes of the union, as a piece, become the union: both programs can merge it whenever its
    halves meet.
  - They end as these two halves: tokenizers leaves them, and tiktoken merges them if it knows the
    union. ``_ranks`` leaves such unions out, or refuses the tokenizer.
  - They end otherwise: these halves never meet.

  If ids do not fall along the list of merges, both choose the same of the pairs that they can merge.

tiktoken takes a piece that is a token without merging, as tokenizers does under ``ignore_merges``;
without it, tokens that no merges reach are left out.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

_MARKS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|NUMBERS| ?[^\s\p{L}\p{N}]+|\s+(?!NO_BLANK)|\s+"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_MARKS[0]}*{_MARKS[1]}+ENDINGS|[^\r\n\p{{L}}\p{{N}}]?{_MARKS[0]}+{_MARKS[1]}*ENDINGS"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

GPT2 = _GPT2.replace("NUMBERS", r" ?\p{N}+").replace("NO_BLANK", r"\S")
"""Pattern by which ``ByteLevel(use_regex=True)`` splits.

This form of it takes a quarter less of tiktoken's time.
"""

GPT2_DIGITS = _GPT2.replace("NUMBERS", r"\p{N}").replace("NO_BLANK", r"[^\s\p{N}]")
"""The same after ``Digits(individual_digits=True)``, as SmolLM and StarCoder have it.

Blanks end before a digit.
"""

SPLIT_PATTERNS = {
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}": "Llama 3",
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}": "Qwen 2",
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}": "Qwen 3.5",
    rf"{_CASED.replace('ENDINGS', _ENDINGS + '?')}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_BLANKS}": "GPT-OSS",
    rf"{_CASED.replace('ENDINGS', '')}|\p{{N}}|{_SYMBOLS}|{_BLANKS}": "Tekken",
}
"""Patterns of ``Split``, and the models that have them.

Each takes every character of a text into some piece.
"""

SETTLED = re.compile(
    "[\0-\u024f\u0370-\u0373\u0391-\u03a1\u03a3-\u03ff\u0400-\u04ff\u1e00-\u1eff\u2000-\u2064\u20a0-\u20b5\u2100-\u214f"
    "\u2190-\u23f3\u2460-\u2b4c\u3001-\u303f\u3041-\u3096\u3099-\u30ff\u4e00-\u9fa5\uac00-\ud7a3\uff01-\uff5e"
    "\ufe0f\U0001f300-\U0001f64f\U0001f680-\U0001f6c5]*"
)
"""Characters of the scripts and symbols most written.

Their letters, marks and numbers have been such since Unicode 6.1 or longer. A symbol that was no
character before falls into the same class as then.
"""

MAX_LETTERS = 1 << 18
"""Longer texts are left to the Rust part: tiktoken panics at a million blanks in a row."""

COMPARED_TEXTS = ["", "a", " It's 12 o'clock\n\n  already,\tand\u00a0LATE (caf\u00e9)."]
"""Texts that both programs tokenise before the first row."""


class EncodedIds(NamedTuple):
    """The part of a ``tokenizers.Encoding`` that is read."""

    ids: list[int]


class HasIds(Protocol):
    """Tokens of a text: a ``tokenizers.Encoding``, or an ``EncodedIds``."""

    @property
    def ids(self) -> list[int]:
        """Token ids of the text."""


Encode = Callable[[Sequence[str], bool], Sequence[HasIds]]
"""Tokenises texts, with the tokenizer's special tokens around each or without."""


@dataclass(frozen=True)
class BytePairs:
    """Tokenizer by tiktoken that gives the ids of a fast tokenizer.

    Attributes:
        rust: the Rust part, for the texts that are left to it.
        encoding: of tiktoken, without special tokens.
        added: ids of the added tokens.
        cut: finds them; they are its one group.
        around: ids that are put before and after a text.
        composes: texts are normalised (NFC) first.
    """

    rust: Encode
    encoding: Any
    added: dict[str, int]
    cut: re.Pattern[str]
    around: tuple[list[int], list[int]]
    composes: bool

    @classmethod
    def of(cls, backend: Any, rust: Encode) -> BytePairs | None:
        """Return the same tokenizer by tiktoken; None if that is not known to give the same ids.

        Args:
            backend: a ``tokenizers.Tokenizer`` as it was read from a file.
            rust: tokenises by it, with added tokens found in the text, nothing cut off and nothing
                padded.
        """
        described = json.loads(backend.to_str())
        pattern = _pattern(described)
        if pattern is None:
            return None
        # The ids before and after a text, which must not depend on the text.
        post = described["post_processor"]
        steps = post["processors"] if post and post["type"] == "Sequence" else [post]
        for step in steps:
            if step is not None and step["type"] not in ("ByteLevel", "TemplateProcessing"):
                return None
        text = rust(["a"], False)[0].ids
        whole = rust(["a"], True)[0].ids
        places = [n for n in range(len(whole)) if whole[n : n + len(text)] == text]
        if len(places) != 1:
            return None
        around = whole[: places[0]], whole[places[0] + len(text) :]
        # Added tokens must be found anywhere in a text, and only NFC may change the rest.
        for token in described["added_tokens"]:
            if any(token[way] for way in ("single_word", "lstrip", "rstrip", "normalized")):
                return None
        if described["normalizer"] not in (None, {"type": "NFC"}):
            return None
        ranks = _ranks(described["model"])
        if ranks is None:
            return None
        import tiktoken

        encoding = tiktoken.Encoding(
            "byte pairs", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
        )
        added = {token["content"]: token["id"] for token in described["added_tokens"]}
        longest_first = sorted(filter(None, added), key=len, reverse=True)
        cut = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        pairs = cls(rust, encoding, added, cut, around, described["normalizer"] is not None)
        # They differ, for one, if a text is put between special tokens twice.
        for special in (False, True):
            encodings = pairs.encode(COMPARED_TEXTS, special)
            expected = [encoding.ids for encoding in rust(COMPARED_TEXTS, special)]
            if [encoding.ids for encoding in encodings] != expected:
                return None
        return pairs

    def encode(self, texts: Sequence[str], special: bool) -> list[HasIds]:
        """Tokenise texts, as an ``Encode`` does."""
        # Texts for which both programs are known to give the same ids.
        known = []
        for text in texts:
            is_known = len(text) < MAX_LETTERS
            if is_known and not text.isascii():
                composed = not self.composes or unicodedata.is_normalized("NFC", text)
                is_known = composed and SETTLED.fullmatch(text) is not None
            known.append(is_known)
        unknown = [text for text, is_known in zip(texts, known) if not is_known]
        by_rust = iter(self.rust(unknown, special) if unknown else ())
        before, after = self.around if special else ([], [])
        encodings = list[HasIds]()
        for text, is_known in zip(texts, known):
            if not is_known:
                encodings.append(next(by_rust))
                continue
            ids = [*before]
            for number, part in enumerate(self.cut.split(text)):
                if number % 2:
                    ids.append(self.added[part])
                elif part:
                    ids += self.encoding.encode_ordinary(part)
            encodings.append(EncodedIds([*ids, *after]))
        return encodings


def _pattern(described: dict[str, Any]) -> str | None:
    """Return the pattern by which a tokenizer splits texts; None if it is not a known one.

    Args:
        described: the tokenizer as its file describes it.
    """
    steps = described["pre_tokenizer"] or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    *splits, last = steps or [{}]
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    if not splits:
        return GPT2 if last["use_regex"] else None
    first, *more = splits
    if not more and first == {"type": "Digits", "individual_digits": True} and last["use_regex"]:
        return GPT2_DIGITS
    split = first.get("pattern", {}).get("Regex")
    isolated = first == {
        "type": "Split",
        "pattern": {"Regex": split},
        "behavior": "Isolated",
        "invert": False,
    }
    return (
        split
        if isolated and not more and not last["use_regex"] and split in SPLIT_PATTERNS
        else None
    )


_PRINTABLE = [
    *range(ord("!"), ord("~") + 1),
    *range(ord("¡"), ord("¬") + 1),
    *range(ord("®"), ord("ÿ") + 1),
]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = dict.fromkeys(_OTHERS, ord("\uffff")) | {
    256 + number: byte for number, byte in enumerate(_OTHERS)
}
"""Byte of each letter of a byte-level vocabulary, by code point (GPT-2).

Printable letters stand for themselves. A letter that stands for no byte becomes U+FFFF.
"""


def _ranks(model: dict[str, Any]) -> dict[bytes, int] | None:
    """Return the ids of the tokens that merging may give, by their bytes.

    None if merging by lowest id may give others.
    """
    vocabulary = model["vocab"]
    merges = [(left, right) for left, right in model.get("merges", ())]
    altered = any(
        model.get(name)
        for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    )
    if model["type"] != "BPE" or altered:
        return None
    unions = [vocabulary.get("".join(merge), -1) for merge in merges]
    if -1 in unions or (np.diff(unions) < 0).any():
        return None
    from tokenizers.models import BPE

    # The tokenizer's own BPE would keep the words that it has seen.
    merging = BPE(vocab=vocabulary, merges=merges, cache_capacity=0)
    ranks = dict[bytes, int]()
    for word, id in vocabulary.items():
        try:
            letters = word.translate(_BYTES).encode("latin-1")
        except UnicodeEncodeError:
            continue  # nothing is merged to a word whose letters stand for no bytes
        parts = len(merging.tokenize(word))
        if parts == 2 and model["ignore_merges"]:
            return None  # tiktoken must know the whole, and would merge the two wherever they meet
        if parts == 1 or model["ignore_merges"]:
            ranks[letters] = id
    return ranks if all(bytes([byte]) in ranks for byte in range(256)) else None
