"""A completion is trained as its row has it: behind its prompt, with no blank that some
tokenizers put before a text.
"""

import random
import string

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import tiny
from chronicals.data import DataError, Tokenizer
from chronicals.data.kinds.rows import NormalRow
from chronicals.data.tokens.batch_encoding import BatchEncoder
from chronicals.data.tokens.texts import Continuation

TEXTS = [
    "the sum of 2+2=4 and so on",
    '{"a": 1}',
    "def f(x): return x+1\n    y",
    "one two three 4 = 4",
    "a) b. c\n\nd",
] * 30
BYTES = [f"<0x{n:02X}>" for n in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>"]


def sentencepiece(**parts):
    """Byte pairs over ▁ and bytes, as Llama 2 and Mistral have them."""
    inner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    for name, part in parts.items():
        setattr(inner, name, part)
    strip = [decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    letters = list("▁" + string.ascii_letters + string.digits + string.punctuation)
    special = [*SPECIAL, *BYTES]
    inner.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=520, special_tokens=special, initial_alphabet=letters, show_progress=False
        ),
    )
    return inner


def prepending():
    blanks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    return sentencepiece(normalizer=normalizers.Sequence(blanks))


def metaspace(scheme):
    return sentencepiece(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False))


def byte_level(prefix):
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return inner


MADE = {
    "prepending": prepending,
    "metaspace, always": lambda: metaspace("always"),
    "metaspace, first": lambda: metaspace("first"),
    "byte level with a blank": lambda: byte_level(True),
}


def wrapped(inner):
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
    )
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, clean_up_tokenization_spaces=False, **named
    )


def text():
    letters = string.ascii_letters + string.digits + string.punctuation + "  \n\té🙂"
    return "".join(random.choices(letters, k=random.randint(1, 12)))


KNOWN = [
    ("0+0=", "7"),
    ("def f(x):\n", "    return x"),
    ("a:", " 7"),
    ("Q: x A: ", "7"),
    ("a", "\n\n"),
    ("", "7"),
    ("1", "2"),
]


@pytest.mark.parametrize("name", MADE)
def test_what_is_trained_is_what_the_row_says(name):
    encoder = Tokenizer(wrapped(MADE[name]()))
    rows = [
        {"prompt": p, "completion": c} for p, c in [*KNOWN, *((text(), text()) for _ in range(100))]
    ]
    normal = [NormalRow("completion", row) for row in rows]
    found = BatchEncoder(encoder).encode_batch(normal, [f"row {n}" for n in range(len(rows))])
    for row, (ids, trained) in zip(rows, found, strict=True):
        expected, mask = encoder.encode(row, "row")
        assert ids.tolist() == expected and trained.tolist() == mask, row
        prompt = row["prompt"]
        completion = row["completion"]
        assert ids[trained == 0].tolist() == encoder.prompt(prompt), row
        alone, said = (encoder.template.decode(some) for some in (encoder.prompt(prompt), ids[:-1]))
        if prompt:
            assert said == alone + completion, row
        else:
            assert said.removeprefix("<s>").strip() == completion.strip(), row


def test_without_such_a_blank_completions_are_tokenised_by_themselves():
    for tokenizer in (tiny.tokenizer(), wrapped(byte_level(False)), wrapped(sentencepiece())):
        behind = Continuation(tokenizer)
        assert behind.mark == "" and behind.mark_ids == []
        said = text()
        assert (
            behind.ids("a", said, "row") == tokenizer(said, add_special_tokens=False)["input_ids"]
        )


def test_a_text_that_merges_with_every_mark_is_refused():
    behind = Continuation(wrapped(prepending()))
    behind._behind = lambda mark, text: None
    with pytest.raises(DataError, match="row 3: the tokenizer cannot be made to tokenise 'a7'"):
        behind.ids("1", "a7", "row 3")


def test_a_mark_that_merges_in_a_batch_is_left_to_the_definition():
    encoder = Tokenizer(wrapped(prepending()))
    encoder.continuation.mark = "t"
    encoder.continuation.mark_ids = encoder.continuation._ids("t")
    row = {"prompt": "a", "completion": "he"}
    ids, _ = BatchEncoder(encoder).encode_batch([NormalRow("completion", row)], ["row"])[0]
    assert np.array_equal(ids, encoder.encode(row, "row")[0])
