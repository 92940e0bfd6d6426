"""Frozen tables of a model, its input embedding and its head, in pinned host memory.

A step needs of the input embedding the rows of its tokens alone, which the card reads from host
memory (``kernels.host_rows``). It needs the whole head while it computes the loss: the head is copied
to the card when it is read (``read_head``), and freed when nobody uses the copy any more. Values are
those of tables on the card, bit for bit. A table that is both is in host memory once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chronicals.kernels.host_memory import PinnedTensors
from chronicals.kernels.host_rows import host_rows

HOST_TABLE = "_chronicals_host_table"
"""Attribute of an embedding or a head whose weight is in host memory: its ``HostTable``."""


class HostTable:
    """A frozen weight ``[V, D]`` that is in host memory, pinned if it is used on a card.

    Args:
        weight: the parameter, which keeps its identity.
        pinned: allocates the memory on a card.

    Attributes:
        device: where it is used.
    """

    def __init__(self, weight: nn.Parameter, pinned: PinnedTensors):
        self.weight = weight
        self.device = weight.device
        self._copy: weakref.ref[Tensor] | None = None
        if weight.is_cuda:
            stored = pinned.empty(weight.shape, weight.dtype, weight.device)
            weight.data = stored.copy_(weight.detach())
        else:
            weight.data = weight.detach().clone()
        if self.device.type == "cuda" and not weight.is_pinned():
            self.restore()
            raise ValueError(
                f"memory=['offload_embeddings']: {weight.nbytes / 2**30:.2f} GiB of host memory "
                "cannot be pinned; raise the limit of locked memory (ulimit -l), or leave it out"
            )

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows of some ids, ``[..., D]``, on the device."""
        return host_rows(ids, self.weight.detach())

    def whole(self) -> Tensor:
        """Return a copy on the device, the same one as long as somebody uses it."""
        copy = None if self._copy is None else self._copy()
        if copy is None:
            copy = self.weight.detach().to(self.device, non_blocking=True, copy=True)
            self._copy = weakref.ref(copy)
        return copy

    def restore(self) -> None:
        """Bring the weight back to its device."""
        self.weight.data = self.weight.detach().to(self.device)


def table_of(layer: Any) -> HostTable | None:
    """Return the table in host memory that is a layer's weight, or None."""
    return vars(layer).get(HOST_TABLE)


def weight_in_use(layer: Any) -> Tensor:
    """Return the weight of a layer where its products run."""
    table = table_of(layer)
    weight: Tensor = layer.weight
    return weight if table is None else table.whole()


def why_embedding_stays(model: Any) -> str | None:
    """Return why the input embedding of a model cannot be in host memory; None if it can."""
    layer = model.get_input_embeddings()
    kind = type(layer)
    if kind is not nn.Embedding:
        return f"the input embedding is {kind.__name__}, not a plain torch.nn.Embedding"
    if layer.weight.requires_grad:
        return "the input embedding is trained, and its update needs it on the card"
    if _is_replaced(layer) or layer.max_norm is not None:
        return "the forward of the input embedding is replaced, or changes its rows"
    head = model.get_output_embeddings()
    head = getattr(head, "base_layer", head)
    if getattr(head, "weight", None) is layer.weight and head_in_host(model) is None:
        return "the head has the weight of the input embedding, and is not plain, or is replaced"
    return None


def head_in_host(model: Any) -> nn.Linear | None:
    """Return the layer of the head if its weight can be in host memory: frozen and plain."""
    head = model.get_output_embeddings()
    head = getattr(head, "base_layer", head)
    plain = type(head) is nn.Linear and not _is_replaced(head)
    return head if plain and not head.weight.requires_grad else None


def _is_replaced(layer: nn.Module) -> bool:
    """Return whether a layer has a forward of its own that is not of ``tables_in_host_memory``."""
    return "forward" in vars(layer) and table_of(layer) is None


def host_tables(model: Any) -> list[nn.Parameter]:
    """Return the weights that ``tables_in_host_memory`` moves, each once."""
    head = head_in_host(model)
    layers = [model.get_input_embeddings(), *([] if head is None else [head])]
    return list({id(layer.weight): layer.weight for layer in layers}.values())


@contextmanager
def tables_in_host_memory(model: Any) -> Iterator[None]:
    """Context manager in which the frozen embedding and head are in host memory.

    The model is one that ``why_embedding_stays`` does not refuse. Its parameters keep their names
    and identity, and are on their device again at the end.

    Raises:
        ValueError: the memory cannot be pinned.
    """
    pinned = PinnedTensors()
    embedding = model.get_input_embeddings()
    head = head_in_host(model)
    tables: dict[int, HostTable] = {}
    held = list[nn.Module]()
    try:
        for layer in [embedding, *([] if head is None else [head])]:
            key = id(layer.weight)
            if key not in tables:
                tables[key] = HostTable(layer.weight, pinned)
            setattr(layer, HOST_TABLE, tables[key])
            held.append(layer)
        embedding.forward = tables[id(embedding.weight)].rows
        _check_that_rows_arrive(tables[id(embedding.weight)])
        if head is not None:
            head.forward = partial(_head_forward, head)  # type: ignore[method-assign]
        yield
    finally:
        for layer in held:
            vars(layer).pop(HOST_TABLE, None)
            vars(layer).pop("forward", None)
        for table in tables.values():
            table.restore()


def _check_that_rows_arrive(table: HostTable) -> None:
    """Compare some rows that the device reads with those of the host.

    Raises:
        ValueError: they differ.
    """
    ids = torch.tensor([0, len(table.weight) // 2, len(table.weight) - 1])
    arrived = table.rows(ids.to(table.device)).cpu().contiguous()
    # As bytes: a row may hold NaN.
    if not torch.equal(arrived.view(torch.uint8), table.weight.detach()[ids].view(torch.uint8)):
        raise ValueError(
            "memory=['offload_embeddings']: this card does not read the host's memory as it was "
            "written; leave it out"
        )


def _head_forward(head: nn.Linear, x: Tensor) -> Tensor:
    """Compute the output of a head whose weight is in host memory."""
    return F.linear(x, weight_in_use(head), head.bias)
