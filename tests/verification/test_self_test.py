import torch

from chronicals.verification import inspect_machine, self_test
from chronicals.verification import self_test as module


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
        "linear_cross_entropy",
        "attention",
        "adamw",
    }
    for result in results:
        assert result.passed, result
        assert 0 < result.error < 0.05


def test_a_wrong_kernel_is_found(monkeypatch):
    import sys

    module = sys.modules["chronicals.verification.self_test"]
    monkeypatch.setattr(module, "fused_swiglu", lambda gate, up: torch.nn.functional.silu(gate) * up * 1.02)
    assert [result.name for result in self_test() if not result.passed] == ["swiglu"]


def test_the_machine_is_described():
    machine = inspect_machine()
    assert torch.__version__.startswith(machine["torch"])
    assert machine["cores"] >= 1
    assert module is not None
