"""The CPU's share between two graphs: the bits of the same division without graphs."""

import copy

import pytest
import torch
from test_expert_offload import EACH, EXPERTS, FORMATS, SIZES, build, layers_of, slot_bytes
from test_expert_prediction import AtOnce

import chronicals
from chronicals.kernels import cuda_graphs
from chronicals.kernels.expert_dispatch import dispatch_to_experts
from chronicals.kernels.expert_glu import Gate
from chronicals.kernels.streamed_experts import Replacement
from chronicals.moe.offload import cpu_share
from chronicals.moe.offload.copies import CopyEngine
from chronicals.moe.offload.cpu_share import MOST_TOKENS, CpuShare, HostShare
from chronicals.moe.offload.looks import CpuLook
from chronicals.moe.offload.module import streamed_experts_of
from chronicals.patching.patch import patch_parts
from interpreted import kernels_run, only_interpreted


@pytest.fixture
def odd_by_cpu(monkeypatch):
    """The CPU computes experts of odd numbers: they never come into slots, whatever was before."""
    monkeypatch.setattr(CpuShare, "of_missing", lambda *given: [e for e in given[-1] if e % 2])


def numerical(model, slots):
    size = slots * slot_bytes(model)
    same = copy.deepcopy(model)
    given = {"ram": "1GiB", "device": "cpu", "predictor": None}
    streamed = chronicals.offload(same, vram=size, mode="numerical", **given)
    patch_parts(streamed)
    return streamed


def outputs(streamed, model, passes, in_graphs):
    """What the experts of each layer give for some passes."""
    found = []
    modules = [streamed.get_submodule(path) for path, _ in layers_of(model)]
    with torch.no_grad():
        for x, chosen, shares in passes:
            for module in modules:
                if in_graphs:
                    with cuda_graphs.capture_under_way(AtOnce()):
                        found.append(module(x, chosen, shares))
                else:
                    found.append(module(x, chosen, shares))
    return found


def passes_of(model, tokens, dtype=torch.float32):
    """Passes of one token of which all, some and none of the experts are odd, and of more tokens."""
    width = model.config.hidden_size
    chosen = [torch.tensor([pair]) for pair in ([1, 3], [2, 3], [4, 6], [5, 1])]
    chosen += [torch.rand(count, EXPERTS).topk(EACH).indices for count in tokens]
    return [
        (torch.randn(len(of), width).to(dtype), of, torch.rand(of.shape).to(dtype)) for of in chosen
    ]


def by_cpu(streamed):
    return sum(layer.by_cpu for layer in streamed.offload.report().layers)


def both_roads(model, passes):
    """What experts give without and with graphs, in which the CPU computes some of them."""
    found = []
    for in_graphs in (False, True):
        streamed = numerical(model, EXPERTS)
        found.append(outputs(streamed, model, passes, in_graphs))
        assert by_cpu(streamed) > 4
        streamed.offload.close()
    return found


def are_equal(found, others):
    return all(torch.equal(one, other) for one, other in zip(found, others, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_the_bits_of_the_same_division_without_graphs(name, odd_by_cpu, monkeypatch):
    """Also with biases and another gated unit."""
    model = build(name)
    passes = passes_of(model, (1, 2, 5, MOST_TOKENS))
    eager, in_graphs = both_roads(model, passes)
    assert are_equal(in_graphs, eager)
    monkeypatch.setattr(Replacement, "put_into", lambda self, z: z)
    _, not_replaced = both_roads(model, passes)
    assert not are_equal(not_replaced, eager)


@only_interpreted
@pytest.mark.slow
@pytest.mark.parametrize("form", ["16 bit", "nf4"])
def test_the_bits_of_kernels(form, odd_by_cpu):
    """Whose products read records in place."""
    sizes = {**SIZES, "hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64}
    model = build("Qwen3Moe", **sizes).bfloat16()
    if form in FORMATS:
        FORMATS[form](model)
    with kernels_run():
        eager, in_graphs = both_roads(model, passes_of(model, (1, 2), torch.bfloat16))
    assert are_equal(in_graphs, eager)


def source_of_one(slots=6):
    streamed = numerical(build("Qwen3Moe"), slots)
    [(_, module), *_] = streamed_experts_of(streamed)
    return streamed, module.source


def test_copies_are_asked_for_before_the_cpu_computes(odd_by_cpu, monkeypatch):
    """One wait of the host, then the bus's part, then the CPU's."""
    seen = []

    def noting(of, name, word):
        own = getattr(of, name)

        def noted(*given, **named):
            seen.append(word)
            return own(*given, **named)

        monkeypatch.setattr(of, name, noted)

    streamed, source = source_of_one()
    noting(type(streamed.offload.engine.current_stream), "synchronize", "wait")
    noting(CopyEngine, "copy_before_products", "copies")
    noting(HostShare, "outputs", "cpu")
    x = torch.randn(1, source.sizes[1])
    with cuda_graphs.capture_under_way(AtOnce()):
        source.in_graph(dispatch_to_experts(torch.tensor([[2, 3]]), EXPERTS), x, Gate())
    assert seen == ["wait", "copies", "cpu"]
    streamed.offload.close()


def test_rows_that_were_replaced_once_are_not_again(odd_by_cpu):
    """A look serves all steps of its graphs."""
    streamed, source = source_of_one()
    x = torch.randn(2, source.sizes[1])

    def chosen(*experts):
        return dispatch_to_experts(torch.tensor(experts), EXPERTS)

    first = chosen([1, 2], [3, 2])
    asked = streamed.offload.engine.to_be_read(0, first.bounds, x)
    look = CpuLook(source, asked, first, x, Gate())
    look.bring()
    look.send()
    assert look.replacement.is_replaced.tolist() == [
        True,
        False,
        False,
        True,
    ]  # experts 1, 2, 2 and 3
    for step, marks in ((chosen([4, 6], [4, 6]), []), (chosen([7, 4], [7, 5]), [1, 2, 3])):
        look.read[:], look._order[:] = step.bounds, step.order_S
        look.bring()
        look.send()
        assert look.replacement.is_replaced.nonzero()[:, 0].tolist() == marks
    rows = HostShare(source, [5, 7]).outputs(x[[1, 0, 1]], [1, 2], Gate())
    assert torch.equal(look.outputs[1:], rows)
    streamed.offload.close()


def test_what_has_no_share_is_captured_without_one(odd_by_cpu):
    """Experts with adapters, more tokens, and the exact mode: nothing is replaced, nothing sent."""
    streamed, source = source_of_one(EXPERTS)

    def captured(tokens, gate):
        x = torch.randn(tokens, source.sizes[1])
        chosen = torch.rand(tokens, EXPERTS).topk(EACH).indices
        with cuda_graphs.capture_under_way(AtOnce()):
            return source.in_graph(dispatch_to_experts(chosen, EXPERTS), x, gate).by_cpu

    assert captured(MOST_TOKENS, Gate()) is not None
    assert captured(MOST_TOKENS, None) is None and captured(MOST_TOKENS + 1, Gate()) is None
    streamed.offload.engine.cpu = None
    assert captured(1, Gate()) is None
    streamed.offload.close()


def seconds_of(monkeypatch, *taken):
    """Let the CPU's products take so many seconds, one call after another."""
    share = CpuShare(1 << 20)
    share.bus_seconds = share.cpu_seconds = 1.0
    clock = iter([edge for seconds in taken for edge in (0.0, seconds)])
    monkeypatch.setattr(cpu_share.time, "perf_counter", lambda: next(clock))
    for _ in taken:
        with share.computing(1):
            pass
    return share.cpu_seconds


def test_one_slow_call_does_not_decide(monkeypatch):
    """The first one is not counted, and no later one for more than twice the mean."""
    assert seconds_of(monkeypatch, 900.0) == 1.0
    assert seconds_of(monkeypatch, 900.0, 0.5) == pytest.approx(0.9)
    assert seconds_of(monkeypatch, 900.0, 900.0) == pytest.approx(1.2)


def test_the_longer_part_is_as_short_as_it_can_be():
    """Also where the nearest number would leave the CPU with more than the bus."""
    for bus in (1.0, 3.0, 5.0):
        for cpu in (0.4, 1.0, 2.9, 7.0):
            share = CpuShare(1, bus_seconds=bus, cpu_seconds=cpu)
            share.bus_seconds, share.cpu_seconds = bus, cpu
            for count in range(1, 9):
                longest = [max(n * cpu, (count - n) * bus) for n in range(count + 1)]
                taken = len(share.of_missing(0, range(count)))
                assert longest[taken] == min(longest)


@pytest.mark.parametrize("bus", [1.0, 1000.0])
def test_neither_is_left_without_an_expert_for_ever(bus, monkeypatch):
    monkeypatch.setattr(cpu_share, "DIVISIONS_A_TRIAL", 3)
    share = CpuShare(1)
    share.bus_seconds, share.cpu_seconds = bus, 1000.0 / bus
    taken = [share.of_missing(0, [7, 8]) for _ in range(6)]
    usual = [] if bus == 1.0 else [7, 8]
    assert [len(experts) for experts in taken] == [len(usual), len(usual), 1] * 2
    assert taken[0] == taken[1] == usual
    assert share.of_missing(0, []) == []


def test_what_the_cpu_computed_before_is_copied():
    """So that what tokens choose again gets a slot, whatever its number and whatever else is missing."""
    share = CpuShare(1)
    share.bus_seconds = share.cpu_seconds = 1.0
    assert share.of_missing(0, [1, 2, 6, 7]) == [6, 7]
    assert share.of_missing(1, [1, 2, 6, 7]) == [6, 7]  # another layer's
    assert share.of_missing(0, [1, 3, 6, 7]) == [1, 3]
    assert share.of_missing(0, [4, 5]) == [5]
    assert share.of_missing(0, [1, 5, 6]) == [6]
