"""Reference policy of an objective: the model as the run begins, or another one, not trained.

Its log-probabilities come from one of three places: a further forward pass with adapters switched
off, a frozen model beside the trained one, or a column of the data that was computed before the
first step. It never drops out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from chronicals.batch import Batch
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.config.values import lasting
from chronicals.data.tokens.template import FINGERPRINT_TEXT
from chronicals.lora import adapters_are_fresh, why_base_is_gone, without_adapters
from chronicals.models import PresentedModel, has_4bit_layers, in_evaluation
from chronicals.models.loading import without_field
from chronicals.objectives.log_probabilities import document_sums, score_tokens
from chronicals.objectives.registry import OBJECTIVES
from chronicals.objectives.terms import (
    ADAPTERS_OFF,
    REFERENCE_POLICY,
    Column,
    Columns,
    FrozenModel,
    Objective,
    ReferencePolicy,
    ReferenceRecord,
    settings,
)
from chronicals.saving import SavedModel

logger = logging.getLogger(__name__)

ADAPTER_BASE_REMEDY = (
    "write where it is into the adapter's adapter_config.json (base_model_name_or_path), or name "
    "the model that chronicals "
    "merge makes of it"
)
"""Remedy if the named model is an adapter whose base model is not known."""

_TOKENIZER_REMEDY = (
    "the reference must read texts as the policy does: take one of the policy's family"
)

_COMPARED_PARAMETERS = 16
"""Number of parameters that identify a reference on resume: last layer and head."""

_UNKNOWN_COMMIT = [None]
"""End of the identity of a hub's model in records of runs that did not know its commit."""


@settings
class ReferenceSettings:
    """Settings of an objective with a reference policy."""

    reference: Literal["auto", "adapters_off", "stored"] = Field(
        default="auto",
        description="Reference policy: the base with adapters_off, or log-probabilities stored "
        "before the first step; auto "
        "takes the former where adapters begin without an effect",
    )
    reference_model: Annotated[str, AfterValidator(os.path.expanduser)] | None = Field(
        default=None,
        description="Folder or hub name of a model, an adapter or a run as the reference policy, "
        "with the policy's tokenizer; "
        "it stays in memory, frozen",
    )
    reference_in_4bit: bool = Field(
        default=False, description="Whether the reference model is read into NF4"
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that comes with the reference model"
    )


class WithReference(Objective):
    """An objective with a reference policy, whose settings extend ``ReferenceSettings``."""

    def bring(self, model: Any, tokenizer: Any, config: ChronicalsConfig) -> Mapping[str, Any]:
        """Return the reference model, if the settings name one."""
        chosen = self.settings
        if chosen.reference_model is None:
            if chosen.reference_in_4bit:
                raise ConfigurationError(
                    f"{config.objective}.reference_in_4bit=True: there is no model to quantise; "
                    "give "
                    f"{config.objective}.reference_model"
                )
            return {}
        if chosen.reference != "auto":
            raise ConfigurationError(
                f"{config.objective}.reference={chosen.reference!r}: the reference is "
                f"{config.objective}.reference_model="
                f"{chosen.reference_model!r}; leave one of them out"
            )
        setting = f"{config.objective}={{'reference_model': {chosen.reference_model!r}}}"
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        try:
            saved = SavedModel.find(chosen.reference_model, remedy=ADAPTER_BASE_REMEDY)
            if saved.has_tokenizer():
                check_same_tokenizer(
                    tokenizer,
                    saved.tokenizer(chosen.trust_remote_code),
                    setting,
                    _TOKENIZER_REMEDY,
                )
            else:
                logger.info(
                    "%s: it has no tokenizer beside it, so only the number of tokens is compared",
                    setting,
                )
            reference = saved.model(
                dtype, chosen.trust_remote_code, "nf4" if chosen.reference_in_4bit else None
            )
        except ConfigurationError:
            raise
        except ValueError as error:
            raise ConfigurationError(f"{setting}: {without_field(error)}") from error
        rows = model.get_input_embeddings().weight.shape[0]
        reference_rows = reference.get_input_embeddings().weight.shape[0]
        if reference_rows < min(rows, len(tokenizer)):
            raise ConfigurationError(
                f"{setting}: its embedding has {reference_rows} rows, the tokenizer "
                f"{len(tokenizer)} tokens; {_TOKENIZER_REMEDY}"
            )
        return {REFERENCE_POLICY: reference}

    def frozen_models(self, config: ChronicalsConfig) -> Sequence[FrozenModel]:
        """Declare the reference model, which has the precision of the run, if one is named."""
        chosen = self.settings
        if chosen.reference_model is None:
            return ()
        precision = "nf4" if chosen.reference_in_4bit else config.mixed_precision
        setting = f"{config.objective}={{'reference_model': {chosen.reference_model!r}}}"
        model = FrozenModel(
            REFERENCE_POLICY, chosen.reference_model, precision, setting, chosen.trust_remote_code
        )
        return (model,)

    def forward_passes(self, config: ChronicalsConfig) -> Sequence[str]:
        """Return the pass of the reference model, or of the base without its adapters.

        There is none where log-probabilities are stored before the first step.
        """
        if self.settings.reference_model is not None:
            return [REFERENCE_POLICY]
        switched_off = config.use_lora and self.settings.reference != "stored"
        return [ADAPTERS_OFF] if switched_off else []

    def unplanned_costs(self, config: ChronicalsConfig) -> str | None:
        """Describe the pass of the reference policy before the first step, if there is one.

        Raises:
            ConfigurationError: the settings ask for adapters switched off, and there are none.
        """
        if self.settings.reference == "adapters_off" and not config.use_lora:
            raise ConfigurationError(
                f"{config.objective}.reference='adapters_off': there are no adapters to switch "
                "off; leave it out, or set "
                "use_lora=True"
            )
        if {ADAPTERS_OFF, REFERENCE_POLICY}.intersection(self.forward_passes(config)):
            return None
        return "the reference policy: a forward pass over all data before the first step"

    def frozen_start(self) -> str | None:
        """Return the reference policy's name, unless it is another model."""
        return REFERENCE_POLICY if self.settings.reference_model is None else None

    def start_columns(self, model: Any) -> Sequence[Columns]:
        """Declare the log-probability of every document, unless the steps compute it.

        They do with a reference model, or with the base without its adapters.
        """
        if not self._stores_reference(model):
            return ()
        column = Column(REFERENCE_POLICY, np.float32)
        return (
            Columns(
                REFERENCE_POLICY,
                "log-probabilities",
                "document",
                (column,),
                self._log_p_of_documents,
            ),
        )

    def _stores_reference(self, model: Any) -> bool:
        """Return whether log-probabilities under the reference are a column of the data.

        Raises:
            ConfigurationError: the settings ask for adapters switched off, and that is not the
                model that the run begins with.
        """
        if self.settings.reference_model is not None:
            return False
        fresh = adapters_are_fresh(model)
        if self.settings.reference == "adapters_off" and not fresh:
            raise ConfigurationError(
                "reference='adapters_off': the model without adapters is not what the run begins "
                "with (it has none of ours, "
                "they were trained before, or more than adapters is trained); take "
                "reference='stored'"
            )
        return self.settings.reference == "stored" or not fresh

    def _log_p_of_documents(
        self, model: PresentedModel, batch: Batch, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, ...]]:
        log_p = model.as_forward(lambda: score_tokens(model, batch, self.chunk_size).log_p)
        yield (document_sums(log_p, batch).float(),)

    def reference_policy(
        self, model: Any, loaded_from: SavedModel | None, config: ChronicalsConfig
    ) -> ReferencePolicy | None:
        """Describe the reference policy, so that evaluations and resumed runs find the same."""
        named = self.settings.reference_model
        frozen = self.frozen.get(REFERENCE_POLICY)
        if frozen is not None:
            parameters = list(frozen.model.parameters())
        else:
            parameters = [p for name, p in model.named_parameters() if "lora_" not in name]
        weights = tuple(parameters[-_COMPARED_PARAMETERS:])
        if named is not None:
            saved = SavedModel.find(named)
            return ReferencePolicy({"how": "reference_model", **_place_of(saved)}, weights)
        in_4bit = {"in_4bit": True} if has_4bit_layers(model) else {}
        if not self._stores_reference(model):
            return ReferencePolicy({"how": "adapters_off", **in_4bit}, weights)
        # LoftQ changes the base: the model that the run begins with is that of no files.
        changed_by_loftq = config.use_lora and config.lora_init == "loftq"
        if loaded_from is None or (changed_by_loftq and not loaded_from.adapted):
            return ReferencePolicy({"how": "stored"})
        place = _place_of(loaded_from)
        return ReferencePolicy({"how": "stored", **place, **(in_4bit if place else {})})

    def why_not_evaluated(self, model: Any) -> str | None:
        """Return why no reference policy is known for a trained model, and what to do; or None."""
        if self.settings.reference_model is not None:
            return None
        if self.settings.reference != "adapters_off":
            return (
                "nothing says which reference policy this model was trained beside; give it as "
                "reference_model, a folder or "
                "hub name: the model that the run began with, unless another was named"
            )
        adapted = hasattr(model, "chronicals_lora")
        reason = why_base_is_gone(model) if adapted else "it has no adapters of ours"
        if reason is None:
            return None
        return (
            f"reference='adapters_off': {reason}, so that switching them off gives no reference "
            "policy; give it as "
            "reference_model, a folder or hub name"
        )

    @torch.no_grad()
    def reference_sums(self, model: PresentedModel, batch: Batch) -> Tensor:
        """Return the log-probability of each document's targets under the reference, ``[N]``.

        Raises:
            ConfigurationError: there is no reference.
        """
        if REFERENCE_POLICY in batch.segments:
            return batch.segments[REFERENCE_POLICY]
        frozen = self.frozen.get(REFERENCE_POLICY)
        if frozen is not None:
            return document_sums(score_tokens(frozen, batch, self.chunk_size).log_p, batch)
        if not hasattr(model.model, "chronicals_lora"):
            raise ConfigurationError(
                "there is no reference policy to compare with; give reference_model, a folder or "
                "hub name"
            )
        with without_adapters(model.model), in_evaluation(model.model):
            return document_sums(score_tokens(model, batch, self.chunk_size).log_p, batch)


def _place_of(saved: SavedModel) -> dict[str, Any]:
    """Return ``start`` and ``identity`` of a stored model; empty if its place leads nowhere."""
    start = lasting(saved.place)
    with suppress(ValueError, OSError):
        again = SavedModel.find(start)
        if again.base == saved.base:
            return {"start": start, "identity": again.identity()}
    return {}


def with_reference(
    config: ChronicalsConfig,
    record: ReferenceRecord | None,
    reference_model: str | Path | None = None,
    base: str | None = None,
) -> ChronicalsConfig:
    """Return the configuration of an evaluation, with the reference policy of the training run.

    Args:
        config: configuration of the evaluation.
        record: written by the run beside its model; None if it wrote none.
        reference_model: another reference, given by the user.
        base: model under adapters that are merged into the evaluated model, which has none to
            switch off.

    Raises:
        ConfigurationError: a reference model is given to an objective that has none; or the one of
            the run is gone or changed.
    """
    objective = OBJECTIVES.get(config.objective)
    if objective is None or not issubclass(objective, WithReference):
        if reference_model is not None:
            raise ConfigurationError(
                f"reference_model={str(reference_model)!r}: objective={config.objective!r} "
                "compares with no reference policy; "
                "leave it out"
            )
        return config
    section = dict(config.sections.get(config.objective, {}))
    if reference_model is None and section.get("reference_model") is None and record is not None:
        reference_model = base if record["how"] == "adapters_off" else _start_of(record)
        if record.get("in_4bit") and reference_model is not None:
            section["reference_in_4bit"] = True
    if reference_model is not None:
        section["reference_model"] = lasting(reference_model)
        section["reference"] = "auto"
    elif section.get("reference_model") is None and record is not None:
        section["reference"] = "adapters_off"
    return config.fitted(sections={**config.sections, config.objective: section})


def _start_of(record: ReferenceRecord) -> str:
    """Return the place of the model that a run began with.

    Raises:
        ConfigurationError: it is not known, gone or changed.
    """
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
            or record["identity"][1:] == _UNKNOWN_COMMIT
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


def check_same_tokenizer(tokenizer: Any, other: Any, setting: str, remedy: str) -> None:
    """Check that another model's predictions for token ids are of the same texts.

    Args:
        tokenizer: of the trained model.
        other: tokenizer of the other model.
        setting: names the other model, for the message.
        remedy: advice for the message.

    Raises:
        ConfigurationError: a text has other ids with the other tokenizer, or a special token is
            another.
    """
    ours = tokenizer.get_vocab()
    theirs = other.get_vocab()
    if ours != theirs:
        differing = dict(ours.items() ^ theirs.items())
        token = min(differing, key=lambda text: ours.get(text, theirs.get(text)))
        raise ConfigurationError(
            f"{setting}: its tokenizer has another vocabulary ({len(theirs):,} tokens, ours "
            f"{len(ours):,}; {token!r} has "
            f"id ours {ours.get(token, 'none')} and its {theirs.get(token, 'none')}); {remedy}"
        )
    special = {
        number: str(token)
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special
    }
    other_special = {
        number: str(token) for number, token in other.added_tokens_decoder.items() if token.special
    }
    if special != other_special:
        differing_ids = {*special, *other_special}
        at = min(key for key in differing_ids if special.get(key) != other_special.get(key))
        raise ConfigurationError(
            f"{setting}: its tokenizer has other special tokens (id {at} is "
            f"{other_special.get(at)!r}, ours {special.get(at)!r}); {remedy}"
        )
    if tokenizer(FINGERPRINT_TEXT)["input_ids"] != other(FINGERPRINT_TEXT)["input_ids"]:
        raise ConfigurationError(
            f"{setting}: its tokenizer divides texts otherwise than ours; {remedy}"
        )
