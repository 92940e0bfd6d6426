"""The attention seam: padded and packed rows become documents, which attend without a mask.

The seam (``chronicals.models.attention_seam``) lets transformers make the masks of a model by a
function of this module, which is given the parts of a mask. If these are causality, padding on the
right, packed positions and a sliding window and nothing else, it makes a lazy mask, and
``document_attention`` runs over the bounds of the documents. Anything else (a cache, padding on the
left, another mask, dropout, ``torch.compile``) runs by the implementation that the configuration
names.

Documents are the same as in transformers: in packed rows they begin where ``position_ids`` restart,
if there is neither an ``attention_mask`` nor a cache (``use_cache=False``).

Shapes: B rows, S positions, T real tokens, H query heads, K key/value heads, D head width.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    causal_mask_function,
)

from chronicals.attention import document_attention
from chronicals.batch import IGNORED
from chronicals.models import attention_seam
from chronicals.models.attention_seam import Attention, Seam, text_configs
from chronicals.patching.lazy_logits import autocast_type
from chronicals.patching.lazy_mask import LazyMask, RowDocuments, RowPadding

ATTENTION_PART = "attention"
"""Name of the attention in the report and in a plan's reasons."""

DOCUMENT_ATTENTION = "document_attention"
MASK_PREFIX = "chronicals_over_"
"""Prefix of the names of our mask functions, before the name of transformers' own.

No configuration contains such a name.
"""

IMPLEMENTATIONS = ("eager", "sdpa")
"""Implementations that document attention replaces; the flash implementations take documents
themselves.
"""

ABOUT_PACKS = (
    "packs: as without the patch, documents in one row are kept apart by position_ids that "
    "restart, and only without an attention_mask and without a cache (use_cache=False); with eager "
    "and sdpa transformers ignores cu_seq_lens_q and seq_idx"
)
ABOUT_PADDING = (
    "padding: outputs at padding on the right of rows are zero (outputs_at_padding=False)"
)

runs = [0]
"""Number of calls of document attention.

A proof on a twin reads from it whether the class uses the seam.
"""


@dataclass(frozen=True)
class Pattern:
    """The parts of a mask function.

    Attributes:
        window: number of tokens that a query sees, itself included, or None.
        packs: number of each token's document, ``[B, S]``, or None.
    """

    window: int | None = None
    packs: Tensor | None = None


def why_not(model: Any) -> str:
    """Return why the attention of this instance cannot be replaced; empty if it can."""
    for config in text_configs(model):
        if config._attn_implementation not in IMPLEMENTATIONS:
            return f"{config._attn_implementation} is left as it is"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "its layers lie on several devices"
    replaced = attention_seam.foreign_forward(model)
    return f"the forward of {replaced} was replaced by something else" if replaced else ""


def install_document_attention(model: Any, outputs_at_padding: bool = True) -> None:
    """Use document attention in the text model; vision and audio towers keep their attention.

    Args:
        model: a model whose attention comes from transformers' interface.
        outputs_at_padding: if False, outputs at padding are zero and labels there are refused.
    """
    if outputs_at_padding:
        attention_seam.install_seam(model, DOCUMENT_SEAM)
    else:
        attention_seam.install_seam(model, WITHOUT_PADDING)
        model.register_forward_pre_hook(_refuse_labels_at_padding, with_kwargs=True)


def remove_document_attention(model: Any) -> None:
    """Undo ``install_document_attention``."""
    for seam in (DOCUMENT_SEAM, WITHOUT_PADDING):
        attention_seam.remove_seam(model, seam)
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is _refuse_labels_at_padding:
            del model._forward_pre_hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)


def _refuse_labels_at_padding(
    _model: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse labels at padding, where outputs are zero; a forward pre-hook."""
    mask = kwargs.get("attention_mask")
    labels = kwargs.get("shift_labels")
    labels = kwargs.get("labels") if labels is None else labels
    if not isinstance(mask, Tensor) or not isinstance(labels, Tensor):
        return
    if torch.compiler.is_compiling():
        return
    if mask.shape == labels.shape and bool((labels.ne(IGNORED) & mask.eq(0)).any()):
        raise ValueError(
            "labels stand at padding, where attention_mask is 0, and the model was patched with "
            f"outputs_at_padding=False: set these labels to {IGNORED}, or call patch_model(model) "
            "without it"
        )


def _mask(
    implementation: str, batch_size: int, q_length: int, kv_length: int, **options: Any
) -> Any:
    """Make a lazy mask if the rows are documents, else the mask of ``implementation``.

    The arguments are those of transformers' interface.
    """
    usual = ALL_MASK_ATTENTION_FUNCTIONS[implementation]
    make = functools.partial(
        usual, batch_size=batch_size, q_length=q_length, kv_length=kv_length, **options
    )
    documents = None
    offsets = options.get("q_offset", 0), options.get("kv_offset", 0)
    queries_are_keys = (
        type(q_length) is int
        and q_length == kv_length
        and all(type(offset) is int and offset == 0 for offset in offsets)
    )
    if queries_are_keys and not torch.compiler.is_compiling():
        pattern = _pattern(options.get("mask_function", causal_mask_function))
        if pattern is not None:
            documents = _documents(batch_size, q_length, options, pattern, make)
    if documents is None:
        return make()
    dtype = torch.bool if implementation == "sdpa" else options.get("dtype", torch.float32)
    return LazyMask(documents, batch_size, q_length, dtype)


def _pattern(function: Any) -> Pattern | None:
    """Return the parts of a mask function, or None if one of them is unknown.

    transformers composes closures; a closure is recognised by its qualified name and read through
    its variables.
    """
    if function is causal_mask_function:
        return Pattern()
    name = getattr(function, "__qualname__", "").replace(".<locals>", "")
    variables = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    if name == "sliding_window_overlay.inner_mask":
        return Pattern(window=variables["sliding_window"])
    if name == "packed_sequence_mask_function.inner_mask":
        return Pattern(packs=variables["packed_sequence_mask"])
    if name == "remap_positions_for_packed_sequence.inner_mask":
        return _pattern(variables["mask_function"])
    if name != "and_masks.and_mask":
        return None
    windows = []
    packs = []
    for part in variables["mask_functions"]:
        pattern = _pattern(part)
        if pattern is None:
            return None
        if pattern.window is not None:
            windows.append(pattern.window)
        if pattern.packs is not None:
            packs.append(pattern.packs)
    if len(windows) > 1 or len(packs) > 1:
        return None
    return Pattern(windows[0] if windows else None, packs[0] if packs else None)


def _documents(
    rows: int,
    length: int,
    options: dict[str, Any],
    pattern: Pattern,
    make: Callable[..., Tensor | None],
) -> RowDocuments | None:
    """Return the rows as documents, or None if padding is elsewhere than on the right.

    Args:
        rows: B.
        length: S.
        options: arguments of transformers' mask interface.
        pattern: parts of the mask function.
        make: makes the mask of transformers.
    """
    padding = options.get("attention_mask")
    device = options.get("device", "cpu")
    makers: Any = (
        functools.cache(make),
        functools.cache(functools.partial(make, allow_is_causal_skip=False)),
    )
    if padding is None and pattern.packs is None:
        bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device)
        return RowDocuments(bounds, length, None, pattern.window, None, *makers)
    if padding is not None:
        if padding.shape != (rows, length):
            return None
        # with padding on the left a row's first token is predicted from an output at padding,
        # which only the implementation itself computes
        real = padding.bool()
        is_on_the_right = real[:, 0] & (real[:, 1:] <= real[:, :-1]).all(1)
        if not is_on_the_right.all():
            return None
    number_BS = torch.ones((rows, length), dtype=torch.int64, device=device)
    if pattern.packs is not None:
        number_BS = number_BS + pattern.packs.expand(rows, length).to(device)
    number_BS = number_BS + torch.arange(rows, device=device)[:, None] * (length + 1)
    if padding is not None:
        number_BS = number_BS * padding.to(device).bool()
    numbers, lengths = torch.unique_consecutive(number_BS.flatten(), return_counts=True)
    lengths = lengths[numbers > 0]
    padded_BS = number_BS == 0
    counts = lengths.min(), lengths.max(), lengths.sum(), padded_BS.any(1).sum()
    shortest, longest, tokens, padded_rows = torch.stack(counts).tolist()
    bounds = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    if not padded_rows:
        return RowDocuments(bounds, longest, None, pattern.window, None, *makers)
    # real tokens first; unlike nonzero, argsort does not let the host wait for the device
    order = padded_BS.flatten().argsort(stable=True)
    padding_places = _padding(padded_BS, order[tokens:], padded_rows, length - shortest, make)
    return RowDocuments(bounds, longest, order[:tokens], pattern.window, padding_places, *makers)


def _padding(
    padded_BS: Tensor, places: Tensor, count: int, longest: int, make: Callable[..., Tensor | None]
) -> RowPadding:
    """Return the padding on the right of some rows.

    Args:
        padded_BS: whether a token is padding.
        places: indices of the padding in B · S.
        count: number of rows with padding.
        longest: largest number of padding tokens in a row.
        make: makes the mask of transformers.
    """
    length = padded_BS.shape[1]
    first = length - longest
    has_B = padded_BS.any(1)
    rows = has_B.argsort(descending=True, stable=True)[:count]
    within = (has_B.cumsum(0) - 1)[places // length] * longest + places % length - first

    def mask() -> Tensor:
        full_mask = make(q_length=longest, q_offset=first, allow_is_causal_skip=False)
        assert full_mask is not None
        return full_mask.index_select(0, rows)

    return RowPadding(places, within, rows, longest, functools.cache(mask))


def _attend(
    implementation: str,
    own: Attention,
    outputs_at_padding: bool,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend, by transformers' interface: ``[B, H, S, D]`` in, ``[B, S, H, D]`` out.

    Args:
        implementation: name of the implementation in the configuration.
        own: that implementation, which computes anything but documents.
        outputs_at_padding: whether to compute outputs at padding; else they are zero.
        module: the attention module.
        query: queries ``[B, H, S, D]``.
        key: keys ``[B, K, S, D]``.
        value: values ``[B, K, S, D]``.
        attention_mask: a lazy mask if the rows are documents.
        **options: other arguments of the interface.
    """
    if not isinstance(attention_mask, LazyMask):
        return own(module, query, key, value, attention_mask, **options)
    documents = attention_mask.documents
    q, k, v = query, key, value
    dtype = autocast_type(query)
    if dtype is not None:  # the rotation leaves queries and keys in fp32
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    if not _is_supported(implementation, module, q, k, v, options):
        return own(module, query, key, value, documents.mask(), **options)
    runs[0] += 1
    rows, heads, length, width = *q.shape[:3], v.shape[-1]
    q_THD, k_TKD, v_TKD = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    if documents.places is not None:  # the real tokens of all rows
        q_THD, k_TKD, v_TKD = (x.index_select(0, documents.places) for x in (q_THD, k_TKD, v_TKD))
    out = document_attention(
        q_THD,
        k_TKD,
        v_TKD,
        documents.bounds,
        documents.longest,
        scale=options.get("scaling"),
        window=documents.window,
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )
    if documents.places is not None:
        out = out.new_zeros(rows * length, heads, width).index_copy(0, documents.places, out)
    padding = documents.padding if outputs_at_padding else None
    if padding is not None:
        query, key, value = (x.index_select(0, padding.rows) for x in (query, key, value))
        last_queries = query[:, :, -padding.longest :]
        last = own(module, last_queries, key, value, padding.mask(), **options)[0]
        at_padding = last.flatten(0, 1).index_select(0, padding.within)
        out = out.index_copy(0, padding.places, at_padding.to(out.dtype))
    return out.view(rows, length, heads, width), None


def _is_supported(
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: dict[str, Any],
) -> bool:
    """Return whether ``document_attention`` computes what ``implementation`` does of these."""
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    if not causal or options.get("dropout"):
        return False
    if getattr(getattr(module, "config", None), "output_attentions", False):
        return False
    unsupported = ["output_attentions", "position_bias", "head_mask"]
    if implementation == "sdpa":  # which ignores them
        unsupported += ["softcap", "s_aux"]
    for name in unsupported:
        if options.get(name) is not None and options[name] is not False:
            return False
    same_dtype = query.dtype == key.dtype == value.dtype
    same_rows = key.shape[:-1] == value.shape[:-1] and query.shape[2:] == key.shape[2:]
    return same_dtype and same_rows and value.shape[-1] <= key.shape[-1]


@dataclass(frozen=True)
class DocumentSeam(Seam):
    """The seam whose attention runs over documents if the rows are documents.

    Other rows run by the implementation that the configuration names.

    Attributes:
        outputs_at_padding: whether to compute outputs at padding; else they are zero.
    """

    outputs_at_padding: bool

    def attend(self, name: str, own: Attention) -> Attention:
        """Return document attention in place of the implementations that it replaces."""
        if name not in IMPLEMENTATIONS:
            return own
        return functools.partial(_attend, name, own, self.outputs_at_padding)

    def name(self, name: str) -> str:
        """Return the name of our mask function for the implementations that are replaced."""
        return MASK_PREFIX + name if name in IMPLEMENTATIONS else name


DOCUMENT_SEAM = DocumentSeam("documents", True)
WITHOUT_PADDING = DocumentSeam("documents_without_padding", False)

for _name in IMPLEMENTATIONS:
    AttentionMaskInterface.register(MASK_PREFIX + _name, functools.partial(_mask, _name))
