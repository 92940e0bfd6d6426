import pytest

import tiny
from chronicals.generation import Chat, Trained


@pytest.fixture
def seen(monkeypatch):
    """The messages of each question, which are answered by their number."""
    asked = []

    def answer(trained, messages, say=None, **settings):
        asked.append(messages)
        if messages[-1]["content"] == "fails":
            raise ValueError("too long")
        return f"answer {len(asked)}"

    monkeypatch.setattr("chronicals.generation.answer.generate_answer", answer)
    return asked


def turn(role, content):
    return {"role": role, "content": content}


def test_a_chat_remembers_until_it_is_reset(seen):
    chat = Chat(Trained(tiny.llama(), tiny.tokenizer()), "be brief")
    opening = turn("system", "be brief")
    chat.ask("one")
    chat.ask("two")
    assert seen[1] == [
        opening,
        turn("user", "one"),
        turn("assistant", "answer 1"),
        turn("user", "two"),
    ]
    with pytest.raises(ValueError, match="too long"):
        chat.ask("fails")
    assert chat.messages == [*seen[1], turn("assistant", "answer 2")]
    chat.reset()
    chat.ask("three")
    assert seen[-1] == [opening, turn("user", "three")]


def test_a_system_prompt_changes_what_is_asked():
    trained = Trained(tiny.llama(), tiny.tokenizer())
    replies = {
        system: Chat(trained, system, max_new_tokens=12).ask("what is 3?")
        for system in (None, "count", "sing a song")
    }
    assert len(set(replies.values())) > 1


def test_a_model_of_plain_text_has_no_system_prompt_and_no_turns():
    trained = Trained(tiny.llama(), tiny.tokenizer(), kinds=("text",))
    with pytest.raises(ValueError, match="^system='be brief': this model continues plain text"):
        Chat(trained, "be brief")
    chat = Chat(trained, max_new_tokens=5)
    assert chat.ask("one") == chat.ask("one") and chat.messages == []
