"""Dense copies of packed layers: where they fit, as long as they are wanted, with the same results."""

import logging

import pytest
import torch
from torch import nn

from chronicals.kernels.nf4_product import FASTER_ROWS
from chronicals.quantization import LayerProduct, Linear4bit, Packed, dense_copies
from interpreted import kernels_run

NEEDED = 24 * 128 * 2
"""Bytes of a copy."""


@pytest.fixture
def model(device):
    layers = (nn.Linear(128, 24, bias=False, device=device).bfloat16() for _ in range(3))
    return nn.ModuleList(Linear4bit.of(layer) for layer in layers)


def copies(model, rows, memory):
    return dense_copies([LayerProduct(layer) for layer in model], rows, memory)


def copied(model):
    return [layer.dense_copy is not None for layer in model]


@pytest.fixture
def dequantised(monkeypatch):
    """Counts how often a weight is dequantised."""
    calls = []
    own = Packed.dense
    monkeypatch.setattr(Packed, "dense", lambda self: calls.append(0) or own(self))
    return calls


def test_within_nothing_is_dequantised_and_nothing_changes(model, dequantised, device):
    x = torch.randn(70, 128, device=device).bfloat16()
    expected = [layer(x) for layer in model]
    with copies(model, 70, 3 * NEEDED):
        dequantised.clear()
        assert all(torch.equal(layer(x), y) for layer, y in zip(model, expected))
        assert not dequantised and copied(model) == [True] * 3
    assert copied(model) == [False] * 3


def test_as_many_layers_as_fit_have_a_copy(model, caplog):
    caplog.set_level(logging.INFO)
    for memory, count in ((2 * NEEDED, 2), (3 * NEEDED - 1, 2), (NEEDED - 1, 0)):
        with copies(model, 70, memory):
            assert sum(copied(model)) == count
    said = [record.message for record in caplog.records if "packed weights" in record.message]
    assert len(said) == 2, "the same is said once"
    assert said[0].startswith("2 of 3 packed weights have a dense copy")
    assert said[1].startswith("no memory is spare for dense copies, ") and "3 packed" in said[1]


def test_few_rows_need_no_copy_where_the_kernel_runs(model, device):
    with kernels_run(), copies(model, FASTER_ROWS, 3 * NEEDED):
        assert copied(model) == [False] * 3
    with kernels_run(), copies(model, FASTER_ROWS + 1, 3 * NEEDED):
        assert copied(model) == [True] * 3
        model[0].dense_copy.fill_(float("nan"))
        with torch.no_grad():  # the last answers of many are few rows
            x = torch.randn(2, 128, device=device).bfloat16()
            few = model[0](x)
    with kernels_run(), torch.no_grad():
        assert torch.equal(few, model[0](x))


def test_more_rows_are_multiplied_by_a_copy_if_there_is_one(model, dequantised, device):
    """Up to 64 the kernel dequantises inside the product, which is slower beyond few of them."""
    x = torch.randn(64, 128, device=device).bfloat16()
    with kernels_run(), torch.no_grad():
        with copies(model, 64, 3 * NEEDED):
            model[0].dense_copy.zero_()
            assert not model[0](x).any()
        dequantised.clear()
        assert model[0](x).any() and not dequantised


def test_copies_are_dropped_after_an_error(model):
    with pytest.raises(RuntimeError, match="stop"), copies(model, 70, 3 * NEEDED):
        raise RuntimeError("stop")
    assert copied(model) == [False] * 3
