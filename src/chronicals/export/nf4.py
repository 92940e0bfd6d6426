"""Linear layers in NF4, in the files that bitsandbytes writes: to go on with QLoRA in transformers.

The whole model is in host memory in 4 bits while it is written. Stacked experts, which transformers quantises with bitsandbytes
neither, stay in bf16.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import torch

from chronicals.export.compatible import make_compatible
from chronicals.export.part_names import StoredNames
from chronicals.export.proof import Proof, largest_error, relative_error
from chronicals.export.source import Source, logits_of, on_device
from chronicals.export.whole import CLIENT, prove_beside, write_beside
from chronicals.models import describe_packed, load_model
from chronicals.models.gguf_families import NotExpressible
from chronicals.models.loading import quantised_names
from chronicals.quantization import Linear4bit

PACKAGE = "bitsandbytes"

ERROR = 0.13
"""Of a weight, relative; NF4 in blocks of 64 changes Gaussian numbers by 0.09."""

BOUND, OF_ROUNDING = 3e-2, 2.0
"""Of logits beside torch with the same weights, products in bf16; the same as a multiple of what bf16 rounds in torch."""

BITS = 4.127
"""A weight takes, its scales included."""


def write(source: Source, aside: Path) -> None:
    """Write the folder.

    Raises:
        NotExpressible: the model is quantised already, or has no decoder layers with linear layers.
    """
    try:
        model = load_model(source.folder, torch.bfloat16, quantization="nf4")
    except ValueError as error:
        raise NotExpressible(f"nf4: {error}") from error
    aside.mkdir(parents=True)
    write_beside(source, aside)
    describe_packed(model)
    model.save_pretrained(aside)
    make_compatible(aside, source.stops)


def size(source: Source) -> int:
    stored = StoredNames(source.tensors)
    names = {stored.find(name) for name in quantised_names(source.folder)}
    bits = sum(torch.Size(s.shape).numel() * (BITS if s.name in names else 16) for s in source.tensors.values())
    return int(bits / 8)


def prove(source: Source, aside: Path, proof: Proof) -> None:
    """Read the weights back; load them by transformers with bitsandbytes, and compare with the same weights in torch."""
    packed = load_model(aside, torch.bfloat16)
    layers = {f"{path}.weight": layer for path, layer in packed.named_modules() if isinstance(layer, Linear4bit)}
    proof.equal("layers in 4 bits", PACKAGE, sorted(quantised_names(source.folder)), sorted(layers))
    whole = load_model(source.folder, torch.float32)
    inside = sum(parameter.numel() for name, parameter in whole.named_parameters() if name in layers)
    proof.reported("ratio of the weights that are in 4 bits", PACKAGE, inside / sum(p.numel() for p in whole.parameters()))
    errors = {}
    for name, parameter in whole.named_parameters():
        if name in layers:
            dense = layers[name].packed.dense().float()
            errors[name] = relative_error(dense, parameter.data)
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
        if hasattr(layer, "support_avx512bf16_for_cpu"):  # a kernel for layers of whole blocks of rows alone
            layer.support_avx512bf16_for_cpu = False
    found = logits_of(theirs, source.documents)
    error = largest_error(found, expected)
    rounded = largest_error(logits_of(same_weights.bfloat16(), source.documents), expected)
    bound = source.at_least(max(BOUND, OF_ROUNDING * rounded))
    proof.bounded("logits beside torch with the same weights", f"{CLIENT} with {PACKAGE}", error, bound)
    trained = logits_of(source.trained(), source.documents)
    cost = largest_error(found, trained)
    proof.reported("logits beside the trained model's", CLIENT, cost)
