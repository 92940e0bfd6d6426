"""cuDNN's attention: for which packs it is chosen, and on a card against the definition in fp64."""

from dataclasses import replace

import pytest
import torch
from definition import bounds, compare, qkv

from chronicals.attention import BACKENDS, choose_backend, document_attention, documents
from chronicals.attention.backends import cudnn
from chronicals.attention.support import Spans

CUDA = torch.device("cuda")
HALF = torch.bfloat16
MANY = 1 << 14


def spans_of(lengths):
    cu = bounds(lengths)
    return Spans(cu, max(lengths), cu, max(lengths))


def queries(tokens, heads=2, width=64):
    return torch.empty(tokens, heads, width, device="meta", dtype=HALF)


def test_it_is_for_one_document_that_is_long():
    assert cudnn.LEAST_TOKENS == MANY
    assert cudnn.is_long_document(queries(MANY), spans_of([MANY]))
    assert not cudnn.is_long_document(queries(MANY - 1), spans_of([MANY - 1]))
    assert not cudnn.is_long_document(queries(MANY), spans_of([MANY - 1, 1]))
    assert not cudnn.is_long_document(queries(MANY), spans_of([MANY, 0])), "bounds that repeat"
    other = Spans(bounds([MANY]), MANY, bounds([MANY]), MANY)
    assert not cudnn.is_long_document(queries(MANY), other), "keys of their own"


def test_indices_beyond_31_bits_go_elsewhere():
    tokens = cudnn.MOST_ELEMENTS // (32 * 128)
    assert cudnn.is_long_document(queries(tokens - 1, 32, 128), spans_of([tokens - 1]))
    assert not cudnn.is_long_document(queries(tokens, 32, 128), spans_of([tokens]))


@pytest.fixture
def hopper(monkeypatch, let_return):
    """An H200 without FlashAttention-4."""
    let_return(torch.cuda, get_device_capability=(9, 0))
    for name, backend in BACKENDS.items():
        there = name != "flash-attn-4"
        monkeypatch.setitem(BACKENDS, name, replace(backend, available=lambda there=there: there))


@pytest.mark.parametrize(
    "needs", [{"window": True}, {"softcap": True}, {"sinks": True}, {"spans": True}], ids=str
)
def test_what_it_cannot_goes_to_others(hopper, needs):
    assert choose_backend(CUDA, HALF, packs=False) == "cudnn"
    assert choose_backend(CUDA, HALF) == "flash"
    assert choose_backend(CUDA, HALF, packs=False, **needs) != "cudnn"
    assert choose_backend(CUDA, HALF, packs=False, head_dim=256) == "flash"


def test_sums_in_a_fixed_order_go_to_others(hopper):
    torch.use_deterministic_algorithms(True)
    try:
        assert choose_backend(CUDA, HALF, packs=False) == "flash"
        assert choose_backend(CUDA, HALF, packs=False, trains=False) == "cudnn"
        with pytest.raises(ValueError, match="lacks torch.use_deterministic_algorithms"):
            choose_backend(CUDA, HALF, packs=False, backend="cudnn")
    finally:
        torch.use_deterministic_algorithms(False)


def test_it_is_refused_by_name_for_packs(hopper):
    with pytest.raises(ValueError, match="lacks packs of several or short documents.*one of flash"):
        choose_backend(CUDA, HALF, backend="cudnn")


@pytest.mark.parametrize("lengths, packs", [([40], False), ([39, 1], True), ([20], True)], ids=str)
def test_attention_says_whether_its_pack_is_one_document(monkeypatch, lengths, packs):
    monkeypatch.setattr(cudnn, "LEAST_TOKENS", 30)
    asked = []

    def choose(*needs):
        asked.append(needs)
        return "per-document"

    monkeypatch.setattr(documents, "choose_backend", choose)
    document_attention(*qkv(sum(lengths))(), bounds(lengths), max(lengths))
    assert [needs[-1] for needs in asked] == [packs]


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(cudnn, "LEAST_TOKENS", 1)
    needs = {"packs": False, "backend": "cudnn"}
    try:
        choose_backend(CUDA, HALF, **needs)
    except ValueError as reason:
        pytest.skip(str(reason))


@pytest.mark.gpu
@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 1), (14, 2)])
@pytest.mark.parametrize("width", [60, 64, 128])
@pytest.mark.parametrize("tokens", [16, 61, 700])
def test_against_the_definition(short, tokens, width, heads, groups):
    compare([tokens], qkv(tokens, heads, groups, width, HALF, "cuda"), backend="cudnn")


@pytest.mark.gpu
def test_views_out_of_a_merged_product(short):
    def draw():
        merged = torch.randn(301, 8 * 64, device="cuda", dtype=HALF)
        return [part.view(301, -1, 64) for part in merged.split([4 * 64, 2 * 64, 2 * 64], -1)]

    compare([301], draw, backend="cudnn", scale=0.2)


@pytest.mark.gpu
def test_what_it_returns_is_whole(short):
    """Groups of heads keep it without copying it."""
    q, k, v = qkv(300, 4, 1, 128, HALF, "cuda")()
    out = document_attention(q, k, v, bounds([300], "cuda"), 300, backend="cudnn")
    assert out.is_contiguous()


@pytest.mark.gpu
def test_a_key_too_many_is_noticed(short, monkeypatch):
    right = BACKENDS["cudnn"]

    def wrong(q, k, v, mask, padding):
        return right.attend(q, k.roll(-1, 0), v.roll(-1, 0), mask, padding)

    monkeypatch.setitem(BACKENDS, "cudnn", replace(right, attend=wrong))
    with pytest.raises(AssertionError, match=r"tensor \d: .* error"):
        compare([300], qkv(300, 4, 2, 64, HALF, "cuda"), backend="cudnn")
