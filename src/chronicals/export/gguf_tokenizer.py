"""A tokenizer in the words of GGUF: tokens, their types, merges or scores, the pre-tokenizer,
special tokens, the template.

llama.cpp splits text by rules that it knows by name. Here the name is found by the regular
expressions of ``tokenizer.json``, not by hashing what it makes of one text, as llama.cpp's script
does, for a vocabulary with added tokens or of one's own has another hash.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from chronicals.export.gguf_unigram import LEFT_OUT, REMEDY, unigram_of
from chronicals.models.gguf_families import NotExpressible
from chronicals.models.gguf_splits import BY_EXPRESSIONS, WITHOUT_MERGED_WORDS


@dataclass(frozen=True)
class Vocabulary:
    """What a file says of a tokenizer.

    Attributes:
        model, pre: llama.cpp's names of the kind and of the pre-tokenizer.
        tokens, types: of every row of the embedding; types of ``gguf.TokenType``.
        merges: of a byte-level BPE; or scores of one that begins with characters, or of a unigram
            vocabulary.
        special: ids by gguf's name: bos, eos, eot, unk, pad.
        adds_bos, adds_eos: whether the tokenizer puts them around a text.
        space_prefix: whether a text gets a blank in front.
        template: of chats.
        notes: what llama.cpp does otherwise, in words.
        merges_blanks: whether several blanks are one; of a unigram vocabulary.
        charsmap: of a unigram vocabulary, how characters are normalised.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]
    special: dict[str, int]
    adds_bos: bool
    adds_eos: bool
    space_prefix: bool | None
    template: str | None
    notes: list[str]
    merges_blanks: bool | None = None
    charsmap: bytes | None = None


def vocabulary_of(tokenizer: Any, rows: int, stops: list[int]) -> Vocabulary:
    """Of a fast tokenizer.

    Args:
        rows: of the embedding: as many tokens are written, unused ones behind the tokenizer's.
        stops: ids at which generation ends.

    Raises:
        NotExpressible: llama.cpp has no such tokenizer, or there are more tokens than rows.
    """
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    kind = described["model"]
    if kind["type"] not in ("BPE", "Unigram"):
        raise NotExpressible(
            f"a tokenizer of kind {kind['type']!r}: only byte-level BPE, BPE with byte fallback "
            "and unigram vocabularies are "
            f"proved; {REMEDY}"
        )
    by_id = {number: text for text, number in tokenizer.get_vocab().items()}
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id >= rows:
        by_id.pop(tokenizer.pad_token_id, None)  # it needs no row, for nothing reads it
    if by_id and max(by_id) >= rows:
        raise NotExpressible(
            f"token {by_id[max(by_id)]!r} has id {max(by_id)}, the embedding {rows} rows; resize "
            "it first"
        )
    if kind["type"] == "Unigram":
        return _of_unigram(tokenizer, described, by_id, rows, stops)
    from_characters = bool(kind.get("byte_fallback"))
    pre = "default" if from_characters else _pre_tokenizer(described)
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(rows)]
    return Vocabulary(
        model="llama" if from_characters else "gpt2",
        pre=pre,
        tokens=tokens,
        types=[_type(number, by_id, tokenizer, from_characters) for number in range(rows)],
        merges=[]
        if from_characters
        else [merge if isinstance(merge, str) else " ".join(merge) for merge in kind["merges"]],
        scores=[-float(number) for number in range(rows)] if from_characters else [],
        special=_special(tokenizer, stops, rows),
        adds_bos=_adds(tokenizer, tokenizer.bos_token_id, 0),
        adds_eos=_adds(tokenizer, tokenizer.eos_token_id, -1),
        space_prefix=_space_prefix(described) if from_characters else None,
        template=tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None,
        notes=_notes(described),
    )


def _of_unigram(
    tokenizer: Any, described: dict[str, Any], by_id: dict[int, str], rows: int, stops: list[int]
) -> Vocabulary:
    from gguf import TokenType

    unigram = unigram_of(described, rows)
    types = [_type(number, by_id, tokenizer, False) for number in range(rows)]
    types[unigram.unknown] = int(TokenType.UNKNOWN)
    return Vocabulary(
        model="t5",
        pre="default",
        tokens=[by_id.get(number, f"[PAD{number}]") for number in range(rows)],
        types=types,
        merges=[],
        scores=unigram.scores,
        special={**_special(tokenizer, stops, rows), "unk": unigram.unknown},
        adds_bos=_adds(tokenizer, tokenizer.bos_token_id, 0),
        adds_eos=_adds(tokenizer, tokenizer.eos_token_id, -1),
        space_prefix=unigram.space_prefix,
        template=tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None,
        notes=_notes(described, LEFT_OUT) + unigram.notes,
        merges_blanks=unigram.merges_blanks,
        charsmap=unigram.charsmap,
    )


def _pre_tokenizer(described: dict[str, Any]) -> str:
    found = tuple(_splits(described.get("pre_tokenizer")))
    name = BY_EXPRESSIONS.get(found)
    if name is None:
        raise NotExpressible(
            f"the tokenizer splits texts by {list(found)}, for which llama.cpp has no name that "
            "is proved here; export merged "
            "weights (--to merged) and convert those with llama.cpp's own script"
        )
    return name if described["model"].get("ignore_merges") else WITHOUT_MERGED_WORDS.get(name, name)


def _splits(step: dict[str, Any] | None) -> list[str]:
    """What splits a text, in its order."""
    if step is None:
        return []
    kind = step["type"]
    if kind == "Sequence":
        return [split for inner in step["pretokenizers"] for split in _splits(inner)]
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return ["words"] if step.get("use_regex", True) else []
    if kind == "Digits" and step.get("individual_digits"):
        return ["digits"]
    if kind == "Split" and "Regex" in step["pattern"] and not step.get("invert"):
        return [step["pattern"]["Regex"]]
    return [json.dumps(step)]


def _type(number: int, by_id: dict[int, str], tokenizer: Any, from_characters: bool) -> int:
    from gguf import TokenType

    text = by_id.get(number)
    if text is None:
        return int(TokenType.UNUSED)
    added = tokenizer.added_tokens_decoder.get(number)
    if number == tokenizer.unk_token_id and from_characters:
        return int(TokenType.UNKNOWN)
    if added is not None:
        return int(TokenType.CONTROL if added.special else TokenType.USER_DEFINED)
    if from_characters and re.fullmatch("<0x[0-9A-F]{2}>", text):
        return int(TokenType.BYTE)
    return int(TokenType.NORMAL)


def _special(tokenizer: Any, stops: list[int], rows: int) -> dict[str, int]:
    """Special ids; the token that ends a turn is ``eot``, where it is another than the one that
    ends a text.
    """
    named = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")}
    found = {name: number for name, number in named.items() if number is not None and number < rows}
    if stops and "eos" not in found:
        found["eos"] = stops[0]
    if turn := [stop for stop in stops if stop != found.get("eos")]:
        found["eot"] = turn[0]
    return found


def _adds(tokenizer: Any, token: int | None, place: int) -> bool:
    ids = tokenizer("a")["input_ids"]
    return token is not None and len(ids) > 1 and ids[place] == token


def _space_prefix(described: dict[str, Any]) -> bool:
    """Whether the normalizer or the pre-tokenizer puts a blank in front of a text."""
    steps = [described.get("normalizer"), described.get("pre_tokenizer")]
    while steps:
        step = steps.pop()
        if step is None:
            continue
        steps += step.get("normalizers", []) + step.get("pretokenizers", [])
        if step["type"] == "Prepend" or (
            step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never"
        ):
            return True
    return False


def _notes(described: dict[str, Any], steps: Iterable[str] = (*LEFT_OUT, "Strip")) -> list[str]:
    normalizer = json.dumps(described.get("normalizer") or {})
    forms = [form for form in steps if f'"{form}"' in normalizer]
    return (
        [f"llama.cpp does not normalise text, which the tokenizer does ({', '.join(forms)})"]
        if forms
        else []
    )
