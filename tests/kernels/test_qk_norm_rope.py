"""fused_qk_norm_rope against norm and complex rotation in fp64 and against the pieces of
transformers' Qwen3.
"""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import chronicals.kernels.qk_norm_rope as module
from chronicals.kernels import fused_qk_norm_rope, fused_qk_rope, fused_rmsnorm
from chronicals.kernels.qk_norm_rope import qk_norm_rope_reference
from comparison import assert_as_exact_as_plain, outputs_and_gradients
from mutants import mutant

TYPES = [torch.float32, torch.bfloat16]


def tables(*shape: int, dtype=torch.float32, device="cpu") -> tuple[Tensor, Tensor]:
    """cos and sin of random angles, both halves alike, of the given shape."""
    angles = torch.rand(*shape[:-1], shape[-1] // 2, dtype=torch.float64, device=device) * 7
    return torch.cat((angles.cos(), angles.cos()), -1).to(dtype), torch.cat(
        (angles.sin(), angles.sin()), -1
    ).to(dtype)


def norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) * (offset + weight)


def definition(cos: Tensor, sin: Tensor, heads: int, eps: float, offset: float, interleaved: bool):
    """Pair by pair, with tables whose halves may differ; in the type of the inputs, at least
    fp32, rounded at the end.
    """
    rotated = cos.shape[-1]
    order = (
        torch.arange(rotated).view(-1, 2).t() if interleaved else torch.arange(rotated).view(2, -1)
    )

    def rotate(x: Tensor, weight: Tensor) -> Tensor:
        kind = torch.promote_types(x.dtype, torch.float32)
        n, c, s = (
            norm(x.to(kind), weight.to(kind), eps, offset),
            *(t.to(x.device, kind).unsqueeze(heads) for t in (cos, sin)),
        )
        a, b = order.to(x.device)
        new_a = n[..., a] * c[..., a] - n[..., b] * s[..., a]
        new_b = n[..., b] * c[..., b] + n[..., a] * s[..., b]
        pairs = torch.cat((new_a, new_b), -1)[..., torch.argsort(order.flatten()).to(x.device)]
        return torch.cat((pairs, n[..., rotated:]), -1).to(x.dtype)

    return lambda q, k, q_weight, k_weight: (rotate(q, q_weight), rotate(k, k_weight))


def compare(draw, cos, sin, function=fused_qk_norm_rope, eps=1e-6, offset=0.0, interleaved=False):
    """``draw`` gives q, k and their weights."""
    assert_as_exact_as_plain(
        lambda *given: function(*given, cos, sin, eps, offset, interleaved),
        definition(cos, sin, -2 if cos.ndim == 2 else 1, eps, offset, interleaved),
        draw,
    )


def weights(d, dtype, device):
    return tuple(torch.empty(d, device=device).uniform_(-2, 2).to(dtype) for _ in range(2))


def default_layout(b, h, k, s, d, dtype, device, scale=1.0):
    """Transposed views, as every transformers model makes them."""
    return lambda: (
        *(
            (torch.randn(b, s, n, d, device=device) * scale).to(dtype).transpose(1, 2)
            for n in (h, k)
        ),
        *weights(d, dtype, device),
    )


def packed_layout(t, h, k, d, dtype, device):
    return lambda: (
        *(torch.randn(t, n, d, device=device).to(dtype) for n in (h, k)),
        *weights(d, dtype, device),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "tokens, heads, dtype",
    [
        (13, (1, 1), torch.float32),
        (1, (5, 1), torch.bfloat16),
        (13, (5, 2), torch.bfloat16),
    ],
    ids=str,
)
def test_packed_layout(tokens, heads, dtype, device):
    cos, sin = tables(tokens, 64, dtype=dtype, device=device)
    compare(packed_layout(tokens, *heads, 64, dtype, device), cos, sin)


@pytest.mark.slow
@pytest.mark.parametrize(
    "batch_of_tables, dtype", [(1, torch.bfloat16), (2, torch.float32), (2, torch.float16)], ids=str
)
def test_default_layout(batch_of_tables, dtype, device):
    cos, sin = tables(batch_of_tables, 5, 64, dtype=dtype, device=device)
    compare(default_layout(2, 3, 2, 5, 64, dtype, device), cos, sin)


@pytest.mark.slow
@pytest.mark.parametrize(
    "width, rotated, interleaved, dtype",
    [
        (64, 24, False, torch.float32),
        (64, 24, True, torch.bfloat16),
        (65, 2, False, torch.bfloat16),
        (65, 2, True, torch.float32),
        (48, 48, True, torch.bfloat16),
        (33, 0, False, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("ours", [fused_qk_norm_rope, qk_norm_rope_reference])
def test_widths_and_layouts_of_the_pairs(ours, width, rotated, interleaved, dtype, device):
    """All of the head or part of it, powers of 2 or none, with tables whose halves differ, under
    Gemma's offset.
    """
    cos, sin = (torch.randn(2, 5, rotated, device=device) for _ in range(2))
    draw = default_layout(2, 3, 2, 5, width, dtype, device)
    compare(draw, cos, sin, ours, offset=1.0, interleaved=interleaved)


@pytest.mark.slow
@pytest.mark.parametrize("eps", [1e-12, 0.5])
def test_eps_counts(eps, device):
    """Small heads, so that eps is a large part of what is under the root."""
    compare(
        default_layout(2, 3, 2, 5, 64, torch.float32, device, scale=0.3),
        *tables(2, 5, 64, device=device),
        eps=eps,
    )


@pytest.mark.slow
def test_squares_do_not_overflow(device):
    """fp16 ends at 65504, the square of 256."""
    draw = default_layout(2, 3, 2, 5, 64, torch.float16, device, scale=2000.0)
    compare(draw, *tables(2, 5, 64, device=device))


@pytest.mark.slow
def test_fp32_weights_and_tables(device):
    """Each result keeps the type of its input."""
    dtype = torch.bfloat16

    def draw():
        q, k, *_ = packed_layout(13, 4, 2, 64, dtype, device)()
        return q, k, *weights(64, torch.float32, device)

    cos, sin = tables(13, 64, device=device)
    assert {x.dtype for x in fused_qk_norm_rope(*draw(), cos, sin)} == {dtype}
    compare(draw, cos, sin)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    ["contiguous", "sliced heads", "every second channel", "expanded", "one merged tensor"],
)
def test_layouts_in_memory(layout, device):
    dtype = torch.bfloat16
    cos, sin = tables(2, 5, 64, dtype=dtype, device=device)
    cos, sin = (
        (cos[:1].expand(2, -1, -1), sin[:1].expand(2, -1, -1))
        if layout == "expanded"
        else (cos, sin)
    )

    def random(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    def draw():
        q, k = {
            "contiguous": lambda: (random(2, 4, 5, 64), random(2, 3, 5, 64)),
            "sliced heads": lambda: (
                random(2, 9, 5, 64)[:, ::2][:, :4],
                random(2, 7, 5, 64)[:, 4:],
            ),
            "every second channel": lambda: (
                random(2, 4, 5, 128)[..., ::2],
                random(2, 3, 5, 128)[..., 1::2],
            ),
            "expanded": lambda: (
                random(2, 1, 5, 64).expand(2, 4, 5, 64),
                random(1, 3, 5, 64).expand(2, 3, 5, 64),
            ),
            "one merged tensor": lambda: random(2, 5, 7, 64).transpose(1, 2).split((4, 3), 1),
        }[layout]()
        assert (layout == "contiguous") == (q.is_contiguous() and k.is_contiguous())
        return q, k, *(w.repeat_interleave(2)[::2] for w in weights(64, dtype, device))

    compare(draw, cos, sin)


@pytest.mark.slow
def test_tables_of_unlike_layouts(device):
    cos = torch.randn(2, 5, 64, device=device)
    sin = torch.randn(2, 64, 5, device=device).transpose(1, 2)
    compare(default_layout(2, 3, 2, 5, 64, torch.float32, device), cos, sin)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_equals_qwen3(dtype, device):
    """Whose pieces round after each operation: to their own error in bf16, and to a few
    roundings in fp32.
    """
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    layer = Qwen3RMSNorm(64, eps=1e-5).to(device)
    cos, sin = tables(2, 5, 64, dtype=dtype, device=device)

    def qwen3(q, k, q_weight, k_weight):
        q, k = (
            torch.func.functional_call(layer, {"weight": w}, x)
            for x, w in ((q, q_weight), (k, k_weight))
        )
        return apply_rotary_pos_emb(q, k, cos.to(q), sin.to(q))

    assert_as_exact_as_plain(
        lambda *given: fused_qk_norm_rope(*given, cos, sin, 1e-5),
        qwen3,
        default_layout(2, 3, 2, 5, 64, dtype, device),
        exact=definition(cos, sin, 1, 1e-5, 0.0, False),
    )


def test_equals_a_whole_attention_layer_of_qwen3(device):
    """From its hidden states to the queries and keys that reach the attention, with the tables
    that the model makes.
    """
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import (
        Qwen3Attention,
        Qwen3RotaryEmbedding,
        apply_rotary_pos_emb,
    )

    config = Qwen3Config(
        hidden_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=1,
    )
    attention = Qwen3Attention(config, 0).to(device)
    rotary = Qwen3RotaryEmbedding(config).to(device)
    for part in (attention.q_norm, attention.k_norm):
        torch.nn.init.uniform_(part.weight, -2, 2)
    hidden = torch.randn(2, 13, 48, device=device)
    cos, sin = rotary(hidden, torch.randint(0, 1000, (2, 13), device=device))
    q, k = (part(hidden).view(2, 13, -1, 16) for part in (attention.q_proj, attention.k_proj))
    theirs = apply_rotary_pos_emb(
        attention.q_norm(q).transpose(1, 2), attention.k_norm(k).transpose(1, 2), cos, sin
    )
    given = attention.q_norm.weight, attention.k_norm.weight, cos, sin, config.rms_norm_eps
    for got, expected in zip(
        fused_qk_norm_rope(q.transpose(1, 2), k.transpose(1, 2), *given), theirs, strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_equals_norm_then_rotation(interleaved, device):
    q, k, q_weight, k_weight = packed_layout(13, 4, 2, 16, torch.float32, device)()
    cos, sin = (torch.randn(13, 12, device=device) for _ in range(2))
    normalised = fused_rmsnorm(q, q_weight, offset=1.0), fused_rmsnorm(k, k_weight, offset=1.0)
    expected = fused_qk_rope(*normalised, cos, sin, interleaved=interleaved)
    got = fused_qk_norm_rope(
        q, k, q_weight, k_weight, cos, sin, offset=1.0, interleaved=interleaved
    )
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_packed_equals_default(device):
    """The same bits, and the layout of the input."""
    q, k, *both = default_layout(1, 4, 2, 13, 16, torch.float32, device)()
    cos, sin = tables(1, 13, 16, device=device)
    apart = fused_qk_norm_rope(q, k, *both, cos, sin)
    packed = fused_qk_norm_rope(q[0].transpose(0, 1), k[0].transpose(0, 1), *both, cos[0], sin[0])
    for given, a, b in zip((q, k), apart, packed, strict=True):
        assert torch.equal(a[0].transpose(0, 1), b)
        assert a.stride()[1:] == given.stride()[1:]
        assert b.is_contiguous()


def test_zero_heads_stay_zero(device):
    q, k = (torch.zeros(3, n, 8, device=device, requires_grad=True) for n in (4, 2))
    out = fused_qk_norm_rope(q, k, *weights(8, torch.float32, device), *tables(3, 8, device=device))
    sum(x.sum() for x in out).backward()
    assert not any(x.any() for x in out)
    assert q.grad.isfinite().all() and k.grad.isfinite().all()


def test_no_tokens(device):
    q, k, *both = (x.requires_grad_() for x in packed_layout(0, 4, 2, 8, torch.float32, device)())
    out = fused_qk_norm_rope(q, k, *both, *tables(0, 8, device=device))
    sum(x.sum() for x in out).backward()
    assert [tuple(x.shape) for x in out] == [(0, 4, 8), (0, 2, 8)]
    assert not any(weight.grad.any() for weight in both)


def test_only_one_result_used(device):
    q, k, *both = (
        x.requires_grad_() for x in default_layout(2, 3, 2, 5, 64, torch.float32, device)()
    )
    fused_qk_norm_rope(q, k, *both, *tables(2, 5, 64, device=device))[0].sum().backward()
    assert q.grad.any() and both[0].grad.any()
    assert not any(x.grad is not None and x.grad.any() for x in (k, both[1]))


@pytest.mark.parametrize("trained", [(True, False), (False, True), (False, False)], ids=str)
def test_a_frozen_weight_gets_no_gradient(trained, device):
    cos, sin = tables(2, 5, 6, device=device)
    q, k, *both = default_layout(2, 3, 2, 5, 64, torch.float32, device)()
    upstream = [torch.randn_like(x) for x in (q, k)]

    def gradients(function, wanted):
        leaves = [
            x.detach().requires_grad_(want) for x, want in zip((q, k, *both), (True, True, *wanted))
        ]
        torch.autograd.backward(function(*leaves, cos, sin), upstream)
        return [leaf.grad for leaf in leaves]

    ours = gradients(fused_qk_norm_rope, trained)
    assert [g is not None for g in ours] == [True, True, *trained]
    for got, expected in zip(ours, gradients(qk_norm_rope_reference, (True, True))):
        assert got is None or torch.allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", [fused_qk_norm_rope, qk_norm_rope_reference])
def test_the_inputs_are_left_alone(function, device):
    given = (
        *default_layout(2, 3, 2, 5, 64, torch.float32, device)(),
        *tables(2, 5, 64, device=device),
    )
    copies = [x.clone() for x in given]
    function(*given)
    assert all(torch.equal(x, copy) for x, copy in zip(given, copies))


@pytest.mark.parametrize("kernels_run", [True, False])
def test_tables_get_no_gradient(kernels_run, device):
    given = packed_layout(5, 4, 2, 16, torch.float32 if kernels_run else torch.float64, device)()
    cos, sin = (table.requires_grad_() for table in tables(5, 16, device=device))
    fused_qk_norm_rope(given[0].requires_grad_(), *given[1:], cos, sin)[0].sum().backward()
    assert given[0].grad.any()
    assert cos.grad is None and sin.grad is None


WRONG = {
    "tables of another length": ((2, 4, 5, 16), (2, 2, 5, 16), (2, 4, 16)),
    "tables of another batch": ((2, 4, 5, 16), (2, 2, 5, 16), (3, 5, 16)),
    "packed tables for four dimensions": ((2, 4, 5, 16), (2, 2, 5, 16), (5, 16)),
    "odd tables": ((2, 4, 5, 16), (2, 2, 5, 16), (2, 5, 7)),
    "tables wider than the head": ((2, 4, 5, 16), (2, 2, 5, 16), (2, 5, 18)),
    "keys of another length": ((2, 4, 5, 16), (2, 2, 6, 16), (2, 5, 16)),
    "narrower keys": ((2, 4, 5, 16), (2, 2, 5, 12), (2, 5, 16)),
    "packed keys": ((2, 4, 5, 16), (5, 2, 16), (2, 5, 16)),
    "two dimensions": ((5, 16), (5, 16), (16,)),
}


@pytest.mark.parametrize("case", WRONG)
def test_shapes_that_do_not_fit_are_refused(case):
    q, k, table = (torch.randn(shape) for shape in WRONG[case])
    with pytest.raises(ValueError, match="q |cos "):
        fused_qk_norm_rope(q, k, torch.randn(16), torch.randn(16), table, table)


@pytest.mark.parametrize("shape", [(1,), (8,), (4, 16), ()], ids=str)
@pytest.mark.parametrize("name", ["q_weight", "k_weight"])
def test_weights_of_another_width_are_refused(name, shape):
    given = {"q_weight": torch.randn(16), "k_weight": torch.randn(16)} | {name: torch.randn(shape)}
    with pytest.raises(ValueError, match=rf"{name} has shape .*must be \[16\]"):
        fused_qk_norm_rope(
            torch.randn(5, 4, 16),
            torch.randn(5, 2, 16),
            **given,
            cos=torch.randn(5, 16),
            sin=torch.randn(5, 16),
        )


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_compiled(packed, device):
    """In one graph, to the same bits."""
    compiled = torch.compile(fused_qk_norm_rope, backend="aot_eager", fullgraph=True)
    given = (
        packed_layout(13, 4, 3, 16, torch.float32, device)
        if packed
        else default_layout(2, 4, 3, 13, 16, torch.float32, device)
    )()
    upstream = [torch.randn_like(x) for x in given[:2]]
    cos, sin = tables(*(() if packed else (2,)), 13, 6, device=device)
    got, expected = (
        outputs_and_gradients(lambda *given, run=run: run(*given, cos, sin), given, upstream)
        for run in (compiled, fused_qk_norm_rope)
    )
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.slow
def test_every_token_counts_once_in_the_gradients_of_the_weights(device, set_constants):
    """More tokens than one round of the programs takes."""
    set_constants(module, QK_NORM_ROPE_BACKWARD_WARPS=4)
    tokens, width = MANY[device.type]
    compare(
        packed_layout(tokens, 3, 2, width, torch.float32, device),
        *tables(tokens, 12, device=device),
    )


@pytest.mark.slow
def test_twice_gives_the_same_bits(device):
    leaves = [
        x.requires_grad_() for x in default_layout(1, 14, 2, 37, 64, torch.bfloat16, device)()
    ]
    cos, sin = tables(1, 37, 64, device=device)

    def results():
        out = fused_qk_norm_rope(*leaves, cos, sin)
        return *out, *torch.autograd.grad(sum(x.float().square().sum() for x in out), leaves)

    assert all(torch.equal(a, b) for a, b in zip(results(), results()))


MANY = {"cpu": (45, 256), "cuda": (40_000, 64)}
"""Tokens and width: so many that a program of 4 warps takes several blocks of tokens, where a
processor gets one program.
"""

MUTATIONS = {
    "the other sine": ("g_a = dy_a * cos_a + dy_b * sin_b", "g_a = dy_a * cos_a + dy_b * sin_a"),
    "rotated forth, not back": (
        "g_b = dy_b * cos_b - dy_a * sin_a",
        "g_b = dy_b * cos_b + dy_a * sin_a",
    ),
    "no projection": ("projection /= WIDTH", "projection *= 0"),
    "projection of the rotated alone": (
        "tl.sum(g_rest * rest, axis=1, keep_dims=True)",
        "0 * tl.sum(g_rest * rest, axis=1, keep_dims=True)",
    ),
    "norm of the rotated alone": (
        "tl.sum(rest * rest, axis=1, keep_dims=True)",
        "0 * tl.sum(rest * rest, axis=1, keep_dims=True)",
    ),
    "the others without a norm": (
        "rstd * (_load_rest(w_ptr, tl.full((1, 1), 1, tl.int1), WIDTH, HALF, REST) + offset)",
        "_load_rest(w_ptr, tl.full((1, 1), 1, tl.int1), WIDTH, HALF, REST) + offset",
    ),
    "no weight in the backward": ("g_b *= w_b\n", "g_b *= 1\n"),
    "the weight's last tokens only": ("dw_a += g_a * a", "dw_a = g_a * a"),
    "sum before the rotation": ("dw_b += g_b * b", "dw_b += dy_b * b"),
    "weights of q for k": (
        "program = tl.program_id(0)",
        "program = tl.program_id(0)\nk_weight_ptr = q_weight_ptr",
        "_qk_norm_rope_backward_kernel",
    ),
    "sums of k among those of q": (
        "shares[:of_q].sum(0), shares[of_q:].sum(0)",
        "shares.sum(0), shares[of_q:].sum(0)",
    ),
    "rstd of the first heads": (
        "tl.load(rstd_ptr + first + tl.arange(0, ROWS)[:, None], mask=inside, other=0.0)",
        (
            "tl.load(rstd_ptr + program * ROWS + tl.arange(0, ROWS)[:, None], mask=inside, "
            "other=0.0)"
        ),
    ),
    "eps outside of the root": (
        "1.0 / tl.sqrt_rn(squares / WIDTH + eps)",
        "1.0 / tl.sqrt_rn(squares / WIDTH) + eps",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_faults_are_found(name, device):
    broken = mutant(module, *MUTATIONS[name])
    broken.QK_NORM_ROPE_BACKWARD_WARPS = 4
    tokens, width = MANY[device.type]
    cos, sin = (torch.randn(tokens, 12, device=device) for _ in range(2))
    draw = packed_layout(tokens, 3, 2, width, torch.float32, device)
    with pytest.raises(AssertionError, match="error"):
        compare(draw, cos, sin, broken.fused_qk_norm_rope, eps=0.1)


# --- merged
# ------------------------------------------------------------------------------------------------------------


def in_parts(function=None, heads=(4, 2), width=64):
    """``fused_qkv_norm_rope`` as a function of queries, keys and values, which are merged
    before; or the parts themselves.
    """

    def ours(cos, sin, eps, offset, interleaved, padding):
        def run(q, k, v, q_weight, k_weight):
            qkv = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
            return function(
                qkv, q_weight, k_weight, cos, sin, heads, eps, offset, interleaved, padding
            )

        return run

    def plain(cos, sin, eps, offset, interleaved, padding):
        both = definition(cos, sin, -2, eps, offset, interleaved)
        return lambda q, k, v, q_weight, k_weight: (*both(q, k, q_weight, k_weight), v)

    def draw(dtype, device):
        (h, k) = heads
        of_weights = weights(width, dtype, device)
        return lambda: (
            *(torch.randn(13, n, width, device=device).to(dtype) for n in (h, k, k)),
            *of_weights,
        )

    return ours if function else plain, draw


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "width", "rotated", "offset", "interleaved", "padding"),
    [
        ((4, 2), 64, 64, 0.0, False, 0),
        ((3, 1), 96, 32, 1.0, True, 16),
        ((2, 2), 80, 80, 0.0, False, 32),
    ],
)
def test_merged(heads, width, rotated, offset, interleaved, padding, dtype, device):
    of, draw = in_parts(module.fused_qkv_norm_rope, heads, width)
    options = *tables(13, rotated, device=device), 1e-6, offset, interleaved, padding
    plain, _ = in_parts(None, heads, width)
    assert_as_exact_as_plain(of(*options), plain(*options), draw(dtype, device))


def test_the_gradient_of_what_is_merged_has_room(device):
    cos, sin = tables(13, 64, device=device)
    qkv = torch.randn(13, 8 * 64, device=device, requires_grad=True)
    given = [
        torch.randn(n, 13, 64, device=device).transpose(0, 1) for n in (4, 2, 2)
    ]  # which lie anyhow
    outs = module.fused_qkv_norm_rope(
        qkv, *weights(64, torch.float32, device), cos, sin, (4, 2), gradient_padding=16
    )
    (found,) = torch.autograd.grad(outs, qkv, given)
    assert found.shape == qkv.shape and found.stride() == (8 * 64 + 16, 1)
    assert torch.equal(found[:, 6 * 64 :], given[2].flatten(1))


@pytest.mark.slow
@pytest.mark.parametrize("merged", [False, True])
def test_made_again_by_a_checkpoint(merged, device):
    of_tables = tables(13, 64, device=device)
    of_weights = [w.requires_grad_() for w in weights(64, torch.float32, device)]
    qkv = torch.randn(13, 8, 64, device=device, requires_grad=True)

    def run(qkv, *of_weights):
        if merged:
            return module.fused_qkv_norm_rope(qkv.flatten(1), *of_weights, *of_tables, (4, 2))[:2]
        return module.fused_qk_norm_rope(*qkv.split((4, 4), 1), *of_weights, *of_tables)

    def gradients(outs):
        torch.manual_seed(3)
        return torch.autograd.grad(outs, [qkv, *of_weights], [torch.randn_like(x) for x in outs])

    kept = gradients(run(qkv, *of_weights))
    again = gradients(checkpoint(run, qkv, *of_weights, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


@pytest.mark.slow
def test_values_that_are_merged_wrongly_are_noticed(device):
    broken = mutant(module, "program - of_q - of_k", "0")
    of, draw = in_parts(broken.fused_qkv_norm_rope, (2, 2), 256)
    options = *tables(13, 64, device=device), 1e-6, 0.0, False, 0
    with pytest.raises(AssertionError):
        assert_as_exact_as_plain(
            of(*options), in_parts(None, (2, 2), 256)[0](*options), draw(torch.float32, device)
        )
