"""What tests of weights share."""

import pytest

from interpreted import kernels_run


@pytest.fixture(params=["kernels", "references"])
def kernels(request):
    """The kernel that dequantises, and what runs in its place where Triton does not."""
    if request.param == "references":
        yield
        return
    with kernels_run():
        yield
