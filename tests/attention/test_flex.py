"""FlexAttention's block mask against the dense one, and on the CPU its forward, which is all it
has there.
"""

from dataclasses import replace

import pytest
import torch
from definition import bounds, compare, dense, dense_mask, qkv, random_lengths, random_spans
from torch.nn.attention import flex_attention as torchs

from chronicals.attention import BACKENDS, document_attention
from chronicals.attention.backends import FLEX_ATTENTION, flex
from chronicals.attention.backends.flex import _masks, block_mask, make_block_mask
from chronicals.attention.support import Spans


@pytest.fixture(autouse=True)
def fresh_compilations():
    """A second shape would be compiled for any shape, which torch 2.13 cannot do on some CPUs."""
    torch._dynamo.reset()


def blocks(mask, queries, keys):
    """``[Q, T]``: 0 where a block is left out, 1 where its mask is asked, 2 where it is seen
    whole.
    """
    rows, columns = mask.kv_indices.shape[-2:]
    found = torch.zeros(rows, columns, dtype=torch.int64)
    for row in range(rows):
        for counts, indices, kind in (
            (mask.kv_num_blocks, mask.kv_indices, 1),
            (mask.full_kv_num_blocks, mask.full_kv_indices, 2),
        ):
            columns = indices[0, 0, row, : counts[0, 0, row]].long()
            assert not found[row, columns].any() and columns.unique().numel() == columns.numel()
            found[row, columns] = kind
    return found.repeat_interleave(128, 0).repeat_interleave(128, 1)[:queries, :keys]


LENGTHS = [None, [700], [128] * 4, [0, 0, 5, 0, 900, 0], [1] * 260]
KEYS = [
    ([700], [1000]),
    ([3, 128, 0, 1], [400, 256, 70, 500]),
    ([1] * 130, [5] * 130),
    ([128] * 3, [129, 128, 255]),
]


@pytest.mark.parametrize("window", [None, 1, 100, 129, 300])
@pytest.mark.parametrize(
    "lengths, keys",
    [*((lengths, None) for lengths in LENGTHS), (None, ...), *KEYS],
    ids=lambda x: f"{x}"[:20],
)
def test_the_block_mask_is_the_dense_one(lengths, keys, window):
    lengths, keys = (
        random_spans(6, 500) if keys is ... else (lengths or random_lengths(6, 500), keys)
    )
    spans = spans_of(lengths, keys)
    queries = sum(lengths)
    tokens = sum(keys or lengths)
    mask = make_block_mask(spans, queries, tokens, window)
    expected = dense_mask(spans.cu_q, window, spans.cu_k)
    kinds = blocks(mask, queries, tokens)
    seen = mask.mask_mod(0, 0, torch.arange(queries)[:, None], torch.arange(tokens)[None])
    assert torch.equal((kinds == 2) | ((kinds == 1) & seen), expected)
    rows, columns = ((count + 127) // 128 for count in (queries, tokens))
    padded = torch.zeros(rows * 128, columns * 128, dtype=torch.bool)
    padded[:queries, :tokens] = expected
    any_seen = padded.view(rows, 128, columns, 128).any(3).any(1)
    visited = blocks(mask, rows * 128, columns * 128)[::128, ::128] > 0
    assert not (any_seen & ~visited).any()
    if keys is None:
        assert torch.equal(any_seen, visited), "a block is visited for nothing"


def spans_of(lengths, keys=None):
    cu = bounds(lengths)
    return Spans(cu, max(lengths), cu if keys is None else bounds(keys), max(keys or lengths))


def test_the_mask_is_made_once_a_batch():
    _masks.clear()
    cu = bounds([100, 200])
    spans = Spans(cu, 200, cu, 200)
    first = block_mask(spans, 300, 300, None)
    assert block_mask(replace(spans), 300, 300, None) is first
    assert (
        block_mask(spans, 300, 300, 5) is not first
        and block_mask(spans_of([100, 200]), 300, 300, None) is not first
    )
    assert block_mask(spans, 300, 300, None) is first
    apart = replace(spans, cu_k=bounds([150, 200]))
    of_both = block_mask(apart, 300, 350, None)
    assert block_mask(apart, 300, 350, None) is of_both is not first
    apart.cu_k[1] = 100
    assert block_mask(apart, 300, 350, None) is not of_both
    cu[1] = 256
    changed = block_mask(spans, 300, 300, None)
    assert changed is not first and int(changed.kv_num_blocks.sum()) != int(
        first.kv_num_blocks.sum()
    )


@pytest.mark.slow
def test_compiled_for_the_cpu():
    lengths = [130, 0, 1, 69, 0]
    options = {"window": 40, "softcap": 1.5}
    q, k, v = qkv(200)()
    out = document_attention(q, k, v, bounds(lengths), 130, backend="flex", **options)
    torch.testing.assert_close(
        out, dense(q, k, v, bounds(lengths), **options), rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"window": 40, "softcap": 1.5}], ids=str)
def test_queries_fewer_than_keys_compiled_for_the_cpu(options):
    lengths = [130, 0, 1, 69]
    keys = [150, 4, 90, 69]
    q, k, v = qkv(sum(keys), queries=sum(lengths))()
    out = document_attention(
        q, k, v, bounds(lengths), 130, bounds(keys), 150, backend="flex", **options
    )
    torch.testing.assert_close(
        out, dense(q, k, v, bounds(lengths), cu_k=bounds(keys), **options), rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow
def test_values_narrower_than_keys():
    """Both are filled up to a width that it takes."""
    lengths = [130, 70]
    q, k, v = qkv(200, width=20)()
    out = document_attention(q, k, v[..., :7], bounds(lengths), 130, backend="flex")
    torch.testing.assert_close(out, dense(q, k, v, bounds(lengths))[..., :7], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_compiled_into_a_whole_graph():
    q, k, v = qkv(200, width=20)()
    cu = bounds([130, 70])
    layer = torch.compile(
        lambda q: document_attention(q, k, v, cu, 130, backend="flex"),
        fullgraph=True,
        backend="eager",
    )
    torch.testing.assert_close(layer(q), dense(q, k, v, cu), rtol=1e-5, atol=1e-5)


@pytest.fixture
def backward_on_the_cpu(monkeypatch, let_return):
    """torch refuses it, as nothing is compiled for it there; its plain form differentiates all
    the same.
    """
    let_return(torchs, _validate_device=None)
    monkeypatch.setattr(
        flex, "_compiled", torch.compile(torchs.flex_attention, fullgraph=True, backend="aot_eager")
    )
    supports = {"cpu": replace(FLEX_ATTENTION.supports["cpu"], sinks=True, forward_only=False)}
    monkeypatch.setitem(BACKENDS, "flex", replace(FLEX_ATTENTION, supports=supports))


@pytest.mark.slow
@pytest.mark.parametrize("heads, groups, width", [(4, 2, 16), (8, 1, 20)])
@pytest.mark.parametrize(
    "options", [{}, {"window": 37}, {"softcap": 1.5}, {"window": 37, "softcap": 1.5}], ids=str
)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_backward(options, heads, groups, width, sinks, backward_on_the_cpu):
    """Sinks in bf16: they go through the log-sum-exp, whose own rounding shows in fp32."""
    lengths = [130, 0, 1, 69, 0]
    dtype = torch.bfloat16 if sinks else torch.float32
    compare(lengths, qkv(200, heads, groups, width, dtype, sinks=sinks), backend="flex", **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"window": 37}, {"window": 37, "softcap": 1.5}], ids=str)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_backward_of_queries_fewer_than_keys(options, sinks, backward_on_the_cpu):
    dtype = torch.bfloat16 if sinks else torch.float32
    draw = qkv(313, dtype=dtype, sinks=sinks, queries=200)
    compare([130, 0, 1, 69], draw, backend="flex", keys=[150, 4, 90, 69], **options)
