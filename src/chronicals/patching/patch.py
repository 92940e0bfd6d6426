"""``patch_model``: replace parts of any Hugging Face decoder by kernels, and report them.

The parts are replaced on the instance. Every replacement is proved before, reported, and can be
undone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from chronicals.lora.stacked_experts import is_parallel
from chronicals.models import speaks_of_experts
from chronicals.models.attention_seam import NOT_WHOLE, SEAMS
from chronicals.patching import attention, decoder_layer, experts, loss
from chronicals.patching.decoder_layer import ATTENTION, layer_signature
from chronicals.patching.forms import FORM, drops, holds_experts, looks_like, signature
from chronicals.patching.fused_weights import unfuse_weights
from chronicals.patching.layer_policies import forget_policies
from chronicals.patching.plan import PatchPlan, plan_for
from chronicals.quantization import class_module, packed_experts
from chronicals.versions import check_versions_for

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

KEPT_EXPERTS = "experts keep their own products"
ON_RANKS = "its experts are on several ranks, or fewer than its configuration says"
UNKNOWN_HALF = "of no known form: it runs as its class does"
ROUTED_HALF = "its class calls the router and the experts, which run fused"
"""Reasons in the report."""


@dataclass(frozen=True)
class Replaced:
    """A part that runs as a kernel now.

    Attributes:
        path: path of the module in the model.
        part: its class.
        by: name of its replacement.
    """

    path: str
    part: str
    by: str


@dataclass(frozen=True)
class Left:
    """A part that was left alone.

    Attributes:
        path: path of the module in the model; empty for a part of the whole model.
        part: its class, or the name of the part.
        reason: why it was left alone.
    """

    path: str
    part: str
    reason: str


@dataclass
class PatchReport:
    """The changes that ``patch_model`` made.

    Attributes:
        model: class of the model.
        replaced, left: entry of each module.
        notes: sentences about when a replacement is used, or what it skips.
        whole_layers: whether decoder layers were tried as wholes, too.
    """

    model: str
    replaced: list[Replaced] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    whole_layers: bool = False

    def mentions(self, part: str) -> bool:
        """Return whether ``part`` is in the report, replaced or left alone."""
        return part in {entry.part for entry in self.replaced} | {entry.part for entry in self.left}

    def counts(self) -> dict[str, int]:
        """Return the number of modules by the name of their replacement."""
        return dict(Counter(entry.by for entry in self.replaced))

    def __str__(self) -> str:
        rows = [("part", "modules", "now")]
        replaced = Counter((entry.part, entry.by) for entry in self.replaced)
        for (part, by), count in replaced.items():
            rows.append((part, str(count), by))
        left = Counter((entry.part, entry.reason) for entry in self.left)
        for (part, reason), count in left.items():
            rows.append((part, str(count), f"as it was: {reason}"))
        part_width = max(len(part) for part, _, _ in rows)
        count_width = max(len(count) for _, count, _ in rows)
        lines = [f"{part:{part_width}}  {count:>{count_width}}  {now}" for part, count, now in rows]
        return "\n".join([self.model, *lines, *self.notes])


class Whole:
    """A guard in a patched model against pickling it whole.

    Its forwards are made by patching, so the file could not be read.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(NOT_WHOLE)

    def __deepcopy__(self, memo: dict) -> Whole:
        return self


def patch_model(model: PreTrainedModel | PeftModel, outputs_at_padding: bool = True) -> PatchReport:
    """Replace what can be proved equal by kernels.

    Parameters keep names, shapes and identity, the configuration its values.

    Args:
        model: a causal language model of transformers, or PEFT's wrapping of one.
        outputs_at_padding: whether attention computes its outputs at padding on the right of rows,
            where transformers lets padding see the real tokens of its row. False leaves them zero,
            which is faster where rows are padded a lot: the loss and all gradients stay the same,
            logits and hidden states at padding do not, and labels there are refused.

    Returns:
        A report of the parts that were replaced, where and by what, and of those left alone and
        why. A second call changes nothing.

    Raises:
        ValueError: ``model`` is not a model of transformers, is wrapped or compiled already, or
            was patched with another value of ``outputs_at_padding``.
        VersionError: torch, transformers or PEFT is older than the lowest version that chronicals
            runs with.
    """
    return _patch(model, seams=True, outputs_at_padding=outputs_at_padding)


def patch_parts(model: Any, whole_layers: bool = False) -> PatchReport:
    """Patch like ``patch_model``, but keep the model's attention and loss.

    It is for callers who have their own.

    Args:
        model: a causal language model of transformers, or PEFT's wrapping of one.
        whole_layers: decoder layers that are given the bounds of documents run as one.
    """
    return _patch(model, seams=False, whole_layers=whole_layers)


def _patch(
    model: Any, seams: bool, whole_layers: bool = False, outputs_at_padding: bool = True
) -> PatchReport:
    """Patch the model.

    Args:
        model: the model, or PEFT's wrapping of one.
        seams: also replace attention and loss.
        whole_layers: see ``patch_parts``.
        outputs_at_padding: see ``patch_model``.
    """
    target = _inside(model)
    check_versions_for(model)
    plan = plan_for(target)
    report = vars(target).get("_chronicals_report")
    if not isinstance(report, PatchReport):
        report = target._chronicals_report = PatchReport(type(target).__name__)
        mixture = speaks_of_experts(target.config)
        for path, module in target.named_modules():
            part = class_module(module)
            _replace(path, part, plan, report, mixture)
        if "model" in plan.reasons:
            report.left.append(Left("", type(target).__name__, plan.reasons["model"]))
    if whole_layers and not report.whole_layers:
        _replace_layers(target, plan, report)
    if seams and not report.mentions(loss.LOSS_PART):
        _replace_loss_and_attention(target, plan, report, outputs_at_padding)
    elif seams:
        other = attention.WITHOUT_PADDING if outputs_at_padding else attention.DOCUMENT_SEAM
        if any(
            other in there.seams
            for module in target.modules()
            for there in vars(module).get(SEAMS, {}).values()
        ):
            raise ValueError(
                f"outputs_at_padding={outputs_at_padding}: the model was patched with "
                f"{not outputs_at_padding} already; call unpatch_model(model) first"
            )
    if report.replaced:
        target._chronicals_whole = Whole()
    return report


def unpatch_model(model: Any) -> None:
    """Undo ``patch_model``: every module runs its class's own forward again."""
    target = _inside(model)
    forget_policies(target)
    loss.remove_loss_seam(target)
    attention.remove_document_attention(target)
    packed = [module.inner for _, module in packed_experts(target)]
    for module in (*target.modules(), *packed):
        if hasattr(getattr(vars(module).get("forward"), "__func__", None), FORM):
            del module.forward
            vars(module).pop(experts.IMPLEMENTATION, None)
    unfuse_weights(target)
    for name in ("_chronicals_report", "_chronicals_whole"):
        vars(target).pop(name, None)


def _inside(model: Any) -> Any:
    """Return the model of transformers: ``model``, or what PEFT has wrapped.

    Raises:
        ValueError: it is none, or wrapped or compiled already.
    """
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "model is compiled already: give patch_model the model itself, and compile it "
            "afterwards"
        )
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ValueError(
            f"model is wrapped by {type(model).__name__}: give patch_model what it wraps, "
            "model.module"
        )
    target = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(target, nn.Module) or not hasattr(target, "config"):
        raise ValueError(
            f"model is {type(model).__name__}: expected a model of transformers, or PEFT's "
            "wrapping of one"
        )
    return target


def _replace(
    path: str, module: nn.Module, plan: PatchPlan, report: PatchReport, mixture: bool
) -> None:
    """Replace the forward of a module if its form is known, and report that or the reason.

    Args:
        path: path of the module in the model.
        module: the module.
        plan: the parts that were proved.
        report: is added to.
        mixture: whether the model has experts, whose absence from the plan is then reported.
    """
    key = signature(module)
    part = type(module).__name__
    _, form = plan.forms.get(key, (None, None))
    if form is None:
        if looks_like(module) and "model" not in plan.reasons:
            report.left.append(Left(path, part, plan.seen.get(key, "the twin has no such module")))
        elif mixture and holds_experts(module):
            report.left.append(Left(path, part, KEPT_EXPERTS))
        return
    if "forward" in vars(module):
        reason = "its forward was replaced by something else (hooks, offload, quantisation)"
        report.left.append(Left(path, part, reason))
    elif any(drops(child) for child in module.children()):
        report.left.append(Left(path, part, "has dropout"))
    elif form.by == experts.FUSED_EXPERTS and is_parallel(module):
        report.left.append(Left(path, part, ON_RANKS))
    else:
        module.forward = MethodType(form.forward, module)
        report.replaced.append(Replaced(path, part, form.by))
        if form.by == experts.FUSED_EXPERTS:
            config = getattr(module, "config", None)
            implementation = getattr(config, "_experts_implementation", None)
            vars(module)[experts.IMPLEMENTATION] = implementation


def _replace_layers(target: Any, plan: PatchPlan, report: PatchReport) -> None:
    """Replace the forwards of decoder layers by fused ones, and report that or the reason."""
    report.whole_layers = True
    if not plan.layers:
        reason = plan.reasons.get(decoder_layer.LAYER_PART, plan.reasons.get("model", ""))
        report.left.append(Left("", decoder_layer.LAYER_PART, reason))
        return
    other_halves = {
        decoder_layer.FUSED_ATTENTION: decoder_layer.MLP_HALF,
        decoder_layer.FUSED_MLP: decoder_layer.ATTENTION_HALF,
    }
    for path, layer in target.named_modules():
        if not hasattr(layer, ATTENTION):
            continue
        part = type(layer).__name__
        form = plan.layers.get(layer_signature(layer))
        if form is None:
            report.left.append(Left(path, part, "neither half of it is of a known form"))
            continue
        if "forward" in vars(layer):
            reason = "its forward was replaced by something else (hooks, offload)"
            report.left.append(Left(path, part, reason))
            continue
        layer.forward = MethodType(form.forward, layer)
        report.replaced.append(Replaced(path, part, form.by))
        other_half = other_halves.get(form.by)
        if other_half is not None:
            is_routed = form.by == decoder_layer.FUSED_ATTENTION and any(
                experts.IMPLEMENTATION in vars(class_module(module)) for module in layer.modules()
            )
            reason = ROUTED_HALF if is_routed else UNKNOWN_HALF
            report.left.append(Left(path, other_half, plan.reasons.get(other_half, reason)))


def _replace_loss_and_attention(
    target: Any, plan: PatchPlan, report: PatchReport, outputs_at_padding: bool
) -> None:
    """Put the seams of loss and attention into the model, and report that or the reasons."""
    head = loss.head_of(target)
    if not plan.loss or head is None:
        reason = plan.reasons.get(loss.LOSS_PART, "its head is not a plain linear layer")
        report.left.append(Left("", loss.LOSS_PART, reason))
    elif "forward" in vars(head):
        reason = "the head's forward was replaced by something else (hooks, offload)"
        report.left.append(Left("", loss.LOSS_PART, reason))
    else:
        loss.install_loss_seam(target)
        report.replaced.append(Replaced("", loss.LOSS_PART, "linear_cross_entropy"))
        report.notes.append(loss.ABOUT_TRAINERS)
    reason = plan.reasons.get(attention.ATTENTION_PART, plan.reasons.get("model", ""))
    if plan.attention:
        reason = attention.why_not(target)
    if reason:
        report.left.append(Left("", attention.ATTENTION_PART, reason))
        return
    attention.install_document_attention(target, outputs_at_padding)
    report.replaced.append(Replaced("", attention.ATTENTION_PART, attention.DOCUMENT_ATTENTION))
    report.notes.append(attention.ABOUT_PACKS)
    if not outputs_at_padding:
        report.notes.append(attention.ABOUT_PADDING)
