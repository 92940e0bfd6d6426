"""Every backend that runs here against the definition in fp64: on a card all of them, forward
and backward.
"""

from dataclasses import replace

import pytest
import torch
from definition import bounds, compare, dense, qkv, random_lengths, random_spans

from chronicals.attention import BACKENDS, document_attention
from chronicals.attention.backends import flash_attn_4, flex
from chronicals.attention.support import Needs, Spans

HALF = torch.bfloat16
MASKS = [{}, {"window": 37}, {"softcap": 1.5}, {"window": 37, "softcap": 1.5}]


COMPILING = ("flash-attn-4", "flex")
"""They compile every shape anew, about 8 s each: outside of `make test-all` only a few cases."""


def on_card(backend, always=False):
    marks = (
        [pytest.mark.gpu]
        if always or backend not in COMPILING
        else [pytest.mark.gpu, pytest.mark.long]
    )
    return pytest.param(backend, marks=marks)


FUSED = [on_card(name) for name in BACKENDS if name != "per-document"]
ALWAYS = [on_card(name, always=True) for name in BACKENDS if name != "per-document"]


@pytest.fixture(autouse=True)
def fresh_compilations():
    torch._dynamo.reset()
    flex._masks.clear()


def able(backend, dtype=HALF, head_dim=64, window=None, softcap=None, sinks=False, spans=False):
    """Skips, by name, what a backend cannot do on this card."""
    mask = {
        "window": window is not None,
        "softcap": softcap is not None,
        "sinks": sinks,
        "spans": spans,
    }
    lacking = BACKENDS[backend].lacks(
        Needs("cuda", torch.cuda.get_device_capability(), dtype, head_dim, **mask)
    )
    if lacking:
        pytest.skip(f"{backend} lacks {lacking}")


def on_card_draw(tokens, heads=4, groups=2, width=64, dtype=HALF, sinks=False, queries=None):
    return qkv(tokens, heads, groups, width, dtype, "cuda", sinks, queries)


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("backend", FUSED)
def test_head_widths_and_windows(backend, width, window):
    able(backend, head_dim=width, window=window)
    lengths = random_lengths(9, 150)
    compare(lengths, on_card_draw(sum(lengths), width=width), backend=backend, window=window)


@pytest.mark.parametrize("heads, groups", [(4, 4), (14, 2), (8, 2), (8, 1)])
@pytest.mark.parametrize("backend", FUSED)
def test_grouped_heads(backend, heads, groups):
    able(backend)
    lengths = random_lengths(9, 150)
    compare(lengths, on_card_draw(sum(lengths), heads, groups), backend=backend)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", FUSED)
def test_other_types(backend, dtype):
    able(backend, dtype)
    lengths = random_lengths(9, 150)
    compare(lengths, on_card_draw(sum(lengths), dtype=dtype), backend=backend)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("backend", FUSED)
def test_masks(backend, mask, sinks):
    able(backend, sinks=sinks, **mask)
    lengths = random_lengths(9, 150)
    compare(lengths, on_card_draw(sum(lengths), sinks=sinks), backend=backend, **mask)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("backend", FUSED)
def test_queries_fewer_than_keys(backend, mask, sinks):
    able(backend, sinks=sinks, spans=True, **mask)
    queries, keys = random_spans(9, 150)
    compare(
        queries,
        on_card_draw(sum(keys), sinks=sinks, queries=sum(queries)),
        backend=backend,
        keys=keys,
        **mask,
    )


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("backend", ALWAYS)
def test_one_query_after_many_keys(backend, width):
    """As in decoding with a cache, one document longer than a block of keys."""
    able(backend, head_dim=width, spans=True)
    keys = [1, 300, 64, 129]
    draw = on_card_draw(sum(keys), 4, 2, width, queries=len(keys))
    compare([1] * len(keys), draw, backend=backend, keys=keys)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("backend", ALWAYS)
def test_documents_from_1_to_4096_tokens(backend, width):
    able(backend, head_dim=width)
    lengths = [1, 4096, 2, 127, 0, 128, 129, 1023, 1, 0, 0]
    compare(lengths, on_card_draw(sum(lengths), 2, 1, width), backend=backend)


@pytest.mark.parametrize(
    "lengths",
    [[60], [2, 1] * 200, [0, 0, 5, 0, 200], [128] * 4, [59, 1], [1, 590]],
    ids=lambda x: f"{x}"[:20],
)
@pytest.mark.parametrize("backend", FUSED)
def test_few_many_and_empty_documents(backend, lengths):
    able(backend)
    compare(lengths, on_card_draw(sum(lengths)), backend=backend)


@pytest.mark.parametrize("width", [60, 64])
@pytest.mark.parametrize("backend", FUSED)
def test_views_out_of_a_merged_product(backend, width):
    """Also a width that has to be filled up, another scale, and a bound that is not tight."""
    able(backend, head_dim=width)
    lengths = random_lengths(5, 150)

    def draw():
        merged = torch.randn(sum(lengths), 8 * width, device="cuda", dtype=HALF)
        q, k, v = (
            part.view(sum(lengths), -1, width)
            for part in merged.split([4 * width, 2 * width, 2 * width], -1)
        )
        assert not q.is_contiguous() and not k.is_contiguous() and not v.is_contiguous()
        return q, k, v

    compare(lengths, draw, backend=backend, scale=0.2)


def gradients(out, leaves, upstream):
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def close(found, expected, rounding=2**-6):
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        distance = (a.double() - b.double()).norm() / b.double().norm()
        assert distance <= rounding, f"tensor {number}: {distance:.1e}"


@pytest.mark.parametrize("backend", FUSED)
def test_permuting_documents_and_a_wider_bound_change_nothing(backend):
    able(backend)
    lengths = [9, 170, 1, 33, 300]
    order = [4, 2, 0, 3, 1]
    places = torch.arange(sum(lengths)).split(lengths)
    moved = torch.cat([places[n] for n in order]).cuda()
    draw = on_card_draw(sum(lengths))()
    upstream = torch.randn(sum(lengths), 4, 64, device="cuda", dtype=HALF)
    here = [x.clone().requires_grad_() for x in draw]
    there = [x[moved].requires_grad_() for x in draw]
    first = document_attention(*here, bounds(lengths, "cuda"), 300, backend=backend)
    second = document_attention(
        *there, bounds([lengths[n] for n in order], "cuda"), 1000, backend=backend
    )
    close(
        gradients(second, there, upstream[moved]),
        [x[moved] for x in gradients(first, here, upstream)],
    )


@pytest.mark.parametrize("backend", ALWAYS)
def test_a_dropped_bound_is_noticed(backend, monkeypatch):
    able(backend)
    right = BACKENDS[backend]
    lengths = [40, 70, 90]

    def wrong(q, k, v, mask, padding):
        cu = mask.spans.cu_q[[0, 2, 3]]
        spans = Spans(cu, sum(lengths), cu, sum(lengths))
        return right.attend(q, k, v, replace(mask, spans=spans), padding)

    monkeypatch.setitem(BACKENDS, backend, replace(right, attend=wrong))
    with pytest.raises(AssertionError, match=r"tensor \d: .* error"):
        compare(lengths, on_card_draw(sum(lengths)), backend=backend)


@pytest.mark.parametrize("mask", MASKS[:3], ids=str)
@pytest.mark.parametrize("backend", FUSED)
def test_torch_compile_sees_through(backend, mask):
    able(backend, **mask)
    lengths = random_lengths(5, 150)
    cu = bounds(lengths, "cuda")

    def layer(q, k, v):
        return document_attention(q * 1.5, k, v, cu, max(lengths), backend=backend, **mask) * 2

    leaves = [x.requires_grad_() for x in on_card_draw(sum(lengths))()]
    upstream = torch.randn(sum(lengths), 4, 64, device="cuda", dtype=HALF)
    compiled = torch.compile(layer, fullgraph=True)(*leaves)
    close(gradients(compiled, leaves, upstream), gradients(layer(*leaves), leaves, upstream))


@pytest.mark.gpu
def test_what_is_chosen_here_compiles_whole():
    lengths = [70, 30, 0]
    cu = bounds(lengths, "cuda")
    leaves = [x.requires_grad_() for x in on_card_draw(100)()]
    upstream = torch.randn(100, 4, 64, device="cuda", dtype=HALF)
    layer = lambda *x: document_attention(*x, cu, 70)  # noqa: E731
    found = gradients(torch.compile(layer, fullgraph=True)(*leaves), leaves, upstream)
    close(found, gradients(dense(*leaves, cu), leaves, upstream))


def test_a_checkout_of_quack_without_a_version_keeps_no_kernels(
    monkeypatch, let_return, record_calls, set_constants, tmp_path
):
    from importlib.metadata import PackageNotFoundError

    def missing(name):
        raise PackageNotFoundError(name)

    let_return(torch.cuda, get_device_capability=(9, 0))
    asked = record_calls(torch.cuda, "get_device_capability")
    set_constants(flash_attn_4, KERNEL_CACHE=tmp_path / "cache")
    monkeypatch.setattr(flash_attn_4.os, "environ", {})
    monkeypatch.setattr(flash_attn_4, "version", missing)
    flash_attn_4._keep_compiled_kernels(torch.device("cuda", 1))
    assert not flash_attn_4.os.environ and asked == [(torch.device("cuda", 1),)]
    let_return(flash_attn_4, version="1.0")
    flash_attn_4._keep_compiled_kernels(torch.device("cuda", 1))
    assert flash_attn_4.os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"].endswith("quack-1.0-sm90")
