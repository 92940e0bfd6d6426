"""Linear layers in FP8 or in 4 bits, as vLLM and transformers read them: two layouts of the package
compressed-tensors.

    fp8    ``float-quantized``: a scale a row; inputs are quantised as they come, with a scale a token
    int4   ``pack-quantized``: a scale for each 128 elements of a row (W4A16); inputs stay in 16 bits

Embeddings, head, norms and routers stay in bf16. Experts are stored one by one; transformers makes
them dense as it reads them, vLLM computes with them as with linear layers.
"""

from __future__ import annotations

import importlib.util
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.export import vllm
from chronicals.export.proof import Proof, largest_error, relative_error
from chronicals.export.source import Source, logits_of, on_device
from chronicals.export.whole import (
    CLIENT,
    in_dtype,
    name_dtype,
    prove_beside,
    prove_rounded,
    write_beside,
    write_files,
)
from chronicals.formats.expert_names import Expert, stack_named
from chronicals.formats.gguf.errors import NotExpressible
from chronicals.formats.part_names import StoredNames
from chronicals.formats.weight_files import NewTensor, StoredTensor, tensors_in
from chronicals.models import load_model
from chronicals.models.experts import watch_experts
from chronicals.models.four_bits import ROUTERS
from chronicals.models.loading import load_without_weights, quantised_names

PACKAGE = "compressed-tensors"

GROUP = 128
"""Elements of a row that share a scale in 4 bits."""

ROUTER = re.compile(rf"\.layers\.\d+\.(?:\w+\.)*(?:{'|'.join(ROUTERS)})\.weight")
"""What chooses experts, by its name in files."""

BOUND = 2e-2
"""Of transformers' logits beside those of torch with the same weights and inputs."""

Found = dict[str, StoredTensor]


class Layout(ABC):
    """How a weight ``[out, in]`` is stored.

    Attributes:
        name: the package's.
        error: bound on what quantising changes of a weight, relative.
    """

    name: str
    error: float

    @abstractmethod
    def written(self, stored: StoredTensor) -> list[NewTensor]:
        """What takes the place of a weight."""

    @abstractmethod
    def read(self, found: Found, name: str) -> Tensor:
        """The weight that it stands for, fp32."""

    @property
    @abstractmethod
    def scheme(self) -> dict[str, Any]:
        """Of ``config_groups``."""

    def as_taken(self, x: Tensor, together: bool = False) -> Tensor:
        """What a layer of the layout multiplies its weight with in place of its input.

        Args:
            together: all rows have one scale.
        """
        return x

    def why_not(self, stored: StoredTensor) -> str | None:
        """Why a weight cannot be stored so."""
        return None


class FP8(Layout):
    """E4M3, whose largest value is 448."""

    name = "float-quantized"
    error = 0.04
    largest = float(torch.finfo(torch.float8_e4m3fn).max)

    def written(self, stored: StoredTensor) -> list[NewTensor]:
        return [
            NewTensor(
                stored.name, "F8_E4M3", stored.shape, lambda: self.quantise(stored.read())[0]
            ),
            NewTensor(
                f"{stored.name}_scale",
                "BF16",
                (stored.shape[0], 1),
                lambda: self.quantise(stored.read())[1],
            ),
        ]

    def quantise(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes ``[out, in]`` and bf16 scales ``[out, 1]``, rounded up so that no element is
        beyond the largest.
        """
        scale = _rounded_up(weight.float().abs().amax(1, keepdim=True) / self.largest)
        return (weight.float() / scale.float()).to(torch.float8_e4m3fn), scale

    def read(self, found: Found, name: str) -> Tensor:
        return (
            _bytes(found[name], torch.float8_e4m3fn).float() * found[f"{name}_scale"].read().float()
        )

    @property
    def scheme(self) -> dict[str, Any]:
        numbers = {"num_bits": 8, "type": "float", "symmetric": True}
        return {
            "weights": {**numbers, "strategy": "channel", "dynamic": False},
            "input_activations": {**numbers, "strategy": "token", "dynamic": True},
        }

    def as_taken(self, x: Tensor, together: bool = False) -> Tensor:
        sizes = x.float().abs()
        scale = (sizes.amax() if together else sizes.amax(-1, keepdim=True)).clamp(
            min=1e-12
        ) / self.largest
        return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


class INT4(Layout):
    """-8 to 7, eight elements of a row in an int32, the first in its lowest bits."""

    name = "pack-quantized"
    error = 0.16
    each = 8

    def why_not(self, stored: StoredTensor) -> str | None:
        return (
            f"rows of {stored.shape[1]} are no whole groups of {GROUP}"
            if stored.shape[1] % GROUP
            else None
        )

    def written(self, stored: StoredTensor) -> list[NewTensor]:
        path = stored.name
        (rows, wide) = stored.shape
        return [
            NewTensor(
                f"{path}_packed",
                "I32",
                (rows, wide // self.each),
                lambda: self.quantise(stored.read())[0],
            ),
            NewTensor(
                f"{path}_scale",
                "BF16",
                (rows, wide // GROUP),
                lambda: self.quantise(stored.read())[1],
            ),
            NewTensor(f"{path}_shape", "I64", (2,), lambda: torch.tensor(stored.shape)),
        ]

    def quantise(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Packed codes ``[out, in / 8]`` and bf16 scales ``[out, in / 128]``."""
        grouped = weight.float().unflatten(1, (-1, GROUP))
        scale = _rounded_up(grouped.abs().amax(2) / 7.5)
        codes = (grouped / scale.float()[..., None]).round().clamp(-8, 7).flatten(1).to(
            torch.int32
        ) + 8
        shifts = 4 * torch.arange(self.each, dtype=torch.int32)
        return (codes.unflatten(1, (-1, self.each)) << shifts).sum(-1, dtype=torch.int32), scale

    def read(self, found: Found, name: str) -> Tensor:
        packed = _bytes(found[f"{name}_packed"], torch.int32)
        codes = (
            packed[..., None] >> (4 * torch.arange(self.each, dtype=torch.int32)) & 15
        ).flatten(1) - 8
        scale = found[f"{name}_scale"].read().float()
        return (codes.float().unflatten(1, (-1, GROUP)) * scale[..., None]).flatten(1)

    @property
    def scheme(self) -> dict[str, Any]:
        numbers = {
            "num_bits": 4,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": GROUP,
        }
        return {"weights": {**numbers, "dynamic": False}, "input_activations": None}


LAYOUTS: dict[str, Layout] = {"fp8": FP8(), "int4": INT4()}


def _rounded_up(exact: Tensor) -> Tensor:
    """In bf16, not below what it was, nor zero."""
    exact = exact.clamp(min=1e-12)
    scale = exact.bfloat16()
    return torch.where(
        scale.float() < exact, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale
    )


def _bytes(stored: StoredTensor, dtype: torch.dtype) -> Tensor:
    with stored.file.open("rb") as file:
        file.seek(stored.begin)
        content = bytearray(file.read(stored.bytes))
    return torch.frombuffer(content, dtype=dtype).view(stored.shape)


def write(source: Source, aside: Path, layout: Layout) -> None:
    """Write the folder, a tensor at a time; each expert has its own matrices, as in files of
    transformers.

    Raises:
        NotExpressible: the model has experts that are stored in one tensor, no decoder layers with
            linear layers, or a weight that the layout cannot store.
    """
    names = _quantised(source, layout)
    source.check_kept("BF16")
    aside.mkdir(parents=True)
    write_files(source, aside, lambda stored: _written(stored, layout, names))
    write_beside(source, aside)
    name_dtype(aside, "bf16", quantization_config=_described(source, layout, names))


def size(source: Source, layout: Layout) -> int:
    """Bytes of the tensors."""
    names = _quantised(source, layout)
    return sum(
        tensor.bytes
        for stored in source.tensors.values()
        for tensor in _written(stored, layout, names)
    )


def _written(stored: StoredTensor, layout: Layout, names: Mapping[str, str]) -> list[NewTensor]:
    """The tensors that take the place of one."""
    return layout.written(stored) if stored.name in names else [in_dtype(stored, "BF16")]


def _quantised(source: Source, layout: Layout) -> dict[str, str]:
    """The weights that are quantised: their names in the files, and what the loaded model calls
    them; an expert's matrix, which is a part of a parameter there, has its name in the files."""
    try:
        stored = StoredNames(source.tensors)
        names = {
            found: name
            for name in quantised_names(source.folder)
            if (found := stored.find(name)) is not None
        }
    except ValueError as error:
        raise NotExpressible(f"{layout.name}: {error}") from error
    names |= {
        name: name
        for name in source.tensors
        if name not in names and Expert.named(name) is not None
    }
    for name, tensor in source.tensors.items():
        if ".experts." in name and name not in names:
            raise NotExpressible(
                f"{layout.name}: {name}, {list(tensor.shape)}: readers of {PACKAGE} take a matrix "
                "an expert, with no bias, and "
                "this family is stored otherwise; export it merged (--to merged)"
            )
    for name in sorted(names):
        if reason := layout.why_not(source.tensors[name]):
            raise NotExpressible(
                f"{layout.name}: {name}: {reason}; export it in FP8 (--to fp8) or merged (--to "
                "merged)"
            )
    return names


def _described(source: Source, layout: Layout, names: Mapping[str, str]) -> dict[str, Any]:
    """``quantization_config``; layers that stay in 16 bits are named.

    Routers are no linear layers in transformers 5, but are in vLLM, by their names in the files.
    """
    layers = [
        path
        for path, layer in load_without_weights(source.folder).named_modules()
        if isinstance(layer, nn.Linear)
    ]
    kept = {path for path in layers if f"{path}.weight" not in names.values()}
    routers = {
        name.removesuffix(".weight")
        for name in source.tensors
        if ROUTER.search(name) and name not in names
    }
    return {
        "quant_method": PACKAGE,
        "format": layout.name,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": sorted(kept | routers),
        "config_groups": {"group_0": {"targets": ["Linear"], **layout.scheme}},
    }


def prove(source: Source, aside: Path, layout: Layout, proof: Proof) -> None:
    """Read the weights back; load them by transformers, and compare with the same arithmetic in
    torch.
    """
    names = _quantised(source, layout)
    found = {
        stored.name: stored
        for file in sorted(aside.glob("*.safetensors"))
        for stored in tensors_in(file)
    }
    new = [
        tensor.name
        for stored in source.tensors.values()
        for tensor in _written(stored, layout, names)
    ]
    proof.equal("every weight is there", "safetensors", sorted(new), sorted(found))
    source.prove_merged(proof)
    prove_rounded(source, aside, lambda stored: _written(stored, layout, names), proof)
    errors = {
        name: relative_error(layout.read(found, name), source.trained_tensors[name].read())
        for name in names
    }
    worst = max(errors, key=lambda name: errors[name])
    proof.bounded("quantised weights", "safetensors", errors[worst], layout.error, worst)
    simulated = _in_torch(source, found, layout, names)
    source.prove_survival(simulated, proof)
    expected = logits_of(simulated, source.documents)
    vllm.prove(source, aside, lambda: _in_torch(source, found, layout, names, in_vllm=True), proof)
    if importlib.util.find_spec("compressed_tensors") is None:
        proof.not_run("logits", CLIENT, f"{PACKAGE} is not installed: pip install {PACKAGE}")
        return
    theirs = logits_of(prove_beside(source, aside, proof), source.documents)
    error = largest_error(theirs, expected)
    proof.bounded(
        "logits beside torch with the same weights and inputs",
        CLIENT,
        error,
        source.at_least(BOUND),
    )
    cost = largest_error(theirs, source.trained_logits)
    proof.reported("logits beside the trained model's", CLIENT, cost)


def _in_torch(
    source: Source, found: Found, layout: Layout, names: Mapping[str, str], in_vllm: bool = False
) -> Any:
    """The model with the files' weights, whose linear layers treat their inputs as the layout's do.

    Transformers keeps experts dense, and the package (0.17) gives rows one scale where they come as
    a matrix, as to a shared expert. In vLLM experts treat their inputs as linear layers do, and
    every row has a scale.

    Args:
        names: of the quantised weights in the files, and in the model.
    """
    model = load_model(source.folder, source.dtype)
    stored = {name: own for own, name in names.items()}
    experts = {name: expert for name in names if (expert := Expert.named(name)) is not None}

    def take(layer: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return layout.as_taken(given[0], together=given[0].ndim == 2 and not in_vllm), *given[1:]

    for name, parameter in model.named_parameters():
        stack = stack_named(name)
        inside = {own: expert for own, expert in experts.items() if expert.stack == stack}
        if name in stored:
            parameter.data = layout.read(found, stored[name]).to(source.dtype)
            model.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(take)
        elif inside:
            for own, expert in inside.items():
                expert.within(parameter.data).copy_(layout.read(found, own))
        else:
            parameter.data = parameter.data.bfloat16().to(source.dtype)
    if in_vllm:
        watch_experts(model, lambda path, expert, x: layout.as_taken(x))
    return on_device(model)
