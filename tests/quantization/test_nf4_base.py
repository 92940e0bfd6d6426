"""Weights in 4 bits multiply as the dense weights that they stand for, alone, with adapters, and
in one buffer with others.
"""

import copy
import sys
import weakref

import pytest
import torch
from torch import nn

from chronicals.kernels.linear_head import Adapter
from chronicals.lora import LoRAConfig, LoRALinear
from chronicals.lora import merged_linear as module
from chronicals.lora.merged_linear import merged_linear_reference
from chronicals.quantization import NF4, Dense, Linear4bit, Operand, Packed
from chronicals.quantization.bitsandbytes import weight_of_layer
from comparison import assert_as_exact_as_plain
from interpreted import kernels_run
from mutants import mutant

FORMAT = sys.modules["chronicals.quantization.packed"]
TYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [((1,), 1), ((37,), 5), ((24, 7, 13), 20), ((64, 64), 96), ((1, 3), 131)]
RANKS = [(0, 0, 0), (3, 3, 3), (0, 5, 0)]
SIZES = (24, 7, 13)
WIDTH = 20


def packed_weights(sizes, width, dtype, device, nested=True):
    """Of rows that differ much in size."""
    slopes = [10.0 ** torch.empty(size, 1, device=device).uniform_(-1, 1) for size in sizes]
    return [
        Packed.of((torch.randn(len(s), width, device=device) * s).to(dtype), nested=nested)
        for s in slopes
    ]


def dense_of(packed, columns=0):
    return Dense.fused([part.dense() for part in packed], columns)


def rows(count, width, dtype, device):
    return Operand(torch.randn(count, width, device=device).to(dtype))


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("sizes, width", SHAPES, ids=str)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_products_are_those_of_the_dequantised_weight(sizes, width, dtype, nested, device):
    """Bit by bit, with rows as long as the weight's and with such as reach into the padding."""
    packed = packed_weights(sizes, width, dtype, device, nested)
    for columns in (0, 64):
        base = NF4(packed, columns, (4, 4))
        dense = dense_of(packed, columns)
        assert torch.equal(base.dense(), dense.dense()) and base.padded == dense.padded
        assert not base.trained and base.weight_gradient(Operand(None), Operand(None)) is None
        for side in ("up", "down"):
            inside = torch.randn_like(getattr(dense, side))
            for buffer in (dense, base.buffer):
                getattr(buffer, side).copy_(inside)
        bias = torch.randn(sum(sizes), device=device).to(dtype)
        for reach in {0, columns}:
            x = rows(13, width + reach, dtype, device)
            dy = rows(13, sum(sizes) + reach, dtype, device)
            assert torch.equal(base.forward(x), dense.forward(x))
            assert torch.equal(base.forward(x, bias), dense.forward(x, bias))
            assert torch.equal(base.input_gradient(dy), dense.input_gradient(dy))


def test_a_weight_takes_4_and_an_eighth_bits():
    base = NF4(packed_weights((256, 256), 512, torch.bfloat16, "cpu"))
    values = 512 * 512
    assert base.bytes == pytest.approx(values * (4 + 8 / 64 + 32 / (64 * 256)) / 8)
    assert base.bytes == pytest.approx(NF4.bytes_a_value(2) * values)
    plain = NF4(packed_weights((256, 256), 512, torch.bfloat16, "cpu", nested=False))
    assert plain.bytes == values * (4 + 32 / 64) / 8


def in_turn(of, device):
    """Errors of what two weights in one buffer give, the first used on both sides of the second."""
    packed = [packed_weights(SIZES, WIDTH, torch.float32, device) for _ in range(2)]
    first, second = (of.PackedStorage(part) for part in packed)
    x = rows(5, WIDTH, torch.float32, device)
    dy = rows(5, sum(SIZES), torch.float32, device)
    found = [
        first.forward(x),
        second.forward(x),
        second.input_gradient(dy),
        first.input_gradient(dy),
        first.forward(x),
    ]
    one, two = (dense_of(part) for part in packed)
    expected = [
        one.forward(x),
        two.forward(x),
        two.input_gradient(dy),
        one.input_gradient(dy),
        one.forward(x),
    ]
    return [float((ours - exact).norm() / exact.norm()) for ours, exact in zip(found, expected)]


def test_weights_of_one_shape_share_a_buffer(device):
    packed = packed_weights(SIZES, WIDTH, torch.bfloat16, device)
    first = NF4(packed, 64, (1, 2, 3))
    second = NF4(packed_weights(SIZES, WIDTH, torch.bfloat16, device), 64, (1, 2, 3))
    assert first.buffer is second.buffer
    others = [
        NF4(packed, 64, (3, 2, 1)),
        NF4(packed, 128, (1, 2, 3)),
        NF4([part.to(torch.float32) for part in packed], 64),
    ]
    assert all(other.buffer is not first.buffer for other in others)
    assert not any(in_turn(FORMAT, device))
    shared = weakref.ref(first.buffer)
    del first, second, others
    assert shared() is None, "freed with the last weight that used it"


@pytest.mark.slow
def test_a_stale_buffer_is_seen(device):
    assert max(in_turn(mutant(FORMAT, "self.buffer.mark is not self._mark", "False"), device)) > 0.1


def test_forward_and_backward_of_a_recomputed_layer_dequantise_once(device):
    base = NF4(packed_weights(SIZES, WIDTH, torch.float32, device))
    filled = []
    into, base.into = base.into, lambda out: filled.append(0) or into(out)
    x = rows(5, WIDTH, torch.float32, device)
    dy = rows(5, sum(SIZES), torch.float32, device)
    base.forward(x), base.input_gradient(dy), base.input_gradient(dy)
    assert len(filled) == 1


def functions(ranks, biased, dtype, device, of=module):
    """Ours over packed weights, twice in a row with two weights of one shape, and the plain
    formula of what they stand for; of x, the biases, and the A and B of the layers that have
    them. The third draws these, and other weights."""
    adapted = [n for n, rank in enumerate(ranks) if rank]
    scales = (0.5, 1.5, 2.5)
    drawn = []

    def draw():
        drawn[:] = (packed_weights(SIZES, WIDTH, dtype, device) for _ in range(2))
        there = [(rank, size) for rank, size in zip(ranks, SIZES) if rank]
        biases = [torch.randn(size, device=device).to(dtype) for size in SIZES] if biased else []
        downs = [torch.randn(rank, WIDTH, device=device) * 0.3 for rank, _ in there]
        ups = [torch.randn(size, rank, device=device) for rank, size in there]
        return [torch.randn(13, WIDTH, device=device).to(dtype), *biases, *downs, *ups]

    def parts(tensors, number):
        biases, rest = (tensors[:3], tensors[3:]) if biased else ([None] * 3, tensors)
        adapters = [None] * 3
        (downs, ups) = (rest[: len(adapted)], rest[len(adapted) :])
        for place, n in enumerate(adapted):
            adapters[n] = Adapter(downs[place], ups[place], scales[n] * (1 - 3 * number), 0.0)
        return drawn[number], biases, adapters

    def both(one):
        def function(x, *tensors):
            return torch.cat([one(x, parts(tensors, number)) for number in (0, 1)], 1)

        return function

    def ours(x, given):
        weights, biases, adapters = given
        return (
            of.merged_linear(x * 1, of.MergedWeights.packed(weights, biases, ranks), adapters) * 1
        )

    def plain(x, given):
        weights, biases, adapters = given
        return merged_linear_reference(
            x, [part.dense().to(x) for part in weights], biases, adapters
        )

    return both(ours), both(plain), draw


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", RANKS, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
def test_with_adapters_they_are_as_exact_as_the_plain_formula(ranks, biased, dtype, device):
    """Two layers of one shape, whose adapters stand in the same padding, one after the other."""
    assert_as_exact_as_plain(*functions(ranks, biased, dtype, device))


@pytest.mark.slow
@pytest.mark.parametrize(
    "old, new",
    [
        ("padding is not None and not padding.holds(ctx.written)", "False"),
        (
            "weights[0].base(weights, columns_for(ranks), ranks)",
            "weights[0].base(weights[::-1], columns_for(ranks), ranks)",
        ),
    ],
    ids=["adapters of the other layer", "weights in another order"],
)
def test_a_planted_fault_is_seen(old, new, device):
    given = functions((3, 3, 3), False, torch.float32, device, mutant(module, old, new))
    with pytest.raises((AssertionError, RuntimeError)):
        assert_as_exact_as_plain(*given)


# --- the layer
# ---------------------------------------------------------------------------------------------------------


def layers(bias=True, dtype=torch.float32, device="cpu"):
    """A layer in 4 bits, and the plain one that it stands for."""
    linear = nn.Linear(37, 29, bias=bias, device=device, dtype=dtype)
    ours = Linear4bit.of(linear)
    assert ours.weight.dtype == torch.uint8 and ours.weight.numel() == -(-37 * 29 // 2)
    return ours, ours.plain()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(37,), (5, 37), (2, 3, 37)], ids=str)
def test_a_layer_is_the_plain_layer_of_its_dequantised_weight(shape, dtype, device):
    for bias in (False, True):
        ours, plain = layers(bias, dtype, device)
        x = torch.randn(shape, device=device).to(dtype)
        dy = torch.randn(*shape[:-1], 29, device=device).to(dtype)
        found, expected = (
            [y := layer(z := x.clone().requires_grad_()), *torch.autograd.grad(y, z, dy)]
            for layer in (ours, plain)
        )
        rounding = torch.finfo(dtype).eps
        for one, other in zip(found, expected):
            assert one.shape == other.shape and one.dtype == other.dtype
            assert torch.allclose(
                one, other, rtol=4 * rounding, atol=4 * rounding * float(other.detach().abs().max())
            )


@pytest.mark.slow
def test_a_layer_is_what_bitsandbytes_computes(device):
    bnb = pytest.importorskip("bitsandbytes")
    for nested in (False, True):
        weight = torch.randn(32, 64, device=device)
        x = torch.randn(5, 64, device=device, requires_grad=True)
        theirs = bnb.nn.Linear4bit(
            64,
            32,
            bias=False,
            compute_dtype=torch.float32,
            compress_statistics=nested,
            quant_type="nf4",
            device=device,
        )
        theirs.weight = bnb.nn.Params4bit(
            weight.clone(), requires_grad=False, compress_statistics=nested, quant_type="nf4"
        ).to(device)
        ours = Linear4bit(
            weight_of_layer(theirs)
        )  # their scales: on CPUs they take a neighbour for one in a thousand
        dy = torch.randn(5, 32, device=device)
        for one, other in zip(
            *([y := of(x), *torch.autograd.grad(y, x, dy)] for of in (ours, theirs))
        ):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def test_casts_of_a_model_change_what_it_is_dequantised_to_alone(device):
    ours, plain = layers(device=device)
    model = nn.Sequential(ours)
    scales = {name: x.clone() for name, x in ours.named_buffers()}
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        model.to(dtype)
        assert ours.dtype == ours(torch.randn(3, 37, device=device).to(dtype)).dtype == dtype
        assert all(
            torch.equal(x, scales[name]) and x.dtype == scales[name].dtype
            for name, x in ours.named_buffers()
        )
        assert ours.bias.dtype == dtype and ours.weight.dtype == torch.uint8
    assert torch.equal(ours.plain().weight, plain.weight)


def test_a_layer_is_saved_and_copied(device):
    ours, _ = layers(device=device)
    other, _ = layers(device=device)
    x = torch.randn(3, 37, device=device)
    assert not torch.equal(ours(x), other(x))
    other.load_state_dict(ours.state_dict())
    assert torch.equal(ours(x), other(x)) and torch.equal(ours(x), copy.deepcopy(ours)(x))
    names = [name.removeprefix("weight.") for name in ours.state_dict()]
    entries = [
        "absmax",
        "quant_map",
        "nested_absmax",
        "nested_quant_map",
        "quant_state.bitsandbytes__nf4",
    ]
    assert names == ["weight", *entries, "bias"]
    plain = Linear4bit(Packed.of(torch.randn(24, 37, device=device), nested=False), None)
    with pytest.raises(RuntimeError, match="shape, block, format, nested"):
        ours.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match=r"weight\.absmax: not in the checkpoint"):
        ours.load_state_dict(
            {name: x for name, x in ours.state_dict().items() if name != "weight.absmax"}
        )
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "weight.SCB"'):
        ours.load_state_dict(ours.state_dict() | {"weight.SCB": torch.zeros(3)})
    with pytest.raises(RuntimeError, match='Missing key.*"bias"'):
        ours.load_state_dict({name: x for name, x in ours.state_dict().items() if name != "bias"})


def test_under_autocast_it_multiplies_in_the_type_of_autocast(device):
    ours, plain = layers(device=device)
    x = torch.randn(3, 37, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = ours(x)
        expected = plain(x)
    assert found.dtype == expected.dtype == torch.bfloat16 and torch.allclose(
        found, expected, rtol=2e-2, atol=2e-2
    )


@pytest.mark.slow
def test_the_operator_is_whole_for_a_compiler(device):
    ours, _ = layers(device=device)
    x = torch.randn(3, 37, device=device, requires_grad=True)
    tensors = [ours.weight, ours.absmax, ours.absmax2, ours.code2, ours.offset]
    given = x, tensors, ours.packed.settings, ours.out_features, ours.dtype
    torch.library.opcheck(torch.ops.chronicals.packed_linear.default, given)
    whole = torch.compile(ours, fullgraph=True, backend="aot_eager")
    dy = torch.randn(3, 29, device=device)
    eager, compiled = ([y := of(x), *torch.autograd.grad(y, x, dy)] for of in (ours, whole))
    assert all(torch.equal(one, other) for one, other in zip(eager, compiled))


@pytest.fixture
def without_dense_values(monkeypatch):
    """No weight in 4 bits is dequantised as a whole."""

    def refuse(self):
        raise AssertionError("dequantised as a whole")

    def start():
        monkeypatch.setattr(Packed, "dense", refuse)

    return start


@pytest.mark.parametrize("adapter", ["none", "LoRA", "DoRA"])
def test_few_rows_are_multiplied_without_the_dense_values(adapter, without_dense_values, device):
    """Of a layer alone, of one with an adapter, and of that with its adapter off. The norms of DoRA
    take the dense values.
    """
    layer = Linear4bit.of(nn.Linear(128, 24, device=device).bfloat16())
    plain = layer.plain()
    if adapter != "none":
        config = LoRAConfig(rank=4, dropout=0.0, use_dora=adapter == "DoRA")
        layer, plain = (LoRALinear(each, config, 128, 24) for each in (layer, plain))
        nn.init.normal_(layer.lora_B)
        for name in layer.trained:
            plain.get_parameter(name).data.copy_(layer.get_parameter(name))
    x = torch.randn(4, 16, 128, device=device).bfloat16()
    if adapter != "DoRA":
        without_dense_values()
    for enabled in (True, False) if adapter != "none" else (True,):
        layer.enabled = plain.enabled = enabled
        with torch.no_grad(), kernels_run():
            expected = plain(x).double()
            assert (layer(x).double() - expected).norm() <= 2**-7 * expected.norm()


@pytest.mark.parametrize("of_one_form", [True, False], ids=["one form", "two forms"])
def test_few_rows_of_several_weights_need_no_dense_values(
    of_one_form, without_dense_values, record_calls, device
):
    """In one launch if they have one form; with bias, and what adapters have in the padding."""
    nested = (True, True, of_one_form)
    weights = [torch.randn(size, 128, device=device).bfloat16() for size in (24, 7, 13)]
    packed = [Packed.of(weight, nested=each) for weight, each in zip(weights, nested)]
    base = NF4(packed, 64, (4, 0, 4))
    dense = dense_of(packed, 64)
    inside = torch.randn_like(dense.up)
    dense.up.copy_(inside), base.buffer.up.copy_(inside)
    bias = torch.randn(44, device=device).bfloat16()
    without_dense_values()
    calls = record_calls(sys.modules["chronicals.quantization.nf4"], "nf4_products")
    for width in (128, 192):
        x = rows(5, width, torch.bfloat16, device)
        for added in (None, bias):
            with kernels_run():
                expected = dense.forward(x, added).double()
                error = (base.forward(x, added).double() - expected).norm()
            assert error <= 2**-7 * expected.norm()
    assert len(calls) == (4 if of_one_form else 0)


def test_what_is_in_the_buffer_is_not_read_after_few_rows(device):
    """Other codes may have been loaded since it was written."""
    packed = packed_weights((24, 7), 128, torch.bfloat16, device)
    base = NF4(packed)
    base.forward(rows(70, 128, torch.bfloat16, device))
    packed[0].codes.fill_(0x77)
    dy = rows(5, 31, torch.bfloat16, device)
    with kernels_run():
        base.forward(rows(5, 128, torch.bfloat16, device))
        assert torch.equal(base.input_gradient(dy), dense_of(packed).input_gradient(dy))


def test_what_is_not_few_rows_is_multiplied_by_the_dense_values(without_dense_values, device):
    layer = Linear4bit.of(nn.Linear(128, 24, device=device).bfloat16())
    uneven = Linear4bit.of(nn.Linear(96, 24, device=device).bfloat16())
    x = torch.randn(65, 128, device=device).bfloat16()
    without_dense_values()
    with kernels_run():
        layer(x[:64])
        for of, given in (
            (layer, x),
            (layer, x[:2].float()),
            (layer.float(), x[:2]),
            (uneven, x[:2, :96]),
        ):
            with pytest.raises(AssertionError, match="as a whole"):
                of(given)


def test_few_rows_have_the_gradient_of_all(device):
    layer = Linear4bit.of(nn.Linear(128, 24, device=device).bfloat16())
    x = torch.randn(5, 128, device=device).bfloat16().requires_grad_()
    with kernels_run():
        y = layer(x)
        dy = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, x, dy)
        with torch.no_grad():
            assert torch.equal(layer(x), y)
        assert torch.equal(dx, dy @ layer.packed.dense())
