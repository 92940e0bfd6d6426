"""How a byte-level BPE splits a text, by llama.cpp's names: regular expressions of
``tokenizer.json``.
"""

from __future__ import annotations

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MARKED_LETTERS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
REST_AND_NO_MARKS = r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
UPPER_LOWER = rf"{CASED}*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+"
LOWER_UPPER = rf"{CASED}+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*"
REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

BY_EXPRESSIONS: dict[tuple[str, ...], str] = {
    (rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}{{1,3}}|{REST}",): "llama-bpe",
    (rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}|{REST}",): "qwen2",
    (rf"{CONTRACTIONS}|{MARKED_LETTERS}|\p{{N}}|{REST_AND_NO_MARKS}",): "qwen35",
    (
        rf"{UPPER_LOWER}{CONTRACTIONS}?|{LOWER_UPPER}{CONTRACTIONS}?|\p{{N}}{{1,3}}|{REST_WITH_SLASH}",
    ): "gpt-4o",
    (rf"{UPPER_LOWER}|{LOWER_UPPER}|\p{{N}}|{REST_WITH_SLASH}",): "tekken",
    ("digits", "words"): "smollm",
    ("words",): "gpt-2",
}
"""llama.cpp's name by what splits a text: expressions, ``digits`` (each by itself) and ``words``
(GPT-2's expression).
"""

WITHOUT_MERGED_WORDS = {"llama-bpe": "dbrx"}
"""The name of the same split where a word that is a token is still put together by merges
(``ignore_merges`` is false).
"""
