"""Decode steps as CUDA graphs beside eager ones, bit for bit; emulated without a card."""

import copy
import dataclasses
import logging
import time
from contextlib import nullcontext
from functools import partial
from itertools import chain, count

import pytest
import torch

import families
import tiny
from chronicals.generation.call import Call
from chronicals.generation.decode_graphs import DecodeGraphs
from chronicals.generation.engine import Engine
from chronicals.generation.requests import Ending, Request
from chronicals.generation.sampling import Sampling
from chronicals.generation.schedule import EngineSettings

NEW = 20
LENGTHS = (3, 40, 17, 16, 32, 1, 25, 9)
PAGE_BYTES = 16 * 2 * 2 * 2 * 16 * 4
"""Of keys and values of ``tiny.llama``: tokens, layers, both, heads, width, fp32."""


class Emulated:
    """What was captured runs again, and writes where it wrote when it was captured."""

    def __init__(self, recorder: "EmulatedRecorder", run: partial):
        self.recorder = recorder
        self.run = run
        (slots,) = run.args
        before = copy.deepcopy(slots)
        self.result = run()
        slots.fill(before)

    def replay(self):
        self.recorder.replays += 1
        for kept, new in zip(self.result, self.run()):
            kept.copy_(new)


class EmulatedRecorder:
    device = torch.device("cpu")
    on_stream = staticmethod(nullcontext)
    allocating = staticmethod(nullcontext)

    def __init__(self):
        self.captures = []
        self.replays = 0
        self.forgotten = 0

    def capture(self, run):
        graph = Emulated(self, run)
        (slots,) = run.args
        self.captures.append(slots.bucket)
        return graph, graph.result

    def forget(self):
        self.forgotten += 1


def eager(model, settings=None):
    """An engine whose steps have the sizes of graphs, and run eagerly."""
    engine = Engine(model, settings, EmulatedRecorder())
    engine._graphs.given_up = True
    return engine


@pytest.fixture(scope="module")
def model():
    return tiny.llama(eos_token_id=None).eval()


def requests():
    generator = torch.Generator().manual_seed(1)
    settings = [
        Sampling(1.0, seed=3),
        Sampling(),
        Sampling(1.5, seed=3, top_k=20),
        Sampling(repetition_penalty=1.7),
        Sampling(0.8, seed=5, top_p=0.9, repetition_penalty=1.5),
    ]
    return [
        Request(
            torch.randint(1, 300, (length,), generator=generator).tolist(),
            NEW + n % 3,
            settings[n % len(settings)],
            1 + n % 2,
            n,
        )
        for n, length in enumerate(LENGTHS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("memory", [None, 6 * PAGE_BYTES], ids=["room for all", "evictions"])
def test_graphs_and_eager_steps_are_bit_equal(model, memory, steps):
    settings = EngineSettings(memory, slots=6, chunk_tokens=50, steps_a_look=steps)
    plain = eager(model, settings)
    expected = plain.generate(requests())
    recorder = EmulatedRecorder()
    assert Engine(model, settings, recorder).generate(requests()) == expected
    assert len(recorder.captures) == len(set(recorder.captures)) >= 1
    assert recorder.replays > len(recorder.captures)
    assert bool(plain.evictions) == (memory is not None)
    assert not plain._graphs.recorder.captures


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3, None])
@pytest.mark.parametrize("memory", [None, 6 * PAGE_BYTES], ids=["room for all", "evictions"])
def test_answers_read_one_look_behind_are_those_read_at_once(model, memory, steps):
    """Without penalties. Some end at a stop token while the next steps are under way, and an answer
    whose pages go to another has tokens that the host has not read.
    """
    asked = [
        dataclasses.replace(
            request,
            sampling=Sampling(1.5, seed=3),
            ending=Ending(tokens=range(0, 300, 40)),
            max_new_tokens=NEW * 2,
        )
        for request in requests()
    ]
    settings = EngineSettings(memory, slots=6, chunk_tokens=50, steps_a_look=steps)
    expected = Engine(model, settings).generate(asked)
    engine = Engine(model, settings, EmulatedRecorder())
    seen = {}
    got = engine.generate(
        asked, lambda order, number, tokens: seen.update({(order, number): [*tokens]})
    )
    for answer, other in zip(chain(*got), chain(*expected), strict=True):
        assert (answer.tokens, answer.ended) == (other.tokens, other.ended)
        # products round differently where others have ended earlier
        for name in ("log_probabilities", "full_log_probabilities", "entropies"):
            assert getattr(answer, name) == pytest.approx(getattr(other, name), rel=1e-4)
    assert bool(engine.evictions) == (memory is not None)
    ends = {answer.ended for group in got for answer in group}
    assert ends == {"stop", "length"}
    assert seen == {
        (order, number): answer.tokens
        for order, group in enumerate(got)
        for number, answer in enumerate(group)
    }


def test_a_penalty_is_of_the_whole_text_where_steps_are_graphs(model):
    """With what the last look drew, which the host must have read before the next one."""
    asked = [
        Request([5 + n, 6, 7], NEW, Sampling(repetition_penalty=3.0), number=n) for n in range(4)
    ]
    settings = EngineSettings(steps_a_look=2)
    expected = Engine(model, settings).generate(asked)
    got = Engine(model, settings, EmulatedRecorder()).generate(asked)
    for (answer,), (other,) in zip(got, expected, strict=True):
        assert answer.tokens == other.tokens


def test_few_graphs_serve_a_call(model):
    """Answers end one after the other, and pages grow; each graph takes time to capture."""
    recorder = EmulatedRecorder()
    asked = [Request([5] * (3 + n), 4 + 5 * n, number=n) for n in range(20)]
    Engine(model, EngineSettings(page_size=4, slots=20), recorder).generate(asked)
    assert {bucket[0] for bucket in recorder.captures} == {20, 16, 4, 1}
    assert {bucket[1] for bucket in recorder.captures} <= {8, 32}


def test_the_next_steps_are_queued_before_what_was_drawn_is_read(model, monkeypatch):
    """All looks but the last; an answer that has ended is not decoded for ever."""
    happened = []
    read = Call._read
    decode = Call._decode
    monkeypatch.setattr(Call, "_read", lambda *given: (happened.append("read"), read(*given)))

    def noted(call):
        look = decode(call)
        happened.extend(["queued"] * (look is not None))
        return look

    monkeypatch.setattr(Call, "_decode", noted)
    engine = Engine(model, EngineSettings(steps_a_look=2), EmulatedRecorder())
    engine.generate([Request([5, 6, 7], 7)])
    # a first token, then looks of two steps each
    assert happened == ["queued", "read", "queued", "read", "queued", "read", "read"]


@pytest.mark.parametrize(("seconds", "tokens"), [(0, 1), (5, 5)])
def test_a_time_limit_keeps_what_was_drawn_before_it(model, monkeypatch, seconds, tokens):
    """A first token at least, and then looks of two steps; a second passes at each look."""
    ((whole,),) = Engine(model).generate([Request([5, 6, 7], 9)])
    monkeypatch.setattr(time, "monotonic", count().__next__)
    engine = Engine(model, EngineSettings(steps_a_look=2), EmulatedRecorder())
    ((answer,),) = engine.generate([Request([5, 6, 7], 9)], seconds=seconds)
    assert answer.ended == "time" and answer.tokens == whole.tokens[:tokens]
    assert len(answer.entropies) == tokens


@pytest.mark.slow
def test_graphs_of_latent_layers_are_bit_equal():
    latent = families.routed("DeepseekV3").eval()
    latent.generation_config.eos_token_id = None
    asked = [Request([5, 6, 7], NEW, number=0), Request([9] * 20, NEW, Sampling(1.0), number=1)]
    recorder = EmulatedRecorder()
    assert Engine(latent, recorder=recorder).generate(asked) == eager(latent).generate(asked)
    assert recorder.replays


def test_graphs_end_with_their_call(model):
    """Weights may lie elsewhere in the next one, which captures its own."""
    recorder = EmulatedRecorder()
    changed = copy.deepcopy(model)
    engine = Engine(changed, recorder=recorder)
    request = Request([5, 6, 7], NEW, Sampling(1.0, seed=4))
    first = engine.generate([request])
    assert first == Engine(model).generate([request])
    captures = [*recorder.captures]
    assert captures and recorder.forgotten == 1
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.data = parameter.data * 1.5
    second = engine.generate([request])
    assert second == Engine(changed).generate([request]) != first
    assert recorder.captures == captures * 2 and recorder.forgotten == 2


def test_a_step_that_cannot_be_captured_is_named_once(model, monkeypatch, caplog):
    def fails(recorder, run):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(EmulatedRecorder, "capture", fails)
    request = Request([5, 6, 7], NEW, Sampling(1.0, seed=4))
    engine = Engine(model, recorder=EmulatedRecorder())
    with caplog.at_level(logging.WARNING):
        found = [engine.generate([request]) for _ in range(2)]
    assert found == [Engine(model).generate([request])] * 2
    (said,) = caplog.messages
    assert said.startswith("use_cuda_graphs: answers are generated without graphs from here on")
    assert said.endswith("(operation not permitted when stream is capturing)")


def test_results_of_a_replay_outlive_the_next(model):
    """Two looks of three steps; what a graph draws is written to the same memory each time."""
    recorder = EmulatedRecorder()
    graphs = DecodeGraphs(recorder)
    taken = []
    usual = graphs.take

    def noted(slots, steps, step):
        taken.append(usual(slots, steps, step))
        return taken[-1]

    graphs.take = noted
    engine = Engine(model, EngineSettings(steps_a_look=3), recorder)
    engine._graphs = graphs
    engine.generate([Request([5, 6, 7], 7)])
    assert [len(drawn) for drawn in taken] == [3, 3]
    addresses = {step.tokens.data_ptr() for drawn in taken for step in drawn}
    assert len(addresses) == 6
