"""The two halves of a decoder layer, each fused by itself: attention and MLP, from the norm before
them to the residual.

    attention:  x → norm → queries, keys, values → rotation → attention → output product → norm →
        branch
    MLP:        x + branch → norm → gate and up → unit → down → norm → branch

A half returns the residual and a branch that is still to be added to it: the next norm adds it in
its own pass. What attends is handed to the attention half. ``KeptHalf`` is a half as the class
computes it, beside one that is fused.

Shapes: T tokens of a pack, D model width, H query heads, K key/value heads, W head width; of latent
attention R latent, N and P widths of a head's plain and rotary part, V of its value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.kernels import fused_add_rmsnorm, fused_qk_rope, fused_rmsnorm
from chronicals.kernels.amax import Amax
from chronicals.kernels.glu import glu_of_both
from chronicals.kernels.qk_norm_rope import fused_qkv_norm_rope
from chronicals.kernels.qk_rope import fused_qkv_rope, heads_of
from chronicals.lora.merged_linear import Remake
from chronicals.memory import draws_numbers, runs_again, tiled
from chronicals.patching.forms import does_more
from chronicals.patching.fused_weights import Group, Unmerged
from chronicals.patching.gated_mlps import GatedMLPReads
from chronicals.patching.norms import RMSNormReads

RECOMPUTES = "_chronicals_recomputes"
"""Attribute of a layer whose norms and gated units are computed again in the backward pass."""

TILES = "_chronicals_tiles"
"""Attribute of a layer whose MLP takes its rows in tiles."""

OUT = ("o_proj",)
OF_QUERIES = ("q_b_proj",)
OF_KEYS_AND_VALUES = ("kv_b_proj",)
"""Names of the children that make these from their latents."""

Product = tuple[nn.Module, tuple[str, ...], Group]
"""The module whose children make one product, their names, and where their weights lie."""

Attend = Callable[..., Tensor]
"""``(q [T, H, W], k [T, K, W], v [T, K, W], scale=, window=, softcap=, sinks=, padding=)`` to
``[T, H, W]``.
"""


@dataclass(frozen=True)
class Norms:
    """The norms of a half, before and after its part: the child's name and how it is read, or
    None where there is none.
    """

    before: tuple[str, RMSNormReads] | None = None
    after: tuple[str, RMSNormReads] | None = None


@dataclass(frozen=True)
class AttentionReads:
    """How an attention module is read.

    Attributes:
        products: names of the children that make queries, keys and values.
        heads: how the norms of queries and of keys are read, or None.
        interleaved: how channels are paired for the rotation.
        laid: tables have a channel of each pair and are laid end to end (gpt-oss).
    """

    products: tuple[str, ...]
    heads: tuple[RMSNormReads, RMSNormReads] | None
    interleaved: bool = False
    laid: bool = False


@dataclass(frozen=True)
class LatentReads(AttentionReads):
    """How an attention module is read whose keys and values, and queries where there is a norm for
    them, come from latents.

    Attributes:
        products: names of the children that make queries or their latent, and the latent of keys
            and values beside the rotary key.
        of_queries, of_keys: how the norms of the latents are read; None where queries have none.
    """

    of_queries: RMSNormReads | None = None
    of_keys: RMSNormReads | None = None


@dataclass(frozen=True)
class Tokens:
    """Where the tokens of a pack stand, and what attends.

    Attributes:
        cos, sin: rotary tables ``[T, W]``, or half as wide.
        positions: ``[1, T]``, where the model has them.
        longest: bound on a document's length.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    longest: int
    attend: Attend


@dataclass(frozen=True)
class Gradient:
    """What the product that made a branch asks of whoever computes the branch's gradient.

    Attributes:
        padding: columns left free behind each row.
        amax: told the largest absolute value.
    """

    padding: int = 0
    amax: Amax | None = None


class FusedHalf(ABC):
    """A half of a decoder layer as it is now.

    Args:
        parts: modules of the half other than its norms and the linear layers of its products.
        dtype: of its input; its weights' own by default.

    Raises:
        Unmerged: something in it does more than was proved.
    """

    def __init__(
        self,
        layer: nn.Module,
        norms: Norms,
        first: Group,
        last: Group,
        parts: Iterable[nn.Module],
        dtype: torch.dtype | None,
    ):
        self.layer = layer
        self.norms = norms
        self.first = first
        self.last = last
        dtype = dtype or first.dtype
        for group in (first, last):
            if group.dtype != dtype:
                raise Unmerged(f"its input is {dtype}, its weights {group.dtype}")
        own = [getattr(layer, norm[0]) for norm in (norms.before, norms.after) if norm is not None]
        for module in (*parts, *own):
            if does_more(module):
                raise Unmerged(f"{type(module).__name__} has hooks or another forward")
        if any(
            p.dtype != dtype
            for norm in (*own, *self.norms_of_heads())
            for p in norm.parameters(recurse=False)
        ):
            raise Unmerged(f"its input is {dtype}, a norm's weight is not")
        self.multiplier = getattr(layer, "residual_multiplier", 1.0)
        self.recomputes = getattr(layer, RECOMPUTES, False)

    def norms_of_heads(self) -> list[nn.Module]:
        return []

    @abstractmethod
    def products(self) -> list[Product]:
        """Of each of its products the module, the layers by name, and where their weights lie."""

    def gradient(self, rows: int) -> Gradient:
        """What its last product asks of whoever computes the gradient of the branch."""
        return Gradient(self.last.padding, self.last.amaxes(rows)[1])

    def _before(
        self, x: Tensor, branch: Tensor | None, gradient: Gradient, amax: Amax | None
    ) -> tuple[Tensor, Tensor, Remake | None]:
        """What goes into the first product, the residual with ``branch`` added, and how to make
        the former of the latter.
        """
        if self.norms.before is None:
            total = x if branch is None else x + branch
            return total, total, None
        name, reads = self.norms.before
        weight, epsilon, offset = reads.of(getattr(self.layer, name), x)
        branch, residual = (x, None) if branch is None else (branch, x)
        paddings = (self.first.padding, gradient.padding)
        amaxes = (amax, gradient.amax)
        normed, total = fused_add_rmsnorm(
            branch, residual, weight, epsilon, offset, *paddings, *amaxes
        )

        def again(total: Tensor) -> Tensor:
            return fused_add_rmsnorm(
                total, None, weight, epsilon, offset, paddings[0], amax=_unheard(amax)
            )[0]

        return normed, total, Remake(again, total.detach()) if self.recomputes else None

    def _after(self, branch: Tensor) -> Tensor:
        if self.norms.after is not None:
            name, reads = self.norms.after
            branch = fused_rmsnorm(branch, *reads.of(getattr(self.layer, name), branch))
        return branch if self.multiplier == 1.0 else branch * self.multiplier


def _unheard(amax: Amax | None) -> Amax | None:
    """For what is made again: a kernel that finds a maximum and one that does not may differ in
    the last bit.
    """
    return None if amax is None else Amax()


class AttentionHalf(FusedHalf):
    """Norm, queries, keys and values in one product, rotation, attention as handed in, output
    product.
    """

    def __init__(
        self,
        layer: Any,
        attention: nn.Module,
        norms: Norms,
        reads: AttentionReads,
        dtype: torch.dtype | None = None,
    ):
        self.attention: Any = attention
        self.reads = reads
        qkv = Group(attention, reads.products)
        out = Group(attention, OUT)
        super().__init__(layer, norms, qkv, out, [attention, *self.norms_of_heads()], dtype)

    def norms_of_heads(self) -> list[nn.Module]:
        return [self.attention.q_norm, self.attention.k_norm] if self.reads.heads else []

    def products(self) -> list[Product]:
        return [(self.attention, self.reads.products, self.first), (self.attention, OUT, self.last)]

    def __call__(self, x: Tensor, tokens: Tokens, gradient: Gradient) -> tuple[Tensor, Tensor]:
        """The residual and the branch to be added to it, both ``[T, D]``.

        Args:
            x: ``[T, D]``.
            gradient: what the layer below asks of the gradient of x.
        """
        normed, x, remake = self._before(x, None, gradient, self.first.amaxes(len(x))[0])
        padded = self.norms.before is not None  # else it is what the caller gave
        cos, sin = (
            torch.cat((x, x), -1) if self.reads.laid else x for x in (tokens.cos, tokens.sin)
        )
        q, k, v = self._rotated(self.first(normed, remake, padded), cos, sin)
        attention = self.attention
        attended = tokens.attend(
            self._scaled_by_position(q, tokens),
            k,
            v,
            scale=attention.scaling,
            window=self._window(),
            softcap=getattr(attention, "attn_logit_softcapping", None),
            sinks=getattr(attention, "sinks", None),
            padding=self.last.padding,
        )
        return x, self._after(self.last(attended.flatten(1), kept=True))

    def _window(self) -> int | None:
        """Tokens that a query sees, itself included: the module's own number, or else its
        configuration's, which may be for some layers alone."""
        attention = self.attention
        config = self.attention.config
        if hasattr(attention, "sliding_window"):
            window: int | None = attention.sliding_window
            return window
        types = getattr(config, "layer_types", None)
        everywhere = not types or types[attention.layer_idx] == "sliding_attention"
        return getattr(config, "sliding_window", None) if everywhere else None

    def _scaled_by_position(self, q: Tensor, tokens: Tokens) -> Tensor:
        """Queries ``[T, H, W]``, larger the later they stand where the configuration says so
        (Ministral 3, after Llama 4).
        """
        rope: dict[str, Any] = getattr(self.attention.config, "rope_parameters", None) or {}
        beta = rope.get("llama_4_scaling_beta")
        if not beta or tokens.longest <= (early := rope["original_max_position_embeddings"]):
            return q
        assert tokens.positions is not None  # the class itself takes them from here
        factors = 1 + beta * torch.log1p(torch.floor(tokens.positions.squeeze(0) / early))
        return q * factors[:, None, None].to(q.dtype)

    def _rotated(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``[T, H or K, W]``, normed and rotated."""
        width = self.attention.head_dim
        interleaved = self.reads.interleaved
        of_heads = self.reads.heads
        config = self.attention.config
        padding = self.first.padding
        amax = self.first.amaxes(len(qkv))[1]
        heads = (
            config.num_attention_heads,
            config.num_key_value_heads,
        )  # two of a ModelShape, each time that a layer runs
        if of_heads is None and getattr(self.attention, "use_rope", True):
            return fused_qkv_rope(qkv, cos, sin, heads, interleaved, padding, amax)
        if of_heads is None:
            return heads_of(qkv, *heads)
        of_q, of_k = (reads.of(norm, qkv) for reads, norm in zip(of_heads, self.norms_of_heads()))
        if (
            of_q[0] is not None
            and of_k[0] is not None
            and len(of_q[0]) == width
            and of_q[1:] == of_k[1:]
        ):
            norms = of_q[0], of_k[0]
            return fused_qkv_norm_rope(
                qkv, *norms, cos, sin, heads, of_q[1], of_q[2], interleaved, padding, amax
            )
        q, k, v = qkv.split((heads[0] * width, heads[1] * width, heads[1] * width), 1)
        q, k = (fused_rmsnorm(x, *of).unflatten(1, (-1, width)) for x, of in ((q, of_q), (k, of_k)))
        return *fused_qk_rope(q, k, cos, sin, interleaved=interleaved), v.unflatten(1, (-1, width))


class LatentHalf(AttentionHalf):
    """The same with multi-head latent attention (DeepSeek-V2, 2024, equations 9 to 19): one
    product makes both latents and the rotary key that all heads share; a second one each makes
    queries, and keys and values, from the normed latents."""

    reads: LatentReads

    def __init__(
        self,
        layer: Any,
        attention: nn.Module,
        norms: Norms,
        reads: LatentReads,
        dtype: torch.dtype | None = None,
    ):
        self.q_b = None if reads.of_queries is None else Group(attention, OF_QUERIES)
        self.kv_b = Group(attention, OF_KEYS_AND_VALUES)
        super().__init__(layer, attention, norms, reads, dtype)
        if any(
            group.dtype != self.first.dtype for group in (self.q_b, self.kv_b) if group is not None
        ):
            raise Unmerged("the weights of its products differ in dtype")

    def norms_of_heads(self) -> list[nn.Module]:
        of_queries = [] if self.q_b is None else [self.attention.q_a_layernorm]
        return [*of_queries, self.attention.kv_a_layernorm]

    def products(self) -> list[Product]:
        made = [(OF_QUERIES, self.q_b), (OF_KEYS_AND_VALUES, self.kv_b)]
        return [
            *super().products(),
            *((self.attention, names, group) for names, group in made if group is not None),
        ]

    def _rotated(self, made: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys ``[T, H, N + P]``, rotated in their last P channels, and values ``[T,
        H, V]``.
        """
        config = self.attention.config
        heads = config.num_attention_heads
        plain = config.qk_nope_head_dim
        rotary = config.qk_rope_head_dim
        rank = config.kv_lora_rank
        value = config.v_head_dim
        queries, latent, key = made.split((made.shape[1] - rank - rotary, rank, rotary), 1)
        if self.q_b is not None and self.reads.of_queries is not None:
            queries = self.q_b(
                fused_rmsnorm(
                    queries, *self.reads.of_queries.of(self.attention.q_a_layernorm, queries)
                )
            )
        assert self.reads.of_keys is not None
        both = self.kv_b(
            fused_rmsnorm(latent, *self.reads.of_keys.of(self.attention.kv_a_layernorm, latent))
        )
        q, q_rotary = queries.unflatten(1, (heads, plain + rotary)).split((plain, rotary), 2)
        k, v = both.unflatten(1, (heads, plain + value)).split((plain, value), 2)
        if (
            self.reads.interleaved
        ):  # in whatever order a class leaves the channels: queries and keys have the same
            cos, sin = (x[:, : rotary // 2].repeat_interleave(2, 1) for x in (cos, sin))
        q_rotary, k_rotary = fused_qk_rope(
            q_rotary, key.unsqueeze(1), cos, sin, interleaved=self.reads.interleaved
        )
        return torch.cat((q, q_rotary), 2), torch.cat((k, k_rotary.expand(-1, heads, -1)), 2), v


class MLPHalf(FusedHalf):
    """Norm with the residual addition before it, gate and up in one product, gated unit, down."""

    def __init__(
        self,
        layer: Any,
        mlp: nn.Module,
        norms: Norms,
        reads: GatedMLPReads,
        dtype: torch.dtype | None = None,
    ):
        self.mlp = mlp
        self.reads = reads
        both = Group(mlp, reads.first)
        down = Group(mlp, (reads.down,))
        linears = [
            *both.linears,
            *down.linears,
        ]  # looked at by their groups, which know what waits in host memory
        super().__init__(
            layer, norms, both, down, [mlp, *(m for m in mlp.children() if m not in linears)], dtype
        )
        if reads.uncalled.changed(mlp):
            raise Unmerged(f"{type(mlp).__name__} has another activation")
        self.tiles = getattr(layer, TILES, False)

    def products(self) -> list[Product]:
        return [(self.mlp, self.reads.first, self.first), (self.mlp, (self.reads.down,), self.last)]

    def __call__(self, x: Tensor, branch: Tensor, gradient: Gradient) -> tuple[Tensor, Tensor]:
        """The residual with ``branch`` added, and the branch to be added to that; all ``[T, D]``.

        Args:
            gradient: what the maker of ``branch`` asks of its gradient.
        """
        amax = None if self.tiles else self.first.amaxes(len(x))[0]
        normed, x, remake = self._before(x, branch, gradient, amax)
        unread = runs_again() and self.norms.after is None
        return x, self._after(self._between(normed, remake, unread))

    def _between(self, x: Tensor, remake: Remake | None, unread: bool) -> Tensor:
        if not self.tiles:
            return self.last(*self._unit(x, remake), unread=unread)
        draws = self.layer.training and draws_numbers(self.mlp)
        return tiled(
            lambda x: self.last(*self._unit(x), unread=unread or runs_again()), x, draws, tells=True
        )

    def _unit(self, x: Tensor, remake: Remake | None = None) -> tuple[Tensor, Remake | None]:
        """The gated unit, and how to make it again."""
        both = self.first(x, remake, stays=True)
        activation = self.reads.activation
        padding = self.last.padding
        amax = self.last.amaxes(len(both))[0]
        gradient_amax = self.first.amaxes(len(both))[1]
        again = Remake(
            lambda both: glu_of_both(both, activation, padding, amax=_unheard(amax)), both.detach()
        )
        unit = glu_of_both(both, activation, padding, self.first.padding, amax, gradient_amax)
        return unit, again if self.recomputes else None


class KeptHalf:
    """A half as the class computes it: its norms and the part between them are called as modules.

    Args:
        part: takes ``[1, T, D]`` and returns a tensor of that shape, alone or first in a tuple.
    """

    def __init__(self, layer: Any, norms: Norms, part: Callable[[Tensor], Any]):
        self.layer = layer
        self.norms = norms
        self.part = part

    def __call__(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The residual with ``branch`` added, and the branch to be added to that; all ``[T,
        D]``.
        """
        x = x if branch is None else x + branch
        out = self.part(self._normed(self.norms.before, x.unsqueeze(0)))
        out = self._normed(self.norms.after, out if isinstance(out, Tensor) else out[0]).squeeze(0)
        multiplier = getattr(self.layer, "residual_multiplier", 1.0)
        return x, out if multiplier == 1.0 else out * multiplier

    def _normed(self, norm: tuple[str, RMSNormReads] | None, x: Tensor) -> Tensor:
        return x if norm is None else getattr(self.layer, norm[0])(x)
