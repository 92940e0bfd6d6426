"""Logits that are computed when somebody reads them: the result of a head while a loss is computed.

A model's own forward handles them like a tensor. A scale, a softcap and a cast are recorded as
steps, the loss reads the hidden states behind them, and any other use computes them as the head
itself would have. They have the place of the head's outputs in autograd's graph, so that whoever
uses them, in Python or not, sends gradients through them.

Before an optimizer of torch changes the head, its weight is copied, once for all logits that are
still referenced; they are computed from the copy when somebody reads them. If the logits are
smaller than the weight, they are computed instead.
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

from chronicals.log_once import log_once
from chronicals.patching.lazy_mask import metadata_readers

logger = logging.getLogger(__name__)

_WITHOUT_VALUES = metadata_readers(
    ("is_quantized", "grad", "retains_grad", "output_nr", "_version", "_base"),
    ("is_contiguous", "register_hook", "retain_grad", "_is_view", "is_inference"),
)
"""Functions that read the metadata of logits, or their place in the graph, and no values."""

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
"""Functions that change their argument, and the same without."""

TANH = (Tensor.tanh, torch.tanh)

SAMPLE_SIZE = 64
"""Elements of a weight that are compared to find a change that raises no version counter.

A fused optimizer makes such changes, and so does a write through ``.data``.
"""


@dataclass(eq=False)
class Promise:
    """The recipe of logits, and their values once they are computed.

    Attributes:
        hidden, weight, bias: ``[..., D]``, ``[V, D]`` and ``[V]`` or None, when the head was
            called.
        product: dtype that autocast gave the product, or None if it was off.
        records: whether autograd records.
        steps: operations on the product: ``("scale", factor)``, ``("tanh",)``, ``("type", dtype)``.
        graph: the logits, and the views of ``sources`` that they are computed from, in a separate
            graph, since the hidden states may depend on the weight, too.
        result: the computed logits, or None.
        marks: marks of hidden, weight and bias, by which a later change is found.
        copies: after a step of an optimizer, copies of those of ``weight`` and ``bias`` that it
            changed; empty if ``result`` was computed instead; None before a step.
        step_samples: samples of hidden, weight and bias from when ``result`` was computed for a
            step, until they are compared with ``marks``.
        lost: reason why nothing could be kept; empty if something could.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    product: torch.dtype | None
    records: bool
    steps: tuple[tuple, ...] = ()
    graph: tuple[Tensor, tuple[Tensor, ...]] | None = None
    result: Tensor | None = None
    marks: tuple[_Mark | None, ...] = ()
    copies: dict[str, Tensor] | None = None
    step_samples: tuple = ()
    lost: str = ""

    def __post_init__(self) -> None:
        if not self.marks:
            originals = (self.hidden, self.weight, self.bias)
            self.marks = tuple(None if x is None else _Mark.of(x) for x in originals)
        if self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad):
            _watch_once(_keep_before_step)
            _open_promises.add(self)

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """Tensors that the logits are computed from and differentiated in."""
        originals = (self.hidden, self.weight, self.bias)
        return tuple(x for x in originals if x is not None and x.requires_grad)

    def values(self) -> Tensor:
        """Return the logits, detached from autograd's graph.

        Raises:
            RuntimeError: a source was changed since, or is sharded again.
        """
        if self.result is None or self.step_samples:
            reason = self._why_not()
            if reason:
                raise RuntimeError(reason)
            self.step_samples = ()
        if self.result is None:
            self.graph = x, _ = self._compute(self.records and self.copies is None)
            # the gradient of tanh is computed from its output, which callers may write to
            needs_copy = bool(self.steps) and self.steps[-1][0] == "tanh"
            self.result = x.detach().clone() if needs_copy else x.detach()
        return self.result

    @property
    def _current(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states, weight and bias that the logits are computed from now."""
        copies = self.copies or {}
        return self.hidden, copies.get("weight", self.weight), copies.get("bias", self.bias)

    def _compute(self, records: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the logits, and the views of sources that they can be differentiated in."""
        kind = self.hidden.device.type
        autocast = torch.autocast(kind, dtype=self.product, enabled=self.product is not None)
        inference = torch.inference_mode(self.hidden.is_inference())
        with inference, torch.set_grad_enabled(records), autocast:
            views = [None if x is None else x.view_as(x) for x in self._current]
            hidden, weight, bias = views
            assert hidden is not None and weight is not None
            x = F.linear(hidden, weight, bias)
            for kind, *value in self.steps:
                x = STEPS[kind](x, *value)
        return x, tuple(view for view in views if view is not None and view.requires_grad)

    def gradients(self, upstream: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of ``sources``.

        Raises:
            RuntimeError: an optimizer has changed the head's weights, or a source was changed.
        """
        if self.graph is None or not self.graph[0].requires_grad:
            # never computed, or only for a reader below autograd
            if self.copies is not None:
                raise RuntimeError(
                    "gradients through logits are asked for after an optimizer changed the head's "
                    "weights"
                )
            reason = self._why_not()
            if reason:
                raise RuntimeError(reason)
            self.graph = self._compute(self.records)
        return torch.autograd.grad(
            *self.graph, upstream, retain_graph=True, create_graph=torch.is_grad_enabled()
        )

    def keep(self, changed: set[int], copy: Callable[[Tensor], Tensor]) -> bool:
        """Before a step, keep what the values can be computed from afterwards.

        The host does not wait for the device.

        Returns:
            Whether that takes memory.

        Args:
            changed: ids of the tensors that the step changes.
            copy: copies one of them.
        """
        if self.result is not None or self.copies is not None or self._why_not(compared=False):
            return False
        try:
            # with no more tokens than the weight has columns, the logits are no larger than it
            if self.hidden.numel() <= self.hidden.shape[-1] ** 2:
                self.result = self._compute(records=False)[0].detach()
                self.copies = {}
                self.step_samples = self._samples()
            else:
                parts = {"weight": self.weight, "bias": self.bias}
                self.copies = {
                    name: copy(x) for name, x in parts.items() if x is not None and id(x) in changed
                }
        except torch.OutOfMemoryError:
            self.lost = (
                "the logits are asked for after an optimizer's step, before which there was no "
                "memory for a copy of the head's weights; look at them before the step, or undo "
                "patch_model"
            )
        return True

    def _samples(self) -> tuple[Tensor | None, ...]:
        """Return samples of the current tensors whose mark has one."""
        return tuple(
            None if x is None or mark is None or mark.sample is None else _sample(x)
            for x, mark in zip(self._current, self.marks)
        )

    def _why_not(self, compared: bool = True) -> str:
        """Return why the logits can no longer be computed; empty if they can.

        Args:
            compared: also compare samples of the weights, for which the host waits.
        """
        if self.lost:
            return self.lost
        if self._current[1].untyped_storage().nbytes() == 0 and not self.step_samples:
            return (
                "the logits are asked for after the head's weight was sharded again; look at them "
                "before the backward pass, or undo patch_model"
            )
        samples: tuple = (None, None, None)
        if compared:
            samples = self.step_samples or self._samples()
        originals = (self.hidden, self.weight, self.bias)
        for x, original, mark, sample in zip(self._current, originals, self.marks, samples):
            if x is None or mark is None:
                continue
            same = True
            if x is original and not self.step_samples:
                same = (x.data_ptr(), x.dtype) == (mark.address, mark.dtype)
                same = same and (mark.version is None or x._version == mark.version)
            if same and sample is not None and mark.sample is not None:
                same = torch.equal(sample, mark.sample)
            if not same:
                changed = "hidden states" if x is self.hidden else "weights"
                return (
                    f"the logits are asked for after the {changed} changed, by something else than "
                    "an optimizer of torch; look at them before, or undo patch_model"
                )
        return ""


_open_promises: weakref.WeakSet[Promise] = weakref.WeakSet()
"""Promises of trained weights whose logits are still referenced."""


_watch_once = functools.cache(register_optimizer_step_pre_hook)
"""Registers a hook for the steps of all optimizers; a second call changes nothing."""


def _keep_before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Copy the head weights that uncomputed logits still need; called before ``optimizer.step``."""
    if not _open_promises:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # our optimizers may hold shares of weights
    changed = {id(p) for p in getattr(optimizer, "weights", parameters)}
    copies: dict[int, Tensor] = {}

    def copy(x: Tensor) -> Tensor:
        if id(x) not in copies:
            copies[id(x)] = x.detach().clone()
        return copies[id(x)]

    concerned = [
        promise
        for promise in list(_open_promises)
        if changed & {id(promise.weight), id(promise.bias)}
    ]
    if any([promise.keep(changed, copy) for promise in concerned]):
        log_once(
            logger.warning,
            "the output of a patched model is still held when its optimizer steps, so a copy of "
            "its head's weights is kept, or its logits where they are smaller: let go of it "
            "before (del outputs) where nobody reads them afterwards",
        )


class _Mark(NamedTuple):
    """The state of a tensor, by which a later change is found.

    Attributes:
        version: autograd's version counter; None in inference mode, which has none.
        address, dtype: address and dtype of its memory.
        sample: some elements of a parameter, whose memory can be written past the counter; else
            None.
    """

    version: int | None
    address: int
    dtype: torch.dtype
    sample: Tensor | None

    @classmethod
    def of(cls, x: Tensor) -> _Mark:
        """Return the mark of a tensor as it is now."""
        sample = _sample(x) if isinstance(x, nn.Parameter) else None
        return cls(None if x.is_inference() else x._version, x.data_ptr(), x.dtype, sample)


def _sample(x: Tensor) -> Tensor:
    """Return a copy of some elements."""
    return x.detach().reshape(-1)[:: max(1, x.numel() // SAMPLE_SIZE)].clone()


class LazyLogits(Tensor):
    """Logits ``[..., V]`` that are computed by ``promise`` when they are read.

    Attributes:
        promise: how they are computed.
        handed_on: True if they are the output of an autograd Function, through which gradients must
            go.
    """

    promise: Promise
    handed_on = False

    @staticmethod
    def __new__(cls: type, promise: Promise) -> LazyLogits:
        """Return lazy logits at the head's place in autograd's graph."""
        return _Promised.apply(promise, *(promise.sources if promise.records else ()))

    def computed(self) -> Tensor:
        """Return the logits as a plain tensor, a view of these."""
        self.promise.values()
        # a view made without autograd could not be written to under it
        inference = self.promise.hidden.is_inference()
        with (
            torch._C.DisableTorchFunctionSubclass(),
            torch.inference_mode(inference),
            torch.set_grad_enabled(not inference),
        ):
            return torch.ops.aten.alias(self)

    def scale_and_softcap(self) -> tuple[float, float | None] | None:
        """Return scale s and softcap c of the steps; None for other steps or written logits.

        (s, c) stands for ``c · tanh(s · x / c)``, and (s, None) for ``s · x``.
        """
        with torch._C.DisableTorchFunctionSubclass():
            may_be_written = self.is_inference() or self._version > 0
        if self.promise.result is not None and may_be_written:
            return None
        before = 1.0
        after = 1.0
        capped = False
        for kind, *value in self.promise.steps:
            if kind == "tanh":
                if capped:
                    return None
                capped = True
            elif kind == "scale" and capped:
                after *= value[0]
            elif kind == "scale":
                before *= value[0]
        return (before * after, after) if capped else (before, None)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a step if ``func`` is one; else call it with the computed logits."""
        kwargs = kwargs or {}
        # autograd calls x.view_as(x) where a Function returns its input
        if func in _WITHOUT_VALUES or (func is Tensor.view_as and args[0] is args[1]):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        logits = args[0] if args and isinstance(args[0], LazyLogits) else None
        if logits is not None:
            step = _step(IN_PLACE.get(func, func), args, kwargs)
            if step == ():
                return logits
            if step is not None and logits.promise.result is None and not logits.handed_on:
                steps = (*logits.promise.steps, step)
                if func not in IN_PLACE:
                    return LazyLogits(replace(logits.promise, steps=steps))
                logits.promise.steps = steps
                return logits
        args, kwargs = tree_map(
            lambda x: x.computed() if isinstance(x, LazyLogits) else x, (args, kwargs)
        )
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Below autograd: call ``func`` on the values, or on none if it returns its input."""
        if func is torch.ops.aten.view.default and list(args[1]) == list(args[0].shape):
            logits = _wrapper(args[0].promise)
            logits.handed_on = True
            return logits
        plain_args, plain_kwargs = tree_map(
            lambda x: x.promise.values() if isinstance(x, LazyLogits) else x, (args, kwargs or {})
        )
        out = func(*plain_args, **plain_kwargs)
        return args[0] if func._schema.is_mutable and isinstance(args[0], LazyLogits) else out

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.computed().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.computed().detach().clone()


class _Promised(torch.autograd.Function):
    """Lazy logits at the place of the head's outputs in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, promise: Promise, *_sources: Tensor) -> LazyLogits:
        ctx.promise = promise
        return _wrapper(promise)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *ctx.promise.gradients(upstream)


def _wrapper(promise: Promise) -> LazyLogits:
    """Return a tensor without memory, of the shape and dtype that the logits will have."""
    dtype = promise.product or promise.hidden.dtype
    for kind, *value in promise.steps:
        dtype = value[0] if kind == "type" else dtype
    shape = (*promise.hidden.shape[:-1], len(promise.weight))
    logits: Any = torch.Tensor._make_wrapper_subclass(
        LazyLogits, shape, dtype=dtype, device=promise.hidden.device
    )
    logits.promise = promise
    return logits


def autocast_type(x: Tensor) -> torch.dtype | None:
    """Return the dtype of products on the device of ``x``, or None if autocast is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


STEPS: dict[str, Callable[..., Tensor]] = {
    "scale": lambda x, factor: x * factor,
    "tanh": torch.tanh,
    "type": lambda x, dtype: x.to(dtype),
}
"""Operations on logits by the names of steps."""


def _step(func: Any, args: tuple, kwargs: dict) -> tuple | None:
    """Return the step that a call amounts to: () if it changes nothing, None if no step is."""
    if func is Tensor.contiguous and len(args) == 1:
        return ()
    if kwargs:
        return None
    operand = args[1] if len(args) == 2 else None
    if func in CASTS or (func is Tensor.to and isinstance(operand, torch.dtype)):
        dtype = CASTS.get(func, operand)
        return () if args[0].dtype == dtype else ("type", dtype)
    if type(operand) is int or type(operand) is float:
        if func in MULTIPLY:
            return "scale", float(operand)
        if func in DIVIDE:
            return "scale", 1.0 / operand
    if func in TANH and len(args) == 1:
        return ("tanh",)
    return None
