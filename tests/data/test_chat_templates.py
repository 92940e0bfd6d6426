"""A tokenizer without a chat template is given one by name or from a file, trains its answers
and their end, and saves it.
"""

import json
import logging
from pathlib import Path

import pytest
from public_conversations import CONVERSATIONS, refused, rendered
from tokenizers import AddedToken
from transformers import AutoTokenizer

import tiny
from chronicals.config import ConfigurationError, Recipe
from chronicals.config.foreign_values import TEMPLATES
from chronicals.data import DataError, TemplateError, Tokenizer
from chronicals.data.kinds.rows import normalise, plain_row
from chronicals.data.tokens.batch_encoding import BatchEncoder
from chronicals.data.tokens.chat_templates import (
    END_OF_TEXT,
    FAMILIES,
    GENERIC_TEMPLATES,
    TEMPLATE_FOLDER,
    TEMPLATE_SPELLINGS,
    with_chat_template,
)

ROLES = ("system", "user", "assistant", "user", "assistant")
CHAT = {"messages": [{"role": role, "content": f"{role} says"} for role in ROLES]}


def plain():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    return tokenizer


@pytest.mark.parametrize("name", GENERIC_TEMPLATES)
def test_named_ones_train_every_answer_and_its_end(name, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        tokenizer = with_chat_template(plain(), name)
    ids, trained = Tokenizer(tokenizer).encode(CHAT, "row 1")
    end = "<|im_end|>" if name == "chatml" else tokenizer.eos_token
    said = tokenizer.decode([token for token, kept in zip(ids, trained, strict=True) if kept])
    assert said == f"assistant says{end}" * 2
    assert (f"messages end with {end!r}" in caplog.text) == (name != "chatml")
    tokenizer.save_pretrained(tmp_path)
    assert Tokenizer(AutoTokenizer.from_pretrained(tmp_path)).encode(CHAT, "row 1") == (
        ids,
        trained,
    )


def test_chatml_is_chatml():
    tokenizer = with_chat_template(plain(), "chatml")
    text = tokenizer.apply_chat_template(
        CHAT["messages"][:2], tokenize=False, add_generation_prompt=True
    )
    assert (
        text == "<|im_start|>system\nsystem says<|im_end|>\n<|im_start|>user\nuser "
        "says<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_the_token_of_its_end_messages_end_with_the_end_of_text(caplog):
    tokenizer = plain()
    known = tokenizer.added_tokens_decoder
    lacking = type(
        "Lacking",
        (type(tokenizer),),
        {"added_tokens_decoder": property(lambda self: {0: known[0]})},
    )
    tokenizer.__class__ = lacking
    with caplog.at_level(logging.INFO):
        with_chat_template(tokenizer, "chatml")
    assert "messages end with '<|endoftext|>', for there is no <|im_end|>" in caplog.text
    assert "user says<|endoftext|>\n" in tokenizer.apply_chat_template(
        CHAT["messages"], tokenize=False
    )
    tokenizer.eos_token = None
    with pytest.raises(
        ConfigurationError, match="chat_template='chatml': the tokenizer has no eos_token"
    ):
        with_chat_template(tokenizer, "chatml")


def test_a_text_begins_with_the_tokenizers_own_beginning():
    tokenizer = plain()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    assert "bos_token" not in with_chat_template(tokenizer, "chatml").chat_template
    begins = {"__call__": lambda self, *texts, **how: {"input_ids": [self.bos_token_id]}}
    tokenizer.__class__ = type("Begins", (type(tokenizer),), begins)
    assert with_chat_template(tokenizer, "chatml").chat_template.startswith("{{ bos_token }}")


def test_a_file_is_read_and_one_that_is_no_template_is_refused(tmp_path, caplog):
    path = tmp_path / "own.jinja"
    path.write_text(
        "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    )
    with caplog.at_level(logging.INFO):
        tokenizer = with_chat_template(tiny.tokenizer(), str(path))
    assert (
        tokenizer.chat_template == path.read_text()
        and "replaces the tokenizer's own" in caplog.text
    )
    for content, words in (
        ("{% for %}", "line 1: "),
        ("hello", "holds no Jinja text"),
        (b"\xff{{", "not UTF-8"),
    ):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ConfigurationError, match=f"^chat_template=.*own.jinja.*{words}"):
            with_chat_template(plain(), str(path))
    with pytest.raises(
        ConfigurationError, match="chat_template='chatlm': cannot be read .*one of chatml, zephyr"
    ):
        with_chat_template(plain(), "chatlm")
    assert with_chat_template(plain(), None).chat_template is None


def test_a_recipe_has_the_field_and_keeps_the_file_to_be_found_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    for name, kept in (("own.jinja", str(tmp_path / "own.jinja")), ("chatml", "chatml")):
        recipe = Recipe(model="base", data="rows.jsonl", chat_template=name)
        recipe.write_to(tmp_path)
        assert Recipe.from_yaml(tmp_path / "resume.yaml").chat_template == kept
        assert not hasattr(recipe.config(), "chat_template")


# --- templates by name and public texts


PUBLIC = json.loads((Path(__file__).parent / "public_templates.json").read_text(encoding="utf-8"))

TALKS = ("single", "turns", "system", "rich tools")
"""Kinds of conversation without calls and thoughts, which every template trains if it writes
them.
"""

ONE_CALL = ("tools", "arguments as text", "content is null", "content is missing")

CALLING = {
    **dict.fromkeys(
        ("qwen2.5", "qwen3", "qwen3-instruct", "qwen3-vl", "llama4", "exaone4", "lfm2"),
        (*ONE_CALL, "system and tools", "several calls"),
    ),
    "deepseek-v3": ("tools", "arguments as text", "system and tools", "several calls"),
    **dict.fromkeys(("llama3.1", "llama3.2"), (*ONE_CALL, "system and tools")),
    **dict.fromkeys(("mistral-v3", "mistral-v3-tekken", "gpt-oss"), ONE_CALL),
}
"""By name the kinds of conversation with calls that are trained; others are refused."""

THINKING = {"qwen3": ("thinking",), "gpt-oss": ("thinking",)}
"""By name the kinds of conversation with thoughts that are trained; others are refused."""

UNTRAINABLE = {
    "mistral-v3": ("system",),
    "mistral-v3-tekken": ("system",),
    "gpt-oss": ("turns", "system"),
}
"""Kinds that a template writes in such a way that not every answer can be trained: Mistral moves
the system message to the question that is last, and gpt-oss ends the last answer alone with the
token at which generation stops."""

CALLED = "<|call|>"
"""Ends a call of gpt-oss, where its stop token ends an answer."""

OPENINGS = ("<think>\n\n</think>", "<|channel|>final<|message|>")
"""Written by templates into an answer before its content."""


def plain_of_public():
    """A tokenizer without a chat template that has a beginning and an end of text."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    return tokenizer


def with_family(name):
    """A tokenizer with the named template and all its special tokens."""
    tokenizer = plain_of_public()
    family = FAMILIES[name]
    needed = [token for token in (*family.tokens, family.stop) if token != END_OF_TEXT]
    tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in needed], special_tokens=True
    )
    return with_chat_template(tokenizer, name)


def trained_texts(tokenizer, kind):
    """What is trained of a conversation, a text for each run of tokens."""
    messages, tools = CONVERSATIONS[kind]
    ids, trained = Tokenizer(tokenizer).encode({"messages": messages, "tools": tools}, "row 1")
    runs = [[]]
    for token, kept in zip(ids, trained, strict=True):
        if kept:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def answers(kind):
    return [message for message in CONVERSATIONS[kind][0] if message["role"] == "assistant"]


@pytest.mark.parametrize("name", ["chatml", *FAMILIES])
def test_one_writes_what_its_public_text_writes(name):
    if name in FAMILIES:
        ours = (TEMPLATE_FOLDER / f"{FAMILIES[name].file}.jinja").read_text(encoding="utf-8")
    else:
        ours = with_chat_template(tiny.tokenizer(), name).chat_template
    for kind in CONVERSATIONS:
        written = rendered(ours, kind)
        public = PUBLIC[name]["written"][kind]
        for part in ("answered", "asked"):
            if refused(public[part]):
                assert refused(written[part]), (kind, part)
            else:
                assert written[part] == public[part], (kind, part)
    assert not refused(PUBLIC[name]["written"]["single"]["answered"])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_answers_and_their_end_are_trained_and_else_refused(name):
    tokenizer = with_family(name)
    stop = tokenizer.eos_token if FAMILIES[name].stop == END_OF_TEXT else FAMILIES[name].stop
    assert tokenizer.convert_ids_to_tokens(Tokenizer(tokenizer).template.stop) == stop
    trainable = {*CALLING.get(name, ()), *THINKING.get(name, ())}
    trainable |= {kind for kind in TALKS if not refused(PUBLIC[name]["written"][kind]["answered"])}
    trainable -= {*UNTRAINABLE.get(name, ())}
    for kind in CONVERSATIONS:
        if kind == "thought in the answer":
            continue  # each template writes and trains it in its own way
        if kind not in trainable:
            with pytest.raises(TemplateError):
                trained_texts(tokenizer, kind)
            continue
        texts = trained_texts(tokenizer, kind)
        assert len(texts) == len(answers(kind))
        for text, message in zip(texts, answers(kind)):
            assert text.endswith(CALLED if name == "gpt-oss" and "tool_calls" in message else stop)
            assert (message.get("content") or "").strip() in text
            said = text.removesuffix(stop)
            for opening in OPENINGS:
                said = said.removeprefix(opening)
            assert kind not in TALKS or said.strip() == message["content"].strip()
            for call in message.get("tool_calls", []):
                assert call["function"]["name"] in text


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_many_conversations_at_once_are_encoded_alike(name):
    encoder = Tokenizer(with_family(name))
    records = [{"messages": messages, "tools": tools} for messages, tools in CONVERSATIONS.values()]
    rows = [
        normalise(plain_row(record, kind), "chat", kind)
        for record, kind in zip(records, CONVERSATIONS)
    ]
    together = BatchEncoder(encoder).encode_batch(rows, list(CONVERSATIONS))
    for row, kind, encoded in zip(rows, CONVERSATIONS, together, strict=True):
        if isinstance(encoded, DataError):
            with pytest.raises(TemplateError):
                encoder.encode_normalised(row, kind)
            continue
        ids, trained = encoder.encode_normalised(row, kind)
        assert encoded[0].tolist() == ids and encoded[1].astype(bool).tolist() == trained


@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_that_the_tokenizer_lacks_is_named(name):
    family = FAMILIES[name]
    tokenizer = plain_of_public()
    if family.stop == END_OF_TEXT:
        tokenizer.add_tokens(
            [AddedToken(token, special=True) for token in family.tokens], special_tokens=True
        )
        tokenizer.eos_token = None
        lacking = "the tokenizer has no eos_token"
    else:
        known = {str(token) for token in tokenizer.added_tokens_decoder.values()}
        lacking = next(
            (token for token in (*family.tokens, family.stop) if token not in known), None
        )
        if lacking is None:
            pytest.skip("the tests' own tokenizer has all of ChatML")
    with pytest.raises(ConfigurationError) as error:
        with_chat_template(tokenizer, name)
    assert f"chat_template={name!r}" in str(error.value) and lacking in str(error.value)
    assert tokenizer.chat_template is None


def test_names_are_understood_as_others_spell_them():
    for spelled, name in {
        "llama-3": "llama3",
        "phi_35": "phi3.5",
        "Phi-3": "phi3",
        "mistral_v1": "mistral-v1",
    }.items():
        tokenizer = plain_of_public()
        family = FAMILIES[name]
        tokens = [token for token in (*family.tokens, family.stop) if token != END_OF_TEXT]
        tokenizer.add_tokens(
            [AddedToken(token, special=True) for token in tokens], special_tokens=True
        )
        assert (
            with_chat_template(tokenizer, spelled).chat_template == with_family(name).chat_template
        )
        assert (
            Recipe(model="base", data="rows.jsonl", chat_template=spelled).chat_template == spelled
        )
    assert len(TEMPLATE_SPELLINGS) == len(GENERIC_TEMPLATES) + len(FAMILIES)
    assert not {
        TEMPLATE_SPELLINGS.get(name.replace("_", "").replace("-", "").replace(".", ""))
        for name in TEMPLATES.split()
    } - {None}


def test_every_file_is_of_some_name_and_every_origin_is_complete():
    assert {path.stem for path in TEMPLATE_FOLDER.glob("*.jinja")} == {
        family.file for family in FAMILIES.values()
    }
    assert set(PUBLIC) == {"chatml", *FAMILIES}
    for origin in PUBLIC.values():
        assert origin["repository"].startswith("https://github.com/") and origin["path"].endswith(
            ".jinja"
        )
        assert len(origin["sha256"]) == 64 and (
            len(origin.get("commit", "")) == 40 or origin["package"].startswith("trl ")
        )
