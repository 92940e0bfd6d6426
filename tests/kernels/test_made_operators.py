"""What ``operator`` makes of a function."""

import pytest
import torch
from torch import Tensor

from chronicals.kernels import operators, qk_rope, rmsnorm
from chronicals.kernels.operators import operator


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
    assert torch.equal(double(rows(3), 2), 4 * rows(3)) and operators.OPERATOR_FUNCTIONS[double](
        rows(3), 0
    ).equal(rows(3))


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
    assert isinstance(made, torch._ops.OpOverload) and made in operators.OPERATOR_FUNCTIONS


def test_a_name_is_given_once():
    with pytest.raises(RuntimeError, match="multiple times"):
        operator("chronicals_tested::double")(operators.OPERATOR_FUNCTIONS[double])
