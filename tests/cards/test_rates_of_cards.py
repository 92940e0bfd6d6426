"""Rates of cards: which are taken for a name, what a data sheet becomes, and what is kept."""

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from chronicals.cards import rates as rates_module
from chronicals.cards.data_sheets import DATA_SHEETS
from chronicals.cards.rates import (
    BF16,
    DATA_SHEET,
    FP8,
    FP32,
    MEASURED,
    RECORD,
    Rates,
    between,
    is_named,
    keep_rates,
    rates_folder,
    rates_here,
    rates_of,
)
from chronicals.config import ConfigurationError
from chronicals.step_work import Product


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def measured(card="NVIDIA L4", torch="2.11.0", **changes):
    values = rates_of("H100").to_dict()
    versions = {"torch": torch, "triton": "3.6.0", "cuda": "13.0"}
    return Rates.from_dict(
        {**values, "card": card, "source": MEASURED, "versions": versions, **changes}
    )


@pytest.mark.parametrize(
    ("card", "name", "same"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", True),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB", True),
        ("A100 80GB", "NVIDIA A100-SXM4-80GB", True),
        ("A100 40GB", "NVIDIA A100-SXM4-80GB", False),
        ("RTX 4090", "NVIDIA GeForce RTX 4090", True),
        ("RTX 4090", "4090", True),
        ("RTX 4090", "NVIDIA GeForce RTX 4090 Laptop GPU", False),
        ("L4", "NVIDIA L40S", False),
        ("T4", "Tesla T4", True),
        ("T4", "NVIDIA", False),
    ],
)
def test_names_of_cards(card, name, same):
    assert is_named(card, name) == same


def test_measured_rates_come_before_records_and_these_before_data_sheets():
    assert rates_of("H100").source == RECORD and rates_of("NVIDIA H200").source == MEASURED
    assert rates_of("L4").source == DATA_SHEET
    path = keep_rates(measured())
    assert rates_of("L4").source == MEASURED and path.parent == rates_folder()
    assert "NVIDIA-L4" in path.name and "torch-2.11.0" in path.name


def test_of_several_measurements_of_a_card_the_newest_counts():
    old = keep_rates(measured(copy=1e11))
    keep_rates(measured(copy=2e11, torch="2.13.0"))
    assert len(list(rates_folder().iterdir())) == 2
    assert rates_of("L4").copy == 2e11
    os.utime(old, (2e9, 2e9))
    assert rates_of("L4").copy == 1e11


def test_what_is_kept_is_what_was_measured():
    kept = measured()
    assert Rates.from_dict(json.loads(keep_rates(kept).read_text())) == kept


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("A100", "card='A100': it is the name of A100 40GB, A100 80GB; give one of them"),
        ("Voodoo 2", "card='Voodoo 2': its rates are not known; give one of A100 40GB"),
        ("", "card='': its rates are not known"),
    ],
)
def test_a_name_of_no_card_or_of_several(name, words):
    with pytest.raises(ConfigurationError) as raised:
        rates_of(name)
    assert str(raised.value).startswith(words) and "doctor --rates" in str(
        raised.value
    ) + "doctor --rates" * (name == "A100")


def test_a_spoilt_file_is_named():
    path = keep_rates(measured())
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "copy": 0}))
    with pytest.raises(ConfigurationError, match=r"NVIDIA-L4.*copy=0.*delete the file"):
        rates_of("L4")
    del values["host"]
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigurationError, match="without host"):
        rates_of("L4")
    path.write_text("{")
    with pytest.raises(ConfigurationError, match="delete the file"):
        rates_of("L4")


def test_a_rate_between_two_points_is_on_their_line_in_logarithms():
    curve = ((10.0, 100.0), (40.0, 400.0), (80.0, 400.0))
    assert between(curve, 5) == pytest.approx(50)
    assert between(curve, 20) == pytest.approx(200)
    assert between(curve, 60) == between(curve, 1000) == 400


def test_a_card_by_its_data_sheet_reaches_the_shares_of_the_recorded_one():
    """Twice the FLOPs and half the bandwidth: a large product takes half the time, a thin one,
    whose bytes decide, twice."""
    sheets = {sheet.card: sheet for sheet in DATA_SHEETS}
    reached = rates_of("H100")
    half = replace(
        sheets["H100"],
        card="Other",
        bandwidth=sheets["H100"].bandwidth / 2,
        bf16=2 * sheets["H100"].bf16,
        fp8=0,
        fp32=2 * sheets["H100"].fp32,
    )
    other = rates_module.by_data_sheet(half, reached, sheets["H100"])
    large = Product("", "forward", 2**17, 2**15, 2**15, 1)
    thin = Product("", "forward", 2**17, 2**13, 8, 1)
    assert other.product_seconds(large) == pytest.approx(reached.product_seconds(large) / 2)
    assert other.product_seconds(thin) == pytest.approx(2 * reached.product_seconds(thin))
    assert other.copy == reached.copy / 2 and other.source == DATA_SHEET and other.margin == 0.15
    assert other.product_seconds(large, FP32) == pytest.approx(
        reached.product_seconds(large, FP32) / 2
    )
    assert FP8 not in other.products and other.product_seconds(large, FP8) == pytest.approx(
        other.product_seconds(large, BF16)
    )


@pytest.mark.parametrize("sheet", DATA_SHEETS, ids=lambda sheet: sheet.card)
def test_every_data_sheet_is_a_card_with_its_source(sheet):
    rates = rates_of(sheet.card)
    assert rates.source in (MEASURED, RECORD, DATA_SHEET) and sheet.origin
    # a copy reads and writes no more than the memory does, a product no more than is specified
    assert rates.copy < sheet.bandwidth
    assert max(rate for _, rate in rates.products[BF16]) < sheet.bf16


def test_without_a_card_those_of_the_usual_one_are_taken(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    rates, words, memory = rates_here()
    assert rates == rates_of("H100") and "no card here" in words and memory == 80 * 10**9


@pytest.mark.parametrize(
    ("name", "card", "said"),
    [
        ("NVIDIA L4", "L4", "the card of this machine"),
        ("NVIDIA X1", "NVIDIA H100 80GB HBM3", "those of NVIDIA X1 are not known: measure them"),
    ],
)
def test_the_card_of_this_machine(name, card, said, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    properties = SimpleNamespace(name=name, total_memory=12345)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
    rates, words, memory = rates_here()
    assert rates.card == card and words.startswith(said) and memory == 12345
