"""Unigram vocabularies in GGUF: llama.cpp's ids are the tokenizer's, whatever it does with
blanks, or it is refused.
"""

import json
import struct
from dataclasses import replace

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import gguf_models
import tiny
from chronicals.export import NotExpressible, NotProved, export, gguf
from chronicals.export.llama_cpp import LlamaCpp
from chronicals.export.source import PROBES
from chronicals.formats.gguf.reader import GGUFFile
from chronicals.formats.gguf.tokenizer import vocabulary_of

CHARACTERS = {
    "\n": " ",
    "\t": " ",
    "ï": "i",
    "é": "e",
    "£": "GBP",
    "…": "...",
    "à": "a",
    "\r\n": " ",
    "\x07": "",
}
"""Some that a map changes."""


def charsmap(changes):
    """SentencePiece's form of a map of characters: a double array of units (Darts), then what is
    written, ended by zeros.

    A unit has its label in bits 0-7, whether a value follows in bit 8, and in bits 10-30 what its
    children's places are xored with; a value is a unit with bit 31 set.
    """
    texts = b""
    places = {}
    trie = {}
    for key, text in changes.items():
        places[key.encode()] = len(texts)
        texts += text.encode() + b"\0"
    for key in places:
        node = trie
        for byte in key:
            node = node.setdefault(byte, {})
        node[0] = places[key]
    units = {0: 0}
    taken = {0}
    waiting = [(0, trie)]
    while waiting:
        place, node = waiting.pop()
        offset = next(
            n for n in range(1, 1 << 20) if all((place ^ n ^ byte) not in taken for byte in node)
        )
        units[place] |= offset << 10 | (0 in node) << 8
        for byte, child in node.items():
            at = place ^ offset ^ byte
            taken.add(at)
            units[at] = child | 1 << 31 if byte == 0 else byte
            if byte:
                waiting.append((at, child))
    size = (max(units) | 0xFF) + 1
    array = struct.pack(f"<{size}I", *(units.get(n, 0xFF) for n in range(size)))
    return struct.pack("<I", len(array)) + array + texts


MAP = normalizers.Precompiled(charsmap(CHARACTERS))
SEVERAL = normalizers.Replace(Regex(" {2,}"), "▁")
STRIP = normalizers.Strip(left=False, right=True)
ENDS = normalizers.Replace(Regex(r"\A +| +\z"), "")
ONE = normalizers.Replace(Regex(" {2,}"), " ")
ESCAPE = normalizers.Replace(" ", "▁")
BEFORE_BLANKS = normalizers.Replace(Regex(r"\A▁"), "▁▁")


def metaspace(scheme="always", split=False):
    return pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)


WAYS = {
    "as transformers makes them": ([MAP, STRIP, SEVERAL], metaspace(split=True)),
    "as SentencePiece": ([MAP, ENDS, ONE, ESCAPE, BEFORE_BLANKS], metaspace()),
    "as SentencePiece without a map": ([ENDS, ONE, ESCAPE, BEFORE_BLANKS], metaspace()),
    "blanks stay": ([ESCAPE, BEFORE_BLANKS], metaspace()),
    "blanks stay, prepended": ([normalizers.Prepend("▁"), ESCAPE], None),
    "no prefix": ([ESCAPE], metaspace("never")),
    "no prefix, by words": ([MAP], metaspace("never", split=True)),
}


def unigram(steps, splitter, bytes_too=False, size=300):
    """With a vocabulary of some texts, in which not every character is."""
    texts = ["def words(of): return 'it is 12345, we are 67'  and cafe twice and more"] * 40 + list(
        PROBES[:2]
    ) * 5
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.Replace(Regex("[^ -~▁]"), ""), *steps])
    made.pre_tokenizer = metaspace(split=True)
    special = ["<unk>", "<s>", "</s>", "<|turn|>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator([text for text in texts], trainer)
    described = json.loads(made.to_str())
    if "▁" not in {piece for piece, _ in described["model"]["vocab"]}:
        described["model"]["vocab"].append(["▁", -4.0])
    described["model"]["byte_fallback"] = bytes_too
    made = Tokenizer.from_str(json.dumps(described))
    made.normalizer = normalizers.Sequence(steps)
    made.pre_tokenizer = splitter
    made.decoder = decoders.Metaspace()
    found = PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<unk>",
        additional_special_tokens=["<|turn|>"],
    )
    found.chat_template = (
        tiny.tokenizer()
        .chat_template.replace("<|im_end|>", "<|turn|>")
        .replace("<|im_start|>", "<|turn|>")
    )
    return found


def saved(folder, tokenizer, rows=None):
    gguf_models.build("llama", vocab_size=rows or len(tokenizer) + 3).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


TEXTS = (
    *PROBES,
    "  é…\t\tx\r\n",
    " twice  and  more ",
    "漢字漢 字 ▁ cafe\n\n",
    "'we are'12345\x07",
    "",
)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_unigram_vocabulary_is_written_as_it_is(way, tmp_path):
    tokenizer = unigram(*WAYS[way])
    (steps, _) = WAYS[way]
    (exported,) = export(saved(tmp_path, tokenizer), "gguf-f32")
    checks = {check.name: check.passed for check in exported.proof.checks}
    assert checks["scores"] and checks["map of characters"] and checks["blanks"]
    file = GGUFFile(exported.path)
    assert file.value("tokenizer.ggml.model") == "t5" and file.value("tokenizer.ggml.token_type")[
        :4
    ] == [2, 3, 3, 3]
    assert (file.value("tokenizer.ggml.precompiled_charsmap") is None) == (MAP not in steps)
    assert file.value("tokenizer.ggml.remove_extra_whitespaces") == (
        SEVERAL in steps or ONE in steps
    )
    assert file.value("tokenizer.ggml.add_space_prefix") == (not way.startswith("no prefix"))


@pytest.mark.llama_cpp
@pytest.mark.parametrize("way", WAYS)
def test_llama_cpp_gives_the_same_ids(way, tmp_path):
    tokenizer = unigram(*WAYS[way])
    (exported,) = export(saved(tmp_path, tokenizer), "gguf-f32")
    assert {check.name: check.passed for check in exported.proof.checks}["ids of a conversation"]
    client = LlamaCpp(exported.path, vocabulary_only=True)
    for text in TEXTS:
        assert client.ids(text, special=False) == tokenizer(text)["input_ids"], text
    for text in ("<|turn|>it is<|turn|>  we are\n<|turn|>", "and</s> twice"):
        assert client.ids(text) == tokenizer(text)["input_ids"], text


@pytest.mark.llama_cpp
def test_a_blank_in_front_of_blanks_alone_is_found(tmp_path):
    """With a map that makes blanks of the ends of lines, which are alone between the turns of a
    conversation.
    """
    tokenizer = unigram([MAP, ESCAPE, BEFORE_BLANKS], metaspace())
    found = vocabulary_of(tokenizer, len(tokenizer), [2])
    assert found.notes == [
        "llama.cpp puts no blank in front of a text of blanks alone, which the tokenizer does"
    ]
    with pytest.raises(NotProved, match="ids of a conversation, llama.cpp: FAILED"):
        export(saved(tmp_path, tokenizer), "gguf-f32")


def test_the_map_of_the_tests_is_the_librarys():
    assert MAP.normalize_str("Naïve\tcafé…£\x07 漢") == "Naive cafe...GBP 漢"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"bytes_too": True}, "byte_fallback=True: llama.cpp writes the unknown token"),
        ({"steps": [STRIP, SEVERAL]}, "normalizer {'type': 'Strip'"),
        ({"steps": [normalizers.StripAccents()]}, "StripAccents"),
        ({"steps": [ESCAPE]}, "no blank in front of a text that begins with one"),
        ({"steps": [ONE]}, "where llama.cpp merges them it leaves none at the ends"),
        ({"steps": [ENDS, ONE], "splitter": metaspace("never")}, "puts one in front of a text"),
        ({"splitter": metaspace("first")}, "prepend_scheme='first'"),
        ({"splitter": pre_tokenizers.WhitespaceSplit()}, "splits a text nowhere"),
        ({"steps": [ENDS, MAP]}, "that is not the first step"),
    ],
)
def test_what_llama_cpp_does_otherwise_is_refused(changed, said):
    given = {"steps": [MAP, ENDS, ONE, ESCAPE, BEFORE_BLANKS], "splitter": metaspace(), **changed}
    with pytest.raises(NotExpressible) as error:
        vocabulary_of(unigram(**given), 400, [2])
    assert said in str(error.value) and "export merged weights (--to merged)" in str(error.value)


def test_pieces_across_words_are_refused_where_words_are_looked_at_apart():
    tokenizer = unigram([MAP, STRIP, SEVERAL], metaspace(split=True))
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    described["model"]["vocab"].append(["▁we▁are", -1.0])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(described)), unk_token="<unk>"
    )
    with pytest.raises(NotExpressible, match="piece '▁we▁are' goes across words"):
        vocabulary_of(tokenizer, 400, [2])


FAULTS = {
    "scores": lambda v: replace(v, scores=v.scores[::-1]),
    "map of characters": lambda v: replace(v, charsmap=None),
    "blanks": lambda v: replace(v, merges_blanks=False),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_a_unigram_vocabulary_are_found(name, tmp_path, monkeypatch):
    """Where it is written, though it was made rightly."""
    right = gguf.write_gguf
    monkeypatch.setattr(
        gguf,
        "write_gguf",
        lambda target, planned, tensors, v, *rest: right(
            target, planned, tensors, FAULTS[name](v), *rest
        ),
    )
    with pytest.raises(NotProved, match=f"{name}, gguf: FAILED"):
        export(saved(tmp_path, unigram(*WAYS["as transformers makes them"])), "gguf-f32")


@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", FAULTS)
def test_a_unigram_vocabulary_that_is_made_wrongly_is_found_by_llama_cpp(
    name, tmp_path, monkeypatch
):
    make = vocabulary_of
    monkeypatch.setattr(gguf, "vocabulary_of", lambda *given: FAULTS[name](make(*given)))
    with pytest.raises(NotProved, match="ids of .*, llama.cpp: FAILED"):
        export(saved(tmp_path, unigram(*WAYS["as transformers makes them"])), "gguf-f32")
