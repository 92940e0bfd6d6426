"""Gradients of the weights of experts against sums over the rows of each."""

import sys

import pytest
import torch
from test_expert_dispatch import drawn
from test_grouped_product import CASES, TYPES, compare, tensors, to_low_tiles

from chronicals.kernels import grouped_launch
from chronicals.kernels.expert_dispatch import dispatch_to_experts
from chronicals.kernels.grouped_launch import ProductLaunch
from chronicals.kernels.grouped_weight_gradient import (
    GATHER_FIRST,
    GATHER_NONE,
    GATHER_SECOND,
    grouped_weight_gradient_reference,
    launch_weight_gradient,
    weight_gradient_launch,
)
from mutants import mutant

module = sys.modules["chronicals.kernels.grouped_weight_gradient"]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("of_tokens", [GATHER_NONE, GATHER_FIRST, GATHER_SECOND])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_weight_gradient(case, of_tokens, dtype, device):
    tokens, each, experts, inputs, outputs = case
    to = to_low_tiles(tokens, each, experts, device)
    rows = [
        tokens if of_tokens == which else len(to.order_S) for which in (GATHER_FIRST, GATHER_SECOND)
    ]

    def by(function):
        return lambda a, b: function(a, b, to, of_tokens, 0.5)

    draw = tensors(dtype, device, (rows[0], outputs), (rows[1], inputs))
    compare(by(module.grouped_weight_gradient), by(grouped_weight_gradient_reference), draw)


def test_the_reference_is_a_sum_over_pairs():
    tokens, each, experts, inputs, outputs = CASES[1]
    experts_Tk = drawn(tokens, each, experts, "cpu")
    to = dispatch_to_experts(experts_Tk, experts)
    x = torch.randn(tokens, inputs).double()
    dy = torch.randn(tokens * each, outputs).double()
    chosen = torch.nn.functional.one_hot(experts_Tk.flatten(), experts).double()
    dw = torch.einsum("se,sn,sk->enk", chosen, dy, x.repeat_interleave(each, 0))
    torch.testing.assert_close(
        grouped_weight_gradient_reference(dy[to.order_S.long()], x, to, GATHER_SECOND), dw
    )


def test_experts_without_rows_have_no_gradient(device):
    to = dispatch_to_experts(torch.full((9, 1), 2, device=device), 4)
    a, b = (torch.randn(9, 16, device=device).bfloat16() for _ in range(2))
    got = module.grouped_weight_gradient(a, b, to)
    assert not got[[0, 1, 3]].any() and got[2].any()


def test_no_tokens(device):
    to = dispatch_to_experts(torch.zeros(0, 2, dtype=torch.int64, device=device), 3)
    x = torch.zeros(0, 8, device=device)
    assert not module.grouped_weight_gradient(x, x, to).any()


@pytest.mark.slow
@pytest.mark.parametrize("boxes", [False, True])
def test_every_launch_gives_the_same(boxes, device):
    """Widths that fill no tile."""
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    to = to_low_tiles(70, 2, 4, device)
    tokens, u = (torch.randn(*shape, device=device).to(kind) for shape in ((70, 96), (140, 48)))
    launch = ProductLaunch(32, 32, 4, 2, 2, boxes=boxes, rows=32)
    tolerance = 2e-2 if kind == torch.bfloat16 else 1e-4
    for a, b, which in ((u, tokens, GATHER_SECOND), (tokens, u, GATHER_FIRST)):
        got = launch_weight_gradient(launch, a, b, to, which, 1.0, kind)
        expected = grouped_weight_gradient_reference(a, b, to, which)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kib", "boxes"), [(99, False), (163, False), (227, True)])
def test_launches_fit_the_card(kib, boxes, let_return):
    """Two of the stages of a card with a copy engine hold no rows."""
    let_return(grouped_launch, shared_memory=kib << 10)
    let_return(module, has_boxes=boxes)
    launch = weight_gradient_launch(1536, 2048, torch.device("cuda", 0))
    held = launch.stages - 2 * (boxes and launch.stages > 3)
    assert held >= 2 and launch.boxes == boxes
    assert held * (launch.rows + launch.columns) * launch.depth * 2 <= kib << 10


@pytest.mark.parametrize("of_tokens", [GATHER_NONE, GATHER_FIRST, GATHER_SECOND])
def test_by_the_library(of_tokens, device, monkeypatch):
    """Whatever it leaves where an expert has no rows: those are zeros."""
    experts_Tk = torch.randint(0, 2, (40, 2), device=device) * 2  # experts 1 and 3 have none
    to = dispatch_to_experts(experts_Tk, 4)

    def library(a, b, offs):
        ends = offs.tolist()
        return torch.stack(
            [
                a[:, s:e] @ b[s:e] if e > s else a.new_full((len(a), b.shape[1]), 7)
                for s, e in zip([0, *ends], ends)
            ]
        )

    monkeypatch.setattr(module.F, "grouped_mm", library)
    rows = [40 if of_tokens == which else 80 for which in (GATHER_FIRST, GATHER_SECOND)]
    a, b = (torch.randn(count, width, device=device) for count, width in zip(rows, (24, 200)))
    got = module._by_library(a, b, to, of_tokens)
    torch.testing.assert_close(
        got, grouped_weight_gradient_reference(a, b, to, of_tokens), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("sizes", "of_tokens", "faster"),
    [
        ((1536, 2048), GATHER_SECOND, True),
        ((2048, 768), GATHER_FIRST, False),
        ((4096, 14336), GATHER_FIRST, True),
        ((1536, 16), GATHER_NONE, False),
        ((1536, 2048), GATHER_NONE, True),
    ],
)
def test_when_the_library_is_faster(sizes, of_tokens, faster):
    assert module._library_is_faster(*sizes, of_tokens) == faster


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_torch_s_product_on_a_card():
    to = dispatch_to_experts(torch.randint(0, 7, (2000, 2), device="cuda"), 8)
    a = torch.randn(4000, 1536, device="cuda").bfloat16()
    b = torch.randn(2000, 1280, device="cuda").bfloat16()
    assert module.uses_library(a, b, GATHER_SECOND, 1.0, torch.bfloat16) == (
        torch.cuda.get_device_capability() == (9, 0)
    )
    got = module.grouped_weight_gradient(a, b, to, GATHER_SECOND)
    expected = grouped_weight_gradient_reference(a, b, to, GATHER_SECOND)
    assert (got - expected).norm() <= 5e-3 * expected.norm() and not got[7].any()


def test_rows_of_another_expert_do_not_count(device):
    """What follows an expert's last row in the step of a weight gradient is not its own."""
    wrong = mutant(module, "inside = (s < end)[:, None]", "inside = (s < s + 1)[:, None]")
    to = to_low_tiles(37, 2, 4, device)
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    u = torch.randn(200, 8, device=device).to(kind)[:74]
    got = [of.grouped_weight_gradient(u, u, to) for of in (module, wrong)]
    expected = grouped_weight_gradient_reference(u, u, to)
    assert torch.allclose(got[0], expected, rtol=2e-2, atol=2e-2) and not torch.allclose(
        got[1], expected, rtol=2e-2, atol=2e-2
    )


@pytest.mark.slow
def test_a_missing_factor_is_found(device):
    wrong = mutant(module, "(total * factor)", "total")
    to = to_low_tiles(37, 2, 4, device)
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    u, x = (torch.randn(*shape, device=device).to(kind) for shape in ((74, 8), (37, 36)))
    got = [of.grouped_weight_gradient(u, x, to, GATHER_SECOND, 0.5) for of in (module, wrong)]
    assert not torch.allclose(*got, rtol=1e-2, atol=1e-2)
