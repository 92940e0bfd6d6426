"""4-bit weights as bitsandbytes stores them in files, and its layers in a model.

bitsandbytes itself is not needed. ``shared`` wraps a ``bitsandbytes.nn.Linear4bit``, as
transformers creates it from ``BitsAndBytesConfig``, as one of our layers over the same codes,
scales and bias. In files a weight ``W [N, K]`` called ``name`` is stored as these tensors:

    name                                 uint8 [⌈N·K / 2⌉, 1]    two codes per byte
    name.absmax                          fp32 or uint8 [blocks]  scales, or their codes
    name.quant_map                       fp32 [16]               values of the codes
    name.quant_state.bitsandbytes__nf4   uint8 [bytes]           JSON: quant_type, blocksize, …
    name.nested_absmax                   fp32 [blocks / 256]     scales of the scales
    name.nested_quant_map                fp32 [256]              values of the scales' codes

The last two exist only if the scales are quantised too ("double quantization"). The codes may be
stored as the same bytes in another dtype. For FP4 the JSON tensor's name ends with ``__fp4``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from chronicals.kernels.nf4 import BLOCK_SIZES, CODE_VALUES, Scales, code_of
from chronicals.log_once import log_once
from chronicals.quantization.nf4 import FourBits, Linear4bit, Packed
from chronicals.quantization.packed_linear import packed_weight

logger = logging.getLogger(__name__)

QUANT_STATE = "quant_state.bitsandbytes__"
"""Start of the name of the JSON tensor; the format (nf4 or fp4) follows."""

NESTED = ("nested_absmax", "nested_quant_map")
ENTRIES = ("absmax", "quant_map", *NESTED, *(QUANT_STATE + code for code in CODE_VALUES))
"""Tensors stored next to the codes: the part of the name after the weight's and a dot."""

BITSANDBYTES_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Dtypes of weights by their names in the JSON tensor."""

_LAYERS = {f"bitsandbytes.nn.modules.{name}" for name in ("Linear4bit", "LinearNF4", "LinearFP4")}

_SHARED = "_chronicals_shared"
"""Attribute of a bitsandbytes layer that holds our layer over the same memory."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def read_weight(name: str, stored: Mapping[str, Tensor]) -> Packed:
    """Return a weight from the tensors of a checkpoint, sharing their memory.

    Args:
        name: name of the weight.
        stored: tensors by name; it may hold others.

    Raises:
        ValueError: a tensor is missing, is damaged, or does not fit the others; the message names
            it.
    """
    prefix = f"{name}.{QUANT_STATE}"
    (written, *more) = sorted(key for key in stored if key.startswith(prefix)) or (f"{prefix}nf4",)
    if more:
        raise ValueError(
            f"{name}: has {written} and {more[0]}, of which one is of another file; download it "
            "again"
        )

    code = written.removeprefix(prefix)
    state = read_quant_state(written, _there(stored, written), code)
    rows, columns = state["shape"]
    block = state["blocksize"]
    dtype = BITSANDBYTES_DTYPES[state["dtype"]]

    # They may be stored as another dtype, because some ways of sharding require floats.
    codes = _there(stored, name).contiguous().view(-1).view(torch.uint8)
    count = -(-rows * columns // 2)
    if codes.numel() != count:
        raise ValueError(
            f"{name}: has {codes.numel()} bytes, its shape needs {count}; the file is damaged, "
            "download it again"
        )

    scales = _scales(name, stored, state, blocks=-(-rows * columns // block))

    values = _there(stored, f"{name}.quant_map")
    _check(f"{name}.quant_map", values, torch.float32, 16)
    if not torch.allclose(values, code_of(code, values.device), rtol=0, atol=1e-6):
        raise ValueError(
            f"{name}.quant_map: is not that of {code}: codes would stand for other values; the "
            "file is damaged or of another format"
        )
    return Packed(codes, scales, (rows, columns), dtype, block, code, quantized_from=dtype)


def stored_tensors(name: str, weight: Packed) -> dict[str, Tensor]:
    """Return the tensors that bitsandbytes stores for a weight, by name.

    Their order and bytes are those of bitsandbytes.
    """
    scales = weight.scales
    described: dict[str, Any] = {
        "quant_type": weight.code,
        "blocksize": weight.block,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "shape": list(weight.shape),
    }
    code_values = code_of(weight.code, weight.codes.device)
    tensors = {
        name: weight.codes.view(-1, 1),
        f"{name}.absmax": scales.absmax,
        f"{name}.quant_map": code_values.clone(),  # files hold no tensor that others share
    }

    if scales.absmax2 is not None and scales.code2 is not None and scales.offset is not None:
        described |= {
            "nested_blocksize": scales.block2,
            "nested_dtype": "float32",
            "nested_offset": scales.offset.item(),
        }
        tensors |= {
            f"{name}.nested_absmax": scales.absmax2,
            f"{name}.nested_quant_map": scales.code2.clone(),
        }

    text = bytearray(json.dumps(described).encode())
    tensors[f"{name}.{QUANT_STATE}{weight.code}"] = torch.frombuffer(text, dtype=torch.uint8)
    return tensors


def packed_description(
    model: Any, packed: Collection[str], dtype: torch.dtype, code: str = "nf4", nested: bool = True
) -> dict[str, Any]:
    """Return the ``quantization_config`` of a model with some linear layers stored in 4 bits.

    Args:
        model: may be on the meta device, with plain layers.
        packed: paths of the 4-bit layers.
        dtype: dtype to which they are dequantised.
        code: "nf4" or "fp4".
        nested: True if their scales are quantised too.
    """
    head = model.get_output_embeddings()
    others = {path: layer for path, layer in model.named_modules() if path not in packed}
    # Those that transformers would take for layers in 4 bits.
    skipped = [
        path
        for path, layer in others.items()
        if layer is head or isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"
    ]
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": code,
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": skipped,
    }


def _there(stored: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in stored:
        raise ValueError(
            f"{name}: not in the checkpoint, which is cut or of another format; download it again"
        )
    return stored[name]


def read_quant_state(name: str, text: Tensor, code: str) -> dict[str, Any]:
    """Return what a JSON tensor says of its weight, such as "shape", "blocksize" and "dtype".

    Args:
        name: name of the tensor, for messages.
        text: the tensor.
        code: the format that its name ends with.

    Raises:
        ValueError: the JSON is damaged, or is of another format.
    """
    try:
        described = json.loads(bytes(text.cpu().tolist()))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name}: is no JSON ({error}); the file is damaged, download it again"
        ) from None
    if not isinstance(described, dict):
        raise ValueError(
            f"{name}: is {type(described).__name__}, no object; the file is damaged, download it "
            "again"
        )

    allowed: dict[str, Iterable[Any]] = {
        "quant_type": {code} & CODE_VALUES.keys(),
        "blocksize": BLOCK_SIZES,
        "dtype": BITSANDBYTES_DTYPES,
    }
    for field, values in allowed.items():
        if described.get(field) not in list(values):
            told = ", ".join(map(str, values)) or f"one of {', '.join(CODE_VALUES)}"
            raise ValueError(f"{name}: {field}={described.get(field)!r}, not {told}")

    shape = described.get("shape")
    if (
        not isinstance(shape, list)
        or len(shape) != 2
        or not all(type(size) is int and size > 0 for size in shape)
    ):
        raise ValueError(
            f"{name}: shape={shape!r}: only weights of linear layers, [rows, columns], can be read"
        )
    return described


def _scales(
    name: str, stored: Mapping[str, Tensor], state: Mapping[str, Any], blocks: int
) -> Scales:
    absmax = _there(stored, f"{name}.absmax")
    if "nested_offset" not in state:
        for key in NESTED:
            if f"{name}.{key}" in stored:
                raise ValueError(
                    f"{name}.{key}: is there, and the description has no nested_offset; download "
                    "it again"
                )
        _check(f"{name}.absmax", absmax, torch.float32, blocks)
        return Scales(absmax)

    absmax2, code2 = (_there(stored, f"{name}.{key}") for key in NESTED)
    block2 = state.get("nested_blocksize")
    offset = state["nested_offset"]
    if type(block2) is not int or block2 < 1 or not isinstance(offset, float | int):
        raise ValueError(
            f"{name}: nested_blocksize={block2!r}, nested_offset={offset!r}: damaged; download "
            "the file again"
        )

    _check(f"{name}.absmax", absmax, torch.uint8, blocks)
    _check(f"{name}.nested_absmax", absmax2, torch.float32, -(-blocks // block2))
    _check(f"{name}.nested_quant_map", code2, torch.float32, 256)
    return Scales(absmax, absmax2, code2, torch.tensor(float(offset), device=absmax.device), block2)


def _check(name: str, tensor: Tensor, dtype: torch.dtype, count: int) -> None:
    if tensor.dtype != dtype or tensor.numel() != count:
        raise ValueError(
            f"{name}: is {tensor.dtype} with {tensor.numel()} elements, not {dtype} with {count}; "
            "the file is damaged or of another version of the format, download it again"
        )
    if dtype == torch.float32 and not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name}: holds what is no number; the file is damaged, download it again")


def is_of_bitsandbytes(layer: Any) -> bool:
    """Return whether ``layer`` is a bitsandbytes linear layer with a 4-bit weight."""
    return f"{type(layer).__module__}.{type(layer).__qualname__}" in _LAYERS


def has_foreign_layers(model: nn.Module) -> bool:
    """Return whether ``model`` has bitsandbytes linear layers in 4 bits."""
    return any(is_of_bitsandbytes(layer) for layer in model.modules())


def recipe_of_layer(layer: Any) -> FourBits | None:
    """Return how the weight of a linear layer was quantised, for our layers and bitsandbytes'.

    It is None if the weight is not quantised, and for every other module.

    Raises:
        ValueError: as for ``weight_of_layer``.
    """
    if is_of_bitsandbytes(layer):
        weight = weight_of_layer(layer)
        return FourBits.of(weight, layer.compute_dtype or weight.dtype)
    packed = packed_weight(layer)
    return None if packed is None else packed.recipe


class _Shared(NamedTuple):
    """Our layer, and the tensors it was made from."""

    ours: Linear4bit
    state: Any
    places: tuple[int | None, ...]


def shared(layer: Any) -> Linear4bit:
    """Return ``layer`` as one of our layers, with the same memory and hooks.

    The same object is returned as long as the layer keeps its weight. It multiplies in the layer's
    ``bnb_4bit_compute_dtype`` if that has 16 bits. Otherwise it uses the dtype that the weight had
    before quantisation, which is logged once.

    Raises:
        ValueError: as for ``weight_of_layer``; or the layer has its own forward, or trains a bias
            in another dtype.
    """
    if "forward" in vars(layer):
        raise ValueError("has another forward than its class")
    known: _Shared | None = vars(layer).get(_SHARED)
    if (
        known is not None
        and known.state is layer.weight.quant_state
        and known.places == _places(layer)
    ):
        return known.ours

    packed = weight_of_layer(layer)
    dtype = packed.dtype if layer.compute_dtype in (None, torch.float32) else layer.compute_dtype
    ours = Linear4bit(packed.to(dtype)).train(layer.training)

    bias = layer.bias
    if bias is not None and bias.dtype != dtype:
        if bias.requires_grad:
            raise ValueError(f"trains a bias in {bias.dtype}, its products are in {dtype}")
        # bitsandbytes casts it in the same way in its forward pass
        bias = nn.Parameter(bias.detach().to(dtype), requires_grad=False)
    ours.bias = bias
    vars(ours).update({hooks: vars(layer)[hooks] for hooks in HOOKS})

    if layer.compute_dtype not in (None, dtype):
        log_once(
            logger.warning,
            f"bnb_4bit_compute_dtype={layer.compute_dtype}: fused layers multiply in {dtype}, "
            "which the weights were quantized from; layers that are not fused do as it says",
        )
    vars(layer)[_SHARED] = _Shared(ours, layer.weight.quant_state, _places(layer))
    return ours


def _places(layer: Any) -> tuple[int | None, ...]:
    """Return the addresses of a layer's tensors; a moved, replaced or cast one has another."""
    state = layer.weight.quant_state
    bias = layer.bias
    return (
        layer.weight.data_ptr(),
        state.absmax.data_ptr(),
        None if bias is None else id(bias),
        getattr(bias, "_version", None),
    )


def weight_of_layer(layer: Any) -> Packed:
    """Return the weight of a ``bitsandbytes.nn.Linear4bit``, sharing its memory.

    Raises:
        ValueError: the weight is not quantised yet, or is in a form without stored tensors; the
            message continues a sentence after the layer's name.
    """
    if getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False):
        # A call in evaluation mode laid the codes out for this CPU; this puts them back in order.
        layer.state_dict()

    state = getattr(layer.weight, "quant_state", None)
    if state is None:
        raise ValueError(
            "has 4-bit weights that are not quantized yet; move the model to its device first"
        )
    if (
        state.quant_type not in CODE_VALUES
        or state.blocksize not in BLOCK_SIZES
        or state.dtype not in BITSANDBYTES_DTYPES.values()
    ):
        raise ValueError(
            f"has weights in {state.quant_type}, of {state.dtype}, in blocks of {state.blocksize}"
        )

    scales = Scales(state.absmax)
    nested = state.state2
    if nested is not None:
        scales = Scales(state.absmax, nested.absmax, nested.code, state.offset, nested.blocksize)

    codes = layer.weight.data.view(torch.uint8).view(-1)
    (rows, columns) = state.shape
    return Packed(
        codes, scales, (rows, columns), state.dtype, state.blocksize, state.quant_type, state.dtype
    )
