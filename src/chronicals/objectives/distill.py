"""Knowledge distillation: the student learns the teacher's next-token distributions over the run's own documents.

    loss = Σ_t w_t [α · u · D(p_t, q_t) + (1 − α) · (−log q_t(y_t))] / Σ_t w_t     over the positions whose target is trained

p is the teacher's distribution, q the student's, both at temperature τ in D and at 1 in the cross-entropy; w_t is 1 where a
Batch has no weights. D is a KL divergence (Hinton et al., 2015, section 2; Gu et al., 2024), the generalized JSD (Agarwal et
al., 2024, equation 1) or a skewed KL divergence (Ko et al., 2024, section 3.1). u is 1, as in TRL and Liger, or τ²
(``temperature_squared``), with which D's gradient is of one size at all temperatures (Hinton et al., 2015, section 2).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import AfterValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from torch import Tensor

from chronicals.batch import Batch
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.data.template import PROBE
from chronicals.kernels.linear_distillation import (
    Distillation,
    Divergence,
    LinearHead,
    distillation_of_logits,
    linear_distillation,
)
from chronicals.models import Head, PresentedModel, Term, Terms
from chronicals.objectives.registry import register
from chronicals.objectives.terms import Objective, settings
from chronicals.saving import SavedModel

TEACHER = "teacher"
"""Name of the frozen model."""

BETA, SKEW = 0.5, 0.1
"""Where they are not set: the JSD of both sides' mean, and the skew that DistiLLM recommends."""

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "nf4": torch.bfloat16}
"""The dtype of the teacher's products."""

Log = Tensor
"""Log-probabilities ``[..., V]``."""


@register("distill")
class Distill(Objective):
    """A divergence from a frozen teacher, which sees the same Batch, and a share of cross-entropy."""

    @settings
    class Settings:
        teacher: Annotated[str, AfterValidator(os.path.expanduser)] = Field(
            description="Folder or hub name of a model, an adapter or a run, with the student's tokenizer"
        )
        divergence: Literal["forward_kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl"] = Field(
            default="forward_kl", description="Of the student's distributions from the teacher's"
        )
        temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False, description="Divides the logits of both sides")
        temperature_squared: bool = Field(default=False, description="Multiply the divergence by the temperature's square")
        beta: float | None = Field(
            default=None, ge=0, le=1,
            description=f"Of jsd: the teacher's share of the mixture, 0 the forward KL and 1 the reverse one [{BETA}]",
        )  # fmt: skip
        skew: float | None = Field(
            default=None, ge=0, lt=1, description=f"Of skew_kl and skew_reverse_kl: the first side's share of m [{SKEW}]"
        )
        alpha: float = Field(default=1.0, gt=0, le=1, description="Share of the divergence; the rest is cross-entropy")
        teacher_precision: Literal["bf16", "fp16", "fp32", "nf4"] = Field(
            default="bf16", description="What the teacher's weights are; nf4 is 4 bits, multiplied in bf16"
        )
        trust_remote_code: bool = Field(default=False, description="Run Python code that comes with the teacher")

        @field_validator("beta", "skew")
        @classmethod
        def _belongs(cls, value: float | None, given: ValidationInfo) -> float | None:
            """Refuses a setting of another divergence."""
            users = ["jsd"] if given.field_name == "beta" else ["skew_kl", "skew_reverse_kl"]
            divergence = given.data.get("divergence")
            if value is not None and divergence is not None and divergence not in users:
                message = "belongs to {users}, and divergence is {divergence}; leave it out"
                raise PydanticCustomError("belongs", message, {"users": " and ".join(users), "divergence": divergence})  # type: ignore[arg-type]
            return value

    @property
    def divergence(self) -> Divergence:
        """Of the settings."""
        name, beta, skew = self.settings.divergence, self._beta, self._skew
        made: dict[str, Callable[[], Divergence]] = {
            "forward_kl": Divergence.forward_kl, "reverse_kl": Divergence.reverse_kl, "jsd": lambda: Divergence.jsd(beta),
            "skew_kl": lambda: Divergence.skew_kl(skew), "skew_reverse_kl": lambda: Divergence.skew_reverse_kl(skew),
        }  # fmt: skip
        return made[name]()

    @property
    def _beta(self) -> float:
        return BETA if self.settings.beta is None else self.settings.beta

    @property
    def _skew(self) -> float:
        return SKEW if self.settings.skew is None else self.settings.skew

    @property
    def weights(self) -> tuple[float, float]:
        """Factors of the divergence and of the cross-entropy in the loss."""
        squared = self.settings.temperature**2 if self.settings.temperature_squared else 1.0
        return self.settings.alpha * squared, 1.0 - self.settings.alpha

    def bring(self, model: Any, tokenizer: Any, config: ChronicalsConfig) -> Mapping[str, Any]:
        """The teacher."""
        given = self.settings
        said = f"distill={{'teacher': {given.teacher!r}}}"
        try:
            saved = SavedModel.find(given.teacher)
            check_same_tokenizer(tokenizer, saved.tokenizer(given.trust_remote_code), said)
            quantization = "nf4" if given.teacher_precision == "nf4" else None
            teacher = saved.model(PRECISIONS[given.teacher_precision], given.trust_remote_code, quantization)
        except ConfigurationError:
            raise
        except ValueError as error:
            raise ConfigurationError(f"{said}: {error}") from error
        return {TEACHER: teacher}

    def __call__(self, model: PresentedModel, batch: Batch) -> Terms:
        head = model.head
        states, auxiliary = model(batch)
        found = self._compared(head, states, batch)
        return {"distillation": Term(found.loss, per="weight"), **self._metrics(found), **auxiliary}

    @torch.no_grad()
    def score(self, model: PresentedModel, batch: Batch) -> Terms:
        """The same without auxiliary terms, and the ratio of targets that are the student's likeliest token."""
        head = model.head
        found = self._compared(head, model.logits(batch) if head is None else model.hidden_states(batch), batch)
        accuracy = Term(found.accuracy, 0.0, "weight")
        return {"distillation": Term(found.loss, per="weight"), **self._metrics(found), "token_accuracy": accuracy}

    def _metrics(self, found: Distillation) -> Terms:
        metrics = {
            self.settings.divergence: found.divergence, "cross_entropy": found.cross_entropy,
            "teacher_cross_entropy": found.teacher_cross_entropy, "token_agreement": found.agreement,
        }  # fmt: skip
        return {name: Term(value, 0.0, "weight") for name, value in metrics.items()}

    def _compared(self, head: Head | None, states: Tensor, batch: Batch) -> Distillation:
        """The sums over the Batch; without whole logits where the heads of both sides are understood."""
        teacher = self.frozen[TEACHER]
        theirs = teacher.head
        with torch.no_grad(), torch.autocast(states.device.type, enabled=False):
            taught = teacher.logits(batch) if theirs is None else teacher.hidden_states(batch)
        of_divergence, of_cross_entropy = self.weights
        options: dict[str, Any] = {
            "temperature": self.settings.temperature, "divergence_weight": of_divergence,
            "cross_entropy_weight": of_cross_entropy, "weights": batch.weights,
        }  # fmt: skip
        if head is None or theirs is None:
            z = states if head is None else head.logits(states)
            teachers_z = taught if theirs is None else theirs.logits(taught)
            return distillation_of_logits(z, teachers_z, batch.targets, self.divergence, **options)
        return linear_distillation(
            _linear(states, head), _linear(taught, theirs), batch.targets, self.divergence, count=batch.trained,
            chunk_size=self.chunk_size, **options,
        )  # fmt: skip

    def definition(self, logits: Tensor, targets: Tensor, frozen: Mapping[str, Tensor]) -> Tensor:
        """By ``torch.nn.functional.kl_div``, a mixture being made where the paper has one."""
        common = min(logits.shape[-1], frozen[TEACHER].shape[-1])
        z, teachers_z = logits[:, :common].float(), frozen[TEACHER][:, :common].float()
        q, p = ((x / self.settings.temperature).log_softmax(-1) for x in (z, teachers_z))
        divergence = DEFINITIONS[self.settings.divergence](p, q, self._beta, self._skew)
        if self.settings.temperature_squared:
            divergence = self.settings.temperature**2 * divergence
        return self.settings.alpha * divergence + (1 - self.settings.alpha) * F.cross_entropy(z, targets, reduction="none")


def _linear(states: Tensor, head: Head) -> LinearHead:
    return LinearHead(states, head.weight, head.bias, head.adapter, head.scale, head.softcap)


def _kl(p: Log, q: Log) -> Tensor:
    """``KL(p ‖ q)``; torch has the second one first."""
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)


def _mix(p: Log, q: Log, share: float) -> Log:
    """So much of p, and the rest of q."""
    if share in (0.0, 1.0):
        return p if share else q
    return torch.logaddexp(p + math.log(share), q + math.log1p(-share))


def _jsd(p: Log, q: Log, beta: float, skew: float) -> Tensor:
    if beta in (0.0, 1.0):
        return _kl(q, p) if beta else _kl(p, q)
    m = _mix(p, q, beta)
    return beta * _kl(p, m) + (1 - beta) * _kl(q, m)


DEFINITIONS: dict[str, Callable[[Log, Log, float, float], Tensor]] = {
    "forward_kl": lambda p, q, beta, skew: _kl(p, q),
    "reverse_kl": lambda p, q, beta, skew: _kl(q, p),
    "jsd": _jsd,
    "skew_kl": lambda p, q, beta, skew: _kl(p, _mix(p, q, skew)),
    "skew_reverse_kl": lambda p, q, beta, skew: _kl(q, _mix(q, p, skew)),
}
"""Of log-probabilities of teacher and student, β and the skew; nothing of the kernels is in them."""


def check_same_tokenizer(tokenizer: Any, teachers: Any, said: str) -> None:
    """A distribution over ids says something about the same texts only.

    Args:
        said: the setting, for the message.

    Raises:
        ConfigurationError: a text has other ids with the teacher's tokenizer, or a special token is another.
    """
    ours, theirs = tokenizer.get_vocab(), teachers.get_vocab()
    remedy = "distil from a teacher of the same family, whose tokenizer is the student's"
    if ours != theirs:
        token = min(dict(ours.items() ^ theirs.items()), key=lambda text: ours.get(text, theirs.get(text)))
        ids = " and ".join(f"{side} {vocabulary.get(token, 'none')}" for side, vocabulary in (("ours", ours), ("its", theirs)))
        raise ConfigurationError(
            f"{said}: its tokenizer has another vocabulary ({len(theirs):,} tokens, ours {len(ours):,}; {token!r} has "
            f"id {ids}); {remedy}"
        )
    special, other = (
        {at: str(token) for at, token in side.added_tokens_decoder.items() if token.special} for side in (tokenizer, teachers)
    )  # fmt: skip
    if special != other:
        at = min(key for key in {*special, *other} if special.get(key) != other.get(key))
        raise ConfigurationError(
            f"{said}: its tokenizer has other special tokens (id {at} is {other.get(at)!r}, ours {special.get(at)!r}); {remedy}"
        )
    if tokenizer(PROBE)["input_ids"] != teachers(PROBE)["input_ids"]:
        raise ConfigurationError(f"{said}: its tokenizer divides texts otherwise than ours; {remedy}")
