"""Evaluation of a model: held-out loss, perplexity and token accuracy."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.data import BatchStream, RowSource, TokenStore, filler_token, open_store
from chronicals.data.packs.steps import Steps
from chronicals.distributed import Mesh
from chronicals.models import (
    PresentedModel,
    check_positions,
    embedding_table,
    in_evaluation,
    input_device,
)
from chronicals.objectives import Objective, Term, build_objective, shown
from chronicals.objectives.policy_gradient import PolicyGradient
from chronicals.rewards import Rewards, build_rewards
from chronicals.training.columns.frozen import bring_frozen, frozen_attending, with_frozen_columns
from chronicals.training.presented import present_for
from chronicals.training.step.metrics import DeviceMoment
from chronicals.training.step.optimizer import Precision
from chronicals.training.step.training_step import asked_before, counts_of, nothing, values_before

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Evaluation:
    """Means over a data set.

    Attributes:
        loss: value that the objective minimises, in nats for a cross-entropy; targets count by
            their weights.
        perplexity: exponential of the cross-entropy; None for an objective without one.
        token_accuracy: ratio of targets that are the likeliest token; None for an objective that
            does not count them.
        targets: number of targets.
        others: further terms and metrics of the objective, by name.
    """

    loss: float
    perplexity: float | None
    token_accuracy: float | None
    targets: int
    others: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the values that are not None, by name, as plain JSON."""
        fields = {
            name: value
            for name, value in vars(self).items()
            if name != "others" and value is not None
        }
        return {**fields, **self.others}

    def __str__(self) -> str:
        parts = [f"loss {self.loss:.4f}"]
        if self.perplexity is not None:
            parts.append(f"perplexity {self.perplexity:.2f}")
        if self.token_accuracy is not None:
            parts.append(f"token accuracy {100 * self.token_accuracy:.1f}%")
        return ", ".join([*parts, *(f"{name} {value:.4g}" for name, value in self.others.items())])

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make an evaluation of the values of ``to_dict``."""
        others = dict(values)
        loss = others.pop("loss")
        targets = others.pop("targets")
        return cls(
            loss,
            others.pop("perplexity", None),
            others.pop("token_accuracy", None),
            targets,
            others,
        )


@torch.no_grad()
def evaluate(
    model: PresentedModel,
    objective: Objective,
    steps: Steps,
    precision: Precision,
    ranks: Mesh | None = None,
    limited: Callable[[], AbstractContextManager[None]] = nullcontext,
    passed: Callable[[], None] = nothing,
) -> Evaluation:
    """Evaluate the objective on every document of ``steps``, without dropout.

    The model's modules return to their modes.

    Args:
        model: the model, presented.
        objective: objective whose terms are summed.
        steps: steps that end.
        precision: dtypes of the run.
        ranks: all ranks of the run; None for a single process.
        limited: context entered for each step and for the sums at the end, where processes wait for
            each other.
        passed: called after each pass through the model; the host launches one pass ahead.
    """
    ranks = ranks or Mesh()
    counts = Counter[str]()  # floats for sums of weights
    sums = dict[str, Tensor]()
    terms = dict[str, Term]()
    with in_evaluation(model.model):
        earlier = DeviceMoment(precision.device)

        def done() -> None:
            """Wait, after each pass that is launched, until the device is done with the one before."""
            nonlocal earlier
            earlier.wait()
            earlier = DeviceMoment(precision.device)
            passed()

        known = _known_of_all(model, objective, steps, precision, ranks, limited, done)
        for step in steps.steps(count=steps.left(None)):
            counts.update(counts_of(step, ranks))
            with limited():
                for batch in step.batches:
                    with precision.autocast():
                        moved = batch.to(precision.device, non_blocking=True)
                        moved = replace(moved, segments={**moved.segments, **next(known)})
                        terms = dict(model.as_forward(partial(objective.score, model, moved)))
                    for name, term in terms.items():
                        sums[name] = sums.get(name, 0.0) + term.sum.double()
                    done()
    with limited():
        totals = ranks.sum(torch.stack(list(sums.values()))).tolist()
    values = {name: total / (counts[terms[name].per] or 1.0) for name, total in zip(sums, totals)}
    loss = sum(terms[name].coefficient * value for name, value in values.items())
    perplexity = (
        math.exp(min(values["cross_entropy"], 700.0)) if "cross_entropy" in values else None
    )
    others = {name: values[name] for name in shown(terms) if name != "token_accuracy"}
    others = objective.finish_metrics(others, counts)
    return Evaluation(
        loss, perplexity, values.get("token_accuracy"), int(counts["targets"]), others
    )


def _known_of_all(
    model: PresentedModel,
    objective: Objective,
    steps: Steps,
    precision: Precision,
    ranks: Mesh,
    limited: Callable[[], AbstractContextManager[None]],
    done: Callable[[], None],
) -> Iterator[Mapping[str, Tensor]]:
    """Return the segments that ``Objective.before_step`` adds, Batch after Batch.

    Its values are those of all data, so that they do not depend on the number of documents in a
    step.
    """
    if type(objective).before_step is Objective.before_step:
        return itertools.repeat({})
    counts = Counter[str]()
    added = list[Mapping[str, Tensor]]()
    sums = dict[str, Tensor]()
    terms = dict[str, Term]()
    for step in steps.steps(count=steps.left(None)):
        counts.update(counts_of(step, ranks))
        with limited():
            for batch in step.batches:
                asked, terms = asked_before(batch, model, objective, precision)
                added.append(
                    {
                        name: column
                        for name, column in asked.segments.items()
                        if name not in batch.segments
                    }
                )
                sums = {
                    name: sums.get(name, 0.0) + term.sum.double() for name, term in terms.items()
                }
                done()
    with limited():
        values = values_before(sums, terms, counts, ranks)
    return iter([{**segments, **values} for segments in added])


def open_scored(
    data: RowSource,
    tokenizer: Any,
    config: ChronicalsConfig,
    objective: Objective,
    model: Any,
    answer_tokens: int = 0,
) -> TokenStore:
    """Return data that is scored and not trained, tokenised, after checking that it fits the model.

    Args:
        data: the rows.
        tokenizer: the model's tokenizer.
        config: configuration of a training run on such rows.
        objective: says which kinds of rows it takes.
        model: the model.
        answer_tokens: room behind a prompt for an answer that is drawn later.

    Raises:
        DataError: the data cannot be read, or nothing in it is trained.
        ValueError: the model has too few positions.
    """
    store = open_store(
        data,
        tokenizer,
        config,
        embedding_rows=embedding_table(model).shape[0],
        kinds=objective.row_kinds,
        scored=True,
        answer_tokens=answer_tokens,
    )
    check_positions(model, store.longest + answer_tokens)
    return store


def evaluate_data(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    data: RowSource,
    config: ChronicalsConfig,
    rewards: Rewards | None = None,
) -> Evaluation:
    """Evaluate a model on data, as training does.

    Of an objective that draws answers it is the mean reward of greedy ones. The reference policy of
    an objective is ``reference_model`` of its settings, or the model without its adapters
    (``reference="adapters_off"``).

    Args:
        model: the model, on its device.
        tokenizer: its tokenizer.
        data: the rows.
        config: configuration of a training run on such rows.
        rewards: of an objective that draws answers; by default those of ``config``, which are
            started and closed here.

    Raises:
        ConfigurationError: the objective has a reference policy, and the settings do not name it.
        DataError: the data cannot be read, or nothing in it is trained.
        ValueError: the model has too few positions, sees the tokens that it is to predict, or
            gives no finite loss.
    """
    objective = build_objective(config)
    reason = objective.why_not_evaluated(model)
    if reason is not None:
        raise ConfigurationError(reason)
    if isinstance(objective, PolicyGradient):
        # It imports what evaluates runs, from here.
        from chronicals.training.rollouts.evaluation import evaluate_prompts

        if rewards is not None:
            return evaluate_prompts(model, tokenizer, data, config, objective, rewards)
        with build_rewards(config) as own_rewards:
            return evaluate_prompts(model, tokenizer, data, config, objective, own_rewards)
    store = open_scored(data, tokenizer, config, objective, model)
    (store,) = with_frozen_columns([store], objective, model, tokenizer, config)
    filler = filler_token(tokenizer, embedding_table(model).shape[0])
    stream = BatchStream(store, config, filler, epochs=1, shuffle=False)
    device = input_device(model)
    bring_frozen(objective, model, tokenizer, config)
    for frozen in objective.frozen.values():
        check_positions(frozen.model, store.longest)
    presented = present_for(objective, model, config)
    with presented.attending_documents(), frozen_attending(objective):
        score = evaluate(presented, objective, stream, Precision("fp32", device))
    if not math.isfinite(score.loss):
        raise ValueError(
            f"loss={score.loss}: what {type(model).__name__} predicts for this data is not "
            "finite; its weights are damaged or "
            "overflow: take an earlier checkpoint, or download it again"
        )
    return score
