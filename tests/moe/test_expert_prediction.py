"""Predictors that are right, half right and always wrong: bits stay, and copies come in their order."""

import pytest
import torch
from test_expert_offload import (
    EACH,
    EXPERTS,
    assert_same_bits,
    build,
    held_by,
    ids_of,
    offloaded,
    resident,
)

from chronicals.kernels import cuda_graphs
from chronicals.kernels.expert_dispatch import dispatch_to_experts
from chronicals.moe.offload import copies, engine
from chronicals.moe.offload.looks import HostLook
from chronicals.moe.offload.module import streamed_experts_of
from chronicals.moe.offload.prediction import Predictor
from mutants import mutant

RIGHT = {"right": EACH, "half right": EACH // 2, "wrong": 0}
"""How many of the experts that one token chooses are named."""


class Noting(Predictor):
    """Names nothing, and notes what layers chose."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def expected(self, layer, told):
        self.seen.append(self.last(layer - 1))
        return []


class Knowing(Predictor):
    """Names the first experts that the next layer will choose, behind some that it will not.

    Args:
        seen: what all layers will choose.
        right: how many names are right, of one token.
    """

    def __init__(self, seen, right):
        super().__init__()
        self.seen = seen
        self.right = right
        self.calls = 0

    def expected(self, layer, told):
        assert self.last(layer - 1) == self.seen[self.calls], "another pass than was noted"
        self.calls += 1
        if self.calls == len(self.seen):
            return []
        chosen = self.seen[self.calls]
        others = [expert for expert in reversed(range(EXPERTS)) if expert not in chosen]
        wrong = max(0, EACH - self.right)
        return [*others[:wrong], *chosen[: len(chosen) - wrong]]


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("words", RIGHT)
@pytest.mark.parametrize("slots", [EACH + 2, 7, 12])
@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss", "native"])
def test_no_bit_changes(name, slots, words):
    model = build(name)
    passes = [ids_of(tokens, rows=1) for tokens in (1, 1, 1, 9, 1, 1, 1, 1)]
    noting = Noting()
    noted = offloaded(model, slots, predictor=noting)
    for ids in passes:
        assert_same_bits(resident(model), noted, ids)
    noted.offload.close()
    knowing = Knowing(noting.seen, RIGHT[words])
    streamed = offloaded(model, slots, predictor=knowing)
    for ids in passes:
        assert_same_bits(resident(model), streamed, ids)
    assert knowing.calls == len(noting.seen)
    assert sum(layer.prefetched for layer in streamed.offload.report().layers) > 0
    streamed.offload.close()


class AtOnce:
    """A capture in which what the host does around a launch is done where the cut is."""

    def cut(self, decide, behind):
        decide()
        behind()


def looks_of(slots, predictor, **options):
    """An offloaded model of two layers, and a look of each as between two graphs."""
    model = build("Qwen3Moe")
    streamed = offloaded(model, slots, predictor=predictor, **options)
    read = torch.zeros(2, EXPERTS + 1, dtype=torch.int32)
    made = [HostLook(streamed.offload.engine, layer, read[layer]) for layer in range(2)]
    return streamed, made


def choose(look, *experts):
    """Let one token of a look choose these experts."""
    rows = torch.zeros(EXPERTS + 1, dtype=torch.int32)
    rows[[expert + 1 for expert in experts]] = 1
    look.read[:] = rows.cumsum(0).int().numpy()


class NotedStream(copies.HostStream):
    """Keeps the events that it waits for."""

    def __init__(self):
        self.waited = []

    def wait_event(self, event):
        self.waited.append(event)


class Named(Predictor):
    """Names the same experts of each layer."""

    def __init__(self, *names):
        super().__init__()
        self.names = names

    def expected(self, layer, told):
        return list(self.names)


def test_products_wait_for_what_was_predicted_and_chosen(monkeypatch):
    """And not for a predicted expert that was not chosen, each of which has a copy of its own."""
    monkeypatch.setattr(copies, "HostStream", NotedStream)
    monkeypatch.setattr(copies, "PREFETCH_GROUP_BYTES", 1)
    wrong = mutant(engine, "self._copies.wait_for(held, stream)", "pass", "ExpertEngine.bring")
    for bring, right in ((None, True), (wrong.ExpertEngine.bring, False)):
        streamed, (first, second) = looks_of(8, Named(5, 6))
        if bring is not None:
            monkeypatch.setattr(engine.ExpertEngine, "bring", bring)
        choose(first, 0, 1)
        choose(second, 5, 7)
        first.bring()
        first.note()
        held = held_by(streamed.offload.engine)
        copied = {
            expert: streamed.offload.engine._copies._awaited[held[1, expert]] for expert in (5, 6)
        }
        second.bring()
        second.send()
        held = held_by(streamed.offload.engine)
        assert (second._stream.waited == [copied[5]]) == right
        assert second.slots[5] == held[1, 5] and second.slots[7] == held[1, 7]
        streamed.offload.close()


@pytest.mark.parametrize(("words", "missing"), [("right", 0), ("half right", 1), ("wrong", 2)])
def test_experts_that_were_named_are_not_missing(words, missing):
    """Each layer's two experts of three steps, no expert twice."""
    steps = [(0, 1), (2, 3), (4, 5)]
    seen = [list(step) for step in steps for _ in range(2)]
    streamed, (first, second) = looks_of(8, Knowing(seen, RIGHT[words]))
    for step in steps:
        choose(first, *step)
        choose(second, *step)
        for look in (first, second):
            look.bring()
            look.note()
    *_, last = streamed.offload.report().layers
    assert last.misses == missing * len(steps) and last.used == (EACH - missing) * len(steps)
    assert (last.prefetched > last.used) == (missing > 0)
    streamed.offload.close()


def test_demanded_copies_go_before_predicted_ones():
    streamed, (first, second) = looks_of(8, Named(5, 6))
    of = streamed.offload.engine
    choose(first, 0, 1)
    first.bring()
    assert set(held_by(of)) == {(0, 0), (0, 1)}
    first.note()
    assert set(held_by(of)) == {(0, 0), (0, 1), (1, 5), (1, 6)}
    choose(second, 5, 2)
    second.bring()
    second.note()  # no layer follows
    report = streamed.offload.report().layers
    assert [layer.misses for layer in report] == [2, 1]
    assert [(layer.prefetched, layer.used) for layer in report] == [(0, 0), (2, 1)]
    streamed.offload.close()


def run_steps(looks, predictor):
    """Twelve steps of the same two experts, before each of which another one is expected."""
    for step in range(12):
        predictor.names = [step % 6]
        for look in looks:
            choose(look, 6, 7)
        for look in looks:
            look.bring()
            look.note()
            yield look.layer


def test_what_was_expected_and_not_chosen_gives_up_its_slot():
    """So that nothing is missing of what is always chosen, and what is named is fetched for long."""
    predictor = Named()
    streamed, looks = looks_of(6, predictor)
    list(run_steps(looks, predictor))
    _, last = streamed.offload.report().layers
    assert (last.prefetched, last.misses) == (12, 2)
    streamed.offload.close()


def test_experts_whose_products_run_keep_their_slots():
    """Also where the policy would have them go first."""
    trace = {(layer, expert): int(expert < 6) for layer in range(2) for expert in range(EXPERTS)}
    predictor = Named()
    streamed, looks = looks_of(5, predictor, policy="static", trace=trace)
    for layer in run_steps(looks, predictor):
        assert {(layer, 6), (layer, 7)} <= set(held_by(streamed.offload.engine))
    assert streamed.offload.report().layers[1].prefetched > 0
    streamed.offload.close()


def test_host_work_behind_a_launch_is_called_when_its_graph_is_launched(monkeypatch):
    called = []

    class Graph:
        made = 0

        def __init__(self):
            self.number = Graph.made
            Graph.made += 1

        def replay(self):
            called.append(self.number)

        def capture_begin(self, **_):
            pass

        def capture_end(self):
            pass

    class Whole:
        cuda_graph = Graph()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    capture = cuda_graphs._CudaCapture(Whole(), None, "thread_local")
    with cuda_graphs.capture_under_way(capture):
        cuda_graphs.cut_capture(lambda: called.append("bring"), lambda: called.append("ahead"))
        cuda_graphs.cut_capture(lambda: called.append("decide"))
    cuda_graphs.Graph(capture.steps, []).replay()
    assert called == [0, "bring", 1, "ahead", "decide", 2]


def test_a_capture_is_cut_with_both():
    """What a layer lets the host do around the launch of its products."""
    model = build("Qwen3Moe")
    streamed = offloaded(model, 8)
    [(_, module), _] = streamed_experts_of(streamed)
    cuts = []

    class Capture:
        def cut(self, decide, behind):
            cuts.append((decide, behind))

    x = torch.randn(1, module.source.sizes[1])
    to = dispatch_to_experts(torch.tensor([[3, 5]]), EXPERTS)
    with cuda_graphs.capture_under_way(Capture()):
        assert module.source.in_graph(to, x, None) is not None
    [(decide, behind)] = cuts
    assert decide.__func__ is HostLook.bring and behind.__func__ is HostLook.note
    streamed.offload.close()


def test_many_tokens_that_are_captured_have_their_experts_in_waves():
    """Where not all that they may choose have slots at once."""
    for slots, tokens, is_one in ((6, 3, True), (6, 4, False), (EXPERTS, 4, True)):
        streamed = offloaded(build("Qwen3Moe"), slots)
        module = next(module for _, module in streamed_experts_of(streamed))
        to = dispatch_to_experts(torch.tensor([[3, 5]] * tokens), EXPERTS)
        x = torch.randn(tokens, module.source.sizes[1])
        with cuda_graphs.capture_under_way(AtOnce()):
            assert (module.source.in_graph(to, x, None) is not None) == is_one
        streamed.offload.close()


@pytest.mark.parametrize("predictor", [None, "last"])
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_what_is_noted_behind_the_launch_is_noted_as_without_graphs(policy, predictor):
    """Hits, misses, copies and who gives up a slot; of tokens whose experts are often missing."""
    model = build("Qwen3Moe")
    width = model.config.hidden_size
    passes = [
        (torch.randn(1, width), torch.rand(1, EXPERTS).topk(EACH).indices, torch.rand(1, EACH))
        for _ in range(40)
    ]
    found = []
    for in_graphs in (False, True):
        streamed = offloaded(model, 6, policy=policy, predictor=predictor)
        modules = [module for _, module in streamed_experts_of(streamed)]
        with torch.no_grad():
            for given in passes:
                for module in modules:
                    if in_graphs:
                        with cuda_graphs.capture_under_way(AtOnce()):
                            module(*given)
                    else:
                        module(*given)
        found.append((streamed.offload.report().layers, held_by(streamed.offload.engine)))
        streamed.offload.close()
    assert found[0] == found[1]
    assert all(layer.hits and layer.misses and layer.evictions for layer in found[0][0])


def test_nothing_is_noted_before_the_launch():
    """The device waits until then; experts have their slots, and no line or count is written."""
    streamed, (first, _) = looks_of(8, Named(5, 6))
    choose(first, 0, 1)
    first.bring()
    assert set(held_by(streamed.offload.engine)) == {(0, 0), (0, 1)}
    report = streamed.offload.report()
    assert (report.steps, report.misses, report.bytes) == (0, 0, 0)
    first.note()
    report = streamed.offload.report()
    assert (report.steps, report.misses, report.layers[0].loads) == (1, 2, 2)
    streamed.offload.close()
