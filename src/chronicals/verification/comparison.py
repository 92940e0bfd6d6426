"""The figures of three arms beside each other, and what they may differ by.

g is what chronicals computes in a module, f the same of plain transformers in fp32, p of plain transformers in the run's
own type; the squares are summed over the elements of the module before anything is divided.

    deviation = ‖g − f‖ / ‖f‖        allowed = max(1.5 · ‖p − f‖ / ‖f‖, floor)

The plain arm's is taken over all steps summed together. Ours is that too, or the median of the single steps where it is
smaller: a fault is there in every step and enlarges both, while a rounding that sends a token to another expert, or a small
gradient (an adapter whose B just left zero), makes one step an outlier and enlarges one of the two. For faults that come and
go, all steps of ours summed together may not deviate by more than ``OUTLIERS`` times what is allowed.

The scale ‖p − f‖ / ‖f‖ of a module is that of its kind (the same part of every layer, in the quadratic mean) or that of
the middle one of all modules where these are larger: one module's own is the draw of a few roundings. Of experts and what
routes to them it is that of the worst one in its worst step: which few tokens a rounding sends elsewhere, and so which
experts and steps it concerns, is chance in both arms. A module whose ‖f‖ is below ``NEAR_ZERO`` of what its share of the
elements would have is measured against that: what is zero but for rounding (the bias of keys) has no relative error.

Floors, for roundings that p does not show:
    eps of the run's type: two roundings of the result, half a spacing each, for g may be stored once more than p is;
    ``WALK · eps32 · sqrt(ROUNDED · layers)``: f itself is rounded in fp32, half a spacing in each of about ``ROUNDED``
        operations a layer, forwards and backwards together, which add up as a random walk; ``WALK`` is sixteen of
        those halves, for g − f holds two such walks, and sums over tokens cancel (up to five were seen);
    of an update, eps32 · ‖w‖ / ‖Δw‖, since Δw is the difference of two weights rounded in fp32;
    of an update, d + sqrt(UNCLEAR · d), d what the module's gradient deviates by or may deviate by, which is judged in
        its own row: AdamW hands it on through its moments, and divides each element of a gradient by its own size, so an
        element k roundings off zero is turned by 1 / k, and a share of 0.8 dk roundings of the elements of a normal
        distribution lie there; those below ``CLEAR`` are left out, the squares of the others add up to 0.8 / CLEAR
        roundings.

Of the optimizer alone, which torch's AdamW repeats with our gradients, f is what that makes of them, and nothing but floors is
allowed: the last but one, and the walk of f through the operations of an update, fewer than a layer's.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from chronicals.verification.modules import Modules

ALLOWED = 1.5
OUTLIERS = 4.0
NEAR_ZERO = 1e-2
WALK, ROUNDED = 8.0, 32
MISSING = 0.9
"""Deviation beyond which what is zero in ours is no rounding; all of it is 1."""

CHANCE = 3.0
"""Standard deviations by which a mean over documents may miss, of the spread that the plain arm shows."""

CLEAR = 4.0
"""Standard deviations of its rounding by which an element of a gradient must be off zero to have a direction."""

UNCLEAR = 0.8 / CLEAR

TINY = 1e-300


@dataclass(frozen=True)
class Deviation:
    """One module's gradient or update.

    Attributes:
        quantity: ``gradient``, ``update``, or ``optimizer``: the update beside that of torch's AdamW from our gradients.
        module: its path.
        deviation: ours, relative Frobenius distance from fp32: median of the steps, or all together where that is less.
        overall, plain: ours and the plain arm's, all steps summed together; of the optimizer alone there is no plain arm.
        allowed: what ``deviation`` may be at most, and a quarter of what ``overall`` may be.
        cosine, norm_ratio: of ours and fp32, all steps together.
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
    def share(self) -> float:
        """Of what is allowed; above 1 it fails, and so does what there is no number to set beside."""
        if self.missing or not math.isfinite(self.overall) or not math.isfinite(self.allowed):
            return math.inf
        return max(self.deviation, self.overall / OUTLIERS) / self.allowed

    @property
    def missing(self) -> bool:
        """Whether ours is zero in every element and step where the other arms have something."""
        return self.norm_ratio == 0 and self.overall > MISSING > self.plain

    def to_dict(self) -> dict:
        return _as_json(self)


@dataclass(frozen=True)
class StepLoss:
    """The loss of one step in the three arms, and what ours may differ from fp32 by."""

    step: int
    ours: float
    fp32: float
    plain: float
    allowed: float

    @property
    def share(self) -> float:
        difference = abs(self.ours - self.fp32)
        return difference / self.allowed if math.isfinite(difference) and math.isfinite(self.allowed) else math.inf

    def to_dict(self) -> dict:
        return _as_json(self)


def _as_json(row: Deviation | StepLoss) -> dict:
    """With null for what is no number, which JSON does not know."""
    values = {**asdict(row), "share_of_allowed": row.share}
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()}


def rounding_walk(layers: int) -> float:
    """Relative error of fp32 itself at the end of a backward pass through so many layers; see the module's docstring."""
    return WALK * torch.finfo(torch.float32).eps * math.sqrt(ROUNDED * layers)


class Tally:
    """Sums over the elements of each module, step by step, on the device until they are read.

    Args:
        quantity: what is summed, for the table.
        modules: whose rows there are.
        device: of the tensors that are added.
    """

    def __init__(self, quantity: str, modules: Modules, device: torch.device):
        self.quantity, self.modules, self.device = quantity, modules, device
        self.steps: list[Tensor] = []

    def begin_step(self) -> None:
        self.steps.append(torch.zeros(len(self.modules.names), 5, dtype=torch.float64, device=self.device))

    @torch.no_grad()
    def add(self, weight: str, ours: Tensor, plain: Tensor, fp32: Tensor) -> None:
        """Three tensors of the shape of ``weight``."""
        first, count = self.modules.places[weight]
        g, p, f = (x.detach().float().reshape(count, -1) for x in (ours, plain, fp32))
        parts = (f * f, (g - f).square(), (p - f).square(), g * f, g * g)
        self.steps[-1][first : first + count] += torch.stack([part.sum(1) for part in parts], 1).double()

    def sums(self) -> Tensor:
        """float64 ``[steps, M, 5]``: ‖f‖², ‖g − f‖², ‖p − f‖², g · f, ‖g‖²."""
        return torch.stack(self.steps).cpu() if self.steps else torch.zeros(1, len(self.modules.names), 5, dtype=torch.float64)

    def deviations(self, floor: float | Tensor) -> list[Deviation]:
        """Every module's, worst first.

        Args:
            floor: at least so much is allowed; a number, or one for each module ``[M]``.
        """
        each = self.sums()
        together = each.sum(0)
        ours_each, plain_each = self._relative(each)
        ours, plain = (x[0] for x in self._relative(together[None]))
        allowed = torch.maximum(ALLOWED * self._scale(plain, plain_each), torch.as_tensor(floor, dtype=torch.float64))
        typical = torch.minimum(ours, _median_where(ours_each, each[..., 0] > 0))
        fp32, _, _, dot, own = together.unbind(1)
        cosine, ratio = dot / (fp32 * own).sqrt().clamp(min=TINY), (own / fp32.clamp(min=TINY)).sqrt()
        rows = zip(self.modules.names, torch.stack([typical, ours, plain, allowed, cosine, ratio], 1).tolist())
        return sorted((Deviation(self.quantity, name, *row) for name, row in rows), key=lambda row: -row.share)

    def _relative(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """‖g − f‖ / ‖f‖ and ‖p − f‖ / ‖f‖, ``[..., M]``, a small ‖f‖ replaced by ``NEAR_ZERO`` of its share."""
        fp32, sizes = sums[..., 0], self.modules.sizes
        share = fp32.sum(-1, keepdim=True) * sizes / sizes.sum()
        base = torch.maximum(fp32, share * NEAR_ZERO**2).clamp(min=TINY)
        return (sums[..., 1] / base).sqrt(), (sums[..., 2] / base).sqrt()

    def _scale(self, plain: Tensor, plain_each: Tensor) -> Tensor:
        """``[M]``: the largest of a module's own, the quadratic mean of its kind, and the median of all modules;
        for routed ones the largest of theirs, ``[steps, M]`` by themselves."""
        routed = self.modules.routed
        members: dict[str, list[int]] = {}
        for row, kind in enumerate(self.modules.kinds):
            members.setdefault(kind, []).append(row)
        mean = {kind: plain[rows].square().mean().sqrt() for kind, rows in members.items()}
        of_kind = torch.stack([mean[kind] for kind in self.modules.kinds])
        if routed.any():
            of_kind[routed] = plain_each[:, routed].nan_to_num(0.0).max()
        return torch.maximum(plain, of_kind).clamp(min=float(plain.nan_to_num(0.0).median()))


def _median_where(values: Tensor, counts: Tensor) -> Tensor:
    """``[M]``: the lower median over the steps ``[steps, M]`` that count; zero where none does."""
    return torch.where(counts, values, torch.nan).nanmedian(0).values.nan_to_num(0.0, math.inf, math.inf)


def update_floors(gradients: list[Deviation], modules: Modules, weights: Tensor, changes: Tensor) -> Tensor:
    """``[M]``: the floors of updates, from the rows of the gradients, ‖w‖ ``[M]`` and ‖Δw‖ ``[M]``."""
    off = {row.module: max(row.allowed, row.overall) for row in gradients}
    d = torch.tensor([off[name] for name in modules.names], dtype=torch.float64).nan_to_num(1.0, 1.0).clamp(max=1.0)
    return torch.maximum(d + (UNCLEAR * d).sqrt(), _of_a_difference(weights, changes))


def optimizer_floors(weights: Tensor, changes: Tensor) -> Tensor:
    """``[M]``: the floors of updates from the same gradients, from ‖w‖ ``[M]`` and ‖Δw‖ ``[M]``."""
    return rounding_walk(1) + _of_a_difference(weights, changes)


def _of_a_difference(weights: Tensor, changes: Tensor) -> Tensor:
    """Relative error of Δw where it is the difference of two weights rounded in fp32."""
    return torch.finfo(torch.float32).eps * weights / changes.clamp(min=TINY)


def step_losses(found: list[tuple[float, Tensor, Tensor, int]], walk: float) -> list[StepLoss]:
    """Each step's loss, with what ours may miss fp32 by.

    The allowance is ``ALLOWED`` times the larger of what the plain arm misses by (quadratic mean over the steps) and of
    ``CHANCE`` standard deviations of a mean over the step's documents, each as far off as the plain arm's are.

    Args:
        found: a step's loss of ours; fp32's and the plain arm's sum over the targets of each document, float64
            ``[documents]``; its targets.
        walk: relative error of fp32 itself.
    """
    typical = math.sqrt(sum(float((p - f).sum() / count) ** 2 for _, f, p, count in found) / max(len(found), 1))
    rows = []
    for number, (own, f, p, count) in enumerate(found):
        exact, spread = float(f.sum()) / count, CHANCE * float((p - f).norm()) / count
        allowed = max(ALLOWED * max(typical, spread), walk * abs(exact), TINY)
        rows.append(StepLoss(number + 1, own, exact, float(p.sum()) / count, allowed))
    return rows


def wrong_losses(losses: list[StepLoss]) -> list[StepLoss]:
    """Those that fail: all that exceed the allowance if half of the steps do, else those beyond ``OUTLIERS`` times it."""
    exceeding = [row for row in losses if row.share > 1]
    return exceeding if 2 * len(exceeding) > len(losses) else [row for row in exceeding if row.share > OUTLIERS]


def decided(fp32: Tensor, plain: Tensor, walk: float) -> Tensor:
    """Where a gradient is clear of its rounding: AdamW's first update is its sign, and rounding has no sign."""
    present = fp32 != 0
    count = present.sum().clamp(min=1)
    spread = torch.maximum((plain.float() - fp32).square().sum(), (walk * fp32).square().sum())
    return fp32.abs() > CLEAR * (spread / count).sqrt()
