"""What an objective is, and the one place where sums are divided by the counts of the whole
optimizer step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import pydantic
import torch
from torch import Tensor

from chronicals.batch import Batch
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.data.kinds.rows import DOCUMENT_KINDS
from chronicals.models import PresentedModel, Term, Terms, score_of
from chronicals.models.four_bits import Watch
from chronicals.moe.router_settings import RouterSettings
from chronicals.saving import SavedModel

Count = int | float | Tensor
"""What a sum is divided by; a scalar on the device where steps are CUDA graphs."""

Value = TypeVar("Value", Tensor, float)
"""Of a metric, on the device or not."""

CHUNK = 4352
"""Rows of logits that exist at a time, unless told otherwise."""

SATURATED = 1e-6
"""Distance of a step's loss from its lowest value, below which its gradient may be too small for
a number in 16 bits or for the square of one in 32 bits."""

FINITE = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)
settings = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=FINITE)
"""Decorator of the dataclass ``Settings`` of an objective; its fields have defaults and limits,
and numbers are finite.
"""


@settings
class NoSettings:
    """Of an objective that has none of its own."""


@dataclass(frozen=True)
class ScoredDocument:
    """A document by itself, as an objective's definition sees it.

    Attributes:
        logits: of the trained model at the trained targets, ``[n, V]``, differentiable.
        targets: int64 ``[n]``.
        frozen: logits of the objective's frozen models at the same places, by name.
        side, label: of these columns of the data (``data/making/store.py``).
        score: fp32 scalar, of a model with a score (``models/classifier.py``), which has no logits.
    """

    logits: Tensor
    targets: Tensor
    frozen: Mapping[str, Tensor]
    side: int = 0
    label: int = -1
    score: Tensor | None = None


class Objective(ABC):
    """``(model, batch) → Terms``: what is minimised, and metrics beside it, by name.

    A file of this folder with a class under ``@register("NAME")`` is an objective; nothing else
    lists it. The names of its terms appear in ``metrics.jsonl``, the progress bar, trackers, the
    report and evaluation; a slash makes a group, as in ``dpo/margin``.

    Args:
        settings: of the class's own ``Settings``; their defaults if None.
        chunk_size: rows of logits that may exist at a time.

    Attributes:
        Settings: dataclass of its settings, the section of its name in a configuration.
        row_kinds: the kinds of row that it takes; of a ``preference`` it gets items of two
            documents, of an ``unpaired preference`` the answer and the answer of another row to the
            same prompt.
        of_tokens: whether its terms are sums over tokens, each of which counts by itself: then a
            Batch may hold parts of documents (``context_parallel``).
        generates: whether the model that is trained is a language model still, which answers
            prompts.
        full_learning_rate, adapter_learning_rate: the default of ``learning_rate``, where all
            weights or adapters are trained.
        frozen: the models of ``bring``, presented, in evaluation mode and without gradients, while
            a run goes on; empty before and after.
        router: what is trained of the routers of a mixture of experts beside it; None where nothing
            is.
    """

    Settings: ClassVar[type] = NoSettings
    row_kinds: ClassVar[tuple[str, ...]] = DOCUMENT_KINDS
    of_tokens: ClassVar[bool] = False
    generates: ClassVar[bool] = True
    full_learning_rate: ClassVar[float] = 2e-4
    adapter_learning_rate: ClassVar[float] = 2e-4
    router: RouterSettings | None = None

    def __init__(self, settings: Any = None, chunk_size: int = CHUNK):
        self.settings = self.Settings() if settings is None else settings
        self.chunk_size = chunk_size
        self.frozen: dict[str, PresentedModel] = {}

    @classmethod
    def shares_prompts(cls) -> bool:
        """Whether answers to one prompt come in an item, with the prompt in a pack once."""
        return not set(cls.row_kinds) <= set(DOCUMENT_KINDS)

    @classmethod
    def load(
        cls,
        saved: SavedModel,
        dtype: torch.dtype,
        trust_remote_code: bool = False,
        quantization: str | None = None,
        watch: Watch | None = None,
    ) -> Any:
        """The model that is trained or evaluated, from where it is stored, as
        ``SavedModel.model`` takes its arguments.
        """
        return saved.model(dtype, trust_remote_code, quantization, watch)

    def bring(self, model: Any, tokenizer: Any, config: ChronicalsConfig) -> Mapping[str, Any]:
        """The frozen models that the objective needs beside the one that is trained, by name: a
        teacher, a reference.

        Called once a run, before adapters are attached to ``model`` and before it is changed in any
            other way: a copy of it is
        what the run starts from. ``training/frozen.py`` freezes what is returned, moves it to the
        device of ``model``, gives it kernels and presents it; the objective then finds it in
        ``self.frozen`` and calls it under ``torch.no_grad()`` with the Batch that it is given.

        Args:
            model: that is trained, on its device.
            tokenizer: its tokenizer.

        Returns:
            transformers' models, each a model of its own (no part of it may be shared with
            ``model``), in host memory or on the device.

        Raises:
            ConfigurationError: one cannot be had, or does not fit; the message names the setting.
        """
        return {}

    def prepare(self, model: Any, tokenizer: Any, config: ChronicalsConfig) -> None:
        """Give ``model``, on its device, the parameters that the objective trains beside the
        model's own, such as a head.

        Called once a run after ``bring``, before adapters are attached and an optimizer is built,
        on all ranks with the same random numbers. A run that is resumed calls it too, and then
        reads the values from the checkpoint. Which class the model is saved as is read from the
        model (``models/classifier.py``).

        Raises:
            ConfigurationError: the model cannot have them; the message names the setting.
        """
        if score_of(model) is not None:
            raise ConfigurationError(
                f"objective={config.objective!r}: the model is a reward model, which has a score "
                "and is saved as a classifier; "
                "load the language model anew"
            )

    @abstractmethod
    def __call__(self, model: PresentedModel, batch: Batch) -> Terms: ...

    def before_step(self, model: PresentedModel, batch: Batch) -> tuple[Batch, Terms]:
        """What must be known of the whole optimizer step, all ranks, before its first micro-batch
        is computed.

        Called under ``torch.no_grad()`` for each Batch of the step where a class overrides it. The
        values of the terms, divided as those of the loss are, are segments of all Batches of the
        step then, of shape ``[1]``, by their names.

        Returns:
            The Batch as ``__call__`` gets it, with more segments or the same; and terms.
        """
        return batch, {}

    def finish_metrics(
        self, values: Mapping[str, Value], counts: Mapping[str, Count]
    ) -> dict[str, Value]:
        """What is shown of a whole step, or of held-out data: all by default.

        Args:
            values: by name, as ``divide`` gives them, added up.
            counts: of the step, on the host; or of the data.
        """
        return dict(values)

    def why_no_gradient(self, values: Mapping[str, float]) -> str | None:
        """Why the loss has no gradient at these values, though everything is trained as it should
        be.

        It is asked about a step whose gradient is exactly zero. An objective whose loss is flat
        somewhere, such as a hinge beyond its margin, gives the reason, and the step counts as a
        step. By default such a gradient is a fault, and ends the run.

        Args:
            values: ``loss`` and the metrics of the step by name, as they are shown.

        Returns:
            The reason in words, for the log; None where the loss has a gradient there.
        """
        return None

    @torch.no_grad()
    def score(self, model: PresentedModel, batch: Batch) -> Terms:
        """The terms of evaluation."""
        return self(model, batch)

    def definition(self, logits: Tensor, targets: Tensor, frozen: Mapping[str, Tensor]) -> Tensor:
        """What each target adds to the loss, by the formula in plain torch: what ``verify`` holds a
        run against.

        Args:
            logits: of the trained model at the trained targets, ``[n, V]``, differentiable.
            targets: int64 ``[n]``.
            frozen: logits of the objective's frozen models at the same places, by name.

        Returns:
            fp32 ``[n]``.

        Raises:
            ConfigurationError: the objective has no such definition.
        """
        raise ConfigurationError(
            f"{type(self).__name__}: has no definition in plain torch; give the class one "
            "(definition)"
        )

    def for_definition(self, tokenizer: Any) -> Mapping[str, Any]:
        """Frozen models, by name, that ``definition`` needs though ``bring`` has none of them."""
        return {}

    def item_definition(self, item: Sequence[ScoredDocument], known: Mapping[str, Tensor]) -> Terms:
        """As ``definition``, of an item: for an objective over several documents together.

        Args:
            known: the values of ``known_definition`` over the whole step.
        """
        (document,) = item
        return {
            "loss": Term(
                self.definition(document.logits, document.targets, document.frozen).sum(),
                per="weight",
            )
        }

    def known_definition(self, item: Sequence[ScoredDocument]) -> Terms:
        """What ``before_step`` gives of an item, by the formula in plain torch."""
        return {}

    def frozen_start(self) -> str | None:
        """The name by which ``item_definition`` finds logits of the model as the run begins;
        None where it needs none.
        """
        return None

    def unplanned_costs(self, config: ChronicalsConfig) -> str | None:
        """What a run has beside the passes of the trained model, which `chronicals plan` does
        not count, in words; or None.
        """
        return None

    def why_not_defined(self) -> str | None:
        """Why there is no definition to hold a run against, and what to do; None where there is
        one.
        """
        cls = type(self)
        if (
            cls.definition is not Objective.definition
            or cls.item_definition is not Objective.item_definition
        ):
            return None
        return (
            "it has no definition in plain torch to hold a run against; give its class the method "
            "definition of "
            "chronicals.objectives.Objective"
        )


def divide(terms: Terms, counts: Mapping[str, Count]) -> dict[str, Tensor]:
    """The values of a Batch's terms; added up over the Batches of a step, they are those of the
    step.

    Args:
        counts: of the whole step: all micro-batches, all ranks. A count of zero divides by one.

    Returns:
        Scalars: ``loss``, which is ``Σ coefficient · sum / count``, and ``sum / count`` of each
            term by name, without a
        gradient. A term that is the whole loss is not repeated.

    Raises:
        ValueError: a term is divided by a count that there is not, or its name stands for the sum
            of all terms.
    """
    parts = [
        term.sum * (term.coefficient / _count(name, term, counts))
        for name, term in terms.items()
        if term.coefficient
    ]
    means = {
        name: terms[name].sum.detach() / _count(name, terms[name], counts) for name in shown(terms)
    }
    return {"loss": torch.stack(parts).sum(), **means}


def shown(terms: Terms) -> list[str]:
    """Names of the terms that are shown beside the loss: all, but for one that is the whole
    loss.
    """
    minimised = [term for term in terms.values() if term.coefficient]
    names = [name for name, term in terms.items() if len(minimised) > 1 or term.coefficient != 1.0]
    if "loss" in names:
        raise ValueError(
            "a term is called 'loss', the name of the sum of all terms; call it otherwise"
        )
    return names


def _count(name: str, term: Term, counts: Mapping[str, Count]) -> Count:
    """What ``term`` is divided by: one in the place of zero; a sum of weights may well be less
    than one.
    """
    if term.per not in counts:
        raise ValueError(
            f"term {name!r} is divided by {term.per!r}, which is not counted here; there are "
            f"{', '.join(counts)}"
        )
    count = counts[term.per]
    return torch.where(count == 0, 1.0, count) if isinstance(count, Tensor) else count or 1
