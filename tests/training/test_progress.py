"""What a terminal shows of a run is never wider than it; step, loss and time left come first,
and a bar where there is room.
"""

import io
import itertools
import logging
import re
import sys
import types

import pytest
from rich.console import Console

from chronicals.training.run import progress
from chronicals.training.run.progress import Progress, ProgressBar, heard
from chronicals.training.run.run_state import Run
from chronicals.training.step.metrics import StepMetrics

REWARDS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)
OTHERS = {
    "sft": (),
    "dpo": REWARDS,
    "kto": ("kl", *REWARDS),
    "distill": ("cross_entropy", "divergence", "teacher_entropy", "agreement"),
    "mixture": (
        "load_balancing_loss",
        "router_z_loss",
        "expert_load/max",
        "expert_load/min",
        "router_entropy",
        "anchor",
    ),
    "a longer name": (
        "a_metric_of_a_users_own_objective_with_a_name_that_is_longer_than_most_terminals_are_wide_by_far",
    ),
}
WIDTHS = (40, 60, 80, 120, 160)
STEPS = [(0, 400), (1, 6), (137, 400), (399_999, 400_000), (400, 400)]
LEFT = {None: None, 5.0: "0:00:05 left", 360_000.0: "100:00:00 left"}


def metrics_of(step, objective="sft", **changes):
    values = {name: -12.345678 for name in OTHERS[objective]}
    known = {
        "loss": 2.5,
        "grad_norm": 1.25,
        "learning_rate": 2e-4,
        "tokens_per_second": 1000.0,
        "memory_gib": 71.2,
        **changes,
    }
    return StepMetrics(
        step, tokens=100, targets=50, fill=0.9, epoch=0.5, skipped=False, others=values, **known
    )


def drawn(shown, width, **options):
    told = io.StringIO()
    console = Console(file=told, width=width, force_terminal=True, color_system=None, **options)
    console.print(shown)
    return told.getvalue().splitlines()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("objective", OTHERS)
def test_step_loss_and_time_left_come_first_and_are_never_cut(width, objective):
    for (step, total), left in itertools.product(STEPS, LEFT):
        check_lines(width, objective, step, total, left)


def check_lines(width, objective, step, total, left):
    metrics = metrics_of(step, objective, loss=123.4567) if step else None
    lines = drawn(Progress(step, total, metrics, left), width)
    assert 1 <= len(lines) <= 2 and all(len(line) <= width for line in lines)
    text = " ".join(lines)
    assert text.startswith(f"step {step}/{total}")
    if step:
        assert "loss 123.4567" in text
    if left is not None:
        assert LEFT[left] in text
    parts = [part for line in lines for part in re.sub("[━─]+ ?", "", line).split(" · ")]
    whole = Progress(step, total, metrics, left)
    assert {part.strip() for part in parts} <= {*whole.first_parts(), *whole.further_parts()}
    assert [part.strip() for part in parts][: len(whole.first_parts())] == whole.first_parts()
    if width >= 80 or len(f"step {step}/{total}") <= 12:
        assert re.search("[━─]{8}", lines[0])
    if width == 160 and objective in ("sft", "distill"):
        assert len(parts) == len(whole.first_parts()) + len(whole.further_parts())


def test_the_bar_grows_with_the_steps():
    lengths = [
        drawn(Progress(step, 400, metrics_of(step), 5.0), 80)[0].count("━")
        for step in (1, 100, 200, 400)
    ]
    assert lengths == [0, 6, 12, 24]


def test_a_terminal_without_other_letters_gets_a_bar_of_ascii():
    told = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=told, width=80, force_terminal=True, color_system=None)
    console.print(Progress(200, 400, metrics_of(200), 5.0))
    told.flush()
    assert (
        told.buffer.getvalue()
        .decode()
        .startswith(f"step 200/400 {'#' * 12}{'-' * 12}, loss 2.5000, 0:00:05 left\n")
    )


@pytest.fixture
def clock(monkeypatch):
    """The time that a run sees, which passes when it is told to."""

    class Clock:
        now = 1000.0

    monkeypatch.setattr(progress.time, "monotonic", lambda: Clock.now)
    return Clock


def lines_of(clock, seconds, steps, total, monkeypatch, capsys):
    """When lines came, in seconds, of a run whose steps take so long."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    bar = ProgressBar()
    times = []
    bar.run_began(Run(total, "run"))
    with heard():
        for step in range(1, steps + 1):
            clock.now += seconds
            bar.step_done(metrics_of(step))
            times += [clock.now] * len(capsys.readouterr().err.splitlines())
    bar.run_ended(Run(total, "run"))
    return times


@pytest.mark.parametrize("seconds", [0.3, 1.0, 2.6, 4.0, 9.0])
def test_without_a_terminal_a_line_comes_at_least_each_ten_seconds(
    clock, seconds, monkeypatch, capsys
):
    times = lines_of(clock, seconds, 120, 1000, monkeypatch, capsys)
    assert max(after - before for before, after in zip(times, times[1:])) <= 10.0
    assert len(times) <= 120 * seconds / (10 - seconds) + 20


def test_of_steps_that_take_longer_each_has_a_line(clock, monkeypatch, capsys):
    assert len(lines_of(clock, 11.0, 7, 1000, monkeypatch, capsys)) == 7


def test_of_fast_steps_there_are_twenty_lines(clock, monkeypatch, capsys):
    assert len(lines_of(clock, 0.001, 1000, 1000, monkeypatch, capsys)) == 21


def test_the_time_left_is_that_of_the_steps_since_the_first(clock):
    bar = ProgressBar()
    bar.run_began(Run(100, "run"))
    clock.now += 60.0  # to compile
    bar.step_done(metrics_of(1))
    assert bar.now().seconds_left is None
    for step in (2, 3):
        clock.now += 2.0
        bar.step_done(metrics_of(step))
    assert bar.now().seconds_left == pytest.approx(97 * 2.0)
    clock.now += 1.5
    assert bar.now().seconds_left == pytest.approx(97 * 2.0 - 1.5)


def test_a_terminal_is_drawn_on_while_the_run_lasts(clock):
    told = io.StringIO()
    bar = ProgressBar()
    bar.console = Console(file=told, width=80, force_terminal=True)
    bar.run_began(Run(2, "run"))
    for step in (1, 2):
        clock.now += 1.0
        bar.step_done(metrics_of(step, "dpo"))
    bar.run_ended(Run(2, "run"))
    assert "step 2/2" in told.getvalue() and "loss 2.5000" in told.getvalue()


def test_a_notebook_draws_one_line_anew(clock, monkeypatch, capsys):
    drawn = []
    handle = types.SimpleNamespace(update=lambda data, raw: drawn.append(data["text/plain"]))

    def display(data, raw, display_id):
        drawn.append(data["text/plain"])
        return handle

    stand_in = types.ModuleType("IPython.display")
    stand_in.display = display
    for name in ("ipykernel", "IPython"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "IPython.display", stand_in)
    bar = ProgressBar()
    bar.run_began(Run(9, "run"))
    for step in range(1, 10):
        clock.now += 0.1
        bar.step_done(metrics_of(step))
    bar.run_ended(Run(9, "run"))
    assert 1 < len(drawn) < 9  # four times a second at most
    assert "9/9" in drawn[-1] and not capsys.readouterr().err
