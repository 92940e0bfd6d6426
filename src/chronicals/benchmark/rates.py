"""Rates of this machine at the step's own shapes, on random data.

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
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from chronicals.attention import choose_backend, document_attention
from chronicals.benchmark.floor import reference_step
from chronicals.benchmark.measurement import Clock, device
from chronicals.benchmark.work import Work
from chronicals.step_work import (
    Job,
    Product,
    dequantised_bytes,
    elementwise_bytes,
    loss_bytes,
    products,
)

# Steps on a card. On a CPU, whose clock changes less, it is one of each, of a single layer.
WARM_UP_STEPS = 4
MEASURED_STEPS = 3

# Before a step the card multiplies square matrices, for 12 ms or longer for a slow host, so that
# the host queues the step ahead of the card.
LEADING_PRODUCTS = 8
LEADING_WIDTH = 8192

SMALLEST_COPY = 2**24
LARGEST_COPY = 2**31

FORWARD = "attention forward"
BACKWARD = "attention backward"
COPY = "copy"

ROW_MULTIPLE = 128

PartRunners = Mapping[str, Callable[[], Any]]
"""Parts of a step by name, each run by a call."""


def measure_rates(work: Work) -> dict[str, Any]:
    """Measure everything that the row's reference step needs, and return it with that step.

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
    seconds, size = timed_step(job, lengths, dtype)
    by_shape = {
        product.key: {
            "seconds": seconds[product.key],
            "flops_per_second": product.flops / seconds[product.key],
        }
        for product in products(job)
    }
    flops = 2 * job.shape.q * sum(length * (length + 1) for length in lengths)
    scale = job.tokens / sum(lengths)  # lengths are those of one step, tokens of a mean one
    attention = {
        "backend": choose_backend(device(), dtype, job.shape.head_dim),
        "forward_seconds": seconds[FORWARD] * scale,
        "backward_seconds": seconds[BACKWARD] * scale,
        "forward_flops_per_second": flops / seconds[FORWARD],
        # Five products backward, where there are two forward.
        "backward_flops_per_second": 2.5 * flops / seconds[BACKWARD],
    }
    copy = 2 * size / seconds[COPY]
    whole = reference_step(
        job,
        copy,
        lambda product: by_shape[product.key]["seconds"],
        attention["forward_seconds"] + attention["backward_seconds"],
    )
    return {
        "machine": described_machine(),
        "copy_bytes_per_second": copy,
        "products": by_shape,
        "attention": attention,
        "floor": asdict(whole),
    }


def timed_step(
    job: Job, lengths: Sequence[int], dtype: torch.dtype
) -> tuple[dict[str, float], int]:
    """Run the parts of a step for a few steps, and return the seconds of each by name.

    Args:
        job: sizes of the step.
        lengths: of its documents.
        dtype: of its products.

    Returns:
        seconds of products (by ``Product.key``), of attention in one layer and of a copy; and the
        bytes that a copy reads.
    """
    # Products have the layouts of linear layers; those of one shape share operands.
    operands: dict[tuple[int, int, int], list[torch.Tensor]] = {}
    parts: dict[str, Callable[[], Any]] = {
        product.key: _product(product, dtype, operands) for product in products(job)
    }
    parts |= _attention(job, lengths, dtype)
    size = copied_bytes(job)
    source = torch.randint(0, 255, (size,), device=device(), dtype=torch.uint8)
    target = torch.empty_like(source)
    parts[COPY] = partial(target.copy_, source)
    seconds = seconds_of(parts, order_of_a_step(job, size))
    ratios = {product.key: product.rows / aligned(product.rows) for product in products(job)}
    return {name: span * ratios.get(name, 1.0) for name, span in seconds.items()}, size


def described_machine() -> dict[str, str | float | int]:
    """Describe the card, or the CPU."""
    if device().type == "cuda":
        card = torch.cuda.get_device_properties(0)
        return {
            "card": card.name,
            "memory_gib": round(card.total_memory / 2**30, 1),
            "cuda": str(torch.version.cuda),
        }
    return {"card": f"CPU, {torch.get_num_threads()} threads"}


def copied_bytes(job: Job) -> int:
    """Return the bytes of one copy.

    It reads and writes as much as the elementwise operations of a layer, within limits.
    """
    largest = LARGEST_COPY if device().type == "cuda" else SMALLEST_COPY
    in_all = elementwise_bytes(job.shape) * job.tokens + dequantised_bytes(job)
    return min(max(int(in_all / job.shape.layers) // 2, SMALLEST_COPY), largest)


def order_of_a_step(job: Job, copied: int) -> list[str]:
    """Return the names of a step's parts in their order.

    Loss and optimizer are copies of as many bytes.
    """
    order = list[str]()
    step_products = products(job)
    layers = job.shape.layers if device().type == "cuda" else 1
    in_all = elementwise_bytes(job.shape) * job.tokens + dequantised_bytes(job)
    copies = max(round(in_all / job.shape.layers / (2 * copied)), 1)
    for layer in range(layers):
        order += [
            *(product.key for product in step_products if layer < product.count),
            FORWARD,
            BACKWARD,
            *[COPY] * copies,
        ]
    beside = loss_bytes(job) * job.tokens + job.optimizer_bytes * job.trained_parameters
    return order + [COPY] * (round(beside / (2 * copied)) if layers == job.shape.layers else 0)


def seconds_of(parts: PartRunners, order: Sequence[str]) -> dict[str, float]:
    """Return the median seconds of each part.

    A mark between two parts takes time itself. On a card each measured step is therefore followed
    by one without marks, and the difference is subtracted, the same amount from each part.
    """
    samples = defaultdict[str, list[float]](list)
    whole = list[float]()
    on_card = device().type == "cuda"
    warm_up = WARM_UP_STEPS if on_card else 1
    measured = MEASURED_STEPS if on_card else 1
    leading = LEADING_PRODUCTS if on_card else 0
    rows = LEADING_WIDTH if on_card else 0
    square = torch.randn(rows, LEADING_WIDTH, device=device(), dtype=torch.float16)
    for number in range(warm_up + measured):
        lead, spans, queued = _step(parts, order, square, leading)
        if on_card and number == 1:  # the first step compiles
            leading = _leading(queued, sum(spans), lead / leading)
        if number >= warm_up:
            if on_card:
                whole += _step(parts, order, square, leading, marked=False)[1]
            for name, span in zip(order, spans):
                samples[name].append(span)
    medians = {name: statistics.median(spans) for name, spans in samples.items()}
    return _without_marks(medians, order, statistics.median(whole)) if on_card else medians


def _without_marks(
    medians: Mapping[str, float], order: Sequence[str], whole: float
) -> dict[str, float]:
    """Return the seconds of each part without its mark, and at least half of what was measured.

    Args:
        medians: measured seconds of each part.
        order: names of the parts of a step.
        whole: seconds of a step without marks.
    """
    mark = max(sum(medians[name] for name in order) - whole, 0.0) / len(order)
    return {name: max(span - mark, span / 2) for name, span in medians.items()}


def _step(
    parts: PartRunners,
    order: Sequence[str],
    square: torch.Tensor,
    leading: int,
    marked: bool = True,
) -> tuple[float, list[float], float]:
    """Run a step.

    Returns:
        seconds of the leading products; of each part, or of all together if not ``marked``; and of
        the host queueing them.
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
    """Return the number of leading products.

    There are more if the host needs half the step's time to queue it.

    Args:
        queued: seconds in which the host queues a step.
        step: seconds of the step.
        square: seconds of a leading product.
    """
    if queued < step / 2:
        return LEADING_PRODUCTS
    return max(LEADING_PRODUCTS, math.ceil(queued / square))


def aligned(rows: int) -> int:
    """Return the nearest multiple of ``ROW_MULTIPLE`` rows.

    Products are measured at it, and then scaled.

    A step of ragged documents has any number of tokens; packs have a multiple.
    """
    return max(round(rows / ROW_MULTIPLE), 1) * ROW_MULTIPLE if rows > ROW_MULTIPLE else rows


def _product(
    product: Product, dtype: torch.dtype, operands: dict[tuple[int, int, int], list[torch.Tensor]]
) -> Callable[[], Any]:
    rows = aligned(product.rows)
    inputs = product.inputs
    outputs = product.outputs
    shape = (rows, inputs, outputs)
    if shape not in operands:
        sizes = (rows, inputs), (rows, outputs), (outputs, inputs)
        operands[shape] = [torch.randn(*size, device=device(), dtype=dtype) for size in sizes]
        if product.name == "head":
            # Its gradient is positive, like probabilities: a card multiplies numbers of one sign
            # with less power, and faster, than numbers of both signs.
            operands[shape][1].exp_()
    x, upstream, weight = operands[shape]
    return {
        "forward": lambda: x @ weight.t(),
        "dX": lambda: upstream @ weight,
        "dW": lambda: upstream.t() @ x,
    }[product.kind]


def _attention(
    job: Job, lengths: Sequence[int], dtype: torch.dtype
) -> dict[str, Callable[[], Any]]:
    """Return attention of one layer over documents of these lengths.

    It runs by the backend that training chooses.
    """

    def random(heads: int) -> torch.Tensor:
        size = (sum(lengths), heads, job.shape.head_dim)
        return torch.randn(*size, device=device(), dtype=dtype, requires_grad=True)

    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device(), torch.int32)
    q = random(job.shape.heads)
    k = random(job.shape.kv_heads)
    v = random(job.shape.kv_heads)
    out = document_attention(q, k, v, bounds, max(lengths))
    upstream = torch.randn_like(out)

    def forward() -> None:
        with torch.no_grad():
            document_attention(q, k, v, bounds, max(lengths))

    return {
        FORWARD: forward,
        BACKWARD: lambda: torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True),
    }
