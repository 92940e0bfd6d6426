"""The one way kernels are compared: error against fp64 beside the plain operation's own error in
the same type.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FROBENIUS = 1.5
LARGEST = 2.0
"""Ours may be so many times as wrong as the plain operation, in relative Frobenius norm and in
the largest element (in the mean of the largest, where several pools are compared)."""

ROUNDINGS = 2
"""Or this many roundings of the output type at the tensor's scale, whichever is larger. A
rounding is off by half a spacing at most, which is what counts in the norm; in the largest
element the halves of several may meet."""

SAMPLES = 256
DRAWS = 16
"""Tensors with fewer elements say little in one draw: draws of the inputs that hold so many, or
so many draws, are compared as one tensor."""

ATTEMPTS = 3
LARGER = 4
CHANCE = 3.0
"""An excess by chance does not come three times one after the other, with so many times more
pools each time, nearer to what is true of all inputs; nor is it so many times the limit."""


@dataclass(frozen=True)
class Result:
    """An output or gradient of one draw: the type ours had, and the three values in fp64, flat."""

    what: str
    dtype: torch.dtype
    exact: Tensor
    ours: Tensor
    plain: Tensor


def outputs_and_gradients(
    function: Callable, inputs: Sequence[Tensor], upstream: Sequence[Tensor]
) -> list[Tensor]:
    """Results of ``function`` (one tensor or several) and the gradients of every floating-point
    input.
    """
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    out = function(*leaves)
    outs = [out] if isinstance(out, Tensor) else list(out)
    wanted = [x for x in leaves if x.requires_grad]
    gradients = torch.autograd.grad(
        outs, wanted, [g.to(o.dtype) for g, o in zip(upstream, outs, strict=True)]
    )
    return [*(o.detach() for o in outs), *gradients]


def equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold the same values, wherever they lie: a run moves its model
    to the card.
    """
    return torch.equal(one, other.to(one.device))


def equal_but_for_means(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of a layer in 4 bits hold the same values.

    On a card the mean of a layer's scales is summed in another order from one time to the next.
    There its last bit may differ, and with it the rounding of a few scales by one step.
    """
    other = other.to(one.device)
    if one.shape == other.shape and torch.equal(one, other):
        return True
    if not torch.cuda.is_available():
        return False
    if one.is_floating_point():
        return torch.allclose(one, other, rtol=1e-6, atol=1e-7)
    if bytes(one[:1].tolist()) == b"{":  # bitsandbytes' quant_state, which is JSON
        described, expected = (json.loads(bytes(state.tolist())) for state in (one, other))
        offset, mean = (state.pop("nested_offset") for state in (described, expected))
        return described == expected and math.isclose(offset, mean, rel_tol=1e-6)
    steps = (one.int() - other.int()).abs()
    return int(steps.max()) <= 1 and float((steps > 0).float().mean()) <= 0.01


def assert_as_exact_as_plain(
    ours: Callable,
    plain: Callable,
    draw: Callable[[], Sequence[Tensor]],
    upstream_scale: float = 3.0,
    what: str = "",
    exact: Callable | None = None,
) -> None:
    """Compare ``ours`` and ``plain`` in the type of the inputs with ``exact`` in fp64 on the CPU.

    Outputs and gradients of all floating-point inputs, from one random upstream gradient of scale
    ``upstream_scale``. Tensors are numbered: first the outputs, then the gradients.

    Args:
        draw: returns fresh inputs.
        exact: the definition; ``plain`` itself by default.
    """
    for attempt in range(ATTEMPTS):
        pools = LARGER**attempt
        drawn = [_results(ours, plain, exact or plain, draw(), upstream_scale, what)]
        smallest = min(
            (result.exact.numel() for result in drawn[0] if result.exact.numel()), default=SAMPLES
        )
        draws = min(-(-SAMPLES // smallest), DRAWS) * pools
        drawn += [
            _results(ours, plain, exact or plain, draw(), upstream_scale, what)
            for _ in range(draws - 1)
        ]
        excesses = [
            excess for results in zip(*drawn, strict=True) for excess in _excesses(results, pools)
        ]
        if not excesses:
            return
        worst, message = max(excesses)
        if worst > CHANCE or attempt == ATTEMPTS - 1:
            raise AssertionError(message)


def _results(
    ours: Callable,
    plain: Callable,
    exact: Callable,
    inputs: Sequence[Tensor],
    upstream_scale: float,
    what: str,
) -> list[Result]:
    """``(exact, ours, plain)`` of every output and gradient, in fp64. All see the same upstream
    gradient, one that the output's own type can hold; gradients come per unit of it, so that no
    draw outweighs the others of a pool."""
    exact_inputs = [x.detach().cpu().double() if x.is_floating_point() else x.cpu() for x in inputs]
    with torch.no_grad():
        samples = plain(*[x.detach() for x in inputs])
    samples = [samples] if isinstance(samples, Tensor) else list(samples)
    upstream = [torch.randn_like(sample) * upstream_scale for sample in samples]
    expected = outputs_and_gradients(exact, exact_inputs, [g.cpu() for g in upstream])
    got = outputs_and_gradients(ours, inputs, upstream)
    reference = outputs_and_gradients(plain, inputs, upstream)
    unit = torch.cat([g.double().flatten() for g in upstream]).norm().item() or 1.0
    found = []
    for number, (e, g, r) in enumerate(zip(expected, got, reference, strict=True)):
        name = f"{what} tensor {number}".strip()
        assert g.shape == e.shape, f"{name}: shape {tuple(g.shape)}, expected {tuple(e.shape)}"
        assert g.dtype == r.dtype, f"{name}: type {g.dtype}, expected {r.dtype}"
        assert torch.isfinite(g).all(), f"{name}: not finite"
        scale = unit if number >= len(samples) else 1.0
        found.append(
            Result(name, g.dtype, *(x.cpu().double().flatten() / scale for x in (e, g, r)))
        )
    return found


def _excesses(draws: Sequence[Result], pools: int) -> list[tuple[float, str]]:
    """By how many times ours is beyond the limit, and how to say it; empty where it is not."""

    def largest(x: Tensor) -> Tensor:
        return torch.stack([pool.abs().max() for pool in x.tensor_split(pools)]).mean()

    what = draws[0].what
    spacing = torch.finfo(draws[0].dtype).eps
    exact, ours, plain = (
        torch.cat(column) for column in zip(*((d.exact, d.ours, d.plain) for d in draws))
    )
    own_error = ours - exact
    plain_error = plain - exact
    found = []
    for name, norm, factor, rounding, samples in (
        ("Frobenius", torch.linalg.vector_norm, FROBENIUS, spacing / 2, 1),
        (
            "largest",
            largest,
            LARGEST,
            spacing,
            SAMPLES * pools,
        ),  # the largest of a few is mostly chance
    ):
        if exact.numel() < samples:
            continue
        limit = max(factor * norm(plain_error), ROUNDINGS * rounding * norm(exact)).item()
        error = norm(own_error).item()
        if not error <= limit:
            message = (
                f"{what}: {name} error {error:.3e}, allowed {limit:.3e} (plain "
                f"{norm(plain_error):.3e})"
            )
            found.append((error / limit if limit else float("inf"), message))
    return found
