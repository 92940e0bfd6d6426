"""Measuring a card's rates: without one, and the steps of it that a CPU can run."""

import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from chronicals.benchmark import card_rates
from chronicals.cards.rates import RECORDED, Rates, rates_folder, rates_of
from chronicals.cli.app import app
from chronicals.config import ConfigurationError
from chronicals.step_work import DecoderShape, Product


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_without_a_card_there_is_nothing_to_measure(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = CliRunner().invoke(app, ["doctor", "--rates"])
    assert isinstance(done.exception, ConfigurationError)
    assert "there is no card here that torch can use; run `chronicals doctor --rates` on" in str(
        done.exception
    )
    assert not rates_folder().exists()


def test_what_is_measured_is_kept_and_planned_with(monkeypatch):
    values = {**rates_of("H100").to_dict(), "card": "NVIDIA L4", "source": "measured"}
    monkeypatch.setattr(card_rates, "measure_card", lambda: values)
    done = CliRunner().invoke(app, ["doctor", "--rates"])
    assert done.exit_code == 0, done.output
    (path,) = rates_folder().iterdir()
    assert f"kept {path}" in done.output and "NVIDIA L4: products up to" in done.output
    assert rates_of("L4") == Rates.from_dict(values)


@pytest.mark.slow
def test_steps_give_rates_of_products_attention_and_copies(monkeypatch):
    shape = DecoderShape(1, 64, 4, 2, 16, 128, 256, 0)
    monkeypatch.setattr(card_rates, "SMALL", shape)
    monkeypatch.setattr(card_rates, "LARGE", shape)
    monkeypatch.setattr(card_rates, "LENGTHS", (32, 64))
    monkeypatch.setattr(card_rates, "USUAL_LENGTH", 64)
    measured = card_rates.measure_steps(128, torch.float32)
    assert [each["length"] for each in measured["attention"]] == [32, 64] * 2
    rates = Rates.from_dict(
        {
            **rates_of("H100").to_dict(),
            **measured,
            "products": {"bf16": measured["products"]},
        }
    )
    product = Product("", "forward", 128, 64, 128, 1)
    assert 0 < rates.product_seconds(product) < 1
    assert all(0 < rate < math.inf for rate in rates.attention_rate(16, 48))
    intensities = [x for x, _ in measured["products"]]
    assert intensities == sorted(intensities) and len(intensities) > 1


def test_a_curve_has_medians_of_products_of_like_intensity():
    points = [(100, 1e12), (104, 3e12), (102, 2e12), (400, 5e12)]
    assert card_rates.curve_of(points) == [(102, 2e12), (400, 5e12)]


@pytest.mark.slow
def test_the_packaged_rates_are_those_that_the_results_give(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import recorded_rates

    monkeypatch.setattr("sys.argv", ["recorded_rates.py", "--out", str(tmp_path / "rates.json")])
    recorded_rates.main()
    assert (tmp_path / "rates.json").read_text() == RECORDED.read_text()
