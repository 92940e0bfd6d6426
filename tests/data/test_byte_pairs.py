"""tiktoken gives the ids of the tokenizer's Rust part, or is not used."""

import dataclasses
import functools
import itertools
import random
import unicodedata

import pytest
import tiktoken
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from chronicals.data.tokens import byte_pairs
from chronicals.data.tokens.byte_pairs import (
    GPT2,
    GPT2_DIGITS,
    MAX_LETTERS,
    SETTLED,
    SPLIT_PATTERNS,
    BytePairs,
)
from chronicals.data.tokens.tokenizer_training import train_tokenizer
from mutants import mutant

ALPHABET = pre_tokenizers.ByteLevel.alphabet()
LETTERS = [
    "a",
    "s",
    "S",
    "T",
    "ll",
    "1",
    "2",
    " ",
    "  ",
    "\n",
    "\r",
    "\t",
    "'",
    ".",
    "/",
    "é",
    "ǅ",
    "漢",
    "ʰ",
    "²",
    "\u00a0",
    "🙂",
]


def byte_level(use_regex=True):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def splitting(pattern):
    """How a tokenizer of this pattern splits: into texts whose letters stand for bytes."""
    if pattern == GPT2:
        return byte_level()
    first = (
        pre_tokenizers.Digits(True)
        if pattern == GPT2_DIGITS
        else pre_tokenizers.Split(Regex(pattern), "isolated")
    )
    return pre_tokenizers.Sequence([first, byte_level(pattern == GPT2_DIGITS)])


@functools.cache
def settled():
    return [chr(code) for code in range(0x110000) if SETTLED.fullmatch(chr(code))]


def wild(letters, most=40):
    return "".join(random.choices(letters, k=random.randrange(most)))


# --- pieces
# ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs():
    """Every byte and every two bytes: their ids tell where pieces begin and end."""
    both = itertools.product(range(256), repeat=2)
    return {bytes([byte]): byte for byte in range(256)} | {
        bytes(two): 256 + number for number, two in enumerate(both)
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern",
    [GPT2, GPT2_DIGITS, *SPLIT_PATTERNS],
    ids=["GPT-2", "GPT-2, digits", *SPLIT_PATTERNS.values()],
)
def test_both_engines_split_alike(pattern, pairs):
    split = splitting(pattern)
    by_pattern = tiktoken.Encoding(
        "pieces", pat_str=pattern, mergeable_ranks=pairs, special_tokens={}
    )
    whole = tiktoken.Encoding("whole", pat_str="(?s:.+)", mergeable_ranks=pairs, special_tokens={})
    codes = random.sample(settled(), 4000)
    texts = [wild(LETTERS) for _ in range(2000)] + [
        f"a{c}a1{c}1 {c} .{c}.{c}{c}\n{c}A{c}" for c in codes
    ]
    for text in texts:
        expected = [
            id
            for _, (begin, end) in split.pre_tokenize_str(text)
            for id in whole.encode_ordinary(text[begin:end])
        ]
        assert by_pattern.encode_ordinary(text) == expected, repr(text)


def test_settled_characters_have_a_class_that_stays():
    """None is yet to be given one; those that Unicode 3.2 knew have had the same since, but for
    two long ago (4.0, 5.0).
    """
    for letter in set(settled()) - {"\u200b", "\u2132"}:
        old = unicodedata.ucd_3_2_0.category(letter)
        new = unicodedata.category(letter)
        assert new != "Cn", hex(ord(letter))
        assert old == "Cn" or old[0] == new[0] or not {old[0], new[0]} & set("LMNZ"), hex(
            ord(letter)
        )


# --- merging
# -----------------------------------------------------------------------------------------------------


def random_model(letters="abc"):
    """Tokens that earlier ones make, by one pair or by several, in the order of their ids or
    nearly.
    """
    vocabulary = {letter: number for number, letter in enumerate(ALPHABET)}
    words = list(letters)
    merges = []
    while len(words) < 12:
        union = random.choice(words) + random.choice(words)
        halves = [
            (union[:n], union[n:])
            for n in range(1, len(union))
            if {union[:n], union[n:]} <= set(words)
        ]
        if union not in vocabulary:
            words.append(union)
            vocabulary[union] = len(vocabulary)
            merges += random.sample(halves, random.choice([1, len(halves)]))
        elif random.random() < 0.1:
            vocabulary.setdefault(wild(letters, 5) or "a", len(vocabulary))
    if random.random() < 0.2:
        random.shuffle(merges)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=random.random() < 0.5))
    tokenizer.pre_tokenizer = byte_level()
    return tokenizer


def made(tokenizer, of=BytePairs):
    return of.of(
        tokenizer,
        lambda texts, special: tokenizer.encode_batch_fast(texts, add_special_tokens=special),
    )


def differing(tokenizer, pairs, texts, special=False):
    expected = [
        encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=special)
    ]
    found = [encoding.ids for encoding in pairs.encode(texts, special)]
    assert len(found) == len(texts)
    return [text for text, ids, wanted in zip(texts, found, expected) if ids != wanted]


def merged_otherwise(of=BytePairs, models=200):
    """How many random models it takes, and for how many it gives other ids."""
    taken = 0
    wrong = 0
    for _ in range(models):
        tokenizer = random_model()
        pairs = made(tokenizer, of)
        if pairs is not None:
            taken += 1
            wrong += bool(
                differing(
                    tokenizer, pairs, [*(wild("abc", 14) for _ in range(60)), wild("abc", 900)]
                )
            )
    return taken, wrong


@pytest.mark.slow
def test_merging_by_ids_is_merging_by_the_list():
    taken, wrong = merged_otherwise()
    assert wrong == 0
    assert 50 < taken < 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('parts == 2 and model["ignore_merges"]', "False"),
        ('parts == 1 or model["ignore_merges"]', "True"),
        ("-1 in unions or (np.diff(unions) < 0).any()", "-1 in unions"),
    ],
)
def test_what_is_asked_of_the_merges_is_needed(old, new):
    assert merged_otherwise(mutant(byte_pairs, old, new).BytePairs)[1] > 0


# --- whole tokenizers
# --------------------------------------------------------------------------------------------


def trained(pattern=GPT2, normalizer=None):
    """A tokenizer of some hundred tokens, with what tiny models are trained on in them."""
    tokenizer = train_tokenizer(
        [wild(LETTERS) for _ in range(300)], vocab_size=400
    ).backend_tokenizer
    tokenizer.pre_tokenizer = splitting(pattern)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["as they are", "composed"])
@pytest.mark.parametrize(
    "pattern",
    [GPT2, GPT2_DIGITS, *SPLIT_PATTERNS],
    ids=["GPT-2", "GPT-2, digits", *SPLIT_PATTERNS.values()],
)
def test_texts_have_the_ids_of_the_rust_part(pattern, normalizer):
    tokenizer = trained(pattern, normalizer)
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text in ("ab", "abs", "  ", "<|", "é")]
    )
    begin, end = (tokenizer.token_to_id(text) for text in ("<|im_start|>", "<|endoftext|>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|endoftext|>",
        special_tokens=[("<|im_start|>", begin), ("<|endoftext|>", end)],
    )
    pairs = made(tokenizer)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    exotic = ["e\u0301", "\u212b", "\U0001e900", "ࡰ", "ก", "\u0378"]
    texts = ["", *(wild([*LETTERS, *added, *random.choice([exotic, [""]])]) for _ in range(400))]
    for special in (False, True):
        assert differing(tokenizer, pairs, texts, special) == []
    left = []
    dataclasses.replace(
        pairs, rust=lambda some, special: left.extend(some) or pairs.rust(some, special)
    ).encode(texts, special=False)
    assert 0 < len(left) < len(texts)


@pytest.mark.slow
def test_what_is_not_known_to_agree_is_left_to_the_rust_part():
    tokenizer = trained(normalizer=normalizers.NFC())
    left = []
    pairs = BytePairs.of(
        tokenizer, lambda texts, _: left.extend(texts) or tokenizer.encode_batch_fast(texts)
    )
    others = ["e\u0301", "ࡰ", " " * MAX_LETTERS, "é" * MAX_LETTERS]
    left.clear()
    pairs.encode(["a", others[0], "漢é", *others[1:], ""], False)
    assert left == others


@pytest.mark.slow
@pytest.mark.parametrize("blank", [" ", "\n", " \n"])
def test_the_longest_run_of_blanks_does_not_end_the_process(blank):
    text = (blank * MAX_LETTERS)[: MAX_LETTERS - 2] + "a"
    for pattern in (GPT2, *SPLIT_PATTERNS):
        tokenizer = trained(pattern)
        assert differing(tokenizer, made(tokenizer), [text]) == []


def with_token(**how):
    tokenizer = trained()
    tokenizer.add_tokens([AddedToken("ab", **{"normalized": False, **how})])
    return tokenizer


def with_part(name, value):
    tokenizer = trained()
    setattr(tokenizer, name, value)
    return tokenizer


def with_model(words=(), merges=(), **how):
    vocabulary = {letter: number for number, letter in enumerate(ALPHABET)}
    return with_part("model", models.BPE(vocabulary | dict(words), list(merges), **how))


OTHERS = {
    "a blank before every text": lambda: with_part(
        "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)
    ),
    "no pattern": lambda: with_part("pre_tokenizer", byte_level(use_regex=False)),
    "an unknown pattern": lambda: with_part("pre_tokenizer", splitting(r"\p{L}+|\s+|[^\s\p{L}]+")),
    "no bytes": lambda: with_part("pre_tokenizer", pre_tokenizers.Metaspace()),
    "lower case": lambda: with_part("normalizer", normalizers.Lowercase()),
    "composed and more": lambda: with_part("normalizer", normalizers.NFKC()),
    "another post-processor": lambda: with_part(
        "post_processor", processors.BertProcessing(("a", 1), ("b", 2))
    ),
    "texts twice": lambda: with_part(
        "post_processor", processors.TemplateProcessing(single="$A $A", special_tokens=[])
    ),
    "no texts": lambda: with_part(
        "post_processor", processors.TemplateProcessing(single="a", special_tokens=[("a", 5)])
    ),
    "no steps": lambda: with_part("pre_tokenizer", pre_tokenizers.Sequence([])),
    "a token between words alone": lambda: with_token(single_word=True),
    "a token that takes the blanks before it": lambda: with_token(lstrip=True),
    "a token that takes the blanks after it": lambda: with_token(rstrip=True),
    "a token that is normalised": lambda: with_token(normalized=True),
    "merges left out at random": lambda: with_model(dropout=0.5),
    "words that end": lambda: with_model(end_of_word_suffix="</w>"),
    "bytes as tokens of their own": lambda: with_model(byte_fallback=True),
    "two words of one id": lambda: with_model({"ab": 300, "xy": 300}, [("a", "b"), ("x", "y")]),
    "whole words": lambda: with_part("model", models.WordLevel({"a": 0}, unk_token="a")),
    "a byte without a token": lambda: with_part("model", models.BPE({"a": 0, "b": 1}, [])),
}


@pytest.mark.parametrize("name", OTHERS)
def test_tokenizers_it_is_not_known_to_agree_with_are_not_taken(name):
    assert made(OTHERS[name]()) is None


def test_the_tokenizer_that_the_table_changes_is_taken():
    assert made(trained()) is not None
    assert made(with_token()) is not None
    assert made(with_model()) is not None


def test_patterns_take_every_character_into_a_piece():
    for pattern in (GPT2, GPT2_DIGITS, *SPLIT_PATTERNS):
        encoding = tiktoken.Encoding(
            "bytes",
            pat_str=pattern,
            mergeable_ranks={bytes([byte]): byte for byte in range(256)},
            special_tokens={},
        )
        text = "".join(random.sample(settled(), 3000))
        assert bytes(encoding.encode_ordinary(text)).decode() == text
