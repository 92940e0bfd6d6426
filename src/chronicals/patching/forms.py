"""A form: the computation of one kind of module by kernels, recognised by structure and proved.

The proof compares a candidate with the module's own forward: outputs, and gradients of the input
and of every parameter, on random inputs of several scales. Numbers that a module stores (an
epsilon, a multiplier) are random during the proof, so a form that does not read them from the
instance does not pass.

It is proved on a module of a twin, or else on a shell: a small copy of a module of the user's
model, in fp32 on the CPU, without its tensors. A shell has the class of the module and its
settings. Its vectors, and the linear layers among its children (quantised, adapted or on the meta
device as they may be), are new, small and random.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from chronicals.lora.parameter_layer import innermost
from chronicals.models.rebinding import REPLACEMENT
from chronicals.quantization import class_module

VALUE_TOLERANCE = 3e-5
"""Largest difference relative to the largest value, in fp32."""

Forward = Callable[[Any, Tensor], Tensor]

RUN_ATTRIBUTES = ("training", "forward", "gradient_checkpointing")
"""Attributes of a module that a run sets; two modules of one kind may differ in them."""

FORM = REPLACEMENT
"""Attribute of functions that replace a module's forward: the name of their form."""

CAPTURING_HOOKS = "transformers.utils.output_capturing"
"""Module of transformers whose hooks record values and change nothing."""


@dataclass(frozen=True)
class Form:
    """A function that replaces a module's forward.

    Attributes:
        by: its name in the report.
        forward: the function; takes the module and its input.
        reads: how a larger form that contains the module reads it, such as a fused decoder layer;
            None if none can.
    """

    by: str
    forward: Callable
    reads: Any = None

    def __post_init__(self) -> None:
        setattr(self.forward, FORM, self.by)


def looks_like(module: nn.Module) -> bool:
    """Return whether a reader of the report would expect a kernel to run this module.

    That is so if it looks like a norm or an MLP.
    """
    vectors = [p for p in module._parameters.values() if p is not None]
    flat = bool(vectors) and all(p.ndim == 1 for p in vectors) and not module._modules
    # the codes of a linear layer in 4 bits are a vector, too
    norm = flat and not hasattr(module, "in_features")
    others = [child for child in module.children() if not isinstance(child, nn.Linear)]
    linear = sum(isinstance(child, nn.Linear) for child in module.children())
    mlp = (
        linear in (2, 3)
        and not vectors
        and all(next(child.parameters(), None) is None for child in others)
    )
    return norm or (mlp and takes_one_tensor(module))


def holds_experts(module: nn.Module) -> bool:
    """Return whether the module has the weights of several experts in one parameter."""
    stacked = any(
        p is not None and p.ndim == 3 and min(p.shape) > 1 for p in module._parameters.values()
    )
    return stacked and not isinstance(module, _ConvNd)


def takes_one_tensor(module: nn.Module) -> bool:
    """Return whether the module's forward requires exactly one argument."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    needed = [
        p
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(needed) == 1 and needed[0] is parameters[0]


def does_more(module: nn.Module) -> bool:
    """Return whether the module has hooks, or another forward than that of its class or form.

    Hooks of transformers that record hidden states do not count; they stay once such states were
    requested.
    """
    replaced = vars(module).get("forward")
    if replaced is not None and not hasattr(getattr(replaced, "__func__", None), FORM):
        return True
    kinds = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(
        getattr(hook, "__module__", None) != CAPTURING_HOOKS
        for hooks in kinds
        for hook in hooks.values()
    )


def drops(module: nn.Module) -> bool:
    """Return whether the module is dropout with a probability above 0, which no form computes."""
    return isinstance(module, nn.Dropout) and bool(module.p)


def as_called(
    module: nn.Module, forward: Forward, changed: Callable[[nn.Module], bool] | None = None
) -> Callable:
    """Return ``forward`` for callers that may name its argument.

    A call with more arguments runs the class's own forward, and so does any call of a module for
    which ``changed`` returns True.
    """
    name = list(inspect.signature(type(module).forward).parameters)[1]

    def called(module: Any, *args: Any, **kwargs: Any) -> Any:
        if changed is None or not changed(module):
            if len(args) == 1 and not kwargs:
                return forward(module, args[0])
            if not args and len(kwargs) == 1 and name in kwargs:
                return forward(module, kwargs[name])
        return type(module).forward(module, *args, **kwargs)

    return called


def signature(module: nn.Module) -> tuple:
    """Return what an instance must have in common with the proved one.

    That is its class, parameters and their dimensions, classes of children, names of numbers, and
    settings.
    """
    dimensions = {name: None if p is None else p.ndim for name, p in module._parameters.items()}
    kinds: dict[str, type | None] = {}
    for name, child in module._modules.items():
        inner = None if child is None else innermost(child)
        if hasattr(child, "in_features"):
            # linear children become adapters and quantised layers; the others, an activation
            # among them, stay what they are
            kinds[name] = None
        elif inner is not None and class_module(inner) is not inner:
            kinds[name] = type(class_module(inner))  # experts in 4 bits
        else:
            # experts and routers with adapters count as the plain module
            kinds[name] = type(child) if hasattr(inner, "in_features") else type(inner)
    return (
        type(module),
        tuple(dimensions.items()),
        tuple(kinds.items()),
        tuple(numbers(module)),
        module_settings(module),
    )


def numbers(module: nn.Module) -> list[str]:
    """Return the names of the numbers that a module stores."""
    return [name for name, value in vars(module).items() if type(value) is float and name[0] != "_"]


def module_settings(module: nn.Module) -> tuple:
    """Return switches, strings and functions that a module stores; no sizes, nothing of a run."""
    kinds = (bool, str, FunctionType, BuiltinFunctionType)
    return tuple(
        (name, value) for name, value in attributes(module).items() if type(value) in kinds
    )


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return what a module stores beside children, tensors and attributes that a run sets."""
    return {
        name: value
        for name, value in vars(module).items()
        if name[0] != "_" and name not in RUN_ATTRIBUTES
    }


@contextmanager
def random_numbers(module: nn.Module) -> Iterator[None]:
    """Let the numbers that the module stores be random for the length of a block."""
    original = {name: getattr(module, name) for name in numbers(module)}
    for name in original:
        setattr(module, name, float(torch.empty(()).uniform_(0.01, 0.1)))
    try:
        yield
    finally:
        for name, value in original.items():
            setattr(module, name, value)


def is_proved(
    module: nn.Module, forward: Forward, inputs: list[Tensor], own: Forward | None = None
) -> bool:
    """Return whether ``forward`` gives the outputs and gradients of the module for every input.

    Args:
        module: the module.
        forward: the form's computation.
        inputs: inputs of one kind, of several scales.
        own: the module's computation; by default the forward of its class.
    """
    own = type(module).forward if own is None else own
    for x in inputs:
        expected = _run(module, own, x)
        got = _run(module, forward, x)
        if expected is None or got is None:
            return False
        for a, b in zip(expected, got):
            if a.shape != b.shape or a.dtype != b.dtype:
                return False
            if not a.numel():
                continue
            distance = float((a - b).abs().max() / a.abs().max().clamp(min=1e-12))
            if not distance <= VALUE_TOLERANCE:  # NaN is no agreement
                return False
    return True


def _run(module: nn.Module, forward: Callable, x: Tensor) -> list[Tensor] | None:
    """Return the output and the gradients of x and of all parameters.

    The result is None if the output is no tensor that depends on them.
    """
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


SHELL_WIDTHS = (24, 40, 56, 72)
"""Small widths that replace the widths of a module, in ascending order.

None is a multiple of another.
"""


class NoShell(ValueError):
    """The module has something that a shell cannot represent; the message says what."""


def _linear_sizes(module: Any) -> tuple[int, int] | None:
    """Return inputs and outputs of a linear layer, an adapter or a quantised layer; else None."""
    inputs = getattr(module, "in_features", None)
    outputs = getattr(module, "out_features", None)
    if type(inputs) is not int or type(outputs) is not int:
        return None
    return inputs, outputs


def shell_of(module: nn.Module) -> nn.Module:
    """Return a shell of ``module`` in training mode.

    Its numbers, such as an epsilon, are random, so that a form which does not read them from the
    instance differs.

    Raises:
        NoShell: it has tensors other than vectors and linear layers.
    """
    if any(buffer is not None for buffer in module._buffers.values()):
        raise NoShell("it has buffers")
    shell = copy.copy(module)
    for name in ("_parameters", "_buffers", "_modules"):
        shell.__dict__[name] = {}
    vars(shell).pop("forward", None)
    shell.training = True
    for name, value in vars(shell).items():
        is_hooks = name.endswith("_hooks") or name.startswith("_forward_hooks")
        if is_hooks and isinstance(value, dict):
            vars(shell)[name] = type(value)()
    small = _small_widths(module)
    for name, parameter in module._parameters.items():
        if parameter is None:
            shell._parameters[name] = None
            continue
        if parameter.dim() != 1:
            raise NoShell("it has parameters that are not vectors")
        width = small.get(len(parameter), len(parameter))
        values = torch.empty(width, device="cpu", dtype=torch.float32).uniform_(0.5, 1.5)
        shell._parameters[name] = nn.Parameter(values)
    for name, child in module._modules.items():
        sizes = _linear_sizes(child)
        if sizes is not None:
            inputs, outputs = (small[size] for size in sizes)
            has_bias = getattr(child, "bias", None) is not None
            linear = nn.Linear(inputs, outputs, bias=has_bias, device="cpu", dtype=torch.float32)
            nn.init.normal_(linear.weight, std=inputs**-0.5)
            shell._modules[name] = linear
        elif child is None:
            shell._modules[name] = None
        elif next(itertools.chain(child.parameters(), child.buffers()), None) is not None:
            raise NoShell("it has children with parameters that are no linear layers")
        else:
            shell._modules[name] = copy.deepcopy(child).train()
    for part in shell.modules():
        for name in numbers(part):
            if getattr(part, name) not in (0.0, 1.0):  # these are rather switches
                setattr(part, name, float(torch.empty(()).uniform_(0.01, 0.1)))
    for name, value in list(vars(shell).items()):
        if type(value) is int and value in small:
            vars(shell)[name] = small[value]
    return shell


def _small_widths(module: nn.Module) -> dict[int, int]:
    """Return small widths by the widths of the linear children.

    A width that is twice another one, as of a merged layer, stays so.
    """
    small: dict[int, int] = {}
    unused = iter(SHELL_WIDTHS)
    sizes: set[int] = set()
    for child in module._modules.values():
        sizes.update(_linear_sizes(child) or ())
    for size in sorted(sizes):
        half = small.get(size // 2) if size % 2 == 0 and size // 2 in sizes else None
        small[size] = 2 * half if half else next(unused, 0)
        if not small[size]:
            raise NoShell(f"its linear layers have more than {len(SHELL_WIDTHS)} widths")
    return small
