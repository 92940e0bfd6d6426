"""Attention of a decode step from the product of queries, keys and values on, in one kernel.

    q' = turn(q),  k' = turn(k)          RMSNorm of the head if there is one, then its rotation
    page[place] = k', v                  the new token's
    o = Σ_j softmax_j(scale · q' · k'_j) v_j          over the sequence's pages, the new token included

Of few sequences each of these would take as long as a kernel's launch: rotation, pages and attention
were three kernels. A program of ``paged_attention`` turns the queries that it reads itself, and the one
whose keys include the new token adds it from registers and writes it to its page. Keys are taken in
the tiles and the order of ``paged_attention``. Where sequences share the keys of a prompt, q' is
written, too, for the kernel that reads these keys once for all of them.

Rounded where the separate kernels round: q', k', and the weights of v. Shapes: N sequences, H query heads,
K key heads, W width of a head, P pages of S tokens, L pages in a row of the block table. qkv is
``[N, (H + 2 K) W]``, tables of the rotation are ``[N, W]`` in the half layout: channels i and i + W/2 are
a pair. Bytes that must move: those of ``paged_attention`` and of qkv.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from chronicals.kernels.launch import (
    early_options,
    launches_early,
    multiplied_in,
    next_power_of_2,
    operator,
    runs_in_16_bit,
    tl,
    triton,
    wait_for_kernel_before,
)
from chronicals.kernels.logit_rows import shaped
from chronicals.kernels.paged_attention import (
    SharedPages,
    attend_shared,
    launch_of,
    mark_unshared,
    merge_splits,
    paged_attention_reference,
    shared_launch_of,
    write_pages_reference,
)
from chronicals.kernels.qk_norm_rope import qk_norm_rope_reference
from chronicals.kernels.qk_rope import heads_of, qk_rope_reference

NARROWEST = 32
"""Channels of a head at least: half of them are the depth of a product of tensor cores."""

WIDEST = 256
"""Channels of a head at most, whose sums a program holds in registers."""


@dataclass(frozen=True)
class UnrotatedHeads:
    """Heads of new tokens as a layer's first product made them, and how they are turned.

    Attributes:
        qkv_NX: ``[N, (H + 2 K) W]``.
        cos_NW, sin_NW: tables of the rotation.
        counts: H and K.
        norms: weights ``[W]`` of the norms of queries and of keys, or None.
        epsilon, offset: those of both norms.
    """

    qkv_NX: Tensor
    cos_NW: Tensor
    sin_NW: Tensor
    counts: tuple[int, int]
    norms: tuple[Tensor, Tensor] | None = None
    epsilon: float = 0.0
    offset: float = 0.0

    def turned(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries ``[N, H, W]``, keys and values ``[N, K, W]`` in plain torch."""
        q, k, v = heads_of(self.qkv_NX, *self.counts)
        tables = self.cos_NW, self.sin_NW
        if self.norms is None:
            return *qk_rope_reference(q, k, *tables), v
        of_norms = self.epsilon, self.offset
        return *qk_norm_rope_reference(q, k, *self.norms, *tables, *of_norms), v


@triton.jit
def _turned(
    a, b, weight_ptr, cos_a, cos_b, sin_a, sin_b, epsilon, offset, half, HAS_NORM: tl.constexpr
):
    """Return both halves of heads ``[ROWS, HALF]``, fp32, normed if wanted and rotated."""
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(a * a + b * b, axis=1)
        rstd = 1.0 / tl.sqrt_rn(squares / (2 * half.shape[0]) + epsilon)
        w_a = tl.load(weight_ptr + half).to(tl.float32) + offset
        w_b = tl.load(weight_ptr + half.shape[0] + half).to(tl.float32) + offset
        a *= rstd[:, None] * w_a[None, :]
        b *= rstd[:, None] * w_b[None, :]
    return a * cos_a - b * sin_a, b * cos_b + a * sin_b


@triton.jit
def _decode_attention_kernel(
    # read: the first product, tables of the rotation, weights of the norms
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    # read and written: pages
    k_ptr,
    v_ptr,
    # read: place of each new token, block table, number of keys
    places_ptr,
    table_ptr,
    lengths_ptr,
    # read: number of keys that each sequence shares
    starts_ptr,
    # written: outputs of each split, their log-sum-exp, and turned queries where keys are shared
    out_ptr,
    lse_ptr,
    turned_ptr,
    # strides of rows of the product, the rotation's tables and the block table
    qkv_row,
    rotation_row,
    table_row,
    # numbers of the formula
    epsilon,
    offset,
    scale,
    softcap,
    window,
    # sizes
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    # options
    HAS_NORM: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    EARLY: tl.constexpr,
    KIND: tl.constexpr,
    # tile, and the parts of a sequence: their number, and that as a power of 2
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    wait_for_kernel_before(EARLY)
    GROUPS: tl.constexpr = HEADS // KEY_HEADS
    PROGRAMS: tl.constexpr = (GROUPS + ROWS - 1) // ROWS
    HALF: tl.constexpr = WIDTH // 2
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    sequence = tl.program_id(0).to(tl.int64)
    key_head = tl.program_id(1) // PROGRAMS
    part = tl.program_id(1) % PROGRAMS
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    row = part * ROWS + tl.arange(0, ROWS)
    is_head = row < GROUPS
    head = key_head * GROUPS + row
    half = tl.arange(0, HALF)
    value = tl.arange(0, WIDTH)

    turn = sequence * rotation_row + half
    cos_a = tl.load(cos_ptr + turn).to(tl.float32)[None, :]
    cos_b = tl.load(cos_ptr + turn + HALF).to(tl.float32)[None, :]
    sin_a = tl.load(sin_ptr + turn).to(tl.float32)[None, :]
    sin_b = tl.load(sin_ptr + turn + HALF).to(tl.float32)[None, :]
    q_at = qkv_ptr + sequence * qkv_row + (head * WIDTH)[:, None] + half[None, :]
    a = tl.load(q_at, mask=is_head[:, None], other=0.0)
    b = tl.load(q_at + HALF, mask=is_head[:, None], other=0.0)
    a, b = _turned(a, b, q_norm_ptr, cos_a, cos_b, sin_a, sin_b, epsilon, offset, half, HAS_NORM)
    q_a = a.to(dtype)
    q_b = b.to(dtype)

    new_at = qkv_ptr + sequence * qkv_row + (HEADS + key_head) * WIDTH + half[None, :]
    a = tl.load(new_at)
    b = tl.load(new_at + HALF)
    a, b = _turned(a, b, k_norm_ptr, cos_a, cos_b, sin_a, sin_b, epsilon, offset, half, HAS_NORM)
    new_a = a.to(dtype)
    new_b = b.to(dtype)
    new_value = tl.load(
        qkv_ptr + sequence * qkv_row + (HEADS + KEY_HEADS + key_head) * WIDTH + value
    )
    products = q_a.to(tl.float32) * new_a.to(tl.float32)
    products += q_b.to(tl.float32) * new_b.to(tl.float32)
    new_score = shaped(tl.sum(products, axis=1), scale, softcap, HAS_SOFTCAP)

    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    last = length - 1
    first = 0
    if HAS_STARTS:
        first = tl.load(starts_ptr + sequence)
        if (split == 0) & (first > 0):
            turned_at = turned_ptr + ((sequence * HEADS + head) * WIDTH)[:, None] + half[None, :]
            tl.store(turned_at, q_a, mask=is_head[:, None])
            tl.store(turned_at + HALF, q_b, mask=is_head[:, None])
    elif HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    begin = first // KEYS * KEYS
    each = tl.cdiv(tl.cdiv(length - begin, splits), KEYS) * KEYS
    begin += split * each
    end = tl.minimum(begin + each, length)
    has_new = (begin <= last) & (last < end)
    row_of_pages: tl.constexpr = KEY_HEADS * WIDTH
    if has_new & (part == 0):
        written = tl.load(places_ptr + sequence).to(tl.int64) * row_of_pages + key_head * WIDTH
        tl.store(k_ptr + written + half[None, :], new_a)
        tl.store(k_ptr + written + HALF + half[None, :], new_b)
        tl.store(v_ptr + written + value, new_value)

    # The new token belongs to the first tile, to whose maximum its weight is relative, too.
    highest = tl.where(has_new, new_score, float("-inf"))
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, WIDTH), tl.float32)
    tiles = tl.cdiv(end - begin, KEYS)
    for step in range(tiles):
        token = begin + (tiles - 1 - step) * KEYS + tl.arange(0, KEYS)
        inside = (token >= first) & (token < tl.minimum(end, last))
        page = tl.load(table_ptr + sequence * table_row + token // PAGE, mask=inside, other=0)
        place = (page.to(tl.int64) * PAGE + token % PAGE) * row_of_pages + key_head * WIDTH
        k_at = k_ptr + place[None, :] + half[:, None]
        k_a = tl.load(k_at, mask=inside[None, :], other=0.0)
        k_b = tl.load(k_at + HALF, mask=inside[None, :], other=0.0)
        scores = tl.dot(q_a.to(KIND), k_a.to(KIND))
        scores = tl.dot(q_b.to(KIND), k_b.to(KIND), scores)
        scores = shaped(scores, scale, softcap, HAS_SOFTCAP)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        kept = tl.exp(highest - higher)
        new_weight = tl.where(has_new & (step == 0), tl.exp(new_score - higher), 0.0)
        total = total * kept + tl.sum(weights, axis=1) + new_weight
        v = tl.load(v_ptr + place[:, None] + value[None, :], mask=inside[:, None], other=0.0)
        out = tl.dot(weights.to(dtype).to(KIND), v.to(KIND), out * kept[:, None])
        new_weight = new_weight.to(dtype).to(tl.float32)
        out += new_weight[:, None] * new_value.to(tl.float32)[None, :]
        highest = higher

    used = total > 0.0  # a split without keys has no weight
    lse = tl.where(used, highest + tl.log(tl.where(used, total, 1.0)), float("-inf"))
    out /= tl.where(used, total, 1.0)[:, None]
    at = (sequence * HEADS + head) * PARTS + split
    tl.store(lse_ptr + at, lse, mask=is_head)
    tl.store(out_ptr + at[:, None] * WIDTH + value[None, :], out, mask=is_head[:, None])
    if HAS_STARTS:
        mark_unshared(lse_ptr, at - split, is_head, first, splits, PARTS, SPLITS)


@operator("chronicals::decode_attention", mutates=["keys", "values"])
def _decode_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    table: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
    teams: Tensor | None,
    team_lengths: Tensor | None,
    starts: Tensor | None,
    heads: int,
    epsilon: float,
    offset: float,
    scale: float,
    window: int | None,
    softcap: float | None,
    splits: int | None,
) -> Tensor:
    """Launch the kernels; arguments are those of ``decode_attention``."""
    sequences = len(qkv)
    page, key_heads, width = keys.shape[1:]
    q = qkv[:, : heads * width].unflatten(1, (heads, width))
    if not sequences:
        return q.clone()
    launch = launch_of(q, keys, width, table.shape[1] * page, window, splits)
    shared = None if teams is None else shared_launch_of(q, keys, launch, teams)
    groups = heads // key_heads
    count = launch.splits + (0 if shared is None else shared.splits)
    parts = qkv.new_empty((sequences, heads, count, width), dtype=torch.float32)
    lse = qkv.new_empty((sequences, heads, count), dtype=torch.float32)
    turned = None if shared is None else qkv.new_empty((sequences, heads, width))
    early = launches_early(qkv)
    grid = sequences, key_heads * triton.cdiv(groups, launch.rows), launch.splits
    _decode_attention_kernel[grid](
        qkv,
        cos,
        sin,
        q_norm,
        k_norm,
        keys,
        values,
        places,
        table,
        lengths,
        starts,
        parts,
        lse,
        turned,
        qkv.stride(0),
        cos.stride(0),
        table.stride(0),
        epsilon,
        offset,
        scale,
        softcap or 1.0,
        window or 0,
        page,
        heads,
        key_heads,
        width,
        q_norm is not None,
        softcap is not None,
        window is not None,
        starts is not None,
        early,
        multiplied_in(qkv.dtype),
        launch.rows,
        launch.keys,
        count,
        next_power_of_2(count),
        num_warps=launch.warps,
        num_stages=2,
        **early_options(early),
    )
    if shared is not None:
        assert teams is not None and team_lengths is not None and turned is not None
        of_teams = teams, team_lengths, shared
        attend_shared(turned, keys, values, table, *of_teams, parts, lse, scale, softcap)
    return merge_splits(parts, lse, sinks, qkv.dtype)


@torch.library.register_fake(_decode_attention)
def _output(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    table: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
    teams: Tensor | None,
    team_lengths: Tensor | None,
    starts: Tensor | None,
    heads: int,
    epsilon: float,
    offset: float,
    scale: float,
    window: int | None,
    softcap: float | None,
    splits: int | None,
) -> Tensor:
    """Allocate the output."""
    return qkv.new_empty(len(qkv), heads, keys.shape[3])


def takes_unrotated(new: UnrotatedHeads, keys_PSKW: Tensor, values_PSKW: Tensor) -> bool:
    """Return whether the kernel takes these heads and pages.

    They are 16 bit on a card, a head is a power of two of channels and rotated as a whole, and
    values are as wide as keys.

    Args:
        new: the new tokens' heads.
        keys_PSKW: pages of keys.
        values_PSKW: pages of values.
    """
    width = keys_PSKW.shape[3]
    whole = new.cos_NW.shape[1] == width == values_PSKW.shape[3]
    is_power = width == next_power_of_2(width) and NARROWEST <= width <= WIDEST
    tables = new.cos_NW.stride() == new.sin_NW.stride() and new.cos_NW.stride(1) == 1
    pages = keys_PSKW.is_contiguous() and values_PSKW.is_contiguous()
    layout = whole and is_power and tables and pages
    return layout and runs_in_16_bit(new.qkv_NX, keys_PSKW, values_PSKW)


def decode_attention(
    new: UnrotatedHeads,
    keys_PSKW: Tensor,
    values_PSKW: Tensor,
    places_N: Tensor,
    table_NL: Tensor,
    lengths_N: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    shared: SharedPages | None = None,
    splits: int | None = None,
) -> Tensor:
    """Turn the heads of one new token of each sequence, write them to pages, and attend.

    Heads that ``takes_unrotated`` refuses go to the reference. Without a gradient.

    Args:
        new: the new tokens' heads.
        keys_PSKW: pages of keys, which get the new ones.
        values_PSKW: pages of values, which get the new ones.
        places_N: int64, page · S + place within the page of each new token; none occurs twice, but
            for pages that nobody reads.
        table_NL: int64, the pages of each sequence in order.
        lengths_N: int64, keys of each sequence, the new one included.
        sinks: ``[H]``, for each head the logit of an extra key without a value.
        scale: factor on the scores.
        window: a query attends to its own token and the ``window - 1`` before it.
        softcap: scores become ``softcap · tanh(score / softcap)``.
        shared: which sequences share pages, see ``paged_attention``; with a window it is ignored.
        splits: programs among which the keys of a sequence are split; by default chosen.

    Returns:
        ``[N, H, W]``.
    """
    pages = keys_PSKW, values_PSKW, places_N, table_NL, lengths_N, sinks
    if not takes_unrotated(new, keys_PSKW, values_PSKW) or table_NL.stride(1) != 1:
        return decode_attention_reference(new, *pages, scale=scale, window=window, softcap=softcap)
    q_norm, k_norm = new.norms or (None, None)
    in_teams: tuple[Tensor | None, ...] = (None, None, None)
    if shared is not None and window is None:
        in_teams = shared.teams, shared.lengths, shared.starts
    y: Tensor = _decode_attention(
        new.qkv_NX,
        new.cos_NW,
        new.sin_NW,
        q_norm,
        k_norm,
        *pages,
        *in_teams,
        new.counts[0],
        new.epsilon,
        new.offset,
        scale,
        window,
        softcap,
        splits,
    )
    return y


def decode_attention_reference(
    new: UnrotatedHeads,
    keys_PSKW: Tensor,
    values_PSKW: Tensor,
    places_N: Tensor,
    table_NL: Tensor,
    lengths_N: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute what ``decode_attention`` does in plain torch."""
    q, k, v = new.turned()
    write_pages_reference(k, v, keys_PSKW, values_PSKW, places_N)
    return paged_attention_reference(
        q,
        keys_PSKW,
        values_PSKW,
        table_NL,
        lengths_N,
        sinks,
        scale=scale,
        window=window,
        softcap=softcap,
    )
