"""The reference policy of an objective: the model as the run begins, or another one, without a
gradient.

It is had in one of three ways: adapters are switched off for a forward pass more, a frozen model
beside the trained one is asked, or every document's log-probability was computed before the first
step and is a column of the data. It never drops out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from chronicals.batch import Batch
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.lora import adapters_are_fresh, why_base_is_gone, without_adapters
from chronicals.models import PresentedModel, in_evaluation
from chronicals.models.loading import without_field
from chronicals.objectives.log_probabilities import document_sums, score_tokens
from chronicals.objectives.same_tokenizer import OF_ITS_BASE, check_same_tokenizer
from chronicals.objectives.terms import Objective, settings
from chronicals.saving import SavedModel

logger = logging.getLogger(__name__)

REFERENCE = "reference"
"""The column of log-probabilities under the reference, and the name of a frozen model."""

REMEDY = "the reference must read texts as the policy does: take one of the policy's family"
"""Where its tokenizer is another."""


@settings
class ReferenceSettings:
    """Of an objective with a reference policy."""

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
    """An objective whose settings have the fields of ``ReferenceSettings``."""

    def bring(self, model: Any, tokenizer: Any, config: ChronicalsConfig) -> Mapping[str, Any]:
        """The reference model, where one is named."""
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
        said = f"{config.objective}={{'reference_model': {chosen.reference_model!r}}}"
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        try:
            saved = SavedModel.find(chosen.reference_model, remedy=OF_ITS_BASE)
            if saved.has_tokenizer():
                check_same_tokenizer(
                    tokenizer, saved.tokenizer(chosen.trust_remote_code), said, REMEDY
                )
            else:
                logger.info(
                    "%s: it has no tokenizer beside it, so only the number of tokens is compared",
                    said,
                )
            other = saved.model(
                dtype, chosen.trust_remote_code, "nf4" if chosen.reference_in_4bit else None
            )
        except ConfigurationError:
            raise
        except ValueError as error:
            raise ConfigurationError(f"{said}: {without_field(error)}") from error
        rows = model.get_input_embeddings().weight.shape[0]
        if (there := other.get_input_embeddings().weight.shape[0]) < min(rows, len(tokenizer)):
            raise ConfigurationError(
                f"{said}: its embedding has {there} rows, the tokenizer {len(tokenizer)} tokens; "
                f"{REMEDY}"
            )
        return {REFERENCE: other}

    def unplanned_costs(self, config: ChronicalsConfig) -> str:
        if (named := self.settings.reference_model) is not None:
            return f"the reference model {named}: its weights on every card, and its forward passes"
        if self.settings.reference == "adapters_off" and not config.use_lora:
            raise ConfigurationError(
                f"{config.objective}.reference='adapters_off': there are no adapters to switch "
                "off; leave it out, or set "
                "use_lora=True"
            )
        if config.use_lora and self.settings.reference != "stored":
            return (
                "the reference policy: a forward pass more of each micro-batch, with adapters off"
            )
        return "the reference policy: a forward pass over all data before the first step"

    def frozen_start(self) -> str | None:
        return REFERENCE if self.settings.reference_model is None else None

    def stores_reference(self, model: Any) -> bool:
        """Whether the log-probability of every document is to be computed with ``model``, as the
        run begins.

        Raises:
            ConfigurationError: adapters are to be switched off, and what that gives is not what the
                run begins with.
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

    def check_reference(self, model: Any) -> None:
        """Whether there is a reference to compare ``model`` with, which was trained before.

        Raises:
            ConfigurationError: there is none, or what the model is without its adapters need not be
                it.
        """
        if self.settings.reference_model is not None:
            return
        if self.settings.reference != "adapters_off":
            raise ConfigurationError(
                "nothing says which reference policy this model was trained beside; give it as "
                "reference_model, a folder or "
                "hub name: the model that the run began with, unless another was named"
            )
        gone = (
            "it has no adapters of ours"
            if not hasattr(model, "chronicals_lora")
            else why_base_is_gone(model)
        )
        if gone is not None:
            raise ConfigurationError(
                f"reference='adapters_off': {gone}, so that switching them off gives no reference "
                "policy; give it as "
                "reference_model, a folder or hub name"
            )

    @torch.no_grad()
    def reference_sums(self, model: PresentedModel, batch: Batch) -> Tensor:
        """``[N]``: the log-probability of each document's targets under the reference.

        Raises:
            ConfigurationError: there is none.
        """
        if REFERENCE in batch.segments:
            return batch.segments[REFERENCE]
        if (frozen := self.frozen.get(REFERENCE)) is not None:
            return document_sums(score_tokens(frozen, batch, self.chunk_size).log_p, batch)
        if not hasattr(model.model, "chronicals_lora"):
            raise ConfigurationError(
                "there is no reference policy to compare with; give reference_model, a folder or "
                "hub name"
            )
        with without_adapters(model.model), in_evaluation(model.model):
            return document_sums(score_tokens(model, batch, self.chunk_size).log_p, batch)
