"""Time of an optimizer step on one card: work that policies change one after the other, and rates.

    products     matrix products of layers, head and adapters, at the rate of their shape and format
    attention    two products forward and five backward, at rates by length and width of a head
    elementwise  bytes of norms, rotations, gated units, quantisation and dequantisation
    loss         bytes of logits, and sums of the head's gradient over chunks of them
    optimizer    bytes of weights, gradients and states, and of the gradients' norm
    copies       to and from host memory, as far as no computation hides them
    launches     time that the card waits for the host

Symbols and bytes are those of ``chronicals.step_work``. ``StepWork.of`` is a step without policies;
each policy adds what it costs (``Policy.work``), and ``solver.work_of`` asks all that run. At the
rates of a card (``chronicals.cards``) the work becomes seconds: of plans, and of the settings that
``fit`` compares.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from chronicals.cards import BF16, FP32, Rates
from chronicals.lora import adapters, has_magnitudes
from chronicals.memory import NOTHING, Estimate
from chronicals.model_shape import ModelShape
from chronicals.policies.facts import PRODUCT_TYPES, Facts
from chronicals.quantization import NF4, packed_modules
from chronicals.step_work import (
    PROJECTIONS,
    DecoderShape,
    Job,
    Product,
    attention_flops,
    dequantised_bytes,
    elementwise_bytes,
    loss_bytes,
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

ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward pass over those of its forward pass: five products for two."""

SKIPPED = "down"
"""The product whose output the backward pass of a layer does not read."""

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
class ModelSizes:
    """Sizes of a model that its step's work depends on, and that no setting changes.

    Attributes:
        shape: of the decoder.
        scale: weights of the layers over those of the shape. What the shape lacks (shared experts,
            latent attention, other MLPs) is taken to multiply as fast as what it has.
        trained: number of trained values.
        adapted: names of the projections that have adapters.
        packed: True if weights of layers are in a packed format.
        magnitudes: True if adapters have magnitudes (DoRA).
    """

    shape: DecoderShape
    scale: float
    trained: int
    adapted: tuple[str, ...]
    packed: bool
    magnitudes: bool

    @classmethod
    def of(cls, model: Any) -> ModelSizes:
        """Read the sizes of a model with its adapters; it may be on the meta device."""
        shape = DecoderShape.of(model.config)
        adapted = {path.split(".")[-1] for path, _ in adapters(model)}
        multiplied = weights_met(model)[0]
        if model.get_output_embeddings() is not None:
            multiplied -= shape.head
        return cls(
            shape=shape,
            scale=multiplied / max(shape.body, 1),
            trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
            adapted=tuple(name for name in PROJECTIONS if name in adapted),
            packed=any(True for _ in packed_modules(model)),
            magnitudes=has_magnitudes(model),
        )


@dataclass(frozen=True)
class Multiplied:
    """Equal matrix products.

    Attributes:
        product: one of them.
        times: their number.
        form: format of their operands.
    """

    product: Product
    times: float
    form: str = BF16

    def seconds(self, rates: Rates) -> float:
        """Return the seconds of all of them."""
        return self.times * rates.product_seconds(self.product, self.form)


@dataclass(frozen=True)
class Pass:
    """Work of one pass of a micro-batch through the decoder layers.

    Attributes:
        products: its matrix products.
        scores: FLOPs of attention at the rate of its forward pass.
        score_gradients: the same at the rate of its backward pass.
        moved: bytes of elementwise operations.
        dequantised: bytes that dequantise weights.
    """

    products: tuple[Multiplied, ...]
    scores: float
    score_gradients: float
    moved: float
    dequantised: float

    def seconds(self, job: Job, rates: Rates) -> tuple[float, float, float]:
        """Return the seconds of products, of attention and of elementwise operations."""
        forward, backward = rates.attention_rate(job.shape.head_dim, job.mean_length)
        return (
            sum(each.seconds(rates) for each in self.products),
            self.scores / forward + self.score_gradients / backward,
            self.moved / rates.elementwise + self.dequantised / rates.dequantise,
        )


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
        again: share of the layers that are recomputed whole.
        offloaded: bytes that go to host memory beside a forward pass, and come back beside its
            backward pass.
        exchanged: bytes that come from host memory beside the update, and go back.
        sent: bytes to other cards beyond what every setting sends once a step. They are not in ``at``:
            plans count all that is sent.
        replayed: True if the card replays the step, without waiting for the host.
    """

    memory: Estimate
    job: Job
    micro_batches: int
    forward: Pass
    backward: Pass
    head: tuple[Multiplied, ...]
    loss: float
    updated: float
    trained: int
    kept: float
    kernels: float
    again: float = 0.0
    offloaded: float = 0.0
    exchanged: float = 0.0
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
        single = facts.config.mixed_precision == "fp32"
        form = FP32 if single else BF16
        wider = 2 if single else 1  # elements have as many times the bytes of those in 16 bits
        layers = []
        head = []
        for each in products(job):
            if not each.flops:  # a size that differs between layers is 0
                continue
            if each.name == "head":
                head.append(Multiplied(each, each.count, form))
            else:
                layers.append(Multiplied(each, sizes.scale * each.count, form))
        moved = wider * job.tokens * forward_bytes(job.shape)
        both = wider * job.tokens * elementwise_bytes(job.shape)
        dropped = job.tokens * dropout_bytes(facts, job)
        scores = attention_flops(job) * job.tokens
        dequantised = dequantised_bytes(job) / 2
        return cls(
            memory=memory,
            job=job,
            micro_batches=facts.config.gradient_accumulation_steps,
            forward=Pass(
                products=tuple(each for each in layers if each.product.kind == "forward"),
                scores=scores,
                score_gradients=0.0,
                moved=moved + dropped / 3,
                dequantised=dequantised,
            ),
            backward=Pass(
                products=tuple(each for each in layers if each.product.kind != "forward"),
                scores=0.0,
                score_gradients=ATTENTION_BACKWARD * scores,
                moved=both - moved + 2 * dropped / 3 + magnitude_bytes(job, sizes),
                dequantised=dequantised,
            ),
            head=tuple(head),
            loss=wider * loss_bytes(job) * job.tokens,
            updated=update_bytes(facts, sizes.trained, facts.config.optimizer_state_dtype),
            trained=sizes.trained,
            kept=memory.layers * memory.kept[NOTHING],
            kernels=kernels_of(job),
        )

    def at(self, rates: Rates) -> StepTime:
        """Return the seconds of the step on a card, without those of what is sent to others."""
        forward = self.forward.seconds(self.job, rates)
        backward = self.backward.seconds(self.job, rates)
        optimizer = self.updated / rates.copy
        rounds = self.micro_batches
        moving = self.offloaded / rates.host
        copies = max(0.0, moving - sum(forward)) + max(0.0, moving - sum(backward))
        copies = rounds * copies + max(0.0, self.exchanged / rates.host - optimizer)
        passes = [rounds * (one + other) for one, other in zip(forward, backward)]
        head = rounds * sum(each.seconds(rates) for each in self.head)
        loss = rounds * self.loss / rates.copy
        busy = sum(passes) + head + loss + optimizer + copies
        launches = rounds * self.kernels
        waiting = launches * rates.gap
        if not self.replayed:
            waiting = max(waiting, launches * rates.launch - busy)
        return StepTime(
            products=passes[0] + head,
            attention=passes[1],
            elementwise=passes[2],
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


def weights_met(model: Any) -> tuple[float, float]:
    """Return how many weights a token is multiplied with, and how many of these are trained.

    Without those of adapters in the first. Of stacked experts those count that a token is routed
    to.
    """
    shape = ModelShape.of(model.config)
    each = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or shape.experts
    met = each / max(shape.experts, 1)
    packed = 0.0
    codes = set[int]()
    for _, module in packed_modules(model):
        packed += module.values * (met if module.routed else 1)
        codes |= {id(weight.codes) for weight in module.weights.values()}
    modules = [m for m in model.modules() if not isinstance(m, nn.Embedding)]
    dense = {
        id(p): p
        for m in (*modules, model.get_output_embeddings())
        for p in m.parameters(recurse=False)
        if p.ndim > 1 and id(p) not in codes
    }
    sizes = {
        key: p.numel() * (met if p.ndim == 3 and shape.experts else 1) for key, p in dense.items()
    }
    trained = sum(sizes[key] for key, p in dense.items() if p.requires_grad)
    return packed + sum(sizes.values()), trained
