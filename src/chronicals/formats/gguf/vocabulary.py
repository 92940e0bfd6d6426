"""A tokenizer in the words of GGUF, as settings of a file and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from chronicals.formats.gguf.reader import GGUFFile

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
