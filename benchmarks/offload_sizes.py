"""Sizes and models of the rows of experts in host memory (``expert_offload.py``)."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

import chronicals
from chronicals.benchmark.shapes import SHAPES
from chronicals.models import quantise_layers

WHOLE_LAYERS = 48
TINY = {
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
}

COPIES = 30
"""Copies whose median is the rate of the bus."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the rows.

    Attributes:
        layers: decoder layers of all rows but that of the whole model.
        whole: decoder layers of that.
        prompt: tokens of the prompt's row.
        tokens: decode steps that are timed.
        slots: slots of decoding and of the prompt by the number of layers: a quarter of the experts.
        width: tokens of a document of training.
        steps: training steps.
        warm: of these the first ones, which are not timed.
        experts: GiB of experts in training with ``whole`` layers, and in that of the whole model.
        tiny: the model is tiny.
    """

    layers: int
    whole: int = WHOLE_LAYERS
    prompt: int = 8192
    tokens: int = 256
    slots: int = 32
    width: int = 2048
    steps: int = 8
    warm: int = 3
    experts: tuple[float, float] = (4.0, 2.0)
    tiny: bool = False

    @property
    def model(self) -> dict[str, Any]:
        """Fields of the configuration, but for the number of layers."""
        sizes = SHAPES["qwen3-30b-a3b"].sizes
        return {**sizes, **TINY} if self.tiny else sizes

    def config(self, layers: int) -> Any:
        """Return the configuration of the model."""
        return transformers.Qwen3MoeConfig(**{**self.model, "num_hidden_layers": layers})

    def expert_memory(self, whole: float, layers: int) -> str:
        """Return the memory of experts, as recipes name it.

        Args:
            whole: its GiB with all layers.
            layers: decoder layers, whose share of it is taken.
        """
        return f"{1024 * whole * layers / self.whole}MiB"

    @property
    def record(self) -> int:
        """Bytes of an expert in bf16."""
        return 2 * 3 * self.model["hidden_size"] * self.model["moe_intermediate_size"]


TINY_SIZES = Sizes(
    layers=2,
    whole=3,
    prompt=96,
    tokens=6,
    slots=10,
    width=64,
    steps=3,
    warm=1,
    experts=(0.28125 / 1024, 0.09375 / 1024),
    tiny=True,
)


def where() -> str:
    """Return the device; asked for in the process of a row alone, since a card once asked for cannot
    be used by processes that are forked later.
    """
    return "cuda" if torch.cuda.is_available() else "cpu"


def wait() -> None:
    """Wait until the card has done what it was given."""
    if where() == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], Any]) -> float:
    """Return the seconds of a call, to the end of what it gives the card."""
    wait()
    began = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - began


def bus_rate(record: int) -> float:
    """Return bytes a second of copies of a record's size from pinned memory to the card."""
    own = torch.empty(64 * record, dtype=torch.uint8, pin_memory=where() == "cuda").fill_(1)
    there = torch.empty(64 * record, dtype=torch.uint8, device=where())

    def copy() -> None:
        for source, place in zip(own.split(record), there.split(record)):
            place.copy_(source, non_blocking=True)

    copy()
    return len(own) / statistics.median(seconds(copy) for _ in range(COPIES))


def built(sizes: Sizes, layers: int, quantised: bool = False) -> Any:
    """Return the model on the card, random weights of one seed."""
    torch.manual_seed(0)
    with torch.device(where()):
        model = transformers.AutoModelForCausalLM.from_config(
            sizes.config(layers), dtype=torch.bfloat16
        )
    model.generation_config.eos_token_id = None
    if quantised:
        quantise_layers(model)
    return model


def offloaded(model: Any, sizes: Sizes, **options: Any) -> Any:
    """Return the model with ``sizes.slots`` of its experts a layer in slots."""
    budget = sizes.slots * len(model.model.layers) * sizes.record
    model = chronicals.offload(model, vram=budget, **options)
    model.offload.engine.verify()  # else each record's first copy would wait for its checksum
    return model


def chosen_by(model: Any) -> dict[str, int]:
    """Return chosen experts, missing and prefetched ones and copied bytes of an offloaded model.

    ``used`` are those that were prefetched and then chosen, so ``used + missing`` had to come; the
    CPU computed ``by cpu`` of the missing ones.
    """
    if not hasattr(model, "offload"):
        return {}
    report = model.offload.report()
    return {
        "chosen": report.hits + report.misses,
        "missing": report.misses,
        "by cpu": sum(layer.by_cpu for layer in report.layers),
        "prefetched": sum(layer.prefetched for layer in report.layers),
        "used": sum(layer.used for layer in report.layers),
        "bytes": report.bytes,
    }


def free(*models: Any) -> None:
    """Close engines of models and let their memory go."""
    for model in models:
        if hasattr(model, "offload"):
            model.offload.close()
    gc.collect()
    if where() == "cuda":
        torch.cuda.empty_cache()
