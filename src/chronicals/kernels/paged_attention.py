"""Attention of one query of each sequence to keys and values that lie in pages.

Pages have a fixed number of tokens; those of a sequence may lie anywhere (vLLM, Kwon et al., 2023,
arXiv 2309.06180).

    o_n = Σ_j softmax_j(scale · q_n · k_j) v_j        max(0, T_n - window) <= j < T_n

T_n is the number of keys of sequence n, whose last is the query's own. With a softcap c a score s
becomes ``c · tanh(s / c)``; a sink is the logit of an extra key without a value.

Shapes: N sequences, L pages in a row of the block table, P pages in all, S tokens of a page, H
query heads, K key heads, D and V widths of a key and a value. Queries, keys and values have one
dtype; a value may be the beginning of its key, as in latent attention.

The keys of a sequence are split among programs, so that few sequences fill a card too (Flash-
Decoding, Dao et al., 2023). A program reads its keys once for the query heads that share them, and
keeps a running maximum and sum; a last kernel merges the splits by their log-sum-exp. As
FlashAttention does in training, it takes tiles of keys that begin at multiples of their size, the
last one first: weights are rounded to 16 bits relative to the running maximum, so those of both
passes are rounded alike where their tiles are equal and keys are not split. Keys that
several sequences share, their prompt, are read once for all of them by a kernel of their own
(Hydragen, Juravsky et al., 2024, arXiv 2402.05099), and merged alike. Bytes that must move:
T_n · K · (D + V) values a sequence, of shared keys once, so at 16 bit the floor is
2 · ΣT · K · (D + V) bytes at the copy rate. The splits add 4 · (V + 1) bytes a query head each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from chronicals.kernels.launch import (
    early_options,
    launches_early,
    multiplied_in,
    multiprocessors,
    next_power_of_2,
    operator,
    runs_in_16_bit,
    runs_triton,
    shared_memory,
    tl,
    triton,
    wait_for_kernel_before,
)
from chronicals.kernels.logit_rows import shaped

LEAST_ROWS = 16
"""Rows of the smallest product of tensor cores: query heads of a program are padded to them."""

MOST_SPLITS = 32
"""Splits that one merging program holds beside values of 512 channels."""

KEYS_OF_A_SPLIT = 256
"""Fewest keys that are worth a split: beside them what it writes and reads again is below 5 %."""

PROGRAMS_A_MULTIPROCESSOR = 4
"""Programs that are wanted on each multiprocessor, so that some read while others multiply."""


VALUES_AT_ONCE = 8192
"""Elements of a tile of values, 16 KiB in 16 bit; with one of keys, two stages of both are 64 KiB."""

MOST_KEYS = 128
"""Most keys of a tile. With heads of 64 channels a tile is that of FlashAttention-2 and 4 on an H200,
128 keys; with 128 channels that of FlashAttention-2, 64 keys, where FlashAttention-4 has 128.
"""

WIDEST_VALUE = 512
"""Channels of a value that a program holds in registers: the latent of DeepSeek."""

SHARED_MEMORY_OF_WIDE_VALUES = 96 << 10
"""Bytes of shared memory that values of more than 256 channels need (68 KiB are taken); Turing
(sm_75) has 64 KiB.
"""


MERGED_AT_ONCE = 4096
"""Elements of parts that a program merges, 32 of each of 128 threads: with those of one query head, 512
a program, 7,168 programs took an H200 three times as long as their bytes.
"""

MOST_SHARED_SPLITS = 8
"""Splits of shared keys: a prompt of 512 tokens is 64 keys for each, which are read at once."""

MOST_TEAM_ROWS = 64
"""Query heads of a team for one key head: accumulators of 64 x 128 values are 64 registers of each
of 128 threads.
"""


@dataclass(frozen=True)
class SharedPages:
    """Sequences whose first keys lie in the same pages, such as the answers to one prompt.

    Attributes:
        teams: int32 ``[T, G]``, sequences that share; -1 behind the last one of a team.
        lengths: int32 ``[T]``, number of keys that a team shares; 0 for a team without sequences.
        starts: int32 ``[N]``, number of keys that each sequence shares; less than all it has.
    """

    teams: Tensor
    lengths: Tensor
    starts: Tensor


def most_members(heads: int, key_heads: int, value: int) -> int:
    """Return the most sequences of a team; with less than 2 nothing can be shared.

    Args:
        heads: query heads.
        key_heads: key heads.
        value: width of a value.
    """
    return MOST_TEAM_ROWS * 128 // max(next_power_of_2(value), 128) // (heads // key_heads)


@dataclass(frozen=True)
class PagedLaunch:
    """The launch of the kernel that reads keys and values.

    Attributes:
        rows: query heads of a program, which share one key head.
        keys: keys that are read at once.
        channels: channels of a key that are multiplied at once.
        splits: programs among which the keys of a sequence are split; a power of 2.
        warps: warps of a program.
    """

    rows: int
    keys: int
    channels: int
    splits: int
    warps: int


def launch_of(
    q_NHD: Tensor,
    k_PSKD: Tensor,
    value: int,
    most_keys: int,
    window: int | None,
    splits: int | None = None,
) -> PagedLaunch:
    """Choose the launch from static sizes, so that it never depends on the sequences' lengths.

    Args:
        q_NHD: queries.
        k_PSKD: pages of keys.
        value: width of a value.
        most_keys: keys that the block table has room for.
        window: keys that a query attends to at most, or None.
        splits: programs a sequence; by default chosen.
    """
    sequences, heads, width = q_NHD.shape
    key_heads = k_PSKD.shape[2]
    wide = next_power_of_2(value)
    # accumulators of 64 x 128 values are 64 registers of each of 128 threads
    most_rows = max(LEAST_ROWS, 64 * 128 // max(wide, 128))
    rows = min(max(LEAST_ROWS, next_power_of_2(heads // key_heads)), most_rows)
    whole = width <= 128 or width % 128 == 0
    channels = max(16, min(128, next_power_of_2(width))) if whole else 64
    keys = max(16, min(MOST_KEYS, VALUES_AT_ONCE // max(wide, channels)))
    if splits is not None:
        return PagedLaunch(rows, keys, channels, splits, warps=4)
    programs = sequences * key_heads * triton.cdiv(heads // key_heads, rows)
    wanted = PROGRAMS_A_MULTIPROCESSOR * multiprocessors(q_NHD.device) // max(programs, 1)
    useful = min(most_keys, window or most_keys) // KEYS_OF_A_SPLIT
    splits = max(1, min(MOST_SPLITS, wanted, useful))
    return PagedLaunch(rows, keys, channels, next_power_of_2(splits + 1) // 2, warps=4)


def shared_launch_of(
    q_NHD: Tensor, k_PSKD: Tensor, launch: PagedLaunch, teams: Tensor
) -> PagedLaunch:
    """Choose the launch of the kernel that reads shared keys.

    Args:
        q_NHD: queries.
        k_PSKD: pages of keys.
        launch: that of the other keys.
        teams: ``[T, G]``, sequences of each team.
    """
    key_heads = k_PSKD.shape[2]
    rows = max(LEAST_ROWS, next_power_of_2(teams.shape[1] * (q_NHD.shape[1] // key_heads)))
    wanted = PROGRAMS_A_MULTIPROCESSOR * multiprocessors(q_NHD.device)
    splits = max(1, min(MOST_SHARED_SPLITS, wanted // (len(teams) * key_heads)))
    return replace(launch, rows=rows, splits=next_power_of_2(splits + 1) // 2)


@triton.jit
def _attended(
    q_ptr,
    q_rows,
    is_row,
    k_ptr,
    v_ptr,
    table_ptr,
    begin,
    first,
    end,
    k_page,
    k_token,
    v_page,
    v_token,
    scale,
    softcap,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHANNELS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Return the attention of queries to keys of a block table, and its log-sum-exp.

    They are ``[ROWS, VALUES]`` and ``[ROWS]``, zero and minus infinity where ``end`` is not behind
    ``begin``. The keys are those from ``begin`` to ``end``, without those before ``first``. ``begin``
    is a multiple of ``KEYS``; its tile has a key from ``first`` on, since the softmax of a tile
    without keys is not a number.
    """
    value = tl.arange(0, VALUES)
    channel = tl.arange(0, CHANNELS)
    q_at = q_ptr + q_rows[:, None]
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, VALUES), tl.float32)
    tiles = tl.cdiv(end - begin, KEYS)
    for step in range(tiles):
        token = begin + (tiles - 1 - step) * KEYS + tl.arange(0, KEYS)
        inside = (token >= first) & (token < end)
        page = tl.load(table_ptr + token // PAGE, mask=inside, other=0).to(tl.int64)
        place = token % PAGE
        k_at = k_ptr + page * k_page + place * k_token
        scores = tl.zeros((ROWS, KEYS), tl.float32)
        for some in tl.static_range(0, WIDTH, CHANNELS):
            exists = some + channel < WIDTH
            q = tl.load(
                q_at + some + channel[None, :],
                mask=is_row[:, None] & exists[None, :],
                other=0.0,
            ).to(KIND)
            k = tl.load(
                k_at[None, :] + some + channel[:, None],
                mask=exists[:, None] & inside[None, :],
                other=0.0,
            ).to(KIND)
            scores = tl.dot(q, k, scores)
        scores = shaped(scores, scale, softcap, HAS_SOFTCAP)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        kept = tl.exp(highest - higher)
        total = total * kept + tl.sum(weights, axis=1)
        v = tl.load(
            v_ptr + (page * v_page + place * v_token)[:, None] + value[None, :],
            mask=inside[:, None] & (value < VALUE)[None, :],
            other=0.0,
        )
        weights = weights.to(v.dtype).to(KIND)
        out = tl.dot(weights, v.to(KIND), out * kept[:, None])
        highest = higher

    # a split without keys has no weight
    used = total > 0.0
    lse = tl.where(used, highest + tl.log(tl.where(used, total, 1.0)), float("-inf"))
    return out / tl.where(used, total, 1.0)[:, None], lse


@triton.jit
def _paged_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    pages_ptr,
    lengths_ptr,
    starts_ptr,
    out_ptr,
    lse_ptr,
    q_sequence,
    q_head,
    k_page,
    k_token,
    k_head,
    v_page,
    v_token,
    v_head,
    pages_sequence,
    scale,
    softcap,
    window,
    PAGE: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHANNELS: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_kernel_before(EARLY)
    sequence = tl.program_id(0).to(tl.int64)
    parts: tl.constexpr = (GROUPS + ROWS - 1) // ROWS
    key_head = (tl.program_id(1) // parts).to(tl.int64)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    row = (tl.program_id(1) % parts) * ROWS + tl.arange(0, ROWS)
    head = key_head * GROUPS + row
    is_head = row < GROUPS
    value = tl.arange(0, VALUES)

    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    first = 0
    if HAS_STARTS:
        first = tl.load(starts_ptr + sequence)
    elif HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    begin = first // KEYS * KEYS
    each = tl.cdiv(tl.cdiv(length - begin, splits), KEYS) * KEYS
    begin += split * each
    end = tl.minimum(begin + each, length)
    out, lse = _attended(
        q_ptr,
        sequence * q_sequence + head * q_head,
        is_head,
        k_ptr + key_head * k_head,
        v_ptr + key_head * v_head,
        pages_ptr + sequence * pages_sequence,
        begin,
        first,
        end,
        k_page,
        k_token,
        v_page,
        v_token,
        scale,
        softcap,
        PAGE,
        WIDTH,
        VALUE,
        HAS_SOFTCAP,
        KIND,
        ROWS,
        KEYS,
        CHANNELS,
        VALUES,
    )
    heads = tl.num_programs(1) // parts * GROUPS
    at = (sequence * heads + head) * PARTS + split
    tl.store(lse_ptr + at, lse, mask=is_head)
    tl.store(
        out_ptr + at[:, None] * VALUE + value[None, :],
        out,
        mask=is_head[:, None] & (value < VALUE)[None, :],
    )
    if HAS_STARTS:
        mark_unshared(lse_ptr, at - split, is_head, first, splits, PARTS, SPLITS)


@triton.jit
def mark_unshared(lse_ptr, at, is_head, first, splits, PARTS: tl.constexpr, SPLITS: tl.constexpr):
    """Store that a sequence which shares no keys has none in the parts behind its own ``splits``.

    Args:
        lse_ptr: log-sum-exp of all parts.
        at: place of the first part of each query head there.
        is_head: which of them exist.
        first: number of keys that the sequence shares.
        splits: number of parts of its own keys.
        PARTS: number of its parts.
        SPLITS: that as a power of 2.
    """
    part = tl.arange(0, SPLITS)
    is_missing = (part >= splits) & (part < tl.where(first == 0, PARTS, 0))
    tl.store(
        lse_ptr + at[:, None] + part[None, :],
        tl.full((at.shape[0], SPLITS), float("-inf"), tl.float32),
        mask=is_head[:, None] & is_missing[None, :],
    )


@triton.jit
def _shared_keys_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    pages_ptr,
    teams_ptr,
    lengths_ptr,
    out_ptr,
    lse_ptr,
    q_sequence,
    q_head,
    k_page,
    k_token,
    k_head,
    v_page,
    v_token,
    v_head,
    pages_sequence,
    scale,
    softcap,
    PAGE: tl.constexpr,
    MEMBERS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHANNELS: tl.constexpr,
    VALUES: tl.constexpr,
    FIRST: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_kernel_before(EARLY)
    team = tl.program_id(0).to(tl.int64)
    key_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    row = tl.arange(0, ROWS)
    value = tl.arange(0, VALUES)
    member = row // GROUPS
    head = key_head * GROUPS + row % GROUPS
    sequence = tl.load(teams_ptr + team * MEMBERS + member, mask=member < MEMBERS, other=-1)
    is_row = sequence >= 0
    sequence = tl.maximum(sequence, 0).to(tl.int64)
    length = tl.load(lengths_ptr + team)
    if length > 0:
        table = tl.load(teams_ptr + team * MEMBERS).to(tl.int64)  # that of any member
        each = tl.cdiv(tl.cdiv(length, tl.num_programs(2)), KEYS) * KEYS
        begin = split * each
        out, lse = _attended(
            q_ptr,
            sequence * q_sequence + head * q_head,
            is_row,
            k_ptr + key_head * k_head,
            v_ptr + key_head * v_head,
            pages_ptr + table * pages_sequence,
            begin,
            0,
            tl.minimum(length, begin + each),
            k_page,
            k_token,
            v_page,
            v_token,
            scale,
            softcap,
            PAGE,
            WIDTH,
            VALUE,
            HAS_SOFTCAP,
            KIND,
            ROWS,
            KEYS,
            CHANNELS,
            VALUES,
        )
        heads = tl.num_programs(1) * GROUPS
        at = (sequence * heads + head) * PARTS + FIRST + split
        tl.store(lse_ptr + at, lse, mask=is_row)
        tl.store(
            out_ptr + at[:, None] * VALUE + value[None, :],
            out,
            mask=is_row[:, None] & (value < VALUE)[None, :],
        )


@triton.jit
def _merge_splits_kernel(
    parts_ptr,
    lse_ptr,
    sinks_ptr,
    out_ptr,
    rows,
    heads,
    HAS_SINKS: tl.constexpr,
    VALUE: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_kernel_before(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # sequence · H + head
    is_row = row < rows
    split = tl.arange(0, SPLITS)
    value = tl.arange(0, VALUES)
    at = row[:, None] * PARTS + split[None, :]
    exists = is_row[:, None] & (split < PARTS)[None, :]
    lse = tl.load(lse_ptr + at, mask=exists, other=float("-inf"))
    highest = tl.max(lse, axis=1)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + row % heads).to(tl.float32)
        highest = tl.maximum(highest, sink)
    # rows behind the last one have no keys at all
    highest = tl.where(is_row, highest, 0.0)
    weights = tl.exp(lse - highest[:, None])
    total = tl.sum(weights, axis=1)
    if HAS_SINKS:
        total += tl.exp(sink - highest)
    # a part without keys may not have been written
    parts = tl.load(
        parts_ptr + at[:, :, None] * VALUE + value[None, None, :],
        mask=(weights > 0.0)[:, :, None] & (value < VALUE)[None, None, :],
        other=0.0,
    )
    total = tl.where(is_row, total, 1.0)
    out = tl.sum(weights[:, :, None] * parts, axis=1) / total[:, None]
    tl.store(
        out_ptr + row[:, None] * VALUE + value[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (value < VALUE)[None, :],
    )


def attend_shared(
    q_NHD: Tensor,
    k_PSKD: Tensor,
    v_PSKV: Tensor,
    pages_NL: Tensor,
    teams_TG: Tensor,
    lengths_T: Tensor,
    launch: PagedLaunch,
    parts_NHSV: Tensor,
    lse_NHS: Tensor,
    scale: float,
    softcap: float | None,
) -> None:
    """Attend to the keys that teams share, and write the last parts of their sequences.

    Args:
        q_NHD: queries.
        k_PSKD: pages of keys.
        v_PSKV: pages of values.
        pages_NL: the pages of each sequence in order.
        teams_TG: sequences of each team; see ``SharedPages``.
        lengths_T: number of keys that a team shares.
        launch: that of ``shared_launch_of``.
        parts_NHSV: outputs of all parts, fp32, of which those of shared keys are the last
            ``launch.splits``.
        lse_NHS: the log-sum-exp, fp32.
        scale: factor on the scores.
        softcap: that of the scores, or None.
    """
    heads, width = q_NHD.shape[1:]
    page_size, key_heads = k_PSKD.shape[1:3]
    count, value = parts_NHSV.shape[2:]
    early = launches_early(q_NHD)
    _shared_keys_kernel[len(teams_TG), key_heads, launch.splits](
        q_NHD,
        k_PSKD,
        v_PSKV,
        pages_NL,
        teams_TG,
        lengths_T,
        parts_NHSV,
        lse_NHS,
        *q_NHD.stride()[:2],
        *k_PSKD.stride()[:3],
        *v_PSKV.stride()[:3],
        pages_NL.stride(0),
        scale,
        softcap or 1.0,
        page_size,
        teams_TG.shape[1],
        heads // key_heads,
        width,
        value,
        softcap is not None,
        multiplied_in(q_NHD.dtype),
        launch.rows,
        launch.keys,
        launch.channels,
        max(16, next_power_of_2(value)),
        count - launch.splits,
        count,
        early,
        num_warps=launch.warps,
        num_stages=2,
        **early_options(early),
    )


def merge_splits(
    parts_NHSV: Tensor, lse_NHS: Tensor, sinks: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return outputs ``[N, H, V]`` of S splits, weighted by their log-sum-exp.

    Args:
        parts_NHSV: output of each split, fp32; not read where the log-sum-exp is minus infinity.
        lse_NHS: the log-sum-exp, fp32.
        sinks: ``[H]``, for each head the logit of an extra key without a value; or None.
        dtype: of the result.
    """
    sequences, heads, count, value = parts_NHSV.shape
    out = parts_NHSV.new_empty((sequences, heads, value), dtype=dtype)
    values = max(16, next_power_of_2(value))
    merged = max(1, MERGED_AT_ONCE // (next_power_of_2(count) * values))
    early = launches_early(parts_NHSV)
    _merge_splits_kernel[(triton.cdiv(sequences * heads, merged),)](
        parts_NHSV,
        lse_NHS,
        sinks,
        out,
        sequences * heads,
        heads,
        sinks is not None,
        value,
        values,
        count,
        next_power_of_2(count),
        merged,
        early,
        **early_options(early),
    )
    return out


@operator("chronicals::paged_attention")
def _paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
    teams: Tensor | None,
    team_lengths: Tensor | None,
    starts: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    splits: int | None,
) -> Tensor:
    """Launch the kernels."""
    sequences, heads, width = q.shape
    page_size, key_heads = k.shape[1:3]
    value = v.shape[3]
    groups = heads // key_heads
    if not sequences:
        return q.new_empty(*q.shape[:2], value)
    launch = launch_of(q, k, value, pages.shape[1] * page_size, window, splits)
    shared = None if teams is None else shared_launch_of(q, k, launch, teams)
    values = max(16, next_power_of_2(value))
    count = launch.splits + (0 if shared is None else shared.splits)
    parts = q.new_empty((sequences, heads, count, value), dtype=torch.float32)
    lse = q.new_empty((sequences, heads, count), dtype=torch.float32)
    strides = *q.stride()[:2], *k.stride()[:3], *v.stride()[:3], pages.stride(0)
    grid = sequences, key_heads * triton.cdiv(groups, launch.rows), launch.splits
    early = launches_early(q)
    _paged_attention_kernel[grid](
        q,
        k,
        v,
        pages,
        lengths,
        starts,
        parts,
        lse,
        *strides,
        scale,
        softcap or 1.0,
        window or 0,
        page_size,
        groups,
        width,
        value,
        softcap is not None,
        window is not None,
        starts is not None,
        multiplied_in(q.dtype),
        launch.rows,
        launch.keys,
        launch.channels,
        values,
        count,
        next_power_of_2(count),
        early,
        num_warps=launch.warps,
        num_stages=2,
        **early_options(early),
    )
    if shared is not None:
        assert teams is not None and team_lengths is not None
        of_teams = teams, team_lengths, shared
        attend_shared(q, k, v, pages, *of_teams, parts, lse, scale, softcap)
    return merge_splits(parts, lse, sinks, q.dtype)


@torch.library.register_fake(_paged_attention)
def _output(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
    teams: Tensor | None,
    team_lengths: Tensor | None,
    starts: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    splits: int | None,
) -> Tensor:
    """Allocate the output."""
    return q.new_empty(*q.shape[:2], v.shape[3])


def _holds(v_PSKV: Tensor) -> bool:
    """Return whether a program can hold values of this width."""
    shared = shared_memory(v_PSKV.device)  # 0 for the interpreter
    small = 0 < shared < SHARED_MEMORY_OF_WIDE_VALUES
    return v_PSKV.shape[-1] <= (256 if small else WIDEST_VALUE)


def paged_attention(
    q_NHD: Tensor,
    k_PSKD: Tensor,
    v_PSKV: Tensor,
    pages_NL: Tensor,
    lengths_N: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    shared: SharedPages | None = None,
    splits: int | None = None,
) -> Tensor:
    """Compute the attention of one query of each sequence, ``[N, H, V]``; without a gradient.

    All shapes are static: nothing depends on the values of ``lengths_N``, and the host waits for
    nothing. Kernels take 16 bit on a card; other dtypes and devices take the reference.

    Args:
        q_NHD: queries, each at the last token of its sequence.
        k_PSKD: pages of keys.
        v_PSKV: pages of values.
        pages_NL: int64, the pages of each sequence in order; entries behind its end name any page.
        lengths_N: int64, keys of each sequence, at least 1.
        sinks: ``[H]``, for each head the logit of an extra key without a value.
        scale: factor on the scores.
        window: a query attends to its own token and the ``window - 1`` before it.
        softcap: scores become ``softcap · tanh(score / softcap)``.
        shared: which sequences share pages, which are read once for all of a team; a window leaves
            each sequence another part of them, so with one it is ignored.
        splits: programs among which the keys of a sequence are split, a power of 2 up to
            ``MOST_SPLITS``; by default as many as fill the card. With a fixed number the bits of a
            sequence depend on its own query and keys only.
    """
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (q_NHD, k_PSKD, v_PSKV))
    has_kernel = _holds(v_PSKV) and pages_NL.stride(1) == 1 and pages_NL.shape[1] > 0
    if has_kernel and not trains and runs_in_16_bit(q_NHD, k_PSKD, v_PSKV):
        in_teams: tuple[Tensor | None, ...] = (None, None, None)
        if shared is not None and window is None:
            in_teams = shared.teams, shared.lengths, shared.starts
        return _paged_attention(  # type: ignore[no-any-return]
            q_NHD,
            k_PSKD,
            v_PSKV,
            pages_NL,
            lengths_N,
            sinks,
            *in_teams,
            scale,
            window,
            softcap,
            splits,
        )
    return paged_attention_reference(
        q_NHD,
        k_PSKD,
        v_PSKV,
        pages_NL,
        lengths_N,
        sinks,
        scale=scale,
        window=window,
        softcap=softcap,
    )


@triton.jit
def _copy_token(
    x_ptr, pages_ptr, token, place, x_token, x_head, SIZE: tl.constexpr, HEADS: tl.constexpr
):
    """Copy a token's keys or values ``[HEADS, SIZE]`` to its place."""
    ALL: tl.constexpr = HEADS * SIZE
    AT_ONCE: tl.constexpr = 1024
    for first in tl.static_range(0, ALL, AT_ONCE):
        element = first + tl.arange(0, AT_ONCE)
        exists = element < ALL
        head = (element // SIZE).to(tl.int64)
        x = tl.load(x_ptr + token * x_token + head * x_head + element % SIZE, mask=exists)
        tl.store(pages_ptr + place * ALL + element, x, mask=exists)


@triton.jit
def _write_pages_kernel(
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    places_ptr,
    k_token,
    k_head,
    v_token,
    v_head,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_kernel_before(EARLY)
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(places_ptr + token)
    _copy_token(k_ptr, keys_ptr, token, place, k_token, k_head, KEY, HEADS)
    _copy_token(v_ptr, values_ptr, token, place, v_token, v_head, VALUE, HEADS)


@operator("chronicals::write_pages", mutates=["keys", "values"])
def _write_pages(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, places: Tensor) -> None:
    """Launch the kernel."""
    if not len(places):
        return
    early = launches_early(k)
    _write_pages_kernel[(len(places),)](
        k,
        v,
        keys,
        values,
        places,
        *k.stride()[:2],
        *v.stride()[:2],
        keys.shape[2],
        keys.shape[3],
        values.shape[3],
        early,
        **early_options(early),
    )


def write_pages(
    k_TKD: Tensor, v_TKV: Tensor, keys_PSKD: Tensor, values_PSKV: Tensor, places: Tensor
) -> None:
    """Write keys and values of tokens to pages; without a gradient.

    Args:
        k_TKD: keys.
        v_TKV: values.
        keys_PSKD: pages of keys, dense.
        values_PSKV: pages of values, dense.
        places: int64 ``[T]``, page · S + the token's place within its page; none occurs twice,
            but for pages that nobody reads.
    """
    dense = k_TKD.stride(2) == v_TKV.stride(2) == 1
    whole = keys_PSKD.is_contiguous() and values_PSKV.is_contiguous()
    if dense and whole and runs_triton(k_TKD, v_TKV, keys_PSKD, values_PSKV):
        _write_pages(k_TKD, v_TKV, keys_PSKD, values_PSKV, places)
        return
    write_pages_reference(k_TKD, v_TKV, keys_PSKD, values_PSKV, places)


def write_pages_reference(
    k_TKD: Tensor, v_TKV: Tensor, keys_PSKD: Tensor, values_PSKV: Tensor, places: Tensor
) -> None:
    """Do what ``write_pages`` does in plain torch."""
    keys_PSKD.flatten(0, 1).index_copy_(0, places, k_TKD)
    values_PSKV.flatten(0, 1).index_copy_(0, places, v_TKV)


def gather_pages(x_PSKD: Tensor, places: Tensor) -> Tensor:
    """Gather keys or values ``[T, K, D]`` from pages.

    Args:
        x_PSKD: the pages.
        places: int64 ``[T]``, page · S + the token's place within its page.
    """
    return x_PSKD.flatten(0, 1).index_select(0, places)


def paged_attention_reference(
    q_NHD: Tensor,
    k_PSKD: Tensor,
    v_PSKV: Tensor,
    pages_NL: Tensor,
    lengths_N: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute ``paged_attention`` in plain torch.

    Every page of the block table is read, also behind a sequence's end. Everything is computed in
    at least fp32, but the weights are rounded to the values' dtype, before they are divided by
    their sum: so do the kernels of training, with whose log-probabilities those of generation are
    compared.
    """
    groups = q_NHD.shape[1] // k_PSKD.shape[2]
    wide = torch.promote_types(q_NHD.dtype, torch.float32)
    k_NTKD, v_NTKV = (x[pages_NL].flatten(1, 2).to(wide) for x in (k_PSKD, v_PSKV))
    q_NKGD = q_NHD.unflatten(1, (-1, groups)).to(wide)
    scores = torch.einsum("nkgd,ntkd->nkgt", q_NKGD, k_NTKD) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    keys = torch.arange(k_NTKD.shape[1], device=q_NHD.device)
    seen_NT = keys < lengths_N[:, None]
    if window is not None:
        seen_NT = seen_NT & (keys >= lengths_N[:, None] - window)
    scores = scores.masked_fill(~seen_NT[:, None, None], float("-inf"))
    highest = scores.amax(-1, keepdim=True)
    if sinks is not None:
        extra = sinks.to(wide).view(1, -1, groups, 1)
        highest = torch.maximum(highest, extra)
    weights = torch.exp(scores - highest)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(extra - highest)
    # keys behind the end have no weight, but zero times a value that is not finite is not zero
    v_NTKV = v_NTKV.masked_fill(~seen_NT[:, :, None, None], 0.0)
    rounded = weights.to(v_PSKV.dtype).to(wide)
    out = torch.einsum("nkgt,ntkv->nkgv", rounded, v_NTKV) / total
    return out.flatten(1, 2).to(q_NHD.dtype)
