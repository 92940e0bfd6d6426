"""Attention over pages: the choice of a backend, and what reaches the kernels of others, with plain
stand-ins for them.
"""

import inspect
from dataclasses import replace

import pytest
import torch

from chronicals.attention import PAGED_BACKENDS, attend_pages, paged
from chronicals.attention.backends import flash_attn_4
from chronicals.attention.paged import PagedNeeds, PagedScores, paged_backend
from chronicals.kernels.paged_attention import paged_attention_reference

H100 = (9, 0)
B200 = (10, 0)


def needs(capability=H100, **changes):
    device = "cuda" if capability else "cpu"
    usual = {"dtype": torch.bfloat16, "head_dim": 128, "page_size": 256}
    return PagedNeeds(device, capability or (0, 0), **{**usual, **changes})


def inputs(width=32, page_size=4):
    """Three sequences of 1, 5 and 12 keys, whose pages lie anywhere."""
    keys, values = (torch.randn(9, page_size, 2, width) for _ in range(2))
    table = torch.tensor([[7, 0, 0], [3, 5, 0], [8, 1, 4]])
    return torch.randn(3, 4, width), keys, values, table, torch.tensor([1, 5, 12])


def flash_attn_4_on_pages(
    q,
    k,
    v,
    *,
    seqused_k,
    max_seqlen_k,
    page_table,
    softmax_scale,
    causal,
    softcap,
    window_size_left,
    window_size_right,
    learnable_sink,
    num_splits,
):
    """Named as in flash_attn.cute.interface 4.0.0b36."""
    assert q.shape[1] == 1 and not causal and max_seqlen_k == page_table.shape[1] * k.shape[1]
    assert seqused_k.dtype == page_table.dtype == torch.int32 and page_table.stride(1) == 1
    assert (window_size_left is None) == (window_size_right is None)
    window = None if window_size_left is None else window_size_left + 1
    mask = {"scale": softmax_scale, "window": window, "softcap": softcap}
    out = paged_attention_reference(q[:, 0], k, v, page_table, seqused_k, learnable_sink, **mask)
    return out[:, None], None, None, None, num_splits


def varlen_attn_on_pages(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    scale,
    window_size,
    enable_gqa,
    seqused_k,
    block_table,
):
    assert cu_seq_k is None and max_q == 1 and max_k == block_table.shape[1] * key.shape[1]
    assert cu_seq_q.tolist() == [0, 1, 2, 3] and enable_gqa
    assert cu_seq_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    left, right = window_size
    assert right == 0
    window = None if left == -1 else left + 1
    return paged_attention_reference(
        query, key, value, block_table, seqused_k, scale=scale, window=window
    )


@pytest.fixture
def on_a_card(monkeypatch, let_return):
    """Tensors of the CPU are taken for those of an H100, and stand-ins for the packages."""
    let_return(torch.cuda, get_device_capability=H100)
    let_return(flash_attn_4, kernels_of=(flash_attn_4_on_pages, None))
    monkeypatch.setattr(paged, "varlen_attn", varlen_attn_on_pages)
    monkeypatch.setattr(paged, "GROUPED_HEADS", {"enable_gqa": True})


MASKS = [{}, {"window": 3}, {"softcap": 2.0}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("name", PAGED_BACKENDS)
@pytest.mark.usefixtures("on_a_card")
def test_each_computes_the_same(name, mask):
    if name == "flash" and not mask.keys() <= {"window"}:
        assert "lacks" in str(refusal(needs(**dict.fromkeys(mask, True)), name))
        return
    given = inputs()
    usual = {"sinks": None, "scale": 0.3, "window": None, "softcap": None, "shared": None}
    found = PAGED_BACKENDS[name].attend(*given, PagedScores(**{**usual, **mask}))
    torch.testing.assert_close(found, paged_attention_reference(*given, **{"scale": 0.3, **mask}))


@pytest.mark.parametrize(("capability", "splits"), [(H100, 1), (B200, 0)])
@pytest.mark.usefixtures("on_a_card")
def test_keys_are_split_where_the_kernels_can(capability, splits, let_return):
    let_return(torch.cuda, get_device_capability=capability)
    seen = []

    def forward(*given, num_splits, **named):
        seen.append(num_splits)
        return flash_attn_4_on_pages(*given, num_splits=num_splits, **named)

    let_return(flash_attn_4, kernels_of=(forward, None))
    scores = PagedScores(sinks=None, scale=1.0, window=None, softcap=None, shared=None)
    PAGED_BACKENDS["flash-attn-4"].attend(*inputs(), scores)
    assert seen == [splits]


def refusal(asked, backend):
    with pytest.raises(ValueError) as caught:
        paged_backend(asked, backend)
    return caught.value


def test_the_choice_is_what_was_measured(monkeypatch, set_constants):
    kernel = PAGED_BACKENDS["kernel"]
    for capability in (H100, B200, None):
        assert paged_backend(needs(capability)) is kernel
    faster = replace(PAGED_BACKENDS["flash-attn-4"], available=lambda: True)
    monkeypatch.setitem(PAGED_BACKENDS, "flash-attn-4", faster)
    set_constants(paged, FASTEST_PAGED={H100: ("flash-attn-4", "kernel")})
    assert paged_backend(needs()) is faster
    assert paged_backend(needs(value_dim=64)) is kernel and paged_backend(needs(B200)) is kernel


def test_every_order_ends_where_everything_can_be_done():
    for names in (paged.DEFAULT_PAGED, *paged.FASTEST_PAGED.values()):
        assert names[-1] == "kernel" and set(names) <= set(PAGED_BACKENDS)


@pytest.mark.parametrize(
    ("asked", "backend", "message"),
    [
        (needs(page_size=128), "flash", "lacks page_size=128"),
        (needs(sinks=True), "flash", "lacks sinks"),
        (needs(value_dim=64), "flash-attn-4", "lacks value_dim=64"),
        (needs(head_dim=80, value_dim=80), "flash-attn-4", "lacks head_dim=80"),
        (needs((8, 6)), "flash-attn-4", r"lacks capability=\(8, 6\)"),
        (needs((12, 0)), "flash-attn-4", r"lacks capability=\(12, 0\)"),
        (needs(None), "flash", "lacks device=cpu; use backend=None, or one of kernel"),
        (needs(), "paged", "backend='paged' is unknown; choose one of kernel, flash-attn-4, flash"),
    ],
)
def test_what_a_backend_cannot_do_is_refused(asked, backend, message):
    with pytest.raises(ValueError, match=message):
        paged_backend(asked, backend)


def test_a_tensor_of_the_cpu_takes_the_kernel_or_is_refused():
    given = inputs()
    expected = paged_attention_reference(*given, scale=0.3)
    assert torch.equal(attend_pages(*given, scale=0.3), expected)
    with pytest.raises(ValueError, match="lacks device=cpu"):
        attend_pages(*inputs(page_size=256), scale=0.3, backend="flash")


@pytest.mark.skipif(not flash_attn_4.available(), reason="needs the package flash-attn-4")
def test_flash_attn_4_takes_these_arguments():
    from flash_attn.cute import interface

    asked = set(inspect.signature(flash_attn_4_on_pages).parameters)
    assert asked <= set(inspect.signature(interface._flash_attn_fwd).parameters)


def test_torch_takes_these_arguments():
    if not PAGED_BACKENDS["flash"].available():
        pytest.skip("torch before 2.12 has no block table")
    from torch.nn.attention.varlen import varlen_attn

    asked = set(inspect.signature(varlen_attn_on_pages).parameters)
    assert asked <= set(inspect.signature(varlen_attn).parameters)
