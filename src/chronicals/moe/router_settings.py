"""The ``router`` section of a configuration: router losses that are added to any objective."""

from __future__ import annotations

import pydantic
from pydantic import Field

LOSSES = ("balance", "z", "temporal", "locality", "layer_ahead", "token_ahead", "anchor")


@pydantic.dataclasses.dataclass(
    frozen=True, kw_only=True, config=pydantic.ConfigDict(extra="forbid")
)
class RouterSettings:
    """Coefficients of the losses in ``router_losses.py``; with 0 a loss is not computed."""

    balance: float = Field(
        default=0.0, ge=0, description="Weight of the load-balancing loss, of each layer by itself"
    )
    z: float = Field(
        default=0.0, ge=0, description="Weight of the squared log-sum of the router's logits"
    )
    temporal: float = Field(
        default=0.0, ge=0, description="Weight of the change of probabilities from token to token"
    )
    locality: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the probability outside of the last token's experts",
    )
    layer_ahead: float = Field(
        default=0.0, ge=0, description="Weight of the loss of the heads that predict later layers"
    )
    token_ahead: float = Field(
        default=0.0, ge=0, description="Weight of the loss of the head that predicts later tokens"
    )
    lookahead_temperature: float = Field(
        default=1.0, gt=0, description="Of the distribution that heads learn"
    )
    lookahead_ranking: float = Field(
        default=0.1, ge=0, description="Weight of the ranking beside the KL of a head"
    )
    lookahead_set: float = Field(
        default=1.0, ge=0, description="Weight of the chosen set's mass beside the KL of a head"
    )
    lookahead_margin: float = Field(
        default=1.0, ge=0, description="By which the ranking sets chosen experts above others"
    )
    anchor: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the KL from where the routers began, on replayed tokens",
    )
    anchor_tokens: int = Field(
        default=512, gt=0, description="Tokens that the anchor replays beside each forward pass"
    )
    metrics: bool = Field(
        default=False,
        description="Show the load of experts where no loss is trained; with one it is shown",
    )

    def __post_init__(self) -> None:
        if not self.metrics and not self.weights:
            raise ValueError(
                "no loss has a weight; set one, as balance: 0.01, or metrics: true to be shown "
                "what routers do, or leave the "
                "section out"
            )

    @property
    def weights(self) -> dict[str, float]:
        """Coefficients of the losses that are trained, by name."""
        weights = {name: getattr(self, name) for name in LOSSES}
        return {name: weight for name, weight in weights.items() if weight}
