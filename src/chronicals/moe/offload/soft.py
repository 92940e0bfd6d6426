"""Soft mode: shared experts stand in for the experts that are not in slots.

    y = Σ_{e ∈ S} w_e (a_e E_e(x) + (1 − a_e) E_shared(x)) + E_shared(x)

S are the chosen experts of a token with weights w_e. a_e is 1 if the record of e is in a slot and
its copy is done when a pass comes to the layer, else 0. No product waits for a copy: experts that
were missing are copied behind the products of the layer, for later passes. Results therefore depend
on the passes before, and on a card on the time that copies take.

The formula is that of ``available_expert_masks`` of the native model. ``E_shared`` is what a block
adds beside its routed experts, with its own gate where it has one (Qwen2-MoE).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.kernels.expert_dispatch import dispatch_to_experts
from chronicals.kernels.expert_glu import Gate
from chronicals.kernels.host_memory import sent
from chronicals.kernels.streamed_experts import Adapter
from chronicals.models import embedding_table
from chronicals.models.routed_experts import outermost_path
from chronicals.moe.offload.engine import ExpertEngine, with_rows
from chronicals.moe.offload.module import LayerSource, streamed_experts_of
from chronicals.moe.offload.records import expert_modules

SHARED = (("shared_experts", None), ("shared_expert", "shared_expert_gate"))
"""Names of the shared experts in a block, and of the linear layer whose sigmoid weighs them."""

NONE_SHARED = (
    "mode='soft': the block {} of this {} has no shared experts that could stand in for missing "
    "ones, as Qwen2-MoE, DeepSeek, GLM-4-MoE and the native model have; take mode='exact', with "
    "more vram or a smaller format (nf4)"
)

NO_GRADIENTS = (
    "{}: mode='soft' replaces experts and has no gradients; run it under torch.no_grad(), or train "
    "the model offloaded with mode='exact'"
)

PROBE_TOKENS = 5
"""Tokens on which it is tried what a block adds beside its routed experts."""


@dataclass
class SharedExperts:
    """The shared experts of a block, as the block adds them.

    Attributes:
        block: the module with routed and shared experts.
        name: name of the shared experts in it.
        gate: name of the linear layer whose sigmoid weighs them; None for a weight of 1.
    """

    block: nn.Module
    name: str
    gate: str | None

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Return their output for ``x_TD`` ``[T, D]``."""
        y_TD: Tensor = getattr(self.block, self.name)(x_TD)
        if self.gate is None:
            return y_TD
        return torch.sigmoid(getattr(self.block, self.gate)(x_TD)) * y_TD


def shared_experts_of(model: nn.Module) -> dict[str, SharedExperts]:
    """Return the shared experts beside each module of routed experts, by the path of the latter.

    Raises:
        ValueError: a block has none.
    """
    modules = dict(streamed_experts_of(model)) or expert_modules(model)
    found = {}
    for path in modules:
        outer = outermost_path(path).rpartition(".")[0]  # beside adapters around the experts
        block = model.get_submodule(outer)
        for name, gate in SHARED:
            if isinstance(getattr(block, name, None), nn.Module):
                found[path] = SharedExperts(block, name, gate)
        if path not in found:
            raise ValueError(NONE_SHARED.format(outer, type(model).__name__))
    return found


@torch.no_grad()
def check_shared_experts(model: Any) -> None:
    """Check that shared experts are what each block adds beside its routed experts.

    Each block is run on random tokens with routed experts that give zeros.

    Args:
        model: a mixture whose weights are loaded; its experts may be streamed.

    Raises:
        ValueError: a block has no shared experts, or adds them in another way.
    """
    table = embedding_table(model)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, PROBE_TOKENS, table.shape[1], generator=generator)
    x = x.to(table.device, table.dtype)
    for path, shared in shared_experts_of(model).items():
        with _giving_zeros(model.get_submodule(outermost_path(path))):
            found = shared.block(x)
        found = found[0] if isinstance(found, tuple) else found
        own = shared(x[0]).float()
        if not torch.allclose(found[0].float(), own, rtol=0.02, atol=0.02 * float(own.std())):
            raise ValueError(
                f"mode='soft': {type(shared.block).__name__} of {type(model).__name__} adds its "
                f"{shared.name} in a way that is not known; take mode='exact'"
            )


@contextmanager
def _giving_zeros(experts: nn.Module) -> Iterator[None]:
    """A context in which routed experts give zeros."""
    own = vars(experts).pop("forward", None)
    vars(experts)["forward"] = lambda x, *_, **__: torch.zeros_like(x)
    try:
        yield
    finally:
        vars(experts).pop("forward")
        if own is not None:
            vars(experts)["forward"] = own


class PlannedSource(LayerSource):
    """The experts of a layer for a pass whose choice the host knows already.

    Args:
        engine: the engine.
        layer: number of the layer.
        bounds: rows of its experts, as in ``Dispatch.bounds``.
    """

    def __init__(self, engine: ExpertEngine, layer: int, bounds: list[int]):
        super().__init__(engine, layer)
        self.bounds = bounds

    def look(self, bounds: Tensor, x: Tensor) -> list[int]:
        """Return the bounds; the host does not wait for the device."""
        return self.bounds


class SoftSource(LayerSource):
    """The experts of a layer, where shared experts stand in for those that are missing.

    Args:
        source: the layer's experts.
        shared: its shared experts.
    """

    def __init__(self, source: LayerSource, shared: SharedExperts):
        super().__init__(source.engine, source.layer)
        self.shared = shared

    def __deepcopy__(self, memo: dict) -> SoftSource:
        """Return a source of the same records beside the shared experts of the copied model."""
        return SoftSource(self, copy.deepcopy(self.shared, memo))

    def compute(
        self,
        x: Tensor,
        experts: Tensor,
        shares: Tensor,
        first: Adapter | None = None,
        second: Adapter | None = None,
        gate: Gate | None = None,
    ) -> Tensor:
        """Run each token through its experts, or the shared ones in their place."""
        engine, layer = self.engine, self.layer
        if not engine.stands_in:
            return super().compute(x, experts, shares, first, second, gate)
        if torch.is_grad_enabled() and (x.requires_grad or shares.requires_grad):
            raise ValueError(NO_GRADIENTS.format(self.records.path))
        count = self.sizes[0]
        bounds = self.look(dispatch_to_experts(experts, count).bounds, x)
        rows = [end - begin for begin, end in zip(bounds, bounds[1:])]
        chosen = with_rows(bounds)
        missing = engine.missing(layer, chosen)
        fallback_T1 = None
        if missing:
            available_E = [expert not in missing for expert in range(count)]
            available_Tk = sent(available_E, torch.bool, x.device)[experts]
            fallback_T1 = torch.where(available_Tk, 0, shares).sum(-1, keepdim=True)
            present = [expert for expert in chosen if available_E[expert]]
            # Weights of zero go to an expert that is there, so that no other is called.
            instead = present[0] if present else 0
            experts = torch.where(available_Tk, experts, instead)
            shares = torch.where(available_Tk, shares, 0)
            bounds = _bounds_with(rows, missing, instead)
        engine.log.stand_in(layer, fallback_T1, shares)
        if len(missing) < len(chosen):
            planned = PlannedSource(engine, layer, bounds)
            y = planned.compute(x, experts, shares, first, second, gate)
        else:
            y = torch.zeros_like(x)
        engine.fetch_for_later(layer, chosen, missing)
        return y if fallback_T1 is None else y + (fallback_T1 * self.shared(x)).to(y.dtype)


def _bounds_with(rows: Sequence[int], missing: Sequence[int], instead: int) -> list[int]:
    """Return bounds of experts when rows of missing ones go to another.

    Args:
        rows: rows of each expert.
        missing: experts without a record in a slot.
        instead: the expert that gets their rows.
    """
    moved = list(rows)
    for expert in missing:
        moved[instead] += moved[expert]
        moved[expert] = 0
    bounds = [0]
    for height in moved:
        bounds.append(bounds[-1] + height)
    return bounds


def let_shared_experts_stand_in(model: nn.Module, engine: ExpertEngine) -> None:
    """Let the shared experts of a model stand in for experts that are not in slots.

    Raises:
        ValueError: a block has no shared experts.
    """
    shared = shared_experts_of(model)
    for path, module in streamed_experts_of(model):
        module.source = SoftSource(module.source, shared[path])
    engine.stands_in = True
