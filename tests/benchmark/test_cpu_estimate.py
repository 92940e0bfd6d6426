"""How long a benchmark takes without a card, told before it begins."""

import pytest
import torch
from typer.testing import CliRunner

from chronicals.benchmark import plan as cpu_estimate
from chronicals.benchmark import rounds
from chronicals.benchmark.plan import START_SECONDS, estimate_on_cpu, plan_work
from chronicals.benchmark.rounds import Options
from chronicals.cli.app import app
from chronicals.config import ConfigurationError

RATE = 100e9


@pytest.fixture(autouse=True)
def rate(let_return):
    let_return(cpu_estimate, _product_rate=RATE)


def planned(folder, model="tiny", mode="full", steps=2, **fields):
    return plan_work(folder, model, "fixed", mode, fields, steps, warm_up=3)


def test_a_step_takes_its_flops_at_half_the_rate_of_a_product(tmp_path):
    found = estimate_on_cpu(
        planned(tmp_path, "qwen2.5-0.5b", batch_size=1, max_seq_length=1024),
        Options(arm_timeout=1e9),
    )
    parameters = 0.494e9  # of the published model; attention comes on top
    assert found.step == pytest.approx(1024 * 6 * parameters / (RATE / 2), rel=0.1)
    assert found.steps == 5 and not found.too_long


def test_adapters_need_fewer(tmp_path):
    full, lora = (
        estimate_on_cpu(planned(tmp_path, "qwen2.5-0.5b", mode), Options())
        for mode in ("full", "lora")
    )
    assert 0.6 < lora.step / full.step < 0.8


def test_all_arms_and_rounds_count(tmp_path):
    work = planned(tmp_path)
    alone = estimate_on_cpu(work, Options(rounds=0)).whole
    assert alone == pytest.approx(3 * START_SECONDS, rel=0.05)  # preparation, reference, ours
    more = Options(rounds=2, against=["transformers", "trl", "liger"], variants=[{"seed": 1}])
    assert estimate_on_cpu(work, more).whole - alone == pytest.approx(
        (4 + 2 * 4) * START_SECONDS, rel=0.05
    )
    assert estimate_on_cpu(work, Options(time_limit=20)).whole == 20


def test_arms_that_would_be_ended_are_named(tmp_path):
    found = estimate_on_cpu(planned(tmp_path, "llama-3.1-8b"), Options(rounds=1, arm_timeout=300))
    assert found.too_long and found.whole == START_SECONDS + 3 * 300
    assert (
        "an arm of 5 steps" in str(found)
        and "--arm-timeout" in str(found)
        and "tiny runs anywhere" in str(found)
    )
    assert "--arm-timeout" not in str(estimate_on_cpu(planned(tmp_path), Options()))


@pytest.mark.parametrize("card", [False, True])
def test_the_command_says_so_before_anything_runs(card, let_raise, let_return, tmp_path):
    let_raise(rounds, measure_row=ConfigurationError("begun"))
    let_return(torch.cuda, is_available=card)
    done = CliRunner().invoke(
        app, ["benchmark", "--model", "tiny", "--folder", str(tmp_path)], env={"COLUMNS": "200"}
    )
    assert str(done.exception) == "begun"
    assert ("no card here: on this CPU a step takes about" in done.output) == (not card)


def test_a_rate_is_measured(monkeypatch):
    monkeypatch.undo()
    assert 1e8 < cpu_estimate._product_rate() < 1e15
