"""Streamed experts beside those that are all there: results and gradients to the bit."""

import gc
import weakref

import pytest
import torch

from chronicals.kernels import streamed_experts as module
from chronicals.kernels.cuda_graphs import capture_under_way
from chronicals.kernels.expert_glu import Gate
from chronicals.kernels.fused_experts import ExpertWeights, fused_experts
from chronicals.kernels.streamed_experts import Adapter, Wave
from mutants import mutant
from recorded_graphs import Recorder

TOKENS, EACH, EXPERTS, WIDTH, INNER, RANK = 23, 2, 7, 24, 10, 3


class Divided:
    """Weights that come in waves of some experts each."""

    sizes = EXPERTS, WIDTH, INNER
    in_fp8 = False
    has_output_bias = True

    def __init__(self, first, second, ends):
        self.first, self.second, self.ends = first, second, ends
        self.passes = []

    def look(self, bounds, x):
        assert x.shape == (TOKENS, WIDTH)
        return bounds.tolist()

    def in_graph(self, to, x, gate):
        return None

    def on_host(self, bounds, tokens):
        return None

    def waves(self, bounds, backward=False):
        self.passes.append(backward)
        for first, end in zip((0, *self.ends), (*self.ends, EXPERTS)):
            if bounds[first] < bounds[end]:
                yield Wave(first, end, *(self.within(w, first, end) for w in self.weights))

    @property
    def weights(self):
        return self.first, self.second

    def within(self, weights, first, end):
        slots = torch.arange(first, end, dtype=torch.int32, device=weights.weight.device)
        return weights._replace(slots=slots)


def case(device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    # the last expert gets no token, and the fourth all
    experts = torch.stack(
        [torch.randperm(EXPERTS - 2, generator=generator)[:1] for _ in range(TOKENS)]
    )
    experts = torch.cat((torch.where(experts == 3, 5, experts), torch.full_like(experts, 3)), 1)
    weights = (
        ExpertWeights(drawn(EXPERTS, 2 * INNER, WIDTH), bias=drawn(EXPERTS, 2 * INNER)),
        ExpertWeights(drawn(EXPERTS, WIDTH, INNER), bias=drawn(EXPERTS, WIDTH)),
    )
    leaves = [
        drawn(TOKENS, WIDTH),
        drawn(TOKENS, EACH).sigmoid(),
        drawn(EXPERTS, RANK, WIDTH),
        drawn(EXPERTS, 2 * INNER, RANK),
        drawn(EXPERTS, RANK, INNER),
        drawn(EXPERTS, WIDTH, RANK),
    ]
    return experts.to(device), weights, [leaf.requires_grad_() for leaf in leaves]


def resident(experts, weights, leaves):
    x, shares, a1, u1, a2, u2 = leaves
    first = weights[0]._replace(down=a1, up=u1, scale=0.5)
    second = weights[1]._replace(down=a2, up=u2, scale=2.0)
    return fused_experts(x, experts, shares, first, second, Gate("silu"))


def by(of, source, experts, leaves):
    x, shares, a1, u1, a2, u2 = leaves
    adapters = Adapter(a1, u1, 0.5), Adapter(a2, u2, 2.0)
    return of.streamed_experts(x, experts, shares, source, *adapters, Gate("silu"))


def with_gradients(y, leaves):
    dy = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype)
    return [y, *torch.autograd.grad(y, leaves, dy)]


ENDS = [(), (3,), (1, 2, 3, 4, 5, 6), (4,)]


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_in_any_waves(dtype, ends, device):
    experts, weights, leaves = case(device, dtype)
    expected = with_gradients(resident(experts, weights, leaves), leaves)
    source = Divided(*weights, ends)
    got = with_gradients(by(module, source, experts, leaves), leaves)
    assert source.passes == [False, True]
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


def test_nothing_is_kept_without_a_gradient(device):
    experts, weights, leaves = case(device)
    with torch.no_grad():
        y = by(module, Divided(*weights, (3,)), experts, leaves)
    assert torch.equal(y, resident(experts, weights, leaves)) and not y.requires_grad


def test_shapes_that_do_not_fit(device):
    experts, weights, leaves = case(device)
    leaves[0] = leaves[0][:, :-1]
    with pytest.raises(ValueError, match=r"expected \[T, 24\]"):
        by(module, Divided(*weights, ()), experts, leaves)


class WavesAtReplay(Divided):
    """Waves that end elsewhere each time the host looks."""

    def __init__(self, first, second):
        super().__init__(first, second, ())

    def look(self, bounds, x):
        turn = sum(not backward for backward in self.passes)
        self.ends = [(3,), (1, 4), (), (2, 3, 6)][turn % 4]
        return super().look(bounds, x)


def replayed(of, source, experts, leaves, others):
    """Results of a captured pass for other tokens, in the memory of the capture."""
    recorder = Recorder([])
    graph, results = recorder.capture(
        lambda: with_gradients(by(of, source, experts, leaves), leaves)
    )
    assert recorder.cuts == 2 and source.passes == []
    for other_experts, other_leaves in others:
        with torch.no_grad():
            experts.copy_(other_experts)
            for leaf, other in zip(leaves, other_leaves):
                leaf.copy_(other)
        graph.replay()
        yield [result.clone() for result in results]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a card has graphs of its own")
def test_a_captured_pass_looks_at_each_replay():
    """In other waves, for other choices and values, in the memory of the capture."""
    device = torch.device("cpu")
    experts, weights, leaves = case(device)
    generator = torch.Generator().manual_seed(5)
    others = []
    for _ in range(3):
        drawn = torch.rand(TOKENS, EXPERTS, generator=generator).topk(EACH).indices
        others.append((drawn, [torch.randn(p.shape, generator=generator) for p in leaves]))
    source = WavesAtReplay(*weights)
    given = zip(others, replayed(module, source, experts, leaves, others), strict=True)
    for (chosen, values), got in given:
        inputs = [value.requires_grad_() for value in values]
        expected = with_gradients(resident(chosen, weights, inputs), inputs)
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one, other)
    assert source.passes == [False, True] * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card has graphs of its own")
def test_a_captured_pass_without_gradients_looks_too():
    """Of more tokens than have their experts in one wave."""
    experts, weights, leaves = case(torch.device("cpu"))
    source = WavesAtReplay(*weights)
    recorder = Recorder([])
    with torch.no_grad():
        graph, y = recorder.capture(lambda: by(module, source, experts, leaves))
        for _ in range(2):
            experts.copy_((experts + 1) % EXPERTS)
            graph.replay()
            assert torch.equal(y, resident(experts, weights, leaves))
    assert recorder.cuts == 1 and source.passes == [False, False]


def test_what_is_captured_keeps_no_memory(device, monkeypatch):
    """Between the graphs the host knows only where it lies; later layers use it again."""
    experts, weights, leaves = case(device)
    made = []
    usual = torch.Tensor.new_empty

    def noted(self, *sizes, **named):
        found = usual(self, *sizes, **named)
        made.append(weakref.ref(found))
        return found

    decisions = []

    class Capture:
        def cut(self, decide, behind):
            decisions.append(decide)

    monkeypatch.setattr(torch.Tensor, "new_empty", noted)
    with capture_under_way(Capture()):
        results = with_gradients(by(module, Divided(*weights, ()), experts, leaves), leaves)
    del results
    gc.collect()
    assert len(decisions) == 2 and len(made) > 4
    assert not [there for there in made if there() is not None]


MUTATIONS = {
    "outputs at the first places": (
        "outputs.z[rows.at]",
        "outputs.z[: rows.at.stop - rows.at.start]",
    ),
    "adapters of the first experts": (
        "within = slice(wave.first, wave.end)",
        "within = slice(0, wave.end - wave.first)",
    ),
    "shares in the order of pairs": ("shares.reshape(-1)[to.order_S]", "shares.reshape(-1)"),
    "gradients of shares in the order of places": (
        "gradients.shares_S[to.places_S]",
        "gradients.shares_S",
    ),
    "no biases in the gradient of shares": ("bias is not None", "False"),
    "gradients of the first adapter at the first experts": (
        "gradients.u1[rows.within]",
        "gradients.u1[: rows.to.experts]",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_faults_are_found(name, device):
    wrong = mutant(module, *MUTATIONS[name])
    experts, weights, leaves = case(device)
    source = Divided(*weights, (3, 4))
    expected = with_gradients(by(module, source, experts, leaves), leaves)
    got = with_gradients(by(wrong, source, experts, leaves), leaves)
    assert not all(torch.equal(*pair) for pair in zip(got, expected))
