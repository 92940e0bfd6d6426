"""Which backend is chosen, said and refused."""

import logging
from dataclasses import replace

import pytest
import torch
from definition import bounds, qkv

from chronicals.attention import BACKENDS, backends, choose_backend, document_attention

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


WITHOUT_PACKAGES = ("flash", "flex", "per-document")
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
