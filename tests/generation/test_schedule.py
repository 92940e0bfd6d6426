"""Pages and their holders, and who is computed next."""

import pytest

from chronicals.generation.pages import PagePool
from chronicals.generation.requests import Request
from chronicals.generation.schedule import Copy, EngineSettings, Prompt, Sample, Schedule

PAGE = 4


def test_a_page_is_free_when_its_last_holder_releases_it():
    pool = PagePool(5)
    first = pool.take(3)
    second = pool.share(first[:2])
    assert len(pool.free) == 1 and 0 not in first
    pool.release(first)
    assert len(pool.free) == 2 and first == []
    pool.release(second)
    assert sorted(pool.free) == [1, 2, 3, 4]


def scheduled(prompts, answers=1, pages=100, limit=8, slots=8, chunk_tokens=100):
    """The schedule of prompts of these lengths, and the samples by request."""
    samples = []
    for order, length in enumerate(prompts):
        prompt = Prompt(Request([7] * length, limit, answers=answers), order, limit)
        samples += [Sample(prompt, number, 0) for number in range(answers)]
    pool = PagePool(pages + 1)
    settings = EngineSettings(None, PAGE, slots, chunk_tokens)
    return Schedule(samples, pool, settings), samples, pool


def compute(schedule):
    """As the engine does with all chunks of a pass."""
    chunks = schedule.chunks()
    for chunk in chunks:
        chunk.of.computed = chunk.end
    return [(chunk.of.age, chunk.start, chunk.end) for chunk in chunks]


def draw(samples):
    for one in samples:
        one.answer.tokens.append(9)


def step(schedule):
    """A decode step, of which all that run draw a token."""
    draw(schedule.running)
    schedule.make_room(1)
    for one in schedule.decoding():
        one.computed += 1


def test_long_prompts_are_computed_in_chunks():
    schedule, _, _ = scheduled([5, 9, 3], chunk_tokens=7)
    schedule.admit()
    assert compute(schedule) == [((0, -1), 0, 5), ((1, -1), 0, 2)]
    schedule.admit()
    assert [one.age for one in schedule.running] == [(0, 0)]
    assert compute(schedule) == [((1, -1), 2, 9)]
    assert compute(schedule) == [((2, -1), 0, 3)]


def test_answers_share_whole_pages_and_copy_the_last():
    schedule, samples, pool = scheduled([10], answers=3)
    schedule.admit()
    compute(schedule)
    schedule.admit()
    prompt = samples[0].prompt
    assert len(schedule.running) == 3
    for one in samples:
        assert one.pages[:2] == prompt.pages[:2] and one.pages[2] != prompt.pages[2]
    assert schedule.copies == [Copy(prompt.pages[2], one.pages[2]) for one in samples]
    assert [pool.holders[page] for page in prompt.pages] == [4, 4, 1]
    draw(samples)
    for one in samples:
        schedule.finish(one)
    assert len(pool.free) == 100


def test_a_single_answer_takes_its_prompts_pages():
    schedule, (one,), pool = scheduled([10])
    schedule.admit()
    pages = [*one.prompt.pages]
    compute(schedule)
    schedule.admit()
    assert one.pages == pages and not schedule.copies and len(pool.free) == 97
    schedule.finish(one)
    assert len(pool.free) == 100


def test_the_youngest_gives_its_pages_and_is_computed_again():
    schedule, samples, _ = scheduled([4, 4], pages=5)
    schedule.admit()
    compute(schedule)
    schedule.admit()
    assert len(schedule.running) == 2
    old, young = samples
    for _ in range(4):
        step(schedule)
    assert schedule.running == [old, young] and not schedule.evictions
    step(schedule)
    assert schedule.running == [old] and schedule.waiting == [young] and schedule.evictions == 1
    assert not young.pages and len(young.answer.tokens) == 5
    schedule.finish(old)
    schedule.admit()
    assert compute(schedule) == [((1, -1), 0, 4)]
    schedule.admit()
    assert compute(schedule) == [((1, 0), 4, 8)]  # the last token is computed by the next step
    assert schedule.decoding() == [young]


def test_an_answer_waits_for_a_slot():
    schedule, samples, _ = scheduled([4, 4, 4], slots=2)
    schedule.admit()
    compute(schedule)
    schedule.admit()
    assert schedule.running == samples[:2] and schedule.waiting == samples[2:]
    assert not samples[2].prompt.pages


@pytest.mark.parametrize("count", [0, 1, 4, 5])
def test_tokens_take_whole_pages(count):
    assert scheduled([1])[0].pages_of(count) == {0: 0, 1: 1, 4: 1, 5: 2}[count]
