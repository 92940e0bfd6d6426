"""The loss curve of AdamW in 8 bits lies within the spread of fp32 runs with other seeds, and
its update is bitsandbytes'.
"""

import pytest
import torch

import runs
import tiny
from chronicals.kernels import adamw_8bit as kernel
from chronicals.optimizers import Adam8bit, adamw
from chronicals.training import session
from mutants import mutant

SEEDS = 4
WINDOWS = 5
USED = 60
"""Tokens of 300 that occur: of the others the head's gradients are smaller by orders of
magnitude.
"""
STEPS = [100, pytest.param(1000, marks=pytest.mark.long)]


def curve(folder, seed, steps, **changes):
    """Mean losses of ``WINDOWS`` parts of a run that learns a noisy rule: token n is followed by
    7 n + 3, modulo 60.
    """
    model = tiny.llama(seed)
    drawn = torch.Generator().manual_seed(seed)
    config = runs.config(folder, learning_rate=3e-3, weight_decay=0.1, **changes)
    optimizer = session.build_optimizer(model, config)
    losses = []
    for _ in range(steps):
        rows = [torch.randint(0, USED, (4, 1), generator=drawn)]
        for _ in range(15):
            noise = torch.rand(4, 1, generator=drawn) < 0.1
            rows.append(
                torch.where(
                    noise,
                    torch.randint(0, USED, (4, 1), generator=drawn),
                    (rows[-1] * 7 + 3) % USED,
                )
            )
        ids = torch.cat(rows, 1)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses).view(WINDOWS, -1).mean(1)


def is_within(ours, full):
    """Whether a curve is no further from that of its own seed, the first, than those ``[seeds,
    windows]`` from each other.
    """
    spread = full.max(0).values - full.min(0).values
    return bool(((ours - full[0]).abs() <= spread).all())


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    made = {}

    def of(steps):
        if steps not in made:
            folder = tmp_path_factory.mktemp("full")
            made[steps] = torch.stack([curve(folder, seed, steps) for seed in range(SEEDS)])
        return made[steps]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("steps", STEPS)
def test_the_curve_is_within_the_spread_of_seeds(tmp_path, full, steps):
    ours = curve(tmp_path, 0, steps, use_8bit_optimizer=True)
    assert is_within(ours, full(steps)), (ours, full(steps))
    assert ours[-1] < ours[0] - 0.5


FAULTS = {
    "v read as if its code had a sign": (
        "dequantize_moment(tensors.squares[n], tensors.square_scales[n], False)",
        "dequantize_moment(tensors.squares[n], tensors.square_scales[n], True)",
    ),
    "blocks without a scale": ("blocks.abs().amax(1)", "torch.ones(len(blocks))"),
    "m forgets its sign": (
        "((magnitude / power.square() + 6 * power) / 7).round() * scaled.sign()",
        "((magnitude / power.square() + 6 * power) / 7).round()",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_leaves_it(tmp_path, full, fault, monkeypatch):
    monkeypatch.setattr(adamw, "adamw_8bit_", mutant(kernel, *FAULTS[fault]).adamw_8bit_)
    assert not is_within(curve(tmp_path, 0, 100, use_8bit_optimizer=True), full(100))


def theirs(weight, gradient, state, step, lr, betas, eps, decay):
    """One update of bitsandbytes' AdamW8bit as its kernel makes it
    (kOptimizerStatic8bit2StateBlockwise), in fp64.
    """
    mean, square = (
        kernel.dequantize_moment(state[name], state[f"{name}_amax"], signed).double()
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False))
    )
    g = gradient.double()
    mean = mean * betas[0] + g * (1 - betas[0])
    square = square * betas[1] + g * g * (1 - betas[1])
    correction = (1 - betas[1] ** step) ** 0.5
    size = -lr * correction / (1 - betas[0] ** step)
    return (
        (weight.double() + size * mean / (square.sqrt() + eps * correction)) * (1 - lr * decay),
        mean,
        square,
    )


def test_the_update_is_that_of_bitsandbytes():
    """Which decays after the step where ours decays before: they differ by lr · λ of it, moments
    by half a code's step.
    """
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(70, 100))
    lr = 1e-3
    betas = (0.9, 0.99)
    eps = 1e-8
    decay = 0.1
    optimizer = Adam8bit([weight], lr=lr, betas=betas, eps=eps, weight_decay=decay)
    for step in range(1, 8):
        weight.grad = torch.randn_like(weight) * 10.0 ** torch.randn(70, 1)
        before = weight.detach().clone()
        state = {name: x.clone() for name, x in optimizer.state_of(weight).items()}
        expected, mean, square = theirs(before, weight.grad, state, step, lr, betas, eps, decay)
        optimizer.step()
        made = weight.detach()
        assert (
            (made - expected).abs()
            <= lr * decay * (expected - before).abs() * 1.01 + 1e-6 * (1 + made.abs())
        ).all()
        for name, moment, signed in (("exp_avg", mean, True), ("exp_avg_sq", square, False)):
            kept = kernel.dequantize_moment(
                optimizer.state[weight][name], optimizer.state[weight][f"{name}_amax"], signed
            )
            largest = (
                optimizer.state[weight][f"{name}_amax"]
                .repeat_interleave(kernel.MOMENT_BLOCK)[: moment.numel()]
                .view(70, 100)
            )
            assert ((kept - moment).abs() <= 0.008 * largest).all()
