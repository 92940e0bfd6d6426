"""Linear layers in NF4, in the files that bitsandbytes writes, for QLoRA in transformers.

Stacked experts, which transformers does not quantise with bitsandbytes either, stay in bf16.
"""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from chronicals.export.artefact import ArtefactFormat
from chronicals.export.proof import Proof, largest_error, relative_error
from chronicals.export.source import SourceModel, logits_of, on_device
from chronicals.export.whole import (
    TRANSFORMERS,
    in_dtype,
    name_dtype,
    prove_beside,
    prove_rounded,
    write_beside,
    write_files,
)
from chronicals.formats.gguf.reader import NotExpressible
from chronicals.formats.tensor_names import StoredNames
from chronicals.formats.weight_files import NewTensor, StoredTensor
from chronicals.kernels.nf4 import SCALE_BLOCK
from chronicals.models import load_model
from chronicals.models.four_bits import packed_description
from chronicals.models.loading import load_without_weights, quantised_names
from chronicals.quantization import Packed, packed_layers
from chronicals.quantization.bitsandbytes import QUANT_STATE, stored_tensors
from chronicals.quantization.nf4 import BLOCK

BITSANDBYTES = "bitsandbytes"

NF4_ERROR = 0.13
"""Bound on the relative error of a weight; NF4 in blocks of 64 changes Gaussian numbers by 0.09."""

NF4_LOGIT_BOUND = 3e-2
"""Bound on the error of logits beside torch's with the same weights, products in bf16."""

BF16_ROUNDING_FACTOR = 2.0
"""The bound is at least this multiple of the change by rounding to bf16 in torch."""

DESCRIPTION_BYTES = 256
"""Bytes of the JSON beside a weight, with blanks at its end: the header of a file, which has the
length, is written before the JSON is known.
"""


class NF4Folder(ArtefactFormat):
    """A folder whose decoder layers have linear layers in NF4."""

    served_by = None

    def size(self, source: SourceModel) -> int:
        """Return the bytes of the tensors."""
        names = _quantised_names(source)
        total = 0
        for stored in source.tensors.values():
            total += sum(tensor.bytes for tensor in _replacements(stored, names))
        return total

    def write(self, source: SourceModel, aside: Path) -> None:
        """Write the folder, one tensor at a time.

        Raises:
            NotExpressible: the model is quantised already, or has no decoder layers with linear
                layers.
        """
        names = _quantised_names(source)
        source.check_kept("BF16")
        aside.mkdir(parents=True)
        write_files(source, aside, lambda stored: _replacements(stored, names))
        write_beside(source, aside)
        packed = {name.removesuffix(".weight") for name in names.values()}
        described = packed_description(load_without_weights(source.folder), packed, torch.bfloat16)
        name_dtype(aside, "bf16", quantization_config=described)

    def prove(self, source: SourceModel, aside: Path, proof: Proof) -> None:
        """Read the weights back; compare transformers and bitsandbytes with the same in torch."""
        packed = load_model(aside, torch.bfloat16)
        stored_names = _quantised_names(source)
        layers = {f"{path}.weight": layer for path, layer in packed_layers(packed)}
        proof.equal(
            "layers in 4 bits", BITSANDBYTES, sorted(quantised_names(source.folder)), sorted(layers)
        )
        whole = load_model(source.folder, torch.float32)
        counts = {name: parameter.numel() for name, parameter in whole.named_parameters()}
        ratio = sum(count for name, count in counts.items() if name in layers) / sum(
            counts.values()
        )
        proof.reported("ratio of the weights that are in 4 bits", BITSANDBYTES, ratio)
        source.prove_merged(proof)
        prove_rounded(source, aside, lambda stored: _replacements(stored, stored_names), proof)
        names = {name: stored_name for stored_name, name in stored_names.items()}
        errors = {}
        for name, parameter in whole.named_parameters():
            if name in layers:
                dense = layers[name].packed.dense().float()
                errors[name] = relative_error(dense, source.trained_tensors[names[name]].read())
                parameter.data = dense
            else:
                parameter.data = parameter.data.bfloat16().float()
        worst = max(errors, key=lambda name: errors[name])
        proof.bounded("quantised weights", BITSANDBYTES, errors[worst], NF4_ERROR, worst)
        same_weights = on_device(whole)
        source.prove_survival(same_weights, proof)
        expected = logits_of(same_weights, source.documents)
        if importlib.util.find_spec(BITSANDBYTES) is None:
            reason = f"{BITSANDBYTES} is not installed: pip install {BITSANDBYTES}"
            proof.not_run("logits", TRANSFORMERS, reason)
            return
        prove_beside(source, aside, proof)
        dtype = json.loads((aside / "config.json").read_text())["dtype"]
        theirs = type(whole).from_pretrained(aside, dtype=getattr(torch, dtype)).eval()
        for layer in theirs.modules():
            # That kernel takes only layers of whole blocks of rows.
            if hasattr(layer, "support_avx512bf16_for_cpu"):
                layer.support_avx512bf16_for_cpu = False
        logits = logits_of(theirs, source.documents)
        error = largest_error(logits, expected)
        rounded = largest_error(logits_of(same_weights.bfloat16(), source.documents), expected)
        bound = source.at_least(max(NF4_LOGIT_BOUND, BF16_ROUNDING_FACTOR * rounded))
        proof.bounded(
            "logits beside torch with the same weights",
            f"{TRANSFORMERS} with {BITSANDBYTES}",
            error,
            bound,
        )
        cost = largest_error(logits, source.trained_logits)
        proof.reported("logits beside the trained model's", TRANSFORMERS, cost)


def _quantised_names(source: SourceModel) -> dict[str, str]:
    """Return the weights that are quantised: names in the loaded model, by names in the files."""
    described = getattr(source.config, "quantization_config", None)
    if described:
        fields = described if isinstance(described, dict) else described.to_dict()
        raise NotExpressible(
            f"nf4: its weights are quantised already ({fields.get('quant_method')}); export the "
            "model that they were made of"
        )
    stored = StoredNames(source.tensors)
    names = {name: stored.find(name) for name in sorted(quantised_names(source.folder))}
    if not names:
        raise NotExpressible(
            f"nf4: {type(source.config).__name__} is of a model that has no list of decoder "
            "layers with plain linear layers; "
            "nothing would be quantised, so export it merged (--to merged)"
        )
    missing = [name for name, stored_name in names.items() if stored_name is None]
    if missing:
        raise NotExpressible(
            f"nf4: {missing[0]} is made of other tensors of the files as they are read, so that "
            "it cannot be stored in 4 bits; "
            "export it merged (--to merged)"
        )
    return {stored_name: name for name, stored_name in names.items() if stored_name is not None}


def _replacements(stored: StoredTensor, names: dict[str, str]) -> list[NewTensor]:
    """Return the tensors that replace one of the model.

    A weight in 4 bits is quantised, on a GPU if there is one, when the first of its tensors is
    written, and freed with the last.
    """
    name = stored.name
    if name not in names:
        return [in_dtype(stored, "BF16")]
    (rows, columns) = stored.shape
    remaining: dict[str, Tensor] = {}
    blocks = -(-rows * columns // BLOCK)
    described = {
        name: ("U8", (-(-rows * columns // 2), 1)),
        f"{name}.absmax": ("U8", (blocks,)),
        f"{name}.quant_map": ("F32", (16,)),
        f"{name}.nested_absmax": ("F32", (-(-blocks // SCALE_BLOCK),)),
        f"{name}.nested_quant_map": ("F32", (256,)),
        f"{name}.{QUANT_STATE}nf4": ("U8", (DESCRIPTION_BYTES,)),
    }

    def take(name: str) -> Tensor:
        if not remaining:
            weight = stored.read().float()
            if torch.cuda.is_available():
                weight = weight.to("cuda")
            packed = Packed.of(weight).to(torch.bfloat16)
            for part, tensor in stored_tensors(stored.name, packed).items():
                remaining[part] = tensor.cpu()
            state = remaining[f"{stored.name}.{QUANT_STATE}nf4"]
            blanks = torch.full((DESCRIPTION_BYTES - len(state),), ord(" "), dtype=torch.uint8)
            remaining[f"{stored.name}.{QUANT_STATE}nf4"] = torch.cat([state, blanks])
        return remaining.pop(name)

    return [
        NewTensor(name, dtype, shape, partial(take, name))
        for name, (dtype, shape) in described.items()
    ]
