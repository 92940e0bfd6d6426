"""Passes that give each token the same bits, whatever is computed beside it.

Then the log-probabilities of generation and those of the packed forward pass are equal, not only
close. Usual ones differ by rounding: a product of other sizes sums in another order.

    products        of tiles with a fixed number of rows, padded with zeros
    functions       of pieces that are whole vectors of the processor, so that none is computed by
                    the scalar code for what is left over
    attention       of one query at a time, over its keys padded to a power of two

An operation of which this is not known is refused by name. In fp32 on the CPU only: on a card, and
in 16 bits, it is not proved yet.

Shapes: T tokens, M rows and N columns of a product with inner size K; H query heads, K key heads, D
and V widths of a key and a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from chronicals.batch import Batch
from chronicals.generation.pages import LayerPages
from chronicals.generation.passes import EXPANSION, PagedPass, attending_pages, run_pass
from chronicals.kernels.paged_attention import paged_attention_reference
from chronicals.models import in_evaluation, read_head, within_adapters
from chronicals.models.attention_seam import Scores

TILE_ROWS = 16
"""Rows of a tile: a power of two that wastes little on the few rows of a decode step."""

PIECE = 16384
"""Elements of a piece of a function's input: below torch's 32,768, from which threads share it."""

LEAST_KEYS = 16
"""Keys to which the fewest are padded."""

PROVED_ON = 4
"""Random rows on which it is proved that a row's place in a tile does not matter."""

MOVES = frozenset(
    {
        "__rshift__",
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
        "floor_divide",
        "full",
        "gather",
        "ge",
        "gt",
        "index",
        "index_copy_",
        "index_select",
        "isfinite",
        "le",
        "lift_fresh",
        "lt",
        "masked_fill",
        "maximum",
        "mul",
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
        "zeros",
        "zeros_like",
    }
)
"""Operations that move or compare elements, or round once for each: the same bits at any place."""

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
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu":
            return f"{name} is on {parameter.device}, and on a card it is not proved yet"
        if parameter.dtype != torch.float32:
            kind = str(parameter.dtype).removeprefix("torch.")
            return f"{name} is {kind}, and only fp32 is proved yet"
    if any(hasattr(module, EXPANSION) for module in model.modules()):
        return "latent attention computes generation and training in two ways"
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
        if name == "mm":
            return _in_tiles(*args)
        if name == "addmm" and not named:
            bias, rows, columns = args
            return _in_tiles(rows, columns) + bias
        given = [isinstance(one, Tensor) for one in args]
        if name in FUNCTIONS and given[0] and not any(given[1:]):
            return _in_pieces(func, args, named)
        if name == "_log_softmax":
            rows = args[0].flatten(0, -2)
            return torch.cat([func(row, -1, False) for row in rows.split(1)]).view_as(args[0])
        if name == "bmm" and (args[0].shape[2] == 1 or _attends.get()):
            return func(*args)
        if name in SUMS and args[1] in (-1, [-1]):
            return func(*args, **named)
        if name in MOVES and "alpha" not in named:  # a factor may be fused, or not
            return func(*args, **named)
        raise NotExact(
            f"generation_exact=True: {name} is not known to give a row the same bits in each "
            "batch; generate without it"
        )


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


@dataclass(frozen=True)
class ExactPass(PagedPass):
    """A pass over pages for prefill and decode steps.

    Attributes:
        keys: for each new token int64, where its keys are in the layers of each window, as
            ``places``; the last is its own.
    """

    keys: Sequence[Mapping[int | None, Tensor]]

    def over(
        self, pages: LayerPages, q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor, scores: Scores
    ) -> Tensor:
        """Return the attention of each new token to its sequence."""
        found = list[Tensor]()
        for q_HD, at in zip(q_THD, self.keys):
            found.append(attend_exactly(q_HD, *pages.read(at[pages.window]), scores))
        return torch.stack(found)


@dataclass(frozen=True)
class PackedPass:
    """A pass over whole documents, without pages; gradients go through it.

    Attributes:
        bounds: of the documents.
    """

    bounds: Sequence[int]

    def attend(
        self, module: nn.Module, q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor, scores: Scores
    ) -> Tensor:
        """Return the attention of each token to those of its document up to itself."""
        found = list[Tensor]()
        for begin, end in zip(self.bounds, self.bounds[1:]):
            for place in range(begin, end):
                keys = slice(begin, place + 1)
                found.append(attend_exactly(q_THD[place], k_TKD[keys], v_TKV[keys], scores))
        return torch.stack(found)


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
    over = PackedPass(batch.cu_seqlens.tolist())
    with in_evaluation(model), attending_pages(model), exact_passes(model):
        states = run_pass(model, batch.input_ids, batch.position_ids, over)
        full = read_head(model).logits(states).log_softmax(-1)
        chosen = full.gather(-1, batch.targets.clamp(min=0)[:, None])[:, 0]
        return chosen.masked_fill(batch.targets < 0, 0.0)
