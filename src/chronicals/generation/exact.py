"""Passes that give each token the same bits, whatever is computed beside it.

Then the log-probabilities of generation and those of the packed forward pass are equal, not only
close. Usual ones differ by rounding: a product of other sizes sums in another order. Here operations
are those of ``exact_operations``, and attention is of one query at a time:

    in fp32 on the CPU      over its keys padded to a power of two
    on a card               its keys in one program (``paged_attention``)

On a card weights have 16 bits; fp32 there, and 16 bits on the CPU, are not proved.

Shapes: T tokens; H query heads, K key heads, D and V widths of a key and a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chronicals.batch import Batch
from chronicals.generation.exact_operations import (
    ExactOperations,
    NotExact,
    products_of_one_query,
)
from chronicals.generation.pages import LayerPages
from chronicals.generation.passes import (
    EXPANSION,
    PagedPass,
    attend_documents,
    attending_pages,
    run_pass,
)
from chronicals.kernels.decode_attention import UnrotatedHeads
from chronicals.kernels.launch import runs_in_16_bit, runs_triton
from chronicals.kernels.paged_attention import paged_attention, paged_attention_reference
from chronicals.models import in_evaluation, read_head, within_adapters
from chronicals.models.attention_seam import Scores
from chronicals.quantization import packed_layers

LEAST_KEYS = 16
"""Keys to which the fewest are padded."""

PAGE = 16
"""Tokens of a page in which the packed pass attends."""


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
    with ExactOperations():
        yield


def attend_exactly(q_HD: Tensor, k_TKD: Tensor, v_TKV: Tensor, scores: Scores) -> Tensor:
    """Return the attention ``[H, V]`` of one query to keys of which the last is its own.

    Sizes depend on the query's position only: keys and values are padded to a power of two.
    """
    count = len(k_TKD)
    width = max(LEAST_KEYS, 1 << (count - 1).bit_length())
    page_1WKD, page_1WKV = (F.pad(x, (0, 0, 0, 0, 0, width - count))[None] for x in (k_TKD, v_TKV))
    with products_of_one_query():
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

    residuals: Mapping[nn.Module, torch.dtype] = {}

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

    def attend_unrotated(self, module: nn.Module, new: UnrotatedHeads, scores: Scores) -> None:
        """Return None: gradients go through the rotation."""

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
