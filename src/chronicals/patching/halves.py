"""The two halves of a decoder layer, each fused by itself: from the norm before to the residual.

    attention:  x → norm → queries, keys, values → rotation → attention → output product → norm →
        branch
    MLP:        x + branch → norm → gate and up → unit → down → norm → branch

A half returns the residual and a branch that is still to be added to it: the next norm adds it in
its own pass. A residual in fp32, as passes of generation have it, gets a branch in fp32. The
attention half is given the function that attends. ``run_kept_half`` runs a half by the modules of
its class, beside one that is fused.

Shapes: T tokens of a pack, D model width, H query heads, K key/value heads, W head width. Latent
attention: R latent width, N and P widths of a head's plain and rotary part, V of its value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.kernels import fused_add_rmsnorm, fused_qk_rope, fused_rmsnorm
from chronicals.kernels.decode_attention import UnrotatedHeads
from chronicals.kernels.fp8 import Amax
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

OUTPUT_PROJECTION = ("o_proj",)

HEAD_NORMS = ("q_norm", "k_norm")
"""Names of the children that norm queries and keys."""

GROWING_QUERIES = "llama_4_scaling_beta"
"""Rotary parameter of models whose queries grow with the position (Ministral 3, after Llama 4)."""

QUERY_UP_PROJECTION = ("q_b_proj",)
KEY_VALUE_UP_PROJECTION = ("kv_b_proj",)
"""Names of the children of latent attention that make queries, keys and values from latents."""

FusedProduct = tuple[nn.Module, tuple[str, ...], Group]
"""A product of several linear layers: the module, the names of its children, and their weights."""

AttendFunction = Callable[..., Tensor]
"""A function of q ``[T, H, W]``, k and v ``[T, K, W]`` that returns ``[T, H, W]``.

Its options are scale, window, softcap, sinks and padding.
"""


@dataclass(frozen=True)
class HalfNorms:
    """The norms of a half.

    Attributes:
        before, after: name of the child and how it is read, or None if there is no such norm.
    """

    before: tuple[str, RMSNormReads] | None = None
    after: tuple[str, RMSNormReads] | None = None


@dataclass(frozen=True)
class AttentionReads:
    """The parts of an attention module.

    Attributes:
        products: names of the children that make queries, keys and values.
        head_norms: how the norms of queries and of keys are read, or None.
        interleaved: whether the rotation pairs neighbouring channels.
        half_tables: whether rotary tables have one channel for each pair, W / 2 in all (gpt-oss).
    """

    products: tuple[str, ...]
    head_norms: tuple[RMSNormReads, RMSNormReads] | None
    interleaved: bool = False
    half_tables: bool = False


@dataclass(frozen=True)
class LatentReads(AttentionReads):
    """The parts of a module of multi-head latent attention.

    Attributes:
        products: names of the children that make queries or their latent, and the latent of keys
            and values beside the rotary key.
        query_norm: how the norm of the queries' latent is read; None if queries have no latent.
        key_value_norm: how the norm of the latent of keys and values is read.
    """

    query_norm: RMSNormReads | None = None
    key_value_norm: RMSNormReads | None = None


@dataclass(frozen=True)
class PackedTokens:
    """Positions of the tokens of a pack, and the function that attends.

    Attributes:
        cos, sin: rotary tables ``[T, W]`` or ``[T, W / 2]``.
        positions: ``[1, T]``, or None if the model was given none.
        longest: upper bound of a document's length.
        attend: computes attention.
        together: number of key heads that must attend in one call, or a divisor of it.
        attend_unrotated: computes attention of heads that it rotates itself, or returns None where it
            cannot; None in passes that have no such function.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    longest: int
    attend: AttendFunction
    together: int = 1
    attend_unrotated: Callable[..., Tensor | None] | None = None

    def rows(self, part: slice) -> PackedTokens:
        """Return the positions of some rows; ``attend`` still needs all of them."""
        positions = None if self.positions is None else self.positions[:, part]
        return replace(self, cos=self.cos[part], sin=self.sin[part], positions=positions)


@dataclass(frozen=True)
class GradientRequest:
    """The wishes of the product that made a branch, for the kernel that computes its gradient.

    Attributes:
        padding: columns to be left free behind each row.
        amax: cell for the largest absolute value, or None.
    """

    padding: int = 0
    amax: Amax | None = None


class FusedHalf:
    """A half of a decoder layer, read from the layer as it is now.

    Args:
        layer: the decoder layer.
        norms: its norms around this half.
        products: its products; the first takes the normed input, the second makes the branch.
        inner_norms: norms within the half: of heads or of latents.
        parts: modules of the half other than these norms and the linear layers of its products.
        dtype: dtype of its input; by default that of its weights.

    Raises:
        Unmerged: a module of the half does more than was proved.
    """

    def __init__(
        self,
        layer: nn.Module,
        norms: HalfNorms,
        products: list[FusedProduct],
        inner_norms: list[nn.Module],
        parts: Iterable[nn.Module],
        dtype: torch.dtype | None,
    ):
        self.layer = layer
        self.norms = norms
        self.products = products
        self.inner_norms = inner_norms
        self.first, self.last = (group for _, _, group in products)
        dtype = dtype or self.first.dtype
        for group in (self.first, self.last):
            if group.dtype != dtype:
                raise Unmerged(f"its input is {dtype}, its weights {group.dtype}")
        outer_norms = [
            getattr(layer, norm[0]) for norm in (norms.before, norms.after) if norm is not None
        ]
        for module in (*parts, *inner_norms, *outer_norms):
            if does_more(module):
                raise Unmerged(f"{type(module).__name__} has hooks or another forward")
        for norm in (*outer_norms, *inner_norms):
            if any(p.dtype != dtype for p in norm.parameters(recurse=False)):
                raise Unmerged(f"its input is {dtype}, a norm's weight is not")
        self.multiplier = getattr(layer, "residual_multiplier", 1.0)
        self.recomputes = getattr(layer, RECOMPUTES, False)

    def _norm_before(
        self, x: Tensor, branch: Tensor | None, gradient: GradientRequest, amax: Amax | None
    ) -> tuple[Tensor, Tensor, Remake | None]:
        """Return the input of the first product, the residual, and how to make the input again.

        The residual has ``branch`` added. The input is made again from it; the third is None if
        the input is saved.
        """
        if self.norms.before is None:
            total = x if branch is None else x + branch
            return total, total, None
        name, reads = self.norms.before
        weight, epsilon, offset = reads.arguments(getattr(self.layer, name), x)
        residual = None if branch is None else x
        padding = self.first.padding
        normed, total = fused_add_rmsnorm(
            x if branch is None else branch,
            residual,
            weight,
            epsilon,
            offset,
            padding,
            gradient.padding,
            amax,
            gradient.amax,
            self.first.dtype,  # also of a residual in fp32, as passes of generation have it
        )
        if not self.recomputes:
            return normed, total, None

        def norm_again(total: Tensor) -> Tensor:
            # A kernel that finds a maximum may differ in the last bit from one that does not, so a
            # tensor is computed again by the same kernel, and its maximum ignored.
            unread = None if amax is None else Amax()
            return fused_add_rmsnorm(total, None, weight, epsilon, offset, padding, amax=unread)[0]

        return normed, total, Remake(norm_again, total.detach())

    def _norm_after(self, branch: Tensor) -> Tensor:
        """Return the branch after its norm, times the multiplier of the residual."""
        if self.norms.after is not None:
            name, reads = self.norms.after
            branch = fused_rmsnorm(branch, *reads.arguments(getattr(self.layer, name), branch))
        return branch if self.multiplier == 1.0 else branch * self.multiplier


class AttentionHalf(FusedHalf):
    """Norm, queries, keys and values in one product, rotation, attention, output product.

    Args:
        layer: the decoder layer.
        attention: its attention module.
        norms: its norms around attention.
        reads: how the attention module is read.
        dtype: dtype of its input; by default that of its weights.
        latent_norms: norms of latents, in place of those of heads.

    Attributes:
        counts: H and K.
    """

    def __init__(
        self,
        layer: Any,
        attention: Any,
        norms: HalfNorms,
        reads: AttentionReads,
        dtype: torch.dtype | None = None,
        latent_norms: Sequence[nn.Module] = (),
    ):
        self.attention = attention
        self.reads = reads
        products: list[FusedProduct] = [
            (attention, names, Group(attention, names))
            for names in (reads.products, OUTPUT_PROJECTION)
        ]
        # two fields of a ModelShape, without building one each time that a layer runs
        config = attention.config
        self.counts: tuple[int, int] = (config.num_attention_heads, config.num_key_value_heads)
        inner_norms = list(latent_norms)
        if reads.head_norms is not None:
            inner_norms = [getattr(attention, name) for name in HEAD_NORMS]
        super().__init__(layer, norms, products, inner_norms, [attention], dtype)

    def __call__(
        self, x: Tensor, tokens: PackedTokens, gradient: GradientRequest
    ) -> tuple[Tensor, Tensor]:
        """Return the residual and the branch to be added to it, both ``[T, D]``.

        Args:
            x: ``[T, D]``.
            tokens: positions of the rows of x.
            gradient: what the layer below asks of the gradient of x.
        """
        if tokens.attend_unrotated is not None:
            first, x = self._first_product(x, gradient)
            return x, self.branch(self.attend_to_product(first, tokens), x.dtype)
        # Nothing holds the first product while attention runs, if heads are normed apart from it.
        q, k, v, x = self.heads(x, tokens, gradient)
        return x, self.branch(self.attend(q, k, v, tokens), x.dtype)

    def heads(
        self,
        x: Tensor,
        tokens: PackedTokens,
        gradient: GradientRequest,
        skip_output: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values as they attend, and the residual.

        They are ``[T, H or K, W]``, normed and rotated. A row depends on its own row of x only.

        Args:
            x: ``[T, D]``.
            tokens: positions of the rows of x.
            gradient: what the layer below asks of the gradient of x.
            skip_output: only the backward pass is wanted; see ``merged_linear``.
        """
        first, x = self._first_product(x, gradient, skip_output and self.rotates_alone)
        return *self.positioned(first, tokens), x

    def _first_product(
        self, x: Tensor, gradient: GradientRequest, skip_output: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the output of the first product, and the residual; arguments are those of ``heads``."""
        normed, x, remake = self._norm_before(x, None, gradient, self.first.amaxes(len(x))[0])
        padded = self.norms.before is not None  # else x is the caller's tensor, without padding
        return self.first(normed, remake, padded, skip_output=skip_output), x

    def attend_to_product(self, first: Tensor, tokens: PackedTokens) -> Tensor:
        """Return what attention gives, ``[T, H, W]``, for an output of the first product."""
        if tokens.attend_unrotated is not None:
            new = self.unrotated(first, tokens)
            options = {**self.scores, "padding": self.last.padding}
            attended = None if new is None else tokens.attend_unrotated(new, **options)
            if attended is not None:
                return attended
        return self.attend(*self.positioned(first, tokens), tokens)

    def unrotated(self, first: Tensor, tokens: PackedTokens) -> UnrotatedHeads | None:
        """Return the heads of the first product's output as they are, and how they are turned.

        None where they are turned in another way than ``UnrotatedHeads`` says.
        """
        rope: dict[str, Any] = getattr(self.attention.config, "rope_parameters", None) or {}
        usual = getattr(self.attention, "use_rope", True) and not rope.get(GROWING_QUERIES)
        if not usual or self.reads.interleaved:
            return None
        given = first, tokens.cos, tokens.sin, self.counts
        if self.reads.head_norms is None:
            return UnrotatedHeads(*given)
        norms = self._alike_norms(first)
        return None if norms is None else UnrotatedHeads(*given, *norms)

    def positioned(self, first: Tensor, tokens: PackedTokens) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values ``[T, H or K, W]``, normed and rotated.

        Args:
            first: output of the first product.
            tokens: positions of the rows.
        """
        cos = tokens.cos
        sin = tokens.sin
        if self.reads.half_tables:
            cos = torch.cat((cos, cos), -1)
            sin = torch.cat((sin, sin), -1)
        q, k, v = self._rotated(first, cos, sin)
        # a factor that grows with the position, in some configurations (Ministral 3, after Llama 4)
        rope: dict[str, Any] = getattr(self.attention.config, "rope_parameters", None) or {}
        beta = rope.get(GROWING_QUERIES)
        if beta and tokens.longest > rope["original_max_position_embeddings"]:
            assert tokens.positions is not None  # the class computes the factor from them, too
            trained_length = rope["original_max_position_embeddings"]
            steps = torch.floor(tokens.positions.squeeze(0) / trained_length)
            factors = 1 + beta * torch.log1p(steps)
            q = q * factors[:, None, None].to(q.dtype)
        return q, k, v

    @property
    def rotates_alone(self) -> bool:
        """True if nothing between the first product and attention reads what the product makes.

        A rotation is linear, and its gradient needs the tables only.
        """
        return not self.inner_norms

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tokens: PackedTokens,
        heads: slice = slice(None),
        padding: int | None = None,
    ) -> Tensor:
        """Return what attention gives, ``[T, H, W]``.

        Args:
            q: queries, of all heads or of some.
            k: keys of these.
            v: values of these.
            tokens: how they attend.
            heads: which of the query heads they are.
            padding: columns to be left free behind each row; by default as many as the output
                product asks for.
        """
        scores = self.scores
        if scores["sinks"] is not None:
            scores["sinks"] = scores["sinks"][heads]
        room = self.last.padding if padding is None else padding
        return tokens.attend(q, k, v, **scores, padding=room)

    @property
    def scores(self) -> dict[str, Any]:
        """Scale, window, softcap and sinks of attention, by their names in ``AttendFunction``."""
        attention = self.attention
        # the window of the module, or of its configuration, which may be for some layers only
        types = getattr(attention.config, "layer_types", None)
        if hasattr(attention, "sliding_window"):
            window = attention.sliding_window
        elif types and types[attention.layer_idx] != "sliding_attention":
            window = None
        else:
            window = getattr(attention.config, "sliding_window", None)
        return {
            "scale": attention.scaling,
            "window": window,
            "softcap": getattr(attention, "attn_logit_softcapping", None),
            "sinks": getattr(attention, "sinks", None),
        }

    def branch(self, attended: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the branch that is added to the residual, ``[T, D]``, of what attention gave.

        Args:
            attended: ``[T, H, W]``.
            dtype: dtype of the residual; by default that of ``attended``.
        """
        return self._norm_after(self.last(attended.flatten(1), x_is_saved=True, dtype=dtype))

    def _alike_norms(self, qkv: Tensor) -> tuple[tuple[Tensor, Tensor], float, float] | None:
        """Return weights of the norms of queries and keys, their epsilon and offset.

        None unless each head is normed by itself, and both norms have the same epsilon and offset.
        """
        assert self.reads.head_norms is not None
        q_norm, k_norm = (
            reads.arguments(norm, qkv)
            for reads, norm in zip(self.reads.head_norms, self.inner_norms)
        )
        q_weight, epsilon, offset = q_norm
        k_weight = k_norm[0]
        if q_weight is None or k_weight is None or k_norm[1:] != (epsilon, offset):
            return None
        if len(q_weight) != self.attention.head_dim:
            return None
        return (q_weight, k_weight), epsilon, offset

    def _rotated(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values ``[T, H or K, W]``, normed and rotated.

        Args:
            qkv: ``[T, (H + 2 K) W]``.
            cos: rotary table of cosines, ``[T, W]``.
            sin: rotary table of sines, ``[T, W]``.
        """
        width = self.attention.head_dim
        interleaved = self.reads.interleaved
        head_norms = self.reads.head_norms
        padding = self.first.padding
        amax = self.first.amaxes(len(qkv))[1]
        heads = self.counts
        if head_norms is None and getattr(self.attention, "use_rope", True):
            return fused_qkv_rope(qkv, cos, sin, heads, interleaved, padding, amax)
        if head_norms is None:
            return heads_of(qkv, *heads)
        alike = self._alike_norms(qkv)
        if alike is not None:
            weights, epsilon, offset = alike
            return fused_qkv_norm_rope(
                qkv,
                *weights,
                cos,
                sin,
                heads,
                epsilon,
                offset,
                interleaved,
                padding,
                amax,
            )
        q_norm, k_norm = (
            reads.arguments(norm, qkv) for reads, norm in zip(head_norms, self.inner_norms)
        )
        q, k, v = qkv.split((heads[0] * width, heads[1] * width, heads[1] * width), 1)
        q = fused_rmsnorm(q, *q_norm).unflatten(1, (-1, width))
        k = fused_rmsnorm(k, *k_norm).unflatten(1, (-1, width))
        q, k = fused_qk_rope(q, k, cos, sin, interleaved=interleaved)
        return q, k, v.unflatten(1, (-1, width))


class LatentHalf(AttentionHalf):
    """Multi-head latent attention (DeepSeek-V2, 2024, equations 9 to 19).

    Its norms and products before and after are those of ``AttentionHalf``. One product makes both
    latents and the rotary key that all heads share. A second product makes queries from their
    normed latent, and a third makes keys and values.
    """

    reads: LatentReads

    def __init__(
        self,
        layer: Any,
        attention: Any,
        norms: HalfNorms,
        reads: LatentReads,
        dtype: torch.dtype | None = None,
    ):
        self.query_up: Group | None = None
        latent_norms = [attention.kv_a_layernorm]
        up_products: list[FusedProduct] = []
        if reads.query_norm is not None:
            self.query_up = Group(attention, QUERY_UP_PROJECTION)
            latent_norms.insert(0, attention.q_a_layernorm)
            up_products.append((attention, QUERY_UP_PROJECTION, self.query_up))
        self.key_value_up = Group(attention, KEY_VALUE_UP_PROJECTION)
        up_products.append((attention, KEY_VALUE_UP_PROJECTION, self.key_value_up))
        super().__init__(layer, attention, norms, reads, dtype, latent_norms)
        self.counts = (self.counts[0], self.counts[0])  # each query head has a key head
        for _, _, group in up_products:
            if group.dtype != self.first.dtype:
                raise Unmerged("the weights of its products differ in dtype")
        self.products += up_products

    def unrotated(self, first: Tensor, tokens: PackedTokens) -> None:
        """Return None: heads are made of latents."""

    def _rotated(self, latents: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys ``[T, H, N + P]``, and values ``[T, H, V]``.

        Queries and keys are rotated in their last P channels.

        Args:
            latents: queries or their latent, the latent of keys and values ``[T, R]`` and the
                rotary key ``[T, P]``, side by side.
            cos: rotary table of cosines, ``[T, P]``.
            sin: rotary table of sines, ``[T, P]``.
        """
        attention = self.attention
        config = attention.config
        heads = config.num_attention_heads
        plain = config.qk_nope_head_dim
        rotary = config.qk_rope_head_dim
        rank = config.kv_lora_rank
        value = config.v_head_dim
        queries, latent, key = latents.split((latents.shape[1] - rank - rotary, rank, rotary), 1)
        query_norm = self.reads.query_norm
        if self.query_up is not None and query_norm is not None:
            arguments = query_norm.arguments(attention.q_a_layernorm, queries)
            queries = self.query_up(fused_rmsnorm(queries, *arguments))
        key_value_norm = self.reads.key_value_norm
        assert key_value_norm is not None
        arguments = key_value_norm.arguments(attention.kv_a_layernorm, latent)
        keys_and_values = self.key_value_up(fused_rmsnorm(latent, *arguments))
        q, q_rotary = queries.unflatten(1, (heads, plain + rotary)).split((plain, rotary), 2)
        k, v = keys_and_values.unflatten(1, (heads, plain + value)).split((plain, value), 2)
        if self.reads.interleaved:
            # The class may leave the channels of queries and keys in another order; their products
            # are the same, since both have that order.
            cos = cos[:, : rotary // 2].repeat_interleave(2, 1)
            sin = sin[:, : rotary // 2].repeat_interleave(2, 1)
        q_rotary, k_rotary = fused_qk_rope(
            q_rotary, key.unsqueeze(1), cos, sin, interleaved=self.reads.interleaved
        )
        q = torch.cat((q, q_rotary), 2)
        k = torch.cat((k, k_rotary.expand(-1, heads, -1)), 2)
        return q, k, v


class MLPHalf(FusedHalf):
    """Residual addition and norm, gate and up in one product, gated unit, down product.

    Args:
        layer: the decoder layer.
        mlp: its MLP.
        norms: its norms around the MLP.
        reads: how the MLP is read.
        dtype: dtype of its input; by default that of its weights.
    """

    def __init__(
        self,
        layer: Any,
        mlp: nn.Module,
        norms: HalfNorms,
        reads: GatedMLPReads,
        dtype: torch.dtype | None = None,
    ):
        self.mlp = mlp
        self.reads = reads
        gate_and_up = Group(mlp, reads.first)
        down = Group(mlp, (reads.down,))
        # the groups have checked the linear layers, and know which weights wait in host memory
        linears = [*gate_and_up.linears, *down.linears]
        parts = [mlp, *(module for module in mlp.children() if module not in linears)]
        products = [(mlp, reads.first, gate_and_up), (mlp, (reads.down,), down)]
        super().__init__(layer, norms, products, [], parts, dtype)
        if reads.uncalled.changed(mlp):
            raise Unmerged(f"{type(mlp).__name__} has another activation")
        self.tiles = getattr(layer, TILES, False)

    def __call__(
        self, x: Tensor, branch: Tensor, gradient: GradientRequest
    ) -> tuple[Tensor, Tensor]:
        """Return the residual with ``branch`` added, and the next branch; all ``[T, D]``.

        Args:
            x: the residual.
            branch: the branch of the half before.
            gradient: what the product that made ``branch`` asks of its gradient.
        """
        amax = None if self.tiles else self.first.amaxes(len(x))[0]
        normed, x, remake = self._norm_before(x, branch, gradient, amax)
        # a recomputation for the backward pass does not read the last output, unless a norm does
        skip_output = runs_again() and self.norms.after is None
        if not self.tiles:
            unit, remake = self._gated_unit(normed, remake)
            branch = self.last(unit, remake, skip_output=skip_output, dtype=x.dtype)
            del unit  # before the norm makes a tensor of its own
            return x, self._norm_after(branch)

        dtype = x.dtype  # a tile that held x would keep it until the backward pass

        def tile_output(rows: Tensor) -> Tensor:
            unit, remake = self._gated_unit(rows)
            again = skip_output or runs_again()
            return self.last(unit, remake, skip_output=again, dtype=dtype)

        draws = self.layer.training and draws_numbers(self.mlp)
        return x, self._norm_after(tiled(tile_output, normed, draws, tells=True))

    def _gated_unit(self, x: Tensor, remake: Remake | None = None) -> tuple[Tensor, Remake | None]:
        """Return the gated unit of x, and how to compute it again (None if it is saved)."""
        both = self.first(x, remake, output_is_saved=True)
        activation = self.reads.activation
        padding = self.last.padding
        amax = self.last.amaxes(len(both))[0]
        gradient_amax = self.first.amaxes(len(both))[1]
        unit = glu_of_both(both, activation, padding, self.first.padding, amax, gradient_amax)

        def unit_again(both: Tensor) -> Tensor:
            unread = None if amax is None else Amax()  # by the same kernel: see ``norm_again``
            return glu_of_both(both, activation, padding, amax=unread)

        remake = Remake(unit_again, both.detach())
        return unit, remake if self.recomputes else None


def run_kept_half(
    layer: Any,
    norms: HalfNorms,
    part: Callable[[Tensor], Any],
    x: Tensor,
    branch: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run a half as its class does: its norms and the part between them are called as modules.

    Args:
        layer: the decoder layer.
        norms: its norms around this half.
        part: takes ``[1, T, D]`` and returns a tensor of that shape, or a tuple that begins with
            one.
        x: the residual.
        branch: the branch of the half before, or None.

    Returns:
        The residual with ``branch`` added, and the next branch; both ``[T, D]``.
    """
    x = x if branch is None else x + branch
    out = x.unsqueeze(0)
    if norms.before is not None:
        out = getattr(layer, norms.before[0])(out)
    out = part(out)
    out = out if isinstance(out, Tensor) else out[0]
    if norms.after is not None:
        out = getattr(layer, norms.after[0])(out)
    out = out.squeeze(0)
    multiplier = getattr(layer, "residual_multiplier", 1.0)
    return x, out if multiplier == 1.0 else out * multiplier
