"""What all kernels share: none is differentiated twice, and where they run."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

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
    qk_rope,
    rmsnorm,
    token_log_probability,
)
from chronicals.kernels.glu import glu_of_both
from chronicals.kernels.launch import operator
from chronicals.kernels.linear_distillation import Divergence
from chronicals.kernels.linear_head import LinearHead
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


def test_kernels_run_on_the_current_card_only(monkeypatch, let_return, set_constants, caplog):
    """Triton launches there whatever card its tensors are on; elsewhere the reference runs,
    which is said once.
    """
    monkeypatch.setattr(launch, "_interpreted", False)
    set_constants(launch, HAS_TRITON=True)
    let_return(torch.cuda, current_device=0)
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


@operator("chronicals_tested::double")
def double(x: Tensor, times: int) -> Tensor:
    return x * 2**times


@torch.library.register_fake(double)
def _(x: Tensor, times: int) -> Tensor:
    return torch.empty_like(x)


@operator("chronicals_tested::write", mutates=("first", "last"))
def write(first: Tensor, source: Tensor, last: Tensor) -> None:
    first.data.copy_(source)
    last.data.copy_(source + 1)


def rows(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_an_operator_returns_what_its_function_does():
    assert torch.equal(double(rows(3), 2), 4 * rows(3)) and launch.OPERATOR_FUNCTIONS[double](
        rows(3), 0
    ).equal(rows(3))


@pytest.mark.slow
def test_torch_knows_what_it_returns_and_writes():
    torch.library.opcheck(double, (rows(3, 5), 1))
    torch.library.opcheck(write, (rows(3), rows(3), rows(3)))


def test_what_is_written_has_another_version():
    """So that autograd refuses a gradient from a value that is no longer there; what is read
    keeps its version.
    """
    given = [rows(3) for _ in range(3)]
    before = [x._version for x in given]
    write(*given)
    assert [x._version - old for x, old in zip(given, before)] == [1, 0, 1]
    x = rows(3).requires_grad_()
    y = x.exp()
    write(y.detach(), rows(3), rows(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_tensors_without_versions_are_written():
    with torch.inference_mode():
        first = rows(3) + 0
        last = rows(3) + 0
        write(first, torch.ones(3), last)
    assert torch.equal(first, torch.ones(3)) and torch.equal(last, torch.full((3,), 2.0))


@pytest.mark.slow
def test_it_is_one_node_of_a_compiled_function():
    def function(x, out, last):
        write(out, double(x, 1) + 1, last)
        return out.sum() + double(last, 0).sum()

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    outs = [(torch.zeros(3), torch.zeros(3)) for _ in range(2)]
    assert torch.allclose(compiled(rows(3), *outs[0]), function(rows(3), *outs[1]))
    assert all(torch.equal(a, b) for a, b in zip(*outs))


def test_a_gradient_is_not_lost_in_silence():
    """An operator has none of its own: what asks for one through it is warned."""
    x = rows(3).requires_grad_()
    with pytest.warns(UserWarning, match="chronicals_tested::double"):
        double(x, 1).sum().backward()


@pytest.mark.parametrize("made", [rmsnorm._forward, qk_rope._rotate_in_place], ids=str)
def test_kernels_are_made_so(made):
    assert isinstance(made, torch._ops.OpOverload) and made in launch.OPERATOR_FUNCTIONS


def test_a_name_is_given_once():
    with pytest.raises(RuntimeError, match="multiple times"):
        operator("chronicals_tested::double")(launch.OPERATOR_FUNCTIONS[double])
