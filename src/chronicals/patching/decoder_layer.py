"""The fused decoder layer over documents: an attention half and an MLP half, each fused if known.

The halves are in ``halves.py``.

Norms stand before the branches (Llama and most), after them (OLMo 2), or both (Gemma). Heads may be
normed, each by itself or all together. The role of a module follows from its name in transformers'
families; that a half computes what the class computes is proved on a twin. A half of another form
(experts, a part with hooks) runs as its class does.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from chronicals.attention import attend_split, document_attention, gather_keys
from chronicals.kernels.decode_attention import UnrotatedHeads
from chronicals.kernels.launch import with_padding
from chronicals.log_once import log_once
from chronicals.memory import draws_numbers
from chronicals.models.attention_seam import PASS, Scores
from chronicals.models.presentation import CACHES
from chronicals.patching.forms import FORM, Form, signature
from chronicals.patching.fused_weights import GroupProduct, Unmerged
from chronicals.patching.gated_mlps import GatedMLPReads
from chronicals.patching.halves import (
    OUTPUT_PROJECTION,
    RECOMPUTES,
    AttentionHalf,
    AttentionReads,
    FusedHalf,
    FusedProduct,
    GradientRequest,
    HalfNorms,
    LatentHalf,
    LatentReads,
    MLPHalf,
    PackedTokens,
    run_kept_half,
)
from chronicals.patching.norms import RMSNormReads
from chronicals.patching.rotary import LAID
from chronicals.patching.tiled_layer import TILES_LAYER, run_in_tiles
from chronicals.quantization import LayerProduct, PackedProduct, packed_layers, packed_weight

logger = logging.getLogger(__name__)

CHECKPOINTS_CALLS = "__call__" in vars(GradientCheckpointingLayer)
"""True if transformers recomputes a layer around its forward.

Newer versions do so within the class's forward.
"""

LAYER_PART = "decoder layer"
FUSED_LAYER = "fused decoder layer"
FUSED_ATTENTION = "fused attention half"
FUSED_MLP = "fused MLP half"
"""Names of the replacements of a layer's forward: both halves, or one of them."""

FUSED_HALVES = {
    (True, True): FUSED_LAYER,
    (True, False): FUSED_ATTENTION,
    (False, True): FUSED_MLP,
    (False, False): "",
}
"""These names by whether attention and MLP are fused."""

ATTENTION_HALF = "attention half"
MLP_HALF = "MLP half"
"""Names of the halves in the report and in a plan."""

ATTENTION = "self_attn"
MLP = "mlp"
QUERY_KEY_VALUE = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
LATENT = (("q_a_proj", "kv_a_proj_with_mqa"), ("q_proj", "kv_a_proj_with_mqa"))
"""Children of latent attention: for queries or their latent, and for that of keys and values."""

INNER_NORMS = ("q_norm", "k_norm", "q_a_layernorm", "kv_a_layernorm")
"""Children of attention that norm heads, and the latents of latent attention."""

ARRANGEMENTS: tuple[tuple[tuple[str | None, str | None], tuple[str | None, str | None]], ...] = (
    (
        ("input_layernorm", "post_attention_layernorm"),
        ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    ((None, "post_attention_layernorm"), (None, "post_feedforward_layernorm")),
    (("input_layernorm", None), ("post_attention_layernorm", None)),
)
"""Names of the norms before and after attention, and before and after the MLP.

A layer has all norms of one arrangement and no other.
"""

runs: Counter[str] = Counter()
"""Number of runs of a layer with both halves fused (``FUSED_LAYER``), or with one."""


@dataclass(frozen=True)
class Anatomy:
    """The parts of a decoder layer.

    Attributes:
        norms: norms of the attention half and of the MLP half.
        attention, mlp: how the part of each half is read; None if its form is not known, so that
            its class computes it.
    """

    norms: tuple[HalfNorms, HalfNorms]
    attention: AttentionReads | None
    mlp: GatedMLPReads | None

    @property
    def by(self) -> str:
        """Name of what replaces the layer's forward; empty if neither half is fused."""
        return FUSED_HALVES[self.attention is not None, self.mlp is not None]


def layer_signature(layer: nn.Module) -> tuple:
    """Return what an instance must have in common with the proved one."""
    parts = [getattr(layer, name, None) for name in (ATTENTION, MLP)]
    return signature(layer), *(None if part is None else signature(part) for part in parts)


def read_layer(layer: nn.Module, forms: Mapping[tuple, tuple[str, Form]]) -> Anatomy | None:
    """Return the anatomy of ``layer``, or None if it is built in another way.

    Args:
        layer: the decoder layer.
        forms: role and proved form of modules by their signature.
    """

    def reads(module: nn.Module | None) -> Any:
        if module is None or signature(module) not in forms:
            return None
        return forms[signature(module)][1].reads

    attention = getattr(layer, ATTENTION, None)
    mlp = getattr(layer, MLP, None)
    norms: dict[str | None, tuple[str, RMSNormReads]] = {}
    for name, child in layer.named_children():
        norm = reads(child)
        if isinstance(norm, RMSNormReads):
            norms[name] = (name, norm)
    arrangement = next(
        (names for names in ARRANGEMENTS if {*names[0], *names[1]} - {None} == set(norms)), None
    )
    if attention is None or mlp is None or arrangement is None:
        return None
    of_attention, of_mlp = (
        HalfNorms(norms.get(before), norms.get(after)) for before, after in arrangement
    )
    _, rotary = forms.get(signature(attention), ("", None))
    half_tables = rotary is not None and rotary.by.endswith(LAID)
    mlp_reads = reads(mlp)
    return Anatomy(
        (of_attention, of_mlp),
        _read_attention(attention, reads, half_tables),
        mlp_reads if isinstance(mlp_reads, GatedMLPReads) else None,
    )


def _read_attention(
    attention: nn.Module, reads: Callable[[nn.Module | None], Any], half_tables: bool
) -> AttentionReads | None:
    """Return how attention is read, by the names of its children; None if it has others."""
    products = None
    for names in (*QUERY_KEY_VALUE, *LATENT):
        children = [getattr(attention, name, None) for name in (*names, *OUTPUT_PROJECTION)]
        if None not in children:
            products = names
            break
    if products is None:
        return None
    norms: dict[str, RMSNormReads] = {}
    for name in INNER_NORMS:
        norm = reads(getattr(attention, name, None))
        if isinstance(norm, RMSNormReads):
            norms[name] = norm
    if products in QUERY_KEY_VALUE:
        head_norms = None
        if "q_norm" in norms and "k_norm" in norms:
            head_norms = (norms["q_norm"], norms["k_norm"])
        return AttentionReads(products, head_norms, half_tables=half_tables)
    has_query_latent = products == LATENT[0]
    query_norm = norms.get("q_a_layernorm") if has_query_latent else None
    key_value_norm = norms.get("kv_a_layernorm")
    if key_value_norm is None or (has_query_latent and query_norm is None):
        return None
    return LatentReads(
        products,
        None,
        half_tables=half_tables,
        query_norm=query_norm,
        key_value_norm=key_value_norm,
    )


def fuse_weights(model: nn.Module) -> None:
    """Move the weights of fused layers to where one product reads them.

    Otherwise the first step does so. The data of the weights have other addresses afterwards, which
    callers that keep addresses must read anew.
    """
    for _ in products_of_halves(model):
        pass  # making a group moves its weights; a half that cannot be fused is logged when it runs


def fused_layers(model: nn.Module) -> Iterator[tuple[nn.Module, Anatomy]]:
    """Yield the decoder layers whose forward was replaced, and their anatomy."""
    for layer in model.modules():
        forward = getattr(vars(layer).get("forward"), "__func__", None)
        if isinstance(forward, partial) and getattr(forward, FORM, None) in (
            FUSED_LAYER,
            FUSED_ATTENTION,
            FUSED_MLP,
        ):
            yield layer, forward.args[0]


def products_of_halves(model: nn.Module) -> Iterator[list[FusedProduct] | Unmerged]:
    """Yield for each half that should run fused its products, or the reason why it does not.

    Of a layer attention comes first.
    """
    for layer, anatomy in fused_layers(model):
        for half in halves_of(anatomy, layer):
            if isinstance(half, FusedHalf):
                yield Unmerged("it has dropout") if _has_dropout(layer) else half.products
            elif half is not None:
                yield half


def packed_products(model: nn.Module) -> list[PackedProduct]:
    """Return the products with packed weights of a pass of generation.

    They are those of fused halves, and of other packed linear layers.
    """
    found: list[PackedProduct] = []
    fused = set[nn.Module]()
    for layer, anatomy in fused_layers(model):
        for half in halves_of(anatomy, layer, over_pages=True):
            if isinstance(half, FusedHalf):
                for owner, names, group in half.products:
                    if packed_weight(group.linears[0]) is not None:
                        found.append(GroupProduct(owner, names))
                        fused.update(group.linears)
    found += [LayerProduct(layer) for _, layer in packed_layers(model) if layer not in fused]
    return found


def names_of_products(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """Yield module and names of its children for each product of several layers in fused halves."""
    for layer, anatomy in fused_layers(model):
        if anatomy.attention is not None and len(anatomy.attention.products) > 1:
            yield getattr(layer, ATTENTION), anatomy.attention.products
        if anatomy.mlp is not None and len(anatomy.mlp.first) > 1:
            yield getattr(layer, MLP), anatomy.mlp.first


def recompute_norms_and_units(model: nn.Module) -> None:
    """Let fused halves compute norms and gated units again in the backward pass; nothing is saved.

    Layers that are recomputed as a whole stay as they are.
    """
    for layer in model.modules():
        if hasattr(layer, ATTENTION) and not getattr(layer, "gradient_checkpointing", False):
            setattr(layer, RECOMPUTES, True)


def run_layer(
    anatomy: Anatomy, layer: Any, hidden_states: Tensor, *args: Any, **inputs: Any
) -> Tensor:
    """Run the layer in place of its class's forward.

    It is recomputed in the backward pass if the class would do that within its forward.
    """
    class_forward = type(layer).forward
    checkpoints = (
        layer.training and getattr(layer, "gradient_checkpointing", False) and not CHECKPOINTS_CALLS
    )
    # with a cache the class's own forward runs, which leaves the cache out when it recomputes
    if checkpoints and all(inputs.get(name) is None for name in CACHES):
        without_checkpoint = class_forward.__wrapped__
        run = partial(_run, anatomy, layer, without_checkpoint, **inputs)
        return layer._gradient_checkpointing_func(run, hidden_states, *args)
    return _run(anatomy, layer, class_forward, hidden_states, *args, **inputs)


def _why_in_parts(layer: Any, hidden_states: Tensor, inputs: Mapping[str, Any]) -> str | None:
    """Return why a call cannot run with fused halves; None if it can."""
    for name in (*CACHES, "attention_mask"):
        if inputs.get(name) is not None:
            return f"it was given {name}"
    if len(hidden_states) != 1:
        return "its input is not one row"
    if torch.is_autocast_enabled(hidden_states.device.type):
        return "it runs under autocast"
    if layer.training and _has_dropout(layer):
        return "it has dropout"
    return None


def _run(
    anatomy: Anatomy,
    layer: Any,
    class_forward: Callable,
    hidden_states: Tensor,
    *args: Any,
    **inputs: Any,
) -> Tensor:
    """Run the layer with the halves fused that can be, or by ``class_forward`` if none can."""
    is_packed = all(inputs.get(name) is not None for name in ("cu_seq_lens_q", "max_length_q"))
    over_pages = inputs.get(PASS) is not None
    if args or not (is_packed or over_pages):
        return class_forward(layer, hidden_states, *args, **inputs)
    in_tiles = getattr(layer, TILES_LAYER, False) and not over_pages
    reason = _why_in_parts(layer, hidden_states, inputs)
    if reason is not None:
        log_once(logger.warning, f"{type(layer).__name__} runs part by part: {reason}")
        run = partial(class_forward, layer, **inputs)
        return _recomputed(layer, run, hidden_states) if in_tiles else run(hidden_states)
    halves: list[Any] = []
    has_tables = _tables(inputs) is not None
    residual = inputs[PASS].residuals.get(layer) if over_pages else None
    # a layer that takes a residual in fp32 goes by the dtype of its products
    dtype = hidden_states.dtype if residual is None else None
    for half in halves_of(anatomy, layer, dtype, over_pages, has_tables):
        if isinstance(half, Unmerged):
            log_once(logger.warning, f"a half of {type(layer).__name__} runs part by part: {half}")
            halves.append(None)
        else:
            halves.append(half)
    attention, mlp = halves
    if in_tiles and (attention is None or mlp is None):
        run = partial(class_forward, layer, **inputs)
        return _recomputed(layer, run, hidden_states)
    if attention is None and mlp is None:
        return class_forward(layer, hidden_states, **inputs)
    runs[FUSED_HALVES[attention is not None, mlp is not None]] += 1
    if in_tiles:
        return run_in_tiles(layer, hidden_states, attention, mlp, _tokens(layer, inputs))
    x = hidden_states.squeeze(0)
    if attention is None:
        x, branch = run_kept_half(
            layer,
            anatomy.norms[0],
            lambda x: getattr(layer, ATTENTION)(hidden_states=x, **inputs),
            x,
        )
    else:
        # the layer below has the same form: its down product asks the same of its gradient
        below = GradientRequest() if mlp is None else GradientRequest(mlp.last.padding)
        x, branch = attention(x, _tokens(layer, inputs), below)
    if mlp is None:
        x, branch = run_kept_half(layer, anatomy.norms[1], getattr(layer, MLP), x, branch)
    else:
        request = GradientRequest()
        if attention is not None:
            request = GradientRequest(attention.last.padding, attention.last.amaxes(len(x))[1])
        x, branch = mlp(x, branch, request)
    out = x.unsqueeze(0) + branch.unsqueeze(0)  # no view, on which hooks of FSDP could be lost
    return out if residual is None else out.to(residual)


def _recomputed(layer: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run a layer that cannot run in tiles now, and recompute it as a whole instead."""
    if not (layer.training and torch.is_grad_enabled()):
        return run(x)
    draws = draws_numbers(layer)
    out: Tensor = checkpoint(run, x, use_reentrant=False, preserve_rng_state=draws)
    return out


def halves_of(
    anatomy: Anatomy,
    layer: Any,
    dtype: torch.dtype | None = None,
    over_pages: bool = False,
    has_tables: bool = True,
) -> tuple[AttentionHalf | Unmerged | None, MLPHalf | Unmerged | None]:
    """Return the layer's halves as they are now.

    Each is the fused half, or the reason why it cannot be fused, or None if its form is not known.

    Args:
        anatomy: the parts of the layer.
        layer: the layer.
        dtype: dtype of its input; by default that of its weights.
        over_pages: it runs in a pass of generation.
        has_tables: it is given tables of rotations.
    """
    attention: AttentionHalf | Unmerged | None = None
    mlp: MLPHalf | Unmerged | None = None
    if anatomy.attention is not None:
        try:
            if not has_tables:
                raise Unmerged("it was given no rotary tables")
            reads = anatomy.attention
            module = getattr(layer, ATTENTION)
            if isinstance(reads, LatentReads) and over_pages:
                pass  # the pass stores latents, which it reads where the class makes them
            elif isinstance(reads, LatentReads):
                attention = LatentHalf(layer, module, anatomy.norms[0], reads, dtype)
            else:
                attention = AttentionHalf(layer, module, anatomy.norms[0], reads, dtype)
        except Unmerged as reason:
            attention = reason
    if anatomy.mlp is not None:
        try:
            mlp = MLPHalf(layer, getattr(layer, MLP), anatomy.norms[1], anatomy.mlp, dtype)
        except Unmerged as reason:
            mlp = reason
    return attention, mlp


def _tokens(layer: Any, inputs: Mapping[str, Any]) -> PackedTokens:
    """Read the positions of tokens from the layer's inputs, and how they attend."""
    if inputs.get(PASS) is None:
        return _packed_tokens(inputs)
    tables = _tables(inputs)
    assert tables is not None
    cos, sin = (table.squeeze(0) for table in tables)
    of_module = inputs[PASS], getattr(layer, ATTENTION)
    return PackedTokens(
        cos,
        sin,
        inputs.get("position_ids"),
        sys.maxsize,
        attend=partial(_attend_stored, *of_module),
        attend_unrotated=partial(_attend_unrotated, *of_module),
    )


def _attend_stored(
    over: Any,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    padding: int = 0,
) -> Tensor:
    """Attend over keys and values that a pass of generation has stored, ``[T, H, W]``."""
    return _padded(over.attend(module, q, k, v, Scores(scale, window, softcap, sinks)), padding)


def _attend_unrotated(
    over: Any,
    module: nn.Module,
    new: UnrotatedHeads,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    padding: int,
) -> Tensor | None:
    """Attend from heads that the pass turns itself, ``[T, H, W]``; None if it cannot."""
    out = over.attend_unrotated(module, new, Scores(scale, window, softcap, sinks))
    return None if out is None else _padded(out, padding)


def _padded(attended: Tensor, padding: int) -> Tensor:
    """Return ``[T, H, W]`` with columns that are left free behind each row of ``H · W``."""
    if not padding:
        return attended
    room = with_padding(attended, (len(attended), attended[0].numel()), padding)
    return room.copy_(attended.flatten(1)).unflatten(1, attended.shape[1:])


def _packed_tokens(inputs: Mapping[str, Any]) -> PackedTokens:
    """Read the positions of tokens from the layer's inputs, and how they attend.

    They attend over all documents of this rank, over keys of several ranks, or by heads of several
    ranks.
    """
    names = ("cu_seq_lens_q", "max_length_q", "cu_seq_lens_k", "max_length_k")
    bounds: list[Any] = [inputs.get(name) for name in names]
    flash = inputs.get("flash", True)
    shared_keys = inputs.get("shared_keys")
    split = inputs.get("split_documents")

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        padding: int = 0,
        sinks: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        attend_one: Callable[..., Tensor] = partial(document_attention, flash=flash, **options)
        of_heads = [] if sinks is None else [sinks]
        if split is not None:  # without padding behind heads, which would have to be sent, too
            return attend_split(attend_one, q, k, v, split, *of_heads)
        if shared_keys is not None:
            k = gather_keys(k, shared_keys)
            v = gather_keys(v, shared_keys)
        return attend_one(q, k, v, *bounds, sinks=sinks, padding=padding)

    tables = _tables(inputs)
    assert tables is not None
    cos, sin = (table.squeeze(0) for table in tables)
    longest = inputs["max_length_q"] if shared_keys is None else shared_keys.max_seqlen
    # heads that are exchanged are divided among the ranks
    together = 1 if split is None else split.context.inner
    return PackedTokens(cos, sin, inputs.get("position_ids"), longest, attend, together)


def _tables(inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return cosines and sines of the rotation, or None if there are none.

    Those of complex tables are half as wide (DeepSeek V2).
    """
    tables = inputs.get("position_embeddings")
    if isinstance(tables, Tensor) and tables.is_complex():
        return tables.real, tables.imag
    return tables if isinstance(tables, tuple) else None


def _has_dropout(layer: Any) -> bool:
    """Return whether the layer has dropout other than that of adapters."""
    for name, module in layer.named_modules():
        if isinstance(module, nn.Dropout) and module.p and ".lora_dropout." not in name:
            return True
    return bool(getattr(layer.self_attn, "attention_dropout", 0.0))
