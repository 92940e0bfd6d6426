"""Norms, gated units and rotations find the largest absolute value of what they write, to the
bit; it is told for that tensor alone."""

import sys

import pytest
import torch

from chronicals.kernels import fused_add_rmsnorm
from chronicals.kernels.fp8 import Amax, fp8_quantize, with_amax
from chronicals.kernels.glu import glu_of_both
from chronicals.kernels.qk_norm_rope import fused_qkv_norm_rope
from chronicals.kernels.qk_rope import fused_qkv_rope
from mutants import mutant

TYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 8), (13, 37), (5, 257), (3, 1300)]
HEADS = [((3, 1), 6, 4), ((4, 2), 64, 64), ((1, 1), 40, 16)]
RMSNORM, GLU, ROPE, NORM_ROPE = (
    sys.modules[f"chronicals.kernels.{name}"]
    for name in ("rmsnorm", "glu", "qk_rope", "qk_norm_rope")
)


def largest(x):
    return x.detach().nan_to_num(0.0, posinf=float("inf"), neginf=float("-inf")).abs().max().float()


def draw(device, dtype, *shape):
    """The largest value anywhere, and of either sign."""
    x = torch.randn(*shape, device=device)
    x.view(-1)[torch.randint(x.numel(), ())] = 9.0 * (-1) ** int(torch.randint(2, ()))
    return x.to(dtype).requires_grad_()


def gradients_seen(x):
    """The very tensor that comes back to ``x``, filled by its hook."""
    seen = []
    x.register_hook(
        lambda gradient: seen.append(gradient)
    )  # returns None: the gradient goes on as it is
    return seen


def check_norm(norm, shape, dtype, device, summed, weighed, paddings=(0, 0)):
    x = draw(device, dtype, *shape)
    weight = draw(device, dtype, shape[-1]) if weighed else None
    residual = draw(device, dtype, *shape) if summed else None
    amax = Amax()
    of_gradient = Amax()
    y, total = norm(x, residual, weight, 1e-6, 0.0, *paddings, amax, of_gradient)
    assert amax.take(y) == largest(y)
    seen = gradients_seen(x)
    torch.autograd.backward((y, total), (torch.randn_like(y), torch.randn_like(total)))
    assert of_gradient.take(seen[0]) == largest(seen[0])


@pytest.mark.slow
@pytest.mark.parametrize("weighed", [False, True], ids=["no weight", "weight"])
@pytest.mark.parametrize("summed", [False, True], ids=["alone", "sum"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_of_norms(shape, summed, weighed, device):
    for dtype in TYPES:
        check_norm(fused_add_rmsnorm, shape, dtype, device, summed, weighed)


@pytest.mark.slow
def test_columns_left_free_have_no_part(device, monkeypatch):
    """Whatever lies in them."""
    for module in (RMSNORM, GLU, ROPE):
        usual = module.with_padding
        monkeypatch.setattr(
            module, "with_padding", lambda *a, usual=usual, **k: infinite_around(usual(*a, **k))
        )
    check_norm(fused_add_rmsnorm, (5, 37), torch.float32, device, True, True, paddings=(8, 16))
    check_unit(glu_of_both, 5, 37, torch.float32, device, "silu", paddings=(8, 16))
    for turn in (fused_qkv_rope, normed(fused_qkv_norm_rope)):
        check_rotation(turn, 5, (3, 1), 6, 4, torch.float32, device, padding=16)


def infinite_around(x):
    x.as_strided((len(x), x.stride(0)), (x.stride(0), 1)).fill_(float("inf"))
    return x


def check_unit(unit, rows, width, dtype, device, activation, paddings=(0, 0)):
    both = draw(device, dtype, rows, 2 * width)
    amax = Amax()
    of_gradient = Amax()
    y = unit(both, activation, *paddings, amax, of_gradient)
    assert amax.take(y) == largest(y)
    seen = gradients_seen(both)
    y.backward(torch.randn_like(y))
    assert of_gradient.take(seen[0]) == largest(seen[0])


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "width"), SHAPES, ids=str)
def test_of_units(rows, width, activation, device):
    for dtype in TYPES:
        check_unit(glu_of_both, rows, width, dtype, device, activation)


def check_rotation(
    turn, tokens, heads, width, rotated, dtype, device, interleaved=False, padding=0, spoil=()
):
    """The largest gradient may reach queries, keys or values, ``spoil`` is where there is none."""
    h, k = heads
    angles = torch.randn(tokens, rotated, device=device)
    qkv = draw(device, dtype, tokens, (h + 2 * k) * width) * 1
    given = draw(device, dtype, tokens, h + 2 * k, width).detach()
    for place in spoil:
        given[place] = float("nan")
    amax = Amax()
    seen = gradients_seen(qkv)
    out = turn(qkv, angles.cos(), angles.sin(), heads, interleaved, padding, amax)
    torch.autograd.backward(out, given.split((h, k, k), 1))
    assert seen[0].stride(0) == qkv.shape[1] + padding and amax.take(seen[0]) == largest(seen[0])


def normed(turn):
    """After norms whose weights are trained."""

    def run(qkv, cos, sin, heads, *options):
        weight = torch.ones(
            qkv.shape[1] // (heads[0] + 2 * heads[1]),
            device=qkv.device,
            dtype=qkv.dtype,
            requires_grad=True,
        )
        return turn(qkv, weight, weight, cos, sin, heads, 1e-6, 0.0, *options)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("padding", [0, 16])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("heads", "width", "rotated"), HEADS, ids=str)
@pytest.mark.parametrize(
    "turn", [fused_qkv_rope, normed(fused_qkv_norm_rope)], ids=["alone", "after norms"]
)
def test_of_rotations(turn, heads, width, rotated, interleaved, padding, device):
    for dtype in TYPES:
        check_rotation(turn, 13, heads, width, rotated, dtype, device, interleaved, padding)


@pytest.mark.parametrize(
    "turn", [fused_qkv_rope, normed(fused_qkv_norm_rope)], ids=["alone", "after norms"]
)
def test_what_is_no_number_has_no_part_in_rotations(turn, device):
    """Neither rotated, nor beyond, nor copied."""
    check_rotation(
        turn, 13, (3, 1), 6, 4, torch.bfloat16, device, spoil=[(1, 0, 2), (4, 3, 5), (8, 4, 0)]
    )


def test_what_is_no_number_has_no_part(device):
    x = draw(device, torch.float32, 4, 16)
    amax = Amax()
    with torch.no_grad():
        x[1, 3] = float("nan")  # and with it its whole row of the norm
    y, _ = fused_add_rmsnorm(x, None, None, amax=amax)
    assert y[1].isnan().all() and amax.take(y) == largest(y)


def test_it_is_taken_once_and_for_that_tensor_alone(device):
    x = torch.randn(4, 8, device=device)
    cell = torch.ones(1, dtype=torch.int32, device=device)

    def told():
        amax = Amax()
        with_amax(amax, x, cell)
        return amax

    amax = told()
    assert amax.take(x) is not None and amax.take(x) is None
    for other in (x[:2], x.view(8, 4), x.t(), x.clone()):
        assert told().take(other) is None
    amax = told()
    x.mul_(2)
    assert amax.take(x) is None
    assert Amax().take(x) is None


def test_another_tensor_in_the_same_memory_has_none(device):
    """Of the same shape, and as new."""
    memory = torch.randn(2, 4, 256, device=device)
    for _ in range(20):
        x = memory[0].clone()
        amax = Amax()
        place = x.data_ptr()
        with_amax(amax, x, torch.ones(1, dtype=torch.int32, device=device))
        del x
        other = memory[1].clone()
        assert amax.take(other) is None
        if other.data_ptr() == place:
            return
    pytest.skip("the allocator never gave the same memory again")


@pytest.mark.parametrize(
    "between", ["another gradient is added", "a hook changes it", "a hook changes it in place"]
)
def test_a_gradient_that_something_was_done_to_has_none(between, device):
    x = draw(device, torch.float32, 4, 16)
    amax = Amax()
    taken = []
    source = x * 1.0

    class Takes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            taken.append(amax.take(dy))
            return dy

    both = Takes.apply(source)
    if between == "a hook changes it":
        both.register_hook(lambda gradient: 2 * gradient)
    if between == "a hook changes it in place":
        both.register_hook(lambda gradient: gradient.mul_(2))
    y = glu_of_both(both, "silu", gradient_amax=amax).sum()
    (y + both.square().sum() if between == "another gradient is added" else y).backward()
    assert taken == [None]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["rows", "columns", "both"])
def test_quantised_with_it_is_the_same(layout, device):
    for dtype in (torch.bfloat16, torch.float32):
        x = draw(device, dtype, 130, 257).detach()
        for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
            found = (
                fp8_quantize(x, dtype=kind, layout=layout),
                fp8_quantize(x, dtype=kind, layout=layout, amax=largest(x)[None]),
            )
            for ours, usual in zip(*found, strict=True):
                assert (ours is None) == (usual is None)
                assert ours is None or all(
                    torch.equal(a.float(), b.float()) for a, b in zip(ours, usual)
                )
    with pytest.raises(
        ValueError,
        match="scaling='row': only the scale or the maximum of a whole tensor can be given",
    ):
        fp8_quantize(x, "row", amax=largest(x)[None])


FAULTS = {
    "of the norm before its weight": (
        RMSNORM,
        "magnitude(y.to(tl.float32))",
        "magnitude((s * rstd[:, None]).to(tl.float32))",
    ),
    "of the gradient's last rows alone": (
        RMSNORM,
        "tl.maximum(most, tl.where(here, magnitude(ds.to(tl.float32)), 0.0))",
        "tl.where(here, magnitude(ds.to(tl.float32)), 0.0)",
    ),
    "of the gate's gradient alone": (
        GLU,
        "tl.maximum(magnitude(d_gate.to(tl.float32)), magnitude(d_up.to(tl.float32)))",
        "magnitude(d_gate.to(tl.float32))",
    ),
    "before rounding": (GLU, "magnitude(y.to(tl.float32))", "magnitude(activated * up)"),
    "of queries and keys alone": (
        ROPE,
        "tl.where(inside, magnitude(x.to(tl.float32)), 0.0)",
        "0.0 * tl.where(inside, magnitude(x.to(tl.float32)), 0.0)",
    ),
    "of rotated channels alone": (
        ROPE,
        "magnitude(rest.to(tl.float32))",
        "0.0 * magnitude(rest.to(tl.float32))",
    ),
    "rotated, before rounding": (ROPE, "most.to(out_ptr.dtype.element_ty)", "most"),
    "of normed queries and keys alone": (
        NORM_ROPE,
        (
            "copy_heads(dv_ptr, dv_place_ptr, amax_ptr, (program - of_q - of_k) * ROWS, "
            "positions, length, dv_batch, dv_token, dv_head, place_batch, place_token, "
            "place_head, V_HEADS, ROWS, WIDTH, WHOLE, HAS_AMAX)"
        ),
        (
            "copy_heads(dv_ptr, dv_place_ptr, amax_ptr, (program - of_q - of_k) * ROWS, "
            "positions, length, dv_batch, dv_token, dv_head, place_batch, place_token, "
            "place_head, V_HEADS, ROWS, WIDTH, WHOLE, False)"
        ),
    ),
    "of normed and rotated channels alone": (
        NORM_ROPE,
        "tl.max(magnitude(d_rest), 1)",
        "0.0 * tl.max(magnitude(d_rest), 1)",
    ),
    "of the last heads alone": (
        NORM_ROPE,
        "tl.maximum(most, tl.max(tl.maximum(magnitude(d_a), magnitude(d_b)), 1))",
        "tl.max(tl.maximum(magnitude(d_a), magnitude(d_b)), 1)",
    ),
}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, device):
    module, old, new = FAULTS[fault]
    wrong = mutant(module, old, new)
    with pytest.raises(AssertionError):
        for _ in range(60):  # each may miss a fault, by where the largest lies
            if module is RMSNORM:  # many for each program, or its last ones often hold the largest
                rows = 4000 if device.type == "cpu" else 70_000
                check_norm(wrong.fused_add_rmsnorm, (rows, 64), torch.bfloat16, device, False, True)
            elif module is GLU:
                check_unit(wrong.glu_of_both, 13, 37, torch.bfloat16, device, "silu")
            else:
                turn = wrong.fused_qkv_rope if module is ROPE else normed(wrong.fused_qkv_norm_rope)
                check_rotation(
                    turn,
                    133 if device.type == "cpu" else 20_000,
                    (4, 2),
                    64,
                    32,
                    torch.bfloat16,
                    device,
                )
