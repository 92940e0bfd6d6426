"""Every backend that runs here against the definition in fp64: on a card all of them, forward
and backward. Which one is chosen for a mask and a card.
"""

import logging
from dataclasses import replace

import pytest
import torch
from definition import bounds, compare, dense, qkv, random_lengths, random_spans

from chronicals.attention import BACKENDS, backends, choose_backend, document_attention
from chronicals.attention.backends import flex
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


OF_PACKS = [name for name in BACKENDS if name not in ("per-document", "cudnn")]
FUSED = [on_card(name) for name in OF_PACKS]
ALWAYS = [on_card(name, always=True) for name in OF_PACKS]


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


WRONG = {
    "window": lambda mask: replace(mask, window=None),
    "softcap": lambda mask: replace(mask, softcap=None),
    "sinks": lambda mask: replace(mask, sinks=mask.sinks + 1),
    "scale": lambda mask: replace(mask, scale=1.0),
}


@pytest.mark.parametrize("option", WRONG)
def test_a_backend_with_another_option_is_found(option, monkeypatch):
    """Without a card, so that the comparison to which all are held is tried everywhere."""
    right = BACKENDS["per-document"]

    def wrong(q, k, v, mask, padding):
        return right.attend(q, k, v, WRONG[option](mask), padding)

    lengths = random_lengths(5, 60)
    options = {"window": {"window": 37}, "softcap": {"softcap": 1.5}}.get(option, {})
    draw = qkv(sum(lengths), sinks=option == "sinks")
    compare(lengths, draw, **options)
    monkeypatch.setitem(BACKENDS, "per-document", replace(right, attend=wrong))
    with pytest.raises(AssertionError, match=r"tensor \d: .* error"):
        compare(lengths, draw, **options)


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


CUDA = torch.device("cuda")
CPU = torch.device("cpu")
BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32


@pytest.fixture
def card(monkeypatch, let_return):
    """A machine with a card of the given capability, on which those backends are installed."""

    def pretend(capability, installed=tuple(BACKENDS)):
        let_return(torch.cuda, get_device_capability=capability)
        for name, backend in BACKENDS.items():
            monkeypatch.setitem(
                BACKENDS, name, replace(backend, available=lambda name=name: name in installed)
            )

    return pretend


WITHOUT_PACKAGES = ("cudnn", "flash", "flex", "per-document")
NEEDS = [
    ((9, 0), BF16, {}, "flash-attn-4", "flash"),
    ((9, 0), FP16, {"head_dim": 64, "window": True}, "flash-attn-4", "flash"),
    ((9, 0), BF16, {"softcap": True}, "flash-attn-4", "flex"),
    ((9, 0), BF16, {"sinks": True, "window": True}, "flash-attn-4", "flex"),
    ((9, 0), BF16, {"head_dim": 256}, "flash", "flash"),
    ((9, 0), BF16, {"head_dim": 512}, "per-document", "per-document"),
    ((9, 0), FP32, {}, "per-document", "per-document"),
    ((10, 0), BF16, {}, "flash-attn-4", "flash"),
    ((10, 0), BF16, {"head_dim": 256}, "flash", "flash"),
    ((8, 0), BF16, {}, "flash", "flash"),
    ((8, 0), BF16, {"softcap": True}, "flex", "flex"),
    ((7, 5), FP16, {}, "per-document", "per-document"),
]


@pytest.mark.parametrize("capability, dtype, needs, best, plain", NEEDS)
def test_choice_on_a_card(card, capability, dtype, needs, best, plain):
    card(capability)
    assert choose_backend(CUDA, dtype, **needs) == best
    card(capability, WITHOUT_PACKAGES)
    assert choose_backend(CUDA, dtype, **needs) == plain


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_choice_without_a_card(dtype):
    for device in (CPU, torch.device("meta")):
        assert choose_backend(device, dtype, 64) == "per-document"
        assert choose_backend(device, dtype, 64, True, True, True) == "per-document"


def test_every_order_ends_where_everything_can_be_done():
    for names in [
        backends.DEFAULT_ORDER,
        backends.EXACT_ORDER,
        *(x for of in backends.FASTEST_ORDERS.values() for x in of.values()),
    ]:
        assert names[-1] == "per-document" and set(names) <= set(BACKENDS)


REFUSED = [
    ("flash", {"sinks": True}, "lacks sinks"),
    ("flash", {"head_dim": 264}, "lacks head_dim=264"),
    ("flash-attn-4", {"dtype": FP32}, "lacks dtype=torch.float32"),
    ("nothing", {}, "backend='nothing' is unknown; choose one of flash-attn-4, "),
]


@pytest.mark.parametrize("backend, needs, message", REFUSED)
def test_a_forced_backend_that_cannot_is_refused(card, backend, needs, message):
    card((9, 0))
    with pytest.raises(ValueError, match=message):
        choose_backend(CUDA, **({"dtype": BF16} | needs), backend=backend)


def test_refusals_name_the_remedy(card):
    card((9, 0), WITHOUT_PACKAGES)
    with pytest.raises(
        ValueError, match=r"pip install 'chronicals\[flash\]'.*one of flash, flex, per-document"
    ):
        choose_backend(CUDA, BF16, backend="flash-attn-4")
    with pytest.raises(
        ValueError, match="lacks device=cpu; use backend=None, or one of per-document"
    ):
        choose_backend(CPU, BF16, backend="flash")
    q, k, v = (x.requires_grad_() for x in qkv(9)())
    with pytest.raises(ValueError, match="lacks requires_grad=True"):
        document_attention(q, k, v, bounds([9]), 9, backend="flex")


def test_a_choice_is_said_once(caplog):
    backends.logged_choices.clear()
    q, k, v = qkv(9)()
    with caplog.at_level(logging.DEBUG, "chronicals.attention"):
        for _ in range(3):
            document_attention(q, k, v, bounds([9]), 9)
            document_attention(q, k, v, bounds([9]), 9, softcap=2.0)
    assert [record.getMessage() for record in caplog.records] == [
        "attention: per-document for float32, head_dim 16 (chosen)",
        "attention: per-document for float32, head_dim 16, softcap (chosen)",
    ]


def test_the_chosen_backend_is_what_runs(monkeypatch):
    for name, backend in BACKENDS.items():
        monkeypatch.setitem(BACKENDS, name, replace(backend, attend=lambda *_, name=name: name))
    inputs = *qkv(5)(), bounds([5]), 5
    assert document_attention(*inputs) == "per-document"
    assert document_attention(*inputs, backend="flex") == "flex"


def test_head_widths_between_multiples_are_filled_up(monkeypatch):
    """With zeros, which change no score, and the width that was asked for decides the scale."""
    right = BACKENDS["per-document"]
    seen = []

    def attend(q, k, v, *rest):
        seen.append(q.shape[-1])
        return right.attend(q, k, v, *rest)

    q, k, v = qkv(9, width=20)()
    expected = document_attention(q, k, v, bounds([4, 5]), 5)
    wide = replace(
        right, attend=attend, supports={"any": replace(right.supports["any"], multiple=16)}
    )
    monkeypatch.setitem(BACKENDS, "per-document", wide)
    torch.testing.assert_close(document_attention(q, k, v, bounds([4, 5]), 5), expected)
    assert seen == [32]


def test_a_backend_without_spans_is_not_chosen_for_them(card, monkeypatch):
    card((9, 0))
    assert choose_backend(CUDA, BF16, spans=True) == "flash-attn-4"
    for name in ("flash-attn-4", "flash"):
        supports = {
            device: replace(support, spans=False)
            for device, support in BACKENDS[name].supports.items()
        }
        monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], supports=supports))
    assert (
        choose_backend(CUDA, BF16) == "flash-attn-4"
        and choose_backend(CUDA, BF16, spans=True) == "flex"
    )
    with pytest.raises(ValueError, match="backend='flash' lacks cu_seqlens_k"):
        choose_backend(CUDA, BF16, backend="flash", spans=True)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_flash_attention_may_be_turned_off(card, capability):
    card(capability)
    for needs in ({}, {"head_dim": 64, "window": True}, {"sinks": True}, {"head_dim": 256}):
        assert choose_backend(CUDA, BF16, **needs, flash=False) == "flex"
    assert choose_backend(CUDA, BF16, head_dim=512, flash=False) == "per-document"
    assert choose_backend(CUDA, BF16, backend="flash", flash=False) == "flash"  # asked for by name
