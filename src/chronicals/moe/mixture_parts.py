"""The parts of a Hugging Face mixture: of each layer with routed experts its attention, its router
and its experts.

Found by structure: experts are the module that holds stacked weights (``down_proj`` ``[E, ., .]``),
in 4 bits too, the router a module beside it, or beside the adapters around it, with a weight ``[E,
D]``, attention the module whose class is called so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from chronicals.memory import decoder_layers
from chronicals.models.routed_experts import count_of, is_experts, router_within, without_adapters

CORRECTIONS = ("e_score_correction_bias", "expert_bias")
"""What classes call the correction of scores, in a router or beside it."""


@dataclass(frozen=True)
class MixtureLayer:
    """A layer with routed experts.

    Attributes:
        number: among all layers of the decoder.
        attention, experts, router: modules.
        num_experts: E.
        correction: ``[E]``, where one is added to scores before experts are chosen, and not to
            their weights.
    """

    number: int
    attention: nn.Module
    experts: nn.Module
    router: nn.Module
    num_experts: int
    correction: Tensor | None = None

    @property
    def gate(self) -> Tensor:
        """``[E, D]``."""
        return self.router.get_parameter("weight")

    @property
    def bias(self) -> Tensor | None:
        """``[E]``, where the router adds one to its logits."""
        return getattr(self.router, "bias", None)


def mixture_layers(model: Any) -> list[MixtureLayer]:
    """The layers with routed experts, in order.

    Raises:
        ValueError: there is none, or a part of one is not found.
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
        block = without_adapters(path).rpartition(".")[0]
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
