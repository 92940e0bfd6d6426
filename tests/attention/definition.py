"""Document attention by its definition: one dense mask over all documents at once; and how backends are held to it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.attention import document_attention
from comparison import assert_as_exact_as_plain

LARGE = 2000
"""More tokens than this are compared document by document."""


def dense_mask(cu, window=None) -> Tensor:
    """``[T, T]``: a token sees its own document, there itself and what is before it, within the window."""
    place = torch.arange(int(cu[-1]), device=cu.device)
    document = torch.searchsorted(cu.long(), place, right=True)
    back = place[:, None] - place[None]
    seen = (document[:, None] == document[None]) & (back >= 0)
    return seen if window is None else seen & (back < window)


def dense(q, k, v, cu, scale=None, window=None, softcap=None, sinks=None) -> Tensor:
    """``[T, H, D]`` from all T × T scores, by the definition."""
    heads, seen = q.shape[1], dense_mask(cu, window)
    of_head = torch.arange(heads, device=q.device) // (heads // k.shape[1])
    scores = torch.einsum("ihd,jhd->hij", q, k[:, of_head]).to(torch.promote_types(q.dtype, torch.float32))
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.where(seen, torch.exp(scores - scores.detach().amax((1, 2), keepdim=True)), 0.0)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.to(scores.dtype)[:, None, None] - scores.detach().amax((1, 2), keepdim=True))
    return torch.einsum("hij,jhd->ihd", (weights / total).to(v.dtype), v[:, of_head])


def bounds(lengths, device="cpu") -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(device=device, dtype=torch.int32)


def torchs(q, k, v, cu, scale=None, window=None) -> Tensor:
    """The same from torch's own operation, which knows neither softcap nor sinks."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    seen = dense_mask(cu, window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def random_lengths(documents=5, longest=60) -> list[int]:
    """1 and the longest are among them, and two documents are empty, one of them the last."""
    lengths = [1, longest, *torch.randint(1, longest + 1, (documents - 2,)).tolist()]
    order = torch.randperm(documents).tolist()
    lengths = [lengths[n] for n in order]
    return [*lengths[:3], 0, *lengths[3:], 0]


def qkv(tokens, heads=4, groups=2, width=16, dtype=torch.float32, device="cpu", sinks=False):
    def draw():
        shapes = [(tokens, heads, width), (tokens, groups, width), (tokens, groups, width)] + [(heads,)] * sinks
        return [torch.randn(shape, device=device).to(dtype) for shape in shapes]

    return draw


def compare(lengths, draw, backend="per-document", **options):
    cu = bounds(lengths)

    def ours(q, k, v, sinks=None):
        here = cu.to(q.device)
        return document_attention(q, k, v, here, max(lengths), sinks=sinks, backend=backend, **options)

    def exact(q, k, v, sinks=None):
        definition = dense if sum(lengths) <= LARGE else by_document
        return definition(q, k, v, cu.to(q.device), sinks=sinks, **options)

    def plain(q, k, v):
        return torchs(q, k, v, cu.to(q.device), options.get("scale"), options.get("window"))

    has_torchs = options.get("softcap") is None and len(draw()) == 3 and sum(lengths) <= LARGE
    assert_as_exact_as_plain(ours, plain if has_torchs else exact, draw, exact=exact)


def by_document(q, k, v, cu, scale=None, window=None, softcap=None, sinks=None) -> Tensor:
    """The definition where one mask over everything would be too large."""
    spans = [slice(a, b) for a, b in zip(cu.tolist(), cu.tolist()[1:]) if b > a]
    alone = [(q[x], k[x], v[x], bounds([x.stop - x.start], q.device)) for x in spans]
    return torch.cat([dense(*document, scale, window, softcap, sinks) for document in alone])
