"""The one way kernels are compared: error against fp64 beside the plain operation's own error in the same type."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FROBENIUS, LARGEST = 1.5, 2.0
"""Ours may be so many times as wrong as the plain operation, in relative Frobenius norm and in the largest element."""

ROUNDINGS = 2
"""Or this many roundings of the output type at the tensor's scale, whichever is larger."""


def outputs_and_gradients(function: Callable, inputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> list[Tensor]:
    """Results of ``function`` (one tensor or several) and the gradients of every floating-point input."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    out = function(*leaves)
    outs = [out] if isinstance(out, Tensor) else list(out)
    wanted = [x for x in leaves if x.requires_grad]
    gradients = torch.autograd.grad(outs, wanted, [g.to(o.dtype) for g, o in zip(upstream, outs)])
    return [*(o.detach() for o in outs), *gradients]


def assert_as_exact_as_plain(
    ours: Callable, plain: Callable, inputs: Sequence[Tensor], upstream_scale: float = 3.0, what: str = ""
) -> None:
    """Compare ``ours`` and ``plain`` in the type of ``inputs`` with ``plain`` in fp64 on the CPU.

    Outputs and gradients of all floating-point inputs, from one random upstream gradient of scale ``upstream_scale``.
    """
    exact_inputs = [x.detach().cpu().double() if x.is_floating_point() else x.cpu() for x in inputs]
    with torch.no_grad():
        shapes = plain(*exact_inputs)
    shapes = [shapes] if isinstance(shapes, Tensor) else list(shapes)
    upstream = [torch.randn_like(s) * upstream_scale for s in shapes]
    exact = outputs_and_gradients(plain, exact_inputs, upstream)
    here = [g.to(inputs[0].device) for g in upstream]
    got = outputs_and_gradients(ours, inputs, here)
    reference = outputs_and_gradients(plain, inputs, here)
    for number, (e, g, r) in enumerate(zip(exact, got, reference)):
        _assert_one(e, g, r, f"{what} tensor {number}")


def _assert_one(exact: Tensor, got: Tensor, plain: Tensor, what: str) -> None:
    assert got.shape == exact.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    assert got.dtype == plain.dtype, f"{what}: type {got.dtype}, expected {plain.dtype}"
    ours, theirs = (x.detach().cpu().double() - exact for x in (got, plain))
    assert torch.isfinite(ours).all(), f"{what}: not finite"
    if not exact.numel():
        return
    rounding = ROUNDINGS * torch.finfo(got.dtype).eps
    for name, norm, factor in (
        ("Frobenius", torch.linalg.vector_norm, FROBENIUS),
        ("largest", lambda x: x.abs().max(), LARGEST),
    ):
        scale = norm(exact)
        limit = max(factor * norm(theirs), rounding * scale, torch.tensor(torch.finfo(torch.float64).tiny))
        assert norm(ours) <= limit, f"{what}: {name} error {norm(ours):.3e}, allowed {limit:.3e} (plain {norm(theirs):.3e})"
