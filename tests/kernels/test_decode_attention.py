"""Attention of a decode step from the first product on: as exact as rotation, pages and attention apart."""

from dataclasses import replace

import pytest
import torch

from chronicals.kernels import decode_attention as module
from chronicals.kernels.decode_attention import (
    UnrotatedHeads,
    decode_attention_reference,
    takes_unrotated,
)
from chronicals.kernels.paged_attention import SharedPages
from comparison import assert_as_exact_as_plain
from interpreted import kernels_run
from mutants import memory_without_numbers, mutant

PAGE = 16

SHAPES = {
    "one key head of seven queries": (7, 1, 64),
    "as many key heads as queries": (3, 3, 32),
    "more queries of a key head than a program's": (40, 1, 128),
    "several key heads": (8, 4, 32),
}
"""Query heads, key heads and their width."""

OPTIONS = {
    "plain": {},
    "window": {"window": 7},
    "softcap": {"softcap": 2.0},
    "window and softcap": {"window": 21, "softcap": 3.0},
}

TEAMS = (((0, 2, 5), 16), ((4, 1, -1), 48), ((-1, -1, -1), 0))
"""Sequences that share a prompt, and how many of its keys; sequence 3 is alone."""
OF_TEAMS = (17, 49, 40, 90, 60, 33)
"""Lengths of all sequences, of which the first two have one key of their own."""


def memory_of(lengths, device, teams=()):
    """Block table and place of the last token of sequences of these lengths; page 0 is of none."""
    longest = -(-max(lengths) // PAGE)
    count = len(lengths) * longest
    table = (torch.randperm(count, device=device) + 1).view(len(lengths), longest)
    for (first, *others), shared in teams:
        for one in others:
            if one >= 0:
                table[one, : shared // PAGE] = table[first, : shared // PAGE]
    keys = torch.tensor(lengths, device=device)
    last = keys - 1
    places = table.gather(1, (last // PAGE)[:, None])[:, 0] * PAGE + last % PAGE
    return table, places, keys, count + 1


def shared_by(teams, sequences, device):
    """Teams as the kernel takes them."""
    starts = torch.zeros(sequences, dtype=torch.int32)
    for members, length in teams:
        starts[[one for one in members if one >= 0]] = length
    members, lengths = (torch.tensor(column, dtype=torch.int32) for column in zip(*teams))
    return SharedPages(members.to(device), lengths.to(device), starts.to(device))


def heads_of_shape(shape, sequences, device, dtype, normed):
    """Random heads of new tokens, of which the rows lie apart."""
    heads, key_heads, width = shape
    columns = (heads + 2 * key_heads) * width
    qkv = torch.randn(sequences, columns + 16, device=device)[:, :columns]
    angles = torch.rand(sequences, width // 2, device=device) * 6
    cos, sin = (torch.cat((x, x), 1) for x in (angles.cos(), angles.sin()))
    norms = [0.5 + torch.rand(width, device=device) for _ in range(2)]
    tensors = [x.to(dtype) for x in (qkv, cos, sin, *norms)]
    qkv, cos, sin, *norms = tensors
    counts = heads, key_heads
    if not normed:
        return UnrotatedHeads(qkv, cos, sin, counts)
    return UnrotatedHeads(qkv, cos, sin, counts, tuple(norms), 1e-6, 1.0)


def compare(
    shape, lengths, device, of=module, normed=False, sinks=False, splits=None, teams=(), **options
):
    """Outputs and pages of ours and of plain torch, both beside fp64."""
    heads, key_heads, width = shape
    table, places, keys, count = memory_of(lengths, device, teams)
    shared = shared_by(teams, len(lengths), device) if teams else None

    def draw():
        new = heads_of_shape(shape, len(lengths), device, torch.bfloat16, normed)
        pages = torch.randn(2, count, PAGE, key_heads, width, device=device).bfloat16()
        logits = [torch.randn(heads, device=device).bfloat16()] if sinks else []
        return [new.qkv_NX, new.cos_NW, new.sin_NW, *(new.norms or ()), pages, *logits]

    def run(function, **chosen):
        def call(qkv, cos, sin, *others):
            *norms, pages, logits = others if sinks else (*others, None)
            of_norms = (tuple(norms), 1e-6, 1.0) if normed else ()
            new = UnrotatedHeads(qkv, cos, sin, (heads, key_heads), *of_norms)
            k, v = (x.contiguous().clone() for x in pages)
            given = (x.to(qkv.device) for x in (places, table, keys))
            with torch.no_grad():
                out = function(
                    new,
                    k,
                    v,
                    *given,
                    logits,
                    scale=width**-0.5,
                    **options,
                    **chosen,
                )
            zero = 0 * sum(x.sum().to(qkv.dtype) for x in (qkv, cos, sin, *others))
            return out + zero, torch.stack((k, v)) + zero

        return call

    ours = run(of.decode_attention, splits=splits, shared=shared)
    assert_as_exact_as_plain(ours, run(decode_attention_reference), draw)


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("normed", [False, True], ids=["rotated", "normed"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_over_shapes(shape, options, normed, device):
    compare(SHAPES[shape], [1, 2, 140, 33], device, normed=normed, **OPTIONS[options])


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_splits_and_sinks(splits, sinks, device):
    """The new token is alone in its split, the first or the last of one, or no split's at all."""
    compare((4, 2, 32), [1, 128, 129, 257, 17], device, splits=splits, sinks=sinks)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("options", ["plain", "softcap", "window", "sinks"])
@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_that_sequences_share(shape, options, device):
    chosen = OPTIONS.get(options, {"sinks": True})
    compare(SHAPES[shape], OF_TEAMS, device, teams=TEAMS, **chosen)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_splits_of_what_sequences_do_not_share(splits, device, small_tiles):
    small_tiles(module)
    compare((4, 2, 32), OF_TEAMS, device, splits=splits, teams=TEAMS)


def test_others_pages_are_not_touched(device):
    lengths = [3, 20]
    table, places, keys, count = memory_of(lengths, device)
    new = heads_of_shape((4, 2, 32), 2, device, torch.bfloat16, False)
    pages = torch.randn(2, count, PAGE, 2, 32, device=device).bfloat16()
    k, v = pages.clone()
    with kernels_run():
        assert takes_unrotated(new, k, v)
        module.decode_attention(new, k, v, places, table, keys, scale=1.0)
    _, turned, values = new.turned()
    for written, before, given in ((k, pages[0], turned), (v, pages[1], values)):
        flat, own = written.flatten(0, 1), before.flatten(0, 1)
        torch.testing.assert_close(flat[places], given, atol=0.02, rtol=0.02)
        others = torch.ones(len(flat), dtype=torch.bool, device=device)
        others[places] = False
        assert torch.equal(flat[others], own[others])


def test_what_the_kernel_takes(device):
    new = heads_of_shape((4, 2, 32), 2, device, torch.bfloat16, False)
    pages = torch.zeros(3, PAGE, 2, 32, device=device).bfloat16()
    assert takes_unrotated(new, pages, pages)
    half = replace(new, cos_NW=new.cos_NW[:, :16], sin_NW=new.sin_NW[:, :16])
    assert not takes_unrotated(half, pages, pages)
    assert not takes_unrotated(new, pages, pages[..., :16].contiguous())
    assert not takes_unrotated(new, pages.transpose(1, 2), pages)
    odd = heads_of_shape((4, 2, 48), 2, device, torch.bfloat16, False)
    wide = torch.zeros(3, PAGE, 2, 48, device=device).bfloat16()
    assert not takes_unrotated(odd, wide, wide)


@pytest.fixture
def small_tiles(monkeypatch):
    """Let a module's kernel read 16 keys at once, so that few keys, of which each matters, are several
    tiles.
    """

    def read_few(of):
        made = of.launch_of
        monkeypatch.setattr(of, "launch_of", lambda *given: replace(made(*given), keys=16))

    return read_few


PLANTED = {
    "queries are not rotated": ("q_a = a.to(dtype)", "q_a = tl.load(q_at, mask=is_head[:, None])"),
    "the new key is read from its page, too": ("token < tl.minimum(end, last)", "token < end"),
    "keys are written without their rotation": (
        "tl.store(k_ptr + written + half[None, :], new_a)",
        "tl.store(k_ptr + written + half[None, :], tl.load(new_at))",
    ),
    "a value is written where that of another head is": (
        "tl.store(v_ptr + written + value, new_value)",
        "tl.store(v_ptr + written - key_head * WIDTH + value, new_value)",
    ),
    "the new token counts in each tile": ("has_new & (step == 0)", "has_new"),
    "a window begins one key late": ("length - window", "length - window + 1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", PLANTED)
def test_faults_are_found(fault, device, small_tiles):
    wrong = mutant(module, *PLANTED[fault], "_decode_attention_kernel")
    small_tiles(wrong)
    with pytest.raises(AssertionError):
        compare((4, 2, 32), [5, 40, 33], device, wrong, splits=1, window=30)


OF_SHARED = {
    "half of the shared keys are read by each sequence, too": (
        "first = tl.load(starts_ptr + sequence)",
        "first = tl.load(starts_ptr + sequence) // 2",
    ),
    "queries of shared keys are not rotated": (
        "tl.store(turned_at, q_a, mask=is_head[:, None])",
        "tl.store(turned_at, tl.load(q_at, mask=is_head[:, None]), mask=is_head[:, None])",
    ),
    "what a sequence does not share is not written": (
        "mark_unshared(lse_ptr, at - split, is_head, first, splits, PARTS, SPLITS)",
        "pass",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", OF_SHARED)
def test_faults_of_shared_prompts_are_found(fault, device, small_tiles):
    wrong = mutant(module, *OF_SHARED[fault], "_decode_attention_kernel")
    small_tiles(wrong)
    with pytest.raises(AssertionError), memory_without_numbers():
        compare((4, 2, 32), OF_TEAMS, device, wrong, splits=2, teams=TEAMS)
