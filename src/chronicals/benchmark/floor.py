"""MFU and the reference step that a training step is compared with.

The reference step is ``floor`` in the result files. Its products and bytes are those of
``chronicals.step_work``, whose legend is used here.

Recomputation and padding do not count. The products of experts are timed as one product over the
k·T rows of all experts, so the reference has no cost of routing. The reference step has five parts:
its products, attention by the best backend, and the bytes of elementwise operations (dequantising
is one), loss and optimizer at the copy bandwidth. Each part counts with the best time seen for it,
by itself or in our own step (``best_seen``). Both times were achieved, so neither is a lower bound:
another kernel may be faster. Because the times of our own step are among them, our step never
exceeds 100 % of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from chronicals.step_work import (
    Job,
    Product,
    dequantised_bytes,
    elementwise_bytes,
    loss_bytes,
    needed_flops,
    products,
)

PEAK_FLOPS = {"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Specified FLOP/s of dense bf16 products. The first key that occurs in the card's name counts."""


def mfu(job: Job, tokens_per_second: float, card: str) -> float | None:
    """Return the needed FLOPs over the card's specified FLOPs; None if either is unknown."""
    peak = next((peak for name, peak in PEAK_FLOPS.items() if name in card), None)
    if peak is None or job.why_uncounted:
        return None
    return needed_flops(job) * tokens_per_second / peak


STEP_PARTS = ("products", "attention", "elementwise", "loss", "optimizer")
"""The parts of a reference step; a profile has kernels of the same categories."""


@dataclass(frozen=True)
class ReferenceStep:
    """Seconds of each part of a step, as measured; not a bound.

    Attributes:
        tokens: real tokens of the step.
        seconds: of all parts.
        tokens_per_second: real tokens of a second.
    """

    products: float
    attention: float
    elementwise: float
    loss: float
    optimizer: float
    tokens: int
    seconds: float = field(init=False)
    tokens_per_second: float = field(init=False)

    def __post_init__(self) -> None:
        seconds = self.products + self.attention + self.elementwise + self.loss + self.optimizer
        object.__setattr__(self, "seconds", seconds)
        object.__setattr__(self, "tokens_per_second", self.tokens / seconds)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ReferenceStep:
        """Return the step that a result file has, as ``asdict`` wrote it."""
        return cls(**{part.name: values[part.name] for part in fields(cls) if part.init})

    def best_seen(self, profile: Mapping[str, float], step_seconds: float) -> ReferenceStep:
        """Return this step with each part at most as long as in a traced step.

        So it takes no longer than that step.

        A card that regulates its power multiplies faster in some steps than in those that
        ``measure_rates`` runs.

        Args:
            profile: seconds of the traced step by category of kernels, gaps included.
            step_seconds: seconds of a step without tracing. If the traced one took longer, its
                times are scaled down to it.
        """
        scale = min(step_seconds / sum(profile.values()), 1.0)
        shortest = {
            part: min(getattr(self, part), scale * profile.get(part, math.inf))
            for part in STEP_PARTS
        }
        return replace(self, **shortest)


def reference_step(
    job: Job,
    copy_rate: float,
    product_seconds: Callable[[Product], float],
    attention_seconds: float,
) -> ReferenceStep:
    """Return the reference step from parts that were measured by themselves.

    Args:
        job: sizes of the step.
        copy_rate: bytes read and written per second by a device copy.
        product_seconds: measured time of one product.
        attention_seconds: measured time of attention, forward and backward, in one layer over the
            step's documents.
    """
    return ReferenceStep(
        products=sum(product.count * product_seconds(product) for product in products(job)),
        attention=job.shape.layers * attention_seconds,
        elementwise=(elementwise_bytes(job.shape) * job.tokens + dequantised_bytes(job))
        / copy_rate,
        loss=loss_bytes(job) * job.tokens / copy_rate,
        optimizer=job.optimizer_bytes * job.trained_parameters / copy_rate,
        tokens=job.tokens,
    )
