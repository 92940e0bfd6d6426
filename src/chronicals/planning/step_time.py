"""Seconds of an optimizer step on one card, by part, from the model, the policies and rates.

    products     matrix products of layers, head and adapters, at the rate of their shape and format
    attention    two products forward and five backward, at rates by length and width of a head
    elementwise  bytes of norms, rotations, gated units, quantisation and dequantisation
    loss         bytes of logits, and sums of the head's gradient over chunks of them
    optimizer    bytes of weights, gradients and states, and of the gradients' norm
    copies       to and from host memory, as far as no computation hides them
    launches     time that the card waits for the host

Symbols and bytes are those of ``chronicals.step_work``. What is recomputed counts again: whole
layers without their last product and its unit's successor, which the backward pass does not read
(``memory.recompute``); norms and gated units; tiles of an MLP with all their products.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from chronicals.lora import adapters, has_magnitudes
from chronicals.memory import CHEAP, LAYERS, NOTHING, Estimate
from chronicals.model_shape import ModelShape
from chronicals.optimizers import states_in_host_memory
from chronicals.patching.layer_policies import is_large
from chronicals.planning.rates import BF16, FP8, Rates
from chronicals.policies import Decision, Facts
from chronicals.policies.exclusions import conditions, why_excluded
from chronicals.policies.facts import PRODUCT_TYPES
from chronicals.policies.needed_memory import asked_for, state_bytes
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

SKIPPED = "down"
"""The product whose output the backward pass of a layer does not read."""

FP8_BYTES = 6
"""Bytes moved to quantise a value for both products that read it: 2 to find the tensor's largest,
2 to quantise, 1 for each of two layouts (``kernels.fp8``).
"""

MAGNITUDE_BYTES = 10
"""Bytes moved for an output of a product under DoRA: read and written by the scaling forward; its
gradient and it read, and the scaled gradient written, backward (``kernels.column_scaling``).
"""

DROPOUT_BYTES = 6
"""Bytes moved for an input of an adapter under dropout: its product is not inside the base's, so
the input is read once more, and its gradient read and written once more
(``kernels.dropped_products``).
"""

ADDED_BYTES = 4
"""Bytes moved for an output and for an input's gradient of a product in FP8 that has adapters: they
are read and written once more to add the adapters' products (``lora.merged_linear``).
"""

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


def step_time(
    facts: Facts,
    recomputed: Decision,
    memory: Estimate,
    rates: Rates,
    documents: Documents = AS_LONG_AS_PACKS,
) -> StepTime:
    """Compute the time of a step on one card.

    Args:
        facts: of the run, the model on any device.
        recomputed: the decision on recomputation.
        memory: expected of the run, for the bytes that are offloaded.
        rates: of the card.
        documents: of the data.
    """
    job = job_of(facts, documents)
    rounds = facts.config.gradient_accumulation_steps
    names = asked_for(facts, False)
    again = 1.0
    if recomputed.layers is not None:
        again = recomputed.layers / max(job.shape.layers, 1)
    work = _Work(facts, job, again, recomputed.how == CHEAP, rates)
    forward = work.forward()
    backward = work.backward()
    loss = work.loss()
    optimizer = work.update() / rates.copy
    copies = 0.0
    if "activation_offload" in names:
        kept = again * memory.kept[LAYERS] + (1 - again) * memory.kept[_kept(recomputed)]
        moving = job.shape.layers * kept / rates.host
        copies += max(0.0, moving - sum(forward)) + max(0.0, moving - sum(backward))
    passes = [rounds * (one + other) for one, other in zip(forward, backward)]
    copies *= rounds
    if "offload_optimizer_states" in names:
        moved = state_bytes(facts.config, facts.model, states_in_host_memory(facts.model))
        copies += max(0.0, moved / rates.host - optimizer)
    head = rounds * work.head()
    busy = sum(passes) + head + rounds * loss + optimizer + copies
    launches = rounds * work.launches()
    waiting = launches * rates.gap
    if not replays(facts, names):
        waiting = max(waiting, launches * rates.launch - busy)
    return StepTime(
        products=passes[0] + head,
        attention=passes[1],
        elementwise=passes[2],
        loss=rounds * loss,
        optimizer=optimizer,
        copies=copies,
        launches=waiting,
        margin=rates.margin,
        source=rates.source,
        card=rates.card,
    )


def job_of(facts: Facts, documents: Documents) -> Job:
    """Return the sizes of a micro-batch of a run."""
    config = facts.config
    model = facts.model
    shape = DecoderShape.of(model.config)
    adapted = {path.split(".")[-1] for path, _ in adapters(model)}
    packed = any(True for _ in packed_modules(model))
    dense = PRODUCT_TYPES[config.mixed_precision].itemsize
    return Job(
        shape=shape,
        tokens=facts.tokens,
        mean_length=documents.length or config.max_seq_length,
        labelled=documents.labelled,
        rank=config.lora_rank if config.use_lora else 0,
        adapted=tuple(name for name in PROJECTIONS if name in adapted),
        optimizer_bytes=optimizer_bytes(
            config.mixed_precision,
            "8bit" if config.use_8bit_optimizer else config.optimizer_state_dtype,
            config.use_lora,
            config.master_weights,
            full=0.0 if config.use_lora else shape.head / shape.parameters,
        ),
        dequantised_bytes=NF4.bytes_a_value(dense) + dense if packed else 0.0,
    )


def replays(facts: Facts, names: Iterable[str]) -> bool:
    """Return whether a card would replay the step as a CUDA graph."""
    standing = {*names, *conditions(facts)}
    return (
        "use_cuda_graphs" in standing
        and facts.config.mixed_precision != "fp16"
        and why_excluded("use_cuda_graphs", standing, facts) is None
    )


def _kept(recomputed: Decision) -> str:
    return recomputed.how if recomputed.how == CHEAP else NOTHING


@dataclass(frozen=True)
class _Work:
    """Seconds of the parts of a micro-batch; ``forward`` and ``backward`` are of the layers.

    Attributes:
        facts: of the run.
        job: sizes of the micro-batch.
        again: share of the layers that are recomputed whole.
        cheap: True if the other layers recompute norms and gated units.
        rates: of the card.
    """

    facts: Facts
    job: Job
    again: float
    cheap: bool
    rates: Rates

    def forward(self) -> tuple[float, float, float]:
        """Return seconds of products, attention and elementwise operations."""
        made = self._products("forward")
        quantised = sum(product.inputs * product.rows * n for product, n in self._in_fp8("forward"))
        moved = self.job.tokens * (self._forward_bytes() + self._adapter_bytes() / 3)
        moved += FP8_BYTES * quantised + self._added_bytes("forward")
        return (
            made,
            self._attention_flops() / self._attention_rates()[0],
            moved / self.rates.elementwise + self._dequantising() / 2,
        )

    def backward(self) -> tuple[float, float, float]:
        """Return the same of the backward pass, with what it recomputes."""
        job = self.job
        shape = job.shape
        made = self._products("dX") + self._products("dW") + self.again * self._again()
        moved = elementwise_bytes(shape) - self._forward_bytes() + 2 * self._adapter_bytes() / 3
        moved += self.again * self._forward_bytes()
        if self.cheap:
            # two norms that read and write D values, and units of three F
            units = 3 * shape.inner * shape.each
            moved += (1 - self.again) * shape.layers * 2 * (4 * shape.width + units)
        if self._tiles:
            made += self._tiled()
            moved += (1 - self.again) * shape.layers * 2 * 3 * shape.inner
        quantised = sum(
            product.outputs * product.rows * n for product, n in self._in_fp8("dX")
        ) + sum(product.inputs * product.outputs * n for product, n in self._in_fp8("dW"))
        others = self._magnitude_bytes() + self._added_bytes("dX")
        flops = 2.5 * self._attention_flops()
        forward, backward = self._attention_rates()
        return (
            made,
            flops / backward + self.again * self._attention_flops() / forward,
            (job.tokens * moved + FP8_BYTES * quantised + others) / self.rates.elementwise
            + self._dequantising() / 2,
        )

    def head(self) -> float:
        """Return seconds of the head's products, which are in 16 bits."""
        return sum(
            each.count * self.rates.product_seconds(each)
            for each in products(self.job)
            if each.name == "head"
        )

    def loss(self) -> float:
        """Return seconds of the loss, and of the sums of the head's gradient over its chunks."""
        job = self.job
        moved = loss_bytes(job) * job.tokens
        if not job.rank:
            chunks = -(-job.tokens // self.facts.config.logits_chunk_size)
            moved += chunks * 8 * job.shape.head  # read and written in fp32
        return moved / self.rates.copy

    def update(self) -> float:
        """Return bytes of the optimizer's step, and of the gradients' norm."""
        trained = sum(p.numel() for p in self.facts.trained)
        norm = 0
        if self.facts.config.max_grad_norm is not None:
            norm = 2 if self.facts.config.mixed_precision == "bf16" and not self.job.rank else 4
        return (self.job.optimizer_bytes + norm) * trained

    def launches(self) -> float:
        """Return the number of kernels of both passes."""
        job = self.job
        layer = [product for product in products(job) if product.name != "head"]
        kernels = len(layer) + ATTENTION_KERNELS + OTHER_KERNELS
        if job.rank:
            kernels += ADAPTER_KERNELS
        if job.dequantised_bytes:
            kernels += 2 * len(PROJECTIONS)
        forward = sum(product.kind == "forward" for product in layer)
        return job.shape.layers * (kernels + self.again * (forward + OTHER_KERNELS / 3))

    @property
    def _tiles(self) -> bool:
        return "tiled_mlp" in self.facts.config.memory_policies

    def _products(self, kind: str) -> float:
        return self._scale() * sum(
            each.count * self.rates.product_seconds(each, self._form(each))
            for each in products(self.job)
            if each.kind == kind and each.name != "head"
        )

    def _again(self) -> float:
        """Return seconds of the products that a recomputed layer makes anew."""
        return self._scale() * sum(
            each.count * self.rates.product_seconds(each, self._form(each))
            for each in products(self.job)
            if each.kind == "forward" and each.name not in (SKIPPED, "head")
        )

    def _tiled(self) -> float:
        """Return seconds of the products of tiles that no recomputed layer has made anew."""
        seconds = 0.0
        for each in products(self.job):
            if each.kind == "forward" and each.name in ("gate_up", SKIPPED):
                share = 1.0 if each.name == SKIPPED else 1 - self.again
                seconds += share * each.count * self.rates.product_seconds(each, self._form(each))
        return seconds

    def _form(self, product: Product) -> str:
        """Return the format of a product's operands."""
        large = is_large(product.inputs, product.outputs)
        return FP8 if self.facts.config.use_fp8 and large else BF16

    def _in_fp8(self, kind: str) -> list[tuple[Product, int]]:
        return [
            (each, each.count)
            for each in products(self.job)
            if each.kind == kind and each.name != "head" and self._form(each) == FP8
        ]

    def _added_bytes(self, kind: str) -> float:
        """Return bytes that add the adapters' products to those in FP8."""
        if not self.job.rank:
            return 0.0
        return ADDED_BYTES * sum(
            product.rows * n * (product.outputs if kind == "forward" else product.inputs)
            for product, n in self._in_fp8(kind)
        )

    def _forward_bytes(self) -> float:
        """Return elementwise bytes of a token in the forward pass of all layers."""
        shape = self.job.shape
        each = 3 * shape.inner * shape.each + (2 * shape.chosen * shape.width)
        return shape.layers * 2 * (8 * shape.width + 2 * (shape.q + shape.kv) + each)

    def _adapter_bytes(self) -> float:
        """Return bytes of a token that dropout of the adapters' inputs moves, in both passes."""
        job = self.job
        if not job.rank or not self.facts.config.lora_dropout:
            return 0.0
        thin = [each for each in products(job) if each.kind == "forward" and each.name[-2:] == " A"]
        return DROPOUT_BYTES * sum(each.count * each.inputs for each in thin)

    def _magnitude_bytes(self) -> float:
        """Return bytes of DoRA: scaled outputs, and the norms of weights and adapters' products."""
        if not has_magnitudes(self.facts.model):
            return 0.0
        base = [
            each
            for each in products(self.job)
            if each.kind == "forward" and each.name[-2:] != " A" and each.name != "head"
        ]
        outputs = sum(each.count * each.outputs * each.rows for each in base)
        # a weight is read, the adapters' product written and read
        weights = sum(each.count * each.outputs * each.inputs for each in base)
        return MAGNITUDE_BYTES * outputs + 6 * weights

    def _dequantising(self) -> float:
        return dequantised_bytes(self.job) / self.rates.dequantise

    def _attention_flops(self) -> float:
        return attention_flops(self.job) * self.job.tokens

    def _attention_rates(self) -> tuple[float, float]:
        return self.rates.attention_rate(self.job.shape.head_dim, self.job.mean_length)

    def _scale(self) -> float:
        """Return the weights of the layers over those of the shape that is counted.

        What the shape lacks (shared experts, latent attention, other MLPs) is taken to multiply as
        fast as what it has.
        """
        multiplied = weights_met(self.facts.model)[0] - self.job.shape.head
        return multiplied / self.job.shape.body


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
