"""MXFP4: values are those of transformers' own dequantising, bit by bit."""

import pytest
import torch

from chronicals.kernels import mxfp4
from chronicals.kernels.mxfp4 import dequantize_mxfp4, dequantize_mxfp4_reference
from mutants import mutant

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter

TYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 32), (7, 96), (131, 64)]


def drawn(rows, columns, seed=0):
    """Codes, and scales of which every number is among the first 256."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 256, (rows, columns // 32), generator=generator, dtype=torch.uint8)
    scales.view(-1)[:256] = torch.arange(min(256, scales.numel())).to(torch.uint8).flip(0)
    return codes, scales


def by_transformers(codes, scales, dtype):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rows, blocks = scales.shape
    values = convert_moe_packed_tensors(
        codes.cpu().view(1, rows, blocks, 16), scales.cpu()[None], dtype=dtype
    )
    return values[0].t()


def same_bits(one, other):
    """NaN is NaN whatever its bits; zeros have signs."""
    both = one.isnan() & other.isnan()
    return bool((((one == other) & (one.signbit() == other.signbit())) | both).all())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows, columns", SHAPES)
def test_values_are_those_of_transformers(rows, columns, dtype, device):
    codes, scales = drawn(rows, columns)
    expected = by_transformers(codes, scales, dtype)
    codes = codes.to(device)
    scales = scales.to(device)
    buffer = torch.full((rows, columns + 24), 7.0, dtype=dtype, device=device)
    for out in (torch.empty(rows, columns, dtype=dtype, device=device), buffer[:, :columns]):
        assert same_bits(dequantize_mxfp4(codes, scales, out).cpu(), expected)
    assert (buffer[:, columns:] == 7.0).all(), "padding columns are written"
    plain = dequantize_mxfp4_reference(codes, scales, (rows, columns), dtype)
    assert same_bits(plain.cpu(), expected)


def test_values_are_those_of_gguf(device):
    """Whose blocks have the scale first and element i beside i + 16."""
    gguf = pytest.importorskip("gguf")
    codes, scales = drawn(40, 64)
    elements = torch.stack([codes & 15, codes >> 4], 2).view(-1, 2, 16)
    halves = elements[:, 0] | elements[:, 1] << 4
    packed = torch.cat([scales.view(-1, 1), halves], 1)
    expected = gguf.quants.dequantize(packed.numpy(), gguf.GGMLQuantizationType.MXFP4)
    out = torch.empty(40, 64, device=device)
    found = dequantize_mxfp4(codes.to(device), scales.to(device), out).cpu()
    assert torch.equal(found.view(-1, 32), torch.from_numpy(expected))


def test_what_does_not_fit_is_refused(device):
    codes, scales = (x.to(device) for x in drawn(8, 64))
    with pytest.raises(ValueError, match="256 bytes of codes and 16 scales are not 8 x 96 values"):
        dequantize_mxfp4(codes, scales, torch.empty(8, 96, device=device))
    with pytest.raises(ValueError, match="give uint8"):
        dequantize_mxfp4(codes.float(), scales, torch.empty(8, 64, device=device))
    with pytest.raises(ValueError, match="rows are dense"):
        dequantize_mxfp4(codes, scales, torch.empty(64, 8, device=device).t())


def test_it_is_an_operator_of_torch(device):
    codes, scales = (x.to(device).view(-1) for x in drawn(8, 64))
    out = torch.empty(8, 64, device=device)
    torch.library.opcheck(mxfp4._dequantize, (codes, scales, out))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("element % 2", "1 - element % 2"),
        ("2 + (magnitude & 1)", "3 - (magnitude & 1)"),
        ("tl.where(code >= 8, -1.0, 1.0)", "1.0"),
        ("exponent - 1", "exponent"),
        ("tl.minimum(exponent, 1)", "0"),
        ("row * stride", "row * blocks_a_row * 32"),
    ],
)
def test_a_planted_fault_is_found(old, new, device):
    codes, scales = (x.to(device) for x in drawn(131, 64))
    wrong = mutant(mxfp4, old, new)
    buffer = torch.zeros(131, 72, device=device)
    found = wrong.dequantize_mxfp4(codes, scales, buffer[:, :64])
    assert not same_bits(found.cpu(), by_transformers(codes, scales, torch.float32))
