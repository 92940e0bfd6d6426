"""Forward passes of a model's own modules that read and write pages of keys and values.

The attention function of transformers' interface is replaced by a seam, as in training on packs.
The function gets the new tokens' queries, keys and values from the attention module, writes keys
and values to the module's pages, and attends over the pages. The pass itself travels to the modules
as an argument, ``PASS``. The first pass over a model, ``Probe``, finds its attention modules and
what they store.

Latent attention (DeepSeek-V2, arXiv 2405.04434) stores the latent c and one rotary key for all
heads. Their products with W_UK and W_UV go to the query and the output ("absorbed"), so a latent
layer attends like one with a single key head, whose key is [c; k^R] and whose value is c.

Shapes: T new tokens, H query heads, K key heads, D and V widths of a key and a value, R width of a
latent, N and P widths of the plain and the rotary part of a key.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from chronicals.attention import attend_pages, document_attention
from chronicals.generation.pages import LayerPages, LayerSizes
from chronicals.kernels.decode_attention import (
    UnrotatedHeads,
    decode_attention,
    takes_unrotated,
)
from chronicals.kernels.paged_attention import SharedPages
from chronicals.models import attention_seam
from chronicals.models.attention_seam import PASS, Scores, SoleAttention

_ATTENTION = "chronicals_pages"
"""Name in transformers' table of attention functions; no mask function has it, so none is made."""

EXPANSION = "kv_b_proj"
"""The layer of latent attention that makes keys and values from the latent (W_UK and W_UV)."""

PROBED_TOKENS = 3
"""Tokens of a probe: more than one, so that heads and tokens are not mistaken for each other."""

LATENT_TOLERANCE = 0.05
"""Allowed error of keys and values that are computed again from latents, relative to the largest.

Rounding in bf16 gives up to 1e-2, another formula 1.
"""


class Pass(Protocol):
    """One forward pass over pages.

    Attributes:
        residuals: dtype of the residual that fused decoder layers hand on, of those that can take it
            in fp32.
    """

    @property
    def residuals(self) -> Mapping[nn.Module, torch.dtype]:
        """See above."""
        ...

    def attend(
        self, module: nn.Module, q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor, scores: Scores
    ) -> Tensor:
        """Return the output ``[T, H, V]`` of one attention module."""

    def attend_unrotated(
        self, module: nn.Module, new: UnrotatedHeads, scores: Scores
    ) -> Tensor | None:
        """Return the output of one attention module for heads that are not rotated yet.

        None if the pass cannot rotate them; then ``attend`` is called.
        """


def _over_pages(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend over pages, by transformers' interface.

    Queries are ``[1, H, T, D]``, keys and values ``[1, K, T, D]``, the output is ``[1, T, H, D]``.
    """
    over: Pass | None = options.get(PASS)
    if over is None or attention_mask is not None or dropout:
        name = type(module).__name__
        raise ValueError(f"{name} passes no pages on to its attention, or a mask, or drops out")
    q_THD, k_TKD, v_TKV = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    scale = q_THD.shape[-1] ** -0.5 if scaling is None else scaling
    scores = Scores(scale, sliding_window, softcap, s_aux)
    return over.attend(module, q_THD, k_TKD, v_TKV, scores)[None], None


AttentionInterface.register(_ATTENTION, _over_pages)


OVER_PAGES = SoleAttention("pages", _over_pages, _ATTENTION)
"""A seam whose attention runs over pages."""


class Latents:
    """The latents of the current pass, and the weights that make keys and values of them.

    Attributes:
        current: ``[T, R]`` by attention module, as its expansion was given them.
    """

    def __init__(self, model: nn.Module):
        self.current: dict[nn.Module, Tensor] = {}
        self._weights: dict[nn.Module, Tensor] = {}
        self._modules = [module for module in model.modules() if hasattr(module, EXPANSION)]
        self._hooks: list[Any] = []

    def install(self) -> None:
        """Keep what the expansions are given from now on."""
        for module in self._modules:

            def keep(_: nn.Module, given: tuple, module: nn.Module = module) -> None:
                self.current[module] = given[0].reshape(-1, given[0].shape[-1])

            self._hooks.append(getattr(module, EXPANSION).register_forward_pre_hook(keep))

    def remove(self) -> None:
        """Undo ``install`` and forget latents and weights."""
        while self._hooks:
            self._hooks.pop().remove()
        self.current.clear()
        self._weights.clear()

    def weight(self, module: nn.Module, heads: int) -> Tensor:
        """Return [W_UK; W_UV] ``[H, N + V, R]`` of a module with its adapters; made once."""
        if module not in self._weights:
            layer = getattr(module, EXPANSION)
            if type(layer) is nn.Linear:
                weight = layer.weight
            else:
                latent = self.current[module]
                one = torch.eye(latent.shape[1], dtype=latent.dtype, device=latent.device)
                weight = layer.forward(one).mT  # past the hooks, which keep latents
            self._weights[module] = weight
        return self._weights[module].unflatten(0, (heads, -1))

    def absorbed(
        self, module: nn.Module, q_THD: Tensor, k_THD: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries ``[T, H, R + P]`` and keys ``[T, 1, R + P]`` of latents, and W_UV.

        Args:
            module: the attention module.
            q_THD: its queries, ``[q^C; q^R]``.
            k_THD: its keys, ``[k^C; k^R]``; the rotary part is the same in all heads.
            width: V.
        """
        w_HXR = self.weight(module, q_THD.shape[1]).to(q_THD.dtype)
        plain = w_HXR.shape[1] - width
        w_HNR, w_HVR = w_HXR.split([plain, width], dim=1)
        q_THR = torch.einsum("thn,hnr->thr", q_THD[..., :plain], w_HNR)
        queries = torch.cat((q_THR, q_THD[..., plain:]), -1)
        latent = self.current[module].to(k_THD.dtype)
        keys = torch.cat((latent, k_THD[:, 0, plain:]), -1)
        return queries, keys[:, None], w_HVR

    def explain(self, module: nn.Module, k_THD: Tensor, v_THV: Tensor) -> bool:
        """Return whether keys and values are those of the module's latents and one rotary key."""
        latent = self.current.get(module)
        if latent is None or len(latent) != len(k_THD):
            return False
        w_HXR = self.weight(module, k_THD.shape[1])
        plain = w_HXR.shape[1] - v_THV.shape[2]
        if plain < 0 or plain > k_THD.shape[2] or w_HXR.shape[2] != latent.shape[1]:
            return False
        made = torch.einsum("tr,hxr->thx", latent.float(), w_HXR.float())
        rotary = k_THD[:, :1, plain:].expand(-1, k_THD.shape[1], -1).float()
        expected = torch.cat((made[..., :plain], rotary, made[..., plain:]), -1)
        got = torch.cat((k_THD, v_THV), -1).float()
        return bool((got - expected).abs().max() <= LATENT_TOLERANCE * got.abs().max())


class Probe:
    """A pass that stores nothing and finds what each attention module would store.

    Attributes:
        sizes: by attention module, in the order of the layers.
    """

    residuals: Mapping[nn.Module, torch.dtype] = {}

    def __init__(self, latents: Latents):
        self.sizes: dict[nn.Module, LayerSizes] = {}
        self._latents = latents

    def attend(
        self, module: nn.Module, q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor, scores: Scores
    ) -> Tensor:
        """Return the attention within one document, after noting the sizes."""
        heads, width = k_TKD.shape[1:]
        value = v_TKV.shape[2]
        queries = q_THD.shape[1]
        sizes = LayerSizes(heads, width, value, k_TKD.dtype, 0, scores.window, queries)
        if heads == queries and self._latents.explain(module, k_TKD, v_TKV):
            latent = self._latents.current[module].shape[1]
            plain = self._latents.weight(module, heads).shape[1] - value
            key = latent + width - plain
            sizes = replace(sizes, heads=1, key=key, value=latent, latent=latent)
        self.sizes[module] = sizes
        bounds = torch.tensor([0, len(q_THD)], dtype=torch.int32, device=q_THD.device)
        return attend_documents(q_THD, k_TKD, v_TKV, scores, bounds, len(q_THD))

    def attend_unrotated(self, module: nn.Module, new: UnrotatedHeads, scores: Scores) -> None:
        """Return None: sizes are those of keys as they are stored."""


@dataclass(frozen=True)
class PagedPass(ABC):
    """Base class of the passes that write keys and values to pages.

    Attributes:
        layers: pages of each attention module.
        latents: latents of the pass.
        places: int64 ``[T]``, where the new tokens are written in the layers of each sliding
            window, and in those without (None): page · S + place within the page.
        residuals: as those of ``Pass``; none by default.
    """

    layers: dict[nn.Module, LayerPages]
    latents: Latents
    places: Mapping[int | None, Tensor]
    residuals: Mapping[nn.Module, torch.dtype] = field(default_factory=dict, kw_only=True)

    def attend(
        self, module: nn.Module, q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor, scores: Scores
    ) -> Tensor:
        """Write keys and values to the module's pages, and attend over its pages."""
        pages = self.layers[module]
        places = self.places[pages.window]
        if not pages.is_latent:
            pages.write(places, k_TKD, v_TKV)
            return self.over(pages, q_THD, k_TKD, v_TKV, scores)
        q_THX, k_T1X, w_HVR = self.latents.absorbed(module, q_THD, k_TKD, v_TKV.shape[2])
        pages.write(places, k_T1X, k_T1X)
        if self.alone:
            return self.over(pages, q_THD, k_TKD, v_TKV, scores)
        o_THR = self.over(pages, q_THX, k_T1X, k_T1X[..., : w_HVR.shape[2]], scores)
        return torch.einsum("thr,hvr->thv", o_THR, w_HVR)

    def attend_unrotated(
        self, module: nn.Module, new: UnrotatedHeads, scores: Scores
    ) -> Tensor | None:
        """Return None; see ``DecodePass``."""
        return None

    @property
    def alone(self) -> bool:
        """True if the new tokens attend to each other only, without earlier ones in pages."""
        return False

    @abstractmethod
    def over(
        self, pages: LayerPages, q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor, scores: Scores
    ) -> Tensor:
        """Return the attention over pages, to which the new keys and values have been written."""


@dataclass(frozen=True)
class ChunkKeys:
    """The keys that a pack of chunks attends to, with those of earlier chunks.

    Attributes:
        places: int64, where they are.
        cu, longest: bounds of those of each sequence, int32, and the most of one.
    """

    places: Tensor
    cu: Tensor
    longest: int


@dataclass(frozen=True)
class PrefillPass(PagedPass):
    """A pass over a pack of chunks: several new tokens of each sequence.

    It is given no ``residuals`` in fp32, but rounds as training does, whose products of so many rows
    may have the same bits.

    Attributes:
        cu_q, longest_q: bounds of the new tokens, int32, and the most of a sequence.
        keys: their keys in the layers of each window, as ``places``; None if no sequence has
            earlier ones.
    """

    cu_q: Tensor
    longest_q: int
    keys: Mapping[int | None, ChunkKeys] | None

    @property
    def alone(self) -> bool:
        """True if every chunk is the first of its sequence."""
        return self.keys is None

    def over(
        self, pages: LayerPages, q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor, scores: Scores
    ) -> Tensor:
        """Return the attention of the chunks to their sequences."""
        if self.keys is None:
            return attend_documents(q_THD, k_TKD, v_TKV, scores, self.cu_q, self.longest_q)
        keys = self.keys[pages.window]
        k_TKD, v_TKV = pages.read(keys.places)
        bounds = self.cu_q, self.longest_q, keys.cu, keys.longest
        return attend_documents(q_THD, k_TKD, v_TKV, scores, *bounds)


@dataclass(frozen=True)
class DecodePass(PagedPass):
    """A pass over one new token of each sequence; all its tensors have static shapes.

    Attributes:
        tables: int64 ``[N, L]``, the block table in the layers of each window, as ``places``.
        lengths: int64 ``[N]``, keys of each sequence, the new one included.
        shared: which sequences share the pages of a prompt.
        backend: that of attention, one of ``PAGED_BACKENDS``; None to choose.
    """

    tables: Mapping[int | None, Tensor]
    lengths: Tensor
    shared: SharedPages | None = None
    backend: str | None = None

    def over(
        self, pages: LayerPages, q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor, scores: Scores
    ) -> Tensor:
        """Return the attention of each token to its sequence."""
        return attend_pages(
            q_THD,
            pages.keys,
            pages.values,
            self.tables[pages.window],
            self.lengths,
            scores.sinks,
            scale=scores.scale,
            window=scores.window,
            softcap=scores.softcap,
            shared=self.shared,
            backend=self.backend,
        )

    def attend_unrotated(
        self, module: nn.Module, new: UnrotatedHeads, scores: Scores
    ) -> Tensor | None:
        """Turn heads, write keys and values to pages, and attend, in one kernel.

        None where latents are stored, or another backend attends.
        """
        pages = self.layers[module]
        is_ours = self.backend in (None, "kernel")
        if pages.is_latent or not is_ours or not takes_unrotated(new, pages.keys, pages.values):
            return None
        return decode_attention(
            new,
            pages.keys,
            pages.values,
            self.places[pages.window],
            self.tables[pages.window],
            self.lengths,
            scores.sinks,
            scale=scores.scale,
            window=scores.window,
            softcap=scores.softcap,
            shared=self.shared,
        )


def attend_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores,
    cu_q: Tensor,
    longest_q: int,
    cu_k: Tensor | None = None,
    longest_k: int | None = None,
) -> Tensor:
    """Return causal attention within documents, by the backend that is chosen for training."""
    return document_attention(
        q,
        k,
        v,
        cu_q,
        longest_q,
        cu_k,
        longest_k,
        scores.sinks,
        scale=scores.scale,
        window=scores.window,
        softcap=scores.softcap,
    )


@contextmanager
def attending_pages(model: nn.Module) -> Iterator[Latents]:
    """A context in which the model's attention runs over pages; yields its latents.

    Raises:
        RuntimeError: a module would attend in another way.
    """
    latents = Latents(model)
    attention_seam.install_seam(model, OVER_PAGES)
    try:
        without = attention_seam.module_without(model, OVER_PAGES)
        if without:
            raise RuntimeError(f"the attention of {without} cannot be replaced")
        latents.install()
        yield latents
    finally:
        latents.remove()
        attention_seam.remove_seam(model, OVER_PAGES)


def run_pass(model: Any, ids: Tensor, positions: Tensor, over: Pass) -> Tensor:
    """Return the last hidden states ``[T, D]`` of the new tokens.

    Args:
        model: a causal language model within ``attending_pages``.
        ids: int64 ``[T]``, the tokens.
        positions: int64 ``[T]``, their positions in their sequences.
        over: where keys and values are.
    """
    arguments: dict[str, Any] = {PASS: over}
    out = model.get_decoder()(
        input_ids=ids[None], position_ids=positions[None], use_cache=False, **arguments
    )
    states: Tensor = out.last_hidden_state[0]
    return states
