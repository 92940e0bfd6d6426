"""What all kernels share: none is differentiated twice, and where they run."""

import logging
from types import SimpleNamespace

import pytest
import torch

from chronicals.kernels import (
    fp8_linear,
    fused_add_rmsnorm,
    fused_geglu,
    fused_layernorm,
    fused_qk_norm_rope,
    fused_qk_rope,
    fused_rmsnorm,
    fused_softmax,
    launch,
    linear_cross_entropy,
    linear_distillation,
    token_log_probability,
)
from chronicals.kernels.glu import glu_of_both
from chronicals.kernels.linear_distillation import Divergence, LinearHead
from chronicals.lora.merged_linear import MergedWeights, merged_linear

WIDTH = 16
VECTOR = torch.arange(1.0, WIDTH + 1)
MATRIX = torch.eye(WIDTH) + 0.5
TARGETS = torch.arange(6)
TABLE = torch.linspace(0, 3, 6 * 4).view(6, 4)


def heads(x):
    return x.view(6, 2, 8)


DIFFERENTIATED = {
    "rmsnorm": lambda x: fused_rmsnorm(x, VECTOR.to(x)),
    "rmsnorm of three dimensions": lambda x: fused_rmsnorm(x.view(2, 3, WIDTH), VECTOR.to(x)),
    "add_rmsnorm": lambda x: fused_add_rmsnorm(x, x, VECTOR.to(x))[0],
    "layernorm": lambda x: fused_layernorm(x, VECTOR.to(x), None),
    "softmax": lambda x: fused_softmax(x) * VECTOR.to(x),
    "geglu": lambda x: fused_geglu(x.view(2, 3, WIDTH), x.view(2, 3, WIDTH)),
    "glu_of_both": lambda x: glu_of_both(x, "silu"),
    "qk_rope": lambda x: fused_qk_rope(heads(x), heads(x), TABLE.to(x), TABLE.to(x))[0],
    "qk_norm_rope": lambda x: fused_qk_norm_rope(
        heads(x), heads(x), VECTOR[:8].to(x), VECTOR[:8].to(x), TABLE.to(x), TABLE.to(x)
    )[0],
    "linear_cross_entropy": lambda x: linear_cross_entropy(x, MATRIX.to(x), TARGETS.to(x.device)),
    "linear_distillation": lambda x: (
        linear_distillation(
            LinearHead(x, MATRIX.to(x)),
            LinearHead(x.detach(), MATRIX.to(x)),
            TARGETS.to(x.device),
            Divergence.reverse_kl(),
        ).loss
    ),
    "token_log_probability": lambda x: token_log_probability(x, MATRIX.to(x), TARGETS.to(x.device))[
        0
    ],
    "fp8_linear": lambda x: fp8_linear(x, MATRIX.to(x)),
    "merged_linear": lambda x: merged_linear(
        x, MergedWeights.fused([MATRIX.to(x)], [None], (0,)), [None]
    ),
}


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_a_second_derivative_is_refused_not_left_out(name, device):
    """The upstream gradient is a constant: without a word the penalty would lack what passes the
    operation.
    """
    x = torch.randn(6, WIDTH, device=device, requires_grad=True)
    loss = DIFFERENTIATED[name](x).sum() + x.pow(3).sum()
    with pytest.raises(RuntimeError, match="create_graph=True: .* has no second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_kernels_run_on_the_current_card_only(monkeypatch, caplog):
    """Triton launches there whatever card its tensors are on; elsewhere the reference runs,
    which is said once.
    """
    monkeypatch.setattr(launch, "_interpreted", False)
    monkeypatch.setattr(launch, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    here, there = (
        SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, get_device=lambda n=n: n)
        for n in (0, 61)
    )
    with caplog.at_level(logging.WARNING):
        assert (
            launch.runs_triton(here, here)
            and not launch.runs_triton(there, there)
            and not launch.runs_triton(there)
        )
    assert [
        record.getMessage().count("torch.cuda.set_device(61)") for record in caplog.records
    ] == [1]
