"""Linear layers in FP8 or 4 bits, in two layouts of compressed-tensors, for vLLM and transformers.

    fp8    ``float-quantized``: a scale for each row; inputs are quantised as they come, a scale for
           each token
    int4   ``pack-quantized`` (W4A16): a scale for each 128 elements of a row; inputs stay 16 bits

Embeddings, head, norms and routers stay in bf16. Experts are stored one by one; transformers makes
them dense as it reads them, vLLM computes with them as with linear layers.
"""

from __future__ import annotations

import importlib.util
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from chronicals.export import vllm
from chronicals.export.artefact import ArtefactFormat
from chronicals.export.proof import Proof, largest_error, relative_error
from chronicals.export.source import SourceModel, logits_of, on_device
from chronicals.export.whole import (
    SAFETENSORS,
    TRANSFORMERS,
    in_dtype,
    name_dtype,
    prove_beside,
    prove_rounded,
    write_beside,
    write_files,
)
from chronicals.formats.gguf.reader import NotExpressible
from chronicals.formats.tensor_names import Expert, StoredNames, stack_named
from chronicals.formats.weight_files import NewTensor, StoredTensor, tensors_in
from chronicals.models import load_model
from chronicals.models.four_bits import ROUTERS
from chronicals.models.loading import load_without_weights, quantised_names
from chronicals.models.routed_experts import watch_experts

COMPRESSED_TENSORS = "compressed-tensors"

INT4_GROUP = 128
"""Elements of a row that share a scale in 4 bits."""

_ROUTER = re.compile(rf"\.layers\.\d+\.(?:\w+\.)*(?:{'|'.join(ROUTERS)})\.weight")
"""Names of the weights that choose experts, in files."""

COMPRESSED_LOGIT_BOUND = 2e-2
"""Bound on the error of transformers' logits beside torch's with the same weights and inputs."""


class WeightLayout(ABC):
    """The form in which a weight ``[out, in]`` is stored.

    Attributes:
        name: in compressed-tensors.
        error: bound on the relative error of a quantised weight.
        scheme: description of weights and inputs in ``config_groups``.
        group: elements of a row that share a scale; None if a row has one scale.
    """

    name: str
    error: float
    scheme: ClassVar[Mapping[str, Any]]
    group: int | None = None

    @abstractmethod
    def written(self, stored: StoredTensor) -> list[NewTensor]:
        """Return the tensors that replace a weight."""

    @abstractmethod
    def read(self, tensors: dict[str, StoredTensor], name: str) -> Tensor:
        """Return the weight of a name that stored tensors hold, fp32."""

    def round_input(self, x: Tensor, one_scale: bool = False) -> Tensor:
        """Return the values that a layer multiplies its weight with in place of its input.

        Args:
            x: the input, ``[..., in]``.
            one_scale: all rows have one scale.

        Returns:
            The values in the dtype of ``x``; here the input itself.
        """
        return x


class FP8Layout(WeightLayout):
    """E4M3, whose largest value is 448."""

    name = "float-quantized"
    error = 0.04
    largest = float(torch.finfo(torch.float8_e4m3fn).max)
    scheme: ClassVar[Mapping[str, Any]] = {
        "weights": {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "channel",
            "dynamic": False,
        },
        "input_activations": {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        },
    }

    def written(self, stored: StoredTensor) -> list[NewTensor]:
        """Return the codes under the weight's name, and their scales, quantised when written."""
        rows = stored.shape[0]
        return [
            NewTensor(
                stored.name, "F8_E4M3", stored.shape, lambda: self.quantise(stored.read())[0]
            ),
            NewTensor(
                f"{stored.name}_scale",
                "BF16",
                (rows, 1),
                lambda: self.quantise(stored.read())[1],
            ),
        ]

    def quantise(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes ``[out, in]`` and bf16 scales ``[out, 1]``.

        Scales are rounded up, so that no element exceeds the largest value.
        """
        scale = _bf16_not_below(weight.float().abs().amax(1, keepdim=True) / self.largest)
        return (weight.float() / scale.float()).to(torch.float8_e4m3fn), scale

    def read(self, tensors: dict[str, StoredTensor], name: str) -> Tensor:
        """Return codes times the scales of rows."""
        codes = tensors[name].content().view(torch.float8_e4m3fn).view(tensors[name].shape)
        return codes.float() * tensors[f"{name}_scale"].read().float()

    def round_input(self, x: Tensor, one_scale: bool = False) -> Tensor:
        """Round the input to E4M3, with a scale for each row or, if asked for, one for all."""
        sizes = x.float().abs()
        largest = sizes.amax() if one_scale else sizes.amax(-1, keepdim=True)
        scale = largest.clamp(min=1e-12) / self.largest
        return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


class INT4Layout(WeightLayout):
    """-8 to 7, eight elements of a row in an int32, the first in its lowest bits."""

    name = "pack-quantized"
    error = 0.16
    group = INT4_GROUP
    codes_per_int32 = 8
    shifts = 4 * torch.arange(codes_per_int32, dtype=torch.int32)
    """Bits by which the codes in an int32 are shifted."""

    scheme: ClassVar[Mapping[str, Any]] = {
        "weights": {
            "num_bits": 4,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": INT4_GROUP,
            "dynamic": False,
        },
        "input_activations": None,
    }

    def written(self, stored: StoredTensor) -> list[NewTensor]:
        """Return the packed codes, their scales and the shape, each computed when it is written."""
        path = stored.name
        (rows, columns) = stored.shape
        return [
            NewTensor(
                f"{path}_packed",
                "I32",
                (rows, columns // self.codes_per_int32),
                lambda: self.quantise(stored.read())[0],
            ),
            NewTensor(
                f"{path}_scale",
                "BF16",
                (rows, columns // INT4_GROUP),
                lambda: self.quantise(stored.read())[1],
            ),
            NewTensor(f"{path}_shape", "I64", (2,), lambda: torch.tensor(stored.shape)),
        ]

    def quantise(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return packed codes ``[out, in / 8]`` and bf16 scales ``[out, in / 128]``."""
        groups = weight.float().unflatten(1, (-1, INT4_GROUP))
        scale = _bf16_not_below(groups.abs().amax(2) / 7.5)
        codes = (groups / scale.float()[..., None]).round().clamp(-8, 7)
        unsigned = codes.flatten(1).to(torch.int32) + 8
        packed = unsigned.unflatten(1, (-1, self.codes_per_int32)) << self.shifts
        return packed.sum(-1, dtype=torch.int32), scale

    def read(self, tensors: dict[str, StoredTensor], name: str) -> Tensor:
        """Unpack the codes, and return them times the scales of their groups."""
        stored = tensors[f"{name}_packed"]
        packed = stored.content().view(torch.int32).view(stored.shape)
        codes = (packed[..., None] >> self.shifts & 15).flatten(1) - 8
        scale = tensors[f"{name}_scale"].read().float()
        return (codes.float().unflatten(1, (-1, INT4_GROUP)) * scale[..., None]).flatten(1)


LAYOUTS: dict[str, WeightLayout] = {"fp8": FP8Layout(), "int4": INT4Layout()}


def _bf16_not_below(exact: Tensor) -> Tensor:
    """Round to bf16, up and not to zero."""
    exact = exact.clamp(min=1e-12)
    scale = exact.bfloat16()
    next_scale = torch.nextafter(scale, torch.full_like(scale, torch.inf))
    return torch.where(scale.float() < exact, next_scale, scale)


@dataclass(frozen=True)
class CompressedTensors(ArtefactFormat):
    """A folder in a layout of compressed-tensors.

    Attributes:
        layout: the form of its quantised weights.
    """

    layout: WeightLayout

    def size(self, source: SourceModel) -> int:
        """Return the bytes of the tensors."""
        names = self._quantised_names(source)
        total = 0
        for stored in source.tensors.values():
            total += sum(tensor.bytes for tensor in self._replacements(stored, names))
        return total

    def write(self, source: SourceModel, aside: Path) -> None:
        """Write the folder, one tensor at a time; each expert has matrices of its own.

        Raises:
            NotExpressible: the model has experts that are stored in one tensor, no decoder layers
                with linear layers, or a weight that the layout cannot store.
        """
        names = self._quantised_names(source)
        source.check_kept("BF16")
        aside.mkdir(parents=True)
        write_files(source, aside, lambda stored: self._replacements(stored, names))
        write_beside(source, aside)
        quantised = set(names.values())
        # Layers that stay in 16 bits. Routers are no linear layers in transformers 5, but are in
        # vLLM, by their names in the files.
        ignored = set()
        for path, layer in load_without_weights(source.folder).named_modules():
            if isinstance(layer, nn.Linear) and f"{path}.weight" not in quantised:
                ignored.add(path)
        for name in source.tensors:
            if _ROUTER.search(name) and name not in names:
                ignored.add(name.removesuffix(".weight"))
        described = {
            "quant_method": COMPRESSED_TENSORS,
            "format": self.layout.name,
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "ignore": sorted(ignored),
            "config_groups": {"group_0": {"targets": ["Linear"], **self.layout.scheme}},
        }
        name_dtype(aside, "bf16", quantization_config=described)

    def prove(self, source: SourceModel, aside: Path, proof: Proof) -> None:
        """Read the weights back, and compare transformers with the same arithmetic in torch."""
        names = self._quantised_names(source)
        written = {
            stored.name: stored
            for file in sorted(aside.glob("*.safetensors"))
            for stored in tensors_in(file)
        }
        expected_names: list[str] = []
        for stored in source.tensors.values():
            expected_names += [tensor.name for tensor in self._replacements(stored, names)]
        proof.equal("every weight is there", SAFETENSORS, sorted(expected_names), sorted(written))
        source.prove_merged(proof)
        prove_rounded(source, aside, lambda stored: self._replacements(stored, names), proof)
        errors = {
            name: relative_error(
                self.layout.read(written, name), source.trained_tensors[name].read()
            )
            for name in names
        }
        worst = max(errors, key=lambda name: errors[name])
        proof.bounded("quantised weights", SAFETENSORS, errors[worst], self.layout.error, worst)
        simulated = self._simulated(source, written, names)
        source.prove_survival(simulated, proof)
        expected = logits_of(simulated, source.documents)
        vllm.prove_log_probabilities(
            source, aside, lambda: self._simulated(source, written, names, in_vllm=True), proof
        )
        if importlib.util.find_spec("compressed_tensors") is None:
            reason = f"{COMPRESSED_TENSORS} is not installed: pip install {COMPRESSED_TENSORS}"
            proof.not_run("logits", TRANSFORMERS, reason)
            return
        theirs = logits_of(prove_beside(source, aside, proof), source.documents)
        proof.bounded(
            "logits beside torch with the same weights and inputs",
            TRANSFORMERS,
            largest_error(theirs, expected),
            source.at_least(COMPRESSED_LOGIT_BOUND),
        )
        cost = largest_error(theirs, source.trained_logits)
        proof.reported("logits beside the trained model's", TRANSFORMERS, cost)

    def _quantised_names(self, source: SourceModel) -> dict[str, str]:
        """Return the weights that are quantised, by their names in the files.

        The values are their names in the loaded model. An expert's matrix, which is a part of a
        parameter there, has its name in the files.

        Raises:
            NotExpressible: see ``write``.
        """
        stored = StoredNames(source.tensors)
        names = {}
        try:
            for name in quantised_names(source.folder):
                stored_name = stored.find(name)
                if stored_name is not None:
                    names[stored_name] = name
        except ValueError as error:
            raise NotExpressible(f"{self.layout.name}: {error}") from error
        for name, tensor in source.tensors.items():
            if name in names:
                continue
            if Expert.named(name) is not None:
                names[name] = name
            elif ".experts." in name:
                raise NotExpressible(
                    f"{self.layout.name}: {name}, {list(tensor.shape)}: readers of "
                    f"{COMPRESSED_TENSORS} take a matrix an expert, with no bias, and this family "
                    "is stored otherwise; export it merged (--to merged)"
                )
        for name in sorted(names):
            columns = source.tensors[name].shape[1]
            if self.layout.group is not None and columns % self.layout.group:
                raise NotExpressible(
                    f"{self.layout.name}: {name}: rows of {columns} are no whole groups of "
                    f"{self.layout.group}; export it in FP8 (--to fp8) or merged (--to merged)"
                )
        return names

    def _replacements(self, stored: StoredTensor, names: Mapping[str, str]) -> list[NewTensor]:
        """Return the tensors that replace one of the model."""
        return self.layout.written(stored) if stored.name in names else [in_dtype(stored, "BF16")]

    def _simulated(
        self,
        source: SourceModel,
        written: dict[str, StoredTensor],
        names: Mapping[str, str],
        in_vllm: bool = False,
    ) -> Any:
        """Load the model with the files' weights; linear layers round inputs as the layout does.

        Transformers keeps experts dense, and compressed-tensors 0.17 gives all rows of a matrix one
        scale, as in a shared expert. In vLLM experts round their inputs as linear layers do, and
        every row has a scale.

        Args:
            source: the exported model.
            written: tensors of the files, by name.
            names: of the quantised weights in the files, and in the model.
            in_vllm: rows are rounded as vLLM does, and not as transformers.
        """
        model = load_model(source.folder, source.dtype)
        stored_names = {name: stored_name for stored_name, name in names.items()}
        stacks: dict[tuple[int, str], list[tuple[str, Expert]]] = {}
        for name in names:
            expert = Expert.named(name)
            if expert is not None:
                stacks.setdefault(expert.stack, []).append((name, expert))

        def round_input(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            one_scale = inputs[0].ndim == 2 and not in_vllm
            return self.layout.round_input(inputs[0], one_scale), *inputs[1:]

        for name, parameter in model.named_parameters():
            stack = stack_named(name)
            if name in stored_names:
                parameter.data = self.layout.read(written, stored_names[name]).to(source.dtype)
                layer = model.get_submodule(name.removesuffix(".weight"))
                layer.register_forward_pre_hook(round_input)
            elif stack is not None and stack in stacks:
                for stored_name, expert in stacks[stack]:
                    expert.within(parameter.data).copy_(self.layout.read(written, stored_name))
            else:
                parameter.data = parameter.data.bfloat16().to(source.dtype)
        if in_vllm:
            watch_experts(model, lambda path, expert, x: self.layout.round_input(x))
        return on_device(model)
