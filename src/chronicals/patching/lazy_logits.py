"""Logits that are not there until somebody looks: what a head returns while a loss is being computed.

A model's own forward goes on with them as with a tensor: a scale, a softcap and a change of type are remembered, the
loss takes the hidden states behind them, and any other use computes them as the head itself would have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

ATTRIBUTES = ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "is_sparse", "is_quantized")
METHODS = ("size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "is_contiguous", "get_device", "__len__")
LOOKED_AT: set[Any] = {getattr(Tensor, name).__get__ for name in ATTRIBUTES} | {getattr(Tensor, name) for name in METHODS}
"""What may be asked of logits without computing them."""

CASTS: dict[Any, torch.dtype] = {Tensor.float: torch.float32, Tensor.bfloat16: torch.bfloat16, Tensor.half: torch.float16}
MULTIPLY = (Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul)
DIVIDE = (Tensor.div, Tensor.__truediv__, torch.div, torch.true_divide, Tensor.true_divide)
IN_PLACE: dict[Any, Any] = {
    Tensor.mul_: Tensor.mul, Tensor.__imul__: Tensor.mul, Tensor.div_: Tensor.div, Tensor.__itruediv__: Tensor.div,
}  # fmt: skip
"""What these do to the logits themselves."""

TANH = (Tensor.tanh, torch.tanh)


class LazyLogits(Tensor):
    """Logits ``[..., V]`` of ``hidden`` ``[..., D]``, as ``head`` makes them, after ``steps``.

    Attributes:
        hidden: what the head was given.
        head: the linear layer.
        product: the type that autocast gave the product, or None where it was off.
        steps: what was done to the logits since: ``("scale", factor)``, ``("tanh",)``, ``("type", dtype)``.
        whole: the logits, once they were computed; ``unwritten`` is its version then, None where none is kept.
    """

    hidden: Tensor
    head: nn.Linear
    steps: tuple[tuple, ...]
    version: int
    records: bool
    product: torch.dtype | None
    whole: Tensor | None
    unwritten: int | None

    @staticmethod
    def __new__(cls: type, hidden: Tensor, head: nn.Linear, dtype: torch.dtype, steps: tuple = ()) -> LazyLogits:
        shape = (*hidden.shape[:-1], head.weight.shape[0])
        records = torch.is_grad_enabled() and (hidden.requires_grad or head.weight.requires_grad)
        made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device, requires_grad=records)
        made.hidden, made.head, made.steps = hidden, head, steps
        made.version, made.records, made.whole = head.weight._version, torch.is_grad_enabled(), None
        made.product = autocast_type(hidden)
        return made

    def computed(self) -> Tensor:
        """The logits as a tensor.

        Raises:
            RuntimeError: the head's weight was changed since, or is sharded again.
        """
        if self.whole is None:
            if type(self.head.weight) not in (nn.Parameter, Tensor):
                raise RuntimeError(
                    "the logits are asked for after the head's weight was sharded again; look at them before the backward "
                    "pass, or undo patch_model"
                )
            if self.head.weight._version != self.version:
                raise RuntimeError(
                    "the logits are asked for after the weights changed; look at them before the optimizer's step, or "
                    "undo patch_model"
                )
            kind = self.hidden.device.type
            autocast = torch.autocast(kind, dtype=self.product, enabled=self.product is not None)
            with torch.set_grad_enabled(self.records), autocast:
                x = F.linear(self.hidden, self.head.weight, self.head.bias)
                for kind, *value in self.steps:
                    x = STEPS[kind](x, *value)
            self.whole, self.unwritten = x, None if x.is_inference() else x._version
        return self.whole

    def then(self, *step: Any) -> LazyLogits:
        with torch._C.DisableTorchFunctionSubclass():
            dtype = step[1] if step[0] == "type" else self.dtype
        made = LazyLogits(self.hidden, self.head, dtype, (*self.steps, step))
        made.version, made.records, made.product = self.version, self.records, self.product
        return made

    def scale_and_softcap(self) -> tuple[float, float | None] | None:
        """(s, c) where the steps amount to ``c · tanh(s · x / c)`` or ``s · x``; None where they do not, or where the logits
        were written to."""
        if self.whole is not None and (self.unwritten is None or self.whole._version != self.unwritten):
            return None
        before, after, capped = 1.0, 1.0, False
        for kind, *value in self.steps:
            if kind == "tanh":
                if capped:
                    return None
                capped = True
            elif kind == "scale":
                before, after = (before, after * value[0]) if capped else (before * value[0], after)
        return (before * after, after) if capped else (before, None)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in LOOKED_AT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if args and isinstance(args[0], LazyLogits):
            step = _step(IN_PLACE.get(func, func), args, kwargs)
            if func in IN_PLACE and step is not None and args[0].whole is None:
                args[0].steps += (step,)
                return args[0]
            step = None if func in IN_PLACE else step
            if step == ():
                return args[0]
            if step is not None:
                return args[0].then(*step)
        args, kwargs = tree_map(lambda x: x.computed() if isinstance(x, LazyLogits) else x, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} reached logits that were never computed; undo patch_model and report the model's class")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.computed().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.computed().detach().clone()


def autocast_type(x: Tensor) -> torch.dtype | None:
    """The type of products where ``x`` is, or None where autocast is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


STEPS: dict[str, Callable[..., Tensor]] = {
    "scale": lambda x, factor: x * factor,
    "tanh": torch.tanh,
    "type": lambda x, dtype: x.to(dtype),
}


def _step(func: Any, args: tuple, kwargs: dict) -> tuple | None:
    """The step that ``func`` amounts to, () for none at all, None where the logits must be computed."""
    number = args[1] if len(args) == 2 and type(args[1]) in (int, float) and not kwargs else None
    if func in CASTS:
        return "type", CASTS[func]
    if func is Tensor.to and len(args) == 2 and isinstance(args[1], torch.dtype) and not kwargs:
        return "type", args[1]
    if number is not None and func in MULTIPLY:
        return "scale", float(number)
    if number is not None and func in DIVIDE:
        return "scale", 1.0 / number
    if func in TANH and len(args) == 1 and not kwargs:
        return ("tanh",)
    return () if func is Tensor.contiguous and len(args) == 1 else None
