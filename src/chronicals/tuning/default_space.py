"""Metric and space of a study that names none, by the objective of its recipe."""

from __future__ import annotations

from typing import Any

from chronicals.config import Recipe
from chronicals.tuning.fields import SPEED
from chronicals.tuning.mixture import is_untrained, own_size
from chronicals.tuning.space import ALPHA_RATIO

METRICS = {
    **dict.fromkeys(("dpo", "ipo", "simpo", "cpo", "orpo", "reward"), "rewards/accuracies"),
    **dict.fromkeys(("grpo", "rloo"), "reward"),
}
"""Held-out metric of objectives whose loss depends on their own settings: how often the chosen answer
has the higher reward, or the mean reward of answers."""

STRENGTH = {"dpo": "beta", "ipo": "tau", "simpo": "beta", "cpo": "beta", "orpo": "beta"}
"""Setting of objectives of pairs that such a metric does not contain."""

REACH = 10.0
"""Factor by which the range of the learning rate reaches below and above the recipe's: the best rate
of adapters is about ten times that of all weights (Schulman et al., 2025, "LoRA Without Regret"), so
a rate that is meant for one of them lies at an end of the range of the other."""

STRENGTH_REACH = 5.0
"""Likewise of that setting: papers take 0.01 to 0.5 where 0.1 is the default."""


ROUTER_WEIGHTS = {
    "router.balance": [1e-3, 1e-1, "log"],
    "router.temporal": [1e-4, 1e-2, "log"],
    "router.token_ahead": [1e-2, 1.0, "log"],
}
"""Weights of the losses of routers, a factor of ten around those of examples/native-mixture.yaml."""

SIZES = ("hidden_size", "num_experts", "kv_lora_rank")
"""Sizes of a native mixture that are halved and doubled."""


def default_metric(objective: str) -> str:
    """Return the metric by which trials of an objective are compared."""
    return METRICS.get(objective, "loss")


def default_space(recipe: Recipe, metric: str) -> dict[str, Any]:
    """Return the dimensions of a study that names none, as a recipe has them."""
    if metric == SPEED:
        return {
            "batch_size": [1, 2, 4, 8],
            "memory": [None, ["recompute_elementwise"], ["recompute_layers"]],
            "logits_chunk_size": [1024, 4352, 16384],
        }
    from chronicals.objectives import OBJECTIVES

    objective = OBJECTIVES[recipe.objective]
    rate = recipe.learning_rate
    if "learning_rate" not in recipe.explicit:
        default = objective.adapter_learning_rate
        rate = default if recipe.use_lora else objective.full_learning_rate
    space: dict[str, Any] = {"learning_rate": _around(rate, REACH)}
    if recipe.use_lora:
        space |= {"lora_rank": [8, 16, 32, 64], ALPHA_RATIO: [0.25, 0.5, 1.0, 2.0]}
    else:
        space["weight_decay"] = [0.0, 0.01, 0.1]
    if is_untrained(recipe) and recipe.objective == "pretraining":
        space |= ROUTER_WEIGHTS
        for size in SIZES:
            own = own_size(recipe, size)
            space[f"moe.{size}"] = [own // 2, own, own * 2]
        space |= {"moe.num_shared_experts": [0, 1, 2], "moe.lookahead_tokens": [1, 2, 4]}
    setting = STRENGTH.get(recipe.objective)
    if setting is not None and metric != "loss":
        given = recipe.sections.get(recipe.objective, {})
        own = given.get(setting, getattr(objective.Settings(), setting))
        space[f"{recipe.objective}.{setting}"] = _around(own, STRENGTH_REACH)
    return space


def _around(value: float, reach: float) -> list[Any]:
    """Return a logarithmic range around a value, its ends with two digits."""
    return [float(f"{value / reach:.2g}"), float(f"{value * reach:.2g}"), "log"]
