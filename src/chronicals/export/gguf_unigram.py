"""A unigram vocabulary (SentencePiece's, Kudo 2018) in the words of GGUF, where llama.cpp gives the
tokenizer's ids.

llama.cpp (its kind ``t5``) normalises by the same map of characters, looks for the best sum of
scores over the whole text, and writes the unknown token for what no piece covers; it has no bytes
to fall back to. What it does with blanks are two settings:

    merged    one blank for several, none at the ends, and one in front of every text
    prefix    a blank in front of every text, whatever it begins with; blanks stay as they are

A text is each part between special tokens. Tokenizers that treat blanks otherwise are refused.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from chronicals.models.gguf_families import NotExpressible

BLANK = "▁"

UNUSED_SCORE = -1e4
"""Of rows of the embedding that are no tokens, so that no text is made of them."""

REMEDY = (
    "export merged weights (--to merged) and serve those with transformers or vLLM, which "
    "read tokenizer.json itself"
)

LEFT_OUT = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase")
"""Steps that llama.cpp does not do, which is reported."""

STEPS: dict[tuple[str, str], str] = {
    (" {2,}", " "): "several are one",
    (" {2,}", BLANK): "several are one",
    (r"\A +| +\z", ""): "none at the ends",
    (" ", BLANK): "",
    (rf"\A{BLANK}", BLANK * 2): "prefix before blanks",
}
"""What replacing does to blanks, by the expression or text that is replaced and by what."""


@dataclass(frozen=True)
class Unigram:
    """What a file says of one beside its tokens.

    Attributes:
        scores: natural logarithms, by id, of as many as there are rows.
        unknown: id of the token for what no piece covers.
        charsmap: SentencePiece's compiled map of characters; None where there is none.
        merges_blanks, space_prefix: what is done with blanks.
    """

    scores: list[float]
    unknown: int
    charsmap: bytes | None
    merges_blanks: bool
    space_prefix: bool

    @property
    def notes(self) -> list[str]:
        """What llama.cpp does otherwise, in texts that are rare."""
        if self.space_prefix and not self.merges_blanks:
            return [
                "llama.cpp puts no blank in front of a text of blanks alone, which the tokenizer "
                "does"
            ]
        return []


def unigram_of(described: dict[str, Any], rows: int) -> Unigram:
    """Of a tokenizer as ``tokenizer.json`` describes it.

    Args:
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
    normalizers = list(_steps(described.get("normalizer"), "normalizers"))
    splitters = list(_steps(described.get("pre_tokenizer"), "pretokenizers"))
    maps = [
        base64.b64decode(step["precompiled_charsmap"])
        for step in normalizers
        if step["type"] == "Precompiled"
    ]
    if maps and (normalizers[0]["type"] != "Precompiled" or len(maps) > 1):
        raise _other(
            "a map of characters (Precompiled) that is not the first step of its normalizer"
        )
    done = {_of_blanks(step, bool(maps)) for step in normalizers} | {
        _of_splitting(step, model) for step in splitters
    }
    merges, prefix = _blanks(done)
    scores = [float(score) for _, score in model["vocab"]]
    return Unigram(
        scores + [UNUSED_SCORE] * (rows - len(scores)),
        model["unk_id"],
        maps[0] if maps else None,
        merges,
        prefix,
    )


def _steps(step: dict[str, Any] | None, inside: str) -> Iterator[dict[str, Any]]:
    """One after the other, out of their sequences."""
    if step is None:
        return
    if step["type"] == "Sequence":
        for inner in step[inside]:
            yield from _steps(inner, inside)
    else:
        yield step


def _of_blanks(step: dict[str, Any], mapped: bool) -> str:
    """What a step of the normalizer does to blanks."""
    kind = step["type"]
    if kind == "Precompiled" or kind in LEFT_OUT:
        return ""
    if kind == "Replace":
        asked = step["pattern"].get("Regex", step["pattern"].get("String")), step["content"]
        if asked in STEPS:
            return STEPS[asked]
    if kind == "Prepend" and step["prepend"] == BLANK:
        return "prefix before blanks"
    if kind == "Strip" and mapped and step["strip_right"] and not step["strip_left"]:
        return "none at the ends"  # ends of lines, which it would take too, are blanks by the map
    raise _other(f"normalizer {step}: llama.cpp has no such step")


def _of_splitting(step: dict[str, Any], model: dict[str, Any]) -> str:
    """What a step of the pre-tokenizer does to blanks."""
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


def _blanks(done: set[str]) -> tuple[bool, bool]:
    """Whether llama.cpp is to merge blanks, and to put one in front."""
    merges = {"several are one", "none at the ends"}
    prefix = bool(done & {"prefix", "prefix before blanks"})
    if merges <= done and prefix:
        return True, True
    if merges & done:
        ways = ", ".join(sorted(done - {""}))
        raise _other(
            f"blanks ({ways}): where llama.cpp merges them it leaves none at the ends and puts "
            "one in front of a text"
        )
    if "prefix" in done and "prefix before blanks" not in done:
        raise _other(
            "pre_tokenizer Metaspace: no blank in front of a text that begins with one, where "
            "llama.cpp puts one, too"
        )
    return False, prefix


def _other(reason: str) -> NotExpressible:
    return NotExpressible(f"the unigram tokenizer has {reason}, and ids would be others; {REMEDY}")
