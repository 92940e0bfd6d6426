"""Operations that give each row the same bits, whatever is computed beside it.

    operation       in fp32 on the CPU                      on a card
    products        of tiles with a fixed number of         of fixed tiles, never split over the
                    rows, padded with zeros                 inner size (``invariant_product``)
    functions       of pieces that are whole vectors of     an element a thread
                    the processor, so that none is
                    computed by the scalar code for what
                    is left over
    sums of a row   as torch has them                       products with ones

An operation of which this is not known is refused by name.

Shapes: M rows and N columns of a product with inner size K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from chronicals.kernels.invariant_product import invariant_product
from chronicals.kernels.launch import runs_triton
from chronicals.kernels.token_draws import draw_tokens_reference

TILE_ROWS = 16
"""Rows of a tile: a power of two that wastes little on the few rows of a decode step."""

PIECE = 16384
"""Elements of a piece of a function's input: below torch's 32,768, from which threads share it."""

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
"""True within ``products_of_one_query``."""


class NotExact(ValueError):
    """``generation_exact`` is not possible for a model."""


@contextmanager
def products_of_one_query() -> Iterator[None]:
    """Context manager in which batched products are taken as they are.

    Their sizes are the same in every pass, those of one query and its keys.
    """
    token = _attends.set(True)
    try:
        yield
    finally:
        _attends.reset(token)


class ExactOperations(TorchDispatchMode):
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
