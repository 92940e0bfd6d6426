"""The rule by which a module passes, on figures made by hand."""

import math

import pytest
import torch

from chronicals.verification.comparison import (
    Modules,
    StepLoss,
    Tally,
    decided,
    optimizer_floors,
    rounding_walk,
    step_losses,
    update_floors,
    wrong_losses,
)

CPU = torch.device("cpu")
SHAPES = {
    "layers.0.q_proj.weight": (8, 8),
    "layers.0.q_proj.bias": (8,),
    "layers.1.q_proj.weight": (8, 8),
    "layers.1.mlp.experts.up": (3, 8, 8),
    "layers.1.mlp.experts.down": (3, 8, 8),
    "layers.1.o_proj.lora_A": (2, 8),
}


@pytest.fixture
def modules():
    return Modules.of({name: torch.Size(shape) for name, shape in SHAPES.items()})


def test_a_module_owns_its_weights_and_an_expert_its_slices(modules):
    experts = [f"layers.1.mlp.experts.{n}" for n in range(3)]
    assert modules.names == [
        "layers.0.q_proj",
        "layers.1.q_proj",
        *experts,
        "layers.1.o_proj.lora_A",
    ]
    assert modules.sizes.tolist() == [72, 64, 128, 128, 128, 16]
    assert modules.places["layers.1.mlp.experts.down"] == (2, 3) and modules.places[
        "layers.0.q_proj.bias"
    ] == (0, 1)
    assert modules.routed.tolist() == [False, False, True, True, True, False]
    assert modules.kinds == ["layers.*.q_proj"] * 2 + ["layers.*.mlp.experts.*"] * 3 + ["lora_A"]


def tally(modules, ours, plain, steps=5, still=()):
    """Every module off by ``ours`` (a share, by module and step) and ``plain``, at right angles
    to fp32.
    """
    found = Tally("gradient", modules, CPU)
    for step in range(steps):
        found.begin_step()
        for name, shape in SHAPES.items():
            f = torch.ones(shape)
            f.view(-1)[1::2] = 0.0
            off = torch.ones(shape)
            off.view(-1)[0::2] = 0.0
            first, count = modules.places[name]
            share = torch.tensor([ours(modules.names[first + n], step) for n in range(count)])
            share = share.view(-1, *[1] * (len(shape) - 1)) if count > 1 else share[0]
            g = f + share * off
            found.add(name, torch.zeros(shape) if name in still else g, f + plain * off, f)
    return {row.module: row for row in found.deviations(1e-3)}


def test_one_and_a_half_times_the_plain_arm_and_no_more(modules):
    rows = tally(modules, lambda name, step: 0.016 if name.endswith("experts.1") else 0.014, 0.01)
    assert {name for name, row in rows.items() if row.ratio > 1} == {"layers.1.mlp.experts.1"}
    assert rows["layers.1.mlp.experts.1"].ratio == pytest.approx(0.016 / 0.015, rel=1e-4)
    assert rows["layers.0.q_proj"].cosine == pytest.approx(1 / math.sqrt(1 + 0.014**2), rel=1e-6)


def test_the_floor_holds_where_the_plain_arm_is_exact(modules):
    rows = tally(modules, lambda name, step: 0.0009 if name == "layers.0.q_proj" else 0.0011, 0.0)
    assert rows["layers.0.q_proj"].ratio < 1 < rows["layers.1.q_proj"].ratio


def test_one_step_out_of_line_passes_unless_it_is_far_out(modules):
    for outlier, passes in ((0.05, True), (0.2, False)):
        rows = tally(
            modules, lambda name, step, outlier=outlier: outlier if step == 2 else 0.01, 0.01
        )
        assert all((row.ratio <= 1) == passes for row in rows.values()), outlier
    worst = rows["layers.0.q_proj"]
    assert worst.deviation < worst.allowed, "of most steps"
    assert worst.words == (
        f"deviates by {worst.overall:.2e} over all steps, allowed {4 * worst.allowed:.2e} "
        f"(its median: {worst.deviation:.2e})"
    )
    usual = tally(modules, lambda name, step: 0.1, 0.01)["layers.0.q_proj"]
    assert usual.words == f"deviates by {usual.deviation:.2e}, allowed {usual.allowed:.2e}"


def test_nothing_where_there_should_be_something(modules):
    rows = tally(modules, lambda name, step: 0.0, 0.01, still={"layers.1.o_proj.lora_A"})
    assert [name for name, row in rows.items() if row.missing] == ["layers.1.o_proj.lora_A"]
    assert rows["layers.1.o_proj.lora_A"].ratio == math.inf
    assert rows["layers.1.o_proj.lora_A"].to_dict()["share_of_allowed"] is None


def test_a_gradient_that_is_only_rounding_has_no_relative_error(modules):
    found = Tally("gradient", modules, CPU)
    found.begin_step()
    for name, shape in SHAPES.items():
        tiny = name == "layers.1.q_proj.weight"
        f = torch.full(shape, 1e-9 if tiny else 1.0)
        found.add(name, f + (3e-9 if tiny else 0.0), f - (1e-9 if tiny else 0.0), f)
    assert all(row.ratio < 1 for row in found.deviations(1e-6))


def test_not_a_number_fails(modules):
    rows = tally(
        modules,
        lambda name, step: math.nan if name == "layers.0.q_proj" and step == 1 else 0.0,
        0.01,
    )
    assert rows["layers.0.q_proj"].ratio == math.inf


@pytest.mark.parametrize("no_number", [math.nan, math.inf])
def test_a_plain_arm_that_is_no_number_passes_nothing(modules, no_number):
    rows = tally(modules, lambda name, step: 4.0, no_number)
    assert all(row.ratio == math.inf for row in rows.values())
    fp32 = torch.tensor([100.0, 50.0], dtype=torch.float64)
    assert (
        len(wrong_losses(step_losses([(50.0, fp32, fp32 * no_number, 100)] * 5, rounding_walk(2))))
        == 5
    )


def test_losses_may_miss_by_what_the_plain_arm_misses_by():
    fp32 = torch.tensor([30.0, 10.0, 20.0], dtype=torch.float64)
    found = [(0.6 + miss, fp32, fp32 + 0.1, 100) for miss in (0.004, -0.004, 0.004, 0.0, 0.004)]
    rows = step_losses(found, rounding_walk(2))
    assert [row.allowed for row in rows] == pytest.approx([1.5 * 3 * 0.1 * 3**0.5 / 100] * 5)
    assert not wrong_losses(rows)
    assert len(wrong_losses([StepLoss(n, 0.61, 0.6, 0.6, 0.008) for n in range(3)])) == 3
    once = [
        StepLoss(n, 0.6 + off, 0.6, 0.6, 0.001) for n, off in enumerate((0.002, 0.0, 0.005, 0.0))
    ]
    assert [row.step for row in wrong_losses(once)] == [2]


def test_only_elements_clear_of_their_rounding_have_a_direction():
    f = torch.tensor([1.0, 1e-3, 0.0, -1.0])
    assert decided(f, f + 1e-3, 1e-6).tolist() == [True, False, False, True]


def test_an_update_is_not_judged_for_its_gradient_again(modules):
    rows = list(tally(modules, lambda name, step: 0.1, 0.01).values())
    floors = update_floors(
        rows, modules, torch.ones(len(modules.names)), torch.full((len(modules.names),), 1e-3)
    )
    assert torch.all(floors > 0.1)
    rows = list(tally(modules, lambda name, step: 0.0, 0.0).values())
    floors = update_floors(
        rows, modules, torch.ones(len(modules.names)), torch.full((len(modules.names),), 1e-7)
    )
    assert torch.all(floors >= torch.finfo(torch.float32).eps / 1e-7)


def test_an_optimizer_may_miss_what_fp32_rounds():
    weights = torch.tensor([100.0, 100.0, 0.0])
    changes = torch.tensor([1e-3, 1.0, 1.0])
    eps = torch.finfo(torch.float32).eps
    assert optimizer_floors(weights, changes).tolist() == pytest.approx(
        [rounding_walk(1) + 1e5 * eps, rounding_walk(1) + 100 * eps, rounding_walk(1)]
    )
