"""A tokenizer in the words of GGUF, as settings of a file and back.

A byte-level BPE is described by llama.cpp's name of the rules that split a text. A unigram
vocabulary (SentencePiece's, Kudo 2018) can be described only if llama.cpp gives the same ids.

llama.cpp (its kind ``t5``) normalises by the same map of characters, looks for the best sum of
scores over the whole text, and writes the unknown token for text that no piece covers; it has no
bytes to fall back to. Its handling of blanks are two settings:

    merged    one blank for several, none at the ends, and one in front of every text
    prefix    a blank in front of every text, whatever it begins with; blanks stay as they are

A text is each part between special tokens. Tokenizers that treat blanks otherwise are refused.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from chronicals.formats.gguf.reader import GGUFFile, NotExpressible

VOCABULARY_KEYS = {
    "model": "tokenizer.ggml.model",
    "pre": "tokenizer.ggml.pre",
    "tokens": "tokenizer.ggml.tokens",
    "types": "tokenizer.ggml.token_type",
    "scores": "tokenizer.ggml.scores",
    "merges": "tokenizer.ggml.merges",
    "special": "",
    "adds_bos": "tokenizer.ggml.add_bos_token",
    "adds_eos": "tokenizer.ggml.add_eos_token",
    "space_prefix": "tokenizer.ggml.add_space_prefix",
    "merges_blanks": "tokenizer.ggml.remove_extra_whitespaces",
    "charsmap": "tokenizer.ggml.precompiled_charsmap",
    "template": "tokenizer.chat_template",
}
"""Keys of a vocabulary's attributes, in the order of a file; special tokens have several keys."""

SPECIAL_TOKEN_KEYS = {
    "bos": "tokenizer.ggml.bos_token_id",
    "eos": "tokenizer.ggml.eos_token_id",
    "eot": "tokenizer.ggml.eot_token_id",
    "unk": "tokenizer.ggml.unknown_token_id",
    "pad": "tokenizer.ggml.padding_token_id",
}
"""Keys of the ids of special tokens."""


@dataclass(frozen=True)
class Vocabulary:
    """The settings of a file that describe its tokenizer.

    Attributes:
        model: llama.cpp's name of the kind: ``gpt2`` (byte-level BPE), ``llama`` (BPE with byte
            fallback) or ``t5`` (unigram).
        pre: llama.cpp's name of the pre-tokenizer.
        tokens: one for every row of the embedding.
        types: of the tokens, as ``gguf.TokenType``.
        merges: of a byte-level BPE.
        scores: of the tokens of the other kinds.
        special: ids by name: bos, eos, eot, unk, pad.
        adds_bos: the tokenizer puts BOS in front of a text; None in a file that does not say it.
        adds_eos: the tokenizer puts EOS behind a text; None in a file that does not say it.
        space_prefix: a text gets a blank in front.
        template: of chats.
        notes: steps that llama.cpp does otherwise, in words; not in the file.
        merges_blanks: several blanks become one; of a unigram vocabulary.
        charsmap: compiled map that normalises characters; of a unigram vocabulary.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]
    special: dict[str, int]
    adds_bos: bool | None
    adds_eos: bool | None
    space_prefix: bool | None
    template: str | None
    notes: list[str] = field(default_factory=list)
    merges_blanks: bool | None = None
    charsmap: bytes | None = None

    def settings(self) -> dict[str, Any]:
        """Return the settings of the file, by their keys."""
        settings: dict[str, Any] = {}
        for name, key in VOCABULARY_KEYS.items():
            value = getattr(self, name)
            if name == "special":
                settings |= {SPECIAL_TOKEN_KEYS[token]: number for token, number in value.items()}
            elif value is not None and value not in ([], ""):
                settings[key] = value
        return settings


def read_vocabulary(file: GGUFFile) -> Vocabulary:
    """Return the vocabulary of a file; its inverse is ``Vocabulary.settings``."""
    values = {name: file.value(key) for name, key in VOCABULARY_KEYS.items() if name != "special"}
    for name in ("tokens", "types", "scores", "merges"):
        values[name] = list(values[name] or [])
    for name in ("model", "pre"):
        values[name] = str(values[name])
    if values["charsmap"] is not None:
        values["charsmap"] = bytes(values["charsmap"])
    ids = {name: file.value(key) for name, key in SPECIAL_TOKEN_KEYS.items()}
    special = {name: number for name, number in ids.items() if number is not None}
    return Vocabulary(special=special, **values)


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKED_LETTERS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_REST_AND_NO_MARKS = r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_UPPER_LOWER = rf"{_CASED}*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+"
_LOWER_UPPER = rf"{_CASED}+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*"
_REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

BY_EXPRESSIONS: dict[tuple[str, ...], str] = {
    (rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",): "llama-bpe",
    (rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}",): "qwen2",
    (rf"{_CONTRACTIONS}|{_MARKED_LETTERS}|\p{{N}}|{_REST_AND_NO_MARKS}",): "qwen35",
    (
        rf"{_UPPER_LOWER}{_CONTRACTIONS}?|{_LOWER_UPPER}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}",
    ): "gpt-4o",
    (rf"{_UPPER_LOWER}|{_LOWER_UPPER}|\p{{N}}|{_REST_WITH_SLASH}",): "tekken",
    ("digits", "words"): "smollm",
    ("words",): "gpt-2",
}
"""llama.cpp's name by the steps that split a text: regular expressions as in ``tokenizer.json``,
``digits`` (each by itself) and ``words`` (GPT-2's expression).
"""

WITHOUT_MERGED_WORDS = {"llama-bpe": "dbrx"}
"""Name of the same split with ``ignore_merges`` false: a word that is a token is still made by
merges.
"""


BLANK = "▁"

UNUSED_SCORE = -1e4
"""Score of rows of the embedding that are no tokens, so that no text is made of them."""

SERVE_MERGED = (
    "export merged weights (--to merged) and serve those with transformers or vLLM, which "
    "read tokenizer.json itself"
)

UNSUPPORTED_FORMS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase")
"""Steps of a normalizer that llama.cpp does not do; the proof reports them."""

BLANK_STEPS: dict[tuple[str, str], str] = {
    (" {2,}", " "): "several are one",
    (" {2,}", BLANK): "several are one",
    (r"\A +| +\z", ""): "none at the ends",
    (" ", BLANK): "",
    (rf"\A{BLANK}", BLANK * 2): "prefix before blanks",
}
"""Effect on blanks of a replacement, by the expression or text and its replacement."""


@dataclass(frozen=True)
class Unigram:
    """The settings of a file for a unigram vocabulary, besides its tokens.

    Attributes:
        scores: natural logarithms by id, one for each row of the embedding.
        unknown: id of the token for text that no piece covers.
        charsmap: SentencePiece's compiled map of characters; None if there is none.
        merges_blanks: several blanks become one, and a text has none at its ends.
        space_prefix: a text gets a blank in front.
    """

    scores: list[float]
    unknown: int
    charsmap: bytes | None
    merges_blanks: bool
    space_prefix: bool


def unigram_of(described: dict[str, Any], rows: int) -> Unigram:
    """Describe a unigram tokenizer, given as in ``tokenizer.json``, in the words of GGUF.

    Args:
        described: the content of ``tokenizer.json``.
        rows: of the embedding.

    Raises:
        NotExpressible: llama.cpp would give other ids.
    """
    model = described["model"]
    if model.get("byte_fallback"):
        raise _other(
            "byte_fallback=True: llama.cpp writes the unknown token for what a unigram vocabulary "
            "lacks, and no bytes"
        )
    if model.get("unk_id") is None:
        raise _other("unk_id=None: llama.cpp takes token 2 for the unknown one")
    normalizers = list(steps_of(described.get("normalizer"), "normalizers"))
    splitters = list(steps_of(described.get("pre_tokenizer"), "pretokenizers"))
    maps = [
        base64.b64decode(step["precompiled_charsmap"])
        for step in normalizers
        if step["type"] == "Precompiled"
    ]
    if maps and (normalizers[0]["type"] != "Precompiled" or len(maps) > 1):
        raise _other(
            "a map of characters (Precompiled) that is not the first step of its normalizer"
        )
    effects = {_normalizer_effect(step, bool(maps)) for step in normalizers}
    effects |= {_splitting_effect(step, model) for step in splitters}
    # llama.cpp has two settings: blanks are merged, and a text gets one in front.
    prefix = bool(effects & {"prefix", "prefix before blanks"})
    merging = {"several are one", "none at the ends"}
    merges = merging <= effects and prefix
    if not merges and merging & effects:
        ways = ", ".join(sorted(effects - {""}))
        raise _other(
            f"blanks ({ways}): where llama.cpp merges them it leaves none at the ends and puts "
            "one in front of a text"
        )
    if not merges and "prefix" in effects and "prefix before blanks" not in effects:
        raise _other(
            "pre_tokenizer Metaspace: no blank in front of a text that begins with one, where "
            "llama.cpp puts one, too"
        )
    scores = [float(score) for _, score in model["vocab"]]
    return Unigram(
        scores + [UNUSED_SCORE] * (rows - len(scores)),
        model["unk_id"],
        maps[0] if maps else None,
        merges,
        prefix,
    )


def steps_of(step: dict[str, Any] | None, inside: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer in turn, out of their sequences."""
    if step is None:
        return
    if step["type"] == "Sequence":
        for inner in step[inside]:
            yield from steps_of(inner, inside)
    else:
        yield step


def _normalizer_effect(step: dict[str, Any], mapped: bool) -> str:
    """Return the effect of a step of the normalizer on blanks (a value of ``BLANK_STEPS``)."""
    kind = step["type"]
    if kind == "Precompiled" or kind in UNSUPPORTED_FORMS:
        return ""
    if kind == "Replace":
        asked = step["pattern"].get("Regex", step["pattern"].get("String")), step["content"]
        if asked in BLANK_STEPS:
            return BLANK_STEPS[asked]
    if kind == "Prepend" and step["prepend"] == BLANK:
        return "prefix before blanks"
    if kind == "Strip" and mapped and step["strip_right"] and not step["strip_left"]:
        return "none at the ends"  # ends of lines, which it would take too, are blanks by the map
    raise _other(f"normalizer {step}: llama.cpp has no such step")


def _splitting_effect(step: dict[str, Any], model: dict[str, Any]) -> str:
    """Return the effect of a step of the pre-tokenizer on blanks."""
    if step["type"] != "Metaspace" or step["replacement"] != BLANK:
        raise _other(
            f"pre_tokenizer {step}: llama.cpp splits a text nowhere before it looks for pieces"
        )
    if step.get("split", True):
        pieces = {piece for piece, _ in model["vocab"]}
        across = next((piece for piece in sorted(pieces) if BLANK in piece[1:]), None)
        if across is not None or BLANK not in pieces:
            reason = (
                f"piece {across!r} goes across words"
                if across is not None
                else f"there is no piece {BLANK!r}"
            )
            raise _other(
                f"pre_tokenizer Metaspace with split=True: {reason}; llama.cpp does not look at "
                "words apart"
            )
    scheme = step.get("prepend_scheme", "always")
    if scheme == "first":
        raise _other(
            "prepend_scheme='first': llama.cpp puts a blank in front of what follows a special "
            "token, too"
        )
    return "" if scheme == "never" else "prefix"


def _other(reason: str) -> NotExpressible:
    return NotExpressible(
        f"the unigram tokenizer has {reason}, and ids would be others; {SERVE_MERGED}"
    )
