"""Knowledge distillation: the student learns the teacher's next-token distributions.

The documents are the run's own. Over the positions whose target is trained,

    loss = Σ_t w_t [α · u · D(p_t, q_t) + (1 − α) · (−log q_t(y_t))] / Σ_t w_t

p is the teacher's distribution and q the student's, both at temperature τ in D and at 1 in the
cross-entropy; w_t is 1 if a Batch has no weights. D is a KL divergence (Hinton et al., 2015,
section 2; Gu et al., 2024), the generalized JSD (Agarwal et al., 2024, equation 1) or a skewed KL
divergence (Ko et al., 2024, section 3.1). u is 1, as in TRL and Liger, or τ²
(``temperature_squared``), which keeps the size of D's gradient equal at all temperatures (Hinton et
al., 2015, section 2).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import AfterValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from torch import Tensor

from chronicals.batch import IGNORED, Batch
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.kernels.linear_distillation import (
    DISTILLATION_WORK,
    DistillationSums,
    Divergence,
    StoredTokens,
    distillation_bytes,
    distillation_of_logits,
    linear_distillation,
)
from chronicals.kernels.linear_head import LinearHead
from chronicals.models import Head, PresentedModel, Term, Terms, embedding_table
from chronicals.models.loading import without_field
from chronicals.objectives.reference import ADAPTER_BASE_REMEDY, check_same_tokenizer
from chronicals.objectives.registry import register
from chronicals.objectives.terms import Column, Columns, FrozenModel, Objective, Paper, settings
from chronicals.saving import SavedModel

TEACHER = "teacher"
"""Name of the frozen model."""

STORED_IDS = "teacher_ids"
STORED_LOG_P = "teacher_log_p"
"""Columns of targets: k token ids of the teacher's prediction, and their log-probabilities."""

_DEFAULT_BETA = 0.5
"""Default of ``beta``: the JSD from the mean of both sides."""

DEFAULT_SKEW = 0.1
"""Default of ``skew``, which DistiLLM recommends."""

PRECISIONS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int8": torch.bfloat16,
    "nf4": torch.bfloat16,
}
"""Dtype of the teacher's products, or of its other operations if the products are quantised."""

QUANTISED = ("int8", "nf4")
"""Precisions that are formats of ``load_model``."""

_TOKENIZER_REMEDY = "distil from a teacher of the same family, whose tokenizer is the student's"

Log = Tensor
"""Log-probabilities ``[..., V]``."""


@register("distill")
class Distill(Objective):
    """An objective that minimises the divergence from a frozen teacher, and a cross-entropy.

    The teacher sees the same Batch.
    """

    head_bytes = staticmethod(distillation_bytes)
    head_work = DISTILLATION_WORK
    of_tokens = True
    papers = (
        Paper("knowledge distillation", "Hinton et al., 2015, section 2"),
        Paper("truncated teacher distributions", "Peng et al., 2024 (arXiv 2410.16215)"),
    )

    @settings
    class Settings:
        """Section ``distill`` of a configuration."""

        teacher: Annotated[str, AfterValidator(os.path.expanduser)] = Field(
            description="Folder or hub name of a model, an adapter or a run, with the student's "
            "tokenizer"
        )
        divergence: Literal["forward_kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl"] = (
            Field(
                default="forward_kl",
                description="Of the student's distributions from the teacher's",
            )
        )
        temperature: float = Field(
            default=1.0, gt=0, allow_inf_nan=False, description="Divides the logits of both sides"
        )
        temperature_squared: bool = Field(
            default=False, description="Multiply the divergence by the temperature's square"
        )
        beta: float | None = Field(
            default=None,
            ge=0,
            le=1,
            description="Of jsd: the teacher's share of the mixture, 0 the forward KL and 1 the "
            f"reverse one [{_DEFAULT_BETA}]",
        )
        skew: float | None = Field(
            default=None,
            ge=0,
            lt=1,
            description=f"Of skew_kl and skew_reverse_kl: the first side's share of m [{DEFAULT_SKEW}]",
        )
        alpha: float = Field(
            default=1.0,
            gt=0,
            le=1,
            description="Share of the divergence; the rest is cross-entropy",
        )
        teacher_precision: Literal["bf16", "fp16", "fp32", "int8", "nf4"] = Field(
            default="bf16",
            description="What the teacher's weights are; int8 is bitsandbytes' LLM.int8, nf4 4 "
            "bits",
        )
        stored_tokens: int | None = Field(
            default=None,
            ge=1,
            le=1024,
            description="Compute the teacher's predictions once, before the run, and keep this "
            "many tokens of each",
        )
        stored: Literal["likeliest", "drawn"] = Field(
            default="likeliest",
            description="Which tokens are kept: the likeliest, or ones drawn by their "
            "probabilities",
        )
        trust_remote_code: bool = Field(
            default=False, description="Run Python code that comes with the teacher"
        )

        @field_validator("stored_tokens")
        @classmethod
        def _can_be_stored(cls, value: int | None, given: ValidationInfo) -> int | None:
            """Refuse a divergence that is infinite if only some teacher tokens are known."""
            divergence = given.data.get("divergence")
            without_skew = given.data.get("skew") == 0.0
            if value is not None and divergence == "skew_reverse_kl" and without_skew:
                raise PydanticCustomError(
                    "infinite",
                    "skew=0 of divergence='skew_reverse_kl' is the reverse KL, which needs all of "
                    "the teacher's "
                    "tokens, and the others have no probability in what is stored; take a skew "
                    "above 0, or leave stored_tokens "
                    "out",
                )
            if value is not None and (divergence == "reverse_kl" or given.data.get("beta") == 1.0):
                raise PydanticCustomError(
                    "infinite",
                    "the reverse KL needs all of the teacher's tokens, the others have no "
                    "probability in what is "
                    "stored; take divergence='forward_kl' or 'skew_reverse_kl', or leave "
                    "stored_tokens out",
                )
            return value

        @field_validator("stored")
        @classmethod
        def _drawn_in_the_mean(cls, value: str, given: ValidationInfo) -> str:
            """Refuse drawn tokens if the mean of their gradients is not the teacher's."""
            if value == "drawn" and given.data.get("stored_tokens", 0) is None:
                raise PydanticCustomError(
                    "belongs",
                    "belongs to stored_tokens, which is not set; set it, or leave this out",
                )
            if value == "drawn" and given.data.get("divergence") != "forward_kl":
                raise PydanticCustomError(
                    "biased",
                    "drawn tokens have the teacher's gradient in the mean with "
                    "divergence='forward_kl' alone; "
                    "take that, or stored='likeliest'",
                )
            return value

        @field_validator("beta", "skew")
        @classmethod
        def _belongs(cls, value: float | None, given: ValidationInfo) -> float | None:
            """Refuse a setting of another divergence."""
            users = ["jsd"] if given.field_name == "beta" else ["skew_kl", "skew_reverse_kl"]
            divergence = given.data.get("divergence")
            if value is not None and divergence is not None and divergence not in users:
                message = "belongs to {users}, and divergence is {divergence}; leave it out"
                raise PydanticCustomError(
                    "belongs", message, {"users": " and ".join(users), "divergence": divergence}
                )  # type: ignore[arg-type]
            return value

    vocabulary: int
    """Number of ids that student and teacher have in common; set if predictions are stored."""

    @property
    def divergence(self) -> Divergence:
        """The divergence that the settings name."""
        given = self.settings
        skew = DEFAULT_SKEW if given.skew is None else given.skew
        if given.divergence == "forward_kl":
            return Divergence.forward_kl()
        if given.divergence == "reverse_kl":
            return Divergence.reverse_kl()
        if given.divergence == "jsd":
            return Divergence.jsd(_DEFAULT_BETA if given.beta is None else given.beta)
        if given.divergence == "skew_kl":
            return Divergence.skew_kl(skew)
        return Divergence.skew_reverse_kl(skew)

    @property
    def weights(self) -> tuple[float, float]:
        """Factors of the divergence and of the cross-entropy in the loss."""
        squared = self.settings.temperature**2 if self.settings.temperature_squared else 1.0
        return self.settings.alpha * squared, 1.0 - self.settings.alpha

    def bring(self, model: Any, tokenizer: Any, config: ChronicalsConfig) -> Mapping[str, Any]:
        """Return the teacher, unless its predictions are stored."""
        return {} if self.settings.stored_tokens is not None else self.teacher(tokenizer)

    def frozen_models(self, config: ChronicalsConfig) -> Sequence[FrozenModel]:
        """Declare the teacher, unless its predictions are stored."""
        given = self.settings
        if given.stored_tokens is not None:
            return ()
        setting = f"distill={{'teacher': {given.teacher!r}}}"
        model = FrozenModel(
            TEACHER, given.teacher, given.teacher_precision, setting, given.trust_remote_code
        )
        return (model,)

    def frozen_columns(
        self, model: Any, tokenizer: Any, config: ChronicalsConfig
    ) -> Sequence[Columns]:
        """Declare the teacher's predictions, if they are stored.

        They are k token ids for every target, and their log-probabilities.
        """
        given = self.settings
        if given.stored_tokens is None:
            return ()
        saved = self.saved_teacher(tokenizer)
        rows = embedding_table(model).shape[0]
        self.vocabulary = min(rows, saved.embedding_rows(given.trust_remote_code))
        identity = [
            saved.identity(),
            given.teacher_precision,
            given.stored_tokens,
            given.stored,
            self.vocabulary,
        ]
        if given.stored == "drawn":
            identity += [given.temperature, config.seed]
        shape = (given.stored_tokens,)
        return (
            Columns(
                TEACHER,
                "predictions",
                "target",
                (Column(STORED_IDS, np.int32, shape), Column(STORED_LOG_P, np.float32, shape)),
                self._teacher_predictions,
                load=lambda: self.teacher(tokenizer)[TEACHER],
                identity=identity,
                setting=f"distill.stored_tokens={given.stored_tokens}",
            ),
        )

    def _teacher_predictions(
        self, teacher: PresentedModel, batch: Batch, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what is stored for the Batch's targets, ``chunk_size`` rows of logits at a time.

        Only ids that teacher and student have in common can be stored.
        """
        head = teacher.head
        states = teacher.logits(batch) if head is None else teacher.hidden_states(batch)
        states = states[batch.targets != IGNORED]
        for first in range(0, len(states), self.chunk_size):
            rows = states[first : first + self.chunk_size]
            logits = rows if head is None else head.logits(rows)
            yield self.tokens_to_store(logits[:, : self.vocabulary], generator)

    def unplanned_costs(self, config: ChronicalsConfig) -> str | None:
        """Describe the teacher's pass before the first step, if its predictions are stored."""
        given = self.settings
        if given.stored_tokens is None:
            return None
        return f"the teacher {given.teacher}, which reads all data once before the first step"

    def why_not_defined(self) -> str | None:
        """Return a reason if tokens are drawn, which the definition does not do."""
        drawn = (
            "its definition knows no draws, and distill has stored='drawn'; verify with "
            "stored='likeliest'"
        )
        return drawn if self.settings.stored == "drawn" else super().why_not_defined()

    def for_definition(self, tokenizer: Any) -> Mapping[str, Any]:
        """Return the teacher, if its predictions are stored and ``bring`` does not load it."""
        return {} if self.settings.stored_tokens is None else self.teacher(tokenizer)

    def saved_teacher(self, tokenizer: Any) -> SavedModel:
        """Return the place of the teacher.

        Raises:
            ConfigurationError: it cannot be found, its tokenizer is another, or its embedding has
                fewer rows than the tokenizer has tokens.
        """
        given = self.settings
        setting = f"distill={{'teacher': {given.teacher!r}}}"
        try:
            saved = SavedModel.find(given.teacher, remedy=ADAPTER_BASE_REMEDY)
            check_same_tokenizer(
                tokenizer,
                saved.tokenizer(given.trust_remote_code),
                setting,
                _TOKENIZER_REMEDY,
            )
            rows = saved.embedding_rows(given.trust_remote_code)
            if rows < len(tokenizer):
                raise ValueError(
                    f"its embedding has {rows} rows, the tokenizer {len(tokenizer)} tokens; "
                    f"{_TOKENIZER_REMEDY}"
                )
        except ConfigurationError:
            raise
        except ValueError as error:
            raise ConfigurationError(f"{setting}: {without_field(error)}") from error
        return saved

    def teacher(self, tokenizer: Any) -> Mapping[str, Any]:
        """Load the teacher, and return it by its name."""
        given = self.settings
        quantization = given.teacher_precision if given.teacher_precision in QUANTISED else None
        saved = self.saved_teacher(tokenizer)
        if saved.adapted and quantization == "int8":
            raise ConfigurationError(
                f"distill={{'teacher_precision': 'int8'}}: the teacher {given.teacher!r} is an "
                "adapter, which does not go over "
                "a base in LLM.int8; take nf4, or the model that chronicals merge makes of it"
            )
        dtype = PRECISIONS[given.teacher_precision]
        try:
            return {TEACHER: saved.model(dtype, given.trust_remote_code, quantization)}
        except ValueError as error:
            raise ConfigurationError(
                f"distill={{'teacher': {given.teacher!r}}}: {without_field(error)}"
            ) from error

    def tokens_to_store(self, logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Choose the tokens of a teacher's predictions that are stored.

        The likeliest tokens have their own log-probabilities. Drawn tokens have the logarithms of
        their shares of the draws, times the temperature at which they were drawn, because the loss
        divides by it again. The mean of the shares is the teacher's distribution (Anshumann et al.,
        2025, section 4).

        Args:
            logits: the teacher's, ``[n, V]``.
            generator: of the draws.

        Returns:
            int64 ids and fp32 log-probabilities, ``[n, k]`` both.
        """
        k = self.settings.stored_tokens
        temperature = self.settings.temperature
        if self.settings.stored == "likeliest":
            log_p, ids = logits.float().log_softmax(-1).topk(min(k, logits.shape[1]))
            spare = k - ids.shape[1]
            return F.pad(ids, (0, spare)), F.pad(log_p, (0, spare), value=-torch.inf)
        ids = (
            (logits.float() / temperature)
            .softmax(-1)
            .multinomial(k, replacement=True, generator=generator)
        )
        counts = torch.zeros_like(logits, dtype=torch.float32).scatter_add_(
            1, ids, torch.ones_like(ids, dtype=torch.float32)
        )
        return ids, temperature * (counts.gather(1, ids) / k).log()

    def __call__(self, model: PresentedModel, batch: Batch) -> Terms:
        """Return the loss of the Batch's targets and its metrics, as sums."""
        head = model.head
        states, auxiliary = model(batch)
        found = self._compared(head, states, batch)
        return {
            "distillation": Term(found.loss, per="weight"),
            **self._metrics(found, batch),
            **auxiliary,
        }

    @torch.no_grad()
    def score(self, model: PresentedModel, batch: Batch) -> Terms:
        """Return loss and metrics, and the ratio of targets that are the likeliest token."""
        head = model.head
        states = model.logits(batch) if head is None else model.hidden_states(batch)
        found = self._compared(head, states, batch)
        return {
            "distillation": Term(found.loss, per="weight"),
            **self._metrics(found, batch),
            "token_accuracy": Term(found.accuracy, 0.0, "weight"),
        }

    def _metrics(self, found: DistillationSums, batch: Batch) -> Terms:
        metrics = {
            self.settings.divergence: found.divergence,
            "cross_entropy": found.cross_entropy,
            "token_agreement": found.agreement,
        }
        if self.settings.stored_tokens is None:
            metrics["teacher_cross_entropy"] = found.teacher_cross_entropy
        elif self.settings.stored == "likeliest":
            stored = batch.tokens[STORED_LOG_P].exp().sum(-1)
            stored = stored.masked_fill(batch.targets == IGNORED, 0.0)
            if batch.weights is not None:
                stored = stored * batch.weights
            metrics["teacher_kept"] = stored.sum()
        return {name: Term(value, 0.0, "weight") for name, value in metrics.items()}

    def _compared(self, head: Head | None, states: Tensor, batch: Batch) -> DistillationSums:
        """Compute the sums over the Batch, without whole logits if both heads are understood."""
        divergence_weight, cross_entropy_weight = self.weights
        options: dict[str, Any] = {
            "temperature": self.settings.temperature,
            "divergence_weight": divergence_weight,
            "cross_entropy_weight": cross_entropy_weight,
            "weights": batch.weights,
        }
        if self.settings.stored_tokens is not None:
            stored = StoredTokens(batch.tokens[STORED_IDS].long(), batch.tokens[STORED_LOG_P])
            if head is None:
                return distillation_of_logits(
                    states[:, : self.vocabulary],
                    stored.logits(self.vocabulary),
                    batch.targets,
                    self.divergence,
                    **options,
                )
            return linear_distillation(
                _linear(states, head).of_rows(self.vocabulary),
                stored,
                batch.targets,
                self.divergence,
                count=batch.trained,
                chunk_size=self.chunk_size,
                **options,
            )
        teacher = self.frozen[TEACHER]
        teacher_head = teacher.head
        with torch.no_grad(), torch.autocast(states.device.type, enabled=False):
            teacher_states = (
                teacher.logits(batch) if teacher_head is None else teacher.hidden_states(batch)
            )
        if head is None or teacher_head is None:
            z = states if head is None else head.logits(states)
            teacher_z = (
                teacher_states if teacher_head is None else teacher_head.logits(teacher_states)
            )
            return distillation_of_logits(z, teacher_z, batch.targets, self.divergence, **options)
        return linear_distillation(
            _linear(states, head),
            _linear(teacher_states, teacher_head),
            batch.targets,
            self.divergence,
            count=batch.trained,
            chunk_size=self.chunk_size,
            **options,
        )

    def definition(self, logits: Tensor, targets: Tensor, frozen: Mapping[str, Tensor]) -> Tensor:
        """Return the loss by ``torch.nn.functional.kl_div``, with a mixture if the paper has it."""
        given = self.settings
        common = min(logits.shape[-1], frozen[TEACHER].shape[-1])
        z = logits[:, :common].float()
        teacher_z = frozen[TEACHER][:, :common].float()
        if self.settings.stored_tokens is not None:
            least = teacher_z.topk(min(self.settings.stored_tokens, common)).values[:, -1:]
            teacher_z = teacher_z.masked_fill(teacher_z < least, -torch.inf)
        q = (z / self.settings.temperature).log_softmax(-1)
        p = (teacher_z / self.settings.temperature).log_softmax(-1)
        skew = DEFAULT_SKEW if given.skew is None else given.skew
        if given.divergence == "forward_kl":
            divergence = _kl(p, q)
        elif given.divergence == "reverse_kl":
            divergence = _kl(q, p)
        elif given.divergence == "skew_kl":
            divergence = _kl(p, _mix(p, q, skew))
        elif given.divergence == "skew_reverse_kl":
            divergence = _kl(q, _mix(q, p, skew))
        else:  # the generalized JSD, whose limits at 0 and 1 are KL divergences by definition
            beta = _DEFAULT_BETA if given.beta is None else given.beta
            if beta in (0.0, 1.0):
                divergence = _kl(q, p) if beta else _kl(p, q)
            else:
                m = _mix(p, q, beta)
                divergence = beta * _kl(p, m) + (1 - beta) * _kl(q, m)
        if self.settings.temperature_squared:
            divergence = self.settings.temperature**2 * divergence
        return self.settings.alpha * divergence + (1 - self.settings.alpha) * F.cross_entropy(
            z, targets, reduction="none"
        )


def _linear(states: Tensor, head: Head) -> LinearHead:
    return LinearHead(states, head.weight, head.bias, head.adapter, head.scale, head.softcap)


def _kl(p: Log, q: Log) -> Tensor:
    """Return ``KL(p ‖ q)``; what p excludes adds nothing."""
    terms = F.kl_div(q, p, reduction="none", log_target=True)  # torch has q first
    return terms.masked_fill(p == -torch.inf, 0.0).sum(-1)


def _mix(p: Log, q: Log, share: float) -> Log:
    """Return the mixture of ``share`` p and the rest q."""
    if share in (0.0, 1.0):
        return p if share else q
    return torch.logaddexp(p + math.log(share), q + math.log1p(-share))
