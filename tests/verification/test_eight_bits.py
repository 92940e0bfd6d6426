"""Runs in FP8 beside a plain arm that rounds the same products: healthy ones pass, a scale that is wrong fails."""

import sys

import pytest
import torch
from torch import nn

import runs
import tiny
from chronicals.kernels.fp8 import dequantize, fp8_quantize
from chronicals.patching import fp8_layers, patch_parts
from chronicals.quantization import FP8
from chronicals.training import decisions, session
from chronicals.verification import verify
from chronicals.verification.eight_bits import round_products, rounded

FORMAT = sys.modules["chronicals.quantization.fp8"]
ADAPTERS = {"use_lora": True, "lora_rank": 8}


@pytest.fixture
def fused_anywhere(monkeypatch):
    for module in (decisions, session):
        monkeypatch.setattr(module, "why_not_fused", lambda *given: None)
    monkeypatch.setattr(fp8_layers, "LEAST", 16)


def compare(folder, **changes):
    model = tiny.llama(3)
    patch_parts(model, whole_layers=True)
    given = {"learning_rate": 2e-4, "batch_size": 1, "mixed_precision": "bf16", "use_fp8": True, **changes}
    return verify(model, tiny.tokenizer(), runs.config(folder, **given), tiny.chat_rows())


@pytest.mark.parametrize("changes", [{}, ADAPTERS, {**ADAPTERS, "memory": ["tiled_mlp"]}], ids=["full", "lora", "tiles"])
@pytest.mark.usefixtures("fused_anywhere")
def test_a_healthy_run_passes(tmp_path, changes):
    found = compare(tmp_path, **changes)
    assert found.passed, found.failures


def scale_wrongly(monkeypatch, factor, of_weights, where):
    """Scales of weights, or of what they are multiplied by, are off where this layout is asked for."""
    weights, usual, usual_weight = set(), FORMAT.fp8_quantize, FP8.dense

    def quantize(x, layout="rows", **options):
        made = usual(x, layout=layout, **options)
        if layout != where or (x.data_ptr() in weights) != of_weights:
            return made
        return tuple(part and part._replace(scale=part.scale * factor) for part in made)

    monkeypatch.setattr(FP8, "dense", lambda self: weights.add(self.weight.matrix.data_ptr()) or usual_weight(self))
    monkeypatch.setattr(FORMAT, "fp8_quantize", quantize)


@pytest.mark.parametrize(
    ("of_weights", "where", "changes"),
    [(False, "both", {}), (False, "columns", {}), (True, "columns", {}), (True, "both", ADAPTERS)],
    ids=["gradients", "x for dW", "weights for dX", "frozen weights"],
)
@pytest.mark.usefixtures("fused_anywhere")
def test_a_wrong_scale_fails(tmp_path, monkeypatch, of_weights, where, changes):
    scale_wrongly(monkeypatch, 1.3, of_weights, where)
    assert not compare(tmp_path, **changes).passed


def test_the_plain_rounding_is_that_of_the_formula():
    x = torch.randn(40, 50)
    torch.testing.assert_close(rounded(x), dequantize(fp8_quantize(x)[0]), rtol=1e-6, atol=0)


def test_a_rounded_layer_is_linear_up_to_rounding():
    layer, x = nn.Linear(64, 48), torch.randn(2, 30, 64, requires_grad=True)
    exact, dy = layer(x), torch.randn(2, 30, 48)
    leaves = [x, *layer.parameters()]
    expected = [exact, *torch.autograd.grad(exact, leaves, dy)]
    round_products(layer)
    y = layer(x)
    for ours, plain in zip([y, *torch.autograd.grad(y, leaves, dy)], expected):
        assert 0 <= (ours - plain).norm() <= 0.08 * plain.norm()
    assert not torch.equal(y, exact)
