"""Comparison of three arms: how far a run may deviate from fp32.

For each module, g is what chronicals computes (a gradient or an update), f is the same by plain
transformers in fp32, and p the same by plain transformers in the run's own dtype. Squares are
summed over the elements of the module before anything is divided.

    deviation = ‖g − f‖ / ‖f‖        allowed = max(1.5 · ‖p − f‖ / ‖f‖, floor)

**Steps.** The plain arm's deviation is that of all steps summed together. Ours is the lower of that
and the median of the single steps. A fault is in every step and raises both. A rounding that sends
a token to another expert, or a small gradient (an adapter whose B has just left zero), makes one
step an outlier and raises only one of the two. To find faults in few steps, all our steps summed
together may deviate by at most ``OUTLIERS`` times what is allowed.

**Scale.** ‖p − f‖ / ‖f‖ of one module depends on a few random roundings. The scale of a module is
therefore the largest of three: its own, the quadratic mean over its kind (the same part of every
layer), and the median of all modules. For experts and their routers it is that of the worst one in
its worst step, because chance decides in both arms which tokens, experts and steps a rounding
affects. If ‖f‖ of a module is below ``NEAR_ZERO`` of what it would have in proportion to its
elements, that value replaces ‖f‖: a gradient that is zero except for rounding (the bias of keys)
has no relative error.

**Floors** cover roundings that p does not show:

- eps of the run's dtype: two roundings of half a spacing, because g may be stored once more than p.
- ``WALK · eps32 · sqrt(ROUNDED · layers)``: f itself is rounded in fp32, by half a spacing in each
  of about ``_ROUNDED`` operations per layer (forward and backward), which add up as a random walk.
  ``WALK`` is sixteen of these halves: g − f holds two such walks, and sums over tokens cancel (up
  to five were seen).
- For an update, eps32 · ‖w‖ / ‖Δw‖, because Δw is the difference of two weights rounded in fp32.
- For an update, d + sqrt(UNCLEAR · d). d is the deviation of the module's gradient, or what is
  allowed for it if that is larger; the gradient has its own row. AdamW passes d on through its
  moments. It also divides each element of a gradient by its own size, so an element that is k
  roundings from zero changes by 1 / k. Of normally distributed elements, a share of 0.8 dk is
  within k roundings of zero. Elements below ``CLEAR`` are left out; the squares of the others add
  up to 0.8 / CLEAR roundings.

For the optimizer alone, f is what torch's AdamW makes of our gradients, and only floors are
allowed: that of a difference of two weights, and the random walk through an update, which has fewer
operations than a layer.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Size, Tensor

ALLOWED = 1.5
OUTLIERS = 4.0
NEAR_ZERO = 1e-2
WALK = 8.0  # sixteen roundings of half a spacing
_ROUNDED = 32  # operations per layer that round, forward and backward
MISSING = 0.9
"""Deviation above which a module of ours that is all zero counts as missing; 1 is all of f."""

_CHANCE = 3.0
"""Allowed deviation of a mean over documents, in standard deviations.

The standard deviation is that of the plain arm over documents.
"""

CLEAR = 4.0
"""Distance from zero at which the sign of a gradient element is reliable.

The unit is the standard deviation of its rounding error.
"""

UNCLEAR = 0.8 / CLEAR

TINY = 1e-300


def plain_name(name: str) -> str:
    """Return the name of a weight in the model without adapters; adapter matrices keep theirs."""
    return (
        name
        if ".lora_" in name
        else ".".join(part for part in name.split(".") if part != "base_layer")
    )


@dataclass(frozen=True)
class Modules:
    """The modules of a model's trained weights.

    Attributes:
        names: path of each module: that of the layer that owns the weights, ``….experts.3`` for one
            of several experts in a tensor, ``….q_proj.lora_A`` for a matrix of an adapter.
        kinds: the same without the indices of layers and experts, ``….layers.*.q_proj``; ``lora_A``
            for every adapter's A.
        routed: bool ``[M]``, True if a module belongs to a block with trained experts.
        sizes: float64 ``[M]``, number of elements.
        places: by name of a weight: the index of its first module, and the number of modules that
            share it along its first dimension.
    """

    names: list[str]
    kinds: list[str]
    routed: Tensor
    sizes: Tensor
    places: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, shapes: Mapping[str, Size]) -> Modules:
        """Group weights, given their shapes by name."""
        names: dict[str, int] = {}
        sizes: list[int] = []
        places = {}
        for weight, shape in shapes.items():
            owner, _, last = weight.rpartition(".")
            several = len(shape) == 3 and owner.rpartition(".")[2] == "experts"
            own = (
                [f"{owner}.{n}" for n in range(shape[0])]
                if several
                else [weight if last.startswith("lora_") else owner]
            )
            for name in own:
                if name not in names:
                    names[name] = len(sizes)
                    sizes.append(0)
                sizes[names[name]] += shape.numel() // len(own)
            places[weight] = (names[own[0]], len(own))
        kinds = [
            re.sub(r".*\.(?=lora_)", "", re.sub(r"\.\d+(?=\.|$)", ".*", name)) for name in names
        ]
        blocks = tuple(
            {name.partition(".experts.")[0] + "." for name in names if ".experts." in name}
        )
        routed = torch.tensor([name.startswith(blocks) for name in names])
        return cls(list(names), kinds, routed, torch.tensor(sizes, dtype=torch.float64), places)


class ReportRow(ABC):
    """A row of a report, with a measure that is compared with its limit."""

    @property
    @abstractmethod
    def ratio(self) -> float:
        """The measure over its limit; above 1 it is wrong."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON; numbers that are not finite become null."""
        values = {**vars(self), "share_of_allowed": self.ratio}
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                values[name] = None
        return values


@dataclass(frozen=True)
class Deviation(ReportRow):
    """Deviation of one module's gradient or update.

    Attributes:
        quantity: ``gradient``, ``update``, or ``optimizer``: our update compared with that of
            torch's AdamW from our gradients.
        module: its path.
        deviation: our relative Frobenius distance from fp32: the median of the steps, or that of
            all steps together if lower.
        overall, plain: distance of ours and of the plain arm, all steps summed together; the
            optimizer has no plain arm.
        allowed: the limit of ``deviation``; that of ``overall`` is ``OUTLIERS`` times as high.
        cosine, norm_ratio: between ours and fp32, all steps together.
    """

    quantity: str
    module: str
    deviation: float
    overall: float
    plain: float
    allowed: float
    cosine: float
    norm_ratio: float

    @property
    def ratio(self) -> float:
        """Deviation over its limit; above 1 the module fails. Infinite if not finite."""
        if self.missing or not math.isfinite(self.overall) or not math.isfinite(self.allowed):
            return math.inf
        return max(self.deviation, self.overall / OUTLIERS) / self.allowed

    @property
    def words(self) -> str:
        """Deviation from fp32 and its limit in words, by the figure that is the worse one."""
        if self.deviation >= self.overall / OUTLIERS:
            return f"deviates by {self.deviation:.2e}, allowed {self.allowed:.2e}"
        limit = OUTLIERS * self.allowed
        return (
            f"deviates by {self.overall:.2e} over all steps, allowed {limit:.2e} (its median: "
            f"{self.deviation:.2e})"
        )

    @property
    def missing(self) -> bool:
        """True if ours is zero in every element and step, and the other arms are not."""
        return self.norm_ratio == 0 and self.overall > MISSING > self.plain


@dataclass(frozen=True)
class StepLoss(ReportRow):
    """Loss of one step in the three arms, and the allowed difference of ours from fp32."""

    step: int
    ours: float
    fp32: float
    plain: float
    allowed: float

    @property
    def ratio(self) -> float:
        """Difference from fp32 over the allowed difference."""
        difference = abs(self.ours - self.fp32)
        if not math.isfinite(difference) or not math.isfinite(self.allowed):
            return math.inf
        return difference / self.allowed


@dataclass(frozen=True)
class Beside:
    """Results of transformers, bitsandbytes and PEFT on the same steps.

    Attributes:
        losses: a row for each step, with their loss in place of ours.
        gradients: a row for each module, with their gradient in place of ours, worst first.
    """

    losses: list[StepLoss]
    gradients: list[Deviation]


@dataclass(frozen=True)
class Verification:
    """Result of a verification.

    Attributes:
        losses: a row for each step.
        gradients, updates: a row for each module, worst first.
        optimizer: the same for our updates compared with those of torch's AdamW from our gradients.
        failures: messages; empty if the run is as exact as plain transformers in its own dtype.
        notes: messages about what was done differently from the run.
        facts: the run, the machine and the versions.
        bitsandbytes: results of the bitsandbytes arm for a base in 4 bits; if it did not run, a
            note says why.
    """

    losses: list[StepLoss]
    gradients: list[Deviation]
    updates: list[Deviation]
    optimizer: list[Deviation]
    failures: list[str]
    notes: list[str]
    facts: dict[str, Any] = field(default_factory=dict)
    bitsandbytes: Beside | None = None

    @property
    def passed(self) -> bool:
        """True if no message says that something is wrong."""
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON."""
        beside = None
        if self.bitsandbytes is not None:
            beside = {
                "losses": [row.to_dict() for row in self.bitsandbytes.losses],
                "gradients": [row.to_dict() for row in self.bitsandbytes.gradients],
            }
        return {
            "passed": self.passed,
            "failures": self.failures,
            "notes": self.notes,
            "losses": [row.to_dict() for row in self.losses],
            "gradients": [row.to_dict() for row in self.gradients],
            "updates": [row.to_dict() for row in self.updates],
            "optimizer": [row.to_dict() for row in self.optimizer],
            "bitsandbytes": beside,
            "facts": self.facts,
        }


def rounding_walk(layers: int) -> float:
    """Return the relative error of fp32 after a backward pass through ``layers`` layers.

    The module's docstring derives it.
    """
    return WALK * torch.finfo(torch.float32).eps * math.sqrt(_ROUNDED * layers)


class Tally:
    """Sums over the elements of each module, a row for each step.

    They are on the device until they are read.

    Args:
        quantity: the summed quantity, for the table.
        modules: the modules, one row each.
        device: device of the added tensors.
    """

    def __init__(self, quantity: str, modules: Modules, device: torch.device):
        self.quantity = quantity
        self.modules = modules
        self.device = device
        self.steps: list[Tensor] = []

    def begin_step(self) -> None:
        """Begin a row of zeros."""
        self.steps.append(
            torch.zeros(len(self.modules.names), 5, dtype=torch.float64, device=self.device)
        )

    @torch.no_grad()
    def add(self, weight: str, ours: Tensor, plain: Tensor, fp32: Tensor) -> None:
        """Add the values of ``weight`` in the three arms, tensors of its shape."""
        first, count = self.modules.places[weight]
        g, p, f = (x.detach().float().reshape(count, -1) for x in (ours, plain, fp32))
        parts = (f * f, (g - f).square(), (p - f).square(), g * f, g * g)
        self.steps[-1][first : first + count] += torch.stack(
            [part.sum(1) for part in parts], 1
        ).double()

    def sums(self) -> Tensor:
        """Return ‖f‖², ‖g − f‖², ‖p − f‖², g · f and ‖g‖², float64 ``[steps, M, 5]``."""
        if not self.steps:
            return torch.zeros(1, len(self.modules.names), 5, dtype=torch.float64)
        return torch.stack(self.steps).cpu()

    def deviations(self, floor: float | Tensor) -> list[Deviation]:
        """Return the deviation of every module, worst first.

        Args:
            floor: smallest limit: one number, or one for each module ``[M]``.
        """
        each = self.sums()
        together = each.sum(0)
        ours_each, plain_each = self._relative(each)
        ours, plain = (x[0] for x in self._relative(together[None]))
        # The scale of a module: the largest of its own deviation, the quadratic mean of its kind,
        # and the median of all modules. Routed modules take the largest deviation of any routed
        # module in any step instead of the mean of their kind.
        members: dict[str, list[int]] = {}
        for number, kind in enumerate(self.modules.kinds):
            members.setdefault(kind, []).append(number)
        mean = {kind: plain[numbers].square().mean().sqrt() for kind, numbers in members.items()}
        scale = torch.stack([mean[kind] for kind in self.modules.kinds])
        routed = self.modules.routed
        if routed.any():
            scale[routed] = plain_each[:, routed].nan_to_num(0.0).max()
        scale = torch.maximum(plain, scale).clamp(min=float(plain.nan_to_num(0.0).median()))
        allowed = torch.maximum(ALLOWED * scale, torch.as_tensor(floor, dtype=torch.float64))
        # The median over the steps in which fp32 has a gradient; zero without such a step.
        present = torch.where(each[..., 0] > 0, ours_each, torch.nan)
        median = present.nanmedian(0).values.nan_to_num(0.0, math.inf, math.inf)
        typical = torch.minimum(ours, median)
        fp32, _, _, dot, own = together.unbind(1)
        cosine = dot / (fp32 * own).sqrt().clamp(min=TINY)
        ratio = (own / fp32.clamp(min=TINY)).sqrt()
        rows = zip(
            self.modules.names,
            torch.stack([typical, ours, plain, allowed, cosine, ratio], 1).tolist(),
        )
        return sorted(
            (Deviation(self.quantity, name, *row) for name, row in rows), key=lambda row: -row.ratio
        )

    def _relative(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return ‖g − f‖ / ‖f‖ and ‖p − f‖ / ‖f‖, ``[..., M]``.

        A near-zero ‖f‖ is replaced as the module's docstring says.
        """
        fp32 = sums[..., 0]
        sizes = self.modules.sizes
        in_proportion = fp32.sum(-1, keepdim=True) * sizes / sizes.sum()
        base = torch.maximum(fp32, in_proportion * NEAR_ZERO**2).clamp(min=TINY)
        return (sums[..., 1] / base).sqrt(), (sums[..., 2] / base).sqrt()


def update_floors(
    gradients: list[Deviation], modules: Modules, weights: Tensor, changes: Tensor
) -> Tensor:
    """Return the floors of updates, ``[M]``.

    Args:
        gradients: deviations of the gradients.
        modules: the rows.
        weights: ‖w‖ ``[M]``.
        changes: ‖Δw‖ ``[M]``.
    """
    off = {row.module: max(row.allowed, row.overall) for row in gradients}
    d = (
        torch.tensor([off[name] for name in modules.names], dtype=torch.float64)
        .nan_to_num(1.0, 1.0)
        .clamp(max=1.0)
    )
    # Δw is the difference of two weights rounded in fp32.
    difference = torch.finfo(torch.float32).eps * weights / changes.clamp(min=TINY)
    return torch.maximum(d + (UNCLEAR * d).sqrt(), difference)


def optimizer_floors(weights: Tensor, changes: Tensor) -> Tensor:
    """Return the floors of updates that start from equal gradients, ``[M]``.

    Args:
        weights: ‖w‖ ``[M]``.
        changes: ‖Δw‖ ``[M]``.
    """
    difference = torch.finfo(torch.float32).eps * weights / changes.clamp(min=TINY)
    return rounding_walk(1) + difference


def step_losses(found: list[tuple[float, Tensor, Tensor, int]], walk: float) -> list[StepLoss]:
    """Return each step's loss with its allowed difference from fp32.

    The allowed difference is ``ALLOWED`` times the larger of two figures: the plain arm's
    difference (quadratic mean over the steps), and ``_CHANCE`` standard deviations of the mean over
    the step's documents, estimated from the plain arm's differences in single documents.

    Args:
        found: for each step: our loss, the sums of fp32 and of the plain arm over the targets of
            each document, float64 ``[documents]``, and the number of targets.
        walk: relative error of fp32 itself.
    """
    typical = math.sqrt(
        sum(float((p - f).sum() / count) ** 2 for _, f, p, count in found) / max(len(found), 1)
    )
    rows = []
    for number, (own, f, p, count) in enumerate(found):
        exact = float(f.sum()) / count
        spread = _CHANCE * float((p - f).norm()) / count
        # Losses of documents may have both signs, and their sum is rounded as its parts are.
        size = float(f.abs().sum()) / count
        allowed = max(ALLOWED * max(typical, spread), walk * size, TINY)
        rows.append(StepLoss(number + 1, own, exact, float(p.sum()) / count, allowed))
    return rows


def wrong_losses(losses: list[StepLoss]) -> list[StepLoss]:
    """Return the steps whose loss is wrong.

    These are all steps above their limit if more than half are, else those above ``OUTLIERS`` times
    it.
    """
    exceeding = [row for row in losses if row.ratio > 1]
    return (
        exceeding
        if 2 * len(exceeding) > len(losses)
        else [row for row in exceeding if row.ratio > OUTLIERS]
    )


def decided(fp32: Tensor, plain: Tensor, walk: float) -> Tensor:
    """Return a bool mask of the gradient elements that exceed their rounding error.

    Only these are compared: AdamW's first update is the sign of an element, which rounding would
    decide for the others.
    """
    present = fp32 != 0
    count = present.sum().clamp(min=1)
    spread = torch.maximum((plain.float() - fp32).square().sum(), (walk * fp32).square().sum())
    return fp32.abs() > CLEAR * (spread / count).sqrt()
