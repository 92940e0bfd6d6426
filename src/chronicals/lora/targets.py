"""Find the weights that get an adapter: the layers and parameters that a LoRAConfig names."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.lora.config import LoRAConfig
from chronicals.lora.embeddings import ends_in
from chronicals.lora.layers import (
    AdapterLayer,
    LoRAEmbedding,
    LoRALinear,
    in_file,
    is_embedding,
)
from chronicals.lora.parameter_layer import WRAPPED, LoRAParameter, shapes_for
from chronicals.lora.stacked_experts import stacked
from chronicals.models import beside_text, is_within
from chronicals.quantization import packed_shapes, packed_weight

logger = logging.getLogger(__name__)

QUANTISERS = ("bitsandbytes.", "transformers.integrations.")
"""Modules whose classes derived from ``nn.Linear`` are linear layers over quantised weights."""


@dataclass(frozen=True)
class Target:
    """A weight that gets an adapter.

    Attributes:
        path: path of the adapter in the model and in a file.
        named: its name in patterns of ranks and in a saved configuration: for a parameter the path
            of that, else ``path``.
        layer: path of the layer in a model without adapters.
        kind: LoRALinear, LoRAEmbedding or LoRAParameter.
        parameter: name of the parameter in the layer, for a LoRAParameter.
    """

    path: str
    named: str
    layer: str
    kind: type[AdapterLayer]
    parameter: str = ""

    def shapes(
        self, model: Any, config: LoRAConfig, rows: int | None = None
    ) -> dict[str, torch.Size]:
        """Return the shapes of the trained parameters by their names in a file.

        Args:
            model: the model without adapters.
            config: ranks and kind of the adapters.
            rows: number of rows that embedding and head will have; by default those they have.
        """
        layer = model.get_submodule(self.layer)
        rank = config.at(self.named).rank
        if self.kind is LoRAParameter:
            pair = shapes_for(layer, self.parameter, rank)
        else:
            linear = linear_shape(layer)
            wide, narrow = linear or (layer.num_embeddings, layer.embedding_dim)
            if layer is model.get_input_embeddings():
                wide = rows or wide
            elif layer is model.get_output_embeddings():
                narrow = rows or narrow
            pair = (rank, wide), (narrow, rank)
        shapes = {
            in_file(name): torch.Size(shape)
            for name, shape in zip(self.kind.MATRICES, pair, strict=True)
        }
        if config.use_dora:
            shapes["lora_magnitude_vector"] = torch.Size(pair[1][:1])
        return shapes

    def attach(self, model: Any, config: LoRAConfig) -> None:
        """Put the adapter around the layer, or around adapters of its other parameters."""
        layer = model.get_submodule(self.layer)
        config = config.at(self.named)
        if self.kind is LoRAParameter:
            adapted: AdapterLayer = LoRAParameter(layer, self.parameter, config)
        elif self.kind is LoRAEmbedding:
            adapted = LoRAEmbedding(layer, config)
        else:
            sizes = linear_shape(layer)
            assert sizes is not None
            adapted = LoRALinear(layer, config, *sizes)

        parent, _, name = self.layer.rpartition(".")
        setattr(model.get_submodule(parent), name, adapted.train(layer.training))


def targets_of(model: Any, config: LoRAConfig, left_out: Collection[str] = ()) -> list[Target]:
    """Return the targets that ``config`` names, in the order in which they are to be attached.

    Args:
        model: a model without adapters.
        config: names of targets.
        left_out: paths of layers that are trained whole.

    Raises:
        ValueError: there are none, a name matches nothing, or it matches something that cannot be
            adapted like this.
    """
    field = ""
    if config.use_dora:
        field = "use_dora=True"
    elif config.takes_from_weights:
        field = f"init={config.init!r}"
    targets = []
    for path in targeted_paths(model, config.target_modules, layers=config.layers):
        if path in left_out:
            continue
        is_linear = linear_shape(model.get_submodule(path)) is not None
        targets.append(Target(path, path, path, LoRALinear if is_linear else LoRAEmbedding))
        if not is_linear and field:
            raise ValueError(
                f"lora_target_modules: {path!r} is an embedding, whose adapter cannot have "
                f"{field}; leave it out of lora_target_modules, or train it whole "
                "(lora_modules_to_save)"
            )
    by_layer: dict[str, list[str]] = {}
    if config.target_parameters:
        for key in targeted_parameters(model, config.target_parameters, config.layers):
            layer, _, parameter = key.rpartition(".")
            by_layer.setdefault(layer, []).append(parameter)
    for layer, names in by_layer.items():
        for n, name in enumerate(names):  # the first is innermost, as in PEFT
            path = layer + f".{WRAPPED}" * (len(names) - 1 - n)
            targets.append(Target(path, f"{layer}.{name}", layer, LoRAParameter, name))
    return targets


def targeted_parameters(
    model: Any, wanted: Collection[str], layers: Collection[int] | None = None
) -> list[str]:
    """Return the paths of the named parameters, in the order of the model.

    Args:
        model: the model.
        wanted: ends of paths.
        layers: numbers of the decoder layers that are searched; None for the whole model.

    Raises:
        ValueError: there are none, a name matches nothing, or it matches something that cannot be
            adapted by itself.
    """
    parameters = [name for name, _ in model.named_parameters()]
    for name in wanted:
        if not any(ends_in(key, name) for key in parameters):
            known = ", ".join(stacked_parameters(model)) or "none"
            raise ValueError(
                f"lora_target_parameters: {name!r} matches no parameter; those of stacked experts "
                f"here: {known}"
            )

    keys = [key for key in parameters if ends_in(key, *wanted)]
    if layers is not None:
        keys = [key for key in keys if layer_number(key) in layers]
    if not keys:
        raise ValueError(
            f"lora_layers: none of lora_target_parameters={list(wanted)!r} is in these layers; "
            "leave it out"
        )

    for key in keys:
        path, _, name = key.rpartition(".")
        layer = model.get_submodule(path)
        parameter = model.get_parameter(key)
        if not path or isinstance(layer, nn.Embedding) or linear_shape(layer) is not None:
            raise ValueError(
                f"lora_target_parameters: {key!r} is of {type(layer).__name__}; a linear layer or "
                f"embedding is adapted as such: name {path.rpartition('.')[2]!r} in "
                "lora_target_modules instead"
            )
        if name in packed_shapes(layer):
            continue
        if not parameter.is_floating_point() or parameter.element_size() == 1:
            raise ValueError(
                f"lora_target_parameters: {key!r} is quantised ({parameter.dtype}), and no adapter "
                "is computed over that; load the base in 16 bit, or leave it out"
            )
        if parameter.ndim not in (2, 3):
            raise ValueError(
                f"lora_target_parameters: {key!r} has {parameter.ndim} dimensions; a matrix has 2, "
                "one for each expert 3; leave it out"
            )
    return keys


def stacked_parameters(model: nn.Module) -> list[str]:
    """Return the ends of the paths of 3-D parameters, except those of convolutions."""
    ends_of_paths = set()
    for path, module in model.named_modules():
        for name, _ in stacked(module):
            ends_of_paths.add(re.sub(r"^.*\.\d+\.", "", f"{path}.{name}"))
    return sorted(ends_of_paths)


def layer_number(path: str, lists: Sequence[str] = (r"[^.]*",)) -> int | None:
    """Return the first number of a layer in a path, or None if there is none.

    Args:
        path: path of a layer or parameter.
        lists: expressions for the names of lists of layers.
    """
    for name in lists:
        match = re.match(rf"(?:.*?\.)?{name}\.(\d+)\.", path)
        if match:
            return int(match[1])
    return None


def linear_shape(layer: Any) -> tuple[int, int] | None:
    """Return ``(in, out)`` of a linear layer, None if it is something else."""
    packed = packed_weight(layer)
    if packed is not None:
        return packed.shape[1], packed.shape[0]
    if not isinstance(layer, nn.Linear):
        # GPT-2's linear layer, weight [in, out]
        is_conv = type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")
        return (layer.nx, layer.nf) if is_conv else None
    shape = layer.in_features, layer.out_features
    if type(layer).forward is nn.Linear.forward or f"{type(layer).__module__}.".startswith(
        QUANTISERS
    ):
        return shape
    # A class derived from nn.Linear may be a router, so a small copy is tried.
    with torch.random.fork_rng(devices=[]):
        x = torch.randn(2, 4, 5, device="cpu", dtype=torch.float32)
        small = nn.Linear(5, 3, layer.bias is not None, device="cpu", dtype=torch.float32)
        expected = small(x)
        small.__dict__ = {
            name: value for name, value in vars(layer).items() if name != "forward"
        } | vars(small)
        small.__class__ = type(layer)
        try:
            got = small(x)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return None
    multiplies = (
        isinstance(got, Tensor)
        and got.shape == expected.shape
        and torch.allclose(got, expected, rtol=1e-4, atol=1e-5)
    )
    return shape if multiplies else None


def _report_others(modules: dict[str, nn.Module]) -> None:
    """Warn of layers that are not adapted although they are derived from a linear layer."""
    derived = {
        path: type(layer).__name__
        for path, layer in modules.items()
        if isinstance(layer, nn.Linear)
    }
    if derived:
        names = ", ".join(sorted(set(derived.values())))
        first = next(iter(derived))
        message = (
            "lora_target_modules: %d layers are more than a linear layer and stay frozen: "
            "%s, the first is %s"
        )
        logger.warning(message, len(derived), names, first)


def ends(paths: Collection[str]) -> list[str]:
    """Return the last names of paths, each once."""
    return sorted({path.rpartition(".")[2] for path in paths})


def targeted_paths(
    model: Any,
    wanted: list[str] | str | None,
    excluded: list[str] | str | None = None,
    layers: Collection[int] | None = None,
    lists: Sequence[str] = (r"[^.]*",),
) -> list[str]:
    """Return the paths of the layers that ``wanted`` names, without those that ``excluded`` names.

    Args:
        model: the model.
        wanted: ends of paths, an expression for whole paths, or None for all linear layers but the
            head.
        excluded: ends of paths, an expression for whole paths, or None for none.
        layers: numbers of the decoder layers that are searched; None for the whole model.
        lists: expressions for the names of the lists that ``layers`` counts in.

    Raises:
        ValueError: there are none, a name matches nothing, or it matches something that is no
            linear layer.
    """
    head = model.get_output_embeddings()
    towers = beside_text(model)
    linear = {
        path for path, layer in model.named_modules() if linear_shape(layer) and layer is not head
    }
    known = f"linear layers here: {', '.join(ends(linear)) or 'none'}"
    if wanted is None or wanted == "all-linear":
        paths = sorted(path for path in linear if not is_within(path, towers))
        if towers:
            logger.info(
                "lora_target_modules: what reads no text is not adapted: %s", ", ".join(towers)
            )
        modules = model.named_modules()
        _report_others({path: m for path, m in modules if path not in linear and m is not head})
    elif isinstance(wanted, str):
        paths = matches(model, wanted)
    else:
        paths = []
        for name in wanted:
            named = matches(model, [name])
            if not named:
                raise ValueError(f"lora_target_modules: {name!r} matches no layer; {known}")
            paths += named
    paths = sorted(set(paths) - set(matches(model, excluded or [])))
    if layers is not None and wanted != []:
        numbers = {path: layer_number(path, lists) for path in paths}
        present = {number for number in numbers.values() if number is not None}
        absent = sorted(set(layers) - present)
        if absent:
            with_targets = "none, for no target is in a numbered layer"
            if present:
                with_targets = f"{min(present)} to {max(present)}"
            raise ValueError(
                f"lora_layers: no target is in layer {absent[0]}; layers with targets: "
                f"{with_targets}"
            )
        paths = [path for path in paths if numbers[path] in layers]
    if not paths and wanted != []:
        raise ValueError(
            f"lora_target_modules={wanted!r}: matches no layer, so nothing would be trained; "
            f"{known}"
        )
    for path in paths:
        layer = model.get_submodule(path)
        if linear_shape(layer) is None and not is_embedding(layer):
            raise ValueError(
                f"lora_target_modules: {path!r} is {type(layer).__name__}; only linear layers and "
                "embeddings can be adapted"
            )
    return paths


def matches(model: nn.Module, wanted: list[str] | str) -> list[str]:
    """Return the paths of modules that an expression matches, or that end in one of the names."""
    paths = [path for path, _ in model.named_modules()]
    if isinstance(wanted, str):
        return [path for path in paths if re.fullmatch(wanted, path)]
    return [path for path in paths if ends_in(path, *wanted)]
