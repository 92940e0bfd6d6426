"""A form: the computation of one kind of module as kernels, recognised by structure and proved on a
module of a twin.

A candidate is compared with the module's own forward, values and gradients of the input and of
every parameter, on random inputs of several scales. Numbers that a module keeps (an epsilon, a
multiplier) are random during the proof, so a form that does not read them from the instance does
not pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from chronicals.lora.parameter_layer import innermost
from chronicals.models.rebinding import OURS
from chronicals.quantization import Experts4bit

VALUE_TOLERANCE = 3e-5
"""Relative to the largest value, in fp32."""

Forward = Callable[[Any, Tensor], Tensor]


OF_A_RUN = ("training", "forward", "gradient_checkpointing")
"""Attributes of a module that a run sets, which say nothing of its kind."""

FORM = OURS
"""Attribute of functions that replace a module's forward: the name of their form."""


LOOKS_ON = "transformers.utils.output_capturing"
"""Module of transformers whose hooks record values and change nothing."""


@dataclass(frozen=True)
class Form:
    """What runs in place of a module's forward.

    Attributes:
        by: its name in the report.
        forward: takes the module and its input.
        reads: how the module is read by a larger form that contains it, such as a fused decoder
            layer; None if it cannot be.
    """

    by: str
    forward: Callable
    reads: Any = None

    def __post_init__(self) -> None:
        setattr(self.forward, FORM, self.by)


def looks_like(module: nn.Module) -> bool:
    """Whether a reader of the report would expect this module among those that a kernel runs: a
    norm or an MLP.
    """
    vectors = [p for p in module._parameters.values() if p is not None]
    flat = bool(vectors) and all(p.ndim == 1 for p in vectors) and not module._modules
    norm = flat and not hasattr(
        module, "in_features"
    )  # codes of a linear layer in 4 bits are a vector, too
    others = [child for child in module.children() if not isinstance(child, nn.Linear)]
    linear = sum(isinstance(child, nn.Linear) for child in module.children())
    mlp = (
        linear in (2, 3)
        and not vectors
        and all(next(child.parameters(), None) is None for child in others)
    )
    return norm or (mlp and takes_one_tensor(module))


def holds_experts(module: nn.Module) -> bool:
    """Whether the module holds the weights of several experts in one parameter."""
    stacked = any(
        p is not None and p.ndim == 3 and min(p.shape) > 1 for p in module._parameters.values()
    )
    return stacked and not isinstance(module, _ConvNd)


def takes_one_tensor(module: nn.Module) -> bool:
    """Whether the module's forward needs exactly one argument."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    needed = [
        p
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(needed) == 1 and needed[0] is parameters[0]


def does_more(module: nn.Module) -> bool:
    """Whether a call of the module does more than the forward of its class, or ours in its
    place: it has hooks or another forward. Hooks of transformers that record hidden states do
    not count; they stay once such states were asked for."""
    own = vars(module).get("forward")
    if own is not None and not hasattr(getattr(own, "__func__", None), FORM):
        return True
    kinds = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(
        getattr(hook, "__module__", None) != LOOKS_ON for hooks in kinds for hook in hooks.values()
    )


def drops(module: nn.Module) -> bool:
    """Whether it is dropout with a probability above 0, which no form computes."""
    return isinstance(module, nn.Dropout) and bool(module.p)


def as_called(module: nn.Module, forward: Forward) -> Callable:
    """``forward`` for callers who name the one argument; where more is given, the class's own
    forward runs.
    """
    name = list(inspect.signature(type(module).forward).parameters)[1]

    def called(module: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            return forward(module, args[0])
        if not args and len(kwargs) == 1 and name in kwargs:
            return forward(module, kwargs[name])
        return type(module).forward(module, *args, **kwargs)

    return called


def signature(module: nn.Module) -> tuple:
    """What an instance must share with the one that was proved: class, parameters that are
    there, children, numbers' names.
    """
    own = {name: None if p is None else p.ndim for name, p in module._parameters.items()}
    # linear children become adapters and quantised layers; the others, an activation among them,
    # stay what they are
    children = (
        (name, None if hasattr(x, "in_features") else _stands_for(x))
        for name, x in module._modules.items()
    )
    return (
        type(module),
        tuple(own.items()),
        tuple(children),
        tuple(numbers(module)),
        settings(module),
    )


def _stands_for(child: nn.Module | None) -> type:
    """The class of a child; of experts in 4 bits, and of experts and routers with adapters, that
    of what they compute.
    """
    inner = None if child is None else innermost(child)
    if isinstance(inner, Experts4bit):
        return type(inner.inner)
    return type(child) if hasattr(inner, "in_features") else type(inner)


def numbers(module: nn.Module) -> list[str]:
    """Names of the numbers that a module keeps."""
    return [name for name, value in vars(module).items() if type(value) is float and name[0] != "_"]


def settings(module: nn.Module) -> tuple:
    """Switches, words and functions that a module keeps; sizes are not among them, nor what is
    set for a run.
    """
    kinds = (bool, str, FunctionType, BuiltinFunctionType)
    return tuple(
        (name, value) for name, value in attributes(module).items() if type(value) in kinds
    )


def attributes(module: nn.Module) -> dict[str, Any]:
    """What a module keeps beside its children and tensors, but for what is set for a run."""
    return {
        name: value
        for name, value in vars(module).items()
        if name[0] != "_" and name not in OF_A_RUN
    }


@contextmanager
def random_numbers(module: nn.Module) -> Iterator[None]:
    kept = {name: getattr(module, name) for name in numbers(module)}
    for name in kept:
        setattr(module, name, float(torch.empty(()).uniform_(0.01, 0.1)))
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)


def is_proved(
    module: nn.Module, forward: Forward, inputs: list[Tensor], own: Forward | None = None
) -> bool:
    """Whether ``forward`` gives what the module (by ``own``, or its class) gives, with its
    gradients, for every input.
    """
    own = type(module).forward if own is None else own
    return all(_alike(_run(module, own, x), _run(module, forward, x)) for x in inputs)


def _run(module: nn.Module, forward: Callable, x: Tensor) -> list[Tensor] | None:
    leaves = [x.detach().clone().requires_grad_(), *module.parameters()]
    out = forward(module, leaves[0])
    if not isinstance(out, Tensor) or not out.requires_grad:
        return None
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)
    gradients = torch.autograd.grad(out, leaves, upstream, allow_unused=True)
    return [
        out.detach(),
        *(torch.zeros_like(p) if g is None else g for p, g in zip(leaves, gradients)),
    ]


def _alike(expected: list[Tensor] | None, got: list[Tensor] | None) -> bool:
    if expected is None or got is None:
        return False
    return all(
        a.shape == b.shape and a.dtype == b.dtype and _distance(a, b) <= VALUE_TOLERANCE
        for a, b in zip(expected, got)
    )


def _distance(expected: Tensor, got: Tensor) -> float:
    return (
        float((expected - got).abs().max() / expected.abs().max().clamp(min=1e-12))
        if expected.numel()
        else 0.0
    )
