"""Pages behind a sliding window are given back, and nothing that is generated changes."""

import random
from dataclasses import replace

import pytest
import torch

import families
from chronicals.generation import engine as engine_module
from chronicals.generation.engine import Engine
from chronicals.generation.layout import CacheLayout, TooLarge
from chronicals.generation.pages import SCRATCH_PAGE, LayerSizes, PagePool, WindowPool
from chronicals.generation.requests import Ending, Request
from chronicals.generation.sampling import Sampling
from chronicals.generation.schedule import EngineSettings, Prompt, Sample, Schedule

WINDOW = 12
PAGE = 2
NEW = 24
LENGTHS = (3, 1, 5, 2, 30, 4, 1, 17)


def prompts(lengths=LENGTHS):
    return [torch.randint(1, families.VOCABULARY, (n,)).tolist() for n in lengths]


FAMILIES = {
    "all layers": ("mistral", {"sliding_window": WINDOW}),
    "half of the layers": ("gemma2", {"sliding_window": WINDOW}),
    "half of the layers, with sinks": ("gpt_oss", {"sliding_window": WINDOW}),
}


def build(name):
    family, sizes = FAMILIES[name]
    model = families.build(family, **sizes).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def pools(monkeypatch):
    """The pools of the calls of an engine, in order."""
    made = []

    def pool(*given):
        made.append(PagePool(*given))
        return made[-1]

    monkeypatch.setattr(engine_module, "PagePool", pool)
    return made


def tightest(model, asked, **sizes):
    """Sizes of an engine with room for the largest request alone."""
    settings = EngineSettings(None, **{"page_size": PAGE, "slots": 6, "chunk_tokens": 4, **sizes})
    engine = Engine(model, settings)
    engine.generate([Request(asked[0].prompt, 1)])
    layout = CacheLayout(engine._layout.sizes, torch.device("cpu"), settings)
    alone = [layout.alone(Prompt(one, 0, one.max_new_tokens)) for one in asked]
    return replace(settings, cache_memory=max(map(layout.bytes, alone)))


def assert_all_are_free(pool):
    assert len(pool.free) == len(pool.holders) - 1
    for window in pool.windows:
        assert len(window.free) == window._count - 1 and not any(window._holders)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_text_is_that_of_transformers_when_places_run_out(name, steps, pools):
    model = build(name)
    asked = [Request(prompt, NEW) for prompt in prompts()]
    engine = Engine(model, tightest(model, asked, steps_a_look=steps))
    answers = engine.generate(asked)
    assert engine.evictions
    for request, (answer,) in zip(asked, answers):
        ids = torch.tensor([request.prompt])
        mask = torch.ones_like(ids)
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
        assert answer.tokens == out[0, ids.shape[1] :].tolist()
    (window,) = pools[-1].windows
    assert window._count - 1 < len(pools[-1].holders) - 1
    assert_all_are_free(pools[-1])


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("name", FAMILIES)
def test_no_result_depends_on_the_sizes(name, number, pools):
    """Several answers to a prompt share its places, and pass them at different times."""
    choose = random.Random(torch.initial_seed() + number)
    model = build(name)
    ending = Ending(tokens=choose.sample(range(families.VOCABULARY), 3))
    requests = [
        Request(prompt, choose.randint(1, NEW), Sampling(1.0, n), choose.randint(1, 4), n, ending)
        for n, prompt in enumerate(prompts())
    ]
    settings = tightest(
        model,
        requests,
        page_size=choose.choice([1, 2, 4]),
        slots=choose.choice([1, 3, 8]),
        chunk_tokens=choose.choice([1, 3, 16, 200]),
        steps_a_look=choose.choice([1, 2, 5]),
    )
    got = Engine(model, settings).generate(requests)
    assert_all_are_free(pools[-1])
    for ours, expected in zip(got, Engine(model).generate(requests)):
        assert [one.tokens for one in ours] == [one.tokens for one in expected]
        for one, other in zip(ours, expected):
            assert one.entropies == pytest.approx(other.entropies, abs=1e-4)


def test_a_long_answer_takes_no_more_than_its_window():
    """Where all layers have one; with half of them, half as much is left."""
    request = Request([5, 6, 7], 400)
    taken = {}
    for name in ("all layers", "half of the layers"):
        model = build(name)
        settings = EngineSettings(page_size=PAGE, chunk_tokens=4, steps_a_look=1)
        engine = Engine(model, settings)
        engine.generate([Request([5], 1)])
        layout = CacheLayout(engine._layout.sizes, torch.device("cpu"), settings)
        pages = layout.within(2**30, [Prompt(request, 0, 400)])
        token = sum(sizes.bytes for sizes in layout.sizes.values())
        taken[name] = layout.bytes(pages) / (402 * token)
    assert taken["all layers"] < 0.06
    assert 0.5 < taken["half of the layers"] < 0.53


def test_a_cache_too_small_for_the_window_is_refused():
    model = build("all layers")
    asked = [Request([5] * 30, 4, number=7)]
    fits = tightest(model, asked)
    Engine(model, fits).generate(asked)
    less = replace(fits, cache_memory=fits.cache_memory - 1)
    with pytest.raises(TooLarge, match="^request 7: 30 tokens and 4 new ones"):
        Engine(model, less).generate(asked)


def windowed(pages=100, places=40, window=6, page_size=4):
    return WindowPool(window, places + 1, pages + 1, page_size, "cpu")


def sample(pages, computed=0):
    prompt = Prompt(Request([7], 8), 0, 8)
    return Sample(prompt, 0, 0, pages=pages, computed=computed)


def test_a_place_is_given_back_when_no_later_token_sees_its_page():
    """Of token 9 on, the window of 6 begins at token 4, in the second page."""
    pool = windowed()
    one = sample([11, 12, 13, 14])
    pool.extend(one, 10)
    assert pool.reach(one) == (3 + 37) * 4 and pool._places[14] == SCRATCH_PAGE
    held = [pool._places[page] for page in (11, 12, 13)]
    one.computed = 8  # token 8 sees tokens 3 to 8
    pool.leave(one)
    assert [pool._places[page] for page in (11, 12, 13)] == held
    one.computed = 9
    pool.leave(one)
    assert [pool._places[page] for page in (11, 12, 13)] == [SCRATCH_PAGE, *held[1:]]
    assert held[0] in pool.free and len(pool.free) == 38
    pool.send()
    assert pool.table[[11, 12, 13]].tolist() == [SCRATCH_PAGE, *held[1:]]
    pool.forget(one)
    assert len(pool.free) == 40


def test_a_shared_place_stays_for_those_that_have_not_passed_it():
    pool = windowed()
    prompt = sample([11, 12, 13], computed=8)
    pool.extend(prompt, 8)
    fast, slow = sample([11, 12, 14], 8), sample([11, 12, 15], 8)
    for one in (fast, slow):
        pool.share(prompt, one, 2)
    fast.computed = 20
    pool.leave(fast)
    assert len(pool.free) == 38
    pool.forget(prompt)
    assert len(pool.free) == 38
    pool.forget(slow)
    assert len(pool.free) == 40
    pool.forget(fast)
    assert len(pool.free) == 40


def test_an_old_sequence_takes_the_places_of_the_youngest():
    """The oldest prompt goes on where a younger one has filled all places."""
    prompts = [Prompt(Request([7] * 40, 8), order, 8) for order in range(2)]
    samples = [Sample(prompt, 0, 0) for prompt in prompts]
    window = windowed(places=4, window=6)
    settings = EngineSettings(None, 4, slots=2, chunk_tokens=8)
    schedule = Schedule(samples, PagePool(101, [window]), settings)
    for prompt in reversed(prompts):
        prompt.pages = schedule._pool.take(10)
        schedule._placed(prompt, 8)
        schedule.advance(prompt, 8)
    assert not window.free
    (chunk,) = schedule.chunks()
    assert chunk.of is prompts[0] and chunk.end == 16 and not prompts[1].pages


def test_layers_of_the_same_window_are_one_group():
    sizes = {
        torch.nn.Linear(1, 1): LayerSizes(2, 8, 8, torch.float32, window=window)
        for window in (6, None, 6, 9)
    }
    layout = CacheLayout(sizes, torch.device("cpu"), EngineSettings(page_size=4))
    assert layout.page_bytes == {None: 512, 6: 1024, 9: 512}
