"""Makes records of the experts of a model that is loaded, and puts streamed experts in their place.

A layer's experts are released as soon as their records are written, so beside the slab no more than
the model's own weights of the layers behind are in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from chronicals.models.routed_experts import is_experts
from chronicals.moe.offload.budget import Budgets
from chronicals.moe.offload.engine import ExpertEngine
from chronicals.moe.offload.layers import LayerRecords
from chronicals.moe.offload.module import LayerSource, StreamedExperts
from chronicals.moe.offload.slab import HostSlab, filling
from chronicals.quantization.expert_records import RecordLayout, StackFormat

K_FIELDS = ("num_experts_per_tok", "moe_topk", "top_k_experts")
"""Fields of configurations that hold k, the experts of a token."""


def experts_of_token(config: Any) -> int:
    """Return k, the experts of a token, by a model's configuration.

    Raises:
        ValueError: it has no such field.
    """
    text = config.get_text_config()
    for name in K_FIELDS:
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise ValueError(
        f"{type(config).__name__}: none of its fields {', '.join(K_FIELDS)} says how many experts "
        "a token has"
    )


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of stacked experts of a model by their path, in the order of layers.

    Raises:
        ValueError: there are none, they have adapters, or they are streamed already.
    """
    found = {path: module for path, module in model.named_modules() if is_experts(module)}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no routed experts as stacked weights, so there is nothing "
            "to offload; offload is for mixtures of experts"
        )
    for path, module in found.items():
        if isinstance(module, StreamedExperts):
            raise ValueError(f"{path}: its experts are offloaded already")
        outer = model.get_submodule(path.rpartition(".")[0])
        if type(outer).__module__.startswith("peft."):
            raise ValueError(
                f"{path}: has adapters of PEFT, which add up whole stacks of experts; attach "
                "chronicals' own (chronicals.lora.load_adapter), or offload before"
            )
    return found


def describe_layers(
    formats: Mapping[str, Mapping[str, StackFormat]], each: int
) -> list[LayerRecords]:
    """Return the layers' records, given their formats by path and name of the weight."""
    layers = []
    first = 0
    for path, own in formats.items():
        layers.append(LayerRecords(path, own, RecordLayout.of(own), first, each))
        first += layers[-1].count
    return layers


def write_layer(slab: HostSlab, layer: LayerRecords) -> None:
    """Write the records of a layer's experts."""
    for expert in range(layer.count):
        number = layer.first + expert
        record = slab.record(number)
        record[layer.layout.bytes :].zero_()
        layer.layout.write(record[: layer.layout.bytes], layer.formats, expert)
        slab.written(number)


def stream_experts(
    model: nn.Module,
    budgets: Budgets,
    formats: Mapping[str, Mapping[str, StackFormat]],
    shared: str | None = None,
) -> ExpertEngine:
    """Move the experts of a model into records, in place; the engine has no slots yet.

    Args:
        model: a mixture; its experts' weights may not have been read yet.
        budgets: memory that they may take; the model is as it was if that is too small.
        formats: of the experts by path and name.
        shared: name of a slab that the processes of a machine share.

    Raises:
        ValueError: they do not fit.
        ExpertRecordError: an expert cannot be read.
    """
    modules = expert_modules(model)
    each = experts_of_token(model.config)  # type: ignore[arg-type]
    layers = describe_layers(formats, each)
    budgets.check(layers)
    slab = HostSlab(
        sum(layer.count for layer in layers),
        max(layer.layout.bytes for layer in layers),
        shared,
    )
    engine = ExpertEngine(layers, slab)
    with filling(slab) as fills:
        for number, layer in enumerate(layers):
            if fills:
                write_layer(slab, layer)
            place_streamed(model, modules.pop(layer.path), engine, number)
    return engine


def place_streamed(model: nn.Module, experts: nn.Module, engine: ExpertEngine, number: int) -> None:
    """Put streamed experts in the place of a layer's experts, whose weights are released."""
    layer = engine.layers[number]
    streamed = StreamedExperts(experts, LayerSource(engine, number))
    model.set_submodule(layer.path, streamed)
    for form in layer.formats.values():
        form.forget_weights()
