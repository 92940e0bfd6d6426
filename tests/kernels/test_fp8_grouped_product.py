"""Grouped products in FP8: those of what the operands stand for, and near those of the operands
in 16 bit.
"""

import itertools
import sys

import pytest
import torch
from test_expert_dispatch import drawn
from test_grouped_product import to_low_tiles

from chronicals.kernels import grouped_launch, low_rank_term
from chronicals.kernels.expert_dispatch import dispatch_to_experts
from chronicals.kernels.fp8 import Scaled, fp8_quantize
from chronicals.kernels.fp8_experts import fp8_quantize_experts
from chronicals.kernels.fp8_grouped_product import fp8_product_launch
from chronicals.kernels.grouped_launch import ProductLaunch
from chronicals.kernels.grouped_product import grouped_product_reference, launch_product
from chronicals.kernels.low_rank_term import LowRankTerm, held_columns
from mutants import mutant

module = sys.modules["chronicals.kernels.fp8_grouped_product"]
kernel = sys.modules["chronicals.kernels.grouped_product"]

CASES = [
    (1, 1, 1, 16, 16),
    (37, 2, 4, 48, 24),
    (67, 3, 8, 130, 70),
    (150, 2, 3, 272, 144),
    (20, 4, 16, 64, 128),
]
"""Tokens, experts of a token, experts, inputs, outputs."""


def operands(case, of_tokens, device, spread=True):
    """x by rows and W by experts, of very different sizes, so that a scale in the wrong place
    shows.
    """
    tokens, each, experts, inputs, outputs = case
    rows = tokens if of_tokens else tokens * each
    x = torch.randn(rows, inputs, device=device)
    w = torch.randn(experts, outputs, inputs, device=device)
    if spread:
        x *= torch.logspace(-2, 1, rows, device=device)[torch.randperm(rows, device=device)][
            :, None
        ]
        w *= torch.logspace(-1, 1, experts, device=device)[torch.randperm(experts, device=device)][
            :, None, None
        ]
    return x.bfloat16(), w.bfloat16()


def of_sums(device):
    """Tensor cores add with fewer bits than fp32 has."""
    return 2e-6 if device.type == "cpu" else 2e-3


def check(of, case, of_tokens, dtype, device, bias=False, rank=0, fast=False):
    """Against fp64 of the values that the operands stand for: rows by rows, each relative to its
    own size.
    """
    tokens, each, experts, _, outputs = case
    to = to_low_tiles(tokens, each, experts, device)
    x, w = operands(case, of_tokens, device)
    x8 = fp8_quantize(x, "row")[0]
    w8 = fp8_quantize_experts(w)[0]
    given = torch.randn(experts, outputs, device=device).to(dtype) if bias else None
    thin = [
        torch.randn(*shape, device=device).to(dtype)
        for shape in ((tokens * each, rank), (experts, outputs, rank))
    ]
    got = of.fp8_grouped_product(
        x8, w8, to, of_tokens, given, LowRankTerm(*thin) if rank else None, dtype, fast
    )
    assert got.dtype == dtype and got.shape == (tokens * each, outputs)
    wide = torch.float64
    dense = x8.values.to(wide) * x8.scale, w8.values.to(wide) * w8.scale[:, None, None]
    adapted = LowRankTerm(*(part.to(wide) for part in thin)) if rank else None
    exact = grouped_product_reference(
        *dense, to, of_tokens, None if given is None else given.to(wide), adapted
    )
    roundings = max(torch.finfo(dtype).eps, of_sums(device))
    error = (got.to(wide) - exact).norm(dim=1)
    size = exact.norm(dim=1)
    assert (error <= roundings * size + 1e-12).all()


OPTIONS = [
    {"bias": bias, "rank": rank} for bias, rank in itertools.product((False, True), (0, 1, 8, 40))
]


@pytest.mark.slow
@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("of_tokens", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_times_their_expert(case, of_tokens, dtype, device):
    check(module, case, of_tokens, dtype, device)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_bias_and_an_adapter_in_16_bit(options, device):
    check(module, CASES[1], True, torch.bfloat16, device, **options)


@pytest.mark.slow
@pytest.mark.parametrize("fast", [False, True])
def test_both_kinds_of_sums(fast, device):
    check(module, CASES[3], False, torch.bfloat16, device, fast=fast)


@pytest.mark.slow
def test_near_the_product_in_16_bit(device):
    """Gaussian operands: a value is off by 2.6 % in the root mean square, a product by both."""
    case = (64, 2, 4, 256, 64)
    to = to_low_tiles(*case[:3], device)
    x, w = operands(case, True, device, spread=False)
    got = module.fp8_grouped_product(
        fp8_quantize(x, "row")[0], fp8_quantize_experts(w)[0], to, True
    )
    exact = grouped_product_reference(x.double(), w.double(), to, True)
    assert 0.01 * exact.norm() < (got.double() - exact).norm() < 0.045 * exact.norm()


@pytest.mark.slow
@pytest.mark.parametrize("boxes", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_every_launch_gives_the_same(persistent, boxes, device):
    case = (70, 2, 4, 96, 48)
    to = to_low_tiles(*case[:3], device)
    to = to._replace(rows=16)
    launch = ProductLaunch(32, 32, 4, 2, 2, persistent, boxes, 16)
    for of_tokens in (False, True):
        x, w = operands(case, of_tokens, device)
        x8 = fp8_quantize(x, "row")[0]
        w8 = fp8_quantize_experts(w)[0]
        got = launch_product(
            launch,
            x8.values,
            w8.values,
            to,
            of_tokens,
            scales=(x8.scale, w8.scale),
            dtype=torch.float32,
            fast=False,
        )
        expected = module.fp8_grouped_product_reference(x8, w8, to, of_tokens, dtype=torch.float32)
        error = (got - expected).norm(dim=1)
        size = expected.norm(dim=1)
        assert (error <= of_sums(device) * size + 1e-12).all()


@pytest.mark.parametrize("kib", [99, 163, 227])
@pytest.mark.parametrize("rank", [0, 64, 129, 257, 300])
@pytest.mark.parametrize("fast", [False, True])
def test_launches_fit_the_card(fast, rank, kib, let_return):
    hopper = kib == 227
    for of in (grouped_launch, low_rank_term):
        let_return(of, shared_memory=kib << 10)
    let_return(kernel, has_boxes=hopper)
    let_return(torch.cuda, get_device_capability=(9, 0) if hopper else (8, 9))
    for rows, width in ((128, 1536), (64, 1536), (128, 48)):
        card = torch.device("cuda", 0)
        launch = fp8_product_launch(rows, width, card, rank, fast)
        assert launch.depth == 128 and launch.stages >= 2
        assert launch.stages * (rows + launch.columns) * launch.depth <= kib << 10
        assert not rank or (rows + launch.columns) * held_columns(rank, card) * 2 <= kib << 10
        assert fast or not hopper or (launch.columns <= 128 and launch.warps == 8)


def test_no_tokens(device):
    to = dispatch_to_experts(torch.zeros(0, 2, dtype=torch.int64, device=device), 3)
    x = Scaled(
        torch.zeros(0, 16, device=device).to(torch.float8_e4m3fn), torch.ones(0, 1, device=device)
    )
    w = fp8_quantize_experts(torch.randn(3, 5, 16, device=device))[0]
    assert module.fp8_grouped_product(x, w, to, True).shape == (0, 5)


@pytest.mark.slow
def test_in_a_graph(device):
    case = CASES[1]
    to = dispatch_to_experts(drawn(*case[:3], device), case[2])
    x, w = operands(case, True, device)
    given = fp8_quantize(x, "row")[0], fp8_quantize_experts(w)[0], to, True
    compiled = torch.compile(module.fp8_grouped_product, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*given), module.fp8_grouped_product(*given))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x, w: (Scaled(x.values[:5], x.scale[:5]), w),
            r"expected \[37, K\] and \[4, N, K\]",
        ),
        (
            lambda x, w: (Scaled(x.values, x.scale[0, 0]), w),
            r"expected \[37, 1\] of rows and \[4\] of experts",
        ),
        (
            lambda x, w: (x, Scaled(w.values, w.scale[:1])),
            r"expected \[37, 1\] of rows and \[4\] of experts",
        ),
        (
            lambda x, w: (x, Scaled(w.values.to(torch.float8_e5m2), w.scale)),
            "torch.float8_e5m2: expected torch.float8_e4m3fn",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, message, device):
    case = CASES[1]
    x, w = operands(case, True, device)
    to = dispatch_to_experts(drawn(*case[:3], device), case[2])
    with pytest.raises(ValueError, match=message):
        module.fp8_grouped_product(
            *change(fp8_quantize(x, "row")[0], fp8_quantize_experts(w)[0]), to, True
        )


def test_a_card_without_fp8_is_named(device, let_return):
    case = CASES[1]
    x, w = operands(case, True, device)
    to = dispatch_to_experts(drawn(*case[:3], device), case[2])
    given = fp8_quantize(x, "row")[0], fp8_quantize_experts(w)[0], to, True
    let_return(module, lacks_fp8="NVIDIA A100 (8.0) has no FP8")
    with pytest.raises(
        ValueError,
        match=r"fp8_grouped_product: NVIDIA A100 \(8.0\) has no FP8; use grouped_product in bf16",
    ):
        module.fp8_grouped_product(*given)


FAULTS = {
    "the scale of x left out": ("total * tl.load(x_scale_ptr + source)[:, None]", "total"),
    "the scale of another token": (
        "tl.load(x_scale_ptr + source)",
        "tl.load(x_scale_ptr + taken // (each + 1))",
    ),
    "the scale of the first expert": ("tl.load(w_scale_ptr + expert)", "tl.load(w_scale_ptr)"),
    "the rows of the next pair": (
        "order_ptr + taken",
        "order_ptr + tl.minimum(taken + 1, end - 1)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, device, monkeypatch):
    wrong = mutant(kernel, *FAULTS[fault])
    monkeypatch.setattr(module, "launch_product", wrong.launch_product)
    with pytest.raises(AssertionError):
        check(module, CASES[1], True, torch.bfloat16, device, rank=8)
