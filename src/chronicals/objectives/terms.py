"""Interface of an objective, and the division of its sums by the counts of a whole step.

An objective declares what it needs before the first step: columns of the data, which
``training/columns/stored_columns.py`` computes, caches, and checks on resume, and a reference policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import pydantic
import torch
from torch import Tensor

from chronicals.batch import Batch
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.data.kinds.rows import DOCUMENT_KINDS
from chronicals.kernels.linear_cross_entropy import CROSS_ENTROPY_WORK, cross_entropy_bytes
from chronicals.kernels.linear_head import HeadBytes, HeadShape, HeadWork
from chronicals.models import PresentedModel, Term, Terms, score_of
from chronicals.models.four_bits import Watch
from chronicals.moe.router_settings import RouterSettings
from chronicals.saving import SavedModel

Count = int | float | Tensor
"""Divisor of a sum; a scalar on the device where steps are CUDA graphs."""

Value = TypeVar("Value", Tensor, float)
"""Value of a metric, on the device or not."""

CHUNK = 4352
"""Default of the rows of logits that exist at a time."""

SATURATED = 1e-6
"""Distance of a step's loss from its lowest value, below which its gradient may be too small for
a number in 16 bits or for the square of one in 32 bits."""

FINITE = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)
settings = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=FINITE)
"""Decorator of the dataclass ``Settings`` of an objective; its fields have defaults and limits,
and numbers are finite.
"""


ADAPTERS_OFF = "adapters off"
TRAINED_MODEL = "trained model"
"""Models of ``forward_passes`` that are no frozen models: the trained one, without its adapters or
with them.
"""

REFERENCE_POLICY = "reference"
"""Name of the column of log-probabilities under the reference, and of a frozen reference model."""

ReferenceRecord = Mapping[str, Any]
"""JSON description of a run's reference policy.

``how`` is ``adapters_off``, ``stored`` or ``reference_model``. ``start`` and ``identity`` describe
a model that can be found again. ``in_4bit`` is set if that model was in 4 bits.
"""


@dataclass(frozen=True)
class Column:
    """A column of the data.

    Attributes:
        name: key in ``Batch.segments`` (values of documents) or ``Batch.tokens`` (values of
            targets), and in the stored files.
        dtype: of its values.
        shape: of one value; a document's is a scalar.
    """

    name: str
    dtype: type[np.generic]
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Columns:
    """Columns that one pass of one model over the data computes together.

    Attributes:
        name: role of the model, such as ``teacher``: in logs, and the ending of stored files. The
            stored files of two declarations differ in it or in ``identity``.
        content: what the values are, in the plural, for logs: ``predictions``.
        per: whether documents or targets have values.
        columns: in the order in which ``compute`` gives their values.
        compute: ``(model, batch, generator)`` → tensors ``[n, *shape]``, one for each column, for
            the first n documents (or targets) of the Batch, then for the next ones, until all have
            values. It is called under ``torch.no_grad()`` with a model that does not drop out; the
            generator is seeded.
        load: returns the frozen transformers model that computes the values; None for the trained
            model as the run begins.
        identity: JSON: what the values depend on beside the documents and the trained model, such
            as the files of the frozen model and settings.
        setting: field that asks for the columns, with its value, for error messages.
    """

    name: str
    content: str
    per: Literal["document", "target"]
    columns: tuple[Column, ...]
    compute: Callable[[PresentedModel, Batch, torch.Generator], Iterable[tuple[Tensor, ...]]]
    load: Callable[[], Any] | None = None
    identity: Any = None
    setting: str = ""

    def __post_init__(self) -> None:
        if self.per == "document" and any(column.shape for column in self.columns):
            raise ValueError(
                f"{self.name}: a document has one number in a column; shape must be ()"
            )


@dataclass(frozen=True)
class ReferencePolicy:
    """The model that an objective compares the trained one with.

    Attributes:
        record: written beside the trained model, so that an evaluation finds the same policy.
        weights: some of its parameters, by which a resumed run recognises it. They are not compared
            if a column of the trained model is stored: then all weights are.
    """

    record: ReferenceRecord
    weights: tuple[Tensor, ...] = ()

    def difference(self, earlier: ReferenceRecord) -> str | None:
        """Return why the run had its policy in another way in its ``earlier`` part; else None."""
        if earlier["how"] == self.record["how"]:
            return None
        before, now = (
            f"reference_model={record.get('start')!r}"
            if record["how"] == "reference_model"
            else f"reference={record['how']!r}"
            for record in (earlier, self.record)
        )
        return (
            f"the run's reference policy is {before}, and now it would be {now}; resume with the "
            "setting that it began with"
        )


@settings
class NoSettings:
    """Settings of an objective that has none of its own."""


@dataclass(frozen=True)
class AnswerFacts:
    """Facts about an answer that the model has drawn, for a definition of the loss.

    Attributes:
        advantage: over the other answers to its prompt.
        drawn: log-probability of each token under the distribution that it was drawn from, ``[n]``.
        old: the same by the trainer's own pass; None if the run has none.
    """

    advantage: float
    drawn: np.ndarray
    old: np.ndarray | None = None


@dataclass(frozen=True)
class ScoredDocument:
    """A document by itself, as an objective's definition sees it.

    ``verify`` compares a run with definitions; training does not use them. A definition gets the
    whole logits of one item's documents and writes its formula out; it shares only the settings
    with the objective.

    Attributes:
        logits: of the trained model at the trained targets, ``[n, V]``, differentiable.
        targets: int64 ``[n]``.
        frozen: logits of the objective's frozen models at the same places, by name.
        side, label: values of these columns of the data (``data/making/store.py``).
        score: fp32 scalar of a model with a score (``models/classifier.py``), which has no logits.
        answer: of an answer that the model has drawn.
    """

    logits: Tensor
    targets: Tensor
    frozen: Mapping[str, Tensor]
    side: int = 0
    label: int = -1
    score: Tensor | None = None
    answer: AnswerFacts | None = None

    def log_p(self) -> Tensor:
        """Return log π of each target, fp32 ``[n]``."""
        log_p = self.logits.float().log_softmax(-1)
        return log_p.gather(-1, self.targets[:, None])[:, 0]

    def at_temperature(self, temperature: float) -> ScoredDocument:
        """Return the document with all logits divided by a temperature."""
        frozen = {name: logits.float() / temperature for name, logits in self.frozen.items()}
        return replace(self, logits=self.logits.float() / temperature, frozen=frozen)

    def log_ratio(self) -> Tensor:
        """Return log π/π_ref of each target, fp32 ``[n]``."""
        reference = self.frozen[REFERENCE_POLICY].float().log_softmax(-1)
        return self.log_p() - reference.gather(-1, self.targets[:, None])[:, 0]


@dataclass(frozen=True)
class Paper:
    """The source of a method, as ``docs/papers.md`` cites it.

    Attributes:
        method: name of the method, such as ``DPO``.
        citation: authors, year and place of the formula.
    """

    method: str
    citation: str


@dataclass(frozen=True)
class FrozenModel:
    """A model that an objective loads beside the trained one, and that is never trained.

    Attributes:
        name: as in ``Objective.frozen``.
        place: folder or hub name.
        precision: ``bf16``, ``fp16`` or ``fp32``, or ``int8`` or ``nf4`` of its linear layers.
        setting: the setting that names it, for errors.
        trust_remote_code: run Python code that comes with it.
        is_reward: a reward model, which scores answers between steps; ``bring`` does not return it,
            and no pass of a step is its own.
    """

    name: str
    place: str
    precision: str
    setting: str
    trust_remote_code: bool = False
    is_reward: bool = False


class Objective(ABC):
    """``(model, batch) → Terms``: sums that are minimised, and metrics beside them, by name.

    A file of this folder with a class under ``@register("NAME")`` is an objective; nothing else
    lists it. The names of its terms appear in ``metrics.jsonl``, the progress bar, trackers, the
    report and evaluation; a slash makes a group, as in ``dpo/margin``.

    Args:
        settings: an instance of the class's own ``Settings``; their defaults if None.
        chunk_size: rows of logits that may exist at a time.

    Attributes:
        Settings: dataclass of its settings, the section of its name in a configuration.
        row_kinds: kinds of row that it takes. A ``preference`` becomes an item of two documents, an
            ``unpaired preference`` one of the answer and of another row's answer to the same
            prompt.
        papers: methods that the class implements; ``docs/papers.md`` has a row for each.
        of_tokens: True if its terms are sums over tokens, each of which counts by itself: then a
            Batch may hold parts of documents (``context_parallel``).
        head_bytes: returns what its loss needs in memory, as its kernel's file says.
        head_work: what its loss computes and moves, as its kernel's file says.
        generates: True if the trained model is still a language model, which answers prompts.
        draws_answers: True if the model itself draws what it is trained on: its rows are prompts,
            and its steps come from rollouts (``training/rollouts/``), not from stored tokens.
        full_learning_rate, adapter_learning_rate: default of ``learning_rate`` if all weights or
            adapters are trained.
        frozen: models of ``bring``, presented, in evaluation mode and without gradients, while a
            run goes on; empty before and after.
        router: losses of a mixture's routers that are trained beside it; None for none.
    """

    Settings: ClassVar[type] = NoSettings
    row_kinds: ClassVar[tuple[str, ...]] = DOCUMENT_KINDS
    papers: ClassVar[tuple[Paper, ...]] = ()
    of_tokens: ClassVar[bool] = False
    generates: ClassVar[bool] = True
    draws_answers: ClassVar[bool] = False
    head_bytes: ClassVar[staticmethod[[HeadShape], HeadBytes]] = staticmethod(cross_entropy_bytes)
    head_work: ClassVar[HeadWork] = CROSS_ENTROPY_WORK
    full_learning_rate: ClassVar[float] = 2e-4
    adapter_learning_rate: ClassVar[float] = 2e-4
    router: RouterSettings | None = None

    def __init__(self, settings: Any = None, chunk_size: int = CHUNK):
        self.settings = self.Settings() if settings is None else settings
        self.chunk_size = chunk_size
        self.frozen: dict[str, PresentedModel] = {}

    @classmethod
    def shares_prompts(cls) -> bool:
        """Return whether answers to one prompt come in an item, with the prompt in a pack once."""
        return not set(cls.row_kinds) <= set(DOCUMENT_KINDS)

    @property
    def answer_tokens(self) -> int:
        """Most tokens of an answer that is drawn behind a prompt; 0 if none is."""
        return 0

    @classmethod
    def load(
        cls,
        saved: SavedModel,
        dtype: torch.dtype,
        trust_remote_code: bool = False,
        quantization: str | None = None,
        watch: Watch | None = None,
    ) -> Any:
        """Load the model that is trained or evaluated; arguments as of ``SavedModel.model``."""
        return saved.model(dtype, trust_remote_code, quantization, watch)

    def bring(self, model: Any, tokenizer: Any, config: ChronicalsConfig) -> Mapping[str, Any]:
        """Return the frozen models that every step needs, such as a teacher, by name.

        Called once a run, before adapters are attached to ``model`` and before it is changed in any
        other way: a copy of it is the model that the run starts from. ``training/columns/frozen.py``
        freezes the returned models, moves them to the device of ``model``, gives them kernels and
        presents them; the objective then finds them in ``self.frozen``, and calls them under
        ``torch.no_grad()`` with its Batch.

        Args:
            model: the trained model, on its device.
            tokenizer: its tokenizer.
            config: configuration of the run.

        Returns:
            transformers' models, each a model of its own (no part of it may be shared with
            ``model``), in host memory or on the device.

        Raises:
            ConfigurationError: one cannot be had, or does not fit; the message names the setting.
        """
        return {}

    def frozen_models(self, config: ChronicalsConfig) -> Sequence[FrozenModel]:
        """Declare the models of ``bring`` and reward models, for plans, which load none."""
        return ()

    def forward_passes(self, config: ChronicalsConfig) -> Sequence[str]:
        """Return whose forward passes each micro-batch takes beside the one with a backward pass.

        They are names of ``frozen_models``, by default each of them once, ``ADAPTERS_OFF`` or
        ``TRAINED_MODEL``.
        """
        return [declared.name for declared in self.frozen_models(config)]

    def frozen_columns(
        self, model: Any, tokenizer: Any, config: ChronicalsConfig
    ) -> Sequence[Columns]:
        """Declare columns of the data that frozen models compute before the run.

        Steps do not need those models. Called once a run, before the trained ``model`` is changed.
        ``training/columns/stored_columns.py`` computes the values or reads them from the cache.

        Raises:
            ConfigurationError: a frozen model cannot be found or does not fit; the message names
                the setting.
        """
        return ()

    def start_columns(self, model: Any) -> Sequence[Columns]:
        """Declare columns of the data that the trained ``model`` computes as the run begins.

        Called once a run, with adapters attached, before the first step and before a checkpoint's
        weights are loaded. A resumed run must begin with the same model.
        """
        return ()

    def reference_policy(
        self, model: Any, loaded_from: SavedModel | None, config: ChronicalsConfig
    ) -> ReferencePolicy | None:
        """Return the model that the objective compares with; None if it compares with none.

        Args:
            model: the trained model as the run begins.
            loaded_from: where it was loaded from; None if it was changed since, or made otherwise.
            config: configuration of the run.
        """
        return None

    def why_not_evaluated(self, model: Any) -> str | None:
        """Return why ``model``, trained earlier, cannot be evaluated, and what to do; or None.

        The settings may not say which reference policy it was trained with, or that policy is
        missing.
        """
        return None

    def prepare(self, model: Any, tokenizer: Any, config: ChronicalsConfig) -> None:
        """Give ``model`` the parameters that are trained beside its own, such as a head.

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
    def __call__(self, model: PresentedModel, batch: Batch) -> Terms:
        """Return the Batch's losses and metrics, as sums, by name."""

    def why_wrong(self, values: Mapping[str, float]) -> str | None:
        """Return why the metrics of a step show that the run is wrong, which ends it; or None.

        Args:
            values: ``loss`` and the metrics of the step by name, as they are shown.
        """
        return None

    def before_step(self, model: PresentedModel, batch: Batch) -> tuple[Batch, Terms]:
        """Compute what must be known of a whole step before its first micro-batch.

        Called under ``torch.no_grad()`` for each Batch of the step if a class overrides it. The
        terms are divided as those of the loss are; their values then are segments of all Batches of
        the step, of shape ``[1]``, by their names.

        Returns:
            The Batch as ``__call__`` gets it, with more segments or the same; and terms.
        """
        return batch, {}

    def finish_metrics(
        self, values: Mapping[str, Value], counts: Mapping[str, Count]
    ) -> dict[str, Value]:
        """Return the metrics that are shown of a whole step, or of held-out data: all by default.

        Args:
            values: by name, as ``divide`` gives them, added up.
            counts: counts of the step or of the held-out data, on the host.
        """
        return dict(values)

    def why_no_gradient(self, values: Mapping[str, float]) -> str | None:
        """Return why the loss has no gradient at these values although nothing is wrong.

        Called for a step whose gradient is exactly zero. An objective whose loss is flat somewhere,
        such as a hinge beyond its margin, gives the reason, and the step counts as a step. By
        default such a gradient is a fault, and ends the run.

        Args:
            values: ``loss`` and the metrics of the step by name, as they are shown.

        Returns:
            The reason for the log; None if the loss has a gradient there.
        """
        return None

    @torch.no_grad()
    def score(self, model: PresentedModel, batch: Batch) -> Terms:
        """Return the terms of evaluation."""
        return self(model, batch)

    def definition(self, logits: Tensor, targets: Tensor, frozen: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of each target by the formula in plain torch.

        ``verify`` compares a run with it.

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
        """Return the frozen models that ``definition`` needs but ``bring`` does not return."""
        return {}

    def item_definition(self, item: Sequence[ScoredDocument], known: Mapping[str, Tensor]) -> Terms:
        """Return the terms of an item by the formula: of all its documents together.

        Args:
            item: the documents of the item.
            known: values of ``known_definition`` over the whole step.
        """
        (document,) = item
        return {
            "loss": Term(
                self.definition(document.logits, document.targets, document.frozen).sum(),
                per="weight",
            )
        }

    def known_definition(self, item: Sequence[ScoredDocument]) -> Terms:
        """Return the terms of ``before_step`` for an item, by the formula in plain torch."""
        return {}

    def frozen_start(self) -> str | None:
        """Return the name under which ``item_definition`` finds logits of the model at its start.

        It is None if it needs none.
        """
        return None

    def unplanned_costs(self, config: ChronicalsConfig) -> str | None:
        """Describe what takes time before the first step, for `chronicals plan`.

        It is None if there is nothing.
        """
        return None

    def why_not_defined(self) -> str | None:
        """Return why there is no definition to compare a run with, and what to do; or None."""
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
    """Divide a Batch's terms by the counts of the step.

    Added up over the Batches of a step, the values are those of the step.

    Args:
        terms: sums of the Batch, by name.
        counts: counts of the whole step: all micro-batches, all ranks. A count of zero divides by
            one.

    Returns:
        Scalars: ``loss``, which is ``Σ coefficient · sum / count``, and ``sum / count`` of each
        term by name, without a gradient. A term that is the whole loss is not repeated.

    Raises:
        ValueError: there is no such count as a term is divided by, or a term is called ``loss``.
    """
    divisors: dict[str, Count] = {}
    for name, term in terms.items():
        if term.per not in counts:
            raise ValueError(
                f"term {name!r} is divided by {term.per!r}, which is not counted here; there are "
                f"{', '.join(counts)}"
            )
        count = counts[term.per]
        # One instead of zero, and not a maximum: a sum of weights may be less than one.
        if isinstance(count, Tensor):
            divisors[name] = torch.where(count == 0, 1.0, count)
        else:
            divisors[name] = count or 1
    parts = [
        term.sum * (term.coefficient / divisors[name])
        for name, term in terms.items()
        if term.coefficient
    ]
    means = {name: terms[name].sum.detach() / divisors[name] for name in shown(terms)}
    return {"loss": torch.stack(parts).sum(), **means}


def shown(terms: Terms) -> list[str]:
    """Return the names of the terms that are shown beside the loss.

    A term that is the whole loss is not among them.
    """
    minimised = [term for term in terms.values() if term.coefficient]
    names = [name for name, term in terms.items() if len(minimised) > 1 or term.coefficient != 1.0]
    if "loss" in names:
        raise ValueError(
            "a term is called 'loss', the name of the sum of all terms; call it otherwise"
        )
    return names
