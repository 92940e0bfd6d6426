"""4-bit weights: codes, scales and values are those of bitsandbytes, bit by bit."""

import itertools

import pytest
import torch

from chronicals.kernels import nf4
from chronicals.kernels.nf4 import (
    BLOCK_SIZES,
    CODE_VALUES,
    SCALE_BLOCK,
    Scales,
    code_of,
    dequantize_4bit,
    dequantize_4bit_reference,
    dynamic_code,
    quantize_nf4,
    quantize_nf4_reference,
    quantize_scales,
)
from mutants import mutant

TYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (5, 7), (64, 64), (37, 96), (130, 257), (3, 4096)]


@pytest.fixture(scope="module")
def theirs():
    return pytest.importorskip("bitsandbytes.functional")


def weight(shape, dtype, device):
    """Some blocks of it zero, some far larger than others."""
    drawn = torch.randn(shape, device=device) * 10.0 ** torch.empty(
        shape[0], 1, device=device
    ).uniform_(-3, 2)
    return (drawn * (torch.rand(shape[0], 1, device=device) > 0.2)).to(dtype)


def test_codes_are_theirs(theirs, device):
    for name in CODE_VALUES:
        assert torch.equal(code_of(name, device), theirs.get_4bit_type(name, device=device))
    assert torch.equal(dynamic_code(device), theirs.create_dynamic_map().to(device))


@pytest.mark.parametrize("block", BLOCK_SIZES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_codes_and_scales_of_a_weight_are_theirs(theirs, dtype, block, device):
    """But in blocks of zeros on a card: any code times a scale of zero is zero, and there
    bitsandbytes takes another.
    """
    for shape in SHAPES:
        given = weight(shape, dtype, device) + (
            0.001 if shape[0] * shape[1] % block else 0
        )  # the end of a weight is no zero
        packed, state = theirs.quantize_4bit(given, blocksize=block, quant_type="nf4")
        for quantize in (quantize_nf4, quantize_nf4_reference):
            codes, absmax = quantize(given, block)
            judged = absmax.repeat_interleave(block // 2)[: len(codes)] > (
                0 if device.type == "cuda" else -1
            )
            same = torch.equal(codes[judged], packed.view(-1)[judged])
            assert bool((codes[~judged] == 0x77).all()), "two codes of zero"
            assert same and torch.equal(absmax, state.absmax), (shape, quantize.__name__)


@pytest.mark.slow
@pytest.mark.parametrize("code", CODE_VALUES)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_values_are_theirs(theirs, dtype, nested, code, device):
    """Where a row is no whole number of blocks, bitsandbytes' own kernel for the CPU takes
    scales of other blocks.
    """
    for shape, block in [((64, 64), 64), ((37, 96), 32), ((3, 4096), 512), ((640, 128), 64)]:
        given = weight(shape, torch.float32, device)
        packed, state = theirs.quantize_4bit(
            given, blocksize=block, quant_type=code, compress_statistics=nested
        )
        state.dtype = dtype
        scales = Scales(state.absmax)
        if nested:
            scales = Scales(
                state.absmax,
                state.state2.absmax,
                state.state2.code,
                state.offset,
                state.state2.blocksize,
            )
        expected = theirs.dequantize_4bit(packed, state)
        out = torch.empty(shape, dtype=dtype, device=device)
        assert torch.equal(dequantize_4bit(packed.view(-1), scales, out, block, code), expected)
        assert torch.equal(
            dequantize_4bit_reference(packed.view(-1), scales, shape, dtype, block, code), expected
        )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_kernel_is_its_reference(dtype, device):
    for shape, block, nested in itertools.product(SHAPES, (32, 64, 4096), (False, True)):
        packed, absmax = quantize_nf4_reference(weight(shape, dtype, device), block)
        scales = quantize_scales(absmax) if nested else Scales(absmax)
        expected = dequantize_4bit_reference(packed, scales, shape, dtype, block)
        buffer = torch.full((shape[0], shape[1] + 24), 7.0, dtype=dtype, device=device)
        for out in (torch.empty(shape, dtype=dtype, device=device), buffer[:, : shape[1]]):
            assert torch.equal(dequantize_4bit(packed, scales, out, block), expected)
        assert (buffer[:, shape[1] :] == 7.0).all(), "padding columns are written"


@pytest.mark.parametrize("block", [64, 4096])
def test_plain_torch_takes_a_large_weight_in_pieces(block, record_calls, let_return, set_constants):
    """With the same codes, scales and values; where rows lie apart it takes it whole."""
    given = weight((97, 271), torch.float32, torch.device("cpu"))
    codes, absmax = quantize_nf4_reference(given, block)
    quantized = record_calls(nf4, "quantize_nf4_reference")
    dequantized = record_calls(nf4, "dequantize_4bit_reference")
    set_constants(nf4, PIECE_ELEMENTS=8192)
    let_return(nf4, runs_triton=False)
    found = quantize_nf4(given, block)
    assert torch.equal(found[0], codes) and torch.equal(found[1], absmax) and len(quantized) == 4
    for scales in (Scales(absmax), quantize_scales(absmax)):
        expected = dequantize_4bit_reference(codes, scales, (97, 271), torch.bfloat16, block)
        for wide, times in ((271, 4), (280, 1)):
            dequantized.clear()
            out = torch.zeros(97, wide, dtype=torch.bfloat16)[:, :271]
            assert (
                torch.equal(dequantize_4bit(codes, scales, out, block), expected)
                and len(dequantized) == times
            )


def test_scales_are_the_nearest_of_the_dynamic_code(device):
    absmax = torch.rand(5 * SCALE_BLOCK + 77, device=device) * 4
    scales = quantize_scales(absmax)
    largest = scales.absmax2.repeat_interleave(SCALE_BLOCK)[: len(absmax)]
    scaled = (absmax - scales.offset) / largest
    error = (dynamic_code(device)[scales.absmax.int()] - scaled).abs()
    nearest = (dynamic_code(device)[None] - scaled[:, None]).abs().amin(1)
    assert (error <= nearest + 1e-6).all()
    assert (scales.plain() - absmax).abs().max() <= 0.02 * absmax.max()


@pytest.mark.slow
def test_scales_are_theirs(theirs, device):
    """On the CPU bitsandbytes finds some of them by a table that takes a neighbour close to a
    midpoint.
    """
    given = torch.randn(512, 1024, device=device)
    _, state = theirs.quantize_4bit(given, blocksize=64, quant_type="nf4", compress_statistics=True)
    scales = quantize_scales(quantize_nf4(given)[1])
    assert torch.equal(scales.absmax2, state.state2.absmax) and torch.equal(
        scales.offset, state.offset
    )
    assert (scales.absmax != state.absmax).float().mean() <= (0.01 if device.type == "cpu" else 0.0)


@pytest.mark.slow
def test_a_quantized_weight_is_near_and_takes_little(device):
    given = torch.randn(256, 512, device=device)
    packed, absmax = quantize_nf4(given)
    scales = quantize_scales(absmax)
    out = dequantize_4bit(packed, scales, torch.empty_like(given))
    assert 0.05 < ((out - given).norm() / given.norm()).item() < 0.12
    held = (packed, scales.absmax, scales.absmax2)
    assert 8 * sum(x.nbytes for x in held) / given.numel() == pytest.approx(
        4 + 8 / 64 + 32 / (64 * 256)
    )


def test_what_does_not_fit_is_refused(device):
    packed, absmax = quantize_nf4(torch.randn(8, 64, device=device))
    with pytest.raises(ValueError, match="block=48: give one of 32, 64"):
        quantize_nf4(torch.randn(8, 64, device=device), 48)
    with pytest.raises(ValueError, match="float64"):
        quantize_nf4(torch.randn(8, 64, dtype=torch.float64, device=device))
    with pytest.raises(ValueError, match="256 bytes and 8 scales are not those of 8 x 66"):
        dequantize_4bit(packed, Scales(absmax), torch.empty(8, 66, device=device))
    with pytest.raises(ValueError, match="rows are dense"):
        dequantize_4bit(packed, Scales(absmax), torch.empty(64, 8, device=device).t())
    with pytest.raises(ValueError, match="code='int4'"):
        dequantize_4bit(packed, Scales(absmax), torch.empty(8, 64, device=device), code="int4")


@pytest.mark.parametrize("triton", [True, False])
def test_scales_in_blocks_of_another_size(triton, let_return, device):
    if not triton:
        let_return(nf4, runs_triton=False)
    packed, absmax = quantize_nf4_reference(torch.randn(16, 640, device=device))
    codes = torch.randint(0, 256, absmax.shape, dtype=torch.uint8, device=device)
    scales = Scales(
        codes, torch.rand(2, device=device), dynamic_code(device), absmax.mean(), block2=128
    )
    expected = dequantize_4bit_reference(packed, scales, (16, 640), torch.float32)
    assert torch.equal(
        dequantize_4bit(packed, scales, torch.empty(16, 640, device=device)), expected
    )


def test_it_is_an_operator_of_torch(device):
    packed, absmax = quantize_nf4(torch.randn(8, 64, device=device))
    out = torch.empty(8, 64, device=device)
    torch.library.opcheck(
        nf4._dequantize, (packed, absmax, None, None, None, SCALE_BLOCK, out, 64, "nf4")
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(first * 16 + second)", "(first + second * 16)"),
        ("absmax = absmax + tl.load(offset_ptr)", "absmax = absmax"),
        ("block // BLOCK2", "block // SIZE"),
        (
            "out_ptr + (start + element) // columns * stride + (start + element) % columns",
            "out_ptr + start + element",
        ),
        ("row.to(tl.int64) * stride", "row.to(tl.int64) * columns"),
        ("(value > bound)", "(value >= 0.5 * bound)"),
        ("value * 16 + 16.5", "value * 16 + 17.5"),
    ],
)
def test_a_planted_fault_is_found(old, new, device):
    wrong = mutant(nf4, old, new)
    same = []
    for columns in (300, 320):  # some blocks in two rows, or none
        given = torch.randn(96, columns, device=device)
        packed, absmax = quantize_nf4_reference(given)
        scales = quantize_scales(absmax)
        out = torch.zeros(96, columns + 8, device=device)[:, :columns]
        expected = dequantize_4bit_reference(packed, scales, (96, columns), torch.float32)
        same += [torch.equal(wrong.quantize_nf4(given)[0], packed)]
        same += [torch.equal(wrong.dequantize_4bit(packed, scales, out), expected)]
    assert not all(same)


@pytest.mark.parametrize("shape", [(3, 64), (5, 33), (7, 1), (129, 65)])
def test_sizes_on_the_meta_device_are_those_of_values(shape):
    weight = torch.randn(shape)
    for made, planned in zip(quantize_nf4(weight), quantize_nf4(weight.to("meta")), strict=True):
        assert planned.is_meta and (planned.shape, planned.dtype) == (made.shape, made.dtype)
