"""A tokenizer without a chat template is given one by name or from a file, trains its answers
and their end, and saves it.
"""

import logging

import pytest
from transformers import AutoTokenizer

import tiny
from chronicals.config import ConfigurationError, Recipe
from chronicals.data import Tokenizer
from chronicals.data.tokens.chat_templates import GENERIC_TEMPLATES, with_chat_template

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
