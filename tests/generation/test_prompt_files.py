"""Files of prompts, and lines of answers."""

import json

import pytest

from chronicals.data import DataError
from chronicals.generation.prompt_files import answer_lines, read_prompts
from chronicals.generation.requests import Answer


def written(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def turn(role, content):
    return {"role": role, "content": content}


def test_prompts_of_rows_and_lines(tmp_path):
    file = written(
        tmp_path / "prompts.jsonl",
        {"prompt": "what is 1?"},
        {"messages": [turn("user", "what is 2?"), turn("assistant", "the answer")]},
        {"messages": [turn("system", "be brief"), turn("user", "what is 3?")]},
        {"prompt": [turn("user", "what is 4?")]},
        {"conversations": [{"from": "human", "value": "what is 5?"}]},
        {"instruction": "add", "input": "6"},
        {"text": "seven is"},
    )
    *others, instruction, text = read_prompts(file)
    assert others == [
        "what is 1?",
        [turn("user", "what is 2?")],
        [turn("system", "be brief"), turn("user", "what is 3?")],
        [turn("user", "what is 4?")],
        [turn("user", "what is 5?")],
    ]
    assert "add" in instruction[0]["content"] and "6" in instruction[0]["content"]
    assert text == "seven is"
    lines = tmp_path / "prompts.txt"
    lines.write_text("one?\n\n  two?\n")
    assert read_prompts(lines) == ["one?", "  two?"]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"completion": "an answer"}, r"jsonl:2: has no prompt; give messages, instruction, or"),
        ({"prompt": " "}, r"jsonl:2: has no prompt"),
        ({"messages": [turn("assistant", "so")]}, r"jsonl:2: messages has an answer and no"),
        (["a"], r"jsonl:2: is list, not a row"),
        ({"messages": []}, r"jsonl:2: messages must be a list with at least one message"),
    ],
)
def test_a_row_without_a_prompt_is_named(tmp_path, row, fault):
    file = written(tmp_path / "prompts.jsonl", {"prompt": "what?"}, row)
    with pytest.raises(DataError, match=fault):
        read_prompts(file)


def test_a_file_without_prompts_or_of_no_known_kind_is_refused(tmp_path):
    with pytest.raises(DataError, match="has no prompt; give it a line or a row for each"):
        read_prompts(written(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="no such file"):
        read_prompts(tmp_path / "gone.jsonl")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": \n')
    with pytest.raises(DataError, match=r"broken.jsonl:1: does not parse as JSON"):
        read_prompts(broken)


def test_answers_stand_beside_their_prompts():
    said = Answer([5, 6], [-0.5, -0.25], [-1.0, -1.0], [0.1, 0.1], "stop")
    lines = [*answer_lines(["what?", [turn("user", "and?")]], [[("it", said)], [("no", said)] * 2])]
    found = [json.loads(line) for line in lines]
    answer = {
        "text": "it",
        "ended": "stop",
        "tokens": 2,
        "drawn_log_probability": -0.75,
        "full_log_probability": -2.0,
    }
    assert found[0] == {"prompt": "what?", "answers": [answer]}
    assert found[1]["messages"] == [turn("user", "and?")] and len(found[1]["answers"]) == 2
    (by_transformers,) = answer_lines(["what?"], [[("it", Answer([5, 6], ended="stop"))]])
    (without,) = json.loads(by_transformers)["answers"]
    assert without["drawn_log_probability"] is without["full_log_probability"] is None
