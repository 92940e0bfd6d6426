"""The fused decoder layer: norm → QKV → rotation → attention → output → norm → gate and up → unit → down, over documents.

Norms stand before the branches (Llama and most), after them (OLMo 2), or both (Gemma); heads may be normed, each by itself
or all together. One product makes queries, keys and values, one gate and up; adapters ride in them. What a module is
called in transformers' families tells its role; that the whole computes what the class computes is proved on a twin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from chronicals.attention import document_attention
from chronicals.kernels import fused_add_rmsnorm, fused_qk_rope, fused_rmsnorm
from chronicals.kernels.glu import glu_of_both
from chronicals.kernels.merged_linear import Remake
from chronicals.kernels.peak import Peak
from chronicals.kernels.qk_norm_rope import fused_qkv_norm_rope
from chronicals.kernels.qk_rope import fused_qkv_rope, heads_of
from chronicals.memory import draws_numbers, runs_again, tiled
from chronicals.models.presentation import CACHES
from chronicals.patching.forms import FORM, Form, does_more, signature
from chronicals.patching.gated_mlps import GatedMLPReads
from chronicals.patching.norms import RMSNormReads
from chronicals.patching.side_by_side import Group, Unmerged, say_once

CHECKPOINTS_CALLS = "__call__" in vars(GradientCheckpointingLayer)
"""Whether transformers recomputes a layer by what calls its forward; newer ones do it in the class's forward itself."""

RECOMPUTES = "_chronicals_recomputes"
"""Attribute of a layer that makes again what is cheap to make."""

TILES = "_chronicals_tiles"
"""Attribute of a layer whose MLP takes its rows in tiles."""

NAME, BY = "decoder layer", "fused decoder layer"
ATTENTION, MLP, OUT = "self_attn", "mlp", ("o_proj",)
QUERY_KEY_VALUE = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))

ARRANGEMENTS: tuple[dict[str, str], ...] = (
    {
        "before_attention": "input_layernorm",
        "after_attention": "post_attention_layernorm",
        "before_mlp": "pre_feedforward_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    },
    {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"},
    {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"},
)
"""Names of the norms by their place; the first of which all are there, and no other norm, is taken."""

runs = [0]
"""How often a layer ran fused."""


@dataclass(frozen=True)
class Anatomy:
    """What is read from a decoder layer.

    Attributes:
        norms: by place, the name of the child and how it is read.
        heads: how the norms of queries and of keys are read, or None.
        products: names of the children that make queries, keys and values.
        mlp: how the MLP is read.
        interleaved: how channels are paired for the rotation.
    """

    norms: Mapping[str, tuple[str, RMSNormReads]]
    heads: tuple[RMSNormReads, RMSNormReads] | None
    products: tuple[str, ...]
    mlp: GatedMLPReads
    interleaved: bool = False


def layer_signature(layer: nn.Module) -> tuple:
    """What an instance must share with the one that was proved."""
    parts = [getattr(layer, name, None) for name in (ATTENTION, MLP)]
    return signature(layer), *(None if part is None else signature(part) for part in parts)


def read_layer(layer: nn.Module, forms: Mapping[tuple, tuple[str, Form]]) -> Anatomy | None:
    """The anatomy of ``layer`` by the forms that were proved of its parts, or None where it is built otherwise."""

    def reads(module: nn.Module | None) -> Any:
        _, form = forms.get(signature(module), (None, None)) if module is not None else (None, None)
        return None if form is None else form.reads

    attention, mlp = getattr(layer, ATTENTION, None), getattr(layer, MLP, None)
    of_mlp = reads(mlp)
    if attention is None or not isinstance(of_mlp, GatedMLPReads):
        return None
    products = next((names for names in QUERY_KEY_VALUE if all(hasattr(attention, name) for name in names)), None)
    known = {name: reads(child) for name, child in layer.named_children() if isinstance(reads(child), RMSNormReads)}
    places = next((names for names in ARRANGEMENTS if set(names.values()) == set(known)), None)
    of_heads = [reads(getattr(attention, name, None)) for name in ("q_norm", "k_norm")]
    if products is None or places is None or not hasattr(attention, OUT[0]):
        return None
    heads = (of_heads[0], of_heads[1]) if all(isinstance(x, RMSNormReads) for x in of_heads) else None
    return Anatomy({place: (name, known[name]) for place, name in places.items()}, heads, products, of_mlp)


def layer_form(anatomy: Anatomy) -> Form:
    """What runs in place of the forward of a layer of this anatomy."""
    return Form(BY, partial(_forward, anatomy))


def lay_side_by_side(model: nn.Module) -> None:
    """Bring the weights of fused layers to where one product finds them; else the first step does it.

    A weight's data then has another address: who keeps addresses must be told.
    """
    for _ in groups_of_layers(model):
        pass  # to look is to lay; what cannot be is said when it runs


def groups_of_layers(model: nn.Module) -> Iterator[list[tuple[nn.Module, tuple[str, ...], Group]] | Unmerged]:
    """Of each layer that should run fused its products, or why it does not."""
    for layer in model.modules():
        forward = getattr(vars(layer).get("forward"), "__func__", None)
        if not isinstance(forward, partial) or getattr(forward, FORM, None) != BY:
            continue
        try:
            if _has_dropout(layer):
                raise Unmerged("it has dropout")
            fused = _Layer(forward.args[0], layer)
        except Unmerged as reason:
            yield reason
        else:
            yield fused.groups()


def recompute_norms_and_units(model: nn.Module) -> None:
    """Fused layers make what their norms and gated units give again in the backward pass instead of keeping it, those that are
    not made again as a whole."""
    for layer in model.modules():
        if hasattr(layer, ATTENTION) and not getattr(layer, "gradient_checkpointing", False):
            setattr(layer, RECOMPUTES, True)


def _forward(anatomy: Anatomy, layer: Any, hidden_states: Tensor, *args: Any, **given: Any) -> Tensor:
    own = type(layer).forward
    again = layer.training and getattr(layer, "gradient_checkpointing", False) and not CHECKPOINTS_CALLS
    if again and all(given.get(name) is None for name in CACHES):  # else the class leaves the cache out
        once = partial(_run, anatomy, layer, own.__wrapped__, **given)  # the class's own, without its checkpoint
        return layer._gradient_checkpointing_func(once, hidden_states, *args)
    return _run(anatomy, layer, own, hidden_states, *args, **given)


def _run(anatomy: Anatomy, layer: Any, own: Callable, hidden_states: Tensor, *args: Any, **given: Any) -> Tensor:
    bounds, longest = given.get("cu_seq_lens_q"), given.get("max_length_q")
    if not args and bounds is not None and longest is not None:
        try:
            _check_input(layer, hidden_states, given)
            fused = _Layer(anatomy, layer, hidden_states.dtype)
        except Unmerged as reason:
            say_once(f"{type(layer).__name__} runs part by part: {reason}")
        else:
            runs[0] += 1
            cos, sin = (table.squeeze(0) for table in given["position_embeddings"])
            flash = given.get("flash", True)
            out = fused(hidden_states.squeeze(0), cos, sin, bounds, longest, given.get("position_ids"), flash)
            return out.unsqueeze(0)  # an index would copy gradients
    return own(layer, hidden_states, *args, **given)


def _check_input(layer: Any, x: Tensor, given: Mapping[str, Any]) -> None:
    """Raises Unmerged where something is asked that the fused layer does not do."""
    for name in (*CACHES, "attention_mask"):
        if given.get(name) is not None:
            raise Unmerged(f"it was given {name}")
    if len(x) != 1 or not isinstance(given.get("position_embeddings"), tuple):
        raise Unmerged("its input is not one row with rotary tables")
    if torch.is_autocast_enabled(x.device.type):
        raise Unmerged("it runs under autocast")
    if layer.training and _has_dropout(layer):
        raise Unmerged("it has dropout")


def _has_dropout(layer: Any) -> bool:
    """Beside that of adapters."""
    drops = any(
        isinstance(module, nn.Dropout) and module.p and ".lora_dropout." not in name for name, module in layer.named_modules()
    )
    return drops or bool(getattr(layer.self_attn, "attention_dropout", 0.0))


def _unheard(peak: Peak | None) -> Peak | None:
    """For what is made again: a kernel that finds a maximum and one that does not may differ in the last bit."""
    return None if peak is None else Peak()


class _Layer:
    """A decoder layer as it is now: its groups of products and its numbers.

    What goes into a product, and the gradient that comes back to it, is made with room for its adapters; that of ``down`` by
    the first norm of the layer above, which is built alike.

    Args:
        dtype: of its input; its weights' own by default.
    """

    def __init__(self, anatomy: Anatomy, layer: Any, dtype: torch.dtype | None = None):
        self.anatomy, self.layer, self.attention = anatomy, layer, layer.self_attn
        self.qkv, self.out = Group(self.attention, anatomy.products), Group(self.attention, OUT)
        self.both, self.down = Group(layer.mlp, anatomy.mlp.first), Group(layer.mlp, (anatomy.mlp.down,))
        dtype = dtype or self.qkv.dtype
        for group in (self.qkv, self.out, self.both, self.down):
            if group.dtype != dtype:
                raise Unmerged(f"its input is {dtype}, its weights {group.dtype}")
        asked = [*self.both.linears, *self.down.linears]  # by their groups, which know what waits in host memory
        for module in (self.attention, layer.mlp, *layer.mlp.children(), *self._norms()):
            if module not in asked and does_more(module):
                raise Unmerged(f"{type(module).__name__} has hooks or another forward")
        if anatomy.mlp.uncalled.changed(layer.mlp):
            raise Unmerged(f"{type(layer.mlp).__name__} has another activation")
        if any(p.dtype != dtype for norm in self._norms() for p in norm.parameters(recurse=False)):
            raise Unmerged(f"its input is {dtype}, a norm's weight is not")
        self.multiplier = getattr(layer, "residual_multiplier", 1.0)
        self.recomputes, self.tiles = getattr(layer, RECOMPUTES, False), getattr(layer, TILES, False)

    def groups(self) -> list[tuple[nn.Module, tuple[str, ...], Group]]:
        """Whose children make a product, their names, and where it lies."""
        attention, mlp, reads = self.attention, self.layer.mlp, self.anatomy.mlp
        return [
            (attention, self.anatomy.products, self.qkv), (attention, OUT, self.out),
            (mlp, reads.first, self.both), (mlp, (reads.down,), self.down),
        ]  # fmt: skip

    def _norms(self) -> list[nn.Module]:
        of_heads = [self.attention.q_norm, self.attention.k_norm] if self.anatomy.heads else []
        return [getattr(self.layer, name) for name, _ in self.anatomy.norms.values()] + of_heads

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, cu: Tensor, longest: int, positions: Tensor | None = None, flash: bool = True
    ) -> Tensor:  # fmt: skip
        normed, x, remake = self._before("before_attention", x, None, self.qkv, None)
        roomy = "before_attention" in self.anatomy.norms  # else it is what the caller gave
        attended = self._attend(self.qkv(normed, remake, roomy), cos, sin, cu, longest, positions, flash)
        branch = self._after("after_attention", self.out(attended, kept=True))
        normed, x, remake = self._before("before_mlp", x, branch, self.both, self.out)
        unread = runs_again() and "after_mlp" not in self.anatomy.norms
        return x + self._after("after_mlp", self._mlp(normed, remake, unread))

    def _before(
        self, place: str, x: Tensor, branch: Tensor | None, group: Group, below: Group | None
    ) -> tuple[Tensor, Tensor, Remake | None]:
        """What goes into a branch, the residual, to which ``branch``, made by ``below``, is added, and how to make the former
        of the latter."""
        if place not in self.anatomy.norms:
            total = x if branch is None else x + branch
            return total, total, None
        name, reads = self.anatomy.norms[place]
        weight, epsilon, offset = reads.of(getattr(self.layer, name), x)
        branch, residual = (x, None) if branch is None else (branch, x)
        rooms = group.room, self.down.room if below is None else below.room
        whole = group is not self.both or not self.tiles
        peaks = group.peaks(len(x))[0] if whole else None, None if below is None else below.peaks(len(x))[1]
        normed, total = fused_add_rmsnorm(branch, residual, weight, epsilon, offset, *rooms, *peaks)

        def again(total: Tensor) -> Tensor:
            return fused_add_rmsnorm(total, None, weight, epsilon, offset, group.room, peak=_unheard(peaks[0]))[0]

        return normed, total, Remake(again, total.detach()) if self.recomputes else None

    def _mlp(self, x: Tensor, remake: Remake | None, unread: bool) -> Tensor:
        if not self.tiles:
            return self.down(*self._unit(self.both(x, remake)), unread=unread)
        draws = self.layer.training and draws_numbers(self.layer.mlp)
        return tiled(lambda x: self.down(*self._unit(self.both(x)), unread=unread or runs_again()), x, draws, tells=True)

    def _unit(self, both: Tensor) -> tuple[Tensor, Remake | None]:
        """The gated unit, and how to make it again."""
        activation, room = self.anatomy.mlp.activation, self.down.room
        peak, gradient_peak = self.down.peaks(len(both))[0], self.both.peaks(len(both))[1]
        again = Remake(lambda both: glu_of_both(both, activation, room, peak=_unheard(peak)), both.detach())
        unit = glu_of_both(both, activation, room, self.both.room, peak, gradient_peak)
        return unit, again if self.recomputes else None

    def _after(self, place: str, branch: Tensor) -> Tensor:
        if place in self.anatomy.norms:
            name, reads = self.anatomy.norms[place]
            branch = fused_rmsnorm(branch, *reads.of(getattr(self.layer, name), branch))
        return branch if self.multiplier == 1.0 else branch * self.multiplier

    def _attend(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, cu: Tensor, longest: int, positions: Tensor | None, flash: bool
    ) -> Tensor:  # fmt: skip
        attention, config = self.attention, self.attention.config
        q, k, v = self._turned(qkv, cos, sin)
        q = self._grown(q, positions, longest)
        window = attention.sliding_window if hasattr(attention, "sliding_window") else getattr(config, "sliding_window", None)
        out = document_attention(
            q, k, v, cu, longest, scale=attention.scaling, window=window,
            softcap=getattr(attention, "attn_logit_softcapping", None), flash=flash, room=self.out.room,
        )  # fmt: skip
        return out.flatten(1)

    def _grown(self, q: Tensor, positions: Tensor | None, longest: int) -> Tensor:
        """Queries ``[T, H, D]``, larger the later they stand where the configuration says so (Ministral 3, after Llama 4)."""
        rope: dict[str, Any] = getattr(self.attention.config, "rope_parameters", None) or {}
        beta = rope.get("llama_4_scaling_beta")
        if not beta or longest <= (early := rope["original_max_position_embeddings"]):
            return q
        assert positions is not None  # the class itself takes them from here
        factors = 1 + beta * torch.log1p(torch.floor(positions.squeeze(0) / early))
        return q * factors[:, None, None].to(q.dtype)

    def _turned(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``[T, H or K, D]``, normed and rotated."""
        width, interleaved = self.attention.head_dim, self.anatomy.interleaved
        config, peak = self.attention.config, self.qkv.peaks(len(qkv))[1]
        heads = config.num_attention_heads, config.num_key_value_heads
        if self.anatomy.heads is None and getattr(self.attention, "use_rope", True):
            return fused_qkv_rope(qkv, cos, sin, heads, interleaved, self.qkv.room, peak)
        if self.anatomy.heads is None:
            return heads_of(qkv, *heads)
        of_q, of_k = (
            reads.of(norm, qkv) for reads, norm in zip(self.anatomy.heads, (self.attention.q_norm, self.attention.k_norm))
        )
        if of_q[0] is not None and of_k[0] is not None and len(of_q[0]) == width and of_q[1:] == of_k[1:]:
            norms = of_q[0], of_k[0]
            return fused_qkv_norm_rope(qkv, *norms, cos, sin, heads, of_q[1], of_q[2], interleaved, self.qkv.room, peak)
        q, k, v = qkv.split((heads[0] * width, heads[1] * width, heads[1] * width), 1)
        q, k = (fused_rmsnorm(x, *of).unflatten(1, (-1, width)) for x, of in ((q, of_q), (k, of_k)))
        return *fused_qk_rope(q, k, cos, sin, interleaved=interleaved), v.unflatten(1, (-1, width))
