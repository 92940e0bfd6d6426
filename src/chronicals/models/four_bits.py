"""Quantises linear layers and stacked experts of decoder layers to 4 bits.

This happens while a checkpoint is read, or afterwards to a model in memory. The head, embeddings,
norms, routers, and everything that is neither a plain linear layer nor stacked experts stay
unchanged. While reading, at most one weight to be quantised exists in 16 bit, together with the
tensors of a file that it is made of.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from chronicals.memory import decoder_layers
from chronicals.models.base_format import BaseFormat
from chronicals.models.preparing import prepare
from chronicals.models.rows import SHARING_RANKS
from chronicals.quantization import (
    FourBits,
    PackedExperts,
    PackedWeight,
    format_of_files,
    packed_experts,
    packed_layers,
    packed_modules,
)
from chronicals.quantization.bitsandbytes import has_foreign_layers, packed_description
from chronicals.quantization.experts import can_be_packed

logger = logging.getLogger(__name__)

_METHOD = "chronicals_nf4"
"""``quant_method`` of the quantiser in transformers' registry."""

WATCHED = "_chronicals_watched_quantising"
"""Attribute of a model: the ``Watch`` that saw its weights while they were quantised."""

Watch = Callable[[str, Tensor, PackedWeight], None]
"""A function that is called for every quantised layer.

Its arguments are the path, the weight ``[out, in]`` and the packed weight.
"""

Take = Callable[[nn.Linear, Tensor], nn.Module]
"""A function of a linear layer and the weight read for it that returns the layer's replacement.

The replacement must have a parameter ``weight``.
"""

QUANTISED_FROM = "_chronicals_quantised_from"
"""Attribute of a model whose layers were quantised here: the dtype of their weights before."""

ROUTERS = ("gate", "router", "shared_expert_gate")
"""Names of router layers, or of modules around them, which stay unquantised.

Rounding errors in a router would change which experts are chosen.
"""

TRANSPOSED = "Conv1D"
"""Name of the class of linear layers with weight ``[in, out]``, as in GPT-2."""

NO_LAYERS = (
    "quantization='nf4': {} has no list of decoder layers with plain linear layers, so nothing "
    "would be quantised; leave it out"
)
"""Error text, with the class of the model."""


def has_4bit_layers(model: nn.Module) -> bool:
    """Return True if linear layers were quantised to 4 bits, here or by bitsandbytes."""
    return any(layer.recipe is not None for _, layer in packed_layers(model))


def has_4bit_experts(model: nn.Module) -> bool:
    """Return True if stacked experts are packed."""
    return next(packed_experts(model), None) is not None


def has_packed_layers(model: nn.Module) -> bool:
    """Return True if linear layers have packed weights.

    They are in 4 bits, or in another format that is dequantised for each product.
    """
    return next(packed_layers(model), None) is not None


def quantise_layers(
    model: Any,
    watch: Watch | None = None,
    form: BaseFormat | None = None,
    device: torch.device | None = None,
) -> int:
    """Quantise the linear layers and stacked experts of the decoder layers in place.

    The format is NF4 unless ``form`` says otherwise. Layers are quantised one after the other.

    Args:
        model: a causal language model without adapters on its experts.
        watch: called with each weight of a linear layer; also stored on the model.
        form: the layers to quantise instead, and their formats.
        device: where codes and scales are computed, before they go to the device of the weight; by
            default that device. The mean of nested scales has other bits on another device.

    Returns:
        The number of linear layers that were quantised.

    Raises:
        ValueError: no layer can be quantised and none is in 4 bits already, or experts have
            adapters.
    """
    layers = _named_layers(model, form)
    experts = stacked_experts(model, form)
    _check_bare(experts)
    if form is None and not layers and not has_4bit_layers(model):
        raise ValueError(NO_LAYERS.format(type(model).__name__))
    for path, layer in layers.items():
        weight = layer.weight.detach()
        matrix = weight.t() if type(layer).__name__ == TRANSPOSED else weight
        quantised = _quantised_on(device, _kind_of(path, form), matrix).to(weight.dtype)
        if watch is not None:
            watch(path, matrix, quantised)
        setattr(model, QUANTISED_FROM, weight.dtype)
        model.set_submodule(path, quantised.layer(layer.bias).train(layer.training))
    if experts:
        quantise_experts(model, form, device)
    if layers and watch is not None:
        setattr(model, WATCHED, watch)
    _report(model)
    return len(layers)


def _quantised_on(device: torch.device | None, kind: FourBits, matrix: Tensor) -> PackedWeight:
    """Return a matrix quantised on ``device``, and kept where the matrix is."""
    if device is None or matrix.is_meta:
        return kind.quantise(matrix)
    return kind.quantise(matrix.to(device)).moved(matrix.device)


def quantise_experts(
    model: Any, form: BaseFormat | None = None, device: torch.device | None = None
) -> int:
    """Quantise only the stacked experts of the decoder layers, in place, and freeze them.

    Args:
        model: a causal language model without adapters on its experts.
        form: the experts to quantise, and their formats; by default all, to NF4.
        device: as of ``quantise_layers``.

    Returns:
        The number of modules that were quantised.

    Raises:
        ValueError: there are no stacked experts, or they have adapters.
    """
    found = stacked_experts(model, form)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no stacked experts: nothing would be quantised"
        )
    _check_bare(found)
    for path, module in found.items():
        setattr(model, QUANTISED_FROM, next(module.parameters()).dtype)
        quantise = functools.partial(_quantised_on, device, _kind_of(path, form))
        model.set_submodule(path, PackedExperts.of(module, quantise))
    return len(found)


def _named_layers(model: Any, form: BaseFormat | None) -> dict[str, Any]:
    """Return the layers to quantise by path: those that ``form`` names, else the usual ones."""
    if form is None or form.layers is None:
        return dict(linear_layers(model))
    named = {path: module for path, module in model.named_modules() if path in form.layers}
    return {
        path: module
        for path, module in named.items()
        if type(module) is nn.Linear or type(module).__name__ == TRANSPOSED
    }


def _kind_of(path: str, form: BaseFormat | None) -> FourBits:
    return (None if form is None else form.kind_of(path)) or FourBits()


def _check_bare(experts: Iterable[str]) -> None:
    """Raise ValueError if experts have adapters already.

    Adapters depend on the sizes of the module they wrap, which packing changes.
    """
    wrapped = next((path for path in experts if path.rpartition(".")[2] == "base_layer"), None)
    if wrapped is not None:
        raise ValueError(f"{wrapped}: has adapters; quantise experts before they are attached")


def stacked_experts(model: Any, form: BaseFormat | None = None) -> dict[str, nn.Module]:
    """Return the modules in decoder layers with stacked 16- or 32-bit experts, by path.

    With ``form`` only those that it quantises.
    """
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    return {
        path: module
        for path, module in model.named_modules()
        if id(module) in inside
        and can_be_packed(module)
        and (form is None or form.kind_of(path) is not None)
    }


def quantising_while_reading(
    watch: Watch | None = None, take: Take | None = None, form: BaseFormat | None = None
) -> Any:
    """Return a ``quantization_config`` with which ``from_pretrained`` quantises to NF4 as it reads.

    It quantises the linear layers and stacked experts of the decoder layers, and leaves no trace in
    the model's configuration.

    Args:
        watch: called with each weight of a linear layer.
        take: replaces each linear layer; nothing is quantised then.
        form: the layers to quantise instead, and their formats.
    """
    configuration = _classes()()
    configuration.watch = watch
    configuration.take = take
    configuration.form = form
    return configuration


def count_values(model: nn.Module) -> int:
    """Return the number of weights that a model's parameters represent.

    Packed weights count the weights behind the codes. Other uint8 parameters count two weights a
    byte. A parameter that is divided among ranks counts the parts of all ranks.
    """
    packed = set[int]()
    total = 0
    for _, module in packed_modules(model):
        packed |= {id(weight.codes) for weight in module.weights.values()}
        total += module.values
    for parameter in model.parameters():
        if id(parameter) not in packed:
            values = 2 if parameter.dtype == torch.uint8 else 1  # two 4-bit codes a byte
            total += parameter.numel() * getattr(parameter, SHARING_RANKS, 1) * values
    return total


def linear_layers(model: Any) -> dict[str, nn.Linear]:
    """Return the plain linear layers that ``load_model`` quantises, by path."""
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    return {
        path: module
        for path, module in model.named_modules()
        if type(module) is nn.Linear
        and id(module) in inside
        and not any(part in ROUTERS for part in path.split("."))
    }


def _report(model: Any) -> None:
    modules = [module for _, module in packed_modules(model) if module.recipe is not None]
    layers = sum(1 for _, layer in packed_layers(model) if layer.recipe is not None)
    experts = len(modules) - layers
    values = sum(module.values for module in modules)
    size = sum(module.bytes for module in modules)
    words = f"{layers} linear layers" + (f" and the experts of {experts} layers" if experts else "")
    percent = 100 * values / count_values(model)
    logger.info(
        "quantization: %s in NF4, %.1f %% of the weights, in %.2f GiB",
        words,
        percent,
        size / 2**30,
    )
    left = set()
    for layer in decoder_layers(model):
        for module in layer.modules():
            own = [] if isinstance(module, _ConvNd) else module.parameters(recurse=False)
            if any(p.ndim == 3 and min(p.shape) > 1 for p in own):
                left.add(type(module).__name__)
    if left:
        logger.warning(
            "quantization: these experts stay in 16 bit, for they are no module of stacked "
            "weights and biases alone: %s",
            ", ".join(sorted(left)),
        )


@functools.cache
def _classes() -> Any:
    """Register the quantiser below with transformers and return its configuration class."""
    from transformers.core_model_loading import ConversionOps
    from transformers.quantizers import HfQuantizer
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config(_METHOD)
    class Configuration(QuantizationConfigMixin):
        def __init__(self, **_: Any):
            self.quant_method = _METHOD  # type: ignore[assignment]

    class Quantise(ConversionOps):
        def __init__(self, left: set[str], stacks: _Stacks, asked: Any):
            self.left = left
            self.stacks = stacks
            self.asked = asked

        def convert(
            self, input_dict: dict[str, Any], model: Any = None, **_: Any
        ) -> dict[str, Tensor]:
            ((name, value),) = input_dict.items()
            self.left.discard(name)
            weight = value[0] if isinstance(value, list) else value
            if name in self.stacks.names:
                return {name: self.stacks.take(model, name, weight)}
            path = name.removesuffix(".weight")
            linear = model.get_submodule(path)
            # A weight of the wrong shape stays as it is; the loader reports it.
            if weight.shape != linear.weight.shape:
                return {name: weight}
            if self.asked.take is not None:
                layer: Any = self.asked.take(linear, weight)
            else:
                place = torch.device("cuda") if torch.cuda.is_available() else weight.device
                kind = _kind_of(path, self.asked.form)
                packed = kind.quantise(weight.to(place)).to(weight.dtype)
                if self.asked.watch is not None:
                    self.asked.watch(path, weight.to(place), packed)
                layer = packed.layer(linear.bias).to(weight.device)
            layer._is_hf_initialized = True
            model.set_submodule(path, layer)
            return {name: layer.weight}

    @register_quantizer(_METHOD)
    class Quantiser(HfQuantizer):
        left: set[str]
        stacks: _Stacks

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
            prepare(model)
            form = self.quantization_config.form
            named = _named_layers(model, form)
            self.left = {
                f"{path}.weight"
                for path, layer in named.items()
                if type(layer).__name__ != TRANSPOSED
            }
            if not self.left and form is None:
                raise ValueError(NO_LAYERS.format(type(model).__name__))
            takes_layers = self.quantization_config.take is not None
            experts = {} if takes_layers else stacked_experts(model, form)
            self.stacks = _Stacks(experts, form)
            self.left |= self.stacks.names
            return model

        def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
            return param_name in self.left

        def get_quantize_ops(self) -> Any:
            return Quantise(self.left, self.stacks, self.quantization_config)

        def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
            if self.quantization_config.watch is not None:
                setattr(model, WATCHED, self.quantization_config.watch)
            if (
                self.quantization_config.take is None
                and self.quantization_config.form != BaseFormat()
            ):
                setattr(model, QUANTISED_FROM, model.dtype)
            # remove_quantization_config deletes the conversions, which saving needs to restore
            # the names in the files.
            conversions = getattr(model, "_weight_conversions", None)
            self.remove_quantization_config(model)
            model._weight_conversions = conversions
            vars(model).pop("is_quantized", None)
            for module in (module for module in model.modules() if hasattr(module, "config")):
                vars(module.config).pop("_is_quantized", None)
            # Not every loader reports a weight of another shape.
            for path, layer in linear_layers(model).items():
                there = tuple(layer.weight.shape)
                here = layer.out_features, layer.in_features
                if there != here:
                    raise ValueError(
                        f"{path}.weight ({list(there)} there, {list(here)} here): of another shape "
                        "than config.json says"
                    )
            self.stacks.settle(model)
            if (
                self.quantization_config.take is None
                and self.quantization_config.form != BaseFormat()
            ):
                _report(model)
            return model

        def is_serializable(self) -> bool:
            return False

        @property
        def is_trainable(self) -> bool:
            return True

    return Configuration


class _Stacks:
    """The stacked experts of a model while it is read.

    Args:
        experts: modules by path.
        form: their formats; NF4 by default.

    Attributes:
        names: names of their stacked weights in the model.
    """

    def __init__(self, experts: Mapping[str, nn.Module], form: BaseFormat | None = None):
        self.form = form
        self.shapes = {
            path: {
                name: tuple(p.shape)
                for name, p in module.named_parameters(recurse=False)
                if p.ndim == 3
            }
            for path, module in experts.items()
        }
        self.names = {f"{path}.{name}" for path, shapes in self.shapes.items() for name in shapes}
        self._packed: dict[str, dict[str, PackedWeight]] = {path: {} for path in experts}

    def take(self, model: Any, name: str, stack: Tensor) -> Tensor:
        """Quantise a stack that was read, on the GPU if there is one, and return its codes.

        A stack of the wrong shape is returned unchanged; the loader reports it.
        """
        path, _, own = name.rpartition(".")
        if tuple(stack.shape) != self.shapes[path][own]:
            return stack
        quantise = _kind_of(path, self.form).quantise
        on_device = stack.to("cuda") if torch.cuda.is_available() else stack
        packed = quantise(on_device.reshape(-1, stack.shape[-1]))
        packed = packed.moved(stack.device).to(stack.dtype)
        self._packed[path][own] = packed
        model.get_submodule(path).register_parameter(
            own, nn.Parameter(packed.codes, requires_grad=False)
        )
        return packed.codes

    def settle(self, model: Any) -> None:
        """Install packed experts in place of the modules whose stacks were quantised.

        Raises:
            ValueError: a stack in the files has another shape. transformers below 5.21 does not
                report it.
        """
        for path, packed in self._packed.items():
            for own in self.shapes[path].keys() - packed.keys():
                there = tuple(model.get_submodule(path).get_parameter(own).shape)
                here = self.shapes[path][own]
                if there != here:
                    raise ValueError(
                        f"{path}.{own} ({list(there)} there, {list(here)} here): of another shape "
                        "than config.json says"
                    )
            if packed.keys() == self.shapes[path].keys():
                model.set_submodule(
                    path, PackedExperts(model.get_submodule(path), packed, self.shapes[path])
                )


__all__ = ["describe_packed", "packed_description"]


def describe_packed(model: Any) -> None:
    """Add ``quantization_config`` for packed layers, or remove it if no layer is packed.

    An existing one is kept while any layer is packed. Call this after layers were packed or
    unpacked, and before ``save_pretrained``.

    Raises:
        ValueError: layers or experts are in a format that transformers cannot store.
    """
    for path, module in packed_modules(model):
        reason = module.why_not_saved(path, type(model).__name__)
        if reason is not None:
            raise ValueError(
                f"{reason}; save its adapters, or what model.merge_and_unload() returns"
            )
    there = getattr(model.config, "quantization_config", None)
    layers = dict(packed_layers(model))
    if layers and there is None:
        first = next(iter(layers.values()))
        described = first.packed.quantization_config(model, layers.keys())
        if described is not None:
            model.config.quantization_config = described
        return
    stated = isinstance(there, dict) and format_of_files(there) is not None
    if stated and not layers and not has_foreign_layers(model):
        del model.config.quantization_config
        vars(model).pop("is_quantized", None)
