"""Gathered keys, and attention over them, against each document by itself behind its prompt."""

import numpy as np
import pytest
import torch

from chronicals.attention import attention_reference, document_attention, gather_keys
from chronicals.attention import documents as module
from chronicals.data.packs.step_memory import shared_keys
from mutants import mutant

LENGTHS = [2, 3, 7, 6, 5, 4, 9]
SHARED = [7, 7, -1, 0, 9, 9, -1]
SIDES = [0, 1, 2, 0, 0, 1, 2]


def made(device):
    bounds = np.append(0, np.cumsum(LENGTHS)).astype(np.int32)
    keys = shared_keys(np.array(SHARED), np.array(SIDES), bounds, 40)
    return torch.as_tensor(bounds, device=device), keys.map(lambda x: x.to(device))


def test_gathering_and_its_gradient_are_an_index(device):
    _, keys = made(device)
    x = torch.randn(sum(LENGTHS), 2, 8, dtype=torch.float64, device=device, requires_grad=True)
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
    bounds, keys = made(device)
    q, k, v = (torch.randn(sum(LENGTHS), 2, 8, device=device) for _ in range(3))
    more = [module._SharedKeysGather.apply(x, keys.index, keys.places) for x in (k, v)]
    assert len(more[0]) > int(keys.cu_seqlens[-1])
    for x in more:
        x[int(keys.cu_seqlens[-1]) :] = float("nan")
    out = document_attention(
        q, *more, bounds, 40, keys.cu_seqlens, keys.max_seqlen, scale=0.3, backend="per-document"
    )
    torch.testing.assert_close(out, alone(q, k, v, bounds), rtol=1e-4, atol=1e-5)


def test_what_no_document_attends_to_has_no_part_in_gradients(device):
    """On a card there are keys behind the last bound, whose gradient is whatever lay there."""
    _, keys = made(device)
    x = torch.randn(sum(LENGTHS), 2, 8, device=device, requires_grad=True)
    gathered = module._SharedKeysGather.apply(x, keys.index, keys.places)
    count = int(keys.cu_seqlens[-1])
    assert len(gathered) > count
    dy = torch.ones_like(gathered)
    dy[count:] = float("nan")
    assert torch.isfinite(torch.autograd.grad(gathered, x, dy)[0]).all()


def alone(q, k, v, bounds):
    """Each document behind its prompt, all scores at once."""
    starts = bounds.tolist()
    found = []
    for n, length in enumerate(LENGTHS):
        own = list(range(starts[n], starts[n + 1]))
        prompt = []
        if SHARED[n] > 0:
            last = next(m for m in range(n, len(LENGTHS)) if SHARED[m] < 0)
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


def compared(device, gather=gather_keys):
    bounds, keys = made(device)
    q, k, v = (
        torch.randn(sum(LENGTHS), heads, 8, device=device, requires_grad=True)
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
    expected = alone(q, k, v, bounds)
    return [
        (out, expected),
        *zip(*(torch.autograd.grad(y, (q, k, v), dy) for y in (out, expected))),
    ]


def test_attention_over_them_is_that_of_each_document_alone(device):
    for ours, expected in compared(torch.device("cpu")):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flash", "flash-attn-4"])
def test_backends_of_a_card_take_them(backend, device):
    from chronicals.attention import BACKENDS

    if not BACKENDS[backend].available():
        pytest.skip(f"{backend} is not installed")
    bounds, keys = made(device)
    q, k, v = (
        torch.randn(
            sum(LENGTHS), heads, 64, device=device, dtype=torch.bfloat16, requires_grad=True
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


FAULTS = {
    "an answer's copies dropped": ("places.unbind()", "places[:-1].unbind()"),
    "absent copies counted": (
        "torch.where((place >= 0)[:, None, None], of_place, 0.0)",
        "of_place",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault):
    broken = mutant(module, *FAULTS[fault])
    with pytest.raises(AssertionError):
        for ours, expected in compared(torch.device("cpu"), broken.gather_keys):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
