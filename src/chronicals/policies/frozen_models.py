"""Frozen models that an objective loads beside the trained one: their bytes, and their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.models import PresentedModel, quantise_layers
from chronicals.models.four_bits import linear_layers
from chronicals.models.loading import (
    classifier_without_weights,
    load_without_weights,
    without_field,
)
from chronicals.objectives import FrozenModel, Objective
from chronicals.policies.model_sizes import ModelSizes
from chronicals.saving import SavedModel

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "int8": 2, "nf4": 2}
"""Bytes of a value that is not packed, by the precision of a frozen model."""


def held_by(model: nn.Module, item_bytes: int | None = None) -> int:
    """Return the bytes of a model's parameters and buffers.

    Args:
        model: the model; may be on the meta device.
        item_bytes: bytes of a floating-point parameter; None for those that it has.
    """
    total = sum(buffer.nbytes for buffer in model.buffers())
    for parameter in model.parameters():
        is_float = parameter.is_floating_point()
        each = item_bytes if item_bytes and is_float else parameter.element_size()
        total += parameter.numel() * each
    return total


@dataclass(frozen=True)
class Held:
    """A frozen model on a card.

    Attributes:
        size: bytes of its parameters and buffers.
        sizes: of the model, for the time of its passes; None if no pass of a step is its own.
    """

    size: int
    sizes: ModelSizes | None

    @classmethod
    def planned(cls, declared: FrozenModel, model: Any) -> Held:
        """Return a declared model as it will be on a card; arguments as ``planned_bytes``."""
        size = planned_bytes(declared, model)  # its layers are packed from here on
        return cls(size, None if declared.is_reward else ModelSizes.of(model))


def held_by_frozen(frozen: Mapping[str, PresentedModel]) -> dict[str, Held]:
    """Return models that were loaded, by name."""
    return {
        name: Held(held_by(presented.model), ModelSizes.of(presented.model))
        for name, presented in frozen.items()
    }


def planned_bytes(declared: FrozenModel, model: Any) -> int:
    """Return the bytes that a declared model will have on a card.

    Args:
        declared: its declaration.
        model: the model on the meta device, without its adapters; its layers are quantised here.
    """
    item_bytes = ITEM_BYTES[declared.precision]
    if declared.precision == "nf4":
        quantise_layers(model)
    size = held_by(model, item_bytes)
    if declared.precision == "int8":
        # LLM.int8 (Dettmers et al., 2022): a byte a value, and an fp32 scale for each row.
        for layer in linear_layers(model).values():
            size += 4 * layer.out_features - (item_bytes - 1) * layer.weight.numel()
    return size


def planned_frozen(objective: Objective, config: ChronicalsConfig) -> dict[str, Held]:
    """Return the models that the objective declares as they will be on a card, by name.

    Raises:
        ConfigurationError: one cannot be found; the message names the setting.
    """
    return {
        declared.name: Held.planned(declared, _without_weights(declared))
        for declared in objective.frozen_models(config)
    }


def held_by_rewards(objective: Objective, config: ChronicalsConfig) -> dict[str, Held]:
    """Return the reward models of a run as they will be on a card, by name.

    They are loaded when they are called first, so that a run knows them by plan only.

    Raises:
        ConfigurationError: one cannot be found; the message names the setting.
    """
    return {
        declared.name: Held.planned(declared, _without_weights(declared))
        for declared in objective.frozen_models(config)
        if declared.is_reward
    }


def _without_weights(declared: FrozenModel) -> Any:
    """Build a declared model on the meta device; an adapter's is its base."""
    try:
        saved = SavedModel.find(declared.place)
        if declared.is_reward and not saved.adapted:
            return classifier_without_weights(saved.place, declared.trust_remote_code)
        place = saved.place if saved.base is None else saved.base
        return load_without_weights(place, declared.trust_remote_code)
    except (ValueError, OSError) as error:
        raise ConfigurationError(f"{declared.setting}: {without_field(error)}") from error
