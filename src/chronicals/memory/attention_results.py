"""Keeps what attention gave in a forward pass, until the backward pass needs it: on the host or here.

A layer that is recomputed needs attention's output again. The work to compute it grows with the square
of a document's length, its bytes with the length: of 250,000 tokens the output of an 8B's layer is
2 GB, which a bus of 55 GB/s copies in 0.04 s beside other work; FlashAttention-2 computes it in 1.6 s on
an H200.

``AttentionResults`` keeps them in host memory. A result leaves while the rest of its layer runs, and
comes back when its layer asks for it. All ordering is by streams, without host synchronisation.
``ResultsOnDevice`` leaves them to autograd, which frees them as it frees what it saves.
"""

from __future__ import annotations

import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from chronicals.kernels.host_memory import PinnedTensors
from chronicals.memory.offload import SMALLEST

logger = logging.getLogger(__name__)

RESULTS = "_chronicals_attention_results"
"""Attribute of a layer whose results are kept: the ``KeptResults``."""


class LayerResults(ABC):
    """Results of one layer in one forward pass."""

    @abstractmethod
    def to_save(self) -> list[Tensor]:
        """Return tensors that autograd is to save; they are not held here any more."""

    @abstractmethod
    def tensors(self, saved: Sequence[Tensor]) -> list[Tensor]:
        """Return the results on their device.

        Args:
            saved: what ``to_save`` returned, as autograd returns it.
        """


class KeptResults(ABC):
    """Keeps the results of some layers, which store and fetch them. Usable as a context manager.

    Args:
        layers: the layers.
    """

    def __init__(self, layers: Sequence[nn.Module]):
        self.layers = tuple(layers)
        for layer in self.layers:
            setattr(layer, RESULTS, self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Let the layers compute their results again; those that are stored can still be fetched."""
        for layer in self.layers:
            if getattr(layer, RESULTS, None) is self:
                delattr(layer, RESULTS)

    @abstractmethod
    def store(self, tensors: Sequence[Tensor]) -> LayerResults:
        """Keep the tensors of a layer."""


class ResultsOnDevice(KeptResults):
    """Keeps results where they are, as tensors that autograd saves."""

    def store(self, tensors: Sequence[Tensor]) -> LayerResults:
        """Keep the tensors of a layer."""
        return SavedTensors(tensors)


class SavedTensors(LayerResults):
    """Tensors of a layer that autograd saves.

    Args:
        tensors: the tensors.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self._tensors = list(tensors)

    def to_save(self) -> list[Tensor]:
        """Return the tensors, and let go of them."""
        tensors = self._tensors
        self._tensors = []
        return tensors

    def tensors(self, saved: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that autograd saved."""
        return list(saved)


class CopyStreams(NamedTuple):
    """Streams of copies to the host, and of copies from there."""

    out: torch.cuda.Stream
    back: torch.cuda.Stream


class AttentionResults(KeptResults):
    """Keeps results in host memory.

    Args:
        decoder: the decoder; when its forward pass ends, the last result has left the device.
        layers: the layers, which store and fetch their results themselves.
        smallest: bytes of the smallest tensor that goes to the host; ``SMALLEST`` by default.

    Attributes:
        stored: bytes that went to the host so far.
    """

    def __init__(
        self, decoder: nn.Module, layers: Sequence[nn.Module], smallest: int | None = None
    ):
        super().__init__(layers)
        self.smallest = SMALLEST if smallest is None else smallest
        self.stored = 0
        self._free: dict[int, list[Tensor]] = {}
        self._pinned = PinnedTensors()
        self._streams: dict[torch.device, CopyStreams] = {}
        self._leaving: StoredTensors | None = None
        self._new_bytes = 0
        self._new_seconds = 0.0
        self._hook = decoder.register_forward_hook(self._pass_ended, always_call=True)

    def remove(self) -> None:
        """Let the layers compute their results again; those that are stored can still be fetched."""
        super().remove()
        self._hook.remove()
        self._settle()
        self._free = {}

    def store(self, tensors: Sequence[Tensor]) -> StoredTensors:
        """Begin to copy a layer's tensors to the host.

        They stay on the device until the next layer's are stored, or the forward pass ends.
        """
        self._settle()
        self._leaving = StoredTensors(self, tensors)
        return self._leaving

    def streams_of(self, device: torch.device) -> CopyStreams | None:
        """Return the streams of copies of a card, None for another device."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = CopyStreams(
                torch.cuda.Stream(device), torch.cuda.Stream(device)
            )
        return self._streams[device]

    def take(self, size: int, device: torch.device) -> Tensor:
        """Return a uint8 host buffer of ``size`` bytes, pinned if the device is a card."""
        self.stored += size
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        if device.type != "cuda":
            return torch.empty(size, dtype=torch.uint8)
        began = time.monotonic()
        buffer = self._pinned.empty((size,), torch.uint8, device)
        self._new_bytes += size
        self._new_seconds += time.monotonic() - began
        return buffer

    def give_back(self, buffers: Sequence[Tensor]) -> None:
        """Let later passes use buffers again."""
        for buffer in buffers:
            self._free.setdefault(buffer.nbytes, []).append(buffer)

    def _pass_ended(self, *_: object) -> None:
        self._settle()
        if self._new_bytes:
            logger.info(
                "attention's results of %d layers: %.1f GiB of host memory were pinned in %.1f s",
                len(self.layers),
                self._new_bytes / 2**30,
                self._new_seconds,
            )
            self._new_bytes = 0
            self._new_seconds = 0.0

    def _settle(self) -> None:
        """Free the tensors on the device that were stored last."""
        if self._leaving is not None:
            self._leaving.leave()
            self._leaving = None


class StoredTensors(LayerResults):
    """Tensors of a layer in host memory; those that are small stay on the device.

    Args:
        owner: gives buffers and streams.
        tensors: the tensors.
    """

    def __init__(self, owner: AttentionResults, tensors: Sequence[Tensor]):
        self._here: list[Tensor | None] = [tensor.detach().contiguous() for tensor in tensors]
        self._hosts: dict[int, Tensor] = {}
        self._event: torch.cuda.Event | None = None
        self._device = tensors[0].device
        self._streams = owner.streams_of(self._device)
        buffers = []
        for place, tensor in enumerate(self._here):
            assert tensor is not None
            if tensor.nbytes >= owner.smallest:
                buffer = owner.take(tensor.nbytes, self._device)
                buffers.append(buffer)
                self._hosts[place] = buffer.view(tensor.dtype).view(tensor.shape)
        # A buffer is used again when autograd has dropped the layer's graph.
        weakref.finalize(self, owner.give_back, buffers).atexit = False
        self._copy(to_host=True)

    def leave(self) -> None:
        """Free the device's copies of what is on the host, once the copies have ended."""
        self._wait()
        for place in self._hosts:
            self._here[place] = None

    def fetch(self) -> None:
        """Begin to copy back what is on the host alone."""
        missing = [place for place in self._hosts if self._here[place] is None]
        for place in missing:
            self._here[place] = torch.empty_like(self._hosts[place], device=self._device)
        if missing:  # they leave all at once
            self._copy(to_host=False)

    def to_save(self) -> list[Tensor]:
        """Return nothing, since the tensors stay here."""
        return []

    def tensors(self, saved: Sequence[Tensor] = ()) -> list[Tensor]:
        """Return the tensors on the device, and keep the host's copies alone."""
        self.fetch()
        found = list(self._here)
        self.leave()
        return found  # type: ignore[return-value]

    def _copy(self, to_host: bool) -> None:
        pairs = [(self._hosts[place], self._here[place]) for place in self._hosts]
        if self._streams is None:
            for host, here in pairs:
                assert here is not None
                _put(host, here, to_host)
            return
        stream = self._streams.out if to_host else self._streams.back
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for host, here in pairs:
                assert here is not None
                _put(host, here, to_host)
            self._event = stream.record_event()

    def _wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


def _put(host: Tensor, here: Tensor, to_host: bool) -> None:
    """Copy between a tensor on the host and one on the device."""
    target, source = (host, here) if to_host else (here, host)
    target.copy_(source, non_blocking=True)
