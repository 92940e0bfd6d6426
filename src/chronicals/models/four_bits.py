"""Linear layers of decoder layers in 4 bits: quantised while a checkpoint is read, or in a model that is there.

Head, embeddings, norms, routers and whatever is no plain linear layer stay as they are. While reading, no more than one
tensor exists in 16 bit beside those that stay so.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.memory import decoder_layers
from chronicals.quantization import Experts4bit, Linear4bit, Packed, PackedLinear

logger = logging.getLogger(__name__)

METHOD = "chronicals_nf4"
"""By which transformers finds what quantises while it reads."""

WATCHED = "_chronicals_watched_quantising"
"""Attribute of a model: what saw its weights while they were quantised."""

Watch = Callable[[str, Tensor, Packed], None]
"""Called for every layer that is quantised: its path, its weight, and what that becomes."""

Take = Callable[[nn.Linear, Tensor], nn.Module]
"""Called for a layer whose weight was read: gives the module that takes its place, which has a parameter ``weight``."""

QUANTISED_FROM = "_chronicals_quantised_from"
"""Attribute of a model with layers that were quantised here: the dtype that their weights had before."""

ROUTERS = ("gate", "router", "shared_expert_gate")
"""Names of small linear layers that choose experts, where a rounding would choose others."""


def has_4bit_layers(model: nn.Module) -> bool:
    return any(isinstance(module, PackedLinear) and module.in_4_bits for module in model.modules())


def has_packed_layers(model: nn.Module) -> bool:
    """Whether layers have their weight packed, in 4 bits or in another format that is dequantised for each product."""
    return any(isinstance(module, PackedLinear) for module in model.modules())


def quantise_layers(model: Any, watch: Watch | None = None) -> int:
    """Quantise the linear layers of the decoder layers to NF4, in place, one after the other; how many there were.

    Args:
        watch: sees each weight; the model knows it afterwards.

    Raises:
        ValueError: there is none, nor one in 4 bits already.
    """
    layers = linear_layers(model)
    if not layers and not has_4bit_layers(model):
        raise _no_layers(model)
    for path, layer in layers.items():
        quantised = Linear4bit.of(layer)
        if watch is not None:
            watch(path, layer.weight.detach(), quantised.packed)
        setattr(model, QUANTISED_FROM, layer.weight.dtype)
        model.set_submodule(path, quantised)
    if layers and watch is not None:
        setattr(model, WATCHED, watch)
    _report(model)
    return len(layers)


def quantise_experts(model: Any) -> int:
    """Quantise the stacked experts of the decoder layers to NF4, in place, layer by layer; how many layers there were.

    They are frozen. Adapters beside them are not merged into this model afterwards, but into its base in 16 bits.

    Raises:
        ValueError: there is none, or one of a size that does not fit, or it has adapters.
    """
    found = [
        (path, module)
        for layer in decoder_layers(model)
        for path, module in layer.named_modules()
        if sum(p.ndim == 3 for p in module.parameters(recurse=False)) > 1
    ]
    inside = {id(module) for _, module in found}
    paths = {path: module for path, module in model.named_modules() if id(module) in inside}
    if not paths:
        raise ValueError(f"{type(model).__name__} has no stacked experts: nothing would be quantised")
    for path, module in paths.items():
        if path.rpartition(".")[2] == "base_layer":
            raise ValueError(f"{path}: has adapters; quantise experts before, and adapt other layers")
        setattr(model, QUANTISED_FROM, next(p.dtype for p in module.parameters()))
        model.set_submodule(path, Experts4bit(module))
    return len(paths)


def quantising_while_reading(watch: Watch | None = None, take: Take | None = None) -> Any:
    """``quantization_config`` for ``from_pretrained``, by which it quantises the linear layers of the decoder layers to NF4, or
    lets ``take`` replace them; nothing of it stays in the model's configuration."""
    configuration = _classes()()
    configuration.watch, configuration.take = watch, take
    return configuration


def count_values(model: nn.Module) -> int:
    """Weights that a model's parameters stand for: of what is packed those of the layer; else a byte of codes holds two."""
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    packed = {id(layer.weight) for layer in layers}
    others = (p for p in model.parameters() if id(p) not in packed)
    inside = sum(layer.out_features * layer.in_features for layer in layers)
    return inside + sum(p.numel() * (2 if p.dtype == torch.uint8 else 1) for p in others)


def linear_layers(model: Any) -> dict[str, nn.Linear]:
    """By their paths, the plain layers that are to be quantised."""
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    return {
        path: module
        for path, module in model.named_modules()
        if type(module) is nn.Linear
        and id(module) in inside
        and path.removesuffix(".base_layer").rpartition(".")[2] not in ROUTERS
    }


def _no_layers(model: Any) -> ValueError:
    return ValueError(
        f"quantization='nf4': {type(model).__name__} has no list of decoder layers with plain linear layers, so nothing would "
        "be quantised; leave it out"
    )


def _report(model: Any) -> None:
    packed = [module for module in model.modules() if isinstance(module, Linear4bit)]
    inside = sum(module.out_features * module.in_features for module in packed)
    others = sum(p.numel() for p in model.parameters() if p.is_floating_point())
    share, size = inside / (inside + others), sum(module.packed.bytes for module in packed) / 2**30
    logger.info("quantization: %d linear layers in NF4, %.1f %% of the weights, in %.2f GiB", len(packed), 100 * share, size)


@functools.cache
def _classes() -> Any:
    """The configuration that asks transformers for the quantiser below, which is registered."""
    from transformers.core_model_loading import ConversionOps
    from transformers.quantizers import HfQuantizer
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config(METHOD)
    class Configuration(QuantizationConfigMixin):
        def __init__(self, **_: Any):
            self.quant_method = METHOD  # type: ignore[assignment]

    class Quantise(ConversionOps):
        def __init__(self, left: set[str], watch: Watch | None, take: Take | None):
            self.left, self.watch, self.take = left, watch, take

        def convert(self, input_dict: dict[str, Any], model: Any = None, **_: Any) -> dict[str, Tensor]:
            ((name, value),) = input_dict.items()
            self.left.discard(name)
            weight = value[0] if isinstance(value, list) else value
            return {name: _take(model, name.removesuffix(".weight"), weight, self.watch, self.take)}

    @register_quantizer(METHOD)
    class Quantiser(HfQuantizer):
        left: set[str]

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
            self.left = {f"{path}.weight" for path in linear_layers(model)}
            if not self.left:
                raise _no_layers(model)
            return model

        def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
            return param_name in self.left

        def get_quantize_ops(self) -> Any:
            return Quantise(self.left, self.quantization_config.watch, self.quantization_config.take)

        def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
            if self.quantization_config.watch is not None:
                setattr(model, WATCHED, self.quantization_config.watch)
            if self.quantization_config.take is None:
                setattr(model, QUANTISED_FROM, model.dtype)
            conversions = getattr(model, "_weight_conversions", None)
            self.remove_quantization_config(model)
            model._weight_conversions = conversions
            vars(model).pop("is_quantized", None)
            for module in (module for module in model.modules() if hasattr(module, "config")):
                vars(module.config).pop("_is_quantized", None)
            _check_shapes(model)
            if self.quantization_config.take is None:
                _report(model)
            return model

        def is_serializable(self) -> bool:
            return False

        @property
        def is_trainable(self) -> bool:
            return True

    return Configuration


def _check_shapes(model: Any) -> None:
    """Raises ValueError where a layer has got a weight of another shape, of which not every loader complains."""
    for path, layer in linear_layers(model).items():
        if (there := tuple(layer.weight.shape)) != (here := (layer.out_features, layer.in_features)):
            raise ValueError(f"{path}.weight ({list(there)} there, {list(here)} here): of another shape than config.json says")


def _take(model: Any, path: str, weight: Tensor, watch: Watch | None = None, take: Take | None = None) -> Tensor:
    """Put a layer in 4 bits, made of a weight that was read, in the place of the plain one, or what ``take`` makes of it, and
    return its codes; a weight of another shape stays what it is, for the loader to complain of. Where there is a card, that
    quantises."""
    linear = model.get_submodule(path)
    if weight.shape != linear.weight.shape:
        return weight
    if take is not None:
        replacement: Any = take(linear, weight)
        replacement._is_hf_initialized = True
        model.set_submodule(path, replacement)
        return replacement.weight
    place = torch.device("cuda") if torch.cuda.is_available() else weight.device
    packed = Packed.of(weight.to(place))
    if watch is not None:
        watch(path, weight.to(place), packed)
    layer = Linear4bit(packed, linear.bias).to(weight.device)
    layer._is_hf_initialized = True  # type: ignore[assignment]
    model.set_submodule(path, layer)
    return layer.weight
