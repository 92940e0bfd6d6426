"""Weights in blocks of GGUF multiply as the dense weights that they stand for, alone, with
adapters, and as a layer.
"""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from chronicals.kernels.gguf_blocks import GGUF_KINDS
from chronicals.kernels.linear_head import Adapter
from chronicals.lora.magnitude import squared_norms_of
from chronicals.lora.merged_linear import MergedWeights, merged_linear, merged_linear_reference
from chronicals.quantization import GGUF, Blocks, Dense, LinearGGUF, Operand
from comparison import assert_as_exact_as_plain
from drawn_blocks import by_gguf, random_blocks
from interpreted import kernels_run

TYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = (24, 7, 13)
WIDTH = 256


def drawn(rows, kind, dtype, device, width=WIDTH, seed=0):
    return Blocks.of(random_blocks(rows, width, kind, seed, 0).to(device), kind, dtype)


def mixed(dtype, device):
    """Three layers of different kinds."""
    kinds = ("Q4_K", "Q8_0", "Q6_K")
    return [
        drawn(rows, kind, dtype, device, seed=n) for n, (rows, kind) in enumerate(zip(SIZES, kinds))
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_products_are_those_of_the_dequantised_weight(dtype, device):
    """Of more than few rows bit by bit, also of layers of different kinds side by side, and of rows
    that reach into the padding.
    """
    for packed in (
        mixed(dtype, device),
        *([drawn(37, kind, dtype, device)] for kind in GGUF_KINDS),
    ):
        for columns in (0, 64):
            base = GGUF(packed, columns, (4,) * len(packed))
            dense = Dense.fused([part.dense() for part in packed], columns)
            assert torch.equal(base.dense(), dense.dense()) and base.padded == dense.padded
            assert not base.trained and base.weight_gradient(Operand(None), Operand(None)) is None
            for reach in {0, columns}:
                x = Operand(torch.randn(70, WIDTH + reach, device=device).to(dtype))
                dy = Operand(torch.randn(70, base.outputs + reach, device=device).to(dtype))
                for buffer in (base.buffer, dense):
                    buffer.up.zero_(), buffer.down.zero_()
                assert torch.equal(base.forward(x), dense.forward(x))
                assert torch.equal(base.input_gradient(dy), dense.input_gradient(dy))


@pytest.mark.slow
def test_few_rows_are_multiplied_without_the_dense_values(record_calls, device):
    """Of layers of different kinds side by side, and of a layer; other rows and kinds as before."""
    packed = mixed(torch.bfloat16, device)[:2]
    base = GGUF(packed)
    dense = Dense.fused([part.dense() for part in packed])
    layer = packed[0].layer()
    calls = record_calls(Blocks, "into")
    x = torch.randn(5, WIDTH, device=device).bfloat16()
    with kernels_run(), torch.no_grad():
        expected = dense.forward(Operand(x)).double()
        for got in (base.forward(Operand(x)), layer(x)):
            wanted = expected[:, : got.shape[1]]
            assert (got.double() - wanted).norm() <= 2**-7 * wanted.norm()
        assert not calls and packed[0].is_faster_dense(x)
        assert packed[0].to(torch.float32).reads_dense(x) and not packed[0].reads_dense(x)
        for other in (x.float(), x[:1].expand(65, -1)):
            calls.clear()
            layer(other)
            assert calls
        slower = drawn(64, "Q6_K", torch.bfloat16, device)
        assert slower.reads_dense(x) and packed[1].reads_dense(x[:1].expand(17, -1))


@pytest.mark.parametrize(
    ("kind", "bits"), [("Q8_0", 8.5), ("Q4_0", 4.5), ("Q4_K", 4.5), ("Q6_K", 6.5625)]
)
def test_a_weight_takes_the_bytes_of_the_file(kind, bits):
    base = GGUF([drawn(64, kind, torch.bfloat16, "cpu")])
    assert base.bytes == 64 * WIDTH * bits / 8 <= GGUF.bytes_a_value(2) * 64 * WIDTH


def test_what_is_no_blocks_is_refused():
    with pytest.raises(ValueError, match="kind='Q5_K': give one of Q8_0"):
        Blocks.of(torch.zeros(2, 176, dtype=torch.uint8), "Q5_K", torch.float32)
    with pytest.raises(
        ValueError,
        match="rows of 35 elements of torch.uint8 are no blocks of Q8_0: give uint8, 34 a block",
    ):
        Blocks.of(torch.zeros(2, 35, dtype=torch.uint8), "Q8_0", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_with_adapters_they_are_as_exact_as_the_plain_formula(dtype, device):
    ranks = (3, 0, 5)
    scales = (0.5, 1.0, 2.0)
    weights = []

    def adapters(given):
        pairs = {0: given[0::2][0:1] + given[1::2][0:1], 2: given[0::2][1:] + given[1::2][1:]}
        return [Adapter(*pairs[n], scales[n], 0.0) if n in pairs else None for n in range(3)]

    def ours(x, *given):
        return (
            merged_linear(x * 1, MergedWeights.packed(weights, [None] * 3, ranks), adapters(given))
            * 1
        )

    def plain(x, *given):
        return merged_linear_reference(
            x, [part.dense().to(x) for part in weights], [None] * 3, adapters(given)
        )

    def draw():
        parts = (
            by_gguf(torch.randn(rows, 32), kind).to(dtype)
            for rows, kind in zip(SIZES, ("Q4_0", "Q8_0", "Q4_0"))
        )
        weights[:] = (replace(part, codes=part.codes.to(device)) for part in parts)
        pairs = [
            torch.randn(shape, device=device)
            for rank, rows in ((3, 24), (5, 13))
            for shape in ((rank, 32), (rows, rank))
        ]
        return [torch.randn(13, 32, device=device).to(dtype), *pairs]

    assert_as_exact_as_plain(ours, plain, draw)


# --- the layer
# ---------------------------------------------------------------------------------------------------------


def layer(kind="Q4_K", dtype=torch.float32, device="cpu", bias=True):
    return LinearGGUF(
        drawn(29, kind, dtype, device),
        torch.randn(29, device=device, dtype=dtype) if bias else None,
    )


@pytest.mark.parametrize("kind", GGUF_KINDS)
@pytest.mark.parametrize("shape", [(WIDTH,), (2, 3, WIDTH)], ids=str)
def test_a_layer_is_the_plain_layer_of_its_dequantised_weight(shape, kind, device):
    for bias in (False, True):
        ours = layer(kind, torch.float32, device, bias)
        x = torch.randn(shape, device=device)
        dy = torch.randn(*shape[:-1], 29, device=device)
        found, expected = (
            [y := of(z := x.clone().requires_grad_()), *torch.autograd.grad(y, z, dy)]
            for of in (ours, ours.plain())
        )
        for one, other in zip(found, expected):
            torch.testing.assert_close(
                one, other, rtol=1e-5, atol=1e-5 * float(other.detach().abs().max())
            )
    torch.testing.assert_close(squared_norms_of(ours, WIDTH), ours.plain().weight.square().sum(1))


def test_casts_of_a_model_change_what_it_is_dequantised_to_alone(device):
    ours = layer(device=device)
    model = nn.Sequential(ours)
    blocks = ours.weight.detach().clone()
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        model.to(dtype)
        assert (
            ours.dtype
            == ours(torch.randn(3, WIDTH, device=device).to(dtype)).dtype
            == ours.bias.dtype
            == dtype
        )
        assert torch.equal(ours.weight, blocks)


def test_a_layer_is_saved_and_copied(device):
    ours = layer(device=device)
    other = LinearGGUF(
        drawn(29, "Q4_K", torch.float32, device, seed=9), torch.zeros(29, device=device)
    )
    x = torch.randn(3, WIDTH, device=device)
    assert not torch.equal(ours(x), other(x))
    other.load_state_dict(ours.state_dict())
    assert torch.equal(ours(x), other(x)) and torch.equal(ours(x), copy.deepcopy(ours)(x))


@pytest.mark.slow
def test_the_operator_is_whole_for_a_compiler(device):
    ours = layer(device=device)
    x = torch.randn(3, WIDTH, device=device, requires_grad=True)
    dy = torch.randn(3, 29, device=device)
    torch.library.opcheck(
        torch.ops.chronicals.packed_linear.default,
        (x, [ours.weight], ours.packed.settings, 29, torch.float32),
    )
    whole = torch.compile(ours, fullgraph=True, backend="aot_eager")
    eager, compiled = ([y := of(x), *torch.autograd.grad(y, x, dy)] for of in (ours, whole))
    assert all(torch.equal(one, other) for one, other in zip(eager, compiled))
