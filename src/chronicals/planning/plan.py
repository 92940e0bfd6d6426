"""A run on some number of cards: what each holds, what it sends, and how much of its time it
computes.

    efficiency = compute / (compute + exposed + slowed)
    exposed    = max(0, reduce-scatter − ⅔ compute) + all-gather + all-reduce + attention + embedding

in seconds of a step; a reduce-scatter in the backward pass, which is two thirds of the computation,
is hidden beside it, one after it is not. Where weights are divided, of g gathered in the forward
and h in the backward passes (``gathered_in_passes``)

    exposed    = max(0, g − ⅓ compute) + max(0, h + reduce-scatter − ⅔ compute) + all-reduce + embedding

as if layers were gathered beside others throughout a pass, the first one and the embedding too.
Copies on several machines are summed layer by layer beside the backward pass of the last
micro-batch. Beside divided frozen weights, adapters are summed after the backward pass and gathered
after their update, by all ranks, and nothing hides either; there, too, the backward pass counts as
two thirds, though it computes no gradient of what is frozen. Computation is FLOPs over the rate
that a card reaches: 2 N a token forward and as many for each of the two gradients, of N weights
that are multiplied by, and 2 · heads · width · length for the causal attention to a document. Of
stacked experts those count that a token meets.

What is hidden is not for nothing: it takes multiprocessors and memory from the computation beside
it. In eight of nine rows that were measured on two cards (docs/measured.md) a step of 100 to 650 ms
took longer by ``MEETING`` and the time that all it sent takes over the link, within 11 ms, so that

    slowed     = MEETING + hidden bytes / link
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.model_shape import ModelShape
from chronicals.planning.traffic import Traffic, gathered_in_passes, traffic
from chronicals.policies import Facts, fit
from chronicals.policies.facts import WEIGHTS, trains_layers
from chronicals.policies.needed_memory import expected_memory
from chronicals.policies.solver import settle_sharding
from chronicals.policies.weight_copies import choose_sharding
from chronicals.quantization import Experts4bit, PackedLinear

BACKWARD = 2 / 3
"""Of a step's computation."""

MEETING = 0.012
"""Seconds by which a step on two cards is longer, whatever is sent: until the later one has
come, and its host was told.
"""


@dataclass(frozen=True)
class Machines:
    """Cards that a plan assumes; the defaults are an H100 with NVLink, and one 400 Gb/s adapter a
    card between machines.

    Attributes:
        memory: bytes of a card.
        cards: number of cards of a machine.
        link: bytes a second that a card sends within its machine.
        network: bytes a second that a card sends between machines.
        flops: FLOPs a second that a card reaches in training.
    """

    memory: int = 80 * 10**9
    cards: int = 8
    link: float = 370e9
    network: float = 46e9
    flops: float = 6e14

    def rate(self, ranks: int) -> float:
        """Bytes a second of a collective over so many ranks: that of its slowest link."""
        return self.link if ranks <= self.cards else self.network


@dataclass(frozen=True)
class Plan:
    """Plan of a run on ``gpus`` cards.

    Attributes:
        held: bytes that a card holds at most, recomputing as the trainer would choose.
        fits: True if that is within its memory.
        sharding: what is divided.
        recomputed: number of layers that are recomputed.
        stay: number of layers whose divided weights stay gathered between their passes.
        in_backward: True if gradients are summed in the backward pass.
        sent: bytes that a card sends in a step.
        tokens: tokens of a step, on all cards.
        computing: seconds of a step of a card by itself.
        exposed: seconds of a step in which nothing is computed.
        slowed: seconds by which computing takes longer beside what is sent.
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

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.computing + self.exposed + self.slowed

    @property
    def efficiency(self) -> float:
        """Tokens a second of a card, as a share of those of a card by itself."""
        return self.computing / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        derived = {"efficiency": self.efficiency, "tokens_per_second": self.tokens_per_second}
        return {**vars(self), "sent": {**vars(self.sent), "total": self.sent.total}, **derived}


def plan(model: Any, config: ChronicalsConfig, gpus: int, machines: Machines) -> Plan:
    """Plan a run.

    Args:
        model: with adapters and in 4 bits where it is trained so; may be on the meta device.

    Raises:
        ConfigurationError: the cards cannot share packs as the configuration says.
    """
    context = config.context_parallel
    if gpus % context:
        raise ConfigurationError(
            f"context_parallel={context}: {gpus} cards cannot share packs {context} by {context}"
        )
    facts = Facts(config, model, gpus, context, here=machines.cards, total=machines.memory)
    facts = replace(facts, config=config.fitted(sharding=choose_sharding(facts)))
    facts, sharding = settle_sharding(facts)
    config = facts.config
    frees, memory = expected_memory(facts)
    fitted = fit(facts, sharding, memory)
    again = fitted.layers_again
    stay = fitted.sharding.stay
    sent = traffic(model, config, gpus, frees, again, machines.cards, stay)
    tokens = config.batch_size * config.gradient_accumulation_steps * config.max_seq_length
    computing = (
        tokens
        // context
        * _flops_a_token(model, config, again / max(memory.layers, 1))
        / machines.flops
    )
    if config.sharding == WEIGHTS and gpus > 1:
        exposed, hidden = _exposed_divided(model, config, gpus, machines, stay, sent, computing)
    else:
        exposed, hidden = _exposed(sent, machines.rate(gpus), computing if frees else 0.0)
    slowed = MEETING + hidden / machines.link if gpus > 1 else 0.0
    return Plan(
        gpus,
        fitted.held,
        fitted.held <= machines.memory,
        config.sharding,
        again,
        stay,
        frees,
        sent,
        tokens * gpus // context,
        computing,
        exposed + sent.attention / machines.rate(context),
        slowed,
    )


def _exposed(sent: Traffic, rate: float, computing: float) -> tuple[float, float]:
    """Return the seconds of all but attention that nothing hides, and the bytes that are hidden.

    Args:
        computing: beside whose backward pass gradients are summed; 0 where they are summed
            afterwards.
    """
    hidden = min(sent.reduce_scatter, BACKWARD * computing * rate)
    return (sent.total - sent.attention - hidden) / rate, hidden


def _exposed_divided(
    model: Any,
    config: ChronicalsConfig,
    gpus: int,
    machines: Machines,
    stay: int,
    sent: Traffic,
    computing: float,
) -> tuple[float, float]:
    """Return the same as ``_exposed``, where weights are divided."""
    near = machines.rate(config.sharding_ranks or gpus)
    far = machines.rate(gpus)
    forward, backward = gathered_in_passes(model, config, gpus, stay)
    summed = sent.all_reduce
    beside = 0.0
    afterwards = sent.embedding / near
    if trains_layers(model):  # sums among copies, over another link, within the last backward pass
        beside = min(summed, BACKWARD * computing / config.gradient_accumulation_steps * far)
        backward += sent.reduce_scatter
    else:  # adapters
        afterwards += (sent.all_gather - forward - backward + sent.reduce_scatter) / far
    passes = (forward, (1 - BACKWARD) * computing), (backward, BACKWARD * computing)
    hidden = sum(min(size, seconds * near) for size, seconds in passes)
    return (forward + backward - hidden) / near + (
        summed - beside
    ) / far + afterwards, hidden + beside


def _flops_a_token(model: Any, config: ChronicalsConfig, again: float) -> float:
    """Return FLOPs of a token, forward and backward, without gradients of frozen weights.

    Args:
        again: ratio of the layers that are computed twice.
    """
    shape = ModelShape.of(model.config)
    each = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or shape.experts
    met = each / max(shape.experts, 1)
    packed: float = sum(
        m.out_features * m.in_features for m in model.modules() if isinstance(m, PackedLinear)
    )
    packed += sum(met * m.values for m in model.modules() if isinstance(m, Experts4bit))
    modules = [m for m in model.modules() if not isinstance(m, (nn.Embedding, PackedLinear))]
    dense = {
        id(p): p
        for m in (*modules, model.get_output_embeddings())
        for p in m.parameters(recurse=False)
        if p.ndim > 1
    }
    sizes = {
        key: p.numel() * (met if p.ndim == 3 and shape.experts else 1) for key, p in dense.items()
    }
    trained = sum(sizes[key] for key, p in dense.items() if p.requires_grad)
    multiplied = packed + sum(sizes.values())
    attention = 2 * shape.layers * shape.heads * shape.head_dim * config.max_seq_length
    return (2 + again) * 2 * multiplied + 2 * trained + (3.5 + again) * attention
