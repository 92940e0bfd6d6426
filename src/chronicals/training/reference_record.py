"""What a run remembers of its reference policy, and how its model is compared with the same one
later.

A run whose adapters began without an effect had the base as its reference, which is found again by
switching them off. Any other began with a model of which nothing is left in what it trained; the
run notes where that model is.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.config.paths import lasting
from chronicals.models import has_4bit_layers
from chronicals.models.loading import without_field
from chronicals.objectives import OBJECTIVES, Objective
from chronicals.objectives.reference import WithReference
from chronicals.saving import SavedModel

LOADED_FROM = "_chronicals_loaded_from"
"""Attribute of a model that nothing has changed since it was loaded: where it was
(``SavedModel``).
"""

UNKNOWN_COMMIT = [None]
"""End of the identity of a hub's model in records of runs that did not know its commit."""

Record = Mapping[str, Any]
"""As JSON: ``how`` (``adapters_off``, ``stored``, ``reference_model``), of a model that is found
again ``start`` and ``identity``, and where it was in 4 bits ``in_4bit``."""


def record_of(objective: Objective, model: Any, config: ChronicalsConfig) -> Record | None:
    """How the objective has its reference in a run that begins now; None where it compares with
    none.
    """
    saved = vars(model).pop(LOADED_FROM, None)  # the run changes it
    if not isinstance(objective, WithReference):
        return None
    if (named := objective.settings.reference_model) is not None:
        return {"how": "reference_model", **_found_again(SavedModel.find(named))}
    in_4_bits = {"in_4bit": True} if has_4bit_layers(model) else {}
    if not objective.stores_reference(model):
        return {"how": "adapters_off", **in_4_bits}
    if saved is None or _begins_with_loftq(saved, config):
        return {"how": "stored"}
    found = _found_again(saved)
    return {"how": "stored", **found, **(in_4_bits if found else {})}


def _begins_with_loftq(saved: SavedModel, config: ChronicalsConfig) -> bool:
    """Whether new adapters begin with what quantising took: the model is that of no files, in 16
    bits or in 4.
    """
    return config.use_lora and config.lora_init == "loftq" and not saved.adapted


def _found_again(saved: SavedModel) -> dict[str, Any]:
    """Nothing where its place alone does not lead there."""
    start = lasting(saved.place)
    with suppress(ValueError, OSError):
        again = SavedModel.find(start)
        if again.base == saved.base:
            return {"start": start, "identity": again.identity()}
    return {}


def difference(kept: Record, now: Record) -> str | None:
    """Why a run that goes on does not have its reference policy in the way in which it began
    with it; None where it has.
    """
    if kept["how"] == now["how"]:
        return None
    began, found = (_in_words(record) for record in (kept, now))
    return (
        f"the run's reference policy is {began}, and now it would be {found}; resume with the "
        "setting that it began with"
    )


def _in_words(record: Record) -> str:
    if record["how"] == "reference_model":
        return f"reference_model={record.get('start')!r}"
    return f"reference={record['how']!r}"


def with_reference(
    config: ChronicalsConfig,
    record: Record | None,
    reference_model: str | Path | None = None,
    base: str | None = None,
) -> ChronicalsConfig:
    """The configuration of an evaluation, with the reference policy that the model was trained
    beside.

    Args:
        record: what the run wrote beside its model; None where it wrote nothing.
        reference_model: another one, given by the user.
        base: the model that adapters were over, where the evaluated model has none of them to
            switch off.

    Raises:
        ConfigurationError: one is given to an objective that has none; or the one of the run is not
            there any more.
    """
    kind = OBJECTIVES.get(config.objective)
    if kind is None or not issubclass(kind, WithReference):
        if reference_model is not None:
            raise ConfigurationError(
                f"reference_model={str(reference_model)!r}: objective={config.objective!r} "
                "compares with no reference policy; "
                "leave it out"
            )
        return config
    given = dict(config.sections.get(config.objective, {}))
    if reference_model is None and given.get("reference_model") is None and record is not None:
        reference_model = base if record["how"] == "adapters_off" else _start(record)
        if record.get("in_4bit") and reference_model is not None:
            given["reference_in_4bit"] = True
    if reference_model is not None:
        given = {**given, "reference_model": lasting(reference_model), "reference": "auto"}
    elif given.get("reference_model") is None and record is not None:
        given["reference"] = "adapters_off"
    return config.fitted(sections={**config.sections, config.objective: given})


def _start(record: Record) -> str:
    """Where the model is that a run began with."""
    start = record.get("start")
    remedy = "give as reference_model, a folder or hub name, the model that the run began with"
    if start is None:
        raise ConfigurationError(
            "the run's reference policy was the model that it began with, and it was not known "
            f"where that is stored; {remedy}"
        )
    try:
        same = (
            SavedModel.find(start).identity() == record["identity"]
            or record["identity"][1:] == UNKNOWN_COMMIT
        )
    except (ValueError, OSError) as error:
        raise ConfigurationError(
            f"the run's reference policy, {start}, cannot be read: {without_field(error)}; {remedy}"
        ) from error
    if not same:
        raise ConfigurationError(
            f"the run's reference policy was the model in {start}, whose files were changed or "
            f"moved since; {remedy}"
        )
    return str(start)
