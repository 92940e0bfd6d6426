"""What lies between torch and the kernels of flash-attn-4, with plain stand-ins for those kernels.

The arguments that reach them, the order of gradients, shapes for tracing: without a card, and
before there is one.
"""

import inspect
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from definition import bounds, dense, qkv
from torch.testing._internal import optests

from chronicals.attention.backends import flash_attn_4
from chronicals.attention.support import Mask, Spans
from mutants import mutant

LENGTHS = [9, 0, 17, 4, 0]
OPTIONS = [{}, {"window": 5}, {"softcap": 1.5}, {"window": 5, "sinks": True}]


def gradients_of_definition(q, k, v, cu, dout, sinks=None, **options):
    """In a thread of its own: within a registered operator there is no autograd."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks) if x is not None]

    def work():
        out = dense(*leaves[:3], cu, sinks=leaves[3] if sinks is not None else None, **options)
        return torch.autograd.grad(out, leaves, dout)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


@pytest.fixture
def flash_attn_4_stand_in(let_return):
    """Named as in flash_attn.cute.interface 4.0.0b36; a window there is what lies to the left,
    and closed to the right.
    """

    def options(scale, left, right, softcap):
        assert (left is None) == (right is None) and right in (None, 0)
        return {"scale": scale, "window": None if left is None else left + 1, "softcap": softcap}

    def forward(
        q,
        k,
        v,
        *,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        softcap,
        window_size_left,
        window_size_right,
        learnable_sink,
        return_lse,
        out,
        lse,
    ):
        assert (
            causal
            and return_lse
            and (max_seqlen_q, max_seqlen_k) == (17, 17 if cu_seqlens_q is cu_seqlens_k else 20)
        )
        mask = options(softmax_scale, window_size_left, window_size_right, softcap)
        out.copy_(dense(q, k, v, cu_seqlens_q, sinks=learnable_sink, cu_k=cu_seqlens_k, **mask))
        lse.fill_(7.0)
        return out, lse, None, None, None

    def backward(
        q,
        k,
        v,
        out,
        dout,
        lse,
        *,
        softmax_scale,
        causal,
        softcap,
        window_size_left,
        window_size_right,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        deterministic,
        dq,
        dk,
        dv,
        learnable_sink,
    ):
        assert (
            causal
            and not deterministic
            and dout.is_contiguous()
            and lse.eq(7).all()
            and max_seqlen_q == 17
        )
        mask = options(softmax_scale, window_size_left, window_size_right, softcap or None)
        found = gradients_of_definition(
            q, k, v, cu_seqlens_q, dout, learnable_sink, cu_k=cu_seqlens_k, **mask
        )
        for place, gradient in zip((dq, dk, dv), found, strict=False):
            place.copy_(gradient)
        return dq, dk, dv, *found[3:]

    let_return(flash_attn_4, kernels_of=(forward, backward))


def compare(attend, window=None, softcap=None, sinks=False, compiled=False, earlier=()):
    """On views out of a merged product, and an upstream gradient that is not contiguous.

    Args:
        earlier: by document, tokens that are keys alone, before the queries.
    """
    merged = torch.randn(30 + sum(earlier), 8 * 16).requires_grad_()
    q, k, v = (
        part.view(len(merged), -1, 16) for part in merged.split([4 * 16, 2 * 16, 2 * 16], -1)
    )
    q = q[:30]
    sink = qkv(30, sinks=True)()[3].requires_grad_() if sinks else None
    cu = bounds(LENGTHS)
    upstream = torch.randn(4, 30, 16).transpose(0, 1)
    leaves = [merged] if sink is None else [merged, sink]
    cu_k = bounds([a + b for a, b in zip(LENGTHS, earlier, strict=True)]) if earlier else cu
    expected = dense(q, k, v, cu, 0.3, window, softcap, sink, cu_k)
    run = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    spans = Spans(cu, 17, cu_k, 20 if earlier else 17)
    found = run(q, k, v, Mask(spans, 0.3, window, softcap, sink))
    torch.testing.assert_close(found, expected)
    for got, wanted in zip(
        *(torch.autograd.grad(x, leaves, upstream) for x in (found, expected)), strict=True
    ):
        torch.testing.assert_close(got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_flash_attn_4(options, compiled, flash_attn_4_stand_in):
    compare(flash_attn_4.FLASH_ATTENTION_4.attend, **options, compiled=compiled)
    compare(
        flash_attn_4.FLASH_ATTENTION_4.attend,
        **options,
        compiled=compiled,
        earlier=[11, 2, 3, 0, 0],
    )


FAULTS = {
    "a window of one more": ("None if window is None else window - 1", "window"),
    "no scale": ("mask.scale", "1.0"),
    "keys' gradient for values'": (
        "dq, dk, dv, absent(q) if sinks is None else gradients[3]",
        "dq, dv, dk, absent(q) if sinks is None else gradients[3]",
    ),
    "no gradient of sinks": ("gradients[3]", "torch.zeros_like(gradients[3])"),
    "no softcap in the backward pass": ("softcap or 0.0", "0.0"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, let_return, flash_attn_4_stand_in):
    wrong = mutant(flash_attn_4, *FAULTS[fault])
    let_return(wrong, kernels_of=flash_attn_4.kernels_of(None))
    with pytest.raises(AssertionError):
        for options in OPTIONS:
            compare(wrong.FLASH_ATTENTION_4.attend, **options)


def test_a_second_derivative_is_refused(flash_attn_4_stand_in):
    """Part of it would be left out: the backward pass is a kernel, too."""
    q, k, v = (x.requires_grad_() for x in qkv(30)())
    cu = bounds(LENGTHS)
    found = flash_attn_4.FLASH_ATTENTION_4.attend(q, k, v, Mask(Spans(cu, 17, cu, 17), 0.3))
    with pytest.raises(
        RuntimeError, match="create_graph=True: FlashAttention-4 has no second derivative"
    ):
        torch.autograd.grad(found.square().sum(), q, create_graph=True)


@pytest.mark.slow
def test_shapes_for_tracing(flash_attn_4_stand_in):
    """torch's own check of a registered operator, its backward included."""
    inputs = qkv(30)()
    sink = torch.randn(4)
    cu = bounds(LENGTHS)
    for sinks, cu_k, longest in ((None, None, 17), (sink, None, 17), (sink, bounds(LENGTHS), 20)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        given = cu, cu_k, 17, longest, 0.3, 5, None, sinks
        torch.library.opcheck(flash_attn_4._forward, (*leaves, *given))
        rest = *flash_attn_4._forward(*inputs, *given), *given
        torch.library.opcheck(flash_attn_4._backward, (torch.randn(30, 4, 16), *inputs, *rest))


@pytest.mark.skipif(not flash_attn_4.available(), reason="needs the package flash-attn-4")
def test_flash_attn_4_takes_these_arguments(flash_attn_4_stand_in):
    from flash_attn.cute import interface

    stand_ins = flash_attn_4.kernels_of(torch.device("cpu"))
    for ours, theirs in zip(
        stand_ins, (interface._flash_attn_fwd, interface._flash_attn_bwd), strict=True
    ):
        asked, there = (list(inspect.signature(function).parameters) for function in (ours, theirs))
        assert set(asked) <= set(there) and asked[:3] == there[:3]


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


@pytest.mark.slow
def test_a_wrong_shape_for_tracing_is_found(let_return, flash_attn_4_stand_in):
    wrong = mutant(flash_attn_4, "sinks.new_empty(sinks.shape)", "sinks.new_empty(len(sinks) + 1)")
    let_return(wrong, kernels_of=flash_attn_4.kernels_of(None))
    given = bounds(LENGTHS), None, 17, 17, 0.3, 5, None, torch.randn(4)
    inputs = qkv(30)()
    rest = *wrong._forward(*inputs, *given), *given
    with pytest.raises(optests.OpCheckError):
        torch.library.opcheck(wrong._backward, (torch.randn(30, 4, 16), *inputs, *rest))
