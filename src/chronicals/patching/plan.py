"""What can be replaced in models of a class and configuration: proved on its twin, once, part by
part and then together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.batch import IGNORED, Batch
from chronicals.models import PresentedModel
from chronicals.models.rebinding import functions_beside
from chronicals.models.twin import FIRST_TOKEN, build_twin, plain_surroundings, twin_config
from chronicals.patching import attention, decoder_layer, loss
from chronicals.patching.experts import recognise_experts
from chronicals.patching.forms import Form, signature
from chronicals.patching.gated_mlps import recognise_gated_mlp
from chronicals.patching.gated_norms import recognise_gated_norm
from chronicals.patching.norms import recognise_norm
from chronicals.patching.rotary import recognise_rotary
from chronicals.patching.shells import NoShell, shell_of

RECOGNISERS: dict[str, Callable[[nn.Module], Form | None]] = {
    "norm": recognise_norm,
    "gated norm": recognise_gated_norm,
    "gated MLP": recognise_gated_mlp,
    "rotary": recognise_rotary,
    "experts": recognise_experts,
}
NOTHING = "computes nothing that a kernel does"
NO_TWIN = "there is no twin"
LENGTHS = (7, 1, 9, 4)
"""Of the documents that whole layers are proved on."""
DISAGREES = "the whole twin did not agree with it"
TOLERANCE = 1e-4
FLOOR = 1e-2
"""Largest norm of a gradient's difference in fp64, relative to the larger of its own norm and
FLOOR times the mean norm of all gradients: the gradient of a key bias is rounding only, and some
classes round to fp32 inside."""


@dataclass
class PatchPlan:
    """What was proved for a class and configuration.

    Attributes:
        forms: role and form by the signature of a module.
        layers: form of a decoder layer with one or both halves fused, by the layer's signature.
        seen: by signature of the twin's modules, why it is not replaced; empty if it is.
        loss, attention: whether these can be replaced.
        reasons: by name of a part, why it cannot.
        code: by class, the forward that it was proved with and the functions beside that.
    """

    forms: dict[tuple, tuple[str, Form]] = field(default_factory=dict)
    layers: dict[tuple, Form] = field(default_factory=dict)
    seen: dict[tuple, str] = field(default_factory=dict)
    loss: bool = False
    attention: bool = False
    reasons: dict[str, str] = field(default_factory=dict)
    code: dict[type[nn.Module], tuple] = field(default_factory=dict)

    @property
    def fuses_whole_layers(self) -> bool:
        """Whether both halves of every layer run fused."""
        return bool(self.layers) and all(
            form.by == decoder_layer.BY for form in self.layers.values()
        )

    def is_of_today(self) -> bool:
        """Whether no forward, and no function beside one, was replaced since the proof."""
        return all(_code_of(cls) == code for cls, code in self.code.items())

    def without(self, role: str) -> PatchPlan:
        """The plan without the forms of a role, or without the loss."""
        kept = {key: entry for key, entry in self.forms.items() if entry[0] != role}
        seen = self.seen | {key: DISAGREES for key in self.forms if key not in kept}
        return PatchPlan(
            kept, {}, seen, self.loss and role != loss.NAME, self.attention, dict(self.reasons)
        )


Run = tuple[float, dict[str, Tensor]]
"""Loss, and gradients by name."""

_PLANS: dict[tuple[type, str], PatchPlan] = {}


def plan_for(model: Any) -> PatchPlan:
    """The plan for the class and configuration of ``model``; its tensors are not touched.
    Cached.
    """
    try:
        config = twin_config(model.config)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        return _from_shells(model, f"its configuration cannot be made small ({error})")
    key = (type(model), config.to_json_string(use_diff=False))
    if key not in _PLANS or not _PLANS[key].is_of_today():
        with plain_surroundings():
            plan = _PLANS[key] = _make(type(model), config)
        plan.code = {
            cls: _code_of(cls) for cls in (type(model), *(kind[0] for kind in plan.seen if kind))
        }
    plan = _PLANS[key]
    return _from_shells(model, plan.reasons["model"]) if NO_TWIN in plan.seen.values() else plan


def _code_of(cls: type[nn.Module]) -> tuple:
    return cls.forward, *functions_beside(cls.forward)


def _from_shells(model: nn.Module, reason: str) -> PatchPlan:
    """Without a twin: every part proved by itself, on a shell of it. Loss and attention need a
    whole model and stay.
    """
    plan = PatchPlan(reasons={loss.NAME: reason, attention.NAME: reason})
    with plain_surroundings():
        for module in model.modules():
            key = signature(module)
            if key not in plan.seen:
                try:
                    found = _find(plan, key, shell_of(module)) or _find(
                        plan, key, module, only=("rotary",)
                    )
                    plan.seen[key] = "" if found else NOTHING
                except NoShell as error:
                    plan.seen[key] = (
                        "" if _find(plan, key, module, only=("rotary",)) else f"{NOTHING}: {error}"
                    )
    return plan


def _make(cls: type, config: Any) -> PatchPlan:
    plan = PatchPlan()
    try:
        twin = build_twin(cls, config).train()
        for module in twin.modules():
            key = signature(module)
            if key not in plan.seen:
                plan.seen[key] = "" if _find(plan, key, module) else NOTHING
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
        plan.reasons[loss.NAME] = "its head is not a plain linear layer"
    plan = _checked(twin, plan, expected)
    reason = _why_not_documents(twin)
    if reason:
        plan.reasons[attention.NAME] = reason
    plan.attention = not reason
    plan.layers = _fused_layers(twin, plan)
    if not plan.layers:
        plan.reasons[decoder_layer.NAME] = (
            "no half of its layers, norm and attention or norm and gated MLP, is of a known form"
        )
    return plan


def _fused_layers(twin: Any, plan: PatchPlan) -> dict[tuple, Form]:
    """Fused layers with which the twin, given documents end to end, gives what it gives by
    itself: with both halves fused, or else with one of them, in all layers that have it; none
    where that does not hold."""
    layers = getattr(twin.get_decoder(), "layers", ())
    read = {
        decoder_layer.layer_signature(layer): decoder_layer.read_layer(layer, plan.forms)
        for layer in layers
    }
    anatomies = {key: anatomy for key, anatomy in read.items() if anatomy is not None}
    if not any(anatomy.by for anatomy in anatomies.values()):
        return {}
    try:
        expected = _run_packed(twin)
    except Exception:  # a class that knows no bounds fails in its own way
        return {}
    tried = []
    for fuses_attention, fuses_mlp in ((True, True), (True, False), (False, True)):
        for interleaved in (False, True):
            chosen = {
                key: anatomy.only(fuses_attention, fuses_mlp, interleaved)
                for key, anatomy in anatomies.items()
            }
            forms = {
                key: decoder_layer.layer_form(anatomy)
                for key, anatomy in chosen.items()
                if anatomy.by
            }
            if not forms or chosen in tried:
                continue
            tried.append(chosen)
            if _layers_hold(twin, forms, expected):
                fused = {
                    decoder_layer.ATTENTION_HALF: fuses_attention,
                    decoder_layer.MLP_HALF: fuses_mlp,
                }
                plan.reasons |= {name: DISAGREES for name, there in fused.items() if not there}
                return forms
    return {}


def _layers_hold(twin: Any, forms: dict[tuple, Form], expected: Run) -> bool:
    found = [
        (layer, forms.get(decoder_layer.layer_signature(layer)))
        for layer in twin.get_decoder().layers
    ]
    fused = [(layer, form) for layer, form in found if form is not None]
    due = decoder_layer.runs + Counter(form.by for _, form in fused)
    for layer, form in fused:
        layer.forward = MethodType(form.forward, layer)
    try:
        return agree(expected, _run_packed(twin)) and decoder_layer.runs == due
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return False  # it has parts under these names that are something else
    finally:
        for layer, _ in fused:
            del layer.forward


def _run_packed(twin: Any) -> Run:
    """As ``run``, of packed documents: the hidden states are returned among the gradients, under
    the name "", and their sum with random weights is differentiated; the loss is 0."""
    generator = torch.Generator().manual_seed(8)
    ids = torch.randint(
        FIRST_TOKEN, len(twin.get_input_embeddings().weight), (sum(LENGTHS),), generator=generator
    )
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    batch = Batch(ids, torch.full_like(ids, IGNORED), positions, bounds, max(LENGTHS))
    with PresentedModel(twin, packed=True, head_is_read=False).attending_documents() as presented:
        states = presented.hidden_states(batch)
    value = (states * torch.randn(states.shape, generator=generator)).sum()
    named = [(name, p) for name, p in twin.named_parameters() if p.requires_grad]
    gradients = torch.autograd.grad(value, [p for _, p in named], allow_unused=True)
    return 0.0, {
        "": states.detach(),
        **{name: g for (name, _), g in zip(named, gradients) if g is not None},
    }


def _why_not_documents(twin: Any) -> str:
    """Why the twin's attention cannot take rows as documents; empty if loss and gradients stay
    the same for all kinds.
    """
    rows = kinds_of_rows(twin)
    try:
        expected = {kind: run(twin, **inputs) for kind, inputs in rows.items()}
    except Exception as error:  # any class of transformers may object to such rows in its own way
        return f"it does not take padded or packed rows ({type(error).__name__})"
    expected = {
        kind: found for kind, found in expected.items() if agree(found, found)
    }  # some give no number at padding
    if not attention.is_offered(twin):
        return "it does not attend through transformers' interface"
    attention.install(twin)
    before = attention.runs[0]
    try:
        got = {kind: run(twin, **rows[kind]) for kind in expected}
    except Exception as error:  # likewise: a class that looks into its masks
        return f"it does not take rows without a mask ({type(error).__name__})"
    finally:
        attention.remove(twin)
    if attention.runs[0] == before:
        return "it does not attend through transformers' interface, or not to documents"
    wrong = [kind for kind in expected if not agree(expected[kind], got[kind])]
    return f"{' and '.join(wrong)} rows would change" if wrong else ""


def kinds_of_rows(model: Any) -> dict[str, dict[str, Tensor]]:
    """Plain rows, rows padded on either side, rows padded with targets at the padding, and
    packed rows.
    """
    generator = torch.Generator().manual_seed(7)
    size = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(FIRST_TOKEN, size, (2, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    rows: dict[str, dict[str, Tensor]] = {"plain": {"input_ids": ids, "labels": ids}}
    for side, padding in (("right", mask), ("left", mask.flip(1))):
        labels = ids.masked_fill(padding == 0, -100)
        rows[f"{side}-padded"] = {"input_ids": ids, "labels": labels, "attention_mask": padding}
    rows["padding-trained"] = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    positions = torch.cat([torch.arange(length) for length in (7, 1, 6)])[None]
    packed = torch.randint(FIRST_TOKEN, size, positions.shape, generator=generator)
    rows["packed"] = {
        "input_ids": packed,
        "labels": packed.masked_fill(positions == 0, -100),
        "position_ids": positions,
    }
    return rows


def _find(plan: PatchPlan, key: tuple, module: nn.Module, only: Collection[str] = ()) -> bool:
    for role, recognise in RECOGNISERS.items():
        form = recognise(module) if not only or role in only else None
        if form is not None:
            plan.forms[key] = (role, form)
            return True
    return False


def _checked(twin: Any, plan: PatchPlan, expected: Run) -> PatchPlan:
    """The plan without the role with which the whole twin gives another loss or another
    gradient.
    """
    if _holds(twin, plan, expected):
        return plan
    for role in (loss.NAME, *reversed(RECOGNISERS)):
        smaller = plan.without(role)
        if _holds(twin, smaller, expected):
            smaller.reasons.setdefault(role, DISAGREES)
            return smaller
    return PatchPlan(
        seen=plan.seen,
        reasons={"model": "no part could be replaced in the whole twin without changing it"},
    )


def _holds(twin: Any, plan: PatchPlan, expected: Run) -> bool:
    """Whether the twin, patched by the plan, gives what it gives by itself; unpatched again
    afterwards.
    """
    changed = [module for module in twin.modules() if signature(module) in plan.forms]
    for module in changed:
        module.forward = MethodType(plan.forms[signature(module)][1].forward, module)
    if plan.loss:
        loss.install(twin)
    try:
        got = run(twin)
        if plan.loss and not twin._chronicals_loss_seam.taken:
            plan.loss = False
            plan.reasons[loss.NAME] = "it computes its loss in its own way"
        return agree(expected, got)
    except Exception as error:  # a class may handle its parts in a way that only calling it shows
        plan.reasons["whole"] = f"{type(error).__name__}: {error}"
        return False
    finally:
        loss.remove(twin)
        for module in changed:
            del module.forward


def run(model: Any, **inputs: Tensor) -> Run:
    """Loss and gradients; of two rows of random tokens, one of them with ignored labels, where
    nothing else is given.
    """
    if not inputs:
        generator = torch.Generator().manual_seed(5)
        embedding = model.get_input_embeddings().weight
        ids = torch.randint(FIRST_TOKEN, len(embedding), (2, 9), generator=generator).to(
            embedding.device
        )
        labels = ids.clone()
        labels[0, :4] = -100
        inputs = {"input_ids": ids, "labels": labels}
    torch.default_generator.manual_seed(6)
    out = model(**inputs, use_cache=False)
    gradients = torch.autograd.grad(
        out.loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True
    )
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    return out.loss.item(), {name: g for name, g in zip(names, gradients) if g is not None}


def agree(expected: Run, got: Run) -> bool:
    """Whether two runs gave the same loss and gradients."""
    (one, a) = expected
    (other, b) = got
    if a.keys() != b.keys() or not math.isfinite(one) or not math.isclose(one, other, rel_tol=1e-5):
        return False
    mean = float(torch.stack([g.norm() for g in a.values()]).mean())
    return all(
        float((b[name] - g).norm()) <= TOLERANCE * max(float(g.norm()), FLOOR * mean)
        for name, g in a.items()
    )
