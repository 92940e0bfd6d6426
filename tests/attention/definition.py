"""Document attention by its definition: one dense mask over all documents at once; and how
backends are held to it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.attention import document_attention
from comparison import assert_as_exact_as_plain

LARGE = 2000
"""More tokens than this are compared document by document."""


def dense_mask(cu, window=None, cu_k=None) -> Tensor:
    """``[Q, T]``: a query sees the keys of its own document, there that at which it stands and
    those before, within the window. The last query of a document stands at its last key."""
    cu_k = cu if cu_k is None else cu_k
    of_queries, of_keys = (torch.arange(int(x[-1]), device=cu.device) for x in (cu, cu_k))
    of_q, of_k = (
        torch.searchsorted(x.long(), y, right=True) for x, y in ((cu, of_queries), (cu_k, of_keys))
    )
    back = (of_queries - cu[of_q] + cu_k[of_q])[:, None] - of_keys[None]
    seen = (of_q[:, None] == of_k[None]) & (back >= 0)
    return seen if window is None else seen & (back < window)


def dense(q, k, v, cu, scale=None, window=None, softcap=None, sinks=None, cu_k=None) -> Tensor:
    """``[Q, H, D]`` from all Q × T scores, by the definition."""
    heads = q.shape[1]
    seen = dense_mask(cu, window, cu_k)
    of_head = torch.arange(heads, device=q.device) // (heads // k.shape[1])
    scores = torch.einsum("ihd,jhd->hij", q, k[:, of_head]).to(
        torch.promote_types(q.dtype, torch.float32)
    )
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.where(seen, torch.exp(scores - scores.detach().amax((1, 2), keepdim=True)), 0.0)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(
            sinks.to(scores.dtype)[:, None, None] - scores.detach().amax((1, 2), keepdim=True)
        )
    return torch.einsum("hij,jhd->ihd", (weights / total).to(v.dtype), v[:, of_head])


def bounds(lengths, device="cpu") -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(device=device, dtype=torch.int32)


def torchs(q, k, v, cu, scale=None, window=None, cu_k=None) -> Tensor:
    """The same from torch's own operation, which knows neither softcap nor sinks."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    seen = dense_mask(cu, window, cu_k)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)[
        0
    ].transpose(0, 1)


def random_lengths(documents=5, longest=60) -> list[int]:
    """1 and the longest are among them, and two documents are empty, one of them the last."""
    lengths = [1, longest, *torch.randint(1, longest + 1, (documents - 2,)).tolist()]
    order = torch.randperm(documents).tolist()
    lengths = [lengths[n] for n in order]
    return [*lengths[:3], 0, *lengths[3:], 0]


def random_spans(documents=5, longest=60) -> tuple[list[int], list[int]]:
    """Queries and keys of documents: as many of both, one query after many keys, and no query at
    all are among them.
    """
    queries = random_lengths(documents, longest)
    earlier = [0, *torch.randint(0, longest + 1, (len(queries) - 1,)).tolist()]
    keys = [a + b for a, b in zip(queries, earlier, strict=True)]
    return [*queries, 1, 0], [*keys, longest, 3]


def qkv(
    tokens,
    heads=4,
    groups=2,
    width=16,
    dtype=torch.float32,
    device="cpu",
    sinks=False,
    queries=None,
):
    def draw():
        shapes = [
            (tokens if queries is None else queries, heads, width),
            (tokens, groups, width),
            (tokens, groups, width),
        ] + [(heads,)] * sinks
        return [torch.randn(shape, device=device).to(dtype) for shape in shapes]

    return draw


def compare(lengths, draw, backend="per-document", keys=None, **options):
    """Hold ``backend`` to the definition in fp64.

    Args:
        lengths: queries of each document.
        keys: keys of each document; by default they are the same tokens.
    """
    cu = bounds(lengths)
    cu_k = None if keys is None else bounds(keys)

    def there(q):
        return cu.to(q.device), None if cu_k is None else cu_k.to(q.device)

    def ours(q, k, v, sinks=None):
        here, here_k = there(q)
        apart = () if keys is None else (here_k, max(keys))
        return document_attention(
            q, k, v, here, max(lengths), *apart, sinks=sinks, backend=backend, **options
        )

    def exact(q, k, v, sinks=None):
        here, here_k = there(q)
        if sum(keys or lengths) > LARGE:
            assert keys is None
            return by_document(q, k, v, here, sinks=sinks, **options)
        return dense(q, k, v, here, sinks=sinks, cu_k=here_k, **options)

    def plain(q, k, v):
        here, here_k = there(q)
        return torchs(q, k, v, here, options.get("scale"), options.get("window"), here_k)

    has_torchs = (
        options.get("softcap") is None and len(draw()) == 3 and sum(keys or lengths) <= LARGE
    )
    assert_as_exact_as_plain(ours, plain if has_torchs else exact, draw, exact=exact)


def by_document(q, k, v, cu, scale=None, window=None, softcap=None, sinks=None) -> Tensor:
    """The definition where one mask over everything would be too large."""
    spans = [slice(a, b) for a, b in zip(cu.tolist(), cu.tolist()[1:]) if b > a]
    alone = [(q[x], k[x], v[x], bounds([x.stop - x.start], q.device)) for x in spans]
    return torch.cat([dense(*document, scale, window, softcap, sinks) for document in alone])
