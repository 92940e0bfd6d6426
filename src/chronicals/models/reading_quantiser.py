"""The quantiser of transformers by which ``from_pretrained`` quantises to 4 bits as it reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from chronicals.models.base_format import BaseFormat
from chronicals.models.four_bits import (
    NO_LAYERS,
    QUANTISED_FROM,
    TRANSPOSED,
    WATCHED,
    Take,
    Watch,
    kind_of_layer,
    linear_layers,
    named_layers,
    report_quantised,
    stacked_experts,
)
from chronicals.models.preparing import prepare
from chronicals.quantization import PackedExperts, PackedWeight

_METHOD = "chronicals_nf4"
"""``quant_method`` of the quantiser in transformers' registry."""


@register_quantization_config(_METHOD)
class Configuration(QuantizationConfigMixin):
    """Settings of the quantiser, which are the arguments of ``quantising_while_reading``."""

    def __init__(
        self,
        watch: Watch | None = None,
        take: Take | None = None,
        form: BaseFormat | None = None,
        **_: Any,
    ):
        self.quant_method = _METHOD  # type: ignore[assignment]
        self.watch = watch
        self.take = take
        self.form = form


class Quantise(ConversionOps):
    """The conversion of one weight that was read.

    Args:
        left: names of weights that have not been read yet; a weight is taken out as it comes.
        stacks: the model's stacked experts.
        asked: what is quantised.
    """

    def __init__(self, left: set[str], stacks: Stacks, asked: Configuration):
        self.left = left
        self.stacks = stacks
        self.asked = asked

    def convert(self, input_dict: dict[str, Any], model: Any = None, **_: Any) -> dict[str, Tensor]:
        """Put the quantised layer in its place, and return its codes by the weight's name."""
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
            kind = kind_of_layer(path, self.asked.form)
            packed = kind.quantise(weight.to(place)).to(weight.dtype)
            if self.asked.watch is not None:
                self.asked.watch(path, weight.to(place), packed)
            layer = packed.layer(linear.bias).to(weight.device)
        layer._is_hf_initialized = True
        model.set_submodule(path, layer)
        return {name: layer.weight}


@register_quantizer(_METHOD)
class Quantiser(HfQuantizer):
    """Quantises the linear layers and stacked experts of a model, and leaves no trace in it."""

    left: set[str]
    stacks: Stacks

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        prepare(model)
        form = self.quantization_config.form
        named = named_layers(model, form)
        self.left = {
            f"{path}.weight" for path, layer in named.items() if type(layer).__name__ != TRANSPOSED
        }
        if not self.left and form is None:
            raise ValueError(NO_LAYERS.format(type(model).__name__))
        takes_layers = self.quantization_config.take is not None
        experts = {} if takes_layers else stacked_experts(model, form)
        self.stacks = Stacks(experts, form)
        self.left |= self.stacks.names
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Return whether a weight is to be quantised and was not read yet."""
        return param_name in self.left

    def get_quantize_ops(self) -> Quantise:
        """Return the conversion of the weights that are quantised."""
        return Quantise(self.left, self.stacks, self.quantization_config)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        asked = self.quantization_config
        quantises = asked.take is None and asked.form != BaseFormat()
        if asked.watch is not None:
            setattr(model, WATCHED, asked.watch)
        if quantises:
            setattr(model, QUANTISED_FROM, model.dtype)
        self._leave_no_trace(model)
        _check_shapes(model)
        self.stacks.settle(model)
        if quantises:
            report_quantised(model)
        return model

    def _leave_no_trace(self, model: Any) -> None:
        """Remove what transformers has noted of a quantiser, since the model is saved without."""
        # remove_quantization_config deletes the conversions, which saving needs to restore
        # the names in the files.
        conversions = getattr(model, "_weight_conversions", None)
        self.remove_quantization_config(model)
        model._weight_conversions = conversions
        vars(model).pop("is_quantized", None)
        for module in model.modules():
            if hasattr(module, "config"):
                vars(module.config).pop("_is_quantized", None)

    def is_serializable(self) -> bool:
        """Return False: what is saved is described by ``describe_packed``."""
        return False

    @property
    def is_trainable(self) -> bool:
        """True: adapters are trained over the quantised weights."""
        return True


def _check_shapes(model: Any) -> None:
    """Check the shapes of linear layers that were read; not every loader reports another one.

    Raises:
        ValueError: a weight has another shape than its layer.
    """
    for path, layer in linear_layers(model).items():
        there = tuple(layer.weight.shape)
        here = layer.out_features, layer.in_features
        if there != here:
            raise ValueError(
                f"{path}.weight ({list(there)} there, {list(here)} here): of another shape "
                "than config.json says"
            )


class Stacks:
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
        quantise = kind_of_layer(path, self.form).quantise
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
