"""Passes that give each token the same bits, whatever is computed beside it.

Then the log-probabilities of generation and those of the packed forward pass are equal, not only
close. Usual ones differ by rounding: a product of other sizes sums in another order.

                    in fp32 on the CPU                      on a card
    products        of tiles with a fixed number of         of fixed tiles, never split over the
                    rows, padded with zeros                 inner size (``invariant_product``)
    functions       of pieces that are whole vectors of     an element a thread
                    the processor, so that none is
                    computed by the scalar code for what
                    is left over
    sums of a row   as torch has them                       products with ones
    attention       of one query at a time, over its        of one query at a time, its keys in one
                    keys padded to a power of two           program (``paged_attention``)

An operation of which this is not known is refused by name. On a card weights have 16 bits; fp32
there, and 16 bits on the CPU, are not proved.

Shapes: T tokens, M rows and N columns of a product with inner size K; H query heads, K key heads, D
and V widths of a key and a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from chronicals.batch import Batch
from chronicals.generation.pages import LayerPages
from chronicals.generation.passes import (
    EXPANSION,
    PagedPass,
    attend_documents,
    attending_pages,
    run_pass,
)
from chronicals.kernels.invariant_product import invariant_product
from chronicals.kernels.launch import runs_in_16_bit, runs_triton
from chronicals.kernels.paged_attention import paged_attention, paged_attention_reference
from chronicals.kernels.token_draws import draw_tokens_reference
from chronicals.models import in_evaluation, read_head, within_adapters
from chronicals.models.attention_seam import Scores
from chronicals.quantization import packed_layers

TILE_ROWS = 16
"""Rows of a tile: a power of two that wastes little on the few rows of a decode step."""

PIECE = 16384
"""Elements of a piece of a function's input: below torch's 32,768, from which threads share it."""

LEAST_KEYS = 16
"""Keys to which the fewest are padded."""

PAGE = 16
"""Tokens of a page in which the packed pass attends."""

PROVED_ON = 4
"""Random rows on which it is proved that a row's place in a tile does not matter."""

MOVES = frozenset(
    {
        "__rshift__",
        "_pin_memory",
        "_to_copy",
        "_unsafe_view",
        "abs",
        "add",
        "add_",
        "amax",
        "arange",
        "argmax",
        "bitwise_and",
        "bitwise_not",
        "bitwise_xor",
        "cat",
        "clamp",
        "clone",
        "constant_pad_nd",
        "copy_",
        "detach",
        "div",
        "embedding",
        "eq",
        "expand",
        "fill_",
        "floor_divide",
        "full",
        "gather",
        "ge",
        "gt",
        "index",
        "index_copy_",
        "index_select",
        "is_pinned",
        "isfinite",
        "le",
        "lift_fresh",
        "lt",
        "masked_fill",
        "maximum",
        "mul",
        "mul_",
        "ne",
        "neg",
        "permute",
        "promote_types",
        "remainder",
        "scalar_tensor",
        "scatter",
        "scatter_",
        "searchsorted",
        "select",
        "slice",
        "sort",
        "split",
        "split_with_sizes",
        "squeeze",
        "stack",
        "sub",
        "t",
        "transpose",
        "unbind",
        "unsqueeze",
        "view",
        "where",
        "empty",
        "new_empty",
        "new_zeros",
        "ones",
        "zeros",
        "zeros_like",
    }
)
"""Operations that move or compare elements, or round once for each: the same bits at any place."""

OF_ROWS = frozenset(
    {
        "glu_forward",
        "invariant_product",
        "layernorm_forward",
        "paged_attention",
        "qk_norm_rope_forward",
        "qk_rope",
        "qk_rope_",
        "rmsnorm_forward",
        "softmax_forward",
        "write_pages",
    }
)
"""Kernels of this package that compute each row alone, in tiles that depend on its width only."""

SUMS = frozenset({"mean", "sum", "cumsum", "_softmax"})
"""Sums; those over the last dimension add each row in the same order."""

FUNCTIONS = frozenset(
    {"cos", "sin", "exp", "log", "tanh", "sigmoid", "silu", "gelu", "rsqrt", "pow", "special_entr"}
)
"""Functions of each element, for which torch has vector and scalar code."""


_attends: ContextVar[bool] = ContextVar("attends", default=False)
"""True while attention of one query is computed, whose products have the same sizes everywhere."""


class NotExact(ValueError):
    """``generation_exact`` is not possible for a model."""


def why_not_exact(model: nn.Module) -> str:
    """Explain why passes of a model cannot be exact; empty if nothing is known."""
    by_kernels = all(runs_triton(parameter) for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        kind = str(parameter.dtype).removeprefix("torch.")
        is_wide = parameter.dtype == torch.float32
        if by_kernels and parameter.is_cuda and is_wide and "self_attn" in name:
            return f"{name} is {kind}, and on a card only 16 bits are proved"
        if not by_kernels and parameter.device.type != "cpu":
            return f"{name} is {kind} on {parameter.device}, where no kernel takes it"
        if not by_kernels and not is_wide:
            return f"{name} is {kind}, and on the CPU only fp32 is proved"
    return why_layers_not_exact(model)


def why_layers_not_exact(model: nn.Module) -> str:
    """Explain why layers of a model cannot be exact in any dtype; empty if nothing is known."""
    if any(hasattr(module, EXPANSION) for module in model.modules()):
        return "latent attention computes generation and training in two ways"
    packed = next(iter(packed_layers(model)), None)
    if packed is not None:
        return f"{packed[0]} is packed, and products with packed weights are not proved"
    return ""


@contextmanager
def exact_passes(model: nn.Module) -> Iterator[None]:
    """Context manager in which forward passes of a model are exact.

    Raises:
        NotExact: the model or an operation does not allow it; the message says why.
    """
    reason = why_not_exact(model)
    if reason:
        raise NotExact(f"generation_exact=True: {reason}; generate without it")
    with _ExactOperations():
        yield


class _ExactOperations(TorchDispatchMode):
    """Compute products in tiles and functions in pieces; refuse what is not known."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Compute one operation."""
        name = func.overloadpacket.__name__
        named = kwargs or {}
        with self:  # what is called from here on is not decomposed by autograd any more
            parts = func.decompose(*args, **named)
        if parts is not NotImplemented:
            return parts
        if name in ("mm", "addmm", "addmm_"):
            return _products(name, args, named)
        if name == "draw_tokens":
            with self:
                return (*draw_tokens_reference(*args),)
        given = [isinstance(one, Tensor) for one in args]
        if name in FUNCTIONS and given[0] and not any(given[1:]):
            return func(*args, **named) if args[0].is_cuda else _in_pieces(func, args, named)
        if name in COMPOSED and args[1] in (-1, [-1]) and runs_triton(args[0]):
            with self:
                return COMPOSED[name](*args[:1], *args[2:])
        if name == "_log_softmax":
            rows = args[0].flatten(0, -2)
            return torch.cat([func(row, -1, False) for row in rows.split(1)]).view_as(args[0])
        if name == "bmm" and (args[0].shape[2] == 1 or _attends.get()):
            return func(*args)
        if name in SUMS and args[1] in (-1, [-1]):
            return func(*args, **named)
        if name in OF_ROWS:
            return func(*args)
        if name in MOVES and "alpha" not in named:  # a factor may be fused, or not
            return func(*args, **named)
        raise NotExact(
            f"generation_exact=True: {name} is not known to give a row the same bits in each "
            "batch; generate without it"
        )


def _products(name: str, args: Sequence[Any], named: Mapping[str, Any]) -> Tensor:
    """Return a product, perhaps added to a tensor, and in the place that is given."""
    *added, rows, columns = (one for one in args if isinstance(one, Tensor))
    wanted = named.get("out_dtype", args[-1])
    if isinstance(wanted, torch.dtype):
        rows, columns = rows.to(wanted), columns.to(wanted)
    found = _product(rows, columns)
    if added:
        found = found * named.get("alpha", 1) + added[0] * named.get("beta", 1)
    place = added[0] if name == "addmm_" else named.get("out")
    return found if place is None else place.copy_(found)


def _row_sums(x: Tensor) -> Tensor:
    """Return the sum of each row, fp32 ``[..., 1]``, as a product with ones."""
    rows = x.reshape(-1, x.shape[-1]).float()
    sums = rows @ torch.ones(x.shape[-1], 1, device=x.device)
    return sums.view(*x.shape[:-1], 1)


def _sum(x: Tensor, keepdim: bool = False) -> Tensor:
    sums = _row_sums(x).to(x.dtype)
    return sums if keepdim else sums[..., 0]


def _mean(x: Tensor, keepdim: bool = False) -> Tensor:
    means = (_row_sums(x) / x.shape[-1]).to(x.dtype)
    return means if keepdim else means[..., 0]


def _softmax(x: Tensor, _: bool) -> Tensor:
    wide = x.float()
    weights = (wide - wide.amax(-1, keepdim=True)).exp()
    return (weights / _row_sums(weights)).to(x.dtype)


def _log_softmax(x: Tensor, _: bool) -> Tensor:
    wide = x.float()
    shifted = wide - wide.amax(-1, keepdim=True)
    return (shifted - _row_sums(shifted.exp()).log()).to(x.dtype)


COMPOSED: dict[str, Callable[..., Tensor]] = {
    "sum": _sum,
    "mean": _mean,
    "_softmax": _softmax,
    "_log_softmax": _log_softmax,
}
"""Sums over the last dimension where kernels run: torch's own order there depends on the number of
rows, and on where in memory a row begins.
"""


def _product(x_MK: Tensor, w_KN: Tensor) -> Tensor:
    """Return a product of which a row's bits depend on that row only."""
    if runs_triton(x_MK, w_KN) and x_MK.dtype == w_KN.dtype:
        return invariant_product(x_MK, w_KN)
    return _in_tiles(x_MK, w_KN)


def _in_tiles(x_MK: Tensor, w_KN: Tensor) -> Tensor:
    """Return a product, computed in tiles of rows."""
    rows = len(x_MK)
    size = _tile_rows(x_MK.shape[1], w_KN.shape[1], w_KN.stride() == (1, w_KN.shape[0]))
    padded = F.pad(x_MK, (0, 0, 0, -rows % size))
    # each tile is copied, so that all begin at an address of the same alignment
    return torch.cat([tile.clone() @ w_KN for tile in padded.split(size)])[:rows]


@cache
def _tile_rows(inner: int, columns: int, transposed: bool) -> int:
    """Return the rows of a tile: 1 if a row's place in a larger one were to matter here."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(PROVED_ON):
        row = torch.randn(1, inner, generator=generator)
        shape = (columns, inner) if transposed else (inner, columns)
        weight = torch.randn(shape, generator=generator)
        product = row.repeat(TILE_ROWS, 1) @ (weight.T if transposed else weight)
        if not (product == product[:1]).all():
            return 1
    return TILE_ROWS


def _in_pieces(func: Callable[..., Tensor], args: Sequence[Any], named: dict[str, Any]) -> Tensor:
    """Return a function of each element, computed in pieces of one size."""
    x = args[0].contiguous()
    flat = F.pad(x.flatten(), (0, -x.numel() % PIECE))
    pieces = [func(piece, *args[1:], **named) for piece in flat.split(PIECE)]
    return torch.cat(pieces)[: x.numel()].view_as(x)


def attend_exactly(q_HD: Tensor, k_TKD: Tensor, v_TKV: Tensor, scores: Scores) -> Tensor:
    """Return the attention ``[H, V]`` of one query to keys of which the last is its own.

    Sizes depend on the query's position only: keys and values are padded to a power of two.
    """
    count = len(k_TKD)
    width = max(LEAST_KEYS, 1 << (count - 1).bit_length())
    page_1WKD, page_1WKV = (F.pad(x, (0, 0, 0, 0, 0, width - count))[None] for x in (k_TKD, v_TKV))
    token = _attends.set(True)
    try:
        out = paged_attention_reference(
            q_HD[None].clone(),
            page_1WKD,
            page_1WKV,
            torch.zeros(1, 1, dtype=torch.int64),
            torch.full((1,), count),
            scores.sinks,
            scale=scores.scale,
            window=scores.window,
            softcap=scores.softcap,
        )
    finally:
        _attends.reset(token)
    return out[0]


def attend_by_kernel(
    q_THD: Tensor,
    k_PSKD: Tensor,
    v_PSKV: Tensor,
    table_TL: Tensor,
    lengths_T: Tensor,
    scores: Scores,
) -> Tensor:
    """Return the attention ``[T, H, V]`` of tokens, each as a sequence of its own over pages.

    One program walks the keys of a token, so their order is the same in every pass.
    """
    return paged_attention(
        q_THD,
        k_PSKD,
        v_PSKV,
        table_TL,
        lengths_T,
        scores.sinks,
        scale=scores.scale,
        window=scores.window,
        softcap=scores.softcap,
        splits=1,
    )


@dataclass(frozen=True)
class ExactPass(PagedPass):
    """A pass over pages for prefill and decode steps.

    Attributes:
        tables: int64 ``[T, L]``, the block table of each new token in the layers of each window, as
            ``places``.
        lengths: int64 ``[T]``, keys of each new token, of which the last is its own.
    """

    tables: Mapping[int | None, Tensor]
    lengths: Tensor

    def over(
        self, pages: LayerPages, q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor, scores: Scores
    ) -> Tensor:
        """Return the attention of each new token to its sequence."""
        table = self.tables[pages.window]
        if runs_in_16_bit(q_THD, pages.keys, pages.values):
            return attend_by_kernel(q_THD, pages.keys, pages.values, table, self.lengths, scores)
        size = pages.keys.shape[1]
        places = (table[:, :, None] * size + torch.arange(size)).flatten(1)
        found = list[Tensor]()
        for q_HD, at, length in zip(q_THD, places, self.lengths.tolist()):
            found.append(attend_exactly(q_HD, *pages.read(at[:length]), scores))
        return torch.stack(found)


class PackedPass:
    """A pass over whole documents, without pages of the engine; gradients go through it.

    Args:
        bounds: int32, of the documents.
        longest: most tokens of a document.
    """

    def __init__(self, bounds: Tensor, longest: int):
        self.bounds = bounds
        self.longest = longest
        self.ends = bounds.tolist()

    def attend(
        self, module: nn.Module, q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor, scores: Scores
    ) -> Tensor:
        """Return the attention of each token to those of its document up to itself."""
        if runs_in_16_bit(q_THD, k_TKD, v_TKV):
            return _PackedAttention.apply(q_THD, k_TKD, v_TKV, scores.sinks, scores, self)  # type: ignore[no-any-return]
        found = list[Tensor]()
        for begin, end in zip(self.ends, self.ends[1:]):
            for place in range(begin, end):
                keys = slice(begin, place + 1)
                found.append(attend_exactly(q_THD[place], k_TKD[keys], v_TKV[keys], scores))
        return torch.stack(found)

    @cached_property
    def pages(self) -> tuple[int, Tensor, Tensor, Tensor]:
        """Number of pages of all documents, places of tokens in them, table and number of keys."""
        device = self.bounds.device
        width = -(-self.longest // PAGE)
        places = list[Tensor]()
        table = list[Tensor]()
        positions = list[Tensor]()
        count = 0
        for begin, end in zip(self.ends, self.ends[1:]):
            position = torch.arange(end - begin, device=device)
            row = (count + torch.arange(width, device=device)).clamp(
                max=count + -(-(end - begin) // PAGE)
            )
            places.append(count * PAGE + position)
            positions.append(position)
            table.append(row.expand(end - begin, width))
            count += -(-(end - begin) // PAGE)
        return count + 1, torch.cat(places), torch.cat(table), torch.cat(positions) + 1


class _PackedAttention(torch.autograd.Function):
    """Attention within documents by the kernel of generation, with the gradient of training's."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKV: Tensor,
        sinks: Tensor | None,
        scores: Scores,
        over: PackedPass,
    ) -> Tensor:
        """Copy keys and values to pages, and attend over them."""
        ctx.save_for_backward(q_THD, k_TKD, v_TKV, sinks)
        ctx.scores = scores
        ctx.over = over
        count, places, table, lengths = over.pages
        k_PSKD, v_PSKV = (
            x.new_zeros(count * PAGE, *x.shape[1:])
            .index_copy_(0, places, x)
            .unflatten(0, (count, PAGE))
            for x in (k_TKD, v_TKV)
        )
        return attend_by_kernel(q_THD, k_PSKD, v_PSKV, table, lengths, scores)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Compute the attention of training again, and its gradients."""
        over = ctx.over
        *given, sinks = ctx.saved_tensors
        with torch.enable_grad():
            q, k, v = leaves = [x.detach().requires_grad_() for x in given]
            if sinks is not None:
                sinks = sinks.detach().requires_grad_()
                leaves.append(sinks)
            scores = replace(ctx.scores, sinks=sinks)
            out = attend_documents(q, k, v, scores, over.bounds, over.longest)
        found = torch.autograd.grad(out, leaves, gradients[0])
        return *found, *[None] * (6 - len(found))


def packed_log_probabilities(model: Any, batch: Batch) -> Tensor:
    """Return the log-probability of each target, fp32 ``[T]``, exactly as generation does.

    Gradients go through it. It is zero where nothing is to be predicted.

    Args:
        model: a causal language model in fp32 on the CPU, with or without PEFT's wrapper.
        batch: packed documents.

    Raises:
        NotExact: the model does not allow it.
    """
    model = within_adapters(model)
    over = PackedPass(batch.cu_seqlens, batch.max_seqlen)
    with in_evaluation(model), attending_pages(model), exact_passes(model):
        states = run_pass(model, batch.input_ids, batch.position_ids, over)
        full = read_head(model).logits(states).log_softmax(-1)
        chosen = full.gather(-1, batch.targets.clamp(min=0)[:, None])[:, 0]
        return chosen.masked_fill(batch.targets < 0, 0.0)
