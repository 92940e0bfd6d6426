"""Logits that are not there until somebody looks: what a head returns while a loss is being
computed.

A model's own forward goes on with them as with a tensor: a scale, a softcap and a change of type
are remembered, the loss takes the hidden states behind them, and any other use computes them as the
head itself would have. They stand in autograd's graph as the head's outputs would, so that whoever
takes them, in Python or not, sends gradients through them.

Before an optimizer of torch changes the head, its weight is copied, once for all logits that
somebody still holds; they are made from the copy when somebody looks. Where the logits are smaller
than the weight, they are computed instead.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map

from chronicals.patching.lazy_mask import FUNCTIONS

logger = logging.getLogger(__name__)

ATTRIBUTES = (
    "shape",
    "dtype",
    "device",
    "ndim",
    "requires_grad",
    "is_cuda",
    "layout",
    "is_sparse",
    "is_quantized",
    "grad_fn",
    "is_leaf",
    "grad",
    "retains_grad",
    "output_nr",
    "_version",
    "_base",
)
METHODS = (
    "size",
    "dim",
    "numel",
    "nelement",
    "is_floating_point",
    "is_complex",
    "is_contiguous",
    "get_device",
    "__len__",
    "register_hook",
    "retain_grad",
    "_is_view",
    "is_inference",
)
LOOKED_AT: set[Any] = {getattr(Tensor, name).__get__ for name in ATTRIBUTES}.union(
    (getattr(Tensor, name) for name in METHODS), FUNCTIONS
)
"""What may be asked of logits, and of their place in the graph, without computing them."""

CASTS: dict[Any, torch.dtype] = {
    Tensor.float: torch.float32,
    Tensor.bfloat16: torch.bfloat16,
    Tensor.half: torch.float16,
}
MULTIPLY = (Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul)
DIVIDE = (Tensor.div, Tensor.__truediv__, torch.div, torch.true_divide, Tensor.true_divide)
IN_PLACE: dict[Any, Any] = {
    Tensor.mul_: Tensor.mul,
    Tensor.__imul__: Tensor.mul,
    Tensor.div_: Tensor.div,
    Tensor.__itruediv__: Tensor.div,
}
"""What these do to the logits themselves."""

TANH = (Tensor.tanh, torch.tanh)


SAMPLED = 64
"""Elements of the weight by which a change is seen that no version tells: of a fused optimizer,
or of ``.data``.
"""


@dataclass(eq=False)
class Promise:
    """How logits are made, and the logits once they are.

    Attributes:
        hidden, weight, bias: ``[..., D]``, ``[V, D]`` and ``[V]`` or None, as they were when the
            head was called.
        product: the type that autocast gave the product, or None where it was off.
        steps: what is done to the product: ``("scale", factor)``, ``("tanh",)``, ``("type",
            dtype)``.
        records: whether autograd records.
        graph: the logits, and the views of ``sources`` that they are made of, in a graph of their
            own: the hidden states may be made of the weight, too.
        whole: their values.
        marks: by which a change of hidden, weight and bias is seen.
        kept: after a step of an optimizer, copies of ``weight`` and ``bias``, as far as it changed
            them; empty where ``whole`` was computed instead.
        at_step: samples of hidden, weight and bias when ``whole`` was computed for a step, until
            compared with ``marks``.
        lost: why nothing could be kept.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    product: torch.dtype | None
    records: bool
    steps: tuple[tuple, ...] = ()
    graph: tuple[Tensor, tuple[Tensor, ...]] | None = None
    whole: Tensor | None = None
    marks: tuple[_Mark | None, ...] = ()
    kept: dict[str, Tensor] | None = None
    at_step: tuple = ()
    lost: str = ""

    def __post_init__(self) -> None:
        self.marks = self.marks or tuple(
            None if x is None else _Mark.of(x) for x in (self.hidden, self.weight, self.bias)
        )
        if self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad):
            _watch_optimizers()
            _open.add(self)

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """What the logits are made of, and differentiated in."""
        return tuple(
            x for x in (self.hidden, self.weight, self.bias) if x is not None and x.requires_grad
        )

    def values(self) -> Tensor:
        """The logits, which autograd does not know.

        Raises:
            RuntimeError: what they are made of was changed since, or is sharded again.
        """
        if self.whole is None or self.at_step:
            self._check()
            self.at_step = ()
        if self.whole is None:
            self.graph = x, _ = self._made(self.records and self.kept is None)
            keeps = (
                bool(self.steps) and self.steps[-1][0] == "tanh"
            )  # whose gradient is made of what comes out
            self.whole = x.detach().clone() if keeps else x.detach()
        return self.whole

    @property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states, weight and bias that the logits are made of now."""
        kept = self.kept or {}
        return self.hidden, kept.get("weight", self.weight), kept.get("bias", self.bias)

    def _made(self, records: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        kind = self.hidden.device.type
        autocast = torch.autocast(kind, dtype=self.product, enabled=self.product is not None)
        with (
            torch.inference_mode(self.hidden.is_inference()),
            torch.set_grad_enabled(records),
            autocast,
        ):
            hidden, weight, bias = (None if x is None else x.view_as(x) for x in self._parts)
            assert hidden is not None and weight is not None
            x = F.linear(hidden, weight, bias)
            for kind, *value in self.steps:
                x = STEPS[kind](x, *value)
        return x, tuple(
            part for part in (hidden, weight, bias) if part is not None and part.requires_grad
        )

    def gradients(self, upstream: Tensor) -> tuple[Tensor, ...]:
        """Those of ``sources``."""
        if (
            self.graph is None or not self.graph[0].requires_grad
        ):  # their values were asked for below autograd
            if self.kept is not None:
                raise RuntimeError(
                    "gradients through logits are asked for after an optimizer changed the head's "
                    "weights"
                )
            self._check()
            self.graph = self._made(self.records)
        return torch.autograd.grad(
            *self.graph, upstream, retain_graph=True, create_graph=torch.is_grad_enabled()
        )

    def keep(self, changed: set[int], copy: Callable[[Tensor], Tensor]) -> bool:
        """Keep what the values can be made from after a step; whether that takes memory. The host
        waits for nothing.

        Args:
            changed: ids of the tensors that the step changes.
            copy: of one of them.
        """
        if self.whole is not None or self.kept is not None or self._why_not(compared=False):
            return False
        try:
            if (
                self.hidden.numel() <= self.hidden.shape[-1] ** 2
            ):  # no more tokens than columns of the weight
                self.whole = self._made(records=False)[0].detach()
                self.kept = {}
                self.at_step = self._samples()
            else:
                parts = {"weight": self.weight, "bias": self.bias}
                self.kept = {
                    name: copy(x) for name, x in parts.items() if x is not None and id(x) in changed
                }
        except torch.OutOfMemoryError:
            self.lost = (
                "the logits are asked for after an optimizer's step, before which there was no "
                "memory for a copy of the head's "
                "weights; look at them before the step, or undo patch_model"
            )
        return True

    def _samples(self) -> tuple[Tensor | None, ...]:
        """Of those parts of which ``marks`` has one."""
        return tuple(
            None if x is None or mark is None or mark.sample is None else _sample(x)
            for x, mark in zip(self._parts, self.marks)
        )

    def _check(self) -> None:
        reason = self._why_not()
        if reason:
            raise RuntimeError(reason)

    def _why_not(self, compared: bool = True) -> str:
        """Why they can no longer be computed; empty where they can.

        Args:
            compared: also compare samples of the weights, for which the host waits.
        """
        if self.lost:
            return self.lost
        if self._parts[1].untyped_storage().nbytes() == 0 and not self.at_step:
            return (
                "the logits are asked for after the head's weight was sharded again; look at them "
                "before the backward pass, or "
                "undo patch_model"
            )
        samples = (self.at_step or self._samples()) if compared else (None, None, None)
        for x, original, mark, sample in zip(
            self._parts, (self.hidden, self.weight, self.bias), self.marks, samples
        ):
            if x is None or mark is None:
                continue
            same = x is not original or bool(self.at_step) or mark.is_of(x)
            if not same or (
                sample is not None
                and mark.sample is not None
                and not torch.equal(sample, mark.sample)
            ):
                what = "hidden states" if x is self.hidden else "weights"
                return (
                    f"the logits are asked for after the {what} changed, by something else than "
                    "an optimizer of torch; look at "
                    "them before, or undo patch_model"
                )
        return ""


_open: weakref.WeakSet[Promise] = weakref.WeakSet()
"""Promises of weights that are trained, as long as somebody holds their logits."""


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_keep_what_is_held)


def _keep_what_is_held(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Before an optimizer's step: keep what logits that somebody still holds are made of, where
    it changes that.
    """
    if not _open:
        return
    own = [p for group in optimizer.param_groups for p in group["params"]]
    changed = {id(p) for p in getattr(optimizer, "weights", own)}  # ours may hold shares of weights
    copies: dict[int, Tensor] = {}

    def copy(x: Tensor) -> Tensor:
        if id(x) not in copies:
            copies[id(x)] = x.detach().clone()
        return copies[id(x)]

    held = [promise for promise in list(_open) if changed & {id(promise.weight), id(promise.bias)}]
    if any([promise.keep(changed, copy) for promise in held]):
        _say_they_are_held()


@functools.cache
def _say_they_are_held() -> None:
    logger.warning(
        "the output of a patched model is still held when its optimizer steps, so a copy of its "
        "head's weights is kept, or its "
        "logits where they are smaller: let go of it before (del outputs) where nobody reads them "
        "afterwards"
    )


class _Mark(NamedTuple):
    """By which a later change of a tensor is seen.

    Attributes:
        version: of autograd's counter; None in inference mode, which has none.
        address, dtype: of its memory.
        sample: some elements of a parameter, whose memory can be written past the counter; else
            None.
    """

    version: int | None
    address: int
    dtype: torch.dtype
    sample: Tensor | None

    @classmethod
    def of(cls, x: Tensor) -> _Mark:
        sample = _sample(x) if isinstance(x, nn.Parameter) else None
        return cls(None if x.is_inference() else x._version, x.data_ptr(), x.dtype, sample)

    def is_of(self, x: Tensor) -> bool:
        """Whether it is the tensor that was marked, as far as the host knows."""
        if self.version is not None and x._version != self.version:
            return False
        return (x.data_ptr(), x.dtype) == (self.address, self.dtype)


def _sample(x: Tensor) -> Tensor:
    """Some elements, copied."""
    return x.detach().reshape(-1)[:: max(1, x.numel() // SAMPLED)].clone()


class LazyLogits(Tensor):
    """Logits ``[..., V]`` that are made as ``promise`` says, when they are needed.

    Attributes:
        handed_on: they came out of a Function, through which gradients must go.
    """

    promise: Promise
    handed_on = False

    @staticmethod
    def __new__(cls: type, promise: Promise) -> LazyLogits:
        return _Promised.apply(promise, *(promise.sources if promise.records else ()))

    @property
    def written(self) -> bool:
        """Whether somebody may have written to them since they were made."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.promise.whole is not None and (self.is_inference() or self._version > 0)

    def computed(self) -> Tensor:
        """The logits as a tensor, a view of these."""
        self.promise.values()
        inference = (
            self.promise.hidden.is_inference()
        )  # a view made without autograd could not be written to under it
        with (
            torch._C.DisableTorchFunctionSubclass(),
            torch.inference_mode(inference),
            torch.set_grad_enabled(not inference),
        ):
            return torch.ops.aten.alias(self)

    def then(self, *step: Any) -> LazyLogits:
        return LazyLogits(replace(self.promise, steps=(*self.promise.steps, step)))

    def scale_and_softcap(self) -> tuple[float, float | None] | None:
        """(s, c) where the steps amount to ``c · tanh(s · x / c)`` or ``s · x``; None where they
        do not, or where the logits were written to."""
        if self.written:
            return None
        before = 1.0
        after = 1.0
        capped = False
        for kind, *value in self.promise.steps:
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
        if func in LOOKED_AT or (
            func is Tensor.view_as and args[0] is args[1]
        ):  # the latter: a Function hands them on
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        logits = args[0] if args and isinstance(args[0], LazyLogits) else None
        step = None if logits is None else _step(IN_PLACE.get(func, func), args, kwargs)
        if logits is not None and step == ():
            return logits
        if (
            logits is not None
            and step is not None
            and logits.promise.whole is None
            and not logits.handed_on
        ):
            if func not in IN_PLACE:
                return logits.then(*step)
            logits.promise.steps += (step,)
            return logits
        args, kwargs = tree_map(
            lambda x: x.computed() if isinstance(x, LazyLogits) else x, (args, kwargs)
        )
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Below autograd: on the values; on none where they are handed on as they are."""
        if func is torch.ops.aten.view.default and list(args[1]) == list(args[0].shape):
            made = _wrapper(args[0].promise)
            made.handed_on = True
            return made
        given = tree_map(
            lambda x: x.promise.values() if isinstance(x, LazyLogits) else x, (args, kwargs or {})
        )
        out = func(*given[0], **given[1])
        return args[0] if func._schema.is_mutable and isinstance(args[0], LazyLogits) else out

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.computed().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.computed().detach().clone()


class _Promised(torch.autograd.Function):
    """Logits that are not there, where the head's outputs would be in the graph."""

    @staticmethod
    def forward(ctx: Any, promise: Promise, *_sources: Tensor) -> LazyLogits:
        ctx.promise = promise
        return _wrapper(promise)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *ctx.promise.gradients(upstream)


def _wrapper(promise: Promise) -> LazyLogits:
    dtype = promise.product or promise.hidden.dtype
    for kind, *value in promise.steps:
        dtype = value[0] if kind == "type" else dtype
    shape = (*promise.hidden.shape[:-1], len(promise.weight))
    made: Any = torch.Tensor._make_wrapper_subclass(
        LazyLogits, shape, dtype=dtype, device=promise.hidden.device
    )
    made.promise = promise
    return made


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
    """The step that ``func`` amounts to, () for none at all, None where the logits must be
    computed.
    """
    number = args[1] if len(args) == 2 and type(args[1]) in (int, float) and not kwargs else None
    cast = CASTS.get(func)
    if func is Tensor.to and len(args) == 2 and isinstance(args[1], torch.dtype):
        cast = args[1]
    if cast is not None and not kwargs:
        return () if args[0].dtype == cast else ("type", cast)
    if number is not None and func in MULTIPLY:
        return "scale", float(number)
    if number is not None and func in DIVIDE:
        return "scale", 1.0 / number
    if func in TANH and len(args) == 1 and not kwargs:
        return ("tanh",)
    return () if func is Tensor.contiguous and len(args) == 1 else None
