"""document_attention against attention with one dense mask over all documents at once.

Over gathered keys: against each document by itself behind its prompt.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from definition import bounds, compare, qkv, random_lengths, random_spans

from chronicals.attention import BACKENDS, attention_reference, document_attention, gather_keys
from chronicals.attention import documents as module
from chronicals.attention.support import Mask
from chronicals.data.packs.step_memory import shared_keys
from mutants import mutant

TYPES = [torch.float32, torch.bfloat16]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 2, 7, 59, 60, 1000])
def test_every_mask(window, softcap, sinks, dtype):
    lengths = random_lengths()
    compare(lengths, qkv(sum(lengths), dtype=dtype, sinks=sinks), window=window, softcap=softcap)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("heads, groups", [(1, 1), (3, 3), (4, 2), (8, 1), (6, 2)])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_grouped_heads(heads, groups, softcap, dtype):
    lengths = random_lengths(4, 40)
    compare(lengths, qkv(sum(lengths), heads, groups, dtype=dtype), softcap=softcap)


@pytest.mark.parametrize("width", [1, 5, 64])
def test_head_widths(width):
    lengths = random_lengths(4, 30)
    compare(lengths, qkv(sum(lengths), width=width))


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_values_narrower_than_keys(softcap):
    """As in latent attention."""
    lengths = random_lengths(4, 30)
    q, k, v = qkv(sum(lengths), width=20)()
    given = bounds(lengths), max(lengths)
    out = document_attention(q, k, v[..., :7], *given, softcap=softcap)
    whole = document_attention(q, k, v, *given, softcap=softcap)
    torch.testing.assert_close(out, whole[..., :7], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [[60], [0, 0, 5, 0, 2], [59, 1], [1, 59], [2] * 9], ids=str)
def test_few_and_empty_documents(lengths):
    compare(lengths, qkv(sum(lengths)), window=5)
    compare(lengths, qkv(sum(lengths)))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(
    "lengths, window", [([1], None), ([1] * 9, None), ([1] * 9, 3), ([20, 0, 7], 1)], ids=str
)
def test_a_token_that_sees_itself_alone(lengths, window, softcap, dtype):
    """Its output is its value, the gradient too, and query and key have none."""
    q, k, v = (x.requires_grad_() for x in qkv(sum(lengths), dtype=dtype)())
    out = document_attention(q, k, v, bounds(lengths), max(lengths), window=window, softcap=softcap)
    assert torch.equal(out, v.repeat_interleave(2, 1))
    upstream = torch.randn_like(out)
    out.backward(upstream)
    expected = upstream.view(sum(lengths), 2, 2, 16).sum(2)
    torch.testing.assert_close(v.grad, expected, rtol=torch.finfo(dtype).eps, atol=0)
    rounding = torch.finfo(dtype).eps * upstream.norm() * v.norm() / sum(lengths) ** 0.5
    assert q.grad.norm() <= rounding and k.grad.norm() <= rounding


@pytest.mark.slow
def test_a_token_alone_beside_a_sink():
    lengths = [1, 1, 4]
    compare(lengths, qkv(sum(lengths), sinks=True))
    compare(lengths, qkv(sum(lengths), sinks=True), window=1)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_scale(softcap):
    lengths = random_lengths(4, 30)
    compare(lengths, qkv(sum(lengths)), scale=0.4, softcap=softcap)


@pytest.mark.parametrize("cu", [[0, 4], [2, 9], [0, 4, 12], [0, 6, 4, 9], [0], []], ids=str)
def test_bounds_that_do_not_cover_the_tokens_are_refused(cu):
    """The result would have other rows than the queries."""
    q, k, v = qkv(9)()
    with pytest.raises(ValueError, match="must rise from 0 to the 9 tokens"):
        document_attention(q, k, v, torch.tensor(cu, dtype=torch.int32), 9)


def test_no_tokens_at_all():
    q, k, v = (x.requires_grad_() for x in qkv(0)())
    document_attention(q, k, v, torch.zeros(3, dtype=torch.int32), 0).sum().backward()
    assert q.grad.shape == q.shape


def test_non_contiguous():
    """As the model gives them: heads before tokens, out of one merged product."""
    lengths = random_lengths(4, 30)

    def draw():
        merged = torch.randn(sum(lengths), 8 * 16)
        q, k, v = (
            part.view(sum(lengths), -1, 16) for part in merged.split([4 * 16, 2 * 16, 2 * 16], -1)
        )
        k = torch.randn(2, sum(lengths), 16).transpose(0, 1)
        assert not q.is_contiguous() and not k.is_contiguous() and not v.is_contiguous()
        return q, k, v

    compare(lengths, draw)


def run(draw, lengths, options):
    """Output and gradients, document by document."""
    leaves = [x.clone().requires_grad_() for x in draw]
    sinks = leaves[3] if len(leaves) > 3 else None
    out = document_attention(*leaves[:3], bounds(lengths), max(lengths), sinks=sinks, **options)
    return out, leaves


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 2, 7, 59, 1000])
def test_queries_fewer_than_keys(window, softcap, sinks, dtype):
    queries, keys = random_spans()
    draw = qkv(sum(keys), dtype=dtype, sinks=sinks, queries=sum(queries))
    compare(queries, draw, keys=keys, window=window, softcap=softcap)


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"softcap": 1.5}], ids=str)
def test_a_document_by_chunks_is_the_document(options):
    """Each chunk attends to itself and what is before it, as with a cache or with other ranks'
    keys.
    """
    lengths = [17, 30]
    chunk = 5
    q, k, v = qkv(47)()
    whole = document_attention(q, k, v, bounds(lengths), 30, **options)
    rows = torch.arange(47).split(lengths)
    for start in range(0, 30, chunk):
        asked = [row[start : start + chunk] for row in rows]
        there = [
            row[: start + chunk] if len(part) else row[:0]
            for row, part in zip(rows, asked, strict=True)
        ]
        cu_q, cu_k = (bounds([len(part) for part in parts]) for parts in (asked, there))
        of_q = torch.cat(asked)
        of_k = torch.cat(there)
        out = document_attention(q[of_q], k[of_k], v[of_k], cu_q, chunk, cu_k, 30, **options)
        torch.testing.assert_close(out, whole[of_q], rtol=1e-5, atol=1e-5)


def test_equal_bounds_in_two_tensors_give_the_same():
    lengths = random_lengths()
    q, k, v = qkv(sum(lengths))()
    once = document_attention(q, k, v, bounds(lengths), max(lengths))
    assert torch.equal(
        once,
        document_attention(q, k, v, bounds(lengths), max(lengths), bounds(lengths), max(lengths)),
    )


OPTIONS = [{}, {"window": 4}, {"softcap": 1.5}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_permuting_documents_permutes_the_result_and_nothing_else(options):
    lengths = random_lengths()
    tokens = torch.arange(sum(lengths)).split(lengths)
    moved = torch.arange(sum(lengths))
    order = []
    while torch.equal(moved, torch.arange(sum(lengths))):  # only empty documents moved, or none
        order = torch.randperm(len(lengths)).tolist()
        moved = torch.cat([tokens[n] for n in order])
    draw = qkv(sum(lengths))()
    upstream = torch.randn(sum(lengths), 4, 16)

    here, leaves = run(draw, lengths, options)
    here.backward(upstream)
    there, permuted = run([x[moved] for x in draw], [lengths[n] for n in order], options)
    there.backward(upstream[moved])
    assert torch.equal(here[moved], there)
    for a, b in zip(leaves, permuted, strict=True):
        assert a.grad.any() and torch.equal(a.grad[moved], b.grad)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_document_hears_nothing_of_its_neighbours(options):
    """Other tokens elsewhere change no bit of it, and its output has no gradient elsewhere."""
    lengths = [9, 17, 4]
    middle = slice(9, 26)
    draw = qkv(sum(lengths))()
    changed = [x.clone() for x in draw]
    for x in changed:
        x[:9], x[26:] = 7.0, torch.randn(4, *x.shape[1:])
    here, leaves = run(draw, lengths, options)
    there, _ = run(changed, lengths, options)
    assert torch.equal(here[middle], there[middle])
    assert not torch.equal(here[:9], there[:9])
    here[middle].sum().backward()
    for leaf in leaves[2:]:
        assert leaf.grad[middle].any() and not leaf.grad[:9].any() and not leaf.grad[26:].any()


def test_the_future_is_not_seen():
    draw = qkv(20)()
    changed = [x.clone() for x in draw]
    for x in changed:
        x[12:] += 1
    here = run(draw, [20], {})[0]
    there = run(changed, [20], {})[0]
    assert torch.equal(here[:12], there[:12]) and not torch.equal(here[12], there[12])


def test_the_bound_on_lengths_changes_nothing():
    lengths = [9, 17, 4]
    q, k, v = qkv(sum(lengths))()
    tight, wide = (document_attention(q, k, v, bounds(lengths), bound) for bound in (17, 4096))
    assert torch.equal(tight, wide)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_per_document_on_a_card(sinks, softcap, dtype):
    lengths = random_lengths()
    compare(
        lengths,
        qkv(sum(lengths), dtype=dtype, device="cuda", sinks=sinks),
        window=7,
        softcap=softcap,
    )


FAULTS = {
    "bounds dropped": lambda cu, w, c, s: (cu[[0, -1]], w, c, s),
    "window one too wide": lambda cu, w, c, s: (cu, w + 1, c, s),
    "no softcap": lambda cu, w, c, s: (cu, w, None, s),
    "no sinks": lambda cu, w, c, s: (cu, w, c, s * 0 - 1e9),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_mask_is_noticed(fault, monkeypatch):
    right = BACKENDS["per-document"]
    lengths = [9, 17, 4]
    draw = qkv(sum(lengths), sinks=True)
    compare(lengths, draw, window=6, softcap=1.5)

    def wrong(q, k, v, mask, _padding):
        cu, *rest = FAULTS[fault](mask.spans.cu_q, mask.window, mask.softcap, mask.sinks)
        spans = replace(mask.spans, cu_q=cu, cu_k=cu)
        return right.attend(q, k, v, Mask(spans, mask.scale, *rest))

    monkeypatch.setitem(BACKENDS, "per-document", replace(right, attend=wrong))
    with pytest.raises(AssertionError, match=r"tensor \d: .* error"):
        compare(lengths, draw, window=6, softcap=1.5)


WRONG = {
    "shapes": lambda q, k, v, cu: dict(k_TKD=k[:-1]),
    "have shapes": lambda q, k, v, cu: dict(k_TKD=k[..., :8], q_QHD=q[..., :8]),
    "cannot be shared": lambda q, k, v, cu: dict(q_QHD=q[:, :3]),
    "types": lambda q, k, v, cu: dict(v_TKD=v.double()),
    "cu_seqlens_q is torch.int64": lambda q, k, v, cu: dict(cu_seqlens_q=cu.long()),
    "cu_seqlens_k is torch.int32 of shape": lambda q, k, v, cu: dict(
        cu_seqlens_k=cu[1:], max_seqlen_k=5
    ),
    "without max_seqlen_k": lambda q, k, v, cu: dict(cu_seqlens_k=cu.clone()),
    "document 1 has 5 queries and 4 keys": lambda q, k, v, cu: dict(
        cu_seqlens_k=bounds([5, 4]), max_seqlen_k=5
    ),
    "cu_seqlens_k=.*must rise from 0 to the 9 tokens of k": lambda q, k, v, cu: dict(
        cu_seqlens_k=bounds([4, 6]), max_seqlen_k=6
    ),
    "window=0": lambda q, k, v, cu: dict(window=0),
    "softcap=0.0": lambda q, k, v, cu: dict(softcap=0.0),
    "sinks": lambda q, k, v, cu: dict(sinks=torch.zeros(3)),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_named(message):
    q, k, v = qkv(9)()
    right = dict(q_QHD=q, k_TKD=k, v_TKD=v, cu_seqlens_q=bounds([4, 5]), max_seqlen_q=5)
    with pytest.raises(ValueError, match=message):
        document_attention(**right | WRONG[message](q, k, v, right["cu_seqlens_q"]))


SHARED_LENGTHS = [2, 3, 7, 6, 5, 4, 9]
SHARED = [7, 7, -1, 0, 9, 9, -1]
SIDES = [0, 1, 2, 0, 0, 1, 2]


def with_shared_prompts(device):
    bounds = np.append(0, np.cumsum(SHARED_LENGTHS)).astype(np.int32)
    keys = shared_keys(np.array(SHARED), np.array(SIDES), bounds, 40)
    return torch.as_tensor(bounds, device=device), keys.map(lambda x: x.to(device))


@pytest.mark.slow
def test_gathering_and_its_gradient_are_an_index(device):
    _, keys = with_shared_prompts(device)
    x = torch.randn(
        sum(SHARED_LENGTHS), 2, 8, dtype=torch.float64, device=device, requires_grad=True
    )
    gathered = gather_keys(x, keys)
    count = int(keys.cu_seqlens[-1])
    assert torch.equal(gathered[:count], x[keys.index[:count]])
    dy = torch.randn_like(gathered)
    (expected,) = torch.autograd.grad(x[keys.index[:count]], x, dy[:count])
    torch.testing.assert_close(torch.autograd.grad(gathered, x, dy)[0], expected)


def test_gradients_are_added_up_in_fp32(device):
    """A prompt's token as its own, and for two answers: in bf16 256 + 1 + 1 is 256 where each
    sum is rounded.
    """
    bounds = np.array([0, 1, 2, 3], np.int32)
    keys = shared_keys(np.array([1, 1, -1]), np.array([0, 1, 2]), bounds, 4).map(
        lambda x: x.to(device)
    )
    x = torch.zeros(3, 1, 8, dtype=torch.bfloat16, device=device, requires_grad=True)
    gathered = gather_keys(x, keys)
    dy = torch.ones_like(gathered)
    dy[int(keys.places[0, 2])] = 256.0
    assert (torch.autograd.grad(gathered, x, dy)[0][2] == 258.0).all()


def test_keys_behind_the_last_bound_are_seen_by_nobody(device):
    """A card gathers as many keys as a graph has room for."""
    bounds, keys = with_shared_prompts(device)
    q, k, v = (torch.randn(sum(SHARED_LENGTHS), 2, 8, device=device) for _ in range(3))
    more = [module._SharedKeysGather.apply(x, keys.index, keys.places) for x in (k, v)]
    assert len(more[0]) > int(keys.cu_seqlens[-1])
    for x in more:
        x[int(keys.cu_seqlens[-1]) :] = float("nan")
    out = document_attention(
        q, *more, bounds, 40, keys.cu_seqlens, keys.max_seqlen, scale=0.3, backend="per-document"
    )
    torch.testing.assert_close(out, each_alone(q, k, v, bounds), rtol=1e-4, atol=1e-5)


def test_what_no_document_attends_to_has_no_part_in_gradients(device):
    """On a card there are keys behind the last bound, whose gradient is whatever lay there."""
    _, keys = with_shared_prompts(device)
    x = torch.randn(sum(SHARED_LENGTHS), 2, 8, device=device, requires_grad=True)
    gathered = module._SharedKeysGather.apply(x, keys.index, keys.places)
    count = int(keys.cu_seqlens[-1])
    assert len(gathered) > count
    dy = torch.ones_like(gathered)
    dy[count:] = float("nan")
    assert torch.isfinite(torch.autograd.grad(gathered, x, dy)[0]).all()


def each_alone(q, k, v, bounds):
    """Each document behind its prompt, all scores at once."""
    starts = bounds.tolist()
    found = []
    for n, length in enumerate(SHARED_LENGTHS):
        own = list(range(starts[n], starts[n + 1]))
        prompt = []
        if SHARED[n] > 0:
            last = next(m for m in range(n, len(SHARED_LENGTHS)) if SHARED[m] < 0)
            prompt = list(range(starts[last], starts[last + 1]))
        seen = torch.ones(length, length + len(prompt), dtype=torch.bool, device=q.device).tril(
            len(prompt)
        )
        one = attention_reference(
            q[own].transpose(0, 1),
            *(x[prompt + own].transpose(0, 1) for x in (k, v)),
            seen,
            0.3,
            None,
            None,
        )
        found.append(one.transpose(0, 1))
    return torch.cat(found)


def compare_with_each_alone(device, gather=gather_keys):
    bounds, keys = with_shared_prompts(device)
    q, k, v = (
        torch.randn(sum(SHARED_LENGTHS), heads, 8, device=device, requires_grad=True)
        for heads in (4, 2, 2)
    )
    out = document_attention(
        q,
        gather(k, keys),
        gather(v, keys),
        bounds,
        40,
        keys.cu_seqlens,
        keys.max_seqlen,
        scale=0.3,
        backend="per-document",
    )
    dy = torch.randn_like(out)
    expected = each_alone(q, k, v, bounds)
    return [
        (out, expected),
        *zip(*(torch.autograd.grad(y, (q, k, v), dy) for y in (out, expected))),
    ]


def test_attention_over_them_is_that_of_each_document_alone(device):
    for ours, expected in compare_with_each_alone(torch.device("cpu")):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flash", "flash-attn-4"])
def test_backends_of_a_card_take_them(backend, device):
    from chronicals.attention import BACKENDS

    if not BACKENDS[backend].available():
        pytest.skip(f"{backend} is not installed")
    bounds, keys = with_shared_prompts(device)
    q, k, v = (
        torch.randn(
            sum(SHARED_LENGTHS), heads, 64, device=device, dtype=torch.bfloat16, requires_grad=True
        )
        for heads in (4, 2, 2)
    )
    found = []
    for name in (backend, "per-document"):
        gathered = [gather_keys(x, keys) for x in (k, v)]
        if name == "per-document":
            gathered = [x[: int(keys.cu_seqlens[-1])] for x in gathered]
        out = document_attention(
            q, *gathered, bounds, 40, keys.cu_seqlens, keys.max_seqlen, scale=0.1, backend=name
        )
        found.append([out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.02)


FAULTS_OF_GATHERING = {
    "an answer's copies dropped": ("places.unbind()", "places[:-1].unbind()"),
    "absent copies counted": (
        "torch.where((place >= 0)[:, None, None], of_place, 0.0)",
        "of_place",
    ),
}


@pytest.mark.parametrize("fault", FAULTS_OF_GATHERING)
def test_planted_faults_of_gathering_are_found(fault):
    broken = mutant(module, *FAULTS_OF_GATHERING[fault])
    with pytest.raises(AssertionError):
        for ours, expected in compare_with_each_alone(torch.device("cpu"), broken.gather_keys):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
