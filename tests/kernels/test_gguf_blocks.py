"""Blocks of GGUF files: values are those of the package gguf, bit by bit."""

import pytest
import torch

from chronicals.kernels import gguf_blocks
from chronicals.kernels.gguf_blocks import (
    GGUF_GROUP_SIZE,
    GGUF_KINDS,
    dequantize_gguf,
    dequantize_gguf_reference,
)
from drawn_blocks import by_ggml, random_blocks
from mutants import mutant

TYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (5, 3), (37, 2), (13, 4)]
"""Rows, and blocks of 256 elements in each."""


def by_gguf(packed, kind):
    gguf = pytest.importorskip("gguf")
    return torch.from_numpy(
        gguf.quants.dequantize(packed.cpu().numpy(), gguf.GGMLQuantizationType[kind])
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_values_are_those_of_gguf(kind, dtype, device):
    for rows, blocks in SHAPES:
        columns = 256 * blocks + (GGUF_KINDS[kind][0] if GGUF_KINDS[kind][0] < 256 else 0)
        packed = random_blocks(rows, columns, kind, rows)
        expected = by_gguf(packed, kind).to(dtype)
        packed = packed.to(device)
        buffer = torch.full((rows, columns + 24), 7.0, dtype=dtype, device=device)
        for out in (torch.empty(rows, columns, dtype=dtype, device=device), buffer[:, :columns]):
            assert torch.equal(dequantize_gguf(packed, out, kind).cpu(), expected)
        assert (buffer[:, columns:] == 7.0).all(), "padding columns are written"
        assert torch.equal(
            dequantize_gguf_reference(packed, (rows, columns), dtype, kind).cpu(), expected
        )


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_a_scale_that_is_no_number_stays_none(kind, device):
    packed = random_blocks(3, 512, kind)
    place = 208 if kind == "Q6_K" else 0
    packed[1, place : place + 2] = torch.tensor([0, 0x7E], dtype=torch.uint8)
    out = dequantize_gguf(packed.to(device), torch.empty(3, 512, device=device), kind).cpu()
    torch.testing.assert_close(out, by_gguf(packed, kind), rtol=0, atol=0, equal_nan=True)
    assert out[1, : GGUF_KINDS[kind][0]].isnan().all() and not out[0].isnan().any()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_what_gguf_quantised_is_near(kind, device):
    gguf = pytest.importorskip("gguf")
    given = torch.randn(17, 320)
    packed = torch.from_numpy(
        gguf.quants.quantize(given.numpy(), gguf.GGMLQuantizationType[kind])
    ).to(device)
    out = dequantize_gguf(packed, torch.empty(17, 320, device=device), kind).cpu()
    assert torch.equal(out, by_gguf(packed, kind))
    assert (out - given).norm() / given.norm() < {"Q8_0": 0.011, "Q4_0": 0.172}[kind]


@pytest.mark.llama_cpp
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q6_K"])
def test_what_llama_cpp_quantised_is_near(kind, device):
    """Through ggml's own quantiser of a row."""
    given = torch.randn(9, 768)
    packed = by_ggml(given, kind)
    out = dequantize_gguf(packed.to(device), torch.empty(9, 768, device=device), kind).cpu()
    assert torch.equal(out, by_gguf(packed, kind))
    assert (out - given).norm() / given.norm() < {
        "Q8_0": 0.011,
        "Q4_0": 0.172,
        "Q4_K": 0.16,
        "Q6_K": 0.04,
    }[kind]


def test_what_does_not_fit_is_refused(device):
    packed = random_blocks(8, 256, "Q8_0").to(device)
    with pytest.raises(ValueError, match="kind='Q5_K': give one of Q8_0, Q4_0, Q4_K, Q6_K"):
        dequantize_gguf(packed, torch.empty(8, 256, device=device), "Q5_K")
    with pytest.raises(
        ValueError,
        match="2176 elements of torch.uint8 are not 8 x 288 values in Q8_0: give uint8, 34 bytes",
    ):
        dequantize_gguf(packed, torch.empty(8, 288, device=device), "Q8_0")
    with pytest.raises(ValueError, match="rows are dense"):
        dequantize_gguf(packed, torch.empty(256, 8, device=device).t(), "Q8_0")


@pytest.mark.slow
def test_it_is_an_operator_of_torch(device):
    packed = random_blocks(8, 256, "Q4_K").to(device)
    out = torch.empty(8, 256, device=device)
    torch.library.opcheck(gguf_blocks._dequantize, (packed.view(-1), out, "Q4_K"))


def test_groups_are_parts_of_blocks():
    assert GGUF_KINDS.keys() == GGUF_GROUP_SIZE.keys() and all(
        GGUF_KINDS[kind][0] % GGUF_GROUP_SIZE[kind] == 0 for kind in GGUF_KINDS
    )


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("Q8_0", "code.to(tl.int32) - ((code.to(tl.int32) >> 7) << 8)", "code.to(tl.int32)"),
        ("Q4_0", "group % 2", "1 - group % 2"),
        ("Q4_0", "((code & 15) - 8)", "((code & 15) - 7)"),
        ("Q4_K", "4 * (j % 2)", "4 - 4 * (j % 2)"),
        (
            "Q4_K",
            "scale = _half(at, there) * s\nleast = _half(at + 2, there) * m",
            "scale = _half(at, there) * m\nleast = _half(at + 2, there) * s",
        ),
        (
            "Q4_K",
            "scale = _half(at, there) * s\nleast = _half(at + 2, there) * m",
            "scale = _half(at + 2, there) * s\nleast = _half(at, there) * m",
        ),
        (
            "Q4_K",
            "tl.where(late, (third & 15) | ((first >> 2) & 48), first & 63)",
            "tl.where(late, (third & 15) | ((second >> 2) & 48), first & 63)",
        ),
        (
            "Q4_K",
            "scale[:, None] * (code & 15).to(tl.float32) - least[:, None]",
            "scale[:, None] * (code & 15).to(tl.float32) + least[:, None]",
        ),
        ("Q6_K", "(low | (high << 4)) - 32", "(high | (low << 4)) - 32"),
        ("Q6_K", "j % 4 * 16", "j % 2 * 16"),
        ("Q6_K", "(quarter // 2 * 4)", "(quarter % 2 * 4)"),
        ("Q8_0", "row.to(tl.int64) * stride", "row.to(tl.int64) * groups_a_row * SIZE"),
    ],
)
def test_a_planted_fault_is_found(kind, old, new, device):
    wrong = mutant(gguf_blocks, old, new)
    packed = random_blocks(11, 512, kind)
    out = wrong.dequantize_gguf(
        packed.to(device), torch.empty(11, 520, device=device)[:, :512], kind
    )
    assert not torch.equal(out.cpu(), by_gguf(packed, kind))


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        (
            "Q4_0",
            "[blocks[:, 2:] & 15, blocks[:, 2:] >> 4]",
            "[blocks[:, 2:] >> 4, blocks[:, 2:] & 15]",
        ),
        ("Q4_K", "(_halves(blocks, 0) * s)", "(_halves(blocks, 0) * m)"),
        ("Q4_K", "[codes & 15, codes >> 4]", "[codes >> 4, codes & 15]"),
        ("Q6_K", "(low | high << 4).view", "(high | low << 4).view"),
    ],
)
def test_a_fault_planted_in_the_reference_is_found(kind, old, new):
    wrong = mutant(gguf_blocks, old, new)
    packed = random_blocks(11, 512, kind)
    assert not torch.equal(
        wrong.dequantize_gguf_reference(packed, (11, 512), torch.float32, kind),
        by_gguf(packed, kind),
    )
