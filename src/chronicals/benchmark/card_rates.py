"""Rates of this machine's card for plans, measured in less than a minute.

Products, attention and copies run in the order of steps of two widths and three lengths of
documents, over adapters too, as ``benchmark.rates`` runs them for the reference step: a card
regulates its power, so the rate of a product depends on what runs around it. What a step has beside
these (elementwise kernels, dequantisation, products in FP8, copies to the host, launches) is timed
by itself.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from chronicals.attention import choose_backend
from chronicals.benchmark.measurement import Clock
from chronicals.benchmark.rates import BACKWARD, COPY, FORWARD, timed_step
from chronicals.cards import BF16, FP8, FP32
from chronicals.config import ConfigurationError
from chronicals.kernels import fused_rmsnorm, fused_swiglu
from chronicals.kernels.fp8 import fp8_quantize, lacks_fp8
from chronicals.kernels.fp8_linear import scaled_product
from chronicals.kernels.nf4 import Scales, dequantize_4bit, quantize_nf4
from chronicals.quantization import NF4
from chronicals.step_work import DecoderShape, Job, Product, products
from chronicals.versions import installed

SMALL = DecoderShape(2, 896, 14, 2, 64, 4864, 32768, 0)
LARGE = DecoderShape(2, 4096, 32, 8, 128, 14336, 32768, 0)
"""Two layers of a 0.5B and of an 8B, with a smaller head: at four times the rows of a chunk of
logits its products are as large as any.
"""

LENGTHS = (512, 2048, 8192, 32768)
"""Tokens of a document; a step has at least one."""

USUAL_LENGTH = 2048

ADAPTER_RANK = 32

BINS_PER_OCTAVE = 2
"""Points of a curve of products for each doubling of the arithmetic intensity."""

TOKENS = 16384
"""Tokens of a step, which fill a card: at half of them products of narrow models are 20 % slower."""

SPACE = 20 * 2**30
"""Bytes of a card from which steps have ``TOKENS`` tokens; on smaller ones they have half."""

LEADING = 16
"""Products before a timed call, so that the host queues it ahead of the card."""

SAMPLES = 15

TIMED_BYTES = 2**28
"""Bytes of a tensor that is timed by itself, larger than any L2 cache."""

TIMED_LAUNCHES = 200

CHAINED = 32
TIMED_CHAINS = 8
"""Norms of a chain whose launches are timed, and chains."""


def measure_card() -> dict[str, Any]:
    """Measure the rates of this machine's card, in the form of ``chronicals.planning.Rates``.

    Raises:
        ConfigurationError: there is no card.
    """
    if not torch.cuda.is_available():
        raise ConfigurationError(
            "rates: there is no card here that torch can use; run `chronicals doctor --rates` on a "
            "machine with one, or plan by --card NAME, whose rates are known"
        )
    card = torch.cuda.get_device_properties(0)
    tokens = TOKENS if card.total_memory >= SPACE else TOKENS // 2
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(False) else torch.float16
    measured = measure_steps(tokens, dtype)
    eight = fp8_curve(tokens) if not lacks_fp8(torch.device("cuda")) else []
    curves = {BF16: measured.pop("products"), FP32: fp32_curve(tokens // 4)}
    if eight:
        curves[FP8] = eight
    return {
        "card": card.name,
        "source": "measured",
        "origin": "chronicals doctor --rates",
        "versions": {
            "torch": installed("torch"),
            "triton": installed("triton"),
            "cuda": str(torch.version.cuda),
        },
        "memory": card.total_memory,
        "products": curves,
        **measured,
        "elementwise": elementwise_rate(dtype),
        "dequantise": dequantise_rate(dtype),
        "host": host_rate(),
        "launch": launch_seconds(dtype),
        "gap": gap_seconds(dtype),
        "backend": choose_backend(torch.device("cuda"), dtype, SMALL.head_dim),
    }


def measure_steps(tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    """Time products, attention and copies within steps.

    Args:
        tokens: of a step.
        dtype: of its products.

    Returns:
        ``copy``, ``products`` and ``attention`` as ``Rates`` has them.
    """
    points = []
    copies = []
    attention = []
    for shape in (SMALL, LARGE):
        for length in LENGTHS:
            if length > 2 * tokens:  # a small card
                continue
            documents = [length] * max(tokens // length, 1)
            job = Job(shape, sum(documents), length, rank=ADAPTER_RANK)
            if length == USUAL_LENGTH:
                full = Job(shape, sum(documents), length)
                seconds, size = timed_step(full, documents, dtype)
                points += _points(full, seconds)
            seconds, size = timed_step(job, documents, dtype)
            if length <= tokens:
                points += _points(job, seconds)
            copies.append(2 * size / seconds[COPY])
            flops = 2 * shape.q * sum(n * (n + 1) for n in documents)
            attention.append(
                {
                    "head_dim": shape.head_dim,
                    "length": length,
                    "forward": flops / seconds[FORWARD],
                    "backward": 2.5 * flops / seconds[BACKWARD],
                }
            )
    return {
        "copy": statistics.median(copies),
        "products": curve_of(points),
        "attention": attention,
    }


def _points(job: Job, seconds: dict[str, float]) -> list[tuple[float, float]]:
    return [
        (intensity_of(product), product.flops / seconds[product.key]) for product in products(job)
    ]


def intensity_of(product: Product) -> float:
    """Return the FLOPs of a product for each byte of its operands, in 16 bits."""
    return 1 / (1 / product.rows + 1 / product.inputs + 1 / product.outputs)


def curve_of(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the medians of points (intensity, FLOP/s) in bins of the intensity."""
    bins = defaultdict(list)
    for x, rate in points:
        bins[round(BINS_PER_OCTAVE * math.log2(x))].append((x, rate))
    return [
        (statistics.median(x for x, _ in near), statistics.median(rate for _, rate in near))
        for _, near in sorted(bins.items())
    ]


def seconds_of_call(call: Callable[[], Any]) -> float:
    """Return the median seconds of a call on the card, which is busy before it."""
    square = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    samples = []
    for number in range(SAMPLES + 3):
        clock = Clock()
        for _ in range(LEADING):
            square @ square
        clock.mark()
        call()
        clock.mark()
        if number >= 3:  # the first ones compile
            samples.append(clock.seconds()[0])
    return statistics.median(samples)


def fp8_curve(tokens: int) -> list[tuple[float, float]]:
    """Return FLOP/s of products in FP8, with a scale a tensor, by arithmetic intensity."""
    points = []
    for inputs, outputs in ((2048, 2048), (4096, 4096), (4096, 14336), (14336, 4096)):
        left, right = (
            fp8_quantize(torch.randn(*size, device="cuda", dtype=torch.bfloat16), "tensor")[0]
            for size in ((tokens, inputs), (outputs, inputs))
        )
        assert left is not None and right is not None
        seconds = seconds_of_call(partial(scaled_product, left, right, torch.bfloat16, True))
        product = Product("", "forward", tokens, inputs, outputs, 1)
        points.append((intensity_of(product), product.flops / seconds))
    return curve_of(points)


def fp32_curve(tokens: int) -> list[tuple[float, float]]:
    """Return FLOP/s of products in fp32, as torch multiplies them, by arithmetic intensity."""
    points = []
    for inputs, outputs in ((896, 4864), (4096, 4096)):
        left = torch.randn(tokens, inputs, device="cuda")
        right = torch.randn(outputs, inputs, device="cuda")
        seconds = seconds_of_call(partial(torch.matmul, left, right.t()))
        product = Product("", "forward", tokens, inputs, outputs, 1)
        points.append((intensity_of(product), product.flops / seconds))
    return curve_of(points)


def elementwise_rate(dtype: torch.dtype) -> float:
    """Return bytes a second of norms and gated units, forward and backward."""
    width = 4096
    rows = TIMED_BYTES // (2 * width)
    x, up = (
        torch.randn(rows, width, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2)
    )
    weight = torch.randn(width, device="cuda", dtype=dtype)
    upstream = torch.randn(rows, width, device="cuda", dtype=dtype)

    def norm() -> None:
        torch.autograd.grad(fused_rmsnorm(x, weight, 1e-6), x, upstream)

    def unit() -> None:
        torch.autograd.grad(fused_swiglu(x, up), (x, up), upstream)

    # tensors read and written: 2 and 3 by the norm, 3 and 5 by the unit
    return 13 * x.nbytes / (seconds_of_call(norm) + seconds_of_call(unit))


def dequantise_rate(dtype: torch.dtype) -> float:
    """Return bytes a second of the dequantisation of weights in NF4, a small and a large one."""
    moved = 0.0
    seconds = 0.0
    for rows in (4096, 14336):
        weight = torch.randn(rows, 4096, device="cuda", dtype=dtype)
        codes, absmax = quantize_nf4(weight)
        seconds += seconds_of_call(partial(dequantize_4bit, codes, Scales(absmax), weight))
        moved += weight.numel() * (NF4.bytes_a_value(weight.itemsize) + weight.itemsize)
    return moved / seconds


def host_rate() -> float:
    """Return bytes a second between pinned host memory and the card, in the slower direction."""
    there = torch.empty(TIMED_BYTES, dtype=torch.uint8, pin_memory=True)
    here = torch.empty(TIMED_BYTES, dtype=torch.uint8, device="cuda")
    ways = ((there, here), (here, there))
    return min(
        TIMED_BYTES / seconds_of_call(partial(to.copy_, from_, non_blocking=True))
        for to, from_ in ways
    )


def launch_seconds(dtype: torch.dtype) -> float:
    """Return seconds in which the host launches a kernel, with what autograd does around it.

    Of a chain of norms, forward and backward, as modules launch them one after the other.
    """
    x = torch.randn(8, 4096, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(4096, device="cuda", dtype=dtype)
    upstream = torch.randn(8, 4096, device="cuda", dtype=dtype)

    def both() -> None:
        out = x
        for _ in range(CHAINED):
            out = fused_rmsnorm(out, weight, 1e-6)
        torch.autograd.grad(out, x, upstream)

    both()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(TIMED_CHAINS):
        both()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / (2 * CHAINED * TIMED_CHAINS)


def gap_seconds(dtype: torch.dtype) -> float:
    """Return seconds of a kernel of a CUDA graph that has next to nothing to do."""
    x = torch.randn(8, 4096, device="cuda", dtype=dtype)
    weight = torch.randn(4096, device="cuda", dtype=dtype)
    fused_rmsnorm(x, weight, 1e-6)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(TIMED_LAUNCHES):
            fused_rmsnorm(x, weight, 1e-6)
    return seconds_of_call(graph.replay) / TIMED_LAUNCHES
