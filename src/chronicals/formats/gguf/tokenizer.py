"""Tokenizers of transformers in the words of GGUF, and back.

llama.cpp splits a text by rules that it knows by name. Here the name is found by the regular
expressions of ``tokenizer.json``. llama.cpp's script hashes what a tokenizer makes of one text
instead, but a vocabulary with added tokens, or of one's own, has another hash.

Back, a byte-level BPE has its merges in the file. BPE with byte fallback has only scores there:
every way to put a token together from two others is a merge, and those of higher scores come first
(as transformers converts SentencePiece's models). Files hold no normaliser, and llama.cpp applies
none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from chronicals.formats.gguf.reader import GGUFFile, NotExpressible
from chronicals.formats.gguf.vocabulary import (
    BLANK,
    BY_EXPRESSIONS,
    SERVE_MERGED,
    UNSUPPORTED_FORMS,
    WITHOUT_MERGED_WORDS,
    Vocabulary,
    read_vocabulary,
    steps_of,
    unigram_of,
)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens (``gguf.TokenType``)."""

WHOLE_WORD_SPLITS = ("llama-bpe", "tekken")
"""Pre-tokenizers under which a word that is a token is taken whole, whatever merges make of it."""

TOKENIZER_FILE = "tokenizer.json"
TAKE_TOKENIZER = f"put the model's own {TOKENIZER_FILE} and tokenizer_config.json beside the file"


# --- from a tokenizer to a file


def vocabulary_of(tokenizer: Any, rows: int, stops: list[int]) -> Vocabulary:
    """Describe a fast tokenizer in the words of GGUF.

    Args:
        tokenizer: a fast tokenizer of transformers.
        rows: of the embedding: as many tokens are written, unused ones behind the tokenizer's.
        stops: ids at which generation ends.

    Raises:
        NotExpressible: llama.cpp has no such tokenizer, or there are more tokens than rows.
    """
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    model = described["model"]
    if model["type"] not in ("BPE", "Unigram"):
        raise NotExpressible(
            f"a tokenizer of kind {model['type']!r}: only byte-level BPE, BPE with byte fallback "
            f"and unigram vocabularies are proved; {SERVE_MERGED}"
        )
    by_id = {number: text for text, number in tokenizer.get_vocab().items()}
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id >= rows:
        by_id.pop(tokenizer.pad_token_id, None)  # it needs no row, for nothing reads it
    if by_id and max(by_id) >= rows:
        raise NotExpressible(
            f"token {by_id[max(by_id)]!r} has id {max(by_id)}, the embedding {rows} rows; resize "
            "it first"
        )
    byte_fallback = bool(model.get("byte_fallback"))
    template = tokenizer.chat_template
    ids = tokenizer("a")["input_ids"]  # with what the tokenizer puts around every text
    common: dict[str, Any] = {
        "tokens": [by_id.get(number, f"[PAD{number}]") for number in range(rows)],
        "types": [_type_of(number, by_id, tokenizer, byte_fallback) for number in range(rows)],
        "special": _special_ids(tokenizer, stops, rows),
        "adds_bos": len(ids) > 1 and ids[0] == tokenizer.bos_token_id,
        "adds_eos": len(ids) > 1 and ids[-1] == tokenizer.eos_token_id,
        "template": template if isinstance(template, str) else None,
    }
    if model["type"] == "Unigram":
        return _unigram(described, rows, common)
    notes = _notes(described, (*UNSUPPORTED_FORMS, "Strip"))
    if byte_fallback:
        return Vocabulary(
            model="llama",
            pre="default",
            merges=[],
            scores=[-float(number) for number in range(rows)],
            space_prefix=_has_space_prefix(described),
            notes=notes,
            **common,
        )
    return Vocabulary(
        model="gpt2",
        pre=_pre_tokenizer(described),
        merges=[pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]],
        scores=[],
        space_prefix=None,
        notes=notes,
        **common,
    )


def _unigram(described: dict[str, Any], rows: int, common: dict[str, Any]) -> Vocabulary:
    """Return the vocabulary of a unigram tokenizer.

    Args:
        described: content of ``tokenizer.json``.
        rows: of the embedding.
        common: arguments of ``Vocabulary`` that all kinds have.
    """
    unigram = unigram_of(described, rows)
    common["types"][unigram.unknown] = UNKNOWN
    common["special"]["unk"] = unigram.unknown
    notes = _notes(described, UNSUPPORTED_FORMS)
    if unigram.space_prefix and not unigram.merges_blanks:
        notes.append(
            "llama.cpp puts no blank in front of a text of blanks alone, which the tokenizer does"
        )
    return Vocabulary(
        model="t5",
        pre="default",
        merges=[],
        scores=unigram.scores,
        space_prefix=unigram.space_prefix,
        merges_blanks=unigram.merges_blanks,
        charsmap=unigram.charsmap,
        notes=notes,
        **common,
    )


def _has_space_prefix(described: dict[str, Any]) -> bool:
    """Return whether the normalizer or the pre-tokenizer puts a blank in front of a text."""
    steps = [
        *steps_of(described.get("normalizer"), "normalizers"),
        *steps_of(described.get("pre_tokenizer"), "pretokenizers"),
    ]
    return any(
        step["type"] == "Prepend"
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )


def _pre_tokenizer(described: dict[str, Any]) -> str:
    """Return llama.cpp's name of the rules that split a text."""
    splits: list[str] = []
    for step in steps_of(described.get("pre_tokenizer"), "pretokenizers"):
        kind = step["type"]
        if kind == "ByteLevel" and not step.get("add_prefix_space"):
            splits += ["words"] if step.get("use_regex", True) else []
        elif kind == "Digits" and step.get("individual_digits"):
            splits.append("digits")
        elif kind == "Split" and "Regex" in step["pattern"] and not step.get("invert"):
            splits.append(step["pattern"]["Regex"])
        else:
            splits.append(json.dumps(step))
    name = BY_EXPRESSIONS.get(tuple(splits))
    if name is None:
        raise NotExpressible(
            f"the tokenizer splits texts by {splits}, for which llama.cpp has no name that "
            "is proved here; export merged weights (--to merged) and convert those with "
            "llama.cpp's own script"
        )
    return name if described["model"].get("ignore_merges") else WITHOUT_MERGED_WORDS.get(name, name)


def _type_of(number: int, by_id: dict[int, str], tokenizer: Any, byte_fallback: bool) -> int:
    text = by_id.get(number)
    if text is None:
        return UNUSED
    added = tokenizer.added_tokens_decoder.get(number)
    if number == tokenizer.unk_token_id and byte_fallback:
        return UNKNOWN
    if added is not None:
        return CONTROL if added.special else USER_DEFINED
    if byte_fallback and re.fullmatch("<0x[0-9A-F]{2}>", text):
        return BYTE
    return NORMAL


def _special_ids(tokenizer: Any, stops: list[int], rows: int) -> dict[str, int]:
    """Return special ids by name.

    The token that ends a turn is ``eot``, if it is another than the one that ends a text.
    """
    ids = {}
    for name in ("bos", "eos", "unk", "pad"):
        number = getattr(tokenizer, f"{name}_token_id")
        if number is not None and number < rows:
            ids[name] = number
    if stops and "eos" not in ids:
        ids["eos"] = stops[0]
    turn_ends = [stop for stop in stops if stop != ids.get("eos")]
    if turn_ends:
        ids["eot"] = turn_ends[0]
    return ids


def _notes(described: dict[str, Any], unsupported: Iterable[str]) -> list[str]:
    """Describe the steps of the normalizer that llama.cpp does not do."""
    normalizer = json.dumps(described.get("normalizer") or {})
    forms = [form for form in unsupported if f'"{form}"' in normalizer]
    if not forms:
        return []
    return [f"llama.cpp does not normalise text, which the tokenizer does ({', '.join(forms)})"]


# --- from a file to a tokenizer


def tokenizer_of(file: GGUFFile) -> Any:
    """Return the tokenizer of a file: the one beside it, if there is one, else made of the file.

    Raises:
        ValueError: the one beside it has other tokens; or there is none, and the file's is of a
            kind that is not proved here.
    """
    from transformers import AutoTokenizer

    vocabulary = read_vocabulary(file)
    folder = file.path.parent
    if (folder / TOKENIZER_FILE).exists():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokens = vocabulary.tokens
        for text, number in tokenizer.get_vocab().items():
            if number >= len(tokens) or tokens[number] != text:
                raise ValueError(
                    f"{folder / TOKENIZER_FILE}: token {text!r} is not that of {file.path.name} at "
                    "its id, so it is of another model; take it away, or put the right one there"
                )
        return tokenizer
    unused = {number for number, kind in enumerate(vocabulary.types) if kind == UNUSED}
    used = {text: n for n, text in enumerate(vocabulary.tokens) if n not in unused}
    if vocabulary.model == "gpt2":
        made = _byte_level(file.path, vocabulary, used)
    elif vocabulary.model == "llama":
        made = _with_byte_fallback(file.path, vocabulary, used)
    else:
        raise ValueError(
            f"{file.path}: its tokenizer is of kind {vocabulary.model!r}, which cannot be read "
            f"from a GGUF file; {TAKE_TOKENIZER}"
        )
    return _with_special_tokens(made, vocabulary)


def _byte_level(path: Path, vocabulary: Vocabulary, ids: dict[str, int]) -> Any:
    """Make a byte-level BPE (``tokenizers.Tokenizer``) by its merges and its splits.

    Args:
        path: of the file, for errors.
        vocabulary: of the file.
        ids: of the tokens that are used, by their texts.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = vocabulary.pre
    names = {merging: name for name, merging in WITHOUT_MERGED_WORDS.items()}
    name = names.get(pre, pre)
    expressions = {known: splits for splits, known in reversed(BY_EXPRESSIONS.items())}
    if name not in expressions:
        known = ", ".join([*dict.fromkeys(BY_EXPRESSIONS.values()), *WITHOUT_MERGED_WORDS.values()])
        raise ValueError(
            f"{path}: tokenizer.ggml.pre={pre!r}: how it splits a text is known here for {known}; "
            f"{TAKE_TOKENIZER}"
        )
    splits = expressions[name]
    merges: list[Any] = [tuple(merge.split(" ", 1)) for merge in vocabulary.merges]
    model = models.BPE(
        vocab=ids,
        merges=merges,
        ignore_merges=pre in WHOLE_WORD_SPLITS,
    )
    made = Tokenizer(model)
    steps: list[Any] = []
    for split in splits:
        if split == "digits":
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        elif split != "words":
            steps.append(pre_tokenizers.Split(Regex(split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex="words" in splits))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    return made


def _with_byte_fallback(path: Path, vocabulary: Vocabulary, ids: dict[str, int]) -> Any:
    """Make a BPE with byte fallback (``tokenizers.Tokenizer``) by the scores of its tokens.

    Args:
        path: of the file, for errors.
        vocabulary: of the file.
        ids: of the tokens that are used, by their texts.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    if not vocabulary.scores:
        raise ValueError(f"{path}: has no tokenizer.ggml.scores; {TAKE_TOKENIZER}")
    types = vocabulary.types
    normal = {text: number for text, number in ids.items() if types[number] == NORMAL}
    unknown = vocabulary.tokens[types.index(UNKNOWN)] if UNKNOWN in types else None
    # All pairs of tokens that make a token, ordered by the score of the token that they make, then
    # by the ids of the two.
    pairs = []
    for text, number in normal.items():
        for cut in range(1, len(text)):
            left = text[:cut]
            right = text[cut:]
            if left in normal and right in normal:
                pairs.append((-vocabulary.scores[number], normal[left], normal[right], left, right))
    model = models.BPE(
        vocab=ids,
        merges=[(left, right) for *_, left, right in sorted(pairs)],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    made = Tokenizer(model)
    prefix = vocabulary.space_prefix is not False
    prepends = [normalizers.Prepend(BLANK)] if prefix else []
    strips = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.normalizer = normalizers.Sequence([*prepends, normalizers.Replace(" ", BLANK)])
    made.decoder = decoders.Sequence(
        [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *strips]
    )
    return made


def _with_special_tokens(made: Any, vocabulary: Vocabulary) -> Any:
    """Wrap a tokenizer for transformers, with special tokens, BOS and EOS, and the template."""
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    made.add_tokens(
        [
            AddedToken(text, special=kind == CONTROL, normalized=False)
            for text, kind in zip(vocabulary.tokens, vocabulary.types)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    special: dict[str, str] = {}
    for name in ("bos", "eos", "unk", "pad"):
        if name in vocabulary.special:
            special[name] = vocabulary.tokens[vocabulary.special[name]]
    adds_bos = vocabulary.adds_bos
    if adds_bos is None:
        adds_bos = vocabulary.model == "llama"  # llama.cpp's default of the kind
    begin = [special["bos"]] if adds_bos and "bos" in special else []
    end = [special["eos"]] if vocabulary.adds_eos and "eos" in special else []
    if begin or end:
        around = [name for name, texts in (("bos", begin), ("eos", end)) if texts]
        made.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end],
            pair=[*begin, "$A", *end, *begin, "$B:1", *end],
            special_tokens=[(special[name], vocabulary.special[name]) for name in around],  # type: ignore[index]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        clean_up_tokenization_spaces=False,
        chat_template=vocabulary.template,
        **{f"{name}_token": text for name, text in special.items()},
    )
