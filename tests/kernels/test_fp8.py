"""fp8_quantize against its formula, bit by bit: scales over tensors, rows, blocks and squares,
in both layouts at once.
"""

from importlib.metadata import version

import pytest
import torch

from chronicals.kernels import fp8
from chronicals.kernels.fp8 import (
    FP8_MAX,
    FP8_SCALINGS,
    dequantize,
    fp8_quantize,
    fp8_quantize_reference,
    fp8_transposed,
)
from chronicals.kernels.launch import tl, triton
from mutants import mutant

LAYOUTS = ["rows", "columns", "both"]
SHAPES = [(1, 1), (1, 300), (131, 1), (128, 128), (130, 257), (16, 512), (257, 97)]
STEP = 2.0**-9
"""The smallest number of e4m3."""


def draw(shape, dtype, device):
    """Over many magnitudes, so that every exponent occurs."""
    return (
        torch.randn(*shape, device=device)
        * 10.0 ** torch.empty(shape, device=device).uniform_(-4, 2)
    ).to(dtype)


def assert_equal(got, expected, device):
    assert (got is None) == (expected is None)
    if expected is None:
        return
    assert got.values.dtype == expected.values.dtype and got.values.is_contiguous()
    assert (
        torch.equal(got.scale, expected.scale.to(device))
        and got.scale.shape == expected.scale.shape
    )
    assert torch.equal(bits_of(got.values.cpu()), bits_of(expected.values))


def bits_of(values):
    """One for all that is no number, whose sign is the machine's."""
    return torch.where(values.float().isnan(), 127, values.view(torch.uint8))


def assert_both_equal(quantize, x, scaling, device):
    for ours, exact in zip(
        quantize(x, scaling, layout="both"), fp8_quantize_reference(x.cpu(), scaling, layout="both")
    ):
        assert_equal(ours, exact, device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scaling", FP8_SCALINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_formula(shape, scaling, layout, device):
    for dtype, kind in zip((torch.bfloat16, torch.float32), FP8_MAX, strict=True):
        x = draw(shape, dtype, device)
        got = fp8_quantize(x, scaling, kind, layout)
        expected = fp8_quantize_reference(x.cpu(), scaling, kind, layout)
        for ours, exact in zip(got, expected, strict=True):
            assert_equal(ours, exact, device)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", FP8_SCALINGS)
def test_what_lies_beside_strips_and_tiles_has_no_part(scaling, device):
    """Of whole and of broken ones, in either direction."""
    high = fp8.AMAX_STRIP[0]
    wide = fp8.FP8_BLOCK
    for rows, width in ((high + 18, 33), (2 * high, wide), (high, wide + 2), (wide + 2, wide)):
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.full((rows + 2, width + 6), float("inf"), dtype=dtype, device=device)[
                1:-1, :width
            ]
            x.copy_(draw((rows, width), dtype, device))
            assert_both_equal(fp8_quantize, x, scaling, device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_scale_that_is_known(layout, device):
    """Values beyond its limit stay at the limit."""
    for dtype in (torch.bfloat16, torch.float32):
        x = draw((130, 257), dtype, device)
        scale = torch.tensor(0.37, device=device)
        for ours, exact in zip(
            fp8_quantize(x, layout=layout, scale=scale),
            fp8_quantize_reference(x.cpu(), layout=layout, scale=scale.cpu()),
        ):
            assert_equal(ours, exact, device)
    with pytest.raises(
        ValueError,
        match="scaling='row': only the scale or the maximum of a whole tensor can be given",
    ):
        fp8_quantize(x, "row", scale=scale)


@pytest.mark.parametrize("scaling", FP8_SCALINGS)
def test_what_it_stands_for(scaling, device):
    """Within half a spacing of fp8: 2⁻⁴ of a value, or half the smallest step times the scale."""
    x = draw((200, 300), torch.float32, device)
    rows, columns = fp8_quantize(x, scaling, layout="both")
    for found, exact in ((rows, x), (columns, x.t())):
        away = (dequantize(found) - exact).abs()
        step = dequantize(found._replace(values=torch.ones_like(found.values)))
        assert (away <= exact.abs() * 2**-4 + step * STEP).all()


@pytest.mark.parametrize("scaling", ["tensor", "square"])
def test_both_layouts_hold_the_same_values(scaling, device):
    rows, columns = fp8_quantize(draw((257, 130), torch.bfloat16, device), scaling, layout="both")
    assert torch.equal(rows.values.float(), columns.values.float().t())
    assert torch.equal(rows.scale, columns.scale.t())


@pytest.mark.slow
@pytest.mark.parametrize("scaling", FP8_SCALINGS)
def test_rows_with_gaps_and_transposes(scaling, device):
    wide = draw((140, 400), torch.bfloat16, device)
    for x in (wide[:, :200], wide[::2], wide.t()):
        for ours, exact in zip(
            fp8_quantize(x, scaling, layout="both"),
            fp8_quantize_reference(x.cpu(), scaling, layout="both"),
        ):
            assert_equal(ours, exact, device)


@pytest.mark.parametrize("scaling", FP8_SCALINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_and_what_is_no_number(dtype, scaling, device):
    if (
        device.type == "cpu"
        and scaling in ("block", "square")
        and version("triton").startswith("3.6.")
    ):
        pytest.skip(
            "in the interpreter of Triton 3.6 a maximum over two axes is not a number where one "
            "element is none"
        )
    x = torch.zeros(130, 140, dtype=dtype, device=device)
    rows, columns = fp8_quantize(x, scaling, layout="both")
    for found in (rows, columns):
        assert (found.scale == 1.0).all() and not found.values.float().any()
    x[3, 5], x[3, 6], x[129, 130], x[4, 5], x[5, 5] = (
        float("nan"),
        2.0,
        float("inf"),
        64.0,
        float("nan"),
    )
    assert_both_equal(fp8_quantize, x, scaling, device)
    for found, exact in zip(fp8_quantize(x, scaling, layout="both"), (x, x.t())):
        meant = dequantize(found)
        assert meant[exact.isnan()].isnan().all() and not meant[exact.isinf()].isfinite().any()
        if scaling != "tensor":  # whose scale is infinite now
            assert float(meant[exact == 2.0]) == 2.0


@pytest.mark.slow
def test_a_part_of_a_row_without_numbers_has_no_part_in_its_scale(device):
    x = torch.ones(130, 260, device=device)
    x[3, 128:256] = float("nan")
    assert_both_equal(fp8_quantize, x, "row", device)
    unfiltered = mutant(
        fp8,
        "tl.where(most == most, most, 0.0).to(tl.int32, bitcast=True)",
        "most.to(tl.int32, bitcast=True)",
    )
    with pytest.raises(AssertionError):
        assert_both_equal(unfiltered.fp8_quantize, x, "row", device)


@pytest.mark.parametrize("scaling", FP8_SCALINGS)
def test_what_is_too_small_for_an_inverse(scaling, device):
    """Zeros beside it stay zeros, and what is no number is alone with it."""
    x = torch.zeros(130, 140, device=device)
    x[3, 5], x[7] = 1e-36, float("nan")
    for dtype in FP8_MAX:
        for ours, exact in zip(
            fp8_quantize(x, scaling, dtype, "both"),
            fp8_quantize_reference(x.cpu(), scaling, dtype, "both"),
            strict=True,
        ):
            assert_equal(ours, exact, device)
            assert (
                int(ours.values.float().isnan().sum()) == 140
                and float(dequantize(ours).nan_to_num().abs().max()) <= 1.1e-36
            )


@triton.jit
def _inverses_kernel(scale_ptr, inverse_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(inverse_ptr + at, fp8._inverse(tl.load(scale_ptr + at)))


@pytest.mark.gpu
@pytest.mark.parametrize("exponent", [1, 2, 64, 127, 200, 247, 251], ids=lambda n: f"2^{n - 127}")
def test_every_inverse_is_rounded_right(exponent, device):
    """Of all mantissas, from the smallest scale to beyond fp32's largest number over 448."""
    bits = torch.arange(2**23, dtype=torch.int32, device=device) + (exponent << 23)
    scale = bits.view(torch.float32)
    found = torch.empty_like(scale)
    _inverses_kernel[(2**23 // 1024,)](scale, found, 1024)
    assert torch.equal(found, 1.0 / scale)
    assert torch.equal(found[::4099].cpu(), torch.from_numpy(1 / scale[::4099].cpu().numpy()))


@pytest.mark.parametrize("shape", [(0, 16), (16, 0)], ids=str)
@pytest.mark.parametrize("scaling", FP8_SCALINGS)
def test_nothing(shape, scaling, device):
    x = torch.empty(shape, device=device)
    for ours, exact in zip(
        fp8_quantize(x, scaling, layout="both"),
        fp8_quantize_reference(x.cpu(), scaling, layout="both"),
    ):
        assert ours.values.shape == exact.values.shape and ours.scale.shape == exact.scale.shape


def test_rows_too_wide_for_one_program(set_constants, device):
    set_constants(fp8, MAX_ROW_WIDTH=256)
    x = draw((9, 300), torch.bfloat16, device)
    assert_equal(fp8_quantize(x, "row")[0], fp8_quantize_reference(x.cpu(), "row")[0], device)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [*SHAPES, (0, 16), (300, 129)], ids=str)
def test_turned_they_are_the_columns(shape, device):
    """Quantised as such, with the scale of the rows, bit by bit; NaN and both zeros included."""
    for dtype in FP8_MAX:
        x = draw(shape, torch.bfloat16, device)
        x.view(-1)[::7], x.view(-1)[::11], x.view(-1)[::13] = 0.0, -0.0, float("nan")
        rows, columns = fp8_quantize(x, dtype=dtype, layout="both")
        assert_equal(fp8_transposed(rows), fp8.Scaled(columns.values.cpu(), columns.scale), device)


def test_what_has_no_common_scale_is_not_turned(device):
    with pytest.raises(ValueError, match=r"scale has shape \(4, 1\): only a matrix with one scale"):
        fp8_transposed(fp8_quantize(torch.randn(4, 8, device=device), "row")[0])


@pytest.mark.parametrize(
    "options", [{"scaling": "column"}, {"dtype": torch.int8}, {"layout": "transposed"}], ids=str
)
def test_unknown_options_are_refused(options, device):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}: expected one of"):
        fp8_quantize(torch.ones(2, 2, device=device), **options)
    with pytest.raises(ValueError, match=r"shape \(2,\): expected \[M, K\]"):
        fp8_quantize(torch.ones(2, device=device))


@pytest.mark.slow
def test_compiled(device):
    x = draw((130, 257), torch.bfloat16, device)
    compiled = torch.compile(
        lambda x: fp8_quantize(x, "block", layout="both"), backend="aot_eager", fullgraph=True
    )
    for got, expected in zip(compiled(x), fp8_quantize(x, "block", layout="both")):
        assert torch.equal(got.values.float(), expected.values.float()) and torch.equal(
            got.scale, expected.scale
        )


FAULTS = {
    "a scale that is not inverted": (
        "values * _inverse(scale)[:, None]",
        "values * scale[:, None]",
    ),
    "scales of the first blocks": ("scale_ptr + beside.to(tl.int64) * size", "scale_ptr"),
    "the scale of another row": (
        (
            "_scales(most, of_rows_ptr, rows_scale_ptr, row + n, rows, left, tile, SCALING, "
            "KNOWN, LIMIT)"
        ),
        (
            "_scales(most, of_rows_ptr, rows_scale_ptr, row, rows, left, tile, SCALING, "
            "KNOWN, LIMIT)"
        ),
    ),
    "the first row twice": ("row + 1", "row"),
    "a column upside down": (
        "columns_ptr + column.to(tl.int64)[:, None] * (rows // 4) + four[None, :]",
        (
            "columns_ptr + column.to(tl.int64)[:, None] * (rows // 4) + (rows // 4 - 1 - "
            "four)[None, :]"
        ),
    ),
    "four of a column upside down": (
        "transposed >> 8 * n & 255",
        "transposed >> 8 * (3 - n) & 255",
    ),
    "the last row of a broken four left out": (
        "(4 * four + n < rows)",
        "(4 * four + n < rows - 1)",
    ),
    "the fourth row without a part in a maximum": ("_largest(a, b, c, d)", "_largest(a, b, c, c)"),
    "the maximum of a block with its sign": ("tl.max(tl.abs(values), 1)", "tl.max(values, 1)"),
    "the maximum with its sign": (
        "sizes = tl.abs(given.to(tl.float32))",
        "sizes = given.to(tl.float32)",
    ),
    "the first strip alone": ("top = tl.program_id(0) // across * HIGH", "top = 0"),
    "the last rows of a strip alone": ("tl.maximum(most, sizes)", "sizes"),
    "scales of rows for columns": (
        (
            "_scales(most, of_columns_ptr, columns_scale_ptr, column, width, top, tile, "
            "SCALING, KNOWN, LIMIT)"
        ),
        (
            "_scales(most, of_rows_ptr, columns_scale_ptr, column, width, top, tile, "
            "SCALING, KNOWN, LIMIT)"
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, device):
    wrong = mutant(fp8, *FAULTS[fault])
    with pytest.raises(AssertionError):
        for rows in (532, 131):
            x = draw((rows, 140), torch.float32, device)
            x[-1, -1] = -1e4
            for scaling in FP8_SCALINGS:
                assert_both_equal(wrong.fp8_quantize, x, scaling, device)
