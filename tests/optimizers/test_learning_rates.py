"""Learning-rate factors, and LoRA+: the B matrices in a group of their own."""

import itertools
import math

import pytest
import torch

import tiny
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.optimizers import (
    SCHEDULES,
    FusedAdamW,
    create_lora_plus_optimizer,
    learning_rate_factor,
)

RUNS = [(1000, 100), (10, 0), (10, 10), (7, 3), (1, 0), (1, 1), (13, 12)]


def factors(schedule, total, warmup, **options):
    return [learning_rate_factor(schedule, step, total, warmup, **options) for step in range(total)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("total, warmup", RUNS)
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_what_all_have_in_common(schedule, total, warmup, floor):
    run = factors(schedule, total, warmup, min_ratio=floor)
    rising = run[:warmup]
    falling = run[warmup:]
    assert rising == [pytest.approx((step + 1) / warmup, abs=1e-15) for step in range(warmup)]
    assert all(factor > 0 for factor in rising), "the warm-up is never 0"
    assert not rising or rising[-1] == 1
    assert not falling or falling[0] == 1
    assert all(later <= earlier for earlier, later in itertools.pairwise(falling))
    assert all(floor <= factor <= 1 for factor in falling)
    assert run[-1] > 0, "the last step is not wasted"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("total, warmup", RUNS)
def test_a_warmup_from_zero_is_one_step_behind(schedule, total, warmup):
    usual = factors(schedule, total, warmup)
    from_zero = factors(schedule, total, warmup, warmup_from_zero=True)
    assert from_zero[:warmup] == [0.0, *usual[: warmup - 1]][:warmup]
    assert from_zero[warmup:] == usual[warmup:]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("total, warmup", [(1000, 100), (10, 0), (7, 3)])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_the_end_is_reached_after_the_last_step(schedule, total, warmup, floor):
    assert learning_rate_factor(schedule, total, total, warmup, floor) == pytest.approx(
        floor, abs=1e-15
    )
    assert learning_rate_factor(schedule, total + 50, total, warmup, floor) == pytest.approx(
        floor, abs=1e-15
    )


def test_constant_stays():
    assert set(factors("constant", 50, 5)[5:]) == {1.0}
    assert learning_rate_factor("constant", 500, 50, 5, min_ratio=0.1) == 1.0


def test_cosine_and_linear_by_formula():
    for step in range(100, 1000, 37):
        progress = (step - 100) / 900
        cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2
        assert learning_rate_factor("cosine", step, 1000, 100, 0.1) == pytest.approx(
            cosine, rel=1e-12
        )
        assert learning_rate_factor("linear", step, 1000, 100) == pytest.approx(
            1 - progress, rel=1e-12
        )


@pytest.mark.parametrize("decay", [0.1, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("warmup", [0, 100])
def test_wsd_is_flat_and_then_falls_over_its_share_of_the_run(decay, warmup):
    """The last ``decay`` of all steps, warm-up included; whatever of that the warm-up leaves."""
    run = factors("wsd", 1000, warmup, decay_ratio=decay)
    begin = max(round(1000 * (1 - decay)), warmup)
    assert run[warmup : begin + 1] == [pytest.approx(1.0, abs=1e-12)] * (begin + 1 - warmup)
    slope = 1 / (1000 - begin)
    for step in range(begin, 1000):
        assert run[step] == pytest.approx(1 - (step - begin) * slope, abs=1e-9)


def test_names():
    assert set(SCHEDULES) == {"cosine", "linear", "constant", "wsd"}
    with pytest.raises(KeyError):
        learning_rate_factor("exponential", 5, 10, 0)


def adapted():
    return apply_lora(
        tiny.llama(), LoRAConfig(rank=4, dropout=0.0, target_modules=["q_proj", "down_proj"])
    )


def test_groups():
    model = adapted()
    optimizer = create_lora_plus_optimizer(
        model, 1e-4, 8.0, weight_decay=0.02, betas=(0.8, 0.9), eps=1e-6
    )
    assert type(optimizer) is FusedAdamW
    slow, fast = optimizer.param_groups
    of = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {id(p) for p in fast["params"]} == {
        id(p) for name, p in of.items() if name.endswith(".lora_B")
    }
    assert {id(p) for p in slow["params"]} == {
        id(p) for name, p in of.items() if name.endswith(".lora_A")
    }
    assert len(fast["params"]) == len(slow["params"]) == 4
    assert (slow["lr"], fast["lr"]) == (1e-4, 8e-4)
    for group in (slow, fast):
        assert (group["weight_decay"], group["betas"], group["eps"]) == (0.02, (0.8, 0.9), 1e-6)


def test_defaults():
    slow, fast = create_lora_plus_optimizer(adapted(), 1e-4).param_groups
    assert (
        fast["lr"] == pytest.approx(16 * slow["lr"])
        and slow["weight_decay"] == fast["weight_decay"] == 0
    )


def test_b_learns_so_much_faster():
    """Of one and the same gradient the first step of Adam is the learning rate, so B moves 16
    times as far as A.
    """
    model = adapted()
    optimizer = create_lora_plus_optimizer(model, 1e-3)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            expected = 1.6e-2 if name.endswith("lora_B") else 1e-3
            torch.testing.assert_close(
                before[name] - parameter, torch.full_like(parameter, expected), rtol=1e-4, atol=1e-7
            )


def test_peft_names_are_known_too():
    """``lora_B.default.weight`` is a B matrix; a name that merely contains the letters is not."""

    class Peft(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(2, 2, bias=False)})
            self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(2, 2, bias=False)})
            self.my_lora_B_like = torch.nn.Linear(2, 2, bias=False)

    model = Peft()
    slow, fast = create_lora_plus_optimizer(model, 1e-3).param_groups
    assert [id(p) for p in fast["params"]] == [id(model.lora_B["default"].weight)]
    assert len(slow["params"]) == 2


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_without_trainable_b_is_refused(frozen):
    model = adapted().requires_grad_(False) if frozen else tiny.llama()
    with pytest.raises(ValueError, match="no trainable lora_B; call apply_lora first"):
        create_lora_plus_optimizer(model, 1e-4)
