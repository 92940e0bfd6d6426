"""The models of a run on the meta device: names and shapes only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from chronicals.config import ChronicalsConfig, ConfigurationError, Recipe
from chronicals.lora import apply_lora
from chronicals.lora.loading import stored_config
from chronicals.models import quantise_layers
from chronicals.models.loading import load_without_weights
from chronicals.saving import SavedModel
from chronicals.training.adapters import attach_adapters


def planned_model(given: Recipe, config: ChronicalsConfig) -> Any:
    """Return the model of a recipe as it is trained, with adapters and 4-bit layers if any.

    Raises:
        ConfigurationError: it is an adapter that does not name its model, or is unlike what the
            recipe asks for.
        ValueError: the adapter cannot be read.
    """
    saved = SavedModel.find(given.model, given.base_model)
    if saved.adapted and saved.base is None:
        raise ConfigurationError(
            f"model={given.model!r}: an adapter that does not name its model; {saved.remedy}"
        )
    model = load_without_weights(saved.base or saved.place, given.trust_remote_code)
    if config.quantization is not None:
        quantise_layers(model)
    if saved.adapted:
        stored = stored_config(model, saved.place)
        # Starting values that other kinds compute from weights would need the weights.
        apply_lora(model, replace(stored, init="default"))
    attach_adapters(model, config, None)
    return model
