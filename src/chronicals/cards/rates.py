"""Rates of a card: what it computes and moves in a second, and where the figures come from.

There are three sources, the best first:

    measured     by ``chronicals doctor --rates``, kept in the user's cache folder by card and
                 versions; those of an H200 are in ``card_rates.json``
    record       of measured steps, in ``card_rates.json``; made from ``benchmarks/results/`` by
                 ``benchmarks/recorded_rates.py``
    data sheet   the maker's figures (``data_sheets``), times the share of them that the recorded
                 H100 reaches

A matrix product's rate depends on its arithmetic intensity, the FLOPs for each byte that it reads
or writes (Williams et al., 2009): 1 / (1/M + 1/N + 1/K) in 16 bits. It is read between the points
of a table.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from chronicals.cards.data_sheets import DATA_SHEETS, DataSheet
from chronicals.config import ConfigurationError
from chronicals.standard_json import to_json
from chronicals.step_work import Product

MEASURED = "measured"
RECORD = "record"
DATA_SHEET = "data sheet"

MARGINS = {MEASURED: 0.10, RECORD: 0.10, DATA_SHEET: 0.15}
"""Half of a planned interval's width as a share of the time, by the source of the rates.

Within these the plans of measured steps must lie (``docs/planning.md``).
"""

USUAL_CARD = "H100"
USUAL_MEMORY = 80 * 10**9
"""Card whose rates are taken where no other is named or found, and its nominal bytes."""

RECORDED = Path(__file__).with_name("card_rates.json")

BF16 = "bf16"
FP8 = "fp8"
FP32 = "fp32"

RateCurve = tuple[tuple[float, float], ...]
"""Points (x, rate), x ascending."""


@dataclass(frozen=True)
class AttentionRate:
    """Rate of causal attention to documents of one length.

    Attributes:
        head_dim: width of a head.
        length: tokens of a document.
        forward: FLOP/s, of two products.
        backward: FLOP/s, of five products.
    """

    head_dim: int
    length: float
    forward: float
    backward: float


@dataclass(frozen=True)
class Rates:
    """Rates of a card.

    Attributes:
        card: its name, as torch has it.
        source: ``measured``, ``record`` or ``data sheet``.
        origin: command, result files or address that the figures come from.
        versions: torch, triton and CUDA that they were measured with; empty for a data sheet.
        memory: bytes of the card.
        copy: bytes read and written per second by a copy on the card.
        elementwise: the same of the elementwise operations of a step.
        dequantise: the same of the dequantisation of NF4.
        products: FLOP/s of matrix products by arithmetic intensity, for each format.
        attention: rates of attention.
        host: bytes per second between host and card, in one direction.
        launch: seconds in which the host launches a kernel.
        gap: seconds between two kernels that the card queues by itself, as in a CUDA graph.
        backend: attention backend of steps in 16 bits whose rates these are; empty if it is not
            known.
    """

    card: str
    source: str
    origin: str
    versions: Mapping[str, str]
    memory: int
    copy: float
    elementwise: float
    dequantise: float
    products: Mapping[str, RateCurve]
    attention: tuple[AttentionRate, ...]
    host: float
    launch: float
    gap: float
    backend: str

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Rates:
        """Return the rates that ``to_dict`` wrote.

        Raises:
            ConfigurationError: a rate is missing, or is no positive number.
        """
        missing = [each.name for each in fields(cls) if each.name not in values]
        if missing:
            raise ConfigurationError(
                f"rates of a card without {', '.join(missing)}: measure them by "
                "`chronicals doctor --rates`"
            )
        curves = {
            name: tuple((x, rate) for x, rate in points)
            for name, points in values["products"].items()
        }
        attention = tuple(AttentionRate(**each) for each in values["attention"])
        made = cls(**{**values, "products": curves, "attention": attention})
        for name in ("memory", "copy", "elementwise", "dequantise", "host", "launch", "gap"):
            value = getattr(made, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigurationError(
                    f"{name}={value!r} of {made.card!r}: a rate is a positive number; measure it "
                    "by `chronicals doctor --rates`"
                )
        return made

    def to_dict(self) -> dict[str, Any]:
        """Return the rates as plain JSON values."""
        return asdict(self)

    @property
    def margin(self) -> float:
        """Half of a planned interval's width, as a share of the time."""
        return MARGINS[self.source]

    def product_seconds(self, product: Product, form: str = BF16) -> float:
        """Return the seconds of one product whose operands are in ``form``.

        A card without products in FP8 multiplies in bf16.
        """
        curve = self.products.get(form, self.products[BF16])
        intensity = 1 / (1 / product.rows + 1 / product.inputs + 1 / product.outputs)
        return product.flops / between(curve, intensity)

    def attention_rate(self, head_dim: int, length: float, form: str = BF16) -> tuple[float, float]:
        """Return FLOP/s of attention, forward and backward, to documents of ``length`` tokens.

        They are those of the nearest width of a head; in fp32, which no FlashAttention has, those
        of products.
        """
        if form == FP32:
            _, single = self.products[FP32][-1]
            return single, single
        nearest = min({each.head_dim for each in self.attention}, key=lambda n: abs(n - head_dim))
        same = sorted(
            (each for each in self.attention if each.head_dim == nearest), key=lambda a: a.length
        )
        forward = tuple((each.length, each.forward) for each in same)
        backward = tuple((each.length, each.backward) for each in same)
        return between(forward, length), between(backward, length)


def between(curve: RateCurve, x: float) -> float:
    """Return the rate at ``x``, from a line between the points in logarithms of both.

    Below the first point the rate falls with ``x``, as where bytes decide; above the last it stays.
    """
    first, rate = curve[0]
    if x <= first:
        return rate * x / first
    for (low, below), (high, above) in zip(curve, curve[1:]):
        if x <= high:
            share = math.log(x / low) / math.log(high / low)
            return below * (above / below) ** share
    return curve[-1][1]


def rates_folder() -> Path:
    """Return the folder of measured rates in the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "chronicals" / "rates"


def keep_rates(rates: Rates) -> Path:
    """Write measured rates to the cache folder, and return the file.

    Its name has the card and the versions; an earlier measurement of both is replaced.
    """
    parts = (rates.card, *(f"{name}-{version}" for name, version in rates.versions.items()))
    name = "_".join(re.sub(r"[^\w.+-]+", "-", part) for part in parts)
    folder = rates_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(to_json(rates.to_dict(), indent=2))
    return path


def rates_of(name: str) -> Rates:
    """Return the best rates of a card: measured here, of a record, or by its data sheet.

    Args:
        name: of the card, as torch has it or in part: ``4090``, ``A100 80GB``.

    Raises:
        ConfigurationError: no card or several have the name, or a file of rates cannot be read.
    """
    known: list[Callable[[], Sequence[Rates]]] = [_kept, _recorded, _of_data_sheets]
    for read in known:
        found = {rates.card: rates for rates in read() if is_named(rates.card, name)}
        exact = [rates for card, rates in found.items() if card_words(card) == card_words(name)]
        if len(found) > 1 and not exact:
            raise ConfigurationError(
                f"card={name!r}: it is the name of {', '.join(sorted(found))}; give one of them"
            )
        if found:
            return (exact or list(found.values()))[0]
    cards = sorted({rates.card for read in known for rates in read()})
    raise ConfigurationError(
        f"card={name!r}: its rates are not known; give one of {', '.join(cards)}, or measure them "
        "on it by `chronicals doctor --rates`"
    )


def asked_rates(name: str) -> tuple[Rates, str, int]:
    """Return what ``rates_here`` does, of a card that the user names.

    Raises:
        ConfigurationError: no card or several have the name.
    """
    rates = rates_of(name)
    return rates, "as asked", rates.memory


def rates_here() -> tuple[Rates, str, int]:
    """Return the rates of this machine's card, whose they are in words, and the bytes of the card.

    Without a card they are those of ``USUAL_CARD`` with ``USUAL_MEMORY``, and so are the rates for
    a card of which none are known.
    """
    if not torch.cuda.is_available():
        rates = rates_of(USUAL_CARD)
        words = f"no card here: those of {rates.card} are taken, --card names another"
        return rates, words, USUAL_MEMORY
    card = torch.cuda.get_device_properties(0)
    try:
        return rates_of(card.name), "the card of this machine", card.total_memory
    except ConfigurationError:
        rates = rates_of(USUAL_CARD)
        unknown = f"those of {card.name} are not known: measure them by `chronicals doctor --rates`"
        return rates, f"{unknown}; those of {rates.card} are taken", card.total_memory


def is_named(card: str, name: str) -> bool:
    """Return whether ``name`` is a card's: its words are the card's, or the card's are among them.

    Cards of laptops have other rates than those of the same name.
    """
    own = card_words(card)
    asked = card_words(name)
    return (
        bool(asked) and (asked <= own or own <= asked) and ("LAPTOP" in own) == ("LAPTOP" in asked)
    )


def card_words(name: str) -> set[str]:
    """Return the words of a card's name in capitals, without its makers' names."""
    words = set(re.findall(r"[A-Z0-9]+", name.upper()))
    return words - {"NVIDIA", "GEFORCE", "TESLA"}


def _kept() -> list[Rates]:
    """Return the measured rates in the cache folder, the newest of each card last."""
    paths = sorted(rates_folder().glob("*.json"), key=lambda path: path.stat().st_mtime)
    return [rates for path in paths for rates in _read(path)]


@cache
def _recorded() -> list[Rates]:
    return _read(RECORDED)


def _read(path: Path) -> list[Rates]:
    """Return the rates in a file, of one card or of a list of them.

    Raises:
        ConfigurationError: it cannot be read.
    """
    try:
        content = json.loads(path.read_text())
        cards = content if isinstance(content, list) else [content]
        return [Rates.from_dict(values) for values in cards]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigurationError(f"{path}: {error}; delete the file") from error


@cache
def _of_data_sheets() -> tuple[Rates, ...]:
    reached = next(rates for rates in _recorded() if is_named(rates.card, USUAL_CARD))
    specified = next(sheet for sheet in DATA_SHEETS if sheet.card == USUAL_CARD)
    return tuple(by_data_sheet(sheet, reached, specified) for sheet in DATA_SHEETS)


def by_data_sheet(sheet: DataSheet, reached: Rates, specified: DataSheet) -> Rates:
    """Return the rates of a card that reaches the same shares of its data sheet as another one.

    Bytes are in proportion to the memory's bandwidth, FLOPs to the specified ones, and where a
    curve of products bends to both.

    Args:
        sheet: of the card.
        reached: rates of the other card.
        specified: its data sheet.
    """
    bytes_ = sheet.bandwidth / specified.bandwidth
    flops = sheet.bf16 / specified.bf16
    curves = {BF16: _scaled(reached.products[BF16], flops / bytes_, flops)}
    if sheet.fp8 and specified.fp8:
        eight = sheet.fp8 / specified.fp8
        curves[FP8] = _scaled(reached.products[FP8], eight / bytes_, eight)
    single = sheet.fp32 / specified.fp32
    curves[FP32] = _scaled(reached.products[FP32], single / bytes_, single)
    attention = tuple(
        AttentionRate(each.head_dim, each.length, each.forward * flops, each.backward * flops)
        for each in reached.attention
    )
    return Rates(
        card=sheet.card,
        source=DATA_SHEET,
        origin=sheet.origin,
        versions={},
        memory=sheet.memory,
        copy=reached.copy * bytes_,
        elementwise=reached.elementwise * bytes_,
        dequantise=reached.dequantise * bytes_,
        products=curves,
        attention=attention,
        host=reached.host * sheet.host / specified.host,
        launch=reached.launch,
        gap=reached.gap,
        backend="",
    )


def _scaled(curve: RateCurve, x: float, rate: float) -> RateCurve:
    return tuple((point * x, value * rate) for point, value in curve)
