"""Time of an optimizer step on one card: work that policies change one after the other, and rates.

    products     matrix products of layers, head and adapters, at the rate of their shape and format
    attention    two products forward and five backward, at rates by length and width of a head
    elementwise  bytes of norms, rotations, gated units, quantisation and dequantisation
    loss         bytes of logits, and sums of the head's gradient over chunks of them
    optimizer    bytes of weights, gradients and states, and of the gradients' norm
    copies       to and from host memory, as far as no computation hides them
    launches     time that the card waits for the host

Forward passes of frozen models, as of a teacher, or of the trained one without its adapters, are in
the same parts (``Objective.forward_passes``).

Symbols and bytes are those of ``chronicals.step_work``. ``StepWork.of`` is a step without policies;
each policy adds what it costs (``Policy.work``), and ``solver.work_of`` asks all that run. At the
rates of a card (``chronicals.cards``) the work becomes seconds: of plans, and of the settings that
``fit`` compares.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from chronicals.cards import BF16, FP32, Rates
from chronicals.memory import NOTHING, Estimate
from chronicals.objectives import OBJECTIVES, Objective, build_objective
from chronicals.objectives.terms import ADAPTERS_OFF, TRAINED_MODEL
from chronicals.policies.facts import PRODUCT_TYPES, Facts
from chronicals.policies.model_sizes import ModelSizes
from chronicals.quantization import NF4
from chronicals.step_work import (
    PROJECTIONS,
    DecoderShape,
    Job,
    Product,
    attention_flops,
    dequantised_bytes,
    elementwise_bytes,
    optimizer_bytes,
    products,
)

LINK = 370e9
"""Bytes a second to other cards that plans assume of NVLink."""

MAGNITUDE_BYTES = 10
"""Bytes moved for an output of a product under DoRA: read and written by the scaling forward; its
gradient and it read, and the scaled gradient written, backward (``kernels.column_scaling``).
"""

DROPOUT_BYTES = 6
"""Bytes moved for an input of an adapter under dropout: its product is not inside the base's, so
the input is read once more, and its gradient read and written once more
(``kernels.dropped_products``).
"""

WIDER = {BF16: 1, FP32: 2}
"""Bytes of an element over those in 16 bits, by the format of products."""

GROUPED = 0.81
"""Rate of the grouped products of experts over that of a dense one of as many rows: 579 TFLOP/s of
OLMoE and 560 of 30B-A3B for about 700 (profiles of ``benchmarks/results/row-olmoe-1b-7b-full-fixed``
and ``row-30b-a3b-lora-fixed`` on the H100).
"""

ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward pass over those of its forward pass: five products for two."""

SHARED_FORWARD_BYTES = 6
SHARED_BACKWARD_BYTES = 112
SHARED_KERNELS = 26
"""Of answers that share prompts, a layer's bytes for each key and for each value that is gathered
(``attention.documents``), and its kernels.

They are what these kernels take at the rate of elementwise operations, 15.4 ms of a step of an 8B
with 8,192 positions (profile of ``benchmarks/results/row-8b-lora-orpo-50-h200.json``). They are not
fused, so that it is three times their bytes.
"""

SKIPPED = "down"
"""The product whose output the backward pass of a layer does not read."""

SUM_BYTES = 4
"""Bytes of a value of the gradients that are summed over tiles: they are fp32."""

GRADIENT_BYTES = 8
"""Bytes moved to add a gradient of a value to its fp32 sum: it is read and written."""

ATTENTION_KERNELS = 7
OTHER_KERNELS = 22
ADAPTER_KERNELS = 8
"""Kernels of a layer in both passes beside its products: of FlashAttention; of norms, rotation,
unit, sums of their gradients and fills; and of adapters. They are those of the profiles in
``benchmarks/results/``.
"""


@dataclass(frozen=True)
class Documents:
    """Facts on the data that a plan is told, since it reads none.

    Attributes:
        length: tokens of the document that a token is in, in the mean over tokens; None for those
            of a pack.
        labelled: share of the tokens that are targets.
    """

    length: float | None = None
    labelled: float = 1.0

    def fill_packs(self, length: int) -> bool:
        """Return whether it is known that each fills a pack of ``length`` tokens."""
        return self.length is not None and self.length >= length


AS_LONG_AS_PACKS = Documents()
"""Documents of which nothing is known."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part, and how far they may be off.

    Attributes:
        margin: largest expected error as a share of the sum.
        source: where the rates come from.
        card: whose they are.
    """

    products: float
    attention: float
    elementwise: float
    loss: float
    optimizer: float
    copies: float
    launches: float
    margin: float
    source: str
    card: str

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part, in the order of a step."""
        names = (each.name for each in fields(self) if each.type == "float")
        return {name: getattr(self, name) for name in names if name != "margin"}

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the parts, their sum and where they come from, as plain JSON values."""
        return {**vars(self), "seconds": self.seconds}


@dataclass(frozen=True)
class Multiplied:
    """Equal matrix products.

    Attributes:
        product: one of them.
        times: their number.
        form: format of their operands.
        share: of the rate of a card that they reach.
    """

    product: Product
    times: float
    form: str = BF16
    share: float = 1.0

    def seconds(self, rates: Rates) -> float:
        """Return the seconds of all of them."""
        return self.times * rates.product_seconds(self.product, self.form) / self.share


@dataclass(frozen=True)
class LayerPass:
    """Work of one pass of a micro-batch through the decoder layers.

    Attributes:
        products: its matrix products.
        scores: FLOPs of attention at the rate of its forward pass.
        score_gradients: the same at the rate of its backward pass.
        moved: bytes of elementwise operations.
        dequantised: bytes that dequantise weights.
        form: format of attention's operands.
    """

    products: tuple[Multiplied, ...]
    scores: float
    score_gradients: float
    moved: float
    dequantised: float
    form: str = BF16

    def seconds(self, job: Job, rates: Rates) -> tuple[float, float, float]:
        """Return the seconds of products, of attention and of elementwise operations."""
        forward, backward = rates.attention_rate(job.shape.head_dim, job.mean_length, self.form)
        return (
            sum(each.seconds(rates) for each in self.products),
            self.scores / forward + self.score_gradients / backward,
            self.moved / rates.elementwise + self.dequantised / rates.dequantise,
        )


@dataclass(frozen=True)
class ForwardOnly:
    """A forward pass of each micro-batch that has no backward pass.

    Attributes:
        name: whose it is, as in ``Objective.forward_passes``.
        job: sizes of the micro-batch for this model.
        layers: its pass through the decoder layers.
        head: products of the head.
        loss: bytes of the logits.
        kernels: number of kernels.
        replayed: True if it is part of what the card replays; False if the host launches it before
            (``Objective.before_step``).
    """

    name: str
    job: Job
    layers: LayerPass
    head: tuple[Multiplied, ...]
    loss: float
    kernels: float
    replayed: bool = True

    @classmethod
    def of(cls, name: str, job: Job, scale: float, form: str) -> ForwardOnly:
        """Return the pass of a model whose logits are made once and read.

        Args:
            name: whose it is.
            job: sizes of the micro-batch.
            scale: weights of the model's layers over those of its shape.
            form: format of operands.
        """
        layers = forward_pass(job, scale, form)
        kernels = (
            len(layers.products)
            + OTHER_KERNELS / 3
            + len(PROJECTIONS) * (job.dequantised_bytes > 0)
        )
        return cls(
            name=name,
            job=job,
            layers=layers,
            head=tuple(each for each in head_products(job, form) if each.product.kind == "forward"),
            loss=2 * WIDER[form] * job.shape.vocabulary * job.labelled * job.tokens,
            kernels=job.shape.layers * kernels,
        )

    @property
    def flops(self) -> float:
        """FLOPs of its products and of attention."""
        made = (*self.layers.products, *self.head)
        return self.layers.scores + sum(each.times * each.product.flops for each in made)

    @property
    def is_of_trained_model(self) -> bool:
        """True if it is of the model that is trained, with or without its adapters."""
        return self.name in (ADAPTERS_OFF, TRAINED_MODEL)


@dataclass(frozen=True)
class StepWork:
    """Work of an optimizer step of one process.

    Attributes:
        memory: bytes that the step is expected to hold.
        job: sizes of a micro-batch.
        micro_batches: forward passes of the step.
        forward: forward pass of a micro-batch.
        backward: its backward pass, with what it computes again.
        head: products of the head for a micro-batch.
        loss: bytes of the loss of a micro-batch.
        updated: bytes of the optimizer's step, and of the gradients' norm.
        trained: number of trained values.
        kept: bytes that one forward pass keeps for its backward pass.
        kernels: number of kernels of a micro-batch.
        forwards: forward passes of each micro-batch without a backward pass.
        again: share of the layers that are recomputed whole.
        offloaded: bytes that go to host memory beside a forward pass, and come back beside its
            backward pass.
        exchanged: bytes that come from host memory beside the update, and go back.
        fetched: bytes that come from host memory in a forward pass while the card waits for them.
        sent: bytes to other cards beyond what every setting sends once a step. They are not in ``at``:
            plans count all that is sent.
        replayed: True if the card replays the step, without waiting for the host.
    """

    memory: Estimate
    job: Job
    micro_batches: int
    forward: LayerPass
    backward: LayerPass
    head: tuple[Multiplied, ...]
    loss: float
    updated: float
    trained: int
    kept: float
    kernels: float
    forwards: tuple[ForwardOnly, ...] = ()
    again: float = 0.0
    offloaded: float = 0.0
    exchanged: float = 0.0
    fetched: float = 0.0
    sent: float = 0.0
    replayed: bool = False

    @classmethod
    def of(
        cls, facts: Facts, memory: Estimate, sizes: ModelSizes, documents: Documents
    ) -> StepWork:
        """Return the work of a run without policies.

        Args:
            facts: of the run.
            memory: bytes that it is expected to hold.
            sizes: of its model.
            documents: of its data.
        """
        job = job_of(facts, sizes, documents)
        objective = OBJECTIVES[facts.config.objective]
        form = form_of(facts)
        wider = WIDER[form]
        forward = forward_pass(job, sizes.scale, form)
        moved = wider * job.tokens * elementwise_bytes(job.shape) - forward.moved
        dropped = job.tokens * dropout_bytes(facts, job)
        kernels = kernels_of(job)
        if facts.packed and objective.shares_prompts():
            gathered = 2 * wider * job.tokens * job.shape.layers * job.shape.kv
            forward = replace(forward, moved=forward.moved + SHARED_FORWARD_BYTES * gathered)
            moved += SHARED_BACKWARD_BYTES * gathered
            kernels += SHARED_KERNELS * job.shape.layers
        logits = objective.head_work
        return cls(
            memory=memory,
            job=job,
            micro_batches=facts.config.gradient_accumulation_steps,
            forward=replace(forward, moved=forward.moved + dropped / 3),
            backward=LayerPass(
                products=of_layers(job, ("dX", "dW"), sizes.scale, form),
                scores=0.0,
                score_gradients=ATTENTION_BACKWARD * forward.scores,
                moved=moved + 2 * dropped / 3 + magnitude_bytes(job, sizes),
                dequantised=forward.dequantised,
                form=form,
            ),
            head=head_products(job, form, logits.logits) if logits.logits else (),
            loss=wider * logits.moved * job.shape.vocabulary * job.labelled * job.tokens,
            updated=update_bytes(facts, sizes.trained, facts.config.optimizer_state_dtype),
            trained=sizes.trained,
            kept=memory.layers * memory.kept[NOTHING],
            kernels=kernels,
            forwards=tuple(
                replace(each, replayed=objective.before_step is Objective.before_step)
                for each in forward_passes(facts, job, sizes)
            ),
        )

    def at(self, rates: Rates) -> StepTime:
        """Return the seconds of the step on a card, without those of what is sent to others."""
        forward = self.forward.seconds(self.job, rates)
        backward = self.backward.seconds(self.job, rates)
        optimizer = self.updated / rates.copy
        rounds = self.micro_batches
        moving = self.offloaded / rates.host
        copies = max(0.0, moving - sum(forward)) + max(0.0, moving - sum(backward))
        copies = rounds * (copies + self.fetched / rates.host) + max(
            0.0, self.exchanged / rates.host - optimizer
        )
        passes = [forward, backward]
        passes += [each.layers.seconds(each.job, rates) for each in self.forwards]
        multiplied, attended, elementwise = (rounds * sum(parts) for parts in zip(*passes))
        heads = [*self.head, *(one for each in self.forwards for one in each.head)]
        multiplied += rounds * sum(each.seconds(rates) for each in heads)
        loss = rounds * (self.loss + sum(each.loss for each in self.forwards)) / rates.copy
        busy = multiplied + attended + elementwise + loss + optimizer + copies
        launches = rounds * (self.kernels + sum(each.kernels for each in self.forwards))
        by_host = launches
        if self.replayed:
            by_host = rounds * sum(each.kernels for each in self.forwards if not each.replayed)
        waiting = max(launches * rates.gap, by_host * rates.launch - busy)
        return StepTime(
            products=multiplied,
            attention=attended,
            elementwise=elementwise,
            loss=loss,
            optimizer=optimizer,
            copies=copies,
            launches=waiting,
            margin=rates.margin,
            source=rates.source,
            card=rates.card,
        )


def job_of(facts: Facts, sizes: ModelSizes, documents: Documents) -> Job:
    """Return the sizes of a micro-batch of a run."""
    config = facts.config
    dense = PRODUCT_TYPES[config.mixed_precision].itemsize
    return Job(
        shape=sizes.shape,
        tokens=facts.tokens,
        mean_length=documents.length or config.max_seq_length,
        labelled=documents.labelled,
        rank=config.lora_rank if config.use_lora else 0,
        adapted=sizes.adapted,
        dequantised_bytes=NF4.bytes_a_value(dense) + dense if sizes.packed else 0.0,
    )


def forward_passes(facts: Facts, job: Job, sizes: ModelSizes) -> Iterator[ForwardOnly]:
    """Yield the forward passes of a micro-batch that have no backward pass.

    Args:
        facts: of the run.
        job: sizes of a micro-batch.
        sizes: of the trained model.
    """
    form = form_of(facts)
    for name in build_objective(facts.config).forward_passes(facts.config):
        if name == TRAINED_MODEL:
            yield ForwardOnly.of(name, job, sizes.scale, form)
        elif name == ADAPTERS_OFF:
            yield ForwardOnly.of(name, replace(job, rank=0), sizes.scale, form)
        elif name in facts.frozen_models:
            other = facts.frozen_models[name].sizes
            assert other is not None  # as of all models with passes
            dense = PRODUCT_TYPES[facts.config.mixed_precision].itemsize
            its_job = replace(
                job,
                shape=other.shape,
                rank=0,
                dequantised_bytes=NF4.bytes_a_value(dense) + dense if other.packed else 0.0,
            )
            yield ForwardOnly.of(name, its_job, other.scale, form)


def form_of(facts: Facts) -> str:
    """Return the format of the operands of a run's products; fp16 is as fast as bf16."""
    return FP32 if facts.config.mixed_precision == "fp32" else BF16


def forward_pass(job: Job, scale: float, form: str) -> LayerPass:
    """Return the forward pass of a micro-batch through the layers; see ``ForwardOnly.of``."""
    return LayerPass(
        products=of_layers(job, ("forward",), scale, form),
        scores=attention_flops(job) * job.tokens,
        score_gradients=0.0,
        moved=WIDER[form] * job.tokens * forward_bytes(job.shape),
        dequantised=dequantised_bytes(job) / 2,
        form=form,
    )


def of_layers(job: Job, kinds: Collection[str], scale: float, form: str) -> tuple[Multiplied, ...]:
    """Return the products of the layers that are of these kinds; see ``ForwardOnly.of``.

    A size that differs between layers is 0, and products with it are left out.
    """
    found = []
    for each in products(job):
        if each.name == "head" or each.kind not in kinds or not each.flops:
            continue
        grouped = job.shape.routed and each.name in ("gate_up", SKIPPED)
        found.append(Multiplied(each, scale * each.count, form, GROUPED if grouped else 1.0))
    return tuple(found)


def head_products(job: Job, form: str, logits: int = 1) -> tuple[Multiplied, ...]:
    """Return the products of the head, of which those for the logits are made ``logits`` times."""
    times = {"forward": logits, "dX": 1, "dW": 1}
    return tuple(
        Multiplied(each, times[each.kind] * each.count, form)
        for each in products(job)
        if each.name == "head"
    )


def forward_bytes(shape: DecoderShape) -> float:
    """Return elementwise bytes of a token in the forward pass of all layers."""
    each = 3 * shape.inner * shape.each + (2 * shape.chosen * shape.width)
    return shape.layers * 2 * (8 * shape.width + 2 * (shape.q + shape.kv) + each)


def dropout_bytes(facts: Facts, job: Job) -> float:
    """Return bytes of a token that dropout of the adapters' inputs moves, in both passes."""
    if not job.rank or not facts.config.lora_dropout:
        return 0.0
    thin = [each for each in products(job) if each.kind == "forward" and each.name[-2:] == " A"]
    return DROPOUT_BYTES * sum(each.count * each.inputs for each in thin)


def magnitude_bytes(job: Job, sizes: ModelSizes) -> float:
    """Return bytes of DoRA: scaled outputs, and the norms of weights and adapters' products."""
    if not sizes.magnitudes:
        return 0.0
    base = [
        each
        for each in products(job)
        if each.kind == "forward" and each.name[-2:] != " A" and each.name != "head"
    ]
    outputs = sum(each.count * each.outputs * each.rows for each in base)
    # a weight is read, the adapters' product written and read
    weights = sum(each.count * each.outputs * each.inputs for each in base)
    return MAGNITUDE_BYTES * outputs + 6 * weights


def update_bytes(facts: Facts, trained: int, states: str) -> float:
    """Return bytes of the optimizer's step, and of the gradients' norm.

    Args:
        facts: of the run.
        trained: number of trained values.
        states: format of the optimizer's states, as for ``optimizer_bytes``.
    """
    config = facts.config
    shape = DecoderShape.of(facts.model.config)
    norm = 0
    if config.max_grad_norm is not None:
        norm = 2 if config.mixed_precision == "bf16" and not config.use_lora else 4
    full = 0.0 if config.use_lora else shape.head / max(shape.parameters, 1)
    each = optimizer_bytes(
        config.mixed_precision, states, config.use_lora, config.master_weights, full=full
    )
    return (each + norm) * trained


def kernels_of(job: Job) -> float:
    """Return the number of kernels of the layers in both passes of a micro-batch."""
    kernels = sum(product.name != "head" for product in products(job))
    kernels += ATTENTION_KERNELS + OTHER_KERNELS
    if job.rank:
        kernels += ADAPTER_KERNELS
    if job.dequantised_bytes:
        kernels += 2 * len(PROJECTIONS)
    return job.shape.layers * kernels
