"""Kernels run here as they do on a card."""

import pytest

from interpreted import kernels_run


@pytest.fixture(autouse=True)
def kernels():
    with kernels_run():
        yield
