"""Runs a Batch through a Hugging Face model; outputs are flat, with one row a token.

If the class is proved to separate documents, the Batch goes in packed. It is passed with
transformers' own arguments (``position_ids``, ``cu_seq_lens_q/k``, ``max_length_q/k``), and our
attention is installed on the instance by a seam. Otherwise its documents become padded rows with a
mask, which is slower and gives the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_utils import AttentionInterface

from chronicals.attention import attend_split, document_attention, gather_keys
from chronicals.batch import Batch, SharedKeys, SplitDocuments
from chronicals.models import attention_seam, one_by_one
from chronicals.models.linear import Head, read_head
from chronicals.models.one_by_one import DOCUMENTS
from chronicals.models.routed_experts import (
    ROUTER_LOGITS,
    reading_logits,
    receiving,
    unrecorded_routers,
)
from chronicals.models.router_loss import ROUTER_LOSS, SWITCH, RouterLoss
from chronicals.models.terms import AdditionalTerm, Computed, Terms

ForwardResult = TypeVar("ForwardResult")

_ATTENTION = "chronicals_documents"
"""Name of document attention in transformers' table of attention functions.

It is for modules whose forward other code replaced. No mask function has this name, so transformers
makes no mask. No configuration of a user contains it.
"""

AS_FORWARD = "chronicals_forward"
"""Method of a model whose weights are gathered for each forward pass.

It calls its argument as one such pass.
"""

LOOKAHEAD = "output_lookahead"
"""Argument that requests predictions of the model's router choices."""

CACHES = ("cache", "past_key_values")
"""Names of the key-value cache among transformers' arguments, in newer and in older versions."""


def _documents_only(
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
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_k: int | None = None,
    flash: bool = True,
    shared_keys: SharedKeys | None = None,
    split_documents: SplitDocuments | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend within documents, by transformers' attention interface.

    Queries are ``[1, H, Q, D]``, keys and values ``[1, K, T, D]``, the output is ``[1, Q, H, D]``.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError(
            f"{type(module).__name__} does not pass document bounds on to its attention"
        )
    if attention_mask is not None:
        raise ValueError(
            f"{type(module).__name__} attends with a mask of its own, beside the bounds of "
            "documents"
        )
    if dropout:
        raise ValueError(
            f"attention dropout {dropout} is not supported; set attention_dropout=0 (attn_pdrop=0 "
            "in GPT-2's family) in the "
            "model's configuration"
        )
    # Under autocast rotary embeddings leave queries and keys in fp32; values have the dtype of the
    # matrix products.
    q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    if shared_keys is not None:
        k_TKD = gather_keys(k_TKD, shared_keys)
        v_TKD = gather_keys(v_TKD, shared_keys)
    attend = partial(
        document_attention,
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
        flash=flash,
    )
    of_heads = () if s_aux is None else (s_aux,)
    if split_documents is not None:
        return attend_split(attend, q_THD, k_TKD, v_TKD, split_documents, *of_heads)[None], None
    bounds = cu_seq_lens_q, max_length_q, cu_seq_lens_k, max_length_k
    return attend(q_THD, k_TKD, v_TKD, *bounds, *of_heads)[None], None


AttentionInterface.register(_ATTENTION, _documents_only)


OVER_DOCUMENTS = attention_seam.SoleAttention("documents_only", _documents_only, _ATTENTION)
"""A seam whose attention takes document bounds."""


@dataclass
class PresentedModel:
    """A model together with the way it takes a Batch.

    Attributes:
        model: the Hugging Face model, inside PEFT's wrapper if ``within_adapters`` allows it.
        packed: the model takes documents packed; False for padded rows.
        head_is_read: the head is read as tensors; False if the model's own logits must be used.
        router_loss: the loss that its class adds if its configuration asks for it, or None.
        flash: False if packs must not use a FlashAttention backend.
        pack_width: tokens of a pack, each of which has its own router loss; None if a Batch is one
            pack.
        additions: loss terms in addition to those of the objective.
        experts: modules whose received expert ids are recorded.
        one_by_one: packed, with attention on one document after the other.
    """

    model: Any
    packed: bool
    head_is_read: bool
    router_loss: RouterLoss | None = None
    flash: bool = True
    pack_width: int | None = None
    additions: tuple[AdditionalTerm, ...] = ()
    experts: tuple[nn.Module, ...] = ()
    one_by_one: bool = False

    @property
    def records_routers(self) -> bool:
        """True if a forward pass in training also needs router logits."""
        return self.router_loss is not None or bool(self.additions)

    def as_forward(self, compute: Callable[[], ForwardResult]) -> ForwardResult:
        """Call ``compute`` as one forward pass of the model; it may use the model's parts and head.

        This matters for weights that are gathered for each pass. The result must be a tensor, or
        tensors in dictionaries.
        """
        forward: Callable[[Callable[[], ForwardResult]], ForwardResult] | None = getattr(
            self.model, AS_FORWARD, None
        )
        return compute() if forward is None else forward(compute)

    @property
    def head(self) -> Head | None:
        """The current head, or None if the model's own logits must be used."""
        return read_head(self.model) if self.head_is_read else None

    def __call__(self, batch: Batch) -> tuple[Tensor, Terms]:
        """Compute the input of an objective.

        Returns:
            Hidden states ``[T, D]`` before ``head``, or the model's own logits ``[T, V]`` if
            ``head`` is None. Then auxiliary loss terms by name: ``router_loss`` of
            mixture-of-experts classes that ask for one and, while gradients are computed, those
            of ``additions``.
        """
        return (
            self.states(batch)
            if self.head_is_read
            else self._with_terms(batch, self.model, "logits")
        )

    def states(self, batch: Batch) -> tuple[Tensor, Terms]:
        """Compute hidden states ``[T, D]`` for any kind of head, and the auxiliary loss terms."""
        return self._with_terms(batch, self.model.get_decoder(), "last_hidden_state")

    def _with_terms(self, batch: Batch, module: Any, name: str) -> tuple[Tensor, Terms]:
        additions = self.additions if torch.is_grad_enabled() else ()
        if self.router_loss is None and not additions:
            return self._run(batch, module, name).states, {}
        computed = self._run(
            batch, module, name, True, any(addition.lookahead for addition in additions)
        )
        terms = {}
        if self.router_loss is not None:
            terms[ROUTER_LOSS] = self.router_loss.term(
                computed.router_logits, batch, self.pack_width
            )
        for addition in additions:
            terms |= addition.terms(self, computed, batch)
        return computed.states, terms

    def hidden_states(self, batch: Batch) -> Tensor:
        """Compute the hidden states ``[T, D]`` before the head."""
        return self._run(batch, self.model.get_decoder(), "last_hidden_state").states

    def logits(self, batch: Batch) -> Tensor:
        """Compute the model's own logits ``[T, V]``."""
        return self._run(batch, self.model, "logits").states

    def router_logits(self, batch: Batch) -> Sequence[Tensor]:
        """Compute ``[T, E]`` per layer with routed experts; zero for tokens without computation."""
        return self.computed(batch, lookahead=False).router_logits

    def computed(self, batch: Batch, lookahead: bool) -> Computed:
        """Compute hidden states before the head, router logits, and predicted ones if requested."""
        return self._run(batch, self.model.get_decoder(), "last_hidden_state", True, lookahead)

    def _run(
        self, batch: Batch, module: Any, name: str, routers: bool = False, lookahead: bool = False
    ) -> Computed:
        """Call ``module``; return its output ``name`` and router outputs, with one row a token."""
        if batch.split is not None and not self.packed:
            raise ValueError(
                f"{type(self.model).__name__} takes padded rows, which cannot be split "
                "(context_parallel)"
            )
        if self.one_by_one and (batch.split is not None or batch.keys is not None):
            name = type(self.model).__name__
            raise ValueError(
                f"{name} attends to one document after the other, which may be neither split nor "
                "share a prompt"
            )
        padded = None if self.packed else PaddedRows.of(batch)
        inputs = packed_arguments(batch) if padded is None else padded.inputs
        if self.one_by_one:
            # Waits for the device: the bounds are Python numbers.
            ends = batch.cu_seqlens.tolist()
            inputs[DOCUMENTS] = [(start, end) for start, end in zip(ends, ends[1:]) if end > start]
        if self.packed and not self.flash:
            inputs["flash"] = False  # passed on to the attention with the document bounds
        if routers:
            inputs[SWITCH] = True
        if lookahead:
            inputs[LOOKAHEAD] = True
        unrecorded = unrecorded_routers(self.model) if routers else ()
        with (
            receiving(self.experts if routers else ()) as received,
            reading_logits(unrecorded) as read,
        ):
            out = module(**inputs)

        def flat(x: Tensor, beside: int = 1) -> Tensor:
            """Return ``x`` with one row a token; each row has ``beside`` dimensions."""
            if padded is None:
                return x[0] if x.dim() == beside + 2 else x
            rows = x.flatten(0, -1 - beside)[padded.kept]
            return rows.new_zeros(len(batch), *rows.shape[1:]).index_put((padded.places,), rows)

        # A class may record the logits in its output; hooks read the others.
        found = (out.get(ROUTER_LOGITS) or read) if routers else ()
        ahead = out.lookahead if lookahead else None
        layers, tokens = (
            (None, None) if ahead is None else (ahead.get("layers"), ahead.get("tokens"))
        )
        return Computed(
            flat(getattr(out, name)),
            [flat(logits) for logits in found],
            [flat(logits, beside=2) for logits in layers or ()],
            None if tokens is None else flat(tokens, beside=3),
            [flat(ids) for ids in received],
        )

    @contextmanager
    def attending_documents(self) -> Iterator[PresentedModel]:
        """A context in which the model's attention takes document bounds.

        Afterwards it is as before, ready to generate.
        """
        if not self.packed:
            yield self
            return
        self._attend_documents()
        try:
            yield self
        finally:
            self._attend_as_before()

    @contextmanager
    def attending_as_before(self) -> Iterator[None]:
        """A context inside ``attending_documents`` with the model's original attention."""
        if not self.packed:
            yield
            return
        self._attend_as_before()
        try:
            yield
        finally:
            self._attend_documents()

    def _attend_documents(self) -> None:
        """Install document attention.

        Raises:
            RuntimeError: a module would attend without document bounds, so across documents.
        """
        if self.one_by_one:
            one_by_one.attend_one_by_one(self.model)
            return
        attention_seam.install_seam(self.model, OVER_DOCUMENTS)
        without = attention_seam.module_without(self.model, OVER_DOCUMENTS)
        if without:
            attention_seam.remove_seam(self.model, OVER_DOCUMENTS)
            raise RuntimeError(
                f"the attention of {without} cannot take document bounds, so documents would see each "
                "other"
            )

    def _attend_as_before(self) -> None:
        if self.one_by_one:
            one_by_one.attend_whole(self.model)
        else:
            attention_seam.remove_seam(self.model, OVER_DOCUMENTS)


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """A context in evaluation mode; afterwards every module is in its previous mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def packed_arguments(batch: Batch) -> dict[str, Any]:
    """Return the arguments with which a model takes a Batch packed."""
    keys = batch.keys
    found = {
        "input_ids": batch.input_ids[None],
        "position_ids": batch.position_ids[None],
        "cu_seq_lens_q": batch.cu_seqlens,
        "cu_seq_lens_k": batch.cu_seqlens if keys is None else keys.cu_seqlens,
        "max_length_q": batch.max_seqlen,
        "max_length_k": batch.max_seqlen if keys is None else keys.max_seqlen,
        "use_cache": False,
    }
    if batch.split is not None:
        found["split_documents"] = batch.split
    return found if keys is None else {**found, "shared_keys": keys}


@dataclass(frozen=True)
class PaddedRows:
    """Documents with a target as right-padded rows, each behind the prompt that it shares, if any.

    Attributes:
        inputs: arguments of the model.
        kept: int64, flat indices into the padded rows: each document's own tokens, and one copy of
            each prompt.
        places: int64, the position of each of these tokens in the Batch.
    """

    inputs: dict[str, Any]
    kept: Tensor
    places: Tensor

    @classmethod
    def of(cls, batch: Batch) -> PaddedRows:
        """Build the rows of a Batch. Waits for the device."""
        device = batch.input_ids.device
        bounds = batch.cu_seqlens.tolist()
        spans = [
            n
            for n, (a, b) in enumerate(zip(bounds, bounds[1:]))
            if b > a and bool((batch.targets[a:b] >= 0).any())
        ]
        own = [torch.arange(bounds[n], bounds[n + 1], device=device) for n in spans or [0]]
        rows = own
        if batch.keys is not None:
            ends = batch.keys.cu_seqlens.tolist()
            rows = [batch.keys.index[ends[n] : ends[n + 1]] for n in spans or [0]]
        prompts = [int(row[0]) if len(row) > len(some) else None for row, some in zip(rows, own)]
        # The first row with a prompt also keeps the prompt's tokens.
        first = [
            prompt is not None and prompt not in prompts[:number]
            for number, prompt in enumerate(prompts)
        ]
        own = [row if with_prompt else some for row, some, with_prompt in zip(rows, own, first)]
        lengths = torch.tensor([len(row) for row in rows], device=device)
        columns = torch.arange(int(lengths.max()), device=device)
        mask = (columns < lengths[:, None]).long()
        before = lengths - torch.tensor([len(some) for some in own], device=device)
        kept = ((columns >= before[:, None]) & (mask > 0)).flatten().nonzero().squeeze(1)
        ids = pad_sequence([batch.input_ids[row] for row in rows], batch_first=True)
        return cls(
            {"input_ids": ids, "attention_mask": mask, "use_cache": False}, kept, torch.cat(own)
        )
