"""Kernels run here as they do on a card, or through Triton's interpreter where there is none."""

import contextlib

import pytest
import torch

from chronicals.kernels.launch import interpreting


@pytest.fixture(autouse=True)
def kernels():
    with contextlib.nullcontext() if torch.cuda.is_available() else interpreting():
        yield
