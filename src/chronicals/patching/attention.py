"""The attention seam: padded and packed rows become documents, which attend without a mask and without padding.

Behind transformers' interfaces for masks and for attention stands, for every implementation a model may have had, one
of ours by the name ``chronicals_over_<that>``. The mask interface is told how a mask comes about; where that is causality,
padding, packed positions and a sliding window and nothing else, no mask is made, and ``document_attention`` runs over the
bounds of the documents. Anything else (a cache, padding on the left, a mask of somebody's own, dropout,
``torch.compile``) goes to the implementation the model had, and so do rows with labels at padding, for outputs there are
zero.

Bounds that are given (``cu_seq_lens_q``, as ``DataCollatorWithFlattening`` gives them) are kept, whatever else is;
restarting positions count where transformers counts them, which is without a cache (``use_cache=False``): packs that are
trained on go without one.

Shapes: B rows, S positions, T real tokens, H query heads, K key/value heads, D head width.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from chronicals.attention import document_attention
from chronicals.batch import IGNORED
from chronicals.models.presentation import CACHES, text_configs
from chronicals.patching import own_config

logger = logging.getLogger(__name__)

NAME = "attention"
"""As the report and a plan call it."""

BY = "document_attention"
PREFIX = "chronicals_over_"
IMPLEMENTATIONS = ("eager", "sdpa")
"""What ours can stand before; the flash implementations take documents themselves."""

DOCUMENTS = "chronicals_documents"
"""Attribute of a mask of ours: the documents it stands for."""

runs = [0]
"""How often documents were attended: a proof on a twin sees whether its class comes by here."""


@dataclass(frozen=True)
class Documents:
    """Rows ``[B, S]`` as documents.

    Attributes:
        bounds: int32 ``[N + 1]``, ending at T.
        longest: bound on a document's length.
        places: of the real tokens among B · S, or None where all are.
        window: of the sliding window, or None.
        mask: makes the mask that the implementation before would have made.
    """

    bounds: Tensor
    longest: int
    places: Tensor | None
    window: int | None
    mask: Callable[[], Tensor | None]


@dataclass(frozen=True)
class Pattern:
    """What a mask function consists of."""

    window: int | None = None
    packs: Tensor | None = None


def why_not(model: Any) -> str:
    """Why the attention of this instance must stay; empty where it need not."""
    for config in text_configs(model):
        if config._attn_implementation not in IMPLEMENTATIONS:
            return f"{config._attn_implementation} is left as it is"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "its layers lie on several devices"
    return ""


def is_offered(model: Any) -> bool:
    """Whether the class takes its attention from transformers' interface."""
    return hasattr(model, "_can_set_attn_implementation") and model._can_set_attn_implementation()


def install(model: Any) -> None:
    """Let ours stand before what the model's text has; towers of other kinds keep theirs."""
    own_config.take(model, text_configs(model))
    for config in text_configs(model):
        config._attn_implementation_internal = PREFIX + config._attn_implementation
    model.register_forward_pre_hook(_without_cache, with_kwargs=True)
    model.register_forward_pre_hook(_look_at_padding, with_kwargs=True)


def remove(model: Any) -> None:
    """Back to what the model had, or was given since."""
    for config in text_configs(model):
        if config._attn_implementation:
            config._attn_implementation_internal = config._attn_implementation.removeprefix(PREFIX)
    own_config.give_back(model)
    for key in [key for key, hook in model._forward_pre_hooks.items() if hook in (_without_cache, _look_at_padding)]:
        del model._forward_pre_hooks[key]
        model._forward_pre_hooks_with_kwargs.pop(key, None)


def _without_cache(_model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """transformers looks for documents in the positions only where there is no cache, which is made unless forbidden.

    It would take any jump for the end of a document, so that only for packs the cache is forbidden. To look at positions waits
    for the device: once in a step that is given them, never in another.
    """
    given = {name for name, value in kwargs.items() if value is not None}
    asked = "position_ids" in given and not given & {"attention_mask", "use_cache", *CACHES}
    trains = asked and given & {"labels", "shift_labels"}
    return (args, kwargs | {"use_cache": False}) if trains and _are_packs(kwargs["position_ids"]) else None


_call = threading.local()
"""What the model is called with now: ``labels_at_padding``."""


def _look_at_padding(_model: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Whether something is to be predicted from padding, which is a mistake more often than not; looked for where there are
    labels and padding, whose places the device is asked for anyway."""
    _call.labels_at_padding = False
    mask, labels = kwargs.get("attention_mask"), kwargs.get("shift_labels")
    labels = kwargs.get("labels") if labels is None else labels
    if not (isinstance(mask, Tensor) and isinstance(labels, Tensor)) or torch.compiler.is_compiling():
        return
    if mask.shape == labels.shape:
        _call.labels_at_padding = bool((labels.ne(IGNORED) & mask.eq(0)).any())
        if _call.labels_at_padding:
            _say_labels_at_padding()


@functools.cache
def _say_labels_at_padding() -> None:
    logger.warning(
        "labels stand at padding, where attention_mask is 0, and are trained: rows are attended with their padding, which is "
        "slower; set them to -100 if that is not meant"
    )


def _are_packs(positions: Any) -> bool:
    """Whether rows of positions count up or begin again at 0, and do both; not to be seen while compiling."""
    if torch.compiler.is_compiling() or not isinstance(positions, Tensor) or positions.ndim != 2:
        return False
    counts, begins = positions.diff() == 1, positions[:, 1:] == 0
    return bool((counts | begins).all() & counts.any() & begins.any())


def _mask(implementation: str, batch_size: int, q_length: int, kv_length: int, **options: Any) -> Any:
    """transformers' mask interface: a mask of ours where the rows are documents, else that of ``implementation``."""
    usual = ALL_MASK_ATTENTION_FUNCTIONS[implementation]
    make = functools.partial(usual, batch_size=batch_size, q_length=q_length, kv_length=kv_length, **options)
    documents = None
    as_rows = getattr(_call, "labels_at_padding", False) and options.get("attention_mask") is not None
    if not torch.compiler.is_compiling() and not as_rows and _is_square(q_length, kv_length, options):
        pattern = _pattern(options.get("mask_function", causal_mask_function))
        if pattern is not None:
            documents = _documents(batch_size, q_length, options, pattern, make)
    if documents is None:
        return make()
    mask = torch.empty((batch_size, 1, q_length, 0), dtype=torch.bool, device=documents.bounds.device)
    setattr(mask, DOCUMENTS, documents)
    return mask


def _is_square(q_length: Any, kv_length: Any, options: dict[str, Any]) -> bool:
    """Queries and keys are the same tokens."""
    offsets = options.get("q_offset", 0), options.get("kv_offset", 0)
    return type(q_length) is int and q_length == kv_length and all(type(o) is int and o == 0 for o in offsets)


def _pattern(function: Any) -> Pattern | None:
    """What the parts of a mask function amount to, or None where one is not known.

    transformers composes closures; they are told by the names they were defined under and by what they hold.
    """
    if function is causal_mask_function:
        return Pattern()
    name = getattr(function, "__qualname__", "").replace(".<locals>", "")
    held = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    if name == "sliding_window_overlay.inner_mask":
        return Pattern(window=held["sliding_window"])
    if name == "packed_sequence_mask_function.inner_mask":
        return Pattern(packs=held["packed_sequence_mask"])
    if name == "remap_positions_for_packed_sequence.inner_mask":
        return _pattern(held["mask_function"])
    if name != "and_masks.and_mask":
        return None
    found = [(part, _pattern(part)) for part in held["mask_functions"]]
    patterns = [pattern for _, pattern in found if pattern is not None]
    if len(patterns) < len(found):
        return None
    windows = [p.window for p in patterns if p.window is not None]
    packs = [p.packs for p in patterns if p.packs is not None]
    if len(windows) > 1 or len(packs) > 1:
        return None
    return Pattern(windows[0] if windows else None, packs[0] if packs else None)


def _documents(
    rows: int, length: int, options: dict[str, Any], pattern: Pattern, make: Callable[[], Tensor | None]
) -> Documents | None:
    padding, device = options.get("attention_mask"), options.get("device", "cpu")
    mask = functools.cache(make)
    if padding is None and pattern.packs is None:
        bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device)
        return Documents(bounds, length, None, pattern.window, mask)
    if padding is not None and (padding.shape != (rows, length) or not _is_on_the_right(padding)):
        return None
    number_BS = torch.ones((rows, length), dtype=torch.int64, device=device)
    if pattern.packs is not None:
        number_BS = number_BS + pattern.packs.expand(rows, length).to(device)
    number_BS = number_BS + torch.arange(rows, device=device)[:, None] * (length + 1)
    if padding is not None:
        number_BS = number_BS * padding.to(device).bool()
    numbers, lengths = torch.unique_consecutive(number_BS.flatten(), return_counts=True)
    real = numbers > 0
    lengths = lengths[real]
    bounds = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    places = None if bool(real.all()) else number_BS.flatten().nonzero().squeeze(1)
    return Documents(bounds, int(lengths.max()), places, pattern.window, mask)


def _is_on_the_right(padding: Tensor) -> bool:
    """Padding on the left is not for us: a row's first token is predicted there, from what the implementation leaves."""
    there = padding.bool()
    return bool((there[:, 0] & (there[:, 1:] <= there[:, :-1]).all(1)).all())


def _attend(
    implementation: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention interface: ``[B, H, S, D]`` in, ``[B, S, H, D]`` out."""
    documents = getattr(attention_mask, DOCUMENTS, None)
    if documents is None:
        return _before(implementation, module)(module, query, key, value, attention_mask, **options)
    if not _can(implementation, module, query, key, value, options):
        return _before(implementation, module)(module, query, key, value, documents.mask(), **options)
    runs[0] += 1
    rows, heads, length, width = query.shape
    narrow = value.shape[-1]
    value = F.pad(value, (0, width - narrow)) if narrow < width else value  # latent attention
    q_THD, k_TKD, v_TKD = (_real(x, documents.places) for x in (query, key, value))
    bounds, longest = documents.bounds, documents.longest
    given = options.get("cu_seq_lens_q")
    if given is not None and rows == 1 and documents.places is None and options.get("max_length_q") is not None:
        bounds, longest = given.to(torch.int32), int(options["max_length_q"])
    out = document_attention(
        q_THD, k_TKD, v_TKD, bounds, longest, scale=options.get("scaling"), window=documents.window,
        softcap=options.get("softcap"), sinks=options.get("s_aux"),
    )  # fmt: skip
    if documents.places is not None:
        out = out.new_zeros(rows * length, heads, width).index_copy(0, documents.places, out)
    return out.view(rows, length, heads, width)[..., :narrow], None


def _real(x_BHSD: Tensor, places: Tensor | None) -> Tensor:
    """The real tokens of all rows, ``[T, H, D]``."""
    flat = x_BHSD.transpose(1, 2).flatten(0, 1)
    return flat if places is None else flat.index_select(0, places)


def _can(implementation: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    """Whether the documents' attention computes what ``implementation`` does with these arguments."""
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    wanted = ("softcap", "s_aux") if implementation == "sdpa" else ()  # which does without them
    asked = ("output_attentions", "position_bias", "head_mask", *wanted)
    return (
        bool(causal)
        and not options.get("dropout")
        and all(options.get(name) is None or options[name] is False for name in asked)
        and key.shape[:-1] == value.shape[:-1]
        and value.shape[-1] <= key.shape[-1]
        and query.dtype == key.dtype == value.dtype
        and query.shape[2:] == key.shape[2:]
        and not getattr(module.config, "output_attentions", False)
    )


def _before(implementation: str, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """What would have attended; the plainest of them each modelling file has for itself."""
    if implementation != "eager":
        return ALL_ATTENTION_FUNCTIONS[implementation]
    return inspect.unwrap(type(module).forward).__globals__["eager_attention_forward"]


for _name in IMPLEMENTATIONS:
    AttentionInterface.register(PREFIX + _name, functools.partial(_attend, _name))
    AttentionMaskInterface.register(PREFIX + _name, functools.partial(_mask, _name))
