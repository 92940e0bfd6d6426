"""Work of the host between two graphs of a decode step whose experts are streamed.

A capture is cut where a layer's router has chosen. The graph before the cut copies to the host what it
has to know; the host waits for it, brings the chosen experts into slots, and the next graph begins
with their products. Shapes are static, so what the host decides is in tensors that those read.

    HostLook    all chosen experts come into slots
    CpuLook     the CPU computes some of the missing ones while the others are copied

Shapes: T tokens, k experts of a token, S = T · k pairs, E experts, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from chronicals.kernels.expert_dispatch import Dispatch
from chronicals.kernels.expert_glu import Gate
from chronicals.kernels.streamed_experts import Replacement
from chronicals.moe.offload.cpu_share import HostShare
from chronicals.moe.offload.engine import Brought, ExpertEngine

if TYPE_CHECKING:
    from chronicals.moe.offload.module import LayerSource

NUMBER_BYTES = 4
"""Bytes of an int32, in which the host reads and sends."""


class HostLook:
    """Pinned memory that the host reads and writes between two graphs of a step.

    It is made while the step is captured; the copy to the host is part of the graph before it.

    Args:
        engine: the engine.
        layer: number of the layer.
        asked: what the host has to know, int32.
        more: further int32 numbers that are sent with the slots.

    Attributes:
        read: what was asked, on the host, once the graph before has run.
        slots: int32 ``[E]`` on the device, the slot of each expert, when the products run.
        further: int32 ``[more]`` on the device, what was sent with them.
        replacement: rows of the CPU; None where it computes none of the missing experts.
    """

    replacement: Replacement | None = None

    def __init__(self, engine: ExpertEngine, layer: int, asked: Tensor, more: int = 0):
        self.engine = engine
        self.layer = layer
        self._stream = engine.current_stream
        on_card = asked.device.type == "cuda"
        count = engine.layers[layer].count
        received = torch.empty(asked.shape, dtype=torch.int32, pin_memory=on_card)
        received.copy_(asked, non_blocking=True)
        self.read = received.numpy()
        self._sent = torch.full((count + more,), -1, dtype=torch.int32, pin_memory=on_card)
        self._numbers = self._sent.numpy()
        self._on_device = torch.empty(count + more, dtype=torch.int32, device=asked.device)
        self.slots, self.further = self._on_device.split([count, more])
        self._brought: Brought

    def bring(self) -> None:
        """Wait for what the host has to know, and prepare the products of the layer.

        Slots of experts without rows stay those of earlier steps; nothing reads them.
        """
        self._stream.synchronize()
        self._brought = self.engine.bring(
            self.layer, self.read, self._numbers, self._stream, self.replacement is not None
        )
        self._compute(self._brought.by_cpu)

    def send(self) -> None:
        """Send the numbers of slots, and what else is sent; a graph begins with it."""
        self._on_device.copy_(self._sent, non_blocking=True)

    def _compute(self, experts: Sequence[int]) -> None:
        """Compute what these experts give, whose copies were not asked for."""

    def note(self) -> None:
        """Note what was brought, and ask for what is expected next; the products are launched."""
        self.engine.note(self.layer, self._brought, self.read, self._stream)


class CpuLook(HostLook):
    """A look at which missing experts are divided between bus and CPU.

    The products' rows of experts that the CPU computes are replaced on the device. The order of the
    pairs and the experts' input are copied to the host with what the engine asks.

    Args:
        source: the layer's experts.
        asked: what the engine has to know, int32.
        to: the dispatch of the pairs.
        x: ``[T, D]``, the input of the experts.
        gate: the gated unit.

    Attributes:
        outputs: ``[S, D]`` on the device, in the dtype of x: rows in the place of the products'.
        replacement: these rows, and which of them replace.
    """

    def __init__(self, source: LayerSource, asked: Tensor, to: Dispatch, x: Tensor, gate: Gate):
        pairs = len(to.order_S)
        both = torch.cat((asked, to.order_S))
        super().__init__(source.engine, source.layer, both, -(-pairs // NUMBER_BYTES))
        self.read, self._order = np.split(self.read, [len(asked)])
        self._source = source
        self._gate = gate
        self._each = to.each
        on_card = x.device.type == "cuda"
        self._x = torch.empty(x.shape, dtype=x.dtype, pin_memory=on_card)
        self._x.copy_(x, non_blocking=True)
        self._found = torch.empty(pairs, x.shape[1], dtype=x.dtype, pin_memory=on_card)
        self.outputs = torch.empty_like(self._found, device=x.device)
        self.replacement = Replacement(self.further.view(torch.bool)[:pairs], self.outputs)
        self._marks = self._numbers[len(self.slots) :].view(np.bool_)[:pairs]

    def _compute(self, experts: Sequence[int]) -> None:
        """Compute the rows of these experts, and send them; copies run meanwhile."""
        self._marks[:] = False
        if not experts:
            return
        spans = [self.read[expert : expert + 2].tolist() for expert in experts]
        for begin, end in spans:
            self._marks[begin:end] = True
        places = self._marks.nonzero()[0]
        x = self._x.index_select(0, torch.from_numpy(self._order[places] // self._each))
        counts = [end - begin for begin, end in spans]
        found = HostShare(self._source, experts).outputs(x, counts, self._gate)
        self._found.index_copy_(0, torch.from_numpy(places), found)
        # one copy, with what lies between them and is not read
        sent = slice(spans[0][0], spans[-1][1])
        self.outputs[sent].copy_(self._found[sent], non_blocking=True)
