"""adamw_8bit_ against the update by the book, against its reference bit by bit, and its codes
against all that there are.
"""

import copy

import pytest
import torch

from chronicals.kernels import adamw_8bit as module
from chronicals.kernels.adamw import Tensors, fused_adamw_reference_, join_master, split_master
from chronicals.kernels.adamw_8bit import (
    BLOCK_8BIT,
    CHUNK_8BIT,
    MOMENT_BLOCK,
    QuantizedTensors,
    adamw_8bit_,
    adamw_8bit_reference_,
    dequantize_moment,
    quantize_moment,
)
from mutants import mutant

SHAPES = [(17, 5), (), (1,), (CHUNK_8BIT + 3,), (2, BLOCK_8BIT), (3, 7, 11), (MOMENT_BLOCK,)]
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]


def drawn(dtype, gradient_dtype, device, shapes=SHAPES, master=True):
    """Random weights and moments as after some steps, each tensor after a number of its own."""
    tensors = QuantizedTensors()
    for number, shape in enumerate(shapes):
        value = torch.randn(shape, device=device)
        high, low = split_master(value)
        tensors.weights.append(value if dtype == torch.float32 else high)
        if dtype == torch.bfloat16 and master:
            tensors.lows.append(low)
        tensors.gradients.append(
            (torch.randn(shape, device=device) * 10.0 ** (number - 4)).to(gradient_dtype)
        )
        mean = torch.randn(shape, device=device) * 0.1
        square = torch.rand(shape, device=device) * 0.1
        for values, signed, codes, scales in (
            (mean, True, tensors.means, tensors.mean_scales),
            (square, False, tensors.squares, tensors.square_scales),
        ):
            quantized = quantize_moment(values, signed)
            codes.append(quantized[0])
            scales.append(quantized[1])
        tensors.steps.append(torch.tensor(float(number), device=device))
    return tensors


def everything(tensors):
    """Weights, in fp32 as their masters stand for them, steps, codes and scales."""
    whole = (
        [join_master(w, low) for w, low in zip(tensors.weights, tensors.lows)]
        if tensors.lows
        else tensors.weights
    )
    return [x for row in (whole, tensors.steps, *parts_of(tensors)) for x in row]


def parts_of(tensors):
    return tensors.means, tensors.mean_scales, tensors.squares, tensors.square_scales


def are_alike(ours, plain):
    """But for codes where the last bit of a moment decides."""
    for new, expected in zip(everything(ours), everything(plain), strict=True):
        if new.dtype == torch.uint8:
            differ = (new.int() - expected.int()).abs()
            assert differ.max() <= 1 and differ.float().mean() <= 0.01
        else:
            torch.testing.assert_close(new, expected, rtol=1e-5, atol=2e-7)


def stands_for(signed):
    """fp64, what each rank stands for, a power of two at a time."""
    values = [0.0]
    for octave in range(7 if signed else 8):
        steps = 2**octave
        values += [8**octave * (1 + 7 * step / steps) for step in range(steps)]
    return torch.tensor(values, dtype=torch.float64) / values[-1]


def ranks(codes, signed):
    return codes.int().cpu() - 127 if signed else codes.int().cpu()


@pytest.mark.parametrize("signed", [True, False])
def test_codes_stand_for_steps_that_double_with_each_power_of_eight(signed, device):
    values = stands_for(signed)
    codes = torch.arange(len(values), dtype=torch.uint8, device=device) + (127 if signed else 0)
    made = dequantize_moment(codes, torch.full((1,), 3.0, device=device), signed)
    torch.testing.assert_close(made.cpu().double(), 3 * values, rtol=1e-6, atol=0.0)
    if signed:
        mirrored = dequantize_moment(254 - codes, torch.full((1,), 3.0, device=device), signed)
        assert torch.equal(mirrored, -made)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest(signed, device):
    """And both ends of a block are exact; from an eighth of the least value on it is taken for
    that.
    """
    values = stands_for(signed)
    magnitude = 10 ** torch.empty(50, MOMENT_BLOCK, dtype=torch.float64).uniform_(-7.5, -0.001)
    magnitude[:, 0], magnitude[:, 1] = 1.0, 0.0
    sign = torch.randn(50, MOMENT_BLOCK).sign() if signed else 1
    codes, scales = quantize_moment((magnitude * sign).float().to(device), signed)
    between = (values[1:] + values[:-1]) / 2
    between[0] = values[1] / 8
    expected = torch.bucketize(magnitude, between) * sign
    wrong = ranks(codes, signed) != expected
    assert wrong.double().mean() < 1e-3 and (ranks(codes, signed) - expected).abs().max() <= 1, (
        "of the limits alone"
    )
    kept = dequantize_moment(codes, scales, signed).cpu()
    assert torch.equal(kept[:, :2].abs(), magnitude[:, :2].float())
    error = (kept.abs() - magnitude).abs()
    least = (values[expected.abs().long()] - magnitude).abs()
    assert (error <= least * (1 + 1e-4) + 1e-7).all()


def test_moments_are_as_near_as_in_bitsandbytes_code(device):
    """The largest part of a moment is nearer: its steps end in powers of 8 where theirs end in
    powers of 10.
    """
    functional = pytest.importorskip("bitsandbytes.functional")
    for moment in (
        torch.randn(200 * MOMENT_BLOCK, device=device),
        torch.randn(200 * MOMENT_BLOCK, device=device).square(),
    ):
        signed = bool((moment < 0).any())
        codes, scales = quantize_moment(moment, signed)
        each = scales.repeat_interleave(MOMENT_BLOCK)
        code = functional.create_dynamic_map(signed).to(device)
        theirs = code[torch.bucketize(moment / each, (code[1:] + code[:-1]) / 2)] * each
        ours = dequantize_moment(codes, scales, signed)
        assert (ours - moment).square().mean() < (theirs - moment).square().mean()


def test_the_kernel_finds_the_nearest_values_too(device):
    """Of moments that are the gradient alone, over all powers and the limits between codes, and
    of blocks of zeros.
    """
    for signed in (True, False):
        values = stands_for(signed)
        limits = ((values[1:] + values[:-1]) / 2)[:, None] * (1 + torch.tensor([-1e-4, 1e-4]))
        blocks = 10.0 ** torch.empty(40, MOMENT_BLOCK).uniform_(-8.5, 0)
        blocks.view(-1)[: limits.numel()] = limits.flatten()
        blocks[:, -2:] = torch.tensor([0.0, 1.0])
        blocks[-1] = 0.0
        blocks = (
            blocks * torch.randn(40, MOMENT_BLOCK).sign() * torch.logspace(-6, 3, 40)[:, None]
        ).to(device)
        moment = blocks if signed else blocks.abs()
        gradient = moment if signed else moment.sqrt()
        tensors = drawn(torch.float32, torch.float32, device, [blocks.shape])
        tensors.gradients[0] = gradient
        adamw_8bit_(tensors, **{**OPTIONS, "betas": (0.0, 0.0)})
        codes, scales = (
            (tensors.means, tensors.mean_scales)
            if signed
            else (tensors.squares, tensors.square_scales)
        )
        expected, largest = quantize_moment(gradient if signed else gradient * gradient, signed)
        torch.testing.assert_close(scales[0], largest, rtol=1e-6, atol=0.0)
        differ = (codes[0].int() - expected.int()).abs()
        assert differ.max() <= 1 and (differ > 0).float().mean() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"factor": 0.5}, {"apply": True}, {"apply": False}], ids=str
)
@pytest.mark.parametrize(("dtype", "gradient_dtype"), DTYPES, ids=str)
def test_it_is_its_reference(dtype, gradient_dtype, options, device):
    given = {name: torch.tensor(value, device=device) for name, value in options.items()}
    ours = drawn(dtype, gradient_dtype, device)
    plain = copy.deepcopy(ours)
    before = copy.deepcopy(ours)
    adamw_8bit_(ours, **OPTIONS, **given)
    adamw_8bit_reference_(plain, **OPTIONS, **given)
    are_alike(ours, plain)
    if options.get("apply") is False:
        assert all(
            torch.equal(new, old)
            for new, old in zip(everything(ours), everything(before), strict=True)
        )


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "gradient_dtype"), DTYPES, ids=str)
def test_the_update_is_by_the_book(dtype, gradient_dtype, device):
    """With moments as the codes say them, and those that are kept are near those in fp32."""
    tensors = drawn(dtype, gradient_dtype, device)
    own = copy.deepcopy(tensors)
    wide = Tensors(own.weights, own.gradients, lows=own.lows, steps=own.steps)
    wide.means = [dequantize_moment(c, s, True) for c, s in zip(tensors.means, tensors.mean_scales)]
    wide.squares = [
        dequantize_moment(c, s, False) for c, s in zip(tensors.squares, tensors.square_scales)
    ]
    adamw_8bit_(tensors, **OPTIONS)
    fused_adamw_reference_(wide, **OPTIONS)
    for n, weight in enumerate(tensors.weights):
        value = join_master(weight, tensors.lows[n]) if tensors.lows else weight
        expected = join_master(wide.weights[n], wide.lows[n]) if wide.lows else wide.weights[n]
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
        for codes, scales, signed, exact in (
            (tensors.means[n], tensors.mean_scales[n], True, wide.means[n]),
            (tensors.squares[n], tensors.square_scales[n], False, wide.squares[n]),
        ):
            error = (dequantize_moment(codes, scales, signed) - exact).abs().max()
            assert error <= 0.007 * exact.abs().max(), "half a step of the largest power"


def test_weights_without_a_master_are_rounded_stochastically(device):
    tensors = drawn(torch.bfloat16, torch.float32, device, [(64, MOMENT_BLOCK)], master=False)
    tensors.gradients[0].fill_(1.0)
    tensors.weights[0].fill_(256.0)  # spacing 2: a step of about 0.03 is less
    for codes, scales, signed in zip(*(parts_of(tensors)[n::2] for n in (0, 1)), (True, False)):
        codes[0], scales[0] = quantize_moment(torch.ones(64, MOMENT_BLOCK, device=device), signed)
    tensors.steps[0].fill_(1000.0)
    adamw_8bit_(tensors, lr=0.03, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    if device.type == "cpu":
        assert set(tensors.weights[0].unique().tolist()) <= {255.0, 256.0, 254.0}
    mean = tensors.weights[0].float().mean().item()
    assert 255.9 < mean < 256.0


@pytest.mark.slow
def test_each_weight_may_stay(device):
    tensors = drawn(torch.float32, torch.float32, device)
    before = copy.deepcopy(tensors)
    stays = torch.tensor([n % 2 == 0 for n in range(len(SHAPES))], device=device)
    adamw_8bit_(tensors, **OPTIONS, apply=~stays)
    for n, stay in enumerate(stays.tolist()):
        same = [
            torch.equal(new[n], old[n]) for new, old in zip(parts_of(tensors), parts_of(before))
        ]
        assert torch.equal(tensors.weights[n], before.weights[n]) == stay and (
            all(same) or not stay
        )
        assert tensors.steps[n] == before.steps[n] + (not stay)


def test_what_does_not_fit_is_refused(device):
    tensors = drawn(torch.float32, torch.float32, device, [(4,)])
    with pytest.raises(ValueError, match="give a scalar, or a value for each of 1 weights"):
        adamw_8bit_(tensors, **OPTIONS, apply=torch.ones(2, dtype=torch.bool))
    tensors.means[0] = tensors.means[0].float()
    with pytest.raises(ValueError, match="codes in uint8"):
        adamw_8bit_(tensors, **OPTIONS)
    adamw_8bit_(QuantizedTensors(), **OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.fma(v, v_scale[:, None], g * g)", "tl.fma(v, v_scale[:, None], g)"),
        ("beta1 * (7 / M_LARGEST)", "beta2 * (7 / M_LARGEST)"),
        ("tl.max(tl.abs(m), axis=1)", "tl.max(m, axis=1)"),
        ("v_scale * over", "v_scale"),
        (
            "(seven.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | sign",
            "seven.to(tl.int32, bitcast=True) & 0x7FFFFFFF",
        ),
        (
            "_above_2_23(code) - (8388608 + 127 if SIGNED else 8388608)",
            "_above_2_23(code) - (8388608 + 128 if SIGNED else 8388608)",
        ),
        (
            "(magnitude.to(tl.int32, bitcast=True) >> 23) * (43 << 16)",
            "(magnitude.to(tl.int32, bitcast=True) >> 23) * (42 << 16)",
        ),
        ("tl.fma(power, -6 / 7, rank)", "tl.fma(power, -5 / 7, rank)"),
        ("_reciprocal(tl.fma(_sqrt(v), of_root, eps))", "tl.fma(_sqrt(v), of_root, eps)"),
        ("scale > LEAST", "scale > 1.0"),
    ],
)
def test_a_planted_fault_is_found(old, new, device):
    wrong = mutant(module, old, new)
    ours = drawn(torch.float32, torch.float32, device)
    plain = copy.deepcopy(ours)
    wrong.adamw_8bit_(ours, **OPTIONS)
    adamw_8bit_reference_(plain, **OPTIONS)
    with pytest.raises(AssertionError):
        are_alike(ours, plain)
