"""The models of a run on the meta device: names and shapes only."""

from __future__ import annotations

from typing import Any

from chronicals.config import ChronicalsConfig, ConfigurationError, Recipe
from chronicals.models import quantise_layers
from chronicals.models.loading import load_without_weights, without_field
from chronicals.objectives import Objective
from chronicals.policies.frozen_models import planned_bytes
from chronicals.saving import SavedModel
from chronicals.training.adapters import attach_adapters


def planned_model(given: Recipe, config: ChronicalsConfig) -> Any:
    """Return the model of a recipe as it is trained, with adapters and 4-bit layers if any.

    Raises:
        ConfigurationError: it is an adapter of which too little is known.
    """
    saved = SavedModel.find(given.model, given.base_model)
    base = saved.place
    if saved.adapted:  # its adapters are counted as new ones
        if saved.base is None:
            raise ConfigurationError(
                f"model={given.model!r}: an adapter that does not name its model; {saved.remedy}"
            )
        if not given.use_lora:
            raise ConfigurationError(
                f"model={given.model!r}: an adapter, which is counted as one of use_lora=True; set "
                "that, and lora_rank and "
                "lora_target_modules as the adapter has them"
            )
        base = saved.base
    model = load_without_weights(base, given.trust_remote_code)
    if config.quantization is not None:
        quantise_layers(model)
    attach_adapters(model, config, None)
    return model


def planned_frozen(objective: Objective, config: ChronicalsConfig) -> dict[str, int]:
    """Return the bytes on a card of the models that the objective declares, by name.

    Raises:
        ConfigurationError: one cannot be found; the message names the setting.
    """
    sizes = {}
    for declared in objective.frozen_models(config):
        try:
            saved = SavedModel.find(declared.place)
            place = saved.place if saved.base is None else saved.base
            model = load_without_weights(place, declared.trust_remote_code)
        except (ValueError, OSError) as error:
            raise ConfigurationError(f"{declared.setting}: {without_field(error)}") from error
        sizes[declared.name] = planned_bytes(declared, model)
    return sizes
