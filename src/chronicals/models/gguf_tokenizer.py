"""The tokenizer in a GGUF file, as transformers has them: byte-level BPE (``gpt2``) and BPE with
byte fallback (``llama``).

The first has its merges in the file. Of the second the file has scores alone: every way to put a
token together from two others is a merge, and those of higher scores come first (as transformers
converts SentencePiece's models). A normaliser is not said in a file, nor does llama.cpp apply one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chronicals.models.gguf_reader import File
from chronicals.models.gguf_splits import BY_EXPRESSIONS, WITHOUT_MERGED_WORDS

KEY = "tokenizer.ggml"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens (``gguf.TokenType``)."""

WHOLE_WORDS = ("llama-bpe", "tekken")
"""Where a word that is a token is taken whole, whatever merges would make of it."""

BESIDE = "tokenizer.json"

BLANK = "▁"
REMEDY = f"put the model's own {BESIDE} and tokenizer_config.json beside the file"


def tokenizer_of(file: File) -> Any:
    """The tokenizer of a file: the one beside it, if there is one, else made of the file.

    Raises:
        ValueError: the one beside it has other tokens; or there is none, and the file's is of a
            kind that is not proved here.
    """
    folder = file.path.parent
    if (folder / BESIDE).exists():
        return _beside(file, folder)
    kind = file.value(f"{KEY}.model")
    make = {"gpt2": _byte_level, "llama": _with_byte_fallback}.get(str(kind))
    if make is None:
        raise ValueError(
            f"{file.path}: its tokenizer is of kind {kind!r}, which cannot be read from a GGUF "
            f"file; {REMEDY}"
        )
    made = make(file, file.value(f"{KEY}.tokens"), list(file.value(f"{KEY}.token_type") or []))
    return _wrapped(file, made)


def _beside(file: File, folder: Path) -> Any:
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(folder)
    tokens = file.value(f"{KEY}.tokens")
    other = next(
        (
            text
            for text, number in found.get_vocab().items()
            if number >= len(tokens) or tokens[number] != text
        ),
        None,
    )
    if other is not None:
        raise ValueError(
            f"{folder / BESIDE}: token {other!r} is not that of {file.path.name} at its id, so it "
            "is of another model; take it "
            "away, or put the right one there"
        )
    return found


def _vocabulary(tokens: list[str], types: list[int]) -> dict[str, int]:
    """Ids of the tokens that are in use."""
    unused = {number for number, kind in enumerate(types) if kind == UNUSED}
    return {text: number for number, text in enumerate(tokens) if number not in unused}


def _byte_level(file: File, tokens: list[str], types: list[int]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = str(file.value(f"{KEY}.pre"))
    name = next((name for name, merging in WITHOUT_MERGED_WORDS.items() if merging == pre), pre)
    splits = next((splits for splits, known in BY_EXPRESSIONS.items() if known == name), None)
    if splits is None:
        known = ", ".join([*dict.fromkeys(BY_EXPRESSIONS.values()), *WITHOUT_MERGED_WORDS.values()])
        raise ValueError(
            f"{file.path}: {KEY}.pre={pre!r}: how it splits a text is known here for {known}; "
            f"{REMEDY}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in file.value(f"{KEY}.merges") or []]
    made = Tokenizer(
        models.BPE(
            vocab=_vocabulary(tokens, types), merges=merges, ignore_merges=pre in WHOLE_WORDS
        )
    )
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


def _with_byte_fallback(file: File, tokens: list[str], types: list[int]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = _vocabulary(tokens, types)
    scores = file.value(f"{KEY}.scores")
    if not scores:
        raise ValueError(f"{file.path}: has no {KEY}.scores; {REMEDY}")
    normal = {text: number for text, number in vocabulary.items() if types[number] == NORMAL}
    unknown = next((tokens[number] for number, kind in enumerate(types) if kind == UNKNOWN), None)
    merges = _merges(normal, scores)
    made = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    prefix = file.value(f"{KEY}.add_space_prefix") is not False
    made.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(BLANK)] if prefix else []), normalizers.Replace(" ", BLANK)]
    )
    strips = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence(
        [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *strips]
    )
    return made


def _merges(normal: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """In the order in which they are made: by the score of what they make, then by the ids of
    the two.
    """
    found = [
        (-scores[number], normal[text[:cut]], normal[text[cut:]], text[:cut], text[cut:])
        for text, number in normal.items()
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    ]
    return [(left, right) for *_, left, right in sorted(found)]


def _wrapped(file: File, made: Any) -> Any:
    """With special tokens, what stands around a text, and the template of chats."""
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    tokens = file.value(f"{KEY}.tokens")
    types = list(file.value(f"{KEY}.token_type") or [])
    added = [
        (text, kind == CONTROL)
        for text, kind in zip(tokens, types)
        if kind in (CONTROL, USER_DEFINED)
    ]
    made.add_tokens(
        [AddedToken(text, special=special, normalized=False) for text, special in added]
    )
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: file.value(f"{KEY}.{key}_token_id") for name, key in keys.items()}
    named = {name: tokens[number] for name, number in ids.items() if number is not None}
    ends = {
        "bos": _asked(file, "bos", file.value(f"{KEY}.model") == "llama") and "bos" in named,
        "eos": _asked(file, "eos", False) and "eos" in named,
    }
    if any(ends.values()):
        around = {name: [named[name]] if there else [] for name, there in ends.items()}
        special = [(named[name], ids[name]) for name, there in ends.items() if there]
        single = [*around["bos"], "$A", *around["eos"]]
        made.post_processor = processors.TemplateProcessing(
            single=single,
            pair=[*single, *around["bos"], "$B:1", *around["eos"]],
            special_tokens=special,
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        clean_up_tokenization_spaces=False,
        chat_template=file.value("tokenizer.chat_template"),
        **{f"{name}_token": text for name, text in named.items()},
    )


def _asked(file: File, name: str, default: bool) -> bool:
    """Whether the file says that a token stands around every text."""
    found = file.value(f"{KEY}.add_{name}_token")
    return default if found is None else bool(found)
