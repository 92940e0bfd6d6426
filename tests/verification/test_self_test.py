"""The self-test of the kernels: everything passes here, and what is wrong is named."""

import sys

import pytest
import torch

from chronicals.verification import inspect_machine, self_test

MODULE = sys.modules["chronicals.verification.self_test"]


def test_every_kernel_passes_here():
    results = self_test()
    assert {result.name for result in results} >= {
        "rmsnorm",
        "layernorm",
        "softmax",
        "add_rmsnorm",
        "swiglu",
        "geglu",
        "token_log_probability",
        "qk_rope",
        "qk_norm_rope",
        "qkv_norm_rope",
        "linear_cross_entropy",
        "attention",
        "fp8_linear",
        "adamw",
        "gradient_norm",
        "dropped_products",
    }
    for result in results:
        assert result.passed, result
        assert 0 < result.error < (0.1 if result.name == "fp8_linear" else 0.05)


def test_a_wrong_kernel_is_found(monkeypatch):
    monkeypatch.setattr(MODULE, "fused_swiglu", lambda gate, up: torch.nn.functional.silu(gate) * up * 1.02)
    assert [result.name for result in self_test() if not result.passed] == ["swiglu"]


def test_a_wrong_norm_of_gradients_is_found(monkeypatch):
    """Every step is clipped by it."""
    right = MODULE.gradient_norm
    monkeypatch.setattr(MODULE, "gradient_norm", lambda tensors: right(tensors[1:]))
    assert [result.name for result in self_test() if not result.passed] == ["gradient_norm"]


@pytest.mark.parametrize("name", ["dropped_gradient_of_down", "add_dropped_product_"])
def test_another_mask_in_the_backward_pass_is_found(monkeypatch, name):
    right = getattr(MODULE, name)
    monkeypatch.setattr(MODULE, name, lambda one, other, *rest: right(one, other, *rest[:-2], rest[-2] + 1, rest[-1]))
    assert [result.name for result in self_test() if not result.passed] == ["dropped_products"]


def test_a_wrong_scale_is_found(monkeypatch):
    right = MODULE.fp8_linear
    monkeypatch.setattr(MODULE, "fp8_linear", lambda x, w: 1.1 * right(x, w))
    assert [result.name for result in self_test() if not result.passed] == ["fp8_linear"]


def test_the_machine_is_described():
    machine = inspect_machine()
    assert torch.__version__.startswith(machine["torch"])
    assert machine["cores"] >= 1
