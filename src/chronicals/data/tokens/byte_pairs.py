"""Byte-level BPE by tiktoken: the ids that a fast tokenizer's Rust part gives, in a third of its
time.

The two give the same ids because, and where, they agree in each of three steps; what is not known
to agree is left to the Rust part, texts that its normaliser would change among it.

- Added tokens are cut out of the text first, the leftmost and of these the longest, here by a
  regular expression.
- Each part is split into pieces: by ``GPT2``, ``GPT2_DIGITS`` or one of ``PATTERNS``. Both programs
  split it alike if its characters are ``SETTLED``: later versions of Unicode gave others a class,
  and each program has its own version.
- In each piece neighbours are merged: by tokenizers the pair that stands first in its list of
  merges, by tiktoken the one whose union has the lowest id, of equal ones the leftmost. What two
  neighbours are made of was merged without regard to what lies outside them, so they stand as they
  would on the way of their union's bytes alone. A union that its bytes alone become can therefore
  be merged by both whenever its halves meet. The halves of any other never meet, unless its bytes
  alone end as these two, which tokenizers leaves and tiktoken, if it knows the union, merges;
  ``_ranks`` tells them apart. Where ids do not fall along the list of merges, both choose the same
  of the pairs that they can merge.

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
"""What ``ByteLevel(use_regex=True)`` splits by, in a form that takes a quarter less of
tiktoken's time.
"""

GPT2_DIGITS = _GPT2.replace("NUMBERS", r"\p{N}").replace("NO_BLANK", r"[^\s\p{N}]")
"""The same after ``Digits(individual_digits=True)``, as SmolLM and StarCoder have it: blanks end
where a digit is.
"""

PATTERNS = {
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}": "Llama 3",
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}": "Qwen 2",
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}": "Qwen 3.5",
    rf"{_CASED.replace('ENDINGS', _ENDINGS + '?')}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_BLANKS}": "GPT-OSS",
    rf"{_CASED.replace('ENDINGS', '')}|\p{{N}}|{_SYMBOLS}|{_BLANKS}": "Tekken",
}
"""Patterns of ``Split``, and whose they are. Each takes every character of a text into some
piece.
"""

SETTLED = re.compile(
    "[\0-\u024f\u0370-\u0373\u0391-\u03a1\u03a3-\u03ff\u0400-\u04ff\u1e00-\u1eff\u2000-\u2064\u20a0-\u20b5\u2100-\u214f"
    "\u2190-\u23f3\u2460-\u2b4c\u3001-\u303f\u3041-\u3096\u3099-\u30ff\u4e00-\u9fa5\uac00-\ud7a3\uff01-\uff5e"
    "\ufe0f\U0001f300-\U0001f64f\U0001f680-\U0001f6c5]*"
)
"""Characters of the scripts and symbols most written. Their letters, marks and numbers have been
such since Unicode 6.1 or longer; a symbol that was no character before falls where it fell then."""

LONGEST = 1 << 18
"""Letters from which on a text is left to the Rust part: tiktoken panics where a million blanks
follow each other.
"""

PROBES = ["", "a", " It's 12 o'clock\n\n  already,\tand\u00a0LATE (caf\u00e9)."]
"""Texts that both tokenise before the first row."""


class Ids(NamedTuple):
    """As much of a ``tokenizers.Encoding`` as is read."""

    ids: list[int]


class HasIds(Protocol):
    @property
    def ids(self) -> list[int]: ...


Encode = Callable[[Sequence[str], bool], Sequence[HasIds]]
"""Tokenises texts, with the special tokens put around each or without."""


@dataclass(frozen=True)
class BytePairs:
    """
    Attributes:
        rust: the Rust part, for the texts that are left to it.
        encoding: of tiktoken, without special tokens.
        added: ids of the added tokens.
        cut: finds them; they are its one group.
        around: ids of what is put before and after a text.
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
        """None where tiktoken is not known to give the same ids as this ``tokenizers.Tokenizer``,
        as it was read from a file.

        Args:
            rust: tokenises by it, with added tokens found in the text, nothing cut off and nothing
                padded.
        """
        described = json.loads(backend.to_str())
        pattern = _pattern(described)
        around = _around(rust, described["post_processor"])
        if pattern is None or around is None or not _cuts_plainly(described):
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
        return pairs if all(pairs._probed(special) for special in (False, True)) else None

    def _probed(self, special: bool) -> bool:
        """Whether both give the same for a few texts, as they do not where a text is put between
        special tokens twice.
        """
        found = self.encode(PROBES, special)
        expected = self.rust(PROBES, special)
        return [encoding.ids for encoding in found] == [encoding.ids for encoding in expected]

    def encode(self, texts: Sequence[str], special: bool) -> list[HasIds]:
        """An ``Encode``."""
        known = list(map(self._knows, texts))
        left = [text for text, own in zip(texts, known) if not own]
        others = iter(self.rust(left, special) if left else ())
        before, after = self.around if special else ([], [])
        return [
            Ids([*before, *self._ids(text), *after]) if own else next(others)
            for text, own in zip(texts, known)
        ]

    def _knows(self, text: str) -> bool:
        if text.isascii():
            return len(text) < LONGEST
        composed = not self.composes or unicodedata.is_normalized("NFC", text)
        return len(text) < LONGEST and composed and SETTLED.fullmatch(text) is not None

    def _ids(self, text: str) -> list[int]:
        ids = list[int]()
        for number, part in enumerate(self.cut.split(text)):
            if number % 2:
                ids.append(self.added[part])
            elif part:
                ids += self.encoding.encode_ordinary(part)
        return ids


def _pattern(described: dict[str, Any]) -> str | None:
    """What a tokenizer, as its file describes it, splits texts by before it looks at their
    bytes.
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
    return split if isolated and not more and not last["use_regex"] and split in PATTERNS else None


def _cuts_plainly(described: dict[str, Any]) -> bool:
    """Whether added tokens are found in the text as it is, wherever they stand, and nothing but
    NFC changes the rest.
    """
    ways = ("single_word", "lstrip", "rstrip", "normalized")
    plain = not any(token[way] for token in described["added_tokens"] for way in ways)
    return plain and (described["normalizer"] is None or described["normalizer"] == {"type": "NFC"})


def _ranks(model: dict[str, Any]) -> dict[bytes, int] | None:
    """Ids of the tokens that merging may give, by their bytes; None where merging by lowest id
    may give others.
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

    merging = BPE(
        vocab=vocabulary, merges=merges, cache_capacity=0
    )  # the tokenizer's own keeps the words it has seen
    ranks = dict[bytes, int]()
    for word, id in vocabulary.items():
        try:
            letters = word.translate(_BYTES).encode("latin-1")
        except UnicodeEncodeError:
            continue  # nothing is merged to a word whose letters stand for no bytes
        parts = len(merging.tokenize(word))
        if parts == 2 and model["ignore_merges"]:
            return None  # tiktoken merges them wherever they meet, for it must know the whole
        if parts == 1 or model["ignore_merges"]:
            ranks[letters] = id
    return ranks if all(bytes([byte]) in ranks for byte in range(256)) else None


def _byte_letters() -> dict[int, int]:
    """The byte that each letter of a byte-level vocabulary stands for, by their code points
    (GPT-2): printable ones stand for themselves. What stands for none becomes a letter that is no
    byte.
    """
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return dict.fromkeys(others, ord("\uffff")) | {
        256 + number: byte for number, byte in enumerate(others)
    }


_BYTES = _byte_letters()


def _around(rust: Encode, post: dict[str, Any] | None) -> tuple[list[int], list[int]] | None:
    """What is put before and after a text, or None where that might depend on the text."""
    steps = post["processors"] if post and post["type"] == "Sequence" else [post]
    if not all(
        step is None or step["type"] in ("ByteLevel", "TemplateProcessing") for step in steps
    ):
        return None
    text, whole = (rust(["a"], special)[0].ids for special in (False, True))
    places = [n for n in range(len(whole)) if whole[n : n + len(text)] == text]
    return (whole[: places[0]], whole[places[0] + len(text) :]) if len(places) == 1 else None
