"""The engine against transformers' ``generate``, alone, together, and with too little memory."""

import copy
import random

import pytest
import torch

import families
import tiny
from chronicals.generation import engine
from chronicals.generation.call import NotFinite
from chronicals.generation.engine import Engine
from chronicals.generation.layout import TooLarge
from chronicals.generation.requests import Ending, Request
from chronicals.generation.sampling import Sampling
from chronicals.generation.schedule import EngineSettings
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.lora import layers as lora_layers
from chronicals.lora.layers import linear_adapters
from chronicals.models import PresentedModel
from chronicals.quantization import Linear4bit, Packed, packed_layers

LENGTHS = (3, 40, 17, 16, 32, 1, 25, 60, 9, 7, 11, 33, 48, 2, 5, 19, 50)
NEW = 20
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
"""Of keys and values of ``tiny.llama``: layers, both, heads, width, fp32."""

PAGE = 16


def prompts(size=300, lengths=LENGTHS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, size, (n,), generator=generator).tolist() for n in lengths]


def pages(count):
    """Memory for so many pages."""
    return count * PAGE * TOKEN_BYTES


@pytest.fixture(scope="module")
def model():
    """Its text varies: larger weights than a model begins with."""
    model = tiny.llama(eos_token_id=None).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def by_transformers(model, prompt, new=NEW, **settings):
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        attention_mask=torch.ones_like(ids),
        **settings,
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def greedy(model):
    return [by_transformers(model, prompt) for prompt in prompts()]


def tokens(answers):
    return [[answer.tokens for answer in of_request] for of_request in answers]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("memory", [None, pages(9)], ids=["room for all", "evictions"])
def test_greedy_text_is_that_of_transformers(model, greedy, memory, steps):
    settings = EngineSettings(memory, PAGE, slots=6, chunk_tokens=50, steps_a_look=steps)
    engine = Engine(model, settings)
    answers = engine.generate([Request(prompt, NEW) for prompt in prompts()])
    assert tokens(answers) == [[text] for text in greedy]
    assert {answer.ended for (answer,) in answers} == {"length"}
    assert bool(engine.evictions) == (memory is not None)


def assert_alike(got, expected):
    assert tokens(got) == tokens(expected)
    for of_request, others in zip(got, expected):
        for answer, other in zip(of_request, others):
            for name in ("log_probabilities", "full_log_probabilities", "entropies"):
                pair = torch.tensor([getattr(answer, name), getattr(other, name)])
                assert (pair[0] - pair[1]).abs().max() < 2e-4, name


@pytest.mark.parametrize("memory", [None, pages(9)], ids=["spare", "none spare"])
def test_a_packed_weight_is_dequantised_once_where_memory_is_spare(model, memory, monkeypatch):
    """And its copy is dropped with the call. What pages leave of the memory is spare."""
    model = families.replaced(copy.deepcopy(model), Linear4bit.of)
    calls = []
    own = Packed.dense
    monkeypatch.setattr(Packed, "dense", lambda self: calls.append(0) or own(self))
    counts = []
    for new in (2, 6):
        calls.clear()
        settings = EngineSettings(memory, PAGE)
        Engine(model, settings).generate([Request(prompt, new) for prompt in prompts()[:3]])
        counts.append(len(calls))
    layers = [layer for _, layer in packed_layers(model)]
    in_each_step = memory is not None
    probed_and_copied = 2 * len(layers)
    assert (counts[1] > counts[0] >= probed_and_copied) == in_each_step
    assert (counts[1] == counts[0] == probed_and_copied) == (not in_each_step)
    assert all(layer.dense_copy is None for layer in layers)


def test_the_backend_of_attention_is_the_one_that_is_asked_for(model):
    asked = [Request(prompts()[0], 3)]
    usual = tokens(Engine(model).generate(asked))
    assert (
        tokens(Engine(model, EngineSettings(attention_backend="kernel")).generate(asked)) == usual
    )
    with pytest.raises(ValueError, match="backend='flash-attn-4' lacks device=cpu"):
        Engine(model, EngineSettings(attention_backend="flash-attn-4")).generate(asked)


def test_norms_of_dora_are_computed_once_for_all_steps(model, monkeypatch):
    """And again in the next call, for adapters that have been trained meanwhile."""
    model = apply_lora(copy.deepcopy(model), LoRAConfig(rank=4, dropout=0.0, use_dora=True))
    adapted = [layer for _, layer in linear_adapters(model)]
    calls = []
    own = lora_layers.crossed
    monkeypatch.setattr(lora_layers, "crossed", lambda *given: calls.append(0) or own(*given))
    for new in (2, 6):
        for layer in adapted:
            torch.nn.init.normal_(layer.lora_B)
        calls.clear()
        (answers,) = tokens(Engine(model).generate([Request(prompts()[1], new)]))
        assert len(calls) == 2 * len(adapted)  # by the probe, and for all steps
        assert answers == [by_transformers(model.eval(), prompts()[1], new)]
        assert all(layer.held_norms is None for layer in adapted)


def drawn_requests(answers=1):
    settings = [
        Sampling(1.0, seed=3),
        Sampling(),
        Sampling(1.5, seed=3, top_k=20),
        Sampling(0.8, seed=5, top_p=0.9, repetition_penalty=1.5),
        Sampling(repetition_penalty=1.7),
        Sampling(1.0, seed=3, min_p=0.1),
    ]
    return [
        Request(prompt, NEW, settings[n % len(settings)], answers, n)
        for n, prompt in enumerate(prompts())
    ]


@pytest.mark.slow
def test_draws_do_not_depend_on_order_batch_or_evictions(model):
    requests = drawn_requests()
    engine = Engine(model, EngineSettings(pages(9), PAGE, slots=6, chunk_tokens=50))
    crowded = engine.generate(requests)
    assert engine.evictions
    turned = Engine(model).generate(requests[::-1])[::-1]
    alone = [Engine(model).generate([request])[0] for request in requests]
    assert_alike(crowded, alone)
    assert_alike(turned, alone)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [None, pages(10)], ids=["room for all", "evictions"])
def test_answers_to_a_prompt_are_those_of_requests_of_their_own(model, memory):
    requests = [request for request in drawn_requests(3) if len(request.prompt) in (16, 17, 40, 1)]
    engine = Engine(model, EngineSettings(memory, PAGE, slots=6, chunk_tokens=50))
    together = engine.generate(requests)
    assert bool(engine.evictions) == (memory is not None)
    for request, answers in zip(requests, together):
        assert len(answers) == 3
        drawn = request.sampling.temperature > 0
        assert len({(*answer.tokens,) for answer in answers}) == (3 if drawn else 1)
    wide = Engine(model).generate(requests)
    assert_alike(together, wide)
    firsts = Engine(model).generate(
        [Request(r.prompt, NEW, r.sampling, 1, r.number) for r in requests]
    )
    assert_alike(firsts, [answers[:1] for answers in wide])


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("number", range(8))
def test_no_result_depends_on_the_sizes_of_the_engine(model, number):
    """Random sizes and requests; the cache has room for the largest request, and little more."""
    choose = random.Random(torch.initial_seed() + number)
    page = choose.choice([1, 2, 4, 16])
    ending = Ending(tokens=choose.sample(range(300), 20))
    choices = [Sampling(), Sampling(1.2, seed=5), Sampling(0.9, top_k=30, repetition_penalty=1.4)]
    requests = [
        Request(
            prompt, choose.randint(1, 14), choose.choice(choices), choose.randint(1, 5), n, ending
        )
        for n, prompt in enumerate(prompts(lengths=choose.sample(LENGTHS, 5), seed=number))
    ]
    # the last token is not stored; a shared page that is not full exists twice
    needed = max(-(-(len(r.prompt) + r.max_new_tokens - 1) // page) + 1 for r in requests)
    settings = EngineSettings(
        (needed + choose.choice([0, 1, 5])) * page * TOKEN_BYTES,
        page,
        slots=choose.choice([1, 2, 3, 8]),
        chunk_tokens=choose.choice([1, 3, 16, 200]),
        steps_a_look=choose.choice([1, 2, 5]),
    )
    assert_alike(Engine(model, settings).generate(requests), Engine(model).generate(requests))


def test_generation_within_training_on_packs(model, greedy):
    """As a callback generates: the attention of training is installed, and comes back."""
    batch = families.hand_made_batch([torch.tensor(prompt) for prompt in prompts()[:3]])
    with torch.no_grad(), PresentedModel(model, True, True).attending_documents() as presented:
        before = presented.hidden_states(batch)
        answers = Engine(model).generate([Request(prompt, 5) for prompt in prompts()[:3]])
        after = presented.hidden_states(batch)
    assert tokens(answers) == [[text[:5]] for text in greedy[:3]]
    assert torch.equal(before, after)


def test_a_prompt_is_computed_once_for_all_its_answers(model):
    engine = Engine(model)
    engine.generate([Request(prompt, 4, Sampling(1.0), 5) for prompt in prompts()])
    assert engine.computed_tokens == sum(LENGTHS)


def test_probabilities_are_those_of_the_models_own_forward_pass(model):
    request = Request(prompts()[2], NEW, Sampling(1.3, seed=2, top_k=40))
    ((answer,),) = Engine(model).generate([request])
    ids = torch.tensor([[*request.prompt, *answer.tokens]])
    logits = model(ids).logits[0, len(request.prompt) - 1 : -1].detach()
    full = logits.log_softmax(-1)
    chosen = full.gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(answer.full_log_probabilities), chosen, atol=1e-4)
    entropies = torch.special.entr(full.exp()).sum(-1)
    assert torch.allclose(torch.tensor(answer.entropies), entropies, atol=1e-4)
    scores = logits / 1.3
    left_out = scores < scores.topk(40).values[:, -1:]
    drawn = scores.masked_fill(left_out, float("-inf")).log_softmax(-1)
    chosen = drawn.gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(answer.log_probabilities), chosen, atol=1e-4)


def packed_log_probabilities(model, requests, answers):
    """Of the answers' tokens, by the forward pass of training on packs."""
    texts = [torch.tensor([*r.prompt, *a.tokens]) for r, (a,) in zip(requests, answers)]
    batch = families.hand_made_batch(texts)
    with torch.no_grad(), PresentedModel(model, True, True).attending_documents() as presented:
        logits = presented.head.logits(presented.hidden_states(batch))
    full = logits.log_softmax(-1).split([len(text) for text in texts])
    return torch.cat(
        [
            rows[len(r.prompt) - 1 : -1].gather(-1, torch.tensor(a.tokens)[:, None])[:, 0]
            for rows, r, (a,) in zip(full, requests, answers)
        ]
    )


@pytest.mark.slow
def test_probabilities_in_bf16_agree_with_those_of_training(model):
    """No further from the packed pass in bf16 than that is from the packed pass in fp32."""
    half = copy.deepcopy(model).bfloat16()
    requests = [Request(prompt, NEW, Sampling(1.0, seed=1)) for prompt in prompts()]
    answers = Engine(half).generate(requests)
    ours = torch.cat([torch.tensor(answer.full_log_probabilities) for (answer,) in answers])
    in_half, in_full = (
        packed_log_probabilities(one, requests, answers)
        for one in (half, copy.deepcopy(half).float())
    )
    rounding = (in_half - in_full).abs().mean()
    assert 0 < (ours - in_half).abs().mean() <= rounding < 0.2


def test_a_repetition_penalty_is_of_the_requests_own_text(model):
    """Two requests, of which one has a penalty, in both orders, beside each other."""
    prompt, other = prompts()[2], prompts()[7]
    penalty = Sampling(repetition_penalty=1.7)
    asked = [Request(prompt, NEW, penalty), Request(other, NEW), Request(other, NEW, penalty)]
    expected = [
        by_transformers(model, prompt, repetition_penalty=1.7),
        by_transformers(model, other),
        by_transformers(model, other, repetition_penalty=1.7),
    ]
    engine = Engine(model, EngineSettings(steps_a_look=4))
    assert tokens(engine.generate(asked)) == [[text] for text in expected]
    assert tokens(engine.generate(asked[::-1])) == [[text] for text in expected[::-1]]


@pytest.mark.parametrize("steps", [1, 4])
def test_an_answer_ends_at_a_stop_token_or_a_stop_string(model, steps):
    tokenizer = tiny.tokenizer()
    drawn = Sampling(1.5, seed=4)
    ((free,),) = Engine(model).generate([Request(prompts()[0], NEW, drawn)])
    text = free.tokens
    stop = next(token for n, token in enumerate(text) if n > 3 and token not in text[:n])
    end = text.index(stop)
    decoded = [tokenizer.decode([token]) for token in text]
    # the last character of one token and the first of the next
    place = next(
        n
        for n in range(5, NEW - 1)
        if decoded[n].isascii()
        and decoded[n + 1].isascii()
        and decoded[n][-1] + decoded[n + 1][0] not in tokenizer.decode(text[: n + 1])
    )
    across = decoded[place][-1] + decoded[place + 1][0]
    requests = [
        Request(prompts()[0], NEW, drawn, ending=ending)
        for ending in (
            Ending(tokens=[stop]),
            Ending(tokenizer, strings=["never", across]),
            Ending(),
        )
    ]
    settings = EngineSettings(steps_a_look=steps)
    by_token, by_string, whole = (
        answer for (answer,) in Engine(model, settings).generate(requests)
    )
    assert by_token.tokens == text[: end + 1] and by_token.ended == "stop"
    assert by_string.tokens == text[: place + 2] and by_string.ended == "stop"
    assert whole.tokens == text and whole.ended == "length"
    assert len(by_token.entropies) == end + 1


def test_the_model_is_as_before_and_pages_stay_for_the_next_call(model):
    model.train()
    before = {name: [*vars(module)] for name, module in model.named_modules()}
    engine = Engine(model)
    first = engine.generate([Request(prompts()[1], 3)])
    made = engine._layers
    assert tokens(engine.generate([Request(prompts()[1], 3)])) == tokens(first)
    assert engine._layers is made
    engine.release()
    assert not engine._layers and engine.generate([]) == []
    assert tokens(engine.generate([Request(prompts()[1], 3)])) == tokens(first)
    assert {name: [*vars(module)] for name, module in model.named_modules()} == before
    assert all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
    model.eval()


def test_a_call_for_whose_pages_there_was_no_room_is_forgotten(model, monkeypatch):
    """The next one makes its pages, whether or not they are those that were asked for before."""
    run = Engine(model)
    request = Request([1, 2, 3], 4, Sampling(temperature=0.0))
    longer = Request([1, 2, 3] * 40, 4, Sampling(temperature=0.0))
    expected = run.generate([request])

    def no_room(*_):
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as full:
        full.setattr(engine, "LayerPages", no_room)
        with pytest.raises(torch.OutOfMemoryError):
            run.generate([longer])
    found = run.generate([request])
    assert [one.tokens for one in found[0]] == [one.tokens for one in expected[0]]


def test_a_request_that_does_not_fit_the_cache_is_named(model):
    engine = Engine(model, EngineSettings(cache_memory=pages(3)))
    fits = Request([5] * 40, 9, number=1)
    assert len(engine.generate([fits])[0][0].tokens) == 9
    with pytest.raises(TooLarge, match=r"^request 7: 40 tokens and 10 new ones take .* \(cache_"):
        engine.generate([fits, Request([5] * 40, 10, number=7)])
    with pytest.raises(TooLarge, match="^request 8: 40 tokens and 9 new ones"):
        engine.generate([Request([5] * 40, 9, Sampling(1.0), 2, number=8)])


def test_logits_that_are_not_finite_are_named(model):
    broken = copy.deepcopy(model)
    text = by_transformers(model, prompts()[0])
    place = next(n for n in range(1, NEW) if text[n] not in text[:n] + prompts()[0])
    with torch.no_grad():
        broken.get_input_embeddings().weight[text[place]] = float("nan")
    # the embedding that is broken is read after the token has been drawn
    requests = [Request([5, 6], 2, number=3), Request(prompts()[0], NEW, number=4)]
    with pytest.raises(NotFinite, match=f"^request 4, token {place + 2}: .* are not finite; "):
        Engine(broken).generate(requests)


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"prompt": []}, "^request 2: the prompt is empty"),
        ({"max_new_tokens": 0}, "^request 2: max_new_tokens=0 must be at least 1"),
        ({"answers": 0}, "^request 2: answers=0 must be at least 1"),
    ],
)
def test_requests_out_of_range_are_refused(asked, message):
    with pytest.raises(ValueError, match=message):
        Request(**{"prompt": [5], "max_new_tokens": 3, "number": 2} | asked)


def test_every_answer_gets_a_token_within_no_time(model, greedy):
    answers = Engine(model, EngineSettings(slots=4)).generate(
        [Request(prompt, NEW) for prompt in prompts()], seconds=0.0
    )
    found = [answer for (answer,) in answers]
    assert all(answer.tokens == text[: len(answer.tokens)] for answer, text in zip(found, greedy))
    assert all(answer.tokens for answer in found) and found[-1].ended == "time"
