"""Rates of this machine at the step's own shapes, on random data: the parts of the reference step,
run in the order of a step.

A card regulates its power, so the rate of a product depends on what runs around it. Therefore the
products, attention and copies of the reference step run layer by layer, as often as in a step, for
a few steps. Each is timed in its place, and whole steps are timed without marks between the parts.
Activations are in no cache then; a small weight may be. Real steps have gaps and other operands and
may be faster still: see ``ReferenceStep.best_seen``.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from chronicals.attention import choose_backend, document_attention
from chronicals.benchmark.floor import (
    Job,
    Product,
    dequantised_bytes,
    elementwise_bytes,
    loss_bytes,
    products,
    reference_step,
)
from chronicals.benchmark.measurement import Clock, device
from chronicals.benchmark.work import Work

WARM_UP = 4
MEASURED = 3
"""Steps on a card; elsewhere, where clocks do not change so fast, one of each, with a single
layer.
"""

LEAD = 8
SIDE = 8192
"""Before a step the card multiplies square matrices of width SIDE, LEAD times (12 ms) or more
for a slow host, so that the host queues the step ahead of the card."""

SMALLEST_COPY = 2**24
LARGEST_COPY = 2**31

FORWARD = "attention forward"
BACKWARD = "attention backward"
COPY = "copy"

ALIGNED = 128

Parts = Mapping[str, Callable[[], Any]]


def measure_rates(work: Work) -> dict[str, Any]:
    """Everything the row's reference step needs, and that step itself.

    Returns:
        ``machine``: the card; ``copy_bytes_per_second``; ``products``: seconds and FLOP/s by shape;
        ``attention``: backend, seconds and FLOP/s of one layer, forward and backward; ``floor``:
        seconds of the reference step by part.
    """
    job = work.job()
    config = work.config()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[
        config.mixed_precision
    ]
    lengths = [len(document) for document in list(work.documents_by_step(work.warm_up + 1))[-1]]
    size = copied_bytes(job)
    parts = {**_products(job, dtype), **_attention(job, lengths, dtype), COPY: _copy(size)}
    seconds = seconds_of(parts, order_of_a_step(job, size))
    by_shape = {}
    for product in products(job):
        own = seconds[product.key] * product.rows / aligned(product.rows)
        by_shape[product.key] = {"seconds": own, "flops_per_second": product.flops / own}
    attention = _attention_rates(job, lengths, dtype, seconds)
    copy = 2 * size / seconds[COPY]
    whole = reference_step(
        job,
        copy,
        lambda product: by_shape[product.key]["seconds"],
        attention["forward_seconds"] + attention["backward_seconds"],
    )
    return {
        "machine": machine(),
        "copy_bytes_per_second": copy,
        "products": by_shape,
        "attention": attention,
        "floor": whole.to_dict(),
    }


def machine() -> dict[str, str | float | int]:
    """The card, or the processor."""
    if device().type == "cuda":
        card = torch.cuda.get_device_properties(0)
        return {
            "card": card.name,
            "memory_gib": round(card.total_memory / 2**30, 1),
            "cuda": str(torch.version.cuda),
        }
    return {"card": f"CPU, {torch.get_num_threads()} threads"}


def copied_bytes(job: Job) -> int:
    """Bytes of one copy, which reads and writes as much as the elementwise operations of a
    layer, within limits.
    """
    of_a_layer = int(_bytes_of_a_layer(job)) // 2
    largest = LARGEST_COPY if device().type == "cuda" else SMALLEST_COPY
    return min(max(of_a_layer, SMALLEST_COPY), largest)


def _bytes_of_a_layer(job: Job) -> float:
    """Of its elementwise operations, and to dequantise its weights."""
    return (elementwise_bytes(job.shape) * job.tokens + dequantised_bytes(job)) / job.shape.layers


def order_of_a_step(job: Job, copied: int) -> list[str]:
    """Names of the parts in their order; loss and optimizer are copies of as many bytes."""
    order = list[str]()
    made = products(job)
    layers = job.shape.layers if device().type == "cuda" else 1
    copies = max(round(_bytes_of_a_layer(job) / (2 * copied)), 1)
    for layer in range(layers):
        order += [
            *(product.key for product in made if layer < product.count),
            FORWARD,
            BACKWARD,
            *[COPY] * copies,
        ]
    beside = loss_bytes(job) * job.tokens + job.optimizer_bytes * job.trained_parameters
    return order + [COPY] * (round(beside / (2 * copied)) if layers == job.shape.layers else 0)


def seconds_of(parts: Parts, order: Sequence[str]) -> dict[str, float]:
    """Median seconds of each part.

    A mark between two parts takes time itself. On a card each measured step is therefore followed
    by one without marks, and the difference is subtracted, the same amount from each part.
    """
    found = defaultdict[str, list[float]](list)
    whole = list[float]()
    on_card = device().type == "cuda"
    square = torch.randn(SIDE if on_card else 0, SIDE, device=device(), dtype=torch.float16)
    warm_up, measured = (WARM_UP, MEASURED) if on_card else (1, 1)
    leading = LEAD if on_card else 0
    for number in range(warm_up + measured):
        lead, spans, queued = _step(parts, order, square, leading)
        if on_card and number == 1:  # the first step compiles
            leading = _leading(queued, sum(spans), lead / leading)
        if number >= warm_up:
            if on_card:
                whole += _step(parts, order, square, leading, marked=False)[1]
            for name, span in zip(order, spans):
                found[name].append(span)
    medians = {name: statistics.median(spans) for name, spans in found.items()}
    return _without_marks(medians, order, statistics.median(whole)) if on_card else medians


def _without_marks(
    medians: Mapping[str, float], order: Sequence[str], whole: float
) -> dict[str, float]:
    """Seconds of each part without its mark, where a step without marks takes ``whole``; at
    least half of what was measured.
    """
    mark = max(sum(medians[name] for name in order) - whole, 0.0) / len(order)
    return {name: max(span - mark, span / 2) for name, span in medians.items()}


def _step(
    parts: Parts, order: Sequence[str], square: torch.Tensor, leading: int, marked: bool = True
) -> tuple[float, list[float], float]:
    """Seconds of the lead; of each part, or of all together if not ``marked``; and of the host
    queueing them.
    """
    clock = Clock()
    clock.mark()
    for _ in range(leading):
        square @ square
    clock.mark()
    begun = time.perf_counter()
    for name in order:
        parts[name]()
        if marked:
            clock.mark()
    queued = time.perf_counter() - begun
    if not marked:
        clock.mark()
    lead, *spans = clock.seconds()
    return lead, spans, queued


def _leading(queued: float, step: float, square: float) -> int:
    """How many squares of ``square`` seconds each come before a step; more if the host needs
    half the step's time to queue it."""
    return LEAD if queued < step / 2 else max(LEAD, math.ceil(queued / square))


def aligned(rows: int) -> int:
    """The nearest multiple of ``ALIGNED`` rows, at which products are measured and then scaled.

    A step of ragged documents has any number of tokens; packs have a multiple.
    """
    return max(round(rows / ALIGNED), 1) * ALIGNED if rows > ALIGNED else rows


def _products(job: Job, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """The step's products, in the layouts of linear layers; those of one shape share operands.

    The gradient that reaches the head is drawn positive, like probabilities: a card multiplies
        numbers of one sign with less
    power, and faster, than numbers of both signs.
    """
    operands: dict[tuple[int, int, int], list[torch.Tensor]] = {}
    return {product.key: _product(product, dtype, operands) for product in products(job)}


def _product(
    product: Product, dtype: torch.dtype, operands: dict[tuple[int, int, int], list[torch.Tensor]]
) -> Callable[[], Any]:
    shape = rows, inputs, outputs = aligned(product.rows), product.inputs, product.outputs
    if shape not in operands:
        sizes = (rows, inputs), (rows, outputs), (outputs, inputs)
        operands[shape] = [torch.randn(*size, device=device(), dtype=dtype) for size in sizes]
        if product.name == "head":
            operands[shape][1].exp_()
    x, upstream, weight = operands[shape]
    return {
        "forward": lambda: x @ weight.t(),
        "dX": lambda: upstream @ weight,
        "dW": lambda: upstream.t() @ x,
    }[product.kind]


def _copy(size: int) -> Callable[[], Any]:
    source = torch.randint(0, 255, (size,), device=device(), dtype=torch.uint8)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _attention(
    job: Job, lengths: Sequence[int], dtype: torch.dtype
) -> dict[str, Callable[[], Any]]:
    """Attention of one layer over documents of these lengths, by the backend that training
    chooses.
    """
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device(), torch.int32)
    q, k, v = (
        torch.randn(
            sum(lengths),
            heads,
            job.shape.head_dim,
            device=device(),
            dtype=dtype,
            requires_grad=True,
        )
        for heads in (job.shape.heads, job.shape.kv_heads, job.shape.kv_heads)
    )
    out = document_attention(q, k, v, bounds, max(lengths))
    upstream = torch.randn_like(out)

    def forward() -> None:
        with torch.no_grad():
            document_attention(q, k, v, bounds, max(lengths))

    return {
        FORWARD: forward,
        BACKWARD: lambda: torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True),
    }


def _attention_rates(
    job: Job, lengths: Sequence[int], dtype: torch.dtype, seconds: Mapping[str, float]
) -> dict[str, Any]:
    scale = job.tokens / sum(lengths)
    flops = 2 * job.shape.q * sum(length * (length + 1) for length in lengths)
    return {
        "backend": choose_backend(device(), dtype, job.shape.head_dim),
        "forward_seconds": seconds[FORWARD] * scale,
        "backward_seconds": seconds[BACKWARD] * scale,
        "forward_flops_per_second": flops / seconds[FORWARD],
        "backward_flops_per_second": 2.5 * flops / seconds[BACKWARD],
    }
