"""The fused decoder layer over documents: an attention half and an MLP half (``halves.py``), each
fused if its form is known.

Norms stand before the branches (Llama and most), after them (OLMo 2), or both (Gemma); heads may be
normed, each by itself or all together. What a module is called in transformers' families tells its
role; that a half computes what the class computes is proved on a twin. A half of another form
(experts, a part with hooks) runs as its class does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from chronicals.attention import attend_split, document_attention, gather_keys
from chronicals.models.presentation import CACHES
from chronicals.patching.forms import FORM, Form, signature
from chronicals.patching.fused_weights import Unmerged, say_once
from chronicals.patching.gated_mlps import GatedMLPReads
from chronicals.patching.halves import (
    OUT,
    RECOMPUTES,
    AttentionHalf,
    AttentionReads,
    FusedHalf,
    Gradient,
    KeptHalf,
    LatentHalf,
    LatentReads,
    MLPHalf,
    Norms,
    Product,
    Tokens,
)
from chronicals.patching.norms import RMSNormReads
from chronicals.patching.rotary import LAID

CHECKPOINTS_CALLS = "__call__" in vars(GradientCheckpointingLayer)
"""Whether transformers recomputes a layer by what calls its forward; newer ones do it in the
class's forward itself.
"""

NAME = "decoder layer"
BY = "fused decoder layer"
ATTENTION_BY = "fused attention half"
MLP_BY = "fused MLP half"
"""What runs in place of a layer's forward: both halves, or one of them."""

ATTENTION_HALF = "attention half"
MLP_HALF = "MLP half"
"""As the report and a plan call them."""

ATTENTION = "self_attn"
MLP = "mlp"
QUERY_KEY_VALUE = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
LATENT = (("q_a_proj", "kv_a_proj_with_mqa"), ("q_proj", "kv_a_proj_with_mqa"))
"""Of latent attention: a latent of queries or queries themselves, and that of keys and values."""

ARRANGEMENTS: tuple[tuple[tuple[str | None, str | None], tuple[str | None, str | None]], ...] = (
    (
        ("input_layernorm", "post_attention_layernorm"),
        ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    ((None, "post_attention_layernorm"), (None, "post_feedforward_layernorm")),
    (("input_layernorm", None), ("post_attention_layernorm", None)),
)
"""Names of the norms before and after attention, and before and after the MLP; a layer has all
of one arrangement and no other norm."""

runs: Counter[str] = Counter()
"""How often a layer ran with both halves fused (``BY``), or with one."""


@dataclass(frozen=True)
class Anatomy:
    """What is read from a decoder layer.

    Attributes:
        norms: those of the attention half and those of the MLP half.
        attention, mlp: how the part of each half is read; None where its form is not known and its
            class computes it.
    """

    norms: tuple[Norms, Norms]
    attention: AttentionReads | None
    mlp: GatedMLPReads | None

    @property
    def by(self) -> str:
        """What runs in place of the layer's forward; empty where neither half is fused."""
        return _by(self.attention, self.mlp)

    def only(self, attention: bool, mlp: bool, interleaved: bool) -> Anatomy:
        """With these halves, where they are known, and channels paired so for the rotation."""
        of_attention = (
            replace(self.attention, interleaved=interleaved)
            if attention and self.attention is not None
            else None
        )
        return Anatomy(self.norms, of_attention, self.mlp if mlp else None)


def _by(attention: object | None, mlp: object | None) -> str:
    if attention is None:
        return "" if mlp is None else MLP_BY
    return ATTENTION_BY if mlp is None else BY


def layer_signature(layer: nn.Module) -> tuple:
    """What an instance must share with the one that was proved."""
    parts = [getattr(layer, name, None) for name in (ATTENTION, MLP)]
    return signature(layer), *(None if part is None else signature(part) for part in parts)


def read_layer(layer: nn.Module, forms: Mapping[tuple, tuple[str, Form]]) -> Anatomy | None:
    """The anatomy of ``layer`` by the forms that were proved of its parts, or None where it is
    built otherwise.
    """

    def reads(module: nn.Module | None) -> Any:
        _, form = forms.get(signature(module), (None, None)) if module is not None else (None, None)
        return None if form is None else form.reads

    attention = getattr(layer, ATTENTION, None)
    mlp = getattr(layer, MLP, None)
    known = {
        name: found
        for name, child in layer.named_children()
        if isinstance(found := reads(child), RMSNormReads)
    }
    arranged = next(
        (names for names in ARRANGEMENTS if {*names[0], *names[1]} - {None} == set(known)), None
    )
    if attention is None or mlp is None or arranged is None:
        return None
    before_and_after = [
        [None if name is None else (name, known[name]) for name in half] for half in arranged
    ]
    norms = Norms(*before_and_after[0]), Norms(*before_and_after[1])
    _, rotary = forms.get(signature(attention), ("", None))
    laid = rotary is not None and rotary.by.endswith(LAID)
    of_mlp = reads(mlp)
    return Anatomy(
        norms,
        _read_attention(attention, reads, laid),
        of_mlp if isinstance(of_mlp, GatedMLPReads) else None,
    )


def _read_attention(
    attention: nn.Module, reads: Callable[[nn.Module | None], Any], laid: bool
) -> AttentionReads | None:
    """By the names of its children; None where they are others."""

    def norms(*names: str) -> list[RMSNormReads | None]:
        found = [reads(getattr(attention, name, None)) for name in names]
        return [x if isinstance(x, RMSNormReads) else None for x in found]

    def products_of(known: tuple[tuple[str, ...], ...]) -> tuple[str, ...] | None:
        there = (
            names
            for names in known
            if all(getattr(attention, name, None) is not None for name in (*names, *OUT))
        )
        return next(there, None)

    if products := products_of(QUERY_KEY_VALUE):
        q, k = norms("q_norm", "k_norm")
        return AttentionReads(products, None if q is None or k is None else (q, k), laid=laid)
    if (products := products_of(LATENT)) is None:
        return None
    q, k = norms("q_a_layernorm", "kv_a_layernorm")
    by_latent = products == LATENT[0]
    if k is None or (by_latent and q is None):
        return None
    return LatentReads(products, None, laid=laid, of_queries=q if by_latent else None, of_keys=k)


def layer_form(anatomy: Anatomy) -> Form:
    """What runs in place of the forward of a layer of this anatomy."""
    return Form(anatomy.by, partial(_forward, anatomy))


def fuse_weights(model: nn.Module) -> None:
    """Bring the weights of fused layers to where one product finds them; else the first step does
    it.

    A weight's data then has another address: who keeps addresses must be told.
    """
    for _ in products_of_halves(model):
        pass  # a group moves its weights when it is made; why one cannot be made is said when its layer runs


def products_of_halves(model: nn.Module) -> Iterator[list[Product] | Unmerged]:
    """Of each half that should run fused its products, or why it does not; of a layer attention
    comes first.
    """
    for layer in model.modules():
        forward = getattr(vars(layer).get("forward"), "__func__", None)
        if not isinstance(forward, partial) or getattr(forward, FORM, None) not in (
            BY,
            ATTENTION_BY,
            MLP_BY,
        ):
            continue
        for half in _halves(forward.args[0], layer):
            if isinstance(half, FusedHalf):
                yield Unmerged("it has dropout") if _has_dropout(layer) else half.products()
            elif half is not None:
                yield half


def names_of_products(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """Of each product of several layers that fused halves make, the module and the layers by
    name.
    """
    for layer in model.modules():
        forward = getattr(vars(layer).get("forward"), "__func__", None)
        if not isinstance(forward, partial) or getattr(forward, FORM, None) not in (
            BY,
            ATTENTION_BY,
            MLP_BY,
        ):
            continue
        anatomy: Anatomy = forward.args[0]
        if anatomy.attention is not None and len(anatomy.attention.products) > 1:
            yield getattr(layer, ATTENTION), anatomy.attention.products
        if anatomy.mlp is not None and len(anatomy.mlp.first) > 1:
            yield getattr(layer, MLP), anatomy.mlp.first


def recompute_norms_and_units(model: nn.Module) -> None:
    """Fused halves compute their norms and gated units again in the backward pass instead of
    keeping their outputs, in layers that are not recomputed as a whole."""
    for layer in model.modules():
        if hasattr(layer, ATTENTION) and not getattr(layer, "gradient_checkpointing", False):
            setattr(layer, RECOMPUTES, True)


def _forward(
    anatomy: Anatomy, layer: Any, hidden_states: Tensor, *args: Any, **given: Any
) -> Tensor:
    own = type(layer).forward
    again = (
        layer.training and getattr(layer, "gradient_checkpointing", False) and not CHECKPOINTS_CALLS
    )
    if again and all(
        given.get(name) is None for name in CACHES
    ):  # else the class leaves the cache out
        once = partial(
            _run, anatomy, layer, own.__wrapped__, **given
        )  # the class's own, without its checkpoint
        return layer._gradient_checkpointing_func(once, hidden_states, *args)
    return _run(anatomy, layer, own, hidden_states, *args, **given)


def _run(
    anatomy: Anatomy, layer: Any, own: Callable, hidden_states: Tensor, *args: Any, **given: Any
) -> Tensor:
    bounds = given.get("cu_seq_lens_q")
    longest = given.get("max_length_q")
    if not args and bounds is not None and longest is not None:
        try:
            _check_input(layer, hidden_states, given)
        except Unmerged as reason:
            say_once(f"{type(layer).__name__} runs part by part: {reason}")
        else:
            attention, mlp = (
                _or_said(layer, half)
                for half in _halves(anatomy, layer, hidden_states.dtype, given)
            )
            if attention is not None or mlp is not None:
                runs[_by(attention, mlp)] += 1
                return _through(anatomy, layer, attention, mlp, hidden_states, given)
    return own(layer, hidden_states, *args, **given)


def _through(
    anatomy: Anatomy,
    layer: Any,
    attention: AttentionHalf | None,
    mlp: MLPHalf | None,
    hidden_states: Tensor,
    given: Mapping[str, Any],
) -> Tensor:
    """The layer's output ``[1, T, D]``, through its halves; of None the class's own."""
    x = hidden_states.squeeze(0)
    if attention is None:
        x, branch = KeptHalf(
            layer, anatomy.norms[0], lambda x: getattr(layer, ATTENTION)(hidden_states=x, **given)
        )(x)
    else:
        # the layer below is built alike: its down product wants the gradient as this one's does
        below = Gradient() if mlp is None else Gradient(mlp.last.padding)
        x, branch = attention(x, _tokens(given), below)
    if mlp is None:
        x, branch = KeptHalf(layer, anatomy.norms[1], getattr(layer, MLP))(x, branch)
    else:
        x, branch = mlp(x, branch, Gradient() if attention is None else attention.gradient(len(x)))
    return x.unsqueeze(0) + branch.unsqueeze(0)  # no view, on which hooks of FSDP could be lost


def _halves(
    anatomy: Anatomy,
    layer: Any,
    dtype: torch.dtype | None = None,
    given: Mapping[str, Any] | None = None,
) -> tuple[AttentionHalf | Unmerged | None, MLPHalf | Unmerged | None]:
    """The layer's halves as they are now, or why one that should be fused cannot be; None where
    the class computes it.
    """
    attention: AttentionHalf | Unmerged | None = None
    mlp: MLPHalf | Unmerged | None = None
    if anatomy.attention is not None:
        try:
            if given is not None and _tables(given) is None:
                raise Unmerged("it was given no rotary tables")
            reads = anatomy.attention
            module = getattr(layer, ATTENTION)
            if isinstance(reads, LatentReads):
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


def _or_said(layer: Any, half: Any) -> Any:
    """The half where it can run fused; else None, and the reason is logged once."""
    if isinstance(half, Unmerged):
        say_once(f"a half of {type(layer).__name__} runs part by part: {half}")
        return None
    return half


def _tokens(given: Mapping[str, Any]) -> Tokens:
    bounds: list[Any] = [
        given.get(name)
        for name in ("cu_seq_lens_q", "max_length_q", "cu_seq_lens_k", "max_length_k")
    ]
    flash = given.get("flash", True)
    keys = given.get("shared_keys")
    split = given.get("split_documents")

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        padding: int = 0,
        sinks: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        options["flash"] = flash
        of_heads = [] if sinks is None else [sinks]
        if split is not None:  # what is left free behind heads would have to be sent, too
            return attend_split(partial(_attend, options), q, k, v, split, *of_heads)
        if keys is not None:
            k = gather_keys(k, keys)
            v = gather_keys(v, keys)
        return _attend({**options, "padding": padding}, q, k, v, *bounds, *of_heads)

    tables = _tables(given)
    assert tables is not None
    cos, sin = (table.squeeze(0) for table in tables)
    longest = given["max_length_q"] if keys is None else keys.max_seqlen
    return Tokens(cos, sin, given.get("position_ids"), longest, attend)


def _tables(given: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines of the rotation, half as wide where they are complex numbers (DeepSeek
    V2); None if there are none.
    """
    tables = given.get("position_embeddings")
    if isinstance(tables, Tensor) and tables.is_complex():
        return tables.real, tables.imag
    return tables if isinstance(tables, tuple) else None


def _attend(
    options: Mapping[str, Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    max_q: int,
    cu_k: Tensor | None,
    max_k: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    return document_attention(q, k, v, cu_q, max_q, cu_k, max_k, sinks=sinks, **options)


def _check_input(layer: Any, x: Tensor, given: Mapping[str, Any]) -> None:
    """Raises Unmerged where something is asked that the fused layer does not do."""
    for name in (*CACHES, "attention_mask"):
        if given.get(name) is not None:
            raise Unmerged(f"it was given {name}")
    if len(x) != 1:
        raise Unmerged("its input is not one row")
    if torch.is_autocast_enabled(x.device.type):
        raise Unmerged("it runs under autocast")
    if layer.training and _has_dropout(layer):
        raise Unmerged("it has dropout")


def _has_dropout(layer: Any) -> bool:
    """Beside that of adapters."""
    drops = any(
        isinstance(module, nn.Dropout) and module.p and ".lora_dropout." not in name
        for name, module in layer.named_modules()
    )
    return drops or bool(getattr(layer.self_attn, "attention_dropout", 0.0))
