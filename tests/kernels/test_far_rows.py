"""Row kernels where offsets pass 2³¹ elements: the last rows of an input whose rows lie far apart.

Only the pages of memory that rows lie in are ever touched.
"""

import pytest
import torch

from chronicals.kernels import fused_add_rmsnorm, fused_rmsnorm
from chronicals.kernels.glu import glu_of_both
from interpreted import kernels_run

STRIDE = 1 << 20
"""Elements between two rows."""

ROWS = 2**31 // STRIDE + 3
WIDTH = 16


@pytest.fixture(scope="module")
def far():
    """``[ROWS, WIDTH]`` in bf16 over 4 GiB of addresses."""
    memory = torch.empty(ROWS * STRIDE, dtype=torch.bfloat16)
    rows = memory.as_strided((ROWS, WIDTH), (STRIDE, 1))
    rows.copy_(torch.randn(ROWS, WIDTH))
    return rows


KERNELS = {
    "rmsnorm": lambda x: fused_rmsnorm(x, torch.linspace(0.5, 1.5, WIDTH).to(x), 1e-6),
    "add_rmsnorm": lambda x: fused_add_rmsnorm(
        x, x, torch.linspace(0.5, 1.5, WIDTH).to(x), 1e-6, 0.0
    )[0],
    "swiglu": lambda x: glu_of_both(x, "silu"),
}


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_beyond_two_to_the_31_are_read_where_they_lie(kernel, far, device):
    if device.type != "cpu":
        pytest.skip("the card's test of the whole length is benchmarks/long_documents.py")
    assert far[-1].data_ptr() - far.data_ptr() > 2 * 2**31
    near = far.contiguous()
    with kernels_run():
        got, expected = (KERNELS[kernel](x) for x in (far, near))
    assert torch.equal(got[-4:], expected[-4:]) and torch.equal(got[:4], expected[:4])
