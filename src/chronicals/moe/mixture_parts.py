"""Find the attention, router and experts of each mixture layer of a Hugging Face model.

They are found by structure, not by class. The experts are the module with stacked weights
(``down_proj`` ``[E, ., .]``), possibly in 4 bits. The router is a module next to the experts (or
next to the adapters around them) with a weight ``[E, D]``. The attention is the first module with
"Attention" in its class name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from chronicals.memory import decoder_layers
from chronicals.models.routed_experts import count_of, is_experts, outermost_path, router_within

CORRECTIONS = ("e_score_correction_bias", "expert_bias")
"""Attribute names of the score correction, in a router or next to it."""


@dataclass(frozen=True)
class MixtureLayer:
    """A layer with routed experts.

    Attributes:
        number: index among all decoder layers.
        attention, experts, router: its modules.
        num_experts: E.
        correction: ``[E]``, added to scores when experts are chosen but not to their weights; None
            if the model has none.
    """

    number: int
    attention: nn.Module
    experts: nn.Module
    router: nn.Module
    num_experts: int
    correction: Tensor | None = None

    @property
    def gate(self) -> Tensor:
        """Router weight, ``[E, D]``."""
        return self.router.get_parameter("weight")

    @property
    def bias(self) -> Tensor | None:
        """Router bias ``[E]`` that is added to the logits, or None."""
        return getattr(self.router, "bias", None)


def mixture_layers(model: Any) -> list[MixtureLayer]:
    """Return the layers of ``model`` with routed experts, in order.

    Raises:
        ValueError: the model has none, or a layer's router or attention is not found.
    """
    name = type(model).__name__
    width = model.get_input_embeddings().weight.shape[1]
    found = []
    for number, layer in enumerate(decoder_layers(model)):
        path, experts = next(
            ((path, module) for path, module in layer.named_modules() if is_experts(module)),
            ("", None),
        )
        if experts is None:
            continue
        count = count_of(experts)
        block = outermost_path(path).rpartition(".")[0]
        around = layer.get_submodule(block)
        _, router = router_within(around, count, width) or ("", None)
        attention = next(
            (module for module in layer.modules() if "Attention" in type(module).__name__), None
        )
        if router is None or attention is None:
            raise ValueError(
                f"layer {number} of {name}: its {'router' if router is None else 'attention'} is "
                "not found"
            )
        found.append(
            MixtureLayer(number, attention, experts, router, count, _correction(around, count))
        )
    if not found:
        raise ValueError(
            f"{name} has no layer with routed experts; give a mixture-of-experts model"
        )
    return found


def _correction(block: nn.Module, experts: int) -> Tensor | None:
    named = (*block.named_parameters(), *block.named_buffers())
    found = next(
        (x for name, x in named if name.rpartition(".")[2] in CORRECTIONS and x.numel() == experts),
        None,
    )
    return None if found is None else found.detach().flatten()
