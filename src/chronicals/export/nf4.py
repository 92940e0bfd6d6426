"""Linear layers in NF4, in the files that bitsandbytes writes: to go on with QLoRA in transformers.

Stacked experts, which transformers quantises with bitsandbytes neither, stay in bf16.
"""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from chronicals.export.part_names import StoredNames
from chronicals.export.proof import Proof, largest_error, relative_error
from chronicals.export.source import Source, logits_of, on_device
from chronicals.export.weight_files import NewTensor, StoredTensor
from chronicals.export.whole import (
    CLIENT,
    in_dtype,
    name_dtype,
    prove_beside,
    prove_rounded,
    write_beside,
    write_files,
)
from chronicals.kernels.nf4 import SCALE_BLOCK
from chronicals.models import load_model
from chronicals.models.gguf_families import NotExpressible
from chronicals.models.loading import load_without_weights, quantised_names
from chronicals.models.packed_config import packed_description
from chronicals.quantization import Packed, packed_layers
from chronicals.quantization.bitsandbytes_format import STATE, stored_tensors
from chronicals.quantization.nf4 import BLOCK

PACKAGE = "bitsandbytes"

ERROR = 0.13
"""Of a weight, relative; NF4 in blocks of 64 changes Gaussian numbers by 0.09."""

BOUND = 3e-2
OF_ROUNDING = 2.0
"""Of logits beside torch with the same weights, products in bf16; the same as a multiple of what
bf16 rounds in torch.
"""

DESCRIPTION = 256
"""Bytes of the JSON beside a weight, blanks at its end included: the header of a file comes
before what the JSON says.
"""


def write(source: Source, aside: Path) -> None:
    """Write the folder, a tensor at a time.

    Raises:
        NotExpressible: the model is quantised already, or has no decoder layers with linear layers.
    """
    names = _quantised_names(source)
    source.check_kept("BF16")
    aside.mkdir(parents=True)
    write_files(source, aside, lambda stored: _written(stored, names))
    write_beside(source, aside)
    packed = {name.removesuffix(".weight") for name in names.values()}
    described = packed_description(load_without_weights(source.folder), packed, torch.bfloat16)
    name_dtype(aside, "bf16", quantization_config=described)


def _quantised_names(source: Source) -> dict[str, str]:
    """The weights that are quantised: their names in the files, and what the loaded model calls
    them.
    """
    if described := getattr(source.config, "quantization_config", None):
        method = (described if isinstance(described, dict) else described.to_dict()).get(
            "quant_method"
        )
        raise NotExpressible(
            f"nf4: its weights are quantised already ({method}); export the model that they were "
            "made of"
        )
    stored = StoredNames(source.tensors)
    names = {name: stored.find(name) for name in sorted(quantised_names(source.folder))}
    if not names:
        raise NotExpressible(
            f"nf4: {type(source.config).__name__} is of a model that has no list of decoder "
            "layers with plain linear layers; "
            "nothing would be quantised, so export it merged (--to merged)"
        )
    if missing := [name for name, found in names.items() if found is None]:
        raise NotExpressible(
            f"nf4: {missing[0]} is made of other tensors of the files as they are read, so that "
            "it cannot be stored in 4 bits; "
            "export it merged (--to merged)"
        )
    return {found: name for name, found in names.items() if found is not None}


def _written(stored: StoredTensor, names: dict[str, str]) -> list[NewTensor]:
    """What takes the place of a tensor."""
    return _in_4_bits(stored) if stored.name in names else [in_dtype(stored, "BF16")]


def _in_4_bits(stored: StoredTensor) -> list[NewTensor]:
    """What bitsandbytes stores of a weight, which is quantised when the first of it is written,
    and let go with the last.
    """
    name = stored.name
    (rows, columns) = stored.shape
    made: dict[str, Tensor] = {}
    blocks = -(-rows * columns // BLOCK)
    like = {
        name: ("U8", (-(-rows * columns // 2), 1)),
        f"{name}.absmax": ("U8", (blocks,)),
        f"{name}.quant_map": ("F32", (16,)),
        f"{name}.nested_absmax": ("F32", (-(-blocks // SCALE_BLOCK),)),
        f"{name}.nested_quant_map": ("F32", (256,)),
        f"{name}.{STATE}nf4": ("U8", (DESCRIPTION,)),
    }

    def part(own: str) -> Tensor:
        if not made:
            made.update(_quantised_tensors(stored))
        return made.pop(own)

    return [
        NewTensor(own, dtype, shape, partial(part, own)) for own, (dtype, shape) in like.items()
    ]


def _quantised_tensors(stored: StoredTensor) -> dict[str, Tensor]:
    """The tensors of a weight by name, in host memory; on a card where there is one it is
    quantised there.
    """
    weight = stored.read().float()
    packed = Packed.of(weight.to("cuda") if torch.cuda.is_available() else weight).to(
        torch.bfloat16
    )
    tensors = {name: tensor.cpu() for name, tensor in stored_tensors(stored.name, packed).items()}
    described = tensors[f"{stored.name}.{STATE}nf4"]
    blanks = torch.full((DESCRIPTION - len(described),), ord(" "), dtype=torch.uint8)
    return {**tensors, f"{stored.name}.{STATE}nf4": torch.cat([described, blanks])}


def size(source: Source) -> int:
    """Bytes of the tensors."""
    names = _quantised_names(source)
    return sum(
        tensor.bytes for stored in source.tensors.values() for tensor in _written(stored, names)
    )


def prove(source: Source, aside: Path, proof: Proof) -> None:
    """Read the weights back; load them by transformers with bitsandbytes, and compare with the
    same weights in torch.
    """
    packed = load_model(aside, torch.bfloat16)
    stored_names = _quantised_names(source)
    layers = {f"{path}.weight": layer for path, layer in packed_layers(packed)}
    proof.equal("layers in 4 bits", PACKAGE, sorted(quantised_names(source.folder)), sorted(layers))
    whole = load_model(source.folder, torch.float32)
    inside = sum(
        parameter.numel() for name, parameter in whole.named_parameters() if name in layers
    )
    proof.reported(
        "ratio of the weights that are in 4 bits",
        PACKAGE,
        inside / sum(p.numel() for p in whole.parameters()),
    )
    source.prove_merged(proof)
    prove_rounded(source, aside, lambda stored: _written(stored, stored_names), proof)
    names = {name: found for found, name in stored_names.items()}
    errors = {}
    for name, parameter in whole.named_parameters():
        if name in layers:
            dense = layers[name].packed.dense().float()
            errors[name] = relative_error(dense, source.trained_tensors[names[name]].read())
            parameter.data = dense
        else:
            parameter.data = parameter.data.bfloat16().float()
    worst = max(errors, key=lambda name: errors[name])
    proof.bounded("quantised weights", PACKAGE, errors[worst], ERROR, worst)
    same_weights = on_device(whole)
    source.prove_survival(same_weights, proof)
    expected = logits_of(same_weights, source.documents)
    if importlib.util.find_spec(PACKAGE) is None:
        proof.not_run("logits", CLIENT, f"{PACKAGE} is not installed: pip install {PACKAGE}")
        return
    prove_beside(source, aside, proof)
    dtype = json.loads((aside / "config.json").read_text())["dtype"]
    theirs = type(whole).from_pretrained(aside, dtype=getattr(torch, dtype)).eval()
    for layer in theirs.modules():
        if hasattr(
            layer, "support_avx512bf16_for_cpu"
        ):  # a kernel for layers of whole blocks of rows alone
            layer.support_avx512bf16_for_cpu = False
    found = logits_of(theirs, source.documents)
    error = largest_error(found, expected)
    rounded = largest_error(logits_of(same_weights.bfloat16(), source.documents), expected)
    bound = source.at_least(max(BOUND, OF_ROUNDING * rounded))
    proof.bounded(
        "logits beside torch with the same weights", f"{CLIENT} with {PACKAGE}", error, bound
    )
    cost = largest_error(found, source.trained_logits)
    proof.reported("logits beside the trained model's", CLIENT, cost)
