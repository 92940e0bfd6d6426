"""Plan of a run on some number of GPUs: memory, bytes sent, and the share of time that computes.

    efficiency = compute / (compute + exposed + slowed)
    exposed    = max(0, reduce-scatter − ⅔ compute) + all-gather + all-reduce
                 + attention + embedding

in seconds of a step. A reduce-scatter during the backward pass overlaps with it, that is with two
thirds of the computation; one after the backward pass does not overlap.

If weights are divided, with g and h the seconds of gathers in the forward and backward passes
(``gathered_in_passes``):

    exposed    = max(0, g − ⅓ compute) + max(0, h + reduce-scatter − ⅔ compute)
                 + all-reduce + embedding

This assumes that the gather of every layer overlaps with the computation of another one, also for
the first layer and the embedding. Copies on several machines are summed layer by layer during the
backward pass of the last micro-batch. With divided frozen weights, adapters are summed after the
backward pass and gathered after their update, by all ranks, without overlap. The backward pass
counts as two thirds then too, although it computes no gradients of frozen weights.

Seconds of computation are the sum of a step's parts (``policies.step_time``) at the rates of the GPU. If a
single rate is given instead (``Machines.flops``), they are FLOPs divided by it: for N weights 2 N a
token in the forward pass and as many for each of the two gradients, plus 2 · heads · width · length
for causal attention to a document. Of stacked experts only those count that a token is routed to.
Those of forward passes of frozen models are added.

Overlapped communication takes multiprocessors and memory bandwidth from the computation. In eight
of nine rows measured on two GPUs (docs/measured.md), a step of 100 to 650 ms took longer by
``MEETING_SECONDS`` plus the time of all sent bytes on the link, within 11 ms, so that

    slowed     = MEETING_SECONDS + hidden bytes / link
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from chronicals.cards import Rates, rates_of
from chronicals.cards.rates import USUAL_CARD, USUAL_MEMORY
from chronicals.config import ChronicalsConfig, ConfigurationError, Recipe
from chronicals.distributed import Mesh
from chronicals.memory import card_memory
from chronicals.model_shape import ModelShape
from chronicals.models import count_values
from chronicals.objectives import build_objective
from chronicals.planning.planned_models import planned_model
from chronicals.planning.space import Space, space_of
from chronicals.planning.traffic import Traffic, gathered_in_passes, traffic
from chronicals.policies import Facts, fit_to_memory
from chronicals.policies.facts import (
    DIVIDE_WEIGHTS,
    NOT_ON_CARD,
    backend_on,
    expected_backend,
    fillable,
    trains_layers,
)
from chronicals.policies.fit import Settled, fit_settings, what_would_do
from chronicals.policies.frozen_models import Held, planned_frozen
from chronicals.policies.model_sizes import ModelSizes, weights_met
from chronicals.policies.needed_memory import expected_memory
from chronicals.policies.sharding import choose_sharding
from chronicals.policies.solver import settle_sharding, work_of
from chronicals.policies.step_time import (
    AS_LONG_AS_PACKS,
    LINK,
    Documents,
    StepTime,
)

_BACKWARD = 2 / 3
"""The backward pass's share of a step's computation."""

MEETING_SECONDS = 0.012
"""Seconds by which a step on two GPUs is longer, however few bytes are sent.

Ranks wait for the slower one, and hosts for its arrival.
"""


@dataclass(frozen=True)
class Machines:
    """Machines that a plan assumes.

    By default they have H100 with NVLink, and a 400 Gb/s adapter for each GPU.

    Attributes:
        memory: bytes of a GPU.
        cards: number of GPUs of a machine.
        link: bytes a second that a GPU sends within its machine.
        network: bytes a second that a GPU sends between machines.
        rates: of a GPU.
        flops: FLOPs a second that a GPU reaches in training, for the time instead of ``rates``, by
            which ``fit`` compares settings all the same; None without.
    """

    memory: int = USUAL_MEMORY
    cards: int = 8
    link: float = LINK
    network: float = 46e9
    rates: Rates = field(default_factory=partial(rates_of, USUAL_CARD))
    flops: float | None = None

    def rate(self, ranks: int) -> float:
        """Return the bytes a second of a collective over ``ranks`` ranks, by its slowest link."""
        return self.link if ranks <= self.cards else self.network


@dataclass(frozen=True)
class Plan:
    """Plan of a run on ``gpus`` GPUs.

    Attributes:
        held: peak bytes on a GPU, with the recomputation that the trainer would choose.
        fits: True if they are within its memory.
        sharding: what is sharded, as in the field ``sharding``.
        recomputed: number of layers that are recomputed.
        stay: number of layers whose divided weights stay gathered between their passes.
        in_backward: True if gradients are summed in the backward pass.
        sent: bytes that a GPU sends in a step.
        tokens: tokens of a step, on all GPUs.
        computing: seconds of a step on a single GPU.
        exposed: seconds of a step in which nothing is computed.
        slowed: seconds by which overlapped communication slows the computation.
        space: bytes by part, on a card, in host memory and on the disk.
        parameters: numbers of parameters by name: ``total`` of the model with its adapters, and
            those that are ``trained``.
        time: ``computing`` by part; None if a single rate was given.
        settings: fields that ``fit`` changed, with their new values.
        words: lines on these settings: what each costs and saves.
    """

    gpus: int
    held: int
    fits: bool
    sharding: str
    recomputed: int
    stay: int
    in_backward: bool
    sent: Traffic
    tokens: int
    computing: float
    exposed: float
    slowed: float
    space: Space
    parameters: dict[str, int]
    time: StepTime | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.computing + self.exposed + self.slowed

    @property
    def interval(self) -> tuple[float, float]:
        """Shortest and longest expected seconds of a step, by the source of the rates."""
        margin = self.time.margin if self.time else 0.0
        return self.seconds * (1 - margin), self.seconds * (1 + margin)

    @property
    def efficiency(self) -> float:
        """Tokens a second of a GPU, as a fraction of those of a single GPU."""
        return self.computing / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a second, on all GPUs."""
        return self.tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values, with what follows from them."""
        shortest, longest = self.interval
        derived = {
            "time": self.time.to_dict() if self.time else None,
            "efficiency": self.efficiency,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_between": [self.tokens / longest, self.tokens / shortest],
        }
        sent = {**vars(self.sent), "total": self.sent.total}
        return {**vars(self), "sent": sent, "space": self.space.to_dict(), **derived}


def plan(
    model: Any,
    config: ChronicalsConfig,
    gpus: int,
    machines: Machines,
    frozen: Mapping[str, Held] | None = None,
    documents: Documents = AS_LONG_AS_PACKS,
) -> Plan:
    """Compute the plan of a run.

    Args:
        model: the model as it is trained, with adapters and 4-bit layers if any; may be on the meta
            device.
        config: the run's configuration.
        gpus: their number.
        machines: what the GPUs are in.
        frozen: the objective's frozen models on each GPU, by name.
        documents: of the data, for the time.

    Raises:
        ConfigurationError: the GPUs cannot share packs as configured.
    """
    context = config.context_parallel
    if gpus % context:
        raise ConfigurationError(
            f"context_parallel={context}: {gpus} cards cannot share packs {context} by {context}"
        )
    facts, sharding = settle_sharding(_facts_of(model, config, gpus, machines, frozen, documents))
    settled = None
    if config.fit != "off":
        settled = fit_settings(
            facts, rates=machines.rates, documents=documents, link=machines.rate(gpus)
        )
        facts = settled.facts
    config = facts.config
    frees, memory = expected_memory(facts)
    fitted = fit_to_memory(facts, sharding, memory)
    again = memory.layers  # layers that are recomputed whole, if all are
    if fitted.recomputed.layers is not None:
        again = fitted.recomputed.layers
    stay = fitted.sharding.stay
    sent = traffic(model, config, gpus, frees, again, machines.cards, stay)
    tokens = config.batch_size * config.gradient_accumulation_steps * config.max_seq_length
    work = work_of(facts, frees, fitted, ModelSizes.of(model), documents)
    time = None
    if machines.flops is None:
        time = work.at(machines.rates)
        computing = time.seconds
    else:
        flops = tokens // context * _flops_a_token(model, config, again / max(memory.layers, 1))
        flops += work.micro_batches * sum(each.flops for each in work.forwards)
        computing = flops / machines.flops
    if config.sharding == DIVIDE_WEIGHTS and gpus > 1:
        exposed, hidden = _exposed_divided(model, config, gpus, machines, stay, sent, computing)
    else:
        # Only sums during the backward pass can be hidden, by its computation.
        rate = machines.rate(gpus)
        hidden = min(sent.reduce_scatter, _BACKWARD * computing * rate) if frees else 0.0
        exposed = (sent.total - sent.attention - hidden) / rate
    slowed = MEETING_SECONDS + hidden / machines.link if gpus > 1 else 0.0
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    return Plan(
        gpus=gpus,
        held=fitted.held,
        fits=fitted.held <= machines.memory,
        sharding=config.sharding,
        recomputed=again,
        stay=stay,
        in_backward=frees,
        sent=sent,
        tokens=tokens * gpus // context,
        computing=computing,
        exposed=exposed + sent.attention / machines.rate(context),
        slowed=slowed,
        space=space_of(facts, fitted),
        parameters={"total": count_values(model), "trained": trained},
        time=time,
        settings={} if settled is None else settled.taken.settings,
        words=[] if settled is None else _words_of(settled),
    )


def _facts_of(
    model: Any,
    config: ChronicalsConfig,
    gpus: int,
    machines: Machines,
    frozen: Mapping[str, Held] | None,
    documents: Documents,
) -> Facts:
    """Return the facts of a run, with the sharding that it would choose; arguments of ``plan``."""
    facts = Facts(
        config,
        model,
        gpus,
        config.context_parallel,
        here=machines.cards,
        total=machines.memory,
        frozen_models=frozen or {},
        backend=expected_backend(config, machines.rates.backend),
        alike=documents.fill_packs(config.max_seq_length),
    )
    return replace(facts, config=config.fitted(sharding=choose_sharding(facts)))


def _words_of(settled: Settled) -> list[str]:
    """Return what was taken in words, and where none fits what would do."""
    words = list(settled.words)
    if not settled.taken.fits:
        enough = what_would_do(settled.usual.facts) or "no card that plans know"
        words.append(f"fit: {enough} would do")
    return words


def planned_space(given: Recipe, config: ChronicalsConfig, ranks: Mesh) -> Space:
    """Return the space of a recipe's run on each card of this machine, or on one of none.

    Args:
        given: the recipe.
        config: its configuration, fitted to the data.
        ranks: all ranks of the run.

    Raises:
        ConfigurationError: a model of the recipe cannot be found, or what is asked for cannot be
            recomputed.
    """
    model = planned_model(given, config)
    frozen = planned_frozen(build_objective(config), config)
    on_card = ranks.device.type == "cuda"
    facts = Facts(
        config,
        model,
        ranks.count,
        config.context_parallel,
        total=fillable(card_memory(ranks.device), config),
        unfused=None if on_card else NOT_ON_CARD,
        fuses_halves=on_card,
        backend=backend_on(ranks.device, config, model),
        frozen_models=frozen,
    )
    facts, sharding = settle_sharding(facts)
    if config.fit != "off":
        facts, sharding = settle_sharding(fit_settings(facts).facts)
    return space_of(facts, fit_to_memory(facts, sharding, expected_memory(facts)[1]))


def _exposed_divided(
    model: Any,
    config: ChronicalsConfig,
    gpus: int,
    machines: Machines,
    stay: int,
    sent: Traffic,
    computing: float,
) -> tuple[float, float]:
    """Return the exposed seconds of divided weights, and the overlapped bytes.

    The seconds are those of all communication but attention's.
    """
    near = machines.rate(config.sharding_ranks or gpus)
    far = machines.rate(gpus)
    forward, backward = gathered_in_passes(model, config, gpus, stay)
    summed = sent.all_reduce
    beside = 0.0
    afterwards = sent.embedding / near
    if trains_layers(model):  # sums among copies overlap with the last backward pass
        beside = min(summed, _BACKWARD * computing / config.gradient_accumulation_steps * far)
        backward += sent.reduce_scatter
    else:  # adapters are summed and gathered after the backward pass, without overlap
        afterwards += (sent.all_gather - forward - backward + sent.reduce_scatter) / far
    hidden = min(forward, (1 - _BACKWARD) * computing * near)
    hidden += min(backward, _BACKWARD * computing * near)
    exposed = (forward + backward - hidden) / near + (summed - beside) / far + afterwards
    return exposed, hidden + beside


def _flops_a_token(model: Any, config: ChronicalsConfig, again: float) -> float:
    """Return the FLOPs of a token, forward and backward, without gradients of frozen weights.

    Args:
        model: the model as it is trained.
        config: the run's configuration.
        again: ratio of the layers that are computed twice.
    """
    shape = ModelShape.of(model.config)
    multiplied, trained = weights_met(model)
    attention = 2 * shape.layers * shape.heads * shape.head_dim * config.max_seq_length
    return (2 + again) * 2 * multiplied + 2 * trained + (3.5 + again) * attention
