"""Loads checkpoints with packed weights through transformers, into our packed modules.

They hold linear layers in bitsandbytes' 4 bits, or stacked experts in a format with
``PackedWeight.STACK_PARTS``.

transformers calls a quantizer, which prepares the model and says how tensors of a file are
converted. Our quantizers put a placeholder for each packed weight into the model, let it take the
weight's tensors as they are read, and install packed layers or experts at the end. No other library
is needed, and nothing is dequantised.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig
from transformers.core_model_loading import ConversionOps, WeightConverter, build_glob_alternation
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from chronicals.models.loading import load_whole, quantization_of
from chronicals.models.preparing import prepare
from chronicals.quantization import PackedExperts, PackedWeight, format_of_files
from chronicals.quantization.bitsandbytes import ENTRIES, read_weight
from chronicals.quantization.experts import can_be_packed
from chronicals.quantization.packed import PACKED_FORMATS
from chronicals.versions import QUANTIZER_SAYS_DTYPE, transformers_before

_METHOD = "chronicals_4bit"
"""Name of the quantizer for linear layers in transformers' registry."""

STACKS_METHOD = "chronicals_stacks"
"""Name of the quantizer for stacked experts in transformers' registry."""

PACKED_HERE = "_chronicals_packed_here"
"""Attribute of experts while they are loaded: the packed weights by name."""

FAILURES = "_chronicals_failures"
"""Attribute of a model while it is loaded: errors about its packed weights."""


def load_packed(auto_class: Any, name: str | Path, **options: Any) -> Any:
    """Load a checkpoint in a packed format into our packed layers or experts.

    No other quantisation library is needed.

    Args:
        auto_class: transformers' Auto class for the model.
        name: a folder or a hub name.
        options: arguments of ``from_pretrained``.

    Raises:
        ValueError: as in ``load_whole``, or a packed weight is damaged; the message names it.
    """
    config = AutoConfig.from_pretrained(
        name, trust_remote_code=options.get("trust_remote_code", False)
    )
    described = quantization_of(config)
    form = format_of_files(described)
    assert form is not None
    if form.STACK_PARTS:
        ours: dict[str, Any] = {"quant_method": STACKS_METHOD, "form": form.__name__}
    else:
        ours = {
            "quant_method": _METHOD,
            "skipped": described.get("llm_int8_skip_modules"),
            "storage": described.get("bnb_4bit_quant_storage") or "uint8",
        }
    config.quantization_config = ours
    model = load_whole(auto_class, name, config=config, **options)
    del model.hf_quantizer
    model.config.quantization_config = dict(described)
    # Saving applies the inverse of these conversions, and ours have none.
    used = []
    for conversion in model._weight_conversions:
        operations = getattr(conversion, "operations", ())
        if not any(isinstance(operation, _Take | _TakeStack) for operation in operations):
            used.append(conversion)
    model._weight_conversions = used
    return model


class _Place(nn.Module):
    """A placeholder for a linear layer while its tensors are read.

    Args:
        linear: the layer.
        stored: dtype of the codes in the file.

    Attributes:
        shape: ``(out, in)`` of the dense weight.
        packed: the weight, once it was read.
    """

    def __init__(self, linear: Any, stored: torch.dtype = torch.uint8):
        super().__init__()
        conv = isinstance(linear, Conv1D)
        self.shape: tuple[int, int] = (
            (linear.nf, linear.nx) if conv else (linear.out_features, linear.in_features)
        )
        size = -(-self.shape[0] * self.shape[1] // 2)
        # Older versions cast tensors to the dtype of the parameter, newer ones ask the quantizer.
        dtype = stored if transformers_before(QUANTIZER_SAYS_DTYPE) else torch.uint8
        self.weight = nn.Parameter(
            torch.empty((size, 1), dtype=dtype, device="meta"), requires_grad=False
        )
        self.bias = linear.bias
        self.packed: PackedWeight | None = None


class _Take(ConversionOps):
    """The conversion that hands the tensors of a layer to its placeholder."""

    def convert(
        self,
        input_dict: dict[str, Any],
        *_: Any,
        model: Any = None,
        full_layer_name: str = "",
        **__: Any,
    ) -> dict[str, Any]:
        """Return the codes of a packed weight, or the tensor of a dense one.

        Errors are kept in ``FAILURES`` until all weights are read.
        """
        name = full_layer_name
        layer = model.get_submodule(name.rpartition(".")[0])
        if len(input_dict) == 1 and not isinstance(layer, _Place):
            return input_dict
        stored = {}
        for key, value in input_dict.items():
            tensor = value[0] if isinstance(value, list) else value
            stored[name + key.removeprefix("weight")] = tensor
        try:
            if len(stored) == 1:
                raise ValueError(
                    f"{name}: is not in 4 bits, and config.json does not name it in "
                    "llm_int8_skip_modules"
                )
            # Without a placeholder its tensors were cast to the dtype of a dense weight.
            if not isinstance(layer, _Place):
                raise ValueError(
                    f"{name}: is in 4 bits, and of no linear layer or one that "
                    "llm_int8_skip_modules names"
                )
            packed = read_weight(name, stored)
            if packed.shape != layer.shape:
                raise ValueError(
                    f"{name}: is {list(packed.shape)} in the checkpoint, {list(layer.shape)} by "
                    "config.json"
                )
            layer.packed = packed
            codes = packed.codes.view(-1, 1)
        except ValueError as error:
            vars(model).setdefault(FAILURES, []).append(str(error))
            codes = torch.zeros(layer.weight.shape, dtype=torch.uint8)
        return {"weight": nn.Parameter(codes, requires_grad=False)}


class _OfPacked(HfQuantizer):
    """A quantizer for weights that are packed already; it never quantises.

    Attributes:
        dtype: dtype that was requested for the model.
    """

    dtype: torch.dtype

    def is_serializable(self) -> bool:
        """Return True: the model is saved with its codes."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True, for adapters."""
        return True

    def get_new_dtype(
        self, converter: Any, param: Any, dtype: torch.dtype | None
    ) -> torch.dtype | None:
        """Return None for a packed weight's tensors, so that only dense tensors are cast."""
        return dtype if dtype is not None and dtype.is_floating_point else None

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        """Raise the errors about packed weights that were found while reading."""
        failures = vars(model).pop(FAILURES, [])
        if failures:
            others = f" (and {len(failures) - 1} more weights)" if len(failures) > 1 else ""
            raise ValueError(failures[0] + others)


@register_quantization_config(_METHOD)
@register_quantization_config(STACKS_METHOD)
class _Config(QuantizationConfigMixin):
    """The fields of a ``quantization_config`` that our quantizers read.

    Attributes:
        quant_method: name of the quantizer.
        skipped: layers whose weights are not packed.
        storage: dtype of the codes in the files.
        form: name of the format of stacked experts.
    """

    def __init__(
        self,
        quant_method: str = "",
        skipped: list[str] | None = None,
        storage: str = "uint8",
        form: str = "",
        **_: Any,
    ):
        self.quant_method = quant_method  # type: ignore[assignment]
        self.skipped = skipped
        self.storage = storage
        self.form = form


@register_quantizer(_METHOD)
class _Quantizer(_OfPacked):
    """The quantizer for packed linear layers.

    Attributes:
        dtypes: dtypes of the dense parameters before loading, by name.
    """

    dtypes: dict[str, torch.dtype]

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        self.dtype = model.dtype  # newer versions do not pass the dtype that was asked for
        self.dtypes = {
            name: p.dtype for name, p in model.named_parameters() if p.is_floating_point()
        }
        kept = self.get_modules_to_not_convert(
            model, self.quantization_config.skipped, model._keep_in_fp32_modules
        )
        for path, layer in list(model.named_modules()):
            if (type(layer) is nn.Linear or isinstance(layer, Conv1D)) and should_convert_module(
                path, kept
            ):
                self.dtypes.pop(f"{path}.weight", None)
                model.set_submodule(
                    path,
                    _Place(layer, getattr(torch, self.quantization_config.storage, torch.uint8)),
                )

    def get_weight_conversions(self) -> list[Any]:
        stored = [f"weight.{entry}" for entry in ENTRIES]
        # One converter for both names: in older versions the first that matches wins.
        return [WeightConverter([*stored, "weight"], "weight", [_Take()])]

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        super()._process_model_after_weight_loading(model)
        for path, place in list(model.named_modules()):
            if isinstance(place, _Place) and place.packed is not None:
                model.set_submodule(
                    path, place.packed.to(self.dtype).layer(place.bias).train(place.training)
                )
        if not transformers_before(QUANTIZER_SAYS_DTYPE):
            return
        # Older versions left dense parameters in the dtype of the file; they get the dtype that
        # they have without a quantizer.
        in_fp32 = list(model._get_dtype_plan(self.dtype))
        pattern = build_glob_alternation(in_fp32)[0] if in_fp32 else None
        for name, parameter in model.named_parameters():
            if name in self.dtypes:
                kept = pattern is not None and pattern.search(name)
                parameter.data = parameter.data.to(torch.float32 if kept else self.dtypes[name])


class _TakeStack(ConversionOps):
    """The conversion that packs a stacked weight's tensors and stores it in ``PACKED_HERE``.

    Args:
        form: format of the weight.
    """

    def __init__(self, form: type[PackedWeight]):
        self.form = form

    def convert(
        self,
        input_dict: dict[str, Any],
        *_: Any,
        model: Any = None,
        full_layer_name: str = "",
        **__: Any,
    ) -> dict[str, Any]:
        path, _dot, name = full_layer_name.rpartition(".")
        first = {
            key: value[0] if isinstance(value, list) else value for key, value in input_dict.items()
        }
        module = model.get_submodule(path)
        if len(first) != len(self.form.STACK_PARTS):
            return {name: next(iter(first.values()))}
        place = module.get_parameter(name)
        try:
            weight = self.form.read(name, first)
            if weight.codes.shape != place.shape:
                values = math.prod(weight.shape)
                raise ValueError(f"has {values} values in the checkpoint, others by config.json")
        except (KeyError, ValueError) as error:
            vars(model).setdefault(FAILURES, []).append(f"{full_layer_name}: {error}")
            return {name: torch.zeros(place.shape, dtype=torch.uint8)}
        vars(module)[PACKED_HERE][name] = weight
        return {name: weight.codes}


@register_quantizer(STACKS_METHOD)
class _StacksQuantizer(_OfPacked):
    """The quantizer for experts whose stacked weights are packed in the checkpoint.

    Attributes:
        shapes: dense shapes of the stacked weights, by path and name.
    """

    shapes: dict[str, dict[str, tuple[int, ...]]]

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        self.dtype = model.dtype  # newer versions do not pass the dtype that was asked for
        prepare(model)
        self.shapes = {}
        for path, module in model.named_modules():
            if not can_be_packed(module):
                continue
            parameters = list(module.named_parameters(recurse=False))
            shapes = {name: tuple(p.shape) for name, p in parameters if p.ndim == 3}
            for name, shape in shapes.items():
                # The loader gets the codes, with two values a byte.
                size = torch.Size(shape).numel() // 2
                codes = torch.empty(size, dtype=torch.uint8, device="meta")
                module.register_parameter(name, nn.Parameter(codes, requires_grad=False))
            self.shapes[path] = shapes
            vars(module)[PACKED_HERE] = {}

    def get_weight_conversions(self) -> list[Any]:
        form = PACKED_FORMATS[self.quantization_config.form]
        names: set[str] = set().union(*self.shapes.values())
        return [
            WeightConverter([name + part for part in form.STACK_PARTS], name, [_TakeStack(form)])
            for name in sorted(names)
        ]

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        super()._process_model_after_weight_loading(model)
        for path in self.shapes:
            module = model.get_submodule(path)
            packed = vars(module).pop(PACKED_HERE)
            if packed.keys() != self.shapes[path].keys():
                missing = sorted(self.shapes[path].keys() - packed.keys())[0]
                raise ValueError(f"{path}.{missing}: is not packed in the checkpoint")
            weights = {name: weight.to(self.dtype) for name, weight in packed.items()}
            experts = PackedExperts(module, weights, self.shapes[path], self.shapes[path])
            model.set_submodule(path, experts)
