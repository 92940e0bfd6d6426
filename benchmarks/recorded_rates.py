"""Writes the rates of cards for plans, from the results of steps and kernels that ran on them.

    python benchmarks/recorded_rates.py [--out src/chronicals/cards/card_rates.json]

A card on which ``chronicals doctor --rates`` ran has what that measured (``rates-CARD.json``). Of each
other card of ``results/row-*.json``: the copy rate, products by arithmetic intensity and
attention as they were timed within steps; what the elementwise kernels of steps moved in their
time; dequantisation, copies to the host and gaps between kernels by the profiles of steps; products
in FP8 by ``fp8-CARD.json``; other lengths of documents by ``attention-CARD.json``. What one card has
no record of is another's: the host's launches are those of the H200's machine, and attention at
other lengths is to the measured one as on the H200. Products in fp32 are those of
``rates-h200.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers

from chronicals.benchmark.card_rates import curve_of, intensity_of
from chronicals.benchmark.shapes import SHAPES
from chronicals.cards.rates import BF16, FP8, FP32, RECORD, AttentionRate, Rates, between
from chronicals.quantization import NF4
from chronicals.standard_json import to_json
from chronicals.step_work import DecoderShape, Job, dequantised_bytes, elementwise_bytes, products

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
OUT = ROOT / "src" / "chronicals" / "cards" / "card_rates.json"

CARDS = ("h100", "h200")
OTHER = {"h100": "h200", "h200": "h100"}
"""The card whose record stands in."""

HELD_IN_16_BITS = 2


FULL_STEP = 8192
"""Tokens of a step from which its kernels fill a card; rates of smaller ones are not taken."""


def rows_of(card: str, tokens: int = FULL_STEP) -> list[dict[str, Any]]:
    """Results of rows over documents on a card, with steps of at least ``tokens``."""
    paths = sorted(RESULTS.glob(f"row-*-{card}.json"))
    results = [json.loads(path.read_text()) for path in paths]
    return [
        result
        for result in results
        if result["rates"].get("products") and result["row"]["tokens_a_step"] >= tokens
    ]


def job_of(result: dict[str, Any]) -> Job:
    """The step of a row."""
    row = result["row"]
    built_in = SHAPES[row["model"]]
    config = getattr(transformers, built_in.config_class)(**built_in.sizes)
    packed = row["fields"].get("quantization") == "nf4"
    each = NF4.bytes_a_value(HELD_IN_16_BITS) + HELD_IN_16_BITS if packed else 0.0
    return Job(
        shape=DecoderShape.of(config),
        tokens=row["tokens_a_step"],
        mean_length=row["mean_length"],
        rank=row["fields"].get("lora_rank", 0),
        labelled=row["labelled"],
        dequantised_bytes=each,
    )


def profiles(card: str, tokens: int = FULL_STEP) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Rows of a card, and the profile of our step in each."""
    for result in rows_of(card, tokens):
        yield result, result["arms"]["ours"]["profile"]


def milliseconds(profile: dict[str, Any], name: str) -> float:
    """Milliseconds a step of the kernels whose names hold ``name``."""
    return sum(k["milliseconds_a_step"] for k in profile["kernels"] if name in k["name"])


def product_curve(card: str) -> list[tuple[float, float]]:
    """FLOP/s by arithmetic intensity: medians over the products of steps.

    They were timed on random values in the order of a step; where our own step has the same
    products, all are scaled to the time that they took in it.
    """
    points = []
    for result, profile in profiles(card):
        faster = 1.0
        if is_plain(result):
            took = profile["milliseconds_a_step"]["products"] / 1e3
            faster = result["floor"]["by_itself"]["products"] / took
        for key, timed in result["rates"]["products"].items():
            sizes = [int(size) for size in key.split()[1].split("x")]
            rate = timed["flops_per_second"] * faster
            points.append((1 / sum(1 / size for size in sizes), rate))
    return curve_of(points)


def is_plain(result: dict[str, Any]) -> bool:
    """Whether our step has the products of the reference step, one after the other.

    Not so with FP8, with recomputation and with experts, whose products are grouped.
    """
    own = result["arms"]["ours"]
    routed = job_of(result).shape.routed
    return not own["fp8"] and not routed and "memory" not in result["row"]["fields"]


def fp8_curve(card: str, within: float) -> list[tuple[float, float]]:
    """The same of products in FP8 with a scale a tensor, of 8192 rows, three of each shape.

    Args:
        card: that they were timed on, by themselves.
        within: share of these rates that they have within a step.
    """
    points = defaultdict(list)
    for name, row in json.loads((RESULTS / f"fp8-{card}.json").read_text())["rows"].items():
        if not name.startswith("fp8_linear"):
            continue
        inputs, outputs = (int(word) for word in name.split() if word.isdigit())
        intensity = 1 / (1 / 8192 + 1 / inputs + 1 / outputs)
        seconds = statistics.median(row["milliseconds"]["products tensor"]) / 1e3
        points[intensity].append(within * 3 * 2 * 8192 * inputs * outputs / seconds)
    return [(x, statistics.median(rates)) for x, rates in sorted(points.items())]


def share_of_fp8(card: str, curve: Sequence[tuple[float, float]]) -> float | None:
    """Share of the rates of products in FP8 by themselves that those of a step have.

    Args:
        card: that has a row whose step has all products of its layers in FP8.
        curve: of its products in bf16, in which the head is.
    """
    alone = tuple(fp8_curve(card, within=1.0))
    for result, profile in profiles(card):
        if result["arms"]["ours"]["fp8"] and not result["row"]["fields"].get("use_lora"):
            seconds = {"head": 0.0, "layers": 0.0}
            for product in products(job_of(result)):
                rates, part = (
                    (tuple(curve), "head") if product.name == "head" else (alone, "layers")
                )
                rate = between(rates, intensity_of(product))
                seconds[part] += product.count * product.flops / rate
            took = profile["milliseconds_a_step"]["products"] / 1e3
            return seconds["layers"] / (took - seconds["head"])
    return None


def within_steps(card: str) -> list[AttentionRate]:
    """Rates of attention within steps, at the lengths of their documents."""
    found = defaultdict(list)
    for result in rows_of(card):
        timed = result["rates"]["attention"]
        key = job_of(result).shape.head_dim, round(result["row"]["mean_length"])
        rates = timed["forward_flops_per_second"], timed["backward_flops_per_second"]
        found[key].append(rates)
    return [
        AttentionRate(width, length, *(statistics.median(each) for each in zip(*rates)))
        for (width, length), rates in sorted(found.items())
    ]


def attention_rates(card: str) -> list[AttentionRate]:
    """Those within steps; at other lengths, in proportion to those measured by themselves."""
    inside = within_steps(card)
    cases = json.loads((RESULTS / "attention-h200.json").read_text())["cases"]
    alone = {}
    for name, case in cases.items():
        heads, batch = name.split()[1:]
        if "x" in batch:
            measured = case["backends"][case["chosen"]]["tflops"]
            alone[int(heads.split("x")[1]), int(batch.split("x")[1])] = measured
    rates = list(inside)
    for (width, length), measured in alone.items():
        at = next((one for one in inside if (one.head_dim, one.length) == (width, 2048)), None)
        if at is not None and length != 2048:
            forward, backward = (
                measured[name] / alone[width, 2048][name] for name in ("forward", "backward")
            )
            rates.append(AttentionRate(width, length, at.forward * forward, at.backward * backward))
    return sorted(rates, key=lambda one: (one.head_dim, one.length))


def elementwise(card: str) -> float:
    """Bytes a second of elementwise kernels in steps that neither dequantise nor recompute."""
    rates = []
    for result, profile in profiles(card):
        job = job_of(result)
        plain = not job.dequantised_bytes and not result["arms"]["ours"]["fp8"]
        if plain and not job.shape.routed:
            seconds = profile["milliseconds_a_step"]["elementwise"] / 1e3
            rates.append(elementwise_bytes(job.shape) * job.tokens / seconds)
    return statistics.median(rates)


def dequantise(card: str) -> float | None:
    """Share of the copy rate that dequantisation has in steps over a dense base in NF4."""
    rates = []
    for result, profile in profiles(card):
        job = job_of(result)
        seconds = milliseconds(profile, "_dequantize") / 1e3
        if seconds and not job.shape.routed:
            moved = dequantised_bytes(job) / seconds
            rates.append(moved / result["rates"]["copy_bytes_per_second"])
    return statistics.median(rates) if rates else None


def host(card: str) -> float | None:
    """Bytes a second of the inputs of recomputed layers on their way to host memory and back."""
    for result, profile in profiles(card):
        if "offload_activations" in result["row"]["fields"].get("memory", []):
            job = job_of(result)
            size = HELD_IN_16_BITS * job.tokens * job.shape.width
            out = [k for k in profile["kernels"] if "Memcpy DtoH (Device -> Pinned)" in k["name"]]
            calls = sum(k["calls_a_step"] for k in out)
            return 1e3 * size * calls / sum(k["milliseconds_a_step"] for k in out)
    return None


def launch(card: str) -> float | None:
    """Seconds of a launch, of a step without CUDA graphs that waits for the host."""
    for result, profile in profiles(card, tokens=0):
        slow = result["arms"].get("ours use_cuda_graphs=False")
        if slow:
            kernels = sum(k["calls_a_step"] for k in profile["kernels"])
            rate = slow["tokens_per_second"]["median"]
            return result["row"]["tokens_a_step"] / rate / kernels
    return None


def gap(card: str) -> float:
    """Seconds between two kernels of a step that is replayed."""
    gaps = []
    for _, profile in profiles(card):
        kernels = sum(k["calls_a_step"] for k in profile["kernels"])
        gaps.append(profile["milliseconds_a_step"].get("gaps", 0.0) / 1e3 / kernels)
    return statistics.median(gaps)


def rates(card: str) -> Rates:
    """All of a card."""
    results = rows_of(card)
    newest = results[-1]
    # both cards have the same units for fp32
    measured = json.loads((RESULTS / "rates-h200.json").read_text())
    other = OTHER[card]
    curve = tuple(product_curve(card))
    within = share_of_fp8(card, curve) or share_of_fp8(other, product_curve(other))
    copy = statistics.median(result["rates"]["copy_bytes_per_second"] for result in results)
    return Rates(
        card=newest["machine"]["card"],
        source=RECORD,
        origin=f"benchmarks/results/*-{card}.json",
        versions={
            "torch": newest["versions"]["torch"],
            "triton": newest["versions"]["triton"],
            "cuda": newest["machine"]["cuda"],
        },
        memory=round(newest["machine"]["memory_gib"] * 2**30),
        copy=copy,
        elementwise=elementwise(card),
        dequantise=copy * (dequantise(card) or dequantise(other) or 0.0),
        products={
            BF16: curve,
            FP8: tuple(fp8_curve(card, within or 1.0)),
            FP32: tuple((x, rate) for x, rate in measured["products"][FP32]),
        },
        attention=tuple(attention_rates(card)),
        host=host(card) or host(other) or 0.0,
        launch=launch(card) or launch(other) or 0.0,
        gap=gap(card),
        backend=newest["rates"]["attention"]["backend"],
    )


def measured_rates(card: str) -> Rates | None:
    """Rates that ``chronicals doctor --rates`` measured on a card; None without such a result."""
    path = RESULTS / f"rates-{card}.json"
    if not path.exists():
        return None
    values = json.loads(path.read_text())
    del values["seconds"]
    origin = f"{values['origin']}, benchmarks/results/{path.name}"
    return Rates.from_dict({**values, "origin": origin})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    given.out.write_text(
        to_json([asdict(measured_rates(card) or rates(card)) for card in CARDS], indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
