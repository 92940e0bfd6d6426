import pytest

from interpreted import kernels_run


@pytest.fixture
def kernels():
    """For files whose tests run the kernels, as on a card."""
    with kernels_run():
        yield
