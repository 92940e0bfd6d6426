import pytest

from chronicals.generation.ending import Stream


def handed_on(texts, stop_strings=()):
    parts = []
    stream = Stream(parts.append, stop_strings)
    seen = []
    for text in texts[:-1]:
        stream(text)
        seen.append("".join(parts))
    stream.end(texts[-1])
    return seen, "".join(parts)


def test_parts_come_as_they_are_made_and_join_to_the_text():
    assert handed_on(["a", "a b", "a b c", "a b c."]) == (["a", "a b", "a b c"], "a b c.")


def test_half_a_character_waits_for_its_rest():
    assert handed_on(["na\ufffd", "na\u00ef", "na\u00efve"]) == (["na", "na\u00ef"], "na\u00efve")


def test_a_character_that_never_comes_is_shown_at_the_end():
    assert handed_on(["a\ufffd", "a\ufffd"]) == (["a"], "a\ufffd")


@pytest.mark.parametrize("said, text", [(["a U", "a Use"], "a Use"), (["a U", "a User"], "a")])
def test_what_may_become_a_stop_string_waits(said, text):
    assert handed_on([*said, text], ["User:"]) == (["a"] * len(said), text)
