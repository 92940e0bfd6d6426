"""The norm of many tensors against fp64, and against torch's own."""

import pytest
import torch

import chronicals.kernels.gradient_norm as module
from chronicals.kernels.gradient_norm import gradient_norm, gradient_norm_reference, norm_tables
from chronicals.kernels.tensor_lists import LIST_BLOCK, LIST_CHUNK
from mutants import mutant

SHAPES = [(17, 5), (), (1,), (LIST_CHUNK + 3,), (2, LIST_BLOCK), (0, 4), (3, 7, 11)]
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn(kinds, device, shapes=SHAPES):
    return [
        (torch.randn(shape, device=device) * 10.0 ** (n % 3 - 1)).to(kinds[n % len(kinds)])
        for n, shape in enumerate(shapes)
    ]


def compare(tensors, function=gradient_norm):
    exact = torch.cat([x.double().flatten().cpu() for x in tensors]).norm()
    ours, plain = (f(tensors).double().cpu() for f in (function, gradient_norm_reference))
    error = (ours - exact).abs()
    allowed = max(1.5 * (plain - exact).abs(), 2**-22 * exact)
    assert error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("kinds", [*((kind,) for kind in TYPES), tuple(TYPES)], ids=str)
def test_norm(kinds, device):
    compare(drawn(kinds, device))


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_sizes_and_addresses_that_suit_a_card(kind, device):
    """Loads are 16 bytes wide then; more chunks than programs."""
    compare(drawn([kind], device, [(16, 8), (LIST_CHUNK + 8,), (70 * LIST_CHUNK,), (24,)]))


def test_tensors_that_lie_otherwise(device):
    tensors = drawn([torch.float32], device, [(9, 4), (66,)])
    tensors[0] = tensors[0].t()
    compare(tensors)
    compare([tensors[1][1:65]])


def test_nothing_and_empty_tensors(device):
    assert gradient_norm([]).item() == 0
    assert gradient_norm([torch.zeros(0, device=device)]).item() == 0
    assert norm_tables([]) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_seen(value, device):
    tensors = drawn([torch.bfloat16], device)
    tensors[3][LIST_CHUNK + 1] = value
    assert not gradient_norm(tensors).isfinite()


@pytest.mark.slow
def test_the_same_tensors_have_the_same_norm_bit_for_bit(device):
    tensors = drawn(TYPES, device, [(40 * LIST_CHUNK,)] * 3)
    assert torch.equal(gradient_norm(tensors), gradient_norm([x.clone() for x in tensors]))


@pytest.mark.gpu
def test_captured(device):
    tensors = drawn(TYPES, device)
    held = norm_tables(tensors)
    gradient_norm(tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = gradient_norm(tensors)
    for x in tensors:
        x.mul_(2)
    graph.replay()
    torch.testing.assert_close(norm, gradient_norm_reference(tensors))
    assert held


MUTATIONS = {
    "no squares": ("total += x * x", "total += x"),
    "the first block of a chunk only": ("start + offset", "start"),
    "chunks of the first tensor": ("(chunk - tl.load(firsts_ptr + tensor))", "chunk"),
    "one chunk a program": (
        "range(tl.program_id(0), chunks, tl.num_programs(0))",
        "range(tl.program_id(0), 1, tl.num_programs(0))",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", MUTATIONS)
def test_planted_faults_are_found(fault, device):
    broken = mutant(module, *MUTATIONS[fault])
    with pytest.raises(AssertionError, match="error"):
        compare(
            drawn([torch.bfloat16], device, [(5,), (70 * LIST_CHUNK,), (LIST_CHUNK + 8,)]),
            broken.gradient_norm,
        )
