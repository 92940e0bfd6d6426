"""fused_qk_rope against a rotation of complex numbers and against transformers'
apply_rotary_pos_emb.
"""

import contextlib

import pytest
import torch
from torch import Tensor

import chronicals.kernels.qk_rope as module
from chronicals.kernels import fused_qk_rope
from comparison import assert_as_exact_as_plain
from mutants import mutant

TYPES = [torch.float32, torch.bfloat16]
WIDTHS = {1: 192, 13: 16}
"""Of a head, by rows: a draw has over a thousand elements, and need not be pooled with others."""


def tables(*shape: int, dtype=torch.float32, device="cpu") -> tuple[Tensor, Tensor]:
    """cos and sin of random angles, both halves alike, of the given shape."""
    angles = torch.rand(*shape[:-1], shape[-1] // 2, dtype=torch.float64, device=device) * 7
    return torch.cat((angles.cos(), angles.cos()), -1).to(dtype), torch.cat(
        (angles.sin(), angles.sin()), -1
    ).to(dtype)


def exact(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The halves as real and imaginary parts, times e^(i·angle)."""
    half = cos.shape[-1] // 2
    turn = torch.complex(cos.double()[..., :half], sin.double()[..., :half]).unsqueeze(heads)

    def rotate(x: Tensor) -> Tensor:
        z = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
        return torch.cat((z.real, z.imag, x[..., 2 * half :]), -1)

    return rotate(q), rotate(k)


def plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The two lines of transformers, on the channels that the tables cover, in the type of the
    tensors.
    """
    cos, sin = (table.to(q.dtype).unsqueeze(heads) for table in (cos, sin))
    half = cos.shape[-1] // 2

    def rotate(x: Tensor) -> Tensor:
        a = x[..., :half]
        b = x[..., half : 2 * half]
        rest = x[..., 2 * half :]
        return torch.cat((torch.cat((a, b), -1) * cos + torch.cat((-b, a), -1) * sin, rest), -1)

    return rotate(q), rotate(k)


def compare(draw, cos, sin, heads, function=fused_qk_rope, **options):
    cpu = cos.cpu(), sin.cpu()
    assert_as_exact_as_plain(
        lambda q, k: function(q, k, cos, sin, **options),
        lambda q, k: plain(q, k, cos, sin, heads),
        draw,
        exact=lambda q, k: exact(q, k, *cpu, heads),
    )


def default_layout(b, h, k, s, d, dtype, device):
    return lambda: (
        torch.randn(b, h, s, d, device=device).to(dtype),
        torch.randn(b, k, s, d, device=device).to(dtype),
    )


def packed_layout(t, h, k, d, dtype, device):
    return lambda: (
        torch.randn(t, h, d, device=device).to(dtype),
        torch.randn(t, k, d, device=device).to(dtype),
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rotated", [2, 6, 16, 64])
@pytest.mark.parametrize("rows", [1, 13])
def test_default_layout(rows, rotated, dtype, device):
    cos, sin = tables(2, rows, rotated, dtype=dtype, device=device)
    compare(
        default_layout(2, 12, 6, rows, max(rotated, WIDTHS[rows]), dtype, device), cos, sin, heads=1
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rotated", [2, 6, 16, 64])
@pytest.mark.parametrize("rows", [1, 13])
def test_packed_layout(rows, rotated, dtype, device):
    cos, sin = tables(rows, rotated, dtype=dtype, device=device)
    compare(
        packed_layout(rows, 12, 6, max(rotated, WIDTHS[rows]), dtype, device), cos, sin, heads=-2
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_odd_head_width_with_partial_rotary(dtype, device):
    cos, sin = tables(13, 6, dtype=dtype, device=device)
    compare(packed_layout(13, 7, 5, 17, dtype, device), cos, sin, heads=-2)


def test_one_table_for_the_whole_batch(device):
    cos, sin = tables(1, 13, 16, device=device)
    compare(default_layout(3, 4, 2, 13, 16, torch.float32, device), cos, sin, heads=1)


def test_fp32_tables_for_bf16_heads(device):
    """The tables are not rounded to bf16 first."""
    cos, sin = tables(13, 16, device=device)
    q, k = packed_layout(13, 4, 2, 16, torch.bfloat16, device)()
    got = fused_qk_rope(q, k, cos, sin)
    expected = exact(q.double(), k.double(), cos, sin, -2)
    for ours, e in zip(got, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        # One rounding of the result; an element may fall on the other side of a tie. The
        # interpreter cuts bits off.
        rounding = 2**-8 if device.type == "cuda" else 2**-7
        assert ((ours.double() - e).abs() <= e.abs() * rounding + 1e-6).all()


@pytest.mark.parametrize("layout", ["transposed view", "sliced heads", "expanded tables"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_non_contiguous(layout, dtype, device):
    cos, sin = tables(2, 13, 16, dtype=dtype, device=device)
    if layout == "expanded tables":
        cos, sin = (table[:1].expand(2, -1, -1) for table in (cos, sin))

    def draw():
        if layout == "transposed view":  # how every transformers model makes them
            q, k = (
                torch.randn(2, 13, h, 16, device=device).to(dtype).transpose(1, 2) for h in (4, 3)
            )
        elif layout == "sliced heads":
            merged = torch.randn(2, 7, 13, 32, device=device).to(dtype)
            q = merged[:, :4, :, ::2]
            k = merged[:, 4:, :, 1::2]
        else:
            return default_layout(2, 4, 3, 13, 16, dtype, device)()
        assert not q.is_contiguous() and not k.is_contiguous()
        return q, k

    compare(draw, cos, sin, heads=1)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_equals_transformers(packed, dtype, device):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = tables(*(() if packed else (2,)), 13, 16, dtype=dtype, device=device)
    draw = (
        packed_layout(13, 12, 6, 16, dtype, device)
        if packed
        else default_layout(2, 4, 3, 13, 16, dtype, device)
    )
    assert_as_exact_as_plain(
        lambda q, k: fused_qk_rope(q, k, cos, sin),
        lambda q, k: apply_rotary_pos_emb(
            q, k, cos.to(q.device, q.dtype), sin.to(q.device, q.dtype)
        ),
        draw,
    )


def test_equals_the_tables_of_a_model(device):
    """With the tables that a Llama makes, not ones we made."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4)).to(device)
    q, k = default_layout(2, 4, 2, 13, 16, torch.float32, device)()
    cos, sin = rotary(q, torch.randint(0, 1000, (2, 13), device=device))
    for ours, theirs in zip(
        fused_qk_rope(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_packed_equals_default():
    q, k = default_layout(1, 4, 2, 13, 16, torch.float32, "cpu")()
    cos, sin = tables(1, 13, 16)
    apart = fused_qk_rope(q, k, cos, sin)
    packed = fused_qk_rope(q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0])
    for a, b in zip(apart, packed, strict=True):
        assert torch.equal(a[0].transpose(0, 1), b)


def test_scores_depend_on_distance_alone():
    """q·k of positions (m, n) is that of (m + 100, n + 100): what rotary embedding is for."""
    frequencies = 0.3 ** torch.arange(8, dtype=torch.float64)
    q, k = default_layout(1, 1, 1, 13, 16, torch.float64, "cpu")()

    def scores(first: int) -> Tensor:
        angles = torch.outer(
            torch.arange(first, first + 13, dtype=torch.float64), frequencies
        ).repeat(1, 2)[None]
        rotated = fused_qk_rope(q, k, angles.cos(), angles.sin())
        return rotated[0] @ rotated[1].transpose(-1, -2)

    torch.testing.assert_close(scores(100), scores(0), rtol=0, atol=1e-12)
    assert not torch.allclose(scores(0), q @ k.transpose(-1, -2))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed view", "partial", "packed"])
def test_in_place_without_gradients(layout, dtype, device):
    rotated = 6 if layout == "partial" else 16
    if layout == "packed":
        q, k = packed_layout(13, 4, 2, 16, dtype, device)()
        cos, sin = tables(13, rotated, dtype=dtype, device=device)
    else:
        q, k = default_layout(2, 4, 2, 13, 16, dtype, device)()
        cos, sin = tables(2, 13, rotated, dtype=dtype, device=device)
    if layout == "transposed view":
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
        assert not q.is_contiguous()
    expected = fused_qk_rope(q, k, cos, sin)
    assert not torch.equal(expected[0], q) and not torch.equal(expected[1], k)
    storages = q.data_ptr(), k.data_ptr()
    got = fused_qk_rope(q, k, cos, sin, in_place=True)
    for out, given, storage, e in zip(got, (q, k), storages, expected, strict=True):
        assert out.data_ptr() == given.data_ptr() == storage
        assert torch.equal(out, e) and torch.equal(given, e)


def test_not_in_place_leaves_the_inputs_alone(device):
    q, k = default_layout(2, 4, 2, 13, 16, torch.float32, device)()
    copies = q.clone(), k.clone()
    out = fused_qk_rope(q, k, *tables(2, 13, 16, device=device))
    assert torch.equal(q, copies[0]) and torch.equal(k, copies[1])
    assert {x.untyped_storage().data_ptr() for x in out}.isdisjoint(
        x.untyped_storage().data_ptr() for x in (q, k)
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "transposed view", "one merged tensor"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_in_place_gradients(layout, dtype, device):
    """In place and not give the same results and gradients; queries and keys of a model are
    views of products.
    """
    cos, sin = tables(2, 13, 16, dtype=dtype, device=device)
    leaf = torch.randn(2, 13, 6 * 16, device=device).to(dtype)
    upstream = [torch.randn(2, h, 13, 16, device=device).to(dtype) for h in (4, 2)]

    def run(in_place: bool) -> list[Tensor]:
        x = leaf.clone().requires_grad_()
        heads = (x * 2).view(2, 13, 6, 16).transpose(1, 2)
        q = heads[:, :4]
        k = heads[:, 4:]
        if layout == "contiguous":
            q = q.contiguous()
            k = k.contiguous()
        elif layout == "transposed view":
            q, k = (
                (x * 2).view(2, 13, 6, 16).transpose(1, 2)[:, part]
                for part in (slice(0, 4), slice(4, 6))
            )
        given = q.data_ptr(), k.data_ptr()
        out = fused_qk_rope(q, k, cos, sin, in_place=in_place)
        assert ((out[0].data_ptr(), out[1].data_ptr()) == given) == in_place
        torch.autograd.backward(out, upstream)
        return [out[0].detach(), out[1].detach(), x.grad]

    for expected, got in zip(run(False), run(True), strict=True):
        assert torch.equal(expected, got)


def test_in_place_on_a_leaf_is_refused(device):
    """As torch does: a leaf's value would be lost."""
    q, k = (x.requires_grad_() for x in default_layout(2, 4, 2, 13, 16, torch.float32, device)())
    with pytest.raises(RuntimeError, match="leaf"):
        fused_qk_rope(q, k, *tables(2, 13, 16, device=device), in_place=True)


@pytest.mark.parametrize("shared", ["heads", "batch", "both"])
def test_in_place_on_what_would_be_rotated_twice_is_refused(shared, device):
    q, k = default_layout(2, 4, 2, 13, 16, torch.float32, device)()
    k = {"heads": k[:, :1].expand(2, 2, 13, 16), "batch": k[:1].expand(2, 2, 13, 16), "both": q}[
        shared
    ]
    with pytest.raises(RuntimeError, match="rotated twice; use in_place=False"):
        fused_qk_rope(q, k, *tables(2, 13, 16, device=device), in_place=True)


def test_tables_that_are_learned_get_their_gradient(device):
    q, k = default_layout(2, 4, 2, 13, 16, torch.float32, device)()
    given = [x.clone().requires_grad_() for x in tables(2, 13, 16, device=device)]
    expected = torch.autograd.grad(
        sum(x.square().mul(x).sum() for x in module.qk_rope_reference(q, k, *given)), given
    )
    found = torch.autograd.grad(
        sum(x.square().mul(x).sum() for x in fused_qk_rope(q, k, *given)), given
    )
    assert all(torch.equal(a, b) and a.any() for a, b in zip(expected, found))


def test_in_place_is_noticed_by_who_saved_the_values(device):
    """A product that needs the queries for its gradient must not take the rotated ones."""
    x = torch.randn(2, 13, 6 * 16, device=device, requires_grad=True)
    heads = (x * 2).view(2, 13, 6, 16).transpose(1, 2)
    squares = heads.square()
    rotated = fused_qk_rope(
        heads[:, :4], heads[:, 4:], *tables(2, 13, 16, device=device), in_place=True
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (squares.sum() + sum(r.sum() for r in rotated)).backward()


@pytest.mark.slow
def test_in_place_compiled(device):
    compiled = torch.compile(
        lambda q, k, cos, sin: fused_qk_rope(q * 1, k * 1, cos, sin, in_place=True),
        backend="aot_eager",
        fullgraph=True,
    )
    cos, sin = tables(2, 13, 16, device=device)
    compare(
        default_layout(2, 4, 3, 13, 16, torch.float32, device), cos, sin, heads=1, function=compiled
    )


def test_only_one_result_used(device):
    q, k = (x.requires_grad_() for x in default_layout(2, 4, 2, 13, 16, torch.float32, device)())
    fused_qk_rope(q, k, *tables(2, 13, 16, device=device))[0].sum().backward()
    assert q.grad.abs().sum() > 0
    assert k.grad is None or not k.grad.any()


WRONG = {
    "tables of another length": ((2, 4, 5, 16), (2, 2, 5, 16), (2, 4, 16)),
    "tables of one position": ((2, 4, 5, 16), (2, 2, 5, 16), (2, 1, 16)),
    "tables of another batch": ((2, 4, 5, 16), (2, 2, 5, 16), (3, 5, 16)),
    "packed tables of one position": ((5, 4, 16), (5, 2, 16), (1, 16)),
    "packed tables of another length": ((5, 4, 16), (5, 2, 16), (4, 16)),
    "packed tables for four dimensions": ((2, 4, 5, 16), (2, 2, 5, 16), (5, 16)),
    "four-dimensional tables for packed": ((5, 4, 16), (5, 2, 16), (1, 5, 16)),
    "odd tables": ((2, 4, 5, 16), (2, 2, 5, 16), (2, 5, 7)),
    "tables wider than the head": ((2, 4, 5, 16), (2, 2, 5, 16), (2, 5, 18)),
    "keys of another length": ((2, 4, 5, 16), (2, 2, 6, 16), (2, 5, 16)),
    "one key for all": ((2, 4, 5, 16), (2, 2, 1, 16), (2, 5, 16)),
    "keys of another batch": ((2, 4, 5, 16), (1, 2, 5, 16), (2, 5, 16)),
    "narrower keys": ((2, 4, 5, 16), (2, 2, 5, 12), (2, 5, 16)),
    "packed keys": ((2, 4, 5, 16), (5, 2, 16), (2, 5, 16)),
    "two dimensions": ((5, 16), (5, 16), (16,)),
}


@pytest.mark.parametrize("case", WRONG)
def test_shapes_that_do_not_fit_are_refused(case):
    q, k, table = (torch.randn(shape) for shape in WRONG[case])
    with pytest.raises(ValueError):
        fused_qk_rope(q, k, table, table)


def test_unlike_tables_are_refused():
    with pytest.raises(ValueError):
        fused_qk_rope(
            torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 16), torch.randn(5, 8)
        )


@pytest.mark.slow
def test_compiled(device):
    """In one graph, and as exact."""
    compiled = torch.compile(fused_qk_rope, backend="aot_eager", fullgraph=True)
    cos, sin = tables(2, 13, 16, device=device)
    compare(
        default_layout(2, 4, 3, 13, 16, torch.float32, device), cos, sin, heads=1, function=compiled
    )


def assert_gradient_of_all_three(function, heads, width, rotated, padding, device):
    (h, k) = heads
    (cos, sin) = tables(37, rotated, device=device)
    qkv = torch.randn(37, (h + 2 * k) * width, device=device, requires_grad=True)
    given = [torch.randn(n, 37, width, device=device).transpose(0, 1) for n in (h, k, k)]
    (found,) = torch.autograd.grad(
        function(qkv * 1, cos, sin, heads, gradient_padding=padding), qkv, given
    )
    q, k = module.qk_rope_reference(given[0], given[1], cos, -sin)
    torch.testing.assert_close(found, torch.cat([q, k, given[2]], 1).flatten(1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("padding", [0, 16])
@pytest.mark.parametrize(("heads", "width", "rotated"), [((3, 1), 6, 4), ((4, 2), 64, 64)])
def test_the_gradient_of_all_three_is_one_tensor(heads, width, rotated, padding, device):
    """From gradients that lie anyhow; values pass as they are."""
    assert_gradient_of_all_three(module.fused_qkv_rope, heads, width, rotated, padding, device)


@pytest.mark.slow
def test_values_of_another_head_are_noticed(device):
    broken = mutant(
        module,
        "out_ptr + batch * out_batch + token * out_token + head * out_head",
        "out_ptr + batch * out_batch + token * out_token + head * out_head * 0",
    )
    with pytest.raises(AssertionError):
        assert_gradient_of_all_three(broken.fused_qkv_rope, (4, 2), 64, 64, 0, device)


MUTATIONS = {
    "not inverted": (
        (
            "if INVERSE:\n"
            "    ...\n"
            "else:\n"
            "    rotated_a = a * cos_a - b * sin_a\n"
            "    rotated_b = b * cos_b + a * sin_b"
        ),
        (
            "if not INVERSE:\n"
            "    ...\n"
            "else:\n"
            "    rotated_a = a * cos_a - b * sin_a\n"
            "    rotated_b = b * cos_b + a * sin_b"
        ),
    ),
    "the other sine": (
        "rotated_a = a * cos_a + b * sin_b\nrotated_b = b * cos_b - a * sin_a",
        "rotated_a = a * cos_a + b * sin_a\nrotated_b = b * cos_b - a * sin_b",
    ),
    "cosine of the wrong sign": ("a * cos_a + b * sin_b", "b * sin_b - a * cos_a"),
    "tables of another position": (
        "batch * table_batch + token * table_token",
        "batch * table_batch + head * table_token",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", MUTATIONS)
def test_a_wrong_rotation_is_noticed(fault, device):
    cos, sin = (torch.randn(13, 16, device=device) for _ in range(2))
    broken = mutant(module, *MUTATIONS[fault])
    draw = packed_layout(13, 12, 6, 16, torch.float32, device)
    for function in (module.fused_qk_rope, broken.fused_qk_rope):
        with (
            pytest.raises(AssertionError, match="error")
            if function is broken.fused_qk_rope
            else contextlib.nullcontext()
        ):
            assert_as_exact_as_plain(
                lambda q, k, run=function: run(q, k, cos, sin),
                lambda q, k: module.qk_rope_reference(q, k, cos.to(q.device), sin.to(q.device)),
                draw,
            )


# --- interleaved
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rotated", [2, 6, 16])
@pytest.mark.parametrize("ours", [fused_qk_rope, module.qk_rope_reference])
def test_interleaved(ours, rotated, dtype, device):
    """The pairs (2i, 2i + 1) as complex numbers."""
    cos, sin = (
        table[..., : rotated // 2].repeat_interleave(2, -1)
        for table in tables(2, 13, rotated, device=device)
    )

    def complex_numbers(q, k):
        turn = torch.complex(cos[..., ::2].to(q), sin[..., ::2].to(q)).unsqueeze(1)

        def rotate(x):
            z = torch.view_as_complex(x[..., :rotated].unflatten(-1, (-1, 2)).contiguous()) * turn
            return torch.cat((torch.view_as_real(z).flatten(-2), x[..., rotated:]), -1)

        return rotate(q), rotate(k)

    assert_as_exact_as_plain(
        lambda q, k: ours(q, k, cos, sin, interleaved=True),
        lambda q, k: tuple(x.to(dtype) for x in complex_numbers(q.float(), k.float())),
        default_layout(2, 4, 3, 13, 18, dtype, device),
        exact=complex_numbers,
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_in_place_and_interleaved_gradients(interleaved, device):
    """Halves of the tables that differ: the backward is the transpose of the forward, not its
    inverse.
    """
    cos, sin = (torch.randn(1, 13, 12, device=device) for _ in range(2))
    draw = default_layout(2, 4, 3, 13, 16, torch.float32, device)
    assert_as_exact_as_plain(
        lambda q, k: fused_qk_rope(q * 1, k * 1, cos, sin, in_place=True, interleaved=interleaved),
        lambda q, k: module.qk_rope_reference(
            q, k, cos.to(q.device), sin.to(q.device), interleaved
        ),
        draw,
    )
