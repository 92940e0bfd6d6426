"""Rates of this machine at the step's own shapes, on random data: copies, matrix products, attention."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from chronicals.attention import choose_backend, document_attention
from chronicals.benchmark.floor import Job, Product, floor, products
from chronicals.benchmark.measurement import device
from chronicals.benchmark.work import Work

REPEATS, WARM_UP = 15, 100
"""Samples of a measurement on a card, and how often it does a step's kind of work before the first."""

WORK_SIDE, WORK_BYTES = 8192, 2**31
"""What it does before each: two random squares of this side are multiplied, and so many bytes overwritten, some 2 ms. A card
regulates its power, so products of a card that has rested are faster than those of a step, which does little else. No cache
holds anything of the operands afterwards, and what is measured has been launched by the time that the card comes to it."""

ALIGNED = 128


def measure_rates(work: Work) -> dict[str, Any]:
    """Everything the floor of the row's step needs, and the floor itself.

    Returns:
        ``machine``: the card; ``copy_bytes_per_second``; ``products``: seconds and FLOP/s by shape; ``attention``:
        backend, seconds and FLOP/s of one layer, forward and backward; ``floor``: seconds of the step by part.
    """
    job, config = work.job(), work.config()
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[config.mixed_precision]
    if device().type == "cuda":
        work_like_a_step = _step_work()
        for _ in range(WARM_UP):
            work_like_a_step()
    copy = copy_rate()
    by_shape: dict[str, dict[str, float]] = {}
    for product in products(job):
        if product.key not in by_shape:
            seconds = product_seconds(product, kind)
            by_shape[product.key] = {"seconds": seconds, "flops_per_second": product.flops / seconds}
    attention = attention_rates(work, job, kind)
    parts = floor(
        job, copy, lambda product: by_shape[product.key]["seconds"],
        attention["forward_seconds"] + attention["backward_seconds"],
    )  # fmt: skip
    return {
        "machine": machine(),
        "copy_bytes_per_second": copy,
        "products": by_shape,
        "attention": attention,
        "floor": parts.to_dict(),
    }


def machine() -> dict[str, str | float | int]:
    """The card, or the processor."""
    if device().type == "cuda":
        card = torch.cuda.get_device_properties(0)
        return {"card": card.name, "memory_gib": round(card.total_memory / 2**30, 1), "cuda": str(torch.version.cuda)}
    return {"card": f"CPU, {torch.get_num_threads()} threads"}


def median_seconds(function: Callable[[], Any]) -> float:
    """Of a call: on a card its own, with a cold cache and no wait for the host, elsewhere the median of a few."""
    if device().type == "cuda":
        return _card_seconds(function)
    samples = []
    for _ in range(4):
        began = time.perf_counter()
        function()
        samples.append(time.perf_counter() - began)
    return statistics.median(samples[1:])


def _card_seconds(function: Callable[[], Any]) -> float:
    work = _step_work()
    function()
    spans = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        work()
        start.record()
        function()
        end.record()
        spans.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in spans) / 1000


def _step_work() -> Callable[[], None]:
    """What keeps the card as busy as a step does, to be called again and again."""
    square = torch.randn(WORK_SIDE, WORK_SIDE, device=device(), dtype=torch.float16)
    made, scratch = torch.empty_like(square), torch.empty(WORK_BYTES, device=device(), dtype=torch.uint8)

    def work() -> None:
        torch.mm(square, square, out=made)
        scratch.zero_()

    return work


def copy_rate() -> float:
    """Bytes read and written per second by a device copy that no cache holds."""
    size = 2**31 if device().type == "cuda" else 2**24
    source = torch.randint(0, 255, (size,), device=device(), dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source))


def product_seconds(product: Product, kind: torch.dtype) -> float:
    """Time of one product in the layout that a linear layer gives it.

    A step of ragged documents has any number of tokens; it is measured at the nearest multiple of ``ALIGNED`` rows, as
    packs have it, and scaled.
    """
    rows = max(round(product.rows / ALIGNED), 1) * ALIGNED if product.rows > ALIGNED else product.rows
    x, upstream, weight = (
        torch.randn(*sizes, device=device(), dtype=kind)
        for sizes in ((rows, product.inputs), (rows, product.outputs), (product.outputs, product.inputs))
    )
    run = {"forward": lambda: x @ weight.t(), "dX": lambda: upstream @ weight, "dW": lambda: upstream.t() @ x}[product.kind]
    return median_seconds(run) * product.rows / rows


def attention_rates(work: Work, job: Job, kind: torch.dtype) -> dict[str, Any]:
    """One layer's attention over the documents of the first step after the warm-up, by the backend training chooses."""
    lengths = [len(document) for document in list(work.documents_by_step(work.warm_up + 1))[-1]]
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device(), torch.int32)
    shape, tokens = job.shape, sum(lengths)
    q, k, v = (
        torch.randn(tokens, heads, shape.head_dim, device=device(), dtype=kind, requires_grad=True)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    out = document_attention(q, k, v, bounds, max(lengths))
    upstream = torch.randn_like(out)
    with torch.no_grad():
        forward = median_seconds(lambda: document_attention(q, k, v, bounds, max(lengths)))
    backward = median_seconds(lambda: torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True))
    scale = job.tokens / tokens
    flops = 2 * shape.q * sum(length * (length + 1) for length in lengths)
    return {
        "backend": choose_backend(device(), kind, shape.head_dim),
        "forward_seconds": forward * scale,
        "backward_seconds": backward * scale,
        "forward_flops_per_second": flops / forward,
        "backward_flops_per_second": 2.5 * flops / backward,
    }
