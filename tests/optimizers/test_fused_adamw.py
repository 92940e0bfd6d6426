"""FusedAdamW against torch.optim.AdamW, and what its master, its guard and its states promise."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from chronicals.kernels.adamw import join_master, split_master
from chronicals.optimizers import FusedAdamW, adamw
from comparison import FROBENIUS, LARGEST

STEPS = 40


def weights(dtype=torch.float32, shapes=((17, 5), (31,), (), (3, 2, 7))):
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def copies(parameters, dtype=None):
    return [nn.Parameter(p.detach().clone().to(dtype or p.dtype)) for p in parameters]


def give_gradients(*lists):
    """The same fresh gradients to every list, each in its own type; of very different sizes, as
    in a model.
    """
    for together in zip(*lists, strict=True):
        gradient = torch.randn_like(together[0], dtype=torch.float32) * 10 ** torch.empty(
            ()
        ).uniform_(-4, 2)
        gradient = gradient.to(together[0].dtype)
        for parameter in together:
            parameter.grad = gradient.to(parameter.dtype, copy=True)


def flat(tensors) -> Tensor:
    return torch.cat([x.detach().double().flatten() for x in tensors])


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.8, 0.95), (0.0, 0.999)])
@pytest.mark.parametrize("steps", [1, 2, STEPS])
def test_fp32_is_as_exact_as_torch(steps, betas, decay):
    """Beside the error that torch's fp32 AdamW makes against its fp64 one."""
    ours = weights()
    torchs = copies(ours)
    exact = copies(ours, torch.float64)
    start = flat(ours)
    options = {"lr": 1e-2, "betas": betas, "eps": 1e-8, "weight_decay": decay}
    optimizers = (
        FusedAdamW(ours, **options),
        torch.optim.AdamW(torchs, **options),
        torch.optim.AdamW(exact, **options),
    )
    for _ in range(steps):
        give_gradients(ours, torchs, exact)
        for optimizer in optimizers:
            optimizer.step()
    assert (flat(exact) - start).abs().min() > 0
    own_error = flat(ours) - flat(exact)
    plain_error = flat(torchs) - flat(exact)
    spacing = torch.finfo(torch.float32).eps
    # A weight is rounded in each step, which no optimizer can avoid: torch's error has that, and so
    # may ours.
    assert own_error.norm() <= max(FROBENIUS * plain_error.norm(), spacing * start.norm())
    assert own_error.abs().max() <= max(
        LARGEST * plain_error.abs().max(), 2 * spacing * start.abs().max()
    )


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.8, 0.95)])
@pytest.mark.parametrize("steps", [1, 2, 10])
def test_small_updates_are_exact_too(steps, betas):
    """Weights of zero: the displacement is all there is, and the rounding of the weights hides
    no error of it.
    """
    ours = [nn.Parameter(torch.zeros(2000))]
    exact = copies(ours, torch.float64)
    torchs = copies(ours)
    options = {"lr": 1e-2, "betas": betas, "weight_decay": 0.0}
    optimizers = (
        FusedAdamW(ours, **options),
        torch.optim.AdamW(torchs, **options),
        torch.optim.AdamW(exact, **options),
    )
    for _ in range(steps):
        give_gradients(ours, torchs, exact)
        for optimizer in optimizers:
            optimizer.step()
    own_error = flat(ours) - flat(exact)
    plain_error = flat(torchs) - flat(exact)
    spacing = torch.finfo(torch.float32).eps
    limit = max(FROBENIUS * plain_error.norm(), 2 * spacing * flat(exact).norm())
    assert own_error.norm() <= limit, (
        f"{own_error.norm() / flat(exact).norm():.1e} of the displacement"
    )


def test_groups_keep_their_own_rate_and_decay():
    ours = weights()
    torchs = copies(ours)
    start = [p.detach().clone() for p in ours]

    def groups(ps):
        first = {"params": ps[:1], "lr": 3e-2, "weight_decay": 0.3}
        return [first, {"params": ps[1:3], "lr": 1e-3}, {"params": ps[3:]}]

    mine = FusedAdamW(groups(ours), lr=5e-3, weight_decay=0.1)
    theirs = torch.optim.AdamW(groups(torchs), lr=5e-3, weight_decay=0.1)
    for step in range(STEPS):
        for optimizer in (mine, theirs):
            for group in optimizer.param_groups:  # as a schedule does
                group["lr"] *= 0.99 if step else 1.0
        give_gradients(ours, torchs)
        mine.step()
        theirs.step()
    for a, b, s in zip(ours, torchs, start, strict=True):
        moved = (b - s).detach()
        assert moved.abs().min() > 0
        torch.testing.assert_close(
            a.detach() - s, moved, rtol=1e-5, atol=4e-7 * s.abs().max().item()
        )


def test_weights_on_several_devices_are_updated_apart():
    """A launch reaches one of them."""
    weights = [nn.Parameter(torch.randn(3, device=device)) for device in ("cpu", "meta", "cpu")]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    launches = FusedAdamW(weights)._launches(weights)
    assert [[w.device.type for w in tensors.weights] for _, _, tensors in launches] == [
        ["cpu", "cpu"],
        ["meta"],
    ]


def test_weights_without_a_gradient_stay():
    parameters = weights()
    optimizer = FusedAdamW(parameters, lr=1e-2, weight_decay=0.1)
    give_gradients(parameters)
    parameters[1].grad = None
    before = [p.detach().clone() for p in parameters]
    optimizer.step()
    assert [torch.equal(a, b) for a, b in zip(before, parameters, strict=True)] == [
        False,
        True,
        False,
        False,
    ]


def test_a_weight_of_no_group_is_refused():
    optimizer = FusedAdamW(weights())
    with pytest.raises(ValueError, match=r"a weight \(2, 3\) is in no group"):
        optimizer.step_of([nn.Parameter(torch.zeros(2, 3))])


def test_closure():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = FusedAdamW([parameter], lr=1e-2)

    def closure():
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert (parameter < 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_factor_multiplies_the_gradients(dtype):
    """By a power of two it is exact."""
    ours = weights(dtype)
    theirs = copies(ours)
    mine = FusedAdamW(ours, lr=1e-2)
    other = FusedAdamW(theirs, lr=1e-2)
    for _ in range(5):
        give_gradients(ours, theirs)
        for parameter in theirs:
            parameter.grad *= 0.25
        mine.step(factor=torch.tensor(0.25))
        other.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


OUT_OF_RANGE = [
    {"lr": -1.0},
    {"eps": 0.0},
    {"weight_decay": -0.1},
    {"betas": (1.0, 0.9)},
    {"betas": (0.9, -0.1)},
]


@pytest.mark.parametrize("wrong", OUT_OF_RANGE, ids=str)
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        FusedAdamW(weights(), **wrong)


# --- bf16 with its master
# ------------------------------------------------------------------------------------------


def master(optimizer, parameter) -> Tensor:
    return join_master(parameter, optimizer.state[parameter]["low"])


def test_bf16_weights_train_as_fp32_weights_do():
    """300 steps of a millionth: bf16 next to 1 has steps of 1/128, so that rounded weights would
    not move at all.
    """
    start = (torch.rand(4000) + 0.5) * torch.where(torch.rand(4000) < 0.5, -1, 1)
    ours = nn.Parameter(start.bfloat16())
    exact = nn.Parameter(ours.detach().float())
    rounded = nn.Parameter(ours.detach().clone())
    options = {"lr": 1e-6, "weight_decay": 0.01}
    optimizer = FusedAdamW([ours], **options)
    others = torch.optim.AdamW([exact], **options), torch.optim.AdamW([rounded], **options)
    before = ours.detach().clone()
    direction = torch.randn(4000)
    for _ in range(300):
        gradient = (direction + torch.randn(4000)).bfloat16()
        ours.grad = gradient
        exact.grad = gradient.float()
        rounded.grad = gradient.clone()
        for each in (optimizer, *others):
            each.step()
    assert torch.equal(rounded, before), "without a master nothing would have moved"
    moved = master(optimizer, ours) - before.float()
    expected = exact.detach() - before.float()
    assert expected.abs().mean() > 1e-5
    assert (moved - expected).norm() / expected.norm() < 1e-3
    assert torch.equal(ours, split_master(master(optimizer, ours))[0])


def test_the_weight_itself_follows_its_master():
    """Over steps that bf16 can see, the weight is its master, rounded, after every one of them."""
    ours = nn.Parameter(torch.randn(500).bfloat16())
    exact = nn.Parameter(ours.detach().float())
    before = ours.detach().clone()
    mine = FusedAdamW([ours], lr=1e-3)
    theirs = torch.optim.AdamW([exact], lr=1e-3, weight_decay=0.0)
    for _ in range(50):
        ours.grad = torch.randn(500).bfloat16()
        exact.grad = ours.grad.float()
        mine.step()
        theirs.step()
        assert torch.equal(ours, split_master(master(mine, ours))[0])
    assert (ours != before).float().mean() > 0.5
    assert (master(mine, ours) - exact).norm() <= 1e-4 * (exact - before).norm()


def test_without_masters_matrices_alone_are_rounded():
    """Vectors keep theirs; what was saved comes back, and each kind has its launch."""
    matrix, vector = (
        torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in ((64, 64), (64,))
    )
    optimizer = FusedAdamW([matrix, vector], lr=1e-4, master=False)
    for _ in range(3):
        for weight in (matrix, vector):
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert "low" not in optimizer.state[matrix] and optimizer.state[vector]["low"].any()
    assert 1 < matrix.unique().numel() <= 3 and matrix.float().mean().item() == pytest.approx(
        1 - 3e-4, abs=1e-4
    )
    assert (vector == 1).all() and master(optimizer, vector).mean().item() == pytest.approx(
        1 - 3e-4, abs=1e-6
    )
    other = FusedAdamW([matrix, vector], lr=1e-4, master=False)
    other.load_state_dict(optimizer.state_dict())
    assert other.state[matrix].keys() == optimizer.state[matrix].keys()
    assert torch.equal(other.state[vector]["low"], optimizer.state[vector]["low"])
    value = torch.full((64, 64), 1.001)
    optimizer.set_master(matrix, value)
    assert torch.equal(matrix, value.bfloat16())


def test_set_master_is_exact():
    parameter = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    optimizer = FusedAdamW([parameter], lr=0.0)
    value = torch.randn(1000)
    optimizer.set_master(parameter, value)
    assert torch.equal(master(optimizer, parameter), value)
    parameter.grad = torch.randn(1000).bfloat16()
    optimizer.step()  # at a rate of zero
    assert torch.equal(master(optimizer, parameter), value)


def trained(dtype=torch.bfloat16, steps=3):
    parameters = weights(dtype)
    optimizer = FusedAdamW(parameters, lr=1e-4, weight_decay=0.1)
    for _ in range(steps):
        give_gradients(parameters)
        optimizer.step()
    return parameters, optimizer


def everything(parameters, optimizer):
    return [x.detach().clone() for p in parameters for x in (p, *optimizer.state[p].values())]


def same_bits(left, right) -> bool:
    views = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.int16: torch.int16}
    return all(
        torch.equal(a.view(views[a.dtype]), b.view(views[b.dtype]))
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda p, new: p.copy_(new),
        lambda p, new: p.add_(new),
        lambda p, new: p.fill_(new.flatten()[0]),
        lambda p, new: nn.utils.vector_to_parameters(new.flatten(), [p]),
    ],
    ids=["copy_", "add_", "fill_", "vector_to_parameters"],
)
def test_a_weight_changed_from_outside_begins_anew(change):
    """Its old lower half belongs to a value that is no more."""
    (parameter, *_), optimizer = trained()
    assert optimizer.state[parameter]["low"].any()
    with torch.no_grad():
        change(parameter, torch.randn(17, 5).bfloat16())
    value = parameter.detach().float()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(master(optimizer, parameter), value)
    assert not optimizer.state[parameter]["low"].any()


def test_a_weight_that_is_only_read_keeps_its_master():
    (parameter, *_), optimizer = trained()
    before = master(optimizer, parameter)
    (parameter * 2).sum().backward()
    copy.deepcopy(parameter.detach())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert (
        torch.equal(master(optimizer, parameter), before)
        and optimizer.state[parameter]["low"].any()
    )


# --- steps that do not count
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("gradient", [float("nan"), float("inf"), -float("inf"), 1e30, 0.5])
def test_a_step_that_is_not_applied_changes_no_bit(gradient, steps, dtype):
    parameters, optimizer = trained(dtype, steps)
    with torch.no_grad():  # also where the weights are special
        parameters[1][:4] = torch.tensor([0.0, -0.0, float("inf"), float("nan")]).to(dtype)
    for parameter in parameters:
        optimizer.state_of(parameter)
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer.state[parameters[1]].get("low", torch.zeros(())).zero_()
    before = everything(parameters, optimizer)
    optimizer.step(factor=torch.tensor(gradient), apply=torch.tensor(False))
    after = everything(parameters, optimizer)
    assert len(before) == len(after) == len(parameters) * (5 if dtype == torch.bfloat16 else 4)
    assert same_bits(before, after)
    assert all(optimizer.state[p]["step"].item() == steps for p in parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_skipped_step_leaves_no_trace_in_the_run(dtype):
    """With a poisoned step in the middle the run ends as it would without."""
    ours = weights(dtype)
    theirs = copies(ours)
    mine = FusedAdamW(ours, lr=1e-3)
    other = FusedAdamW(theirs, lr=1e-3)
    for step in range(6):
        give_gradients(ours, theirs)
        if step == 3:
            gradients = [p.grad for p in ours]
            for parameter in ours:
                parameter.grad = torch.full_like(parameter, float("nan"))
            mine.step(apply=torch.tensor(False))
            for parameter, gradient in zip(ours, gradients, strict=True):
                parameter.grad = gradient
        mine.step(apply=torch.tensor(True))
        other.step()
    assert same_bits(everything(ours, mine), everything(theirs, other))
    assert all(mine.state[p]["step"].item() == 6 for p in ours)


# --- states
# --------------------------------------------------------------------------------------------------------


def continue_both(ours, mine, theirs, other):
    for _ in range(5):
        give_gradients(ours, theirs)
        mine.step()
        other.step()
        assert same_bits(everything(ours, mine), everything(theirs, other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_load_state_continues_bit_equal(dtype):
    ours, mine = trained(dtype)
    saved = [{name: x.clone() for name, x in mine.state_of(p).items()} for p in ours]
    theirs = copies(ours)
    other = FusedAdamW(theirs, lr=1e-4, weight_decay=0.1)
    for parameter, state in zip(theirs, saved, strict=True):
        other.load_state(parameter, state)
    assert same_bits(everything(ours, mine), everything(theirs, other))
    continue_both(ours, mine, theirs, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchs_own_state_dict_continues_bit_equal(dtype):
    """``state_dict`` and ``load_state_dict``, which every torch training loop saves an optimizer
    with.
    """
    ours, mine = trained(dtype)
    buffer = io.BytesIO()
    torch.save(mine.state_dict(), buffer)
    buffer.seek(0)
    theirs = copies(ours)
    other = FusedAdamW(theirs, lr=1e-4, weight_decay=0.1)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    continue_both(ours, mine, theirs, other)


@pytest.mark.parametrize("name", ["step", "exp_avg", "exp_avg_sq", "low"])
def test_a_state_that_is_missing_or_misshapen_is_refused(name):
    (parameter, *_), optimizer = trained()
    state = dict(optimizer.state_of(parameter))
    for wrong in ({k: v for k, v in state.items() if k != name}, {**state, name: torch.zeros(99)}):
        with pytest.raises(ValueError, match=f"{name!r}.*missing or misshapen"):
            optimizer.load_state(parameter, wrong)


def test_states_are_fp32_whatever_the_weight():
    for dtype in (torch.float32, torch.bfloat16):
        (parameter, *_), optimizer = trained(dtype)
        types = {name: x.dtype for name, x in optimizer.state_of(parameter).items()}
        fp32 = dict.fromkeys(("step", "exp_avg", "exp_avg_sq"), torch.float32)
        assert types == fp32 | ({"low": torch.int16} if dtype == torch.bfloat16 else {})


def test_a_copied_optimizer_goes_on():
    """With its types, and with the lower halves of its masters."""
    (weight,) = weights(torch.bfloat16, shapes=((17, 5),))
    optimizer = FusedAdamW([weight], lr=1e-3, state_dtype=torch.bfloat16)
    give_gradients([weight])
    optimizer.step()
    other = copy.deepcopy(optimizer)
    twin = other.param_groups[0]["params"][0]
    twin.grad = weight.grad.clone()
    for each in (optimizer, other):
        each.step()
    assert torch.equal(weight, twin) and torch.equal(
        optimizer.state[weight]["low"], other.state[twin]["low"]
    )


def test_looking_up_before_a_capture_leaves_nothing_to_do(monkeypatch):
    """A weight that was written from outside loses its lower half once, not in every replay."""
    (weight,) = weights(torch.bfloat16, shapes=((17, 5),))
    optimizer = FusedAdamW([weight], lr=1e-3)
    optimizer.set_master(weight, torch.randn(17, 5))
    give_gradients([weight])
    with torch.no_grad():
        weight.add_(1)
    optimizer.looked_up([weight])
    low = optimizer.state[weight]["low"].fill_(3)
    optimizer._launches([weight])
    assert (low == 3).all()


def test_a_weight_that_was_written_begins_anew_whatever_comes_first():
    """A step in which it has no gradient, a copy, a saved state."""
    own, other = weights(torch.bfloat16, shapes=((17, 5), (5, 3)))
    optimizer = FusedAdamW([own, other], lr=1e-3)
    for follows in (lambda: None, lambda: copy.deepcopy(optimizer), optimizer.state_dict):
        optimizer.set_master(own, torch.randn(17, 5))
        assert optimizer.state[own]["low"].any()
        with torch.no_grad():
            own.add_(1)
        give_gradients([other])
        own.grad = None
        optimizer.step()
        follows()
        assert not optimizer.state_of(own)["low"].any()


def test_a_launch_that_fails_takes_nothing_from_those_before(monkeypatch):
    own = weights(torch.bfloat16, shapes=((17, 5),))
    other = weights(torch.float32, shapes=((17, 5),))
    optimizer = FusedAdamW([*own, *other], lr=1e-3)
    give_gradients([*own, *other])
    usual = adamw.fused_adamw_

    def fails(tensors, *given, **options):
        if tensors.weights[0].dtype == torch.float32:
            raise RuntimeError("planted")
        usual(tensors, *given, **options)

    monkeypatch.setattr(adamw, "fused_adamw_", fails)
    with pytest.raises(RuntimeError, match="planted"):
        optimizer.step()
    low = optimizer.state[own[0]]["low"].clone()
    assert low.any() and torch.equal(optimizer.state_of(own[0])["low"], low)
