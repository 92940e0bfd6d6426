"""Defaults that surprise are said: two learning rates of adapters, and how long the rate rises."""

import json
import logging
from pathlib import Path

import pytest

import runs
import tiny
from chronicals.cli.wording import Wording
from chronicals.config import ChronicalsConfig, ConfigurationError, Recipe
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.training.step.optimizer import (
    HIGHEST_RATE_OF_B,
    as_rate,
    build_optimizer,
    say_learning_rates,
)
from chronicals.training.step.training_step import rate_factor, warmup_of
from chronicals.verification.reference import scheduled_rates

CURVES = Path(__file__).parents[2] / "benchmarks" / "results" / "lora-plus.json"


def said(caplog, adapted=True, **changes):
    """What the log says of the learning rates of a run."""
    model = tiny.llama()
    if adapted:
        apply_lora(model, LoRAConfig(rank=4))
    config = ChronicalsConfig(use_lora=adapted, **changes)
    caplog.clear()
    with caplog.at_level(logging.INFO, "chronicals"):
        say_learning_rates(config, build_optimizer(model, config))
    return [(record.levelname, record.getMessage()) for record in caplog.records]


BOTH = "learning rates: A 2.0e-4, B 3.2e-3 (LoRA+; use_lora_plus=False for one rate)"


def test_both_rates_of_an_adapter_are_said(caplog):
    assert said(caplog) == [("INFO", BOTH)]
    assert "B 4.0e-4" in said(caplog, lora_plus_ratio=2.0)[0][1]
    in_yaml = Wording({"use_lora_plus": True}, in_recipe=True)
    assert "LoRA+; use_lora_plus: false for one rate" in in_yaml(BOTH)


def test_one_rate_is_not_said_twice(caplog):
    for changes in ({"use_lora_plus": False}, {"lora_plus_ratio": 1.0}, {"adapted": False}):
        assert said(caplog, **changes) == []


@pytest.mark.slow
def test_a_run_says_them_before_its_first_step(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        runs.train(
            tmp_path, use_lora=True, lora_rank=4, max_steps=1, trackers=[], learning_rate=2e-4
        )
    lines = [record.getMessage() for record in caplog.records]
    assert lines.index(BOTH) < next(
        number for number, line in enumerate(lines) if line.startswith("step 1/1")
    )


def test_a_rate_of_b_at_which_nothing_was_seen_to_train_is_warned_of(caplog):
    assert [level for level, _ in said(caplog, learning_rate=1e-3)] == ["INFO"]
    _, (level, words) = said(caplog, learning_rate=3e-3)
    assert level == "WARNING"
    assert "B learns at 4.8e-2, and above 1.6e-2" in words
    assert "set learning_rate=1.0e-3 or lower, or use_lora_plus=False" in words
    assert (
        "learning_rate=4.0e-3 or lower"
        in said(caplog, learning_rate=1e-2, lora_plus_ratio=4.0)[1][1]
    )


def test_the_limit_is_that_of_the_measured_curves():
    """The highest rate at which held-out loss is near its lowest, and beyond it is above where
    it was at the lowest rate.
    """
    search = json.loads(CURVES.read_text())["methods"]["LoRA+"]["search"]
    losses = {16 * run["rate"]: run["held_out"] for run in search}
    trained = [rate for rate, loss in losses.items() if loss <= losses[min(losses)]]
    assert max(trained) == pytest.approx(HIGHEST_RATE_OF_B)


@pytest.mark.parametrize(
    "rate, words", [(2e-4, "2.0e-4"), (1.25e-5, "1.25e-5"), (0.016, "1.6e-2"), (1.0, "1.0e0")]
)
def test_rates_are_written_as_people_do(rate, words):
    assert as_rate(rate) == words


@pytest.mark.parametrize("name", ["loraplus_lr_ratio", "loraplus_ratio"])
def test_another_tools_field_is_answered_with_both_rates(name):
    with pytest.raises(
        ConfigurationError,
        match=r"use lora_plus_ratio=16.*A 2\.0e-4, B 3\.2e-3.*use_lora_plus=False",
    ):
        ChronicalsConfig(**{name: 16})


@pytest.mark.parametrize(
    "ratio, total, steps",
    [(0.1, 1000, 100), (0.1, 30, 3), (0.07, 100, 7), (0.03, 50, 2), (0.0, 50, 0)],
)
def test_the_warmup_as_a_share(ratio, total, steps):
    """Rounded up, as in transformers; and the plain schedule of verification has the same."""
    config = ChronicalsConfig(warmup_ratio=ratio, max_steps=total, lr_scheduler="constant")
    assert warmup_of(config, total) == steps
    rates = [rate_factor(config, number, total) for number in range(total)]
    assert sum(rate < 1 for rate in rates) == max(steps - 1, 0)
    assert rates == pytest.approx(scheduled_rates(config, total))


def test_the_warmup_is_said_in_one_way():
    for fields in ({"warmup_steps": 5}, {"warmup_steps": 0}):
        with pytest.raises(
            ConfigurationError, match=r"warmup_steps=\d and warmup_ratio=0.1: .*give one of the two"
        ):
            ChronicalsConfig(warmup_ratio=0.1, **fields)
    with pytest.raises(ConfigurationError, match="warmup_ratio=1.5"):
        ChronicalsConfig(warmup_ratio=1.5)


def test_a_warmup_from_zero_needs_a_warmup():
    for fields in ({"warmup_steps": 0}, {"warmup_ratio": 0.0}):
        with pytest.raises(ConfigurationError, match="warmup_from_zero=True: there is no warm-up"):
            ChronicalsConfig(warmup_from_zero=True, **fields)


def test_a_warmup_from_zero_that_is_the_whole_run_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="the only step of the run has a learning rate"):
        runs.train(tmp_path, tiny.chat_rows(8), max_steps=1, warmup_steps=1, warmup_from_zero=True)


def test_a_flag_for_one_replaces_the_other_in_a_recipe(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: m\ndata: d\nwarmup_steps: 7\n")
    assert Recipe.given(None, recipe, warmup_ratio=0.2).warmup_ratio == 0.2
    recipe.write_text("model: m\ndata: d\nwarmup_ratio: 0.2\n")
    given = Recipe.given(None, recipe, warmup_steps=7)
    assert given.warmup_steps == 7 and given.warmup_ratio is None
