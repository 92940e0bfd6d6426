"""Other names of prompt and completion are recognised and said; completions are rendered as
chats only where that is asked.
"""

import dataclasses

import pytest

import tiny
from chronicals.config import ChronicalsConfig, ConfigurationError, DataSource, Recipe
from chronicals.config.data_source import ROW_FIELDS
from chronicals.data import Tokenizer, build_store
from chronicals.data.kinds.rows import kind_of, normalise
from chronicals.data.reading.records import READ_FIELDS

PAIRS = [("prompt", "response"), ("question", "answer"), ("query", "response"), ("input", "output")]
PLAIN = {"prompt": "what is 2?", "completion": "two"}
CHAT = {
    "messages": [{"role": "user", "content": "what is 2?"}, {"role": "assistant", "content": "two"}]
}


def store_of(rows, folder, **options):
    return build_store(rows, Tokenizer(tiny.tokenizer(), **options), 64, folder)


@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_are_completions_and_it_is_said_how_they_were_read(tmp_path, pair):
    row = {**dict(zip(pair, PLAIN.values())), "source": "a book"}
    assert kind_of(row, "row 1") == "completion"
    normal = normalise(row, "completion", "row 1")
    assert (normal["prompt"], normal["completion"]) == tuple(PLAIN.values())
    store = store_of([row], tmp_path)
    assert store.document(0)[0].tolist() == Tokenizer(tiny.tokenizer()).encode(PLAIN, "row 1")[0]
    said = store.report.findings.get("columns_recognised")
    if pair[0] == "prompt":
        assert said is None
    else:
        assert (
            said.count == 1
            and said.example == f"row 1: {pair[0]} is the prompt, {pair[1]} the completion"
        )
        assert store.report.level("columns_recognised", {}) == "info"


def test_a_pair_beside_a_label_stays_a_completion(tmp_path):
    """Under its usual names it would be a judged answer; the kind is found once, by the names
    that it came with.
    """
    row = {"question": "what is 2?", "answer": "two", "label": 1}
    assert Tokenizer(tiny.tokenizer()).encode(row, "row 1") == Tokenizer(tiny.tokenizer()).encode(
        PLAIN, "row 1"
    )
    assert store_of([row], tmp_path).report.kinds == {"completion": 1}


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"instruction": "add"}, "instruction"),
        ({"text": "all of it"}, "text"),
        ({"messages": CHAT["messages"]}, "chat"),
        ({"prompt": "a", "completion": "b"}, "completion"),
    ],
)
def test_other_kinds_come_first(more, kind):
    row = {"input": "1 2", "output": "3", "question": "a", "answer": "b", **more}
    assert kind_of(row, "row 1") == kind
    if kind == "completion":
        assert normalise(row, kind, "row 1")["prompt"] == "a" == row["prompt"]


def test_completions_are_plain_and_warned_about_unless_they_are_asked_to_be_chats(tmp_path):
    rows = [PLAIN, {"question": "what is 2?", "answer": "two", "system": "be kind"}]
    plain = store_of(rows, tmp_path)
    assert plain.report.kinds == {"completion": 2} and plain.report.count("plain_completion") == 2
    assert plain.report.level("plain_completion", {}) == "warning"
    chats = store_of(rows, tmp_path, completions_as_chat=True)
    assert (
        chats.key != plain.key
        and chats.report.kinds == {"completion": 2}
        and chats.kinds == ["instruction"]
    )
    assert not {"plain_completion", "unread_field"} & chats.report.findings.keys()
    system = {"messages": [{"role": "system", "content": "be kind"}, *CHAT["messages"]]}
    encoder = Tokenizer(tiny.tokenizer(), completions_as_chat=True)
    for number, chat in enumerate((CHAT, system)):
        assert (
            chats.document(number)[0].tolist()
            == encoder.encode(chat, "row")[0]
            == encoder.encode(rows[number], "row")[0]
        )
    without = tiny.tokenizer()
    without.chat_template = None
    assert not build_store(rows, Tokenizer(without), 64, tmp_path).report.count("plain_completion")
    assert not store_of(rows, tmp_path, train_on="all").report.count("plain_completion")


def test_names_of_columns_in_a_recipe_are_those_of_configurations():
    assert ROW_FIELDS == READ_FIELDS


@pytest.mark.parametrize(
    "columns",
    [
        ["question=prompt,answer=completion"],
        ["question=prompt", "answer=completion"],
        {"prompt": "question", "completion": "answer"},
    ],
)
def test_columns_of_a_recipe_name_those_of_every_source_without_its_own(columns, tmp_path):
    own = DataSource("b.csv", columns={"text": "body"})
    recipe = Recipe(
        model="base", data=["a.jsonl=2", own], validation_data="c.jsonl", columns=columns
    )
    named = {"prompt": "question", "completion": "answer"}
    assert recipe.columns == named
    first = DataSource("a.jsonl", weight=2, columns=named)
    assert recipe.sources == ([first, own], [DataSource("c.jsonl", columns=named)])
    recipe.to_yaml(tmp_path / "recipe.yaml")
    assert Recipe.from_yaml(tmp_path / "recipe.yaml").sources == recipe.sources
    assert "columns" not in {field.name for field in dataclasses.fields(recipe.config())}
    assert Recipe(model="base", data="a.jsonl").sources == ("a.jsonl", None)


def test_columns_may_be_named_the_other_way_round_where_that_is_clear():
    assert Recipe(model="m", data="d", columns=["prompt=Frage", "Antwort=completion"]).columns == {
        "prompt": "Frage",
        "completion": "Antwort",
    }


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (["question"], "'question' is not THEIRS=OURS"),
        (["a=b"], "'b' is no field that is read; there are answer, attention_mask"),
        (["a=prompt,b=prompt"], "'prompt' is named twice"),
        ({"promt": "question"}, "'promt' is no field that is read"),
    ],
)
def test_columns_that_cannot_be_are_refused(columns, words):
    with pytest.raises(ConfigurationError, match=f"columns.*{words}"):
        Recipe(model="m", data="d", columns=columns)


def test_completions_as_chat_is_a_field():
    assert Tokenizer.configured(
        tiny.tokenizer(), ChronicalsConfig(completions_as_chat=True)
    ).completions_as_chat


@pytest.mark.parametrize("as_chat", [False, True])
def test_pictures_are_refused_however_completions_are_rendered(tmp_path, as_chat):
    rows = [{"question": "what is 2?", "answer": "two", "image": "cat.png"}]
    assert (
        store_of(rows, tmp_path, completions_as_chat=as_chat).report.count("pictures_or_sound") == 1
    )
