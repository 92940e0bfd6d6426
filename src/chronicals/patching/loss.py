"""The loss seam: head and loss function of a causal language model run as one kernel.

They run within the model's own forward. While a model is called with labels, its head returns
``LazyLogits``. The loss function reads the hidden states behind them and calls linear
cross-entropy, which never holds all logits. Everything else of the forward (router losses,
outputs) is the model's own. ``.logits`` of the result are computed when somebody reads them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from chronicals.batch import IGNORED
from chronicals.kernels import linear_cross_entropy
from chronicals.kernels.linear_cross_entropy import mean_of
from chronicals.log_once import log_once
from chronicals.patching.lazy_logits import LazyLogits, Promise, autocast_type

logger = logging.getLogger(__name__)

LOSS_PART = "loss"
"""Name of the loss in the report and in a plan."""

LABELS = ("labels", "shift_labels")

TRL_ARGUMENT = "fused_lm_head"
"""Argument by which trainers of TRL (from 1.16 on) ask for the loss of every token.

They ask the forward that they installed themselves.
"""

ABOUT_TRAINERS = (
    "loss: linear_cross_entropy where the model computes its loss from labels; trainers that "
    "compute their own, as TRL's "
    "SFTTrainer does from 1.16 on (fused_lm_head), keep theirs"
)


class LossSeam:
    """The seam of one model.

    Attributes:
        active: True while the model is called with labels.
        taken: how often the kernel computed the loss.
    """

    def __init__(self) -> None:
        self.active = False
        self.taken = 0

    def before(self, model: nn.Module, _args: tuple, kwargs: dict) -> None:
        """Activate the seam if there are labels; a forward pre-hook of the model.

        Raises:
            RuntimeError: the model is a copy that DataParallel made for another card; its replaced
                forwards still belong to the modules on the first card.
        """
        if getattr(model, "_is_replica", False):
            raise RuntimeError(
                "a patched model cannot run under DataParallel, which transformers' Trainer takes "
                "where a single process sees several cards: start a process a card (torchrun), "
                "show it one (CUDA_VISIBLE_DEVICES), or call unpatch_model"
            )
        if kwargs.get(TRL_ARGUMENT):
            log_once(
                logger.warning,
                "TRL computes the loss by a fused head of its own: linear_cross_entropy is not "
                "used, the other kernels are",
            )
        self.active = (
            any(kwargs.get(name) is not None for name in LABELS)
            and not torch.compiler.is_compiling()
        )

    def after(self, *_: object) -> None:
        """Deactivate the seam; a forward hook of the model, called after errors, too."""
        self.active = False

    def __deepcopy__(self, memo: dict) -> LossSeam:
        return memo.setdefault(id(self), LossSeam())


def head_of(model: Any) -> nn.Module | None:
    """Return the plain linear layer that makes the logits, or None."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return head if type(head) is nn.Linear else None


def install_loss_seam(model: Any) -> None:
    """Put the seam in ``model``, whose head is a plain linear layer."""
    seam = LossSeam()
    head = head_of(model)
    assert head is not None
    model._chronicals_loss_seam = head._chronicals_loss_seam = seam  # type: ignore[assignment]
    head.forward = MethodType(_head_forward, head)  # type: ignore[method-assign]
    model.loss_function = _Loss(
        seam, model.loss_function, set_before="_loss_function" in vars(model)
    )
    model.register_forward_pre_hook(seam.before, with_kwargs=True)
    model.register_forward_hook(seam.after, always_call=True)


def remove_loss_seam(model: Any) -> None:
    """Remove the seam, wherever its head is by now. A loss function that was set since stays.

    A copied model has a seam of its own.
    """
    if not isinstance(vars(model).get("_chronicals_loss_seam"), LossSeam):
        return
    for hooks, flags in (
        (model._forward_pre_hooks, model._forward_pre_hooks_with_kwargs),
        (model._forward_hooks, model._forward_hooks_always_called),
    ):
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), LossSeam):
                del hooks[key]
                flags.pop(key, None)
    loss = vars(model).get("_loss_function")
    if isinstance(loss, _Loss):
        del model._loss_function
        if loss.set_before:
            model.loss_function = loss.own
    for module in model.modules():
        vars(module).pop("_chronicals_loss_seam", None)
        if getattr(vars(module).get("forward"), "__func__", None) is _head_forward:
            del module.forward


def _head_forward(head: nn.Linear, hidden: Tensor) -> Tensor:
    seam: LossSeam = head._chronicals_loss_seam  # type: ignore[assignment]
    # a sharded weight is whole during this call only
    sharded = type(head) is not nn.Linear or type(head.weight) not in (nn.Parameter, Tensor)
    # backward hooks read the gradient of logits, which must be computed for that
    hooked = head._backward_hooks or head._backward_pre_hooks
    if sharded or hooked or not seam.active:
        return F.linear(hidden, head.weight, head.bias)
    product = autocast_type(hidden)
    return LazyLogits(Promise(hidden, head.weight, head.bias, product, torch.is_grad_enabled()))


class _Loss:
    """The model's loss function; transformers' ForCausalLMLoss of lazy logits runs as a kernel.

    Args:
        seam: the seam of the model.
        own: the model's own loss function.
        set_before: whether ``own`` was set on the instance.
    """

    def __init__(self, seam: LossSeam, own: Callable[..., Tensor], set_before: bool):
        self.seam = seam
        self.own = own
        self.set_before = set_before

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        scale_and_softcap = None
        if isinstance(logits, LazyLogits) and self.own is ForCausalLMLoss:
            scale_and_softcap = logits.scale_and_softcap()
        if scale_and_softcap is None or (vocab_size is not None and vocab_size != logits.shape[-1]):
            return self.own(
                logits=logits,
                labels=labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **kwargs,
            )
        assert isinstance(logits, LazyLogits)
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        promise = logits.promise
        scale, softcap = scale_and_softcap
        targets = shift_labels.reshape(-1).to(promise.hidden.device)
        targets = targets.masked_fill(targets == ignore_index, IGNORED)
        self.seam.taken += 1
        total = linear_cross_entropy(
            promise.hidden.reshape(len(targets), -1),
            promise.weight,
            targets,
            bias=promise.bias,
            scale=scale,
            softcap=softcap,
        )
        if num_items_in_batch is None:
            return mean_of(total, targets)
        if torch.is_tensor(num_items_in_batch):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch
