"""Products that round once, to 16 bits or to fp32; and two calls at once: both done for whatever
follows, beside each other only where the current stream goes first.
"""

import pytest
import torch

from chronicals.kernels.products import HIGH_PRIORITY, add_product_, at_once, linear

SIDE = 4096
HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("kind", HALVES, ids=str)
def test_a_product_of_16_bits_may_stay_in_fp32(kind, device):
    """Rounded it is the one in 16 bits; rows may lie apart and have two dimensions."""
    x = torch.randn(3, 5, 2 * 67, device=device).to(kind)[..., ::2]
    weight = torch.randn(29, 67, device=device).to(kind)
    wide = linear(x, weight, torch.float32)
    assert wide.shape == (3, 5, 29) and wide.dtype == torch.float32
    exact = (x.double() @ weight.double().t()).float()
    torch.testing.assert_close(wide, exact, rtol=1e-5, atol=1e-4)
    narrow = linear(x, weight)
    assert narrow.dtype == kind and not torch.equal(narrow.float(), wide)
    torch.testing.assert_close(narrow.float(), wide, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", HALVES, ids=str)
def test_a_product_is_added_in_the_dtype_of_the_sum(kind, device):
    left, right = (torch.randn(*size, device=device).to(kind) for size in ((5, 64), (64, 29)))
    exact = left.double() @ right.double()
    for dtype, error in ((kind, 1e-2), (torch.float32, 1e-5)):
        before = torch.randn(5, 29, device=device).to(dtype)
        out = before.clone()
        assert add_product_(out, left, right) is out or out.is_cuda
        torch.testing.assert_close(out.double(), before + exact, rtol=error, atol=10 * error)


def current(device):
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def test_in_turn_where_the_stream_does_not_go_first(device):
    seen = []
    at_once(
        lambda: seen.append(("first", current(device))),
        lambda: seen.append(("beside", current(device))),
        device,
    )
    assert seen == [("first", current(device)), ("beside", current(device))]


@pytest.fixture
def going_first(device):
    stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.synchronize(device)


def slow(x):
    """Long enough that what does not wait for it finds it undone."""
    for _ in range(20):
        torch.mm(x, x)


@pytest.mark.gpu
def test_beside_finds_what_was_made_before_and_what_follows_finds_both(going_first, device):
    x = torch.randn(SIDE, SIDE, device=device)
    streams = []
    made, one, two = (torch.zeros(SIDE, device=device) for _ in range(3))
    for step in range(1, 11):
        slow(x)
        made.fill_(step)

        def first(step=step):
            one.copy_(made)

        def beside():
            streams.append(current(device))
            slow(x)
            two.copy_(made)

        at_once(first, beside, device)
        assert torch.equal(one + two, torch.full_like(one, 2 * step))
    assert going_first not in streams and len(set(streams)) == 1


@pytest.mark.gpu
def test_beside_is_waited_for_where_the_first_fails(going_first, device):
    x = torch.randn(SIDE, SIDE, device=device)
    made = torch.zeros(SIDE, device=device)

    def beside():
        slow(x)
        made.fill_(1.0)

    def first():
        raise MemoryError

    with pytest.raises(MemoryError):
        at_once(first, beside, device)
    assert torch.equal(made.clone(), torch.ones_like(made))


@pytest.mark.gpu
def test_captured(going_first, device):
    x = torch.randn(SIDE, SIDE, device=device)
    (made, one, two) = torch.zeros(3, SIDE, device=device)
    graph = torch.cuda.CUDAGraph()

    def beside():
        slow(x)
        two.copy_(made)

    beside()
    with torch.cuda.graph(graph, stream=going_first):
        made.add_(1.0)
        at_once(lambda: one.copy_(made), beside, device)
        both = one + two
    made.zero_()
    for step in range(1, 6):
        graph.replay()
        assert torch.equal(both, torch.full_like(both, 2 * step))
