"""Rules by which a byte-level BPE splits a text: llama.cpp's names and regular expressions."""

from __future__ import annotations

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
