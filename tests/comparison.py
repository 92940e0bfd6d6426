"""The one way kernels are compared: error against fp64 beside the plain operation's own error in the same type."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FROBENIUS, LARGEST = 1.5, 2.0
"""Ours may be so many times as wrong as the plain operation, in relative Frobenius norm and in the largest element."""

ROUNDINGS = 2
"""Or this many roundings (half a spacing each) of the output type at the tensor's scale, whichever is larger."""

POOLED = 1024
"""Tensors with fewer elements say little in one draw: several draws of the inputs are compared as one tensor."""

DRAWS = 16

Inputs = Sequence[Tensor] | Callable[[], Sequence[Tensor]]


def outputs_and_gradients(function: Callable, inputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> list[Tensor]:
    """Results of ``function`` (one tensor or several) and the gradients of every floating-point input."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    out = function(*leaves)
    outs = [out] if isinstance(out, Tensor) else list(out)
    wanted = [x for x in leaves if x.requires_grad]
    gradients = torch.autograd.grad(outs, wanted, [g.to(o.dtype) for g, o in zip(upstream, outs, strict=True)])
    return [*(o.detach() for o in outs), *gradients]


def assert_as_exact_as_plain(
    ours: Callable,
    plain: Callable,
    inputs: Inputs,
    upstream_scale: float = 3.0,
    what: str = "",
    exact: Callable | None = None,
) -> None:
    """Compare ``ours`` and ``plain`` in the type of ``inputs`` with ``exact`` in fp64 on the CPU.

    Outputs and gradients of all floating-point inputs, from one random upstream gradient of scale ``upstream_scale``.

    Args:
        inputs: tensors, or a function that draws fresh ones. Where it is a function and the tensors are small, several
            draws are pooled: one element, or a dozen, may be exact by chance.
        exact: the definition; ``plain`` itself by default.
    """
    draw = inputs if callable(inputs) else lambda: inputs
    drawn = [_errors(ours, plain, exact or plain, draw(), upstream_scale)]
    if callable(inputs) and any(e.numel() < POOLED for e, _, _ in drawn[0]):
        drawn += [_errors(ours, plain, exact or plain, draw(), upstream_scale) for _ in range(DRAWS - 1)]
    for number, draws in enumerate(zip(*drawn, strict=True)):
        for e, g, r in draws:
            assert g.shape == e.shape, f"{what} tensor {number}: shape {tuple(g.shape)}, expected {tuple(e.shape)}"
            assert g.dtype == r.dtype, f"{what} tensor {number}: type {g.dtype}, expected {r.dtype}"
        pooled = [torch.cat([x.detach().cpu().flatten() for x in column]) for column in zip(*draws, strict=True)]
        _assert_one(*pooled, what=f"{what} tensor {number}")


def _errors(
    ours: Callable, plain: Callable, exact: Callable, inputs: Sequence[Tensor], upstream_scale: float
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """``(exact, ours, plain)`` of every output and gradient. All three see the same upstream gradient, so it is one
    that the output's own type can hold."""
    exact_inputs = [x.detach().cpu().double() if x.is_floating_point() else x.cpu() for x in inputs]
    with torch.no_grad():
        samples = plain(*[x.detach() for x in inputs])
    samples = [samples] if isinstance(samples, Tensor) else list(samples)
    upstream = [torch.randn_like(sample) * upstream_scale for sample in samples]
    return list(
        zip(
            outputs_and_gradients(exact, exact_inputs, [g.cpu() for g in upstream]),
            outputs_and_gradients(ours, inputs, upstream),
            outputs_and_gradients(plain, inputs, upstream),
            strict=True,
        )
    )


def _assert_one(exact: Tensor, got: Tensor, plain: Tensor, what: str) -> None:
    ours, theirs = (x.double() - exact for x in (got, plain))
    assert torch.isfinite(ours).all(), f"{what}: not finite"
    if not exact.numel():
        return
    rounding = ROUNDINGS * torch.finfo(got.dtype).eps / 2
    for name, norm, factor in (
        ("Frobenius", torch.linalg.vector_norm, FROBENIUS),
        ("largest", lambda x: x.abs().max(), LARGEST),
    ):
        if name == "largest" and exact.numel() < POOLED:  # the largest of a few errors is mostly chance
            continue
        scale = norm(exact)
        limit = max(factor * norm(theirs), rounding * scale, torch.tensor(torch.finfo(torch.float64).tiny))
        assert norm(ours) <= limit, (
            f"{what}: {name} error {norm(ours):.3e}, allowed {limit:.3e} (plain {norm(theirs):.3e})"
        )
