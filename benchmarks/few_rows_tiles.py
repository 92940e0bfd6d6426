"""Tiles of ``few_rows_product`` on a card: each product of a 0.5B's or a larger layer by many launches.

    python benchmarks/few_rows_tiles.py OUT.json [--model 0.5b] [--rows 64] [--seconds 120]
    python benchmarks/few_rows_tiles.py OUT.json --tiny      # in the interpreter, without a card

A sample is a CUDA graph of one launch for each of as many weights as the L2 cache cannot hold, so
kernels follow each other as in a decode step; printed are microseconds a launch, beside cuBLAS's
product alone. What is chosen by itself has a star. Then attention of one token of each sequence to its pages,
by the number of splits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.kernels.few_rows_product import (
    FewRowsTile,
    RowNorm,
    few_rows_product,
    few_rows_sum,
    few_rows_tile,
)
from chronicals.kernels.paged_attention import paged_attention

COLD_BYTES = 256 << 20
"""Bytes of the weights of a sample: five times the L2 cache of an H200."""

SAMPLES = 7

HEADS = {"tiny": (4, 2, 16), "0.5b": (14, 2, 64), "1.5b": (12, 2, 128), "8b": (32, 8, 128)}
"""Query heads, key heads and their width."""

PAGE = 16
SPLITS = (None, 1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Product:
    """A product of a layer.

    Attributes:
        outputs, columns: N and K.
        activation: that of a gated unit, or None.
        adds: whether the product is added to a residual.
    """

    outputs: int
    columns: int
    activation: str | None = None
    adds: bool = False


MODELS = {
    "tiny": {
        "first": Product(48, 64),
        "out": Product(32, 64, adds=True),
        "gates": Product(128, 64, "silu"),
    },
    "0.5b": {
        "first": Product(1152, 896),
        "out": Product(896, 896, adds=True),
        "gates": Product(9728, 896, "silu"),
        "down": Product(896, 4864, adds=True),
    },
    "1.5b": {
        "first": Product(2048, 1536),
        "out": Product(1536, 1536, adds=True),
        "gates": Product(17920, 1536, "silu"),
        "down": Product(1536, 8960, adds=True),
    },
    "8b": {
        "first": Product(6144, 4096),
        "out": Product(4096, 4096, adds=True),
        "gates": Product(28672, 4096, "silu"),
        "down": Product(4096, 14336, adds=True),
    },
}


def inputs(product: Product, rows: int, device: str) -> tuple[Tensor, Tensor, RowNorm]:
    """Return rows, residual and norm of a product."""
    x = torch.randn(rows, product.columns, device=device)
    residual = torch.randn(rows, product.outputs, device=device)
    weight = torch.ones(product.columns, device=device).bfloat16()
    squares = torch.rand(14, rows, device=device) * product.columns
    norm = RowNorm(squares, weight, 1e-6)
    return (x.bfloat16() if product.adds else x), residual, norm


def launched(product: Product, x: Tensor, residual: Tensor, norm: RowNorm, tile: Any) -> Callable:
    """Return a function of a weight that launches the product."""
    if product.adds:
        return lambda weight: few_rows_sum(x, weight, residual, tile=tile)
    return lambda weight: few_rows_product(
        x, weight, norm=norm, activation=product.activation, tile=tile
    )


def tiles(chosen: FewRowsTile, product: Product) -> Iterator[FewRowsTile]:
    """Yield the chosen launch, and others around it."""
    yield chosen
    splits = (1,) if product.activation else (1, 2, 4, 8)
    for outputs, split, columns in itertools.product((16, 32, 64), splits, (64, 128)):
        if product.columns // split >= 128:
            yield replace(chosen, outputs=outputs, splits=split, columns=columns)
    for warps, stages in ((8, 3), (4, 2), (4, 4)):
        yield replace(chosen, warps=warps, stages=stages)


def microseconds(call: Callable[[Tensor], object], weights: list[Tensor]) -> float:
    """Return the median time of a launch within a graph, or of one in the interpreter."""
    if not weights[0].is_cuda:
        begun = time.perf_counter()
        call(weights[0])
        return (time.perf_counter() - begun) * 1e6
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call(weights[0])
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for weight in weights:
            call(weight)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = list[float]()
    for _ in range(SAMPLES):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(weights))
    return statistics.median(times)


def measured(product: Product, rows: int, device: str, end: float) -> dict[str, Any]:
    """Return the times of a product by each launch, until a time of ``time.monotonic``."""
    size = 2 * product.outputs * product.columns
    count = 1 if device == "cpu" else max(2, COLD_BYTES // size)
    shape = product.outputs, product.columns
    weights = [torch.randn(shape, device=device).bfloat16() * 0.02 for _ in range(count)]
    x, residual, norm = inputs(product, rows, device)
    chosen = few_rows_tile(x, product.outputs, product.activation)
    cublas = microseconds(partial(F.linear, x.bfloat16()), weights)
    found = list[dict[str, Any]]()
    for tile in tiles(chosen, product):
        if found and time.monotonic() > end:
            break
        call = launched(product, x, residual, norm, tile)
        try:
            spent = microseconds(call, weights)
        except RuntimeError as error:  # of a launch that takes too much of the card
            found.append({**asdict(tile), "error": str(error)[:80]})
            continue
        found.append({**asdict(tile), "microseconds": spent})
    return {"rows": rows, "bytes": size, "cublas": cublas, "tiles": found}


def attention_by_splits(model: str, rows: int, keys: int, device: str) -> dict[str, float]:
    """Return the microseconds of attention to so many keys of each sequence, by splits."""
    heads, key_heads, width = HEADS[model]
    pages = keys // PAGE
    count = 1 if device == "cpu" else 8
    caches = [
        torch.randn(2, rows * pages, PAGE, key_heads, width, device=device).bfloat16()
        for _ in range(count)
    ]
    table = torch.randperm(rows * pages, device=device).view(rows, pages)
    lengths = torch.full((rows,), keys, device=device)
    q = torch.randn(rows, heads, width, device=device).bfloat16()
    found = dict[str, float]()
    for splits in SPLITS:

        def attend(cache: Tensor, splits: int | None = splits) -> Tensor:
            k, v = cache
            return paged_attention(q, k, v, table, lengths, scale=width**-0.5, splits=splits)

        found[str(splits)] = microseconds(attend, caches)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default="0.5b", choices=list(MODELS))
    parser.add_argument("--rows", type=int, nargs="*", default=[64])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--keys", type=int, nargs="*", default=[256, 512, 768])
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    device = "cpu" if given.tiny else "cuda"
    products = MODELS["tiny" if given.tiny else given.model]
    share = given.seconds / len(products) / len(given.rows)
    results: dict[str, Any] = {"model": given.model, "products": {}}
    for rows, (name, product) in itertools.product(given.rows, products.items()):
        found = measured(product, rows, device, time.monotonic() + share)
        results["products"][f"{name}, {rows} rows"] = found
        given.output.write_text(json.dumps(results, indent=1))
        print(f"{name}, {rows} rows: cuBLAS {found['cublas']:.2f} us")
        timed = [one for one in found["tiles"] if "microseconds" in one]
        chosen = found["tiles"][0]
        for one in [*sorted(timed, key=lambda one: one["microseconds"])[:8], chosen]:
            print("*" if one is chosen else " ", one)
    model = "tiny" if given.tiny else given.model
    for rows, keys in itertools.product(given.rows, given.keys):
        times = attention_by_splits(model, rows, keys, device)
        results["products"][f"attention, {rows} rows, {keys} keys"] = times
        given.output.write_text(json.dumps(results, indent=1))
        print(f"attention, {rows} rows, {keys} keys:", {n: round(t, 2) for n, t in times.items()})


if __name__ == "__main__":
    main()
