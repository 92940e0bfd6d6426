"""Trained heads as the engine's predictor: they name the experts of the next layer.

The layer-ahead head of layer l (``lookahead/heads.py``) predicts the router logits of layer l + 1
from the normed input of layer l before its attention. The engine reads the names together with the
rows of layer l's experts, so the host looks no more often than without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.memory import decoder_layers
from chronicals.moe.lookahead.predictor import ExpertPredictor
from chronicals.moe.offload.prediction import Repeating
from chronicals.moe.offload.records import experts_of_token
from chronicals.moe.routers import MixtureLayer, mixture_layers

FIRST_NORM = "input_layernorm"
"""Name of the norm before attention in a decoder layer."""


class LayerInput:
    """A forward pre-hook of a decoder layer that keeps its last input and changes nothing.

    ``patch_model`` fuses a layer with it as without: hooks of the layer itself are called around
    whatever computes it.

    Attributes:
        hidden_states: the input; None before the first pass and after it was read.
    """

    def __init__(self) -> None:
        self.hidden_states: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple, named: dict[str, Any]) -> None:
        """Keep the input of a pass."""
        given: Tensor = named["hidden_states"] if "hidden_states" in named else args[0]
        self.hidden_states = given.detach()

    def taken(self) -> Tensor | None:
        """Return the input and forget it."""
        found, self.hidden_states = self.hidden_states, None
        return found


class FromHeads(Repeating):
    """Expects what layer-ahead heads predict; without an input, what a layer chose last.

    Args:
        heads: the heads, which fit the model (``check_fit``); moved to its device.
        model: the model whose layers they read, on its device.
    """

    def __init__(self, heads: ExpertPredictor, model: Any):
        super().__init__()
        layers = mixture_layers(model)
        self.heads = heads.to(layers[0].gate.device)
        self.each = experts_of_token(model.config)
        decoder = decoder_layers(model)
        self._norms = [getattr(decoder[layer.number], FIRST_NORM) for layer in layers]
        self._inputs = [LayerInput() for _ in layers[:-1]]
        self._hooks = [
            decoder[layer.number].register_forward_pre_hook(seen, with_kwargs=True)
            for layer, seen in zip(layers, self._inputs)
        ]

    @torch.no_grad()
    def ask(self, layer: int, x: Tensor) -> Tensor | None:
        """Return the experts that heads predict, the likeliest of most tokens first.

        Returns:
            Int32 ids, k of them for one token, else E, of which those that no token is predicted to
            choose are -1; None if the layer's input was not seen.
        """
        hidden = self._inputs[layer].taken()
        if hidden is None:
            return None
        features = self._norms[layer](hidden).reshape(-1, hidden.shape[-1])
        logits = self.heads.layers(layer, features)[:, 1]
        order = self.heads.choice.order(logits, self.heads.corrections[layer + 1])
        experts = order.topk(self.each, dim=-1).indices
        if len(experts) == 1:
            return experts[0].int()
        chosen = torch.zeros(order.shape[-1], dtype=torch.int32, device=x.device)
        ones = torch.ones_like(experts, dtype=torch.int32).reshape(-1)
        tokens, ids = chosen.index_add_(0, experts.reshape(-1), ones).sort(
            descending=True, stable=True
        )
        return torch.where(tokens > 0, ids, -1).int()

    def expected(self, layer: int, told: Sequence[int]) -> list[int]:
        """Return the experts that heads named, else those of the last pass."""
        named = [expert for expert in told if expert >= 0]
        return named or super().expected(layer, told)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def check_fit(heads: ExpertPredictor, layers: list[MixtureLayer], model: Any, asked: str) -> None:
    """Check that heads are of a model with such layers, and predict the next one.

    Args:
        heads: the heads.
        layers: the model's layers with routed experts.
        model: the model.
        asked: how the heads were asked for.

    Raises:
        ValueError: they are not; the message begins with ``asked``.
    """
    expected = len(layers), *layers[0].gate.shape
    if tuple(heads.gates.shape) != expected:
        raise ValueError(
            f"{asked}: its heads are for [layers, experts, width] = {list(heads.gates.shape)}, and "
            f"{type(model).__name__} has {list(expected)}; train heads for this model (chronicals "
            "moe predict-train)"
        )
    if heads.layer_ahead.furthest < 1:
        raise ValueError(
            f"{asked}: its heads predict no later layer (furthest 0); train them with "
            "--layers-ahead 1 or more, or take 'last'"
        )
    for layer in layers:
        if not hasattr(decoder_layers(model)[layer.number], FIRST_NORM):
            raise ValueError(
                f"{asked}: the layers of {type(model).__name__} have no {FIRST_NORM}, whose output "
                "heads read; take 'last'"
            )
