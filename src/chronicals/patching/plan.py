"""The plan of what can be replaced in models of a class and configuration.

It is proved on the twin of the class, once: part by part, and then all parts together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.batch import IGNORED, Batch
from chronicals.models import PresentedModel, attention_seam
from chronicals.models.rebinding import functions_beside
from chronicals.models.twin import FIRST_TOKEN, build_twin, plain_surroundings, twin_config
from chronicals.patching import attention, decoder_layer, loss
from chronicals.patching.experts import recognise_experts
from chronicals.patching.forms import Form, NoShell, shell_of, signature
from chronicals.patching.gated_mlps import recognise_gated_mlp
from chronicals.patching.norms import recognise_gated_norm, recognise_norm
from chronicals.patching.rotary import recognise_rotary

GATED_MLP = "gated MLP"
"""Role of gated MLPs."""

EXPERTS = "experts"
"""Role of stacked experts."""

RECOGNISERS: dict[str, Callable[[nn.Module], Form | None]] = {
    "norm": recognise_norm,
    "gated norm": recognise_gated_norm,
    GATED_MLP: recognise_gated_mlp,
    "rotary": recognise_rotary,
    EXPERTS: recognise_experts,
}
"""Recognisers by the role of a module; each returns the form of a module, or None."""

NO_KERNEL = "computes nothing that a kernel does"
NO_TWIN = "there is no twin"
DISAGREES = "the whole twin did not agree with it"
"""Reasons in a plan."""

PROOF_LENGTHS = (7, 1, 9, 4)
"""Lengths of the documents that whole layers are proved on."""

GRADIENT_TOLERANCE = 1e-4
GRADIENT_FLOOR = 1e-2
"""Largest norm of a gradient's difference in fp64, and the smallest norm that it is relative to.

It is relative to the gradient's norm, or to GRADIENT_FLOOR times the mean norm of all gradients if
that is larger. The gradient of a key bias is rounding only, and some classes round to fp32 inside.
"""


@dataclass
class PatchPlan:
    """The parts that were proved for a class and configuration.

    Attributes:
        forms: role and form by the signature of a module.
        layers: form of a decoder layer with one or both halves fused, by the layer's signature.
        seen: reason why a module of the twin is not replaced, by its signature; empty if it is.
        loss, attention: whether these can be replaced.
        reasons: reason why a part cannot be replaced, by the name of the part.
        code: by class, the forward that it was proved with and the functions that it calls.
    """

    forms: dict[tuple, tuple[str, Form]] = field(default_factory=dict)
    layers: dict[tuple, Form] = field(default_factory=dict)
    seen: dict[tuple, str] = field(default_factory=dict)
    loss: bool = False
    attention: bool = False
    reasons: dict[str, str] = field(default_factory=dict)
    code: dict[type[nn.Module], tuple] = field(default_factory=dict)

    @property
    def fuses_halves(self) -> bool:
        """True if both halves of every layer run fused, in one piece or as attention and experts."""
        fused = {decoder_layer.FUSED_LAYER}
        if any(role == EXPERTS for role, _ in self.forms.values()):
            fused.add(decoder_layer.FUSED_ATTENTION)
        return bool(self.layers) and all(form.by in fused for form in self.layers.values())

    def without(self, role: str) -> PatchPlan:
        """Return the plan without the forms of a role, or without the loss."""
        forms = {key: entry for key, entry in self.forms.items() if entry[0] != role}
        left_out = {key: DISAGREES for key in self.forms if key not in forms}
        return PatchPlan(
            forms=forms,
            seen=self.seen | left_out,
            loss=self.loss and role != loss.LOSS_PART,
            attention=self.attention,
            reasons=dict(self.reasons),
        )


LossAndGradients = tuple[float, dict[str, Tensor]]
"""A loss, and gradients by the names of the parameters."""

PLANS: dict[tuple[type, str], PatchPlan] = {}
"""Plans by class and configuration; empty it to have them made anew."""


def plan_for(model: Any) -> PatchPlan:
    """Return the plan for the class and configuration of ``model``, whose tensors are not touched.

    Plans are cached until a forward of the class is replaced.
    """
    try:
        config = twin_config(model.config)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        return _plan_from_shells(model, f"its configuration cannot be made small ({error})")
    key = (type(model), config.to_json_string(use_diff=False))
    plan = PLANS.get(key)
    # a forward, or a function that it calls, may have been replaced since the proof
    if plan is None or any(
        (cls.forward, *functions_beside(cls.forward)) != code for cls, code in plan.code.items()
    ):
        with plain_surroundings():
            plan = PLANS[key] = _plan_from_twin(type(model), config)
        classes = (type(model), *(kind[0] for kind in plan.seen if kind))
        plan.code = {cls: (cls.forward, *functions_beside(cls.forward)) for cls in classes}
    if NO_TWIN in plan.seen.values():
        return _plan_from_shells(model, plan.reasons["model"])
    return plan


def _plan_from_shells(model: nn.Module, reason: str) -> PatchPlan:
    """Return a plan without a twin: each module is proved by itself, on a shell of it.

    Loss and attention need a whole model and are left alone.

    Args:
        model: the model whose modules are to be replaced.
        reason: why there is no twin.
    """
    plan = PatchPlan(reasons={loss.LOSS_PART: reason, attention.ATTENTION_PART: reason})
    with plain_surroundings():
        for module in model.modules():
            key = signature(module)
            if key in plan.seen:
                continue
            why_no_form = NO_KERNEL
            has_form = False
            try:
                has_form = _add_form(plan, key, shell_of(module))
            except NoShell as error:
                why_no_form = f"{NO_KERNEL}: {error}"
            # a rotation is a function of the module's file, which needs no shell
            has_form = has_form or _add_form(plan, key, module, only=("rotary",))
            plan.seen[key] = "" if has_form else why_no_form
    return plan


def _plan_from_twin(cls: type, config: Any) -> PatchPlan:
    """Return the plan that is proved on a small random model of the class."""
    plan = PatchPlan()
    try:
        twin = build_twin(cls, config).train()
        for module in twin.modules():
            key = signature(module)
            if key not in plan.seen:
                plan.seen[key] = "" if _add_form(plan, key, module) else NO_KERNEL
        twin.double()
        expected = run(twin)
        repeatable = agree(expected, run(twin))
    except Exception as error:  # any class of transformers may object to its sizes in its own way
        reason = f"a small twin could not be run ({type(error).__name__}: {error})"
        return PatchPlan(seen={(): NO_TWIN}, reasons={"model": reason})
    if not repeatable:
        return PatchPlan(
            reasons={"model": "it does not give the same loss twice, so nothing can be compared"}
        )
    plan.loss = loss.head_of(twin) is not None
    if not plan.loss:
        plan.reasons[loss.LOSS_PART] = "its head is not a plain linear layer"
    if not _agrees(twin, plan, expected):
        for role in (loss.LOSS_PART, *reversed(RECOGNISERS)):
            smaller = plan.without(role)
            if _agrees(twin, smaller, expected):
                smaller.reasons.setdefault(role, DISAGREES)
                plan = smaller
                break
        else:
            plan = PatchPlan(
                seen=plan.seen,
                reasons={
                    "model": "no part could be replaced in the whole twin without changing it"
                },
            )
    reason = _why_not_documents(twin)
    if reason:
        plan.reasons[attention.ATTENTION_PART] = reason
    plan.attention = not reason
    plan.layers = _fused_layers(twin, plan)
    if not plan.layers:
        plan.reasons[decoder_layer.LAYER_PART] = (
            "no half of its layers, norm and attention or norm and gated MLP, is of a known form"
        )
    return plan


def _fused_layers(twin: Any, plan: PatchPlan) -> dict[tuple, Form]:
    """Return the largest set of fused layers, by signature, that keeps the twin's packed output.

    All layers fuse both halves where they have known forms, or else attention only, or else the MLP
    only. The result is empty if none of that holds. Halves that are left out are noted in
    ``plan.reasons``.
    """
    anatomies: dict[tuple, decoder_layer.Anatomy] = {}
    for layer in getattr(twin.get_decoder(), "layers", ()):
        anatomy = decoder_layer.read_layer(layer, plan.forms)
        if anatomy is not None:
            anatomies[decoder_layer.layer_signature(layer)] = anatomy
    if not any(anatomy.by for anatomy in anatomies.values()):
        return {}
    try:
        expected = _run_packed(twin)
    except Exception:  # a class that takes no bounds of documents fails in its own way
        return {}
    tried = []
    for fuses_attention, fuses_mlp in ((True, True), (True, False), (False, True)):
        for interleaved in (False, True):
            chosen = {}
            for key, anatomy in anatomies.items():
                reads = anatomy.attention if fuses_attention else None
                if reads is not None:
                    reads = replace(reads, interleaved=interleaved)
                mlp = anatomy.mlp if fuses_mlp else None
                chosen[key] = replace(anatomy, attention=reads, mlp=mlp)
            forms = {
                key: Form(anatomy.by, partial(decoder_layer.run_layer, anatomy))
                for key, anatomy in chosen.items()
                if anatomy.by
            }
            if not forms or chosen in tried:
                continue
            tried.append(chosen)
            if _layers_agree(twin, forms, expected):
                if not fuses_attention:
                    plan.reasons[decoder_layer.ATTENTION_HALF] = DISAGREES
                if not fuses_mlp:
                    plan.reasons[decoder_layer.MLP_HALF] = DISAGREES
                return forms
    return {}


def _layers_agree(twin: Any, forms: dict[tuple, Form], expected: LossAndGradients) -> bool:
    """Return whether the twin with these fused layers gives ``expected``, and all of them ran."""
    fused = []
    for layer in twin.get_decoder().layers:
        form = forms.get(decoder_layer.layer_signature(layer))
        if form is not None:
            fused.append((layer, form))
    expected_runs = decoder_layer.runs + Counter(form.by for _, form in fused)
    for layer, form in fused:
        layer.forward = MethodType(form.forward, layer)
    try:
        return agree(expected, _run_packed(twin)) and decoder_layer.runs == expected_runs
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return False  # parts with the expected names are something else
    finally:
        for layer, _ in fused:
            del layer.forward


def _run_packed(twin: Any) -> LossAndGradients:
    """Run the twin on packed documents, without its head.

    Returns:
        0.0, and the hidden states under the name "" beside the gradients of their sum with random
        weights.
    """
    generator = torch.Generator().manual_seed(8)
    vocabulary = len(twin.get_input_embeddings().weight)
    count = sum(PROOF_LENGTHS)
    ids = torch.randint(FIRST_TOKEN, vocabulary, (count,), generator=generator)
    positions = torch.cat([torch.arange(length) for length in PROOF_LENGTHS])
    bounds = torch.tensor([0, *PROOF_LENGTHS]).cumsum(0).to(torch.int32)
    labels = torch.full_like(ids, IGNORED)
    batch = Batch(ids, labels, positions, bounds, max(PROOF_LENGTHS))
    with PresentedModel(twin, packed=True, head_is_read=False).attending_documents() as presented:
        states = presented.hidden_states(batch)
    value = (states * torch.randn(states.shape, generator=generator)).sum()
    return 0.0, {"": states.detach(), **_gradients(twin, value)}


def _gradients(model: nn.Module, value: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a scalar in the trained parameters that it depends on."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    return {name: g for name, g in zip(parameters, gradients) if g is not None}


def _why_not_documents(twin: Any) -> str:
    """Return why the twin's attention cannot take rows as documents; empty if it can.

    Loss and gradients must stay the same for plain rows, rows padded on either side, rows with
    targets at the padding, and packed rows.
    """
    generator = torch.Generator().manual_seed(7)
    size = twin.get_input_embeddings().weight.shape[0]
    ids = torch.randint(FIRST_TOKEN, size, (2, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    rows: dict[str, dict[str, Tensor]] = {"plain": {"input_ids": ids, "labels": ids}}
    for side, padding in (("right", mask), ("left", mask.flip(1))):
        labels = ids.masked_fill(padding == 0, IGNORED)
        rows[f"{side}-padded"] = {"input_ids": ids, "labels": labels, "attention_mask": padding}
    rows["padding-trained"] = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    positions = torch.cat([torch.arange(length) for length in (7, 1, 6)])[None]
    packed = torch.randint(FIRST_TOKEN, size, positions.shape, generator=generator)
    rows["packed"] = {
        "input_ids": packed,
        "labels": packed.masked_fill(positions == 0, IGNORED),
        "position_ids": positions,
    }
    try:
        expected = {kind: run(twin, **inputs) for kind, inputs in rows.items()}
    except Exception as error:  # any class of transformers may object to such rows in its own way
        return f"it does not take padded or packed rows ({type(error).__name__})"
    # some classes give NaN at padding
    expected = {kind: result for kind, result in expected.items() if agree(result, result)}
    if not attention_seam.places(twin):
        return "it does not attend through transformers' interface"
    attention.install_document_attention(twin)
    before = attention.runs[0]
    try:
        got = {kind: run(twin, **rows[kind]) for kind in expected}
    except Exception as error:  # likewise: a class that looks into its masks
        return f"it does not take rows without a mask ({type(error).__name__})"
    finally:
        attention.remove_document_attention(twin)
    if attention.runs[0] == before:
        return "it does not attend through transformers' interface, or not to documents"
    wrong = [kind for kind in expected if not agree(expected[kind], got[kind])]
    return f"{' and '.join(wrong)} rows would change" if wrong else ""


def _add_form(plan: PatchPlan, key: tuple, module: nn.Module, only: Collection[str] = ()) -> bool:
    """Add the form of a module to the plan; return whether it has one.

    Args:
        plan: the plan.
        key: the module's signature.
        module: the module, of a twin or a shell.
        only: roles to be tried; all by default.
    """
    for role, recognise in RECOGNISERS.items():
        if only and role not in only:
            continue
        form = recognise(module)
        if form is not None:
            plan.forms[key] = (role, form)
            return True
    return False


def _agrees(twin: Any, plan: PatchPlan, expected: LossAndGradients) -> bool:
    """Return whether the twin patched by the plan gives ``expected``; it is unpatched afterwards.

    A loss that the twin does not take from the seam is removed from the plan.
    """
    changed = [module for module in twin.modules() if signature(module) in plan.forms]
    for module in changed:
        module.forward = MethodType(plan.forms[signature(module)][1].forward, module)
    if plan.loss:
        loss.install_loss_seam(twin)
    try:
        got = run(twin)
        if plan.loss and not twin._chronicals_loss_seam.taken:
            plan.loss = False
            plan.reasons[loss.LOSS_PART] = "it computes its loss in its own way"
        return agree(expected, got)
    except Exception as error:  # a class may use its parts in a way that only a call shows
        plan.reasons["whole"] = f"{type(error).__name__}: {error}"
        return False
    finally:
        loss.remove_loss_seam(twin)
        for module in changed:
            del module.forward


def run(model: Any, **inputs: Tensor) -> LossAndGradients:
    """Compute the loss and the gradients of all trained parameters.

    Args:
        model: a causal language model.
        **inputs: inputs of the model; by default two rows of random tokens, one of them with
        ignored labels.
    """
    if not inputs:
        generator = torch.Generator().manual_seed(5)
        embedding = model.get_input_embeddings().weight
        ids = torch.randint(FIRST_TOKEN, len(embedding), (2, 9), generator=generator)
        ids = ids.to(embedding.device)
        labels = ids.clone()
        labels[0, :4] = IGNORED
        inputs = {"input_ids": ids, "labels": labels}
    torch.default_generator.manual_seed(6)
    out = model(**inputs, use_cache=False)
    return out.loss.item(), _gradients(model, out.loss)


def agree(expected: LossAndGradients, got: LossAndGradients) -> bool:
    """Return whether two runs gave the same loss and gradients, within the tolerance."""
    expected_loss, expected_gradients = expected
    loss_value, gradients = got
    if (
        expected_gradients.keys() != gradients.keys()
        or not math.isfinite(expected_loss)
        or not math.isclose(expected_loss, loss_value, rel_tol=1e-5)
    ):
        return False
    mean = float(torch.stack([g.norm() for g in expected_gradients.values()]).mean())
    for name, g in expected_gradients.items():
        scale = max(float(g.norm()), GRADIENT_FLOOR * mean)
        if not float((gradients[name] - g).norm()) <= GRADIENT_TOLERANCE * scale:
            return False
    return True
