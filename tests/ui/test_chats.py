"""Conversations: kept in a file, answered by processes that know nothing between two questions."""

import asyncio
import sys

import pytest

from chronicals.ui import chats as module
from chronicals.ui.chats import Chats, conversation_of
from chronicals.ui.place import Place, write_record

SPEAKER = """
import json, os, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["prompt"] == "die":
        print("error model: gone", file=sys.stderr, flush=True)
        sys.exit(1)
    if asked["prompt"] == "close":
        print("error model: mute", file=sys.stderr, flush=True)
        os.close(1)
        time.sleep(60)
    if asked["prompt"] == "garble":
        print("no json", flush=True)
        continue
    if asked["prompt"] == "fail":
        print(json.dumps({"error": "too long"}), flush=True)
        continue
    said = [message["content"] for message in asked["messages"]]
    print(json.dumps({"part": "pa"}), flush=True)
    print(json.dumps({"answer": f"{sys.argv[1]} {asked['prompt']} {said} {os.getpid()}"}), flush=True)
"""


@pytest.fixture
def chats(tmp_path, monkeypatch):
    """Chats whose processes are the program above, with the model's name."""
    monkeypatch.setattr(
        module, "command_of", lambda arguments: [sys.executable, "-c", SPEAKER, arguments[1]]
    )
    return Chats(Place(tmp_path.resolve()))


async def asked(chats, question, models):
    chats.ask(question, models)
    while chats.is_answering:
        await asyncio.sleep(0.01)
    return [answer["text"].rpartition(" ") for answer in chats.turns[-1]["answers"]]


def test_two_models_get_the_question_and_what_was_said_before(chats):
    async def talk():
        first = await asked(chats, "one", ["a", "b"])
        second = await asked(chats, "two", ["a", "b"])
        await chats.end()
        return first, second

    first, second = asyncio.run(talk())
    assert [text for text, _, _ in first] == ["a one []", "b one []"]
    own = f"a one [] {first[0][2]}"
    assert second[0][0] == f"a two {['one', own]}"
    assert second[0][2] == first[0][2]  # the same process


def test_errors_are_told_and_are_not_part_of_the_conversation(chats):
    async def talk():
        await asked(chats, "fail", ["a"])
        await asked(chats, "die", ["a"])
        last = await asked(chats, "three", ["a"])  # by another process
        await chats.end()
        return last

    last = asyncio.run(talk())
    errors = [turn["answers"][0]["error"] for turn in chats.turns]
    assert errors == ["too long", "error model: gone", ""]
    assert last[0][0] == "a three []"


@pytest.mark.parametrize(
    ("question", "message"), [("close", "error model: mute"), ("garble", "Expecting value")]
)
def test_a_process_that_cannot_answer_is_not_asked_again(chats, question, message):
    """Also one that lives on, as a dying one does until its exit status is known."""

    async def talk():
        first = await asked(chats, "one", ["a"])
        await asked(chats, question, ["a"])
        last = await asked(chats, "three", ["a"])
        await chats.end()
        return first, last

    first, last = asyncio.run(talk())
    errors = [turn["answers"][0]["error"] for turn in chats.turns]
    assert message in errors[1]
    assert errors[2] == ""
    assert last[0][2] != first[0][2]  # another process


def test_a_third_model_ends_the_process_of_the_first(chats):
    async def talk():
        for model in ("a", "b", "c"):
            await asked(chats, "hi", [model])
        alive = [key[1] for key in chats._speakers]
        await chats.end()
        return alive

    assert asyncio.run(talk()) == ["b", "c"]


def test_an_answer_that_a_killed_server_left_is_not_said(chats):
    unfinished = {"model": "a", "text": "par", "done": False}
    whole = {"model": "a", "text": "yes", "done": True, "error": ""}
    write_record(
        chats.file,
        [{"question": "x", "answers": [whole]}, {"question": "y", "answers": [unfinished]}],
    )
    assert not chats.is_answering
    assert conversation_of(chats.turns, 0) == [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "yes"},
    ]
    assert conversation_of(chats.turns, 1) == []
    chats.clear()
    assert chats.turns == []
