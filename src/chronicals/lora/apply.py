"""Attaching adapters to a model."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.lora.config import LoRAConfig
from chronicals.lora.embeddings import modules_to_save, remember_base_rows
from chronicals.lora.layers import LoRALinear, adapters
from chronicals.lora.loftq import check_quantised, start_from_quantisation
from chronicals.lora.model_methods import bind_methods
from chronicals.lora.starting_values import Start, check_weights, start_from_weights
from chronicals.lora.tokens import attach_tokens, plan_tokens
from chronicals.models import beside_text, is_within
from chronicals.quantization import Linear4bit

logger = logging.getLogger(__name__)

QUANTISERS = ("bitsandbytes.", "transformers.integrations.")
"""Modules whose classes derived from ``nn.Linear`` are linear layers over quantised weights."""


def apply_lora(model: Any, config: LoRAConfig, start: Mapping[str, Start] | None = None) -> Any:
    """Attach an adapter to each targeted linear layer, in place; everything else is frozen.

    Args:
        model: a Hugging Face model.
        config: shape and targets; see ``LoRAConfig``.
        start: starting values by path, for an ``init`` that takes them from the weights; they are taken instead. For ``loftq``
            none are taken then: the caller fills the adapters.

    Returns:
        ``model``, with ``model.chronicals_lora`` set to ``config`` and methods of its own: ``save_pretrained`` (and so
        ``push_to_hub``) writes the adapter in PEFT's format, ``merge_and_unload`` gives the plain model.

    Raises:
        ValueError: the model has adapters already, ours or PEFT's, a target matches nothing, or is not a linear layer.
    """
    if next(adapters(model), None) is not None:
        raise ValueError("the model has adapters already; load it anew to attach others")
    theirs = next((type(m) for m in model.modules() if type(m).__module__.startswith("peft.")), None)
    if theirs is not None:
        kind = f"{theirs.__module__}.{theirs.__qualname__}"
        raise ValueError(
            f"the model has PEFT's adapters already ({kind}), into which ours would go; train those (leave use_lora out), or "
            "attach ours to what merge_and_unload() gives"
        )
    targets = targeted_paths(model, config.target_modules, layers=config.layers)
    whole = modules_to_save(model, config.modules_to_save)
    targets = [path for path in targets if path not in whole]
    tokens = plan_tokens(model, config.trainable_token_indices, {*targets, *whole})
    _refuse_unused_patterns(config, targets)
    _warn_of_a_tied_head(model, targets)
    if config.takes_from_weights:
        check_weights(model, targets, config)
    if config.init == "loftq" and start is None:
        check_quantised(model, targets, config)
    model.requires_grad_(False)
    for path in targets:
        layer = model.get_submodule(path)
        shape = linear_shape(layer)
        assert shape is not None
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, LoRALinear(layer, config.at(path), *shape).train(layer.training))
    if config.takes_from_weights:
        start_from_weights(model, config.init, start)
    if config.init == "loftq" and start is None:
        start_from_quantisation(model)
    for module in whole.values():
        module.requires_grad_(True)
    attach_tokens(model, tokens)
    remember_base_rows(model)
    model.chronicals_lora = config
    bind_methods(model)
    return model


def _warn_of_a_tied_head(model: Any, targets: list[str]) -> None:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is embedding.weight and any(model.get_submodule(path) is head for path in targets):
        logger.warning(
            "lora_target_modules: the head is adapted, and its weight is the embedding's too; PEFT's merge_and_unload would "
            "change both and give another model: merge with that of chronicals, or do not adapt the head"
        )


def _refuse_unused_patterns(config: LoRAConfig, targets: list[str]) -> None:
    used = config.fitted(targets)
    for name in ("rank_pattern", "alpha_pattern"):
        if unused := [key for key in getattr(config, name) if key not in getattr(used, name)]:
            raise ValueError(f"lora_{name}: {unused[0]!r} matches no adapted layer; adapted are {', '.join(_ends(targets))}")


def _ends(paths: Collection[str]) -> list[str]:
    """The last names of paths, each once."""
    return sorted({path.rpartition(".")[2] for path in paths})


def adapts(model: nn.Module, wanted: list[str] | str | None, layers: Collection[int] | None = None) -> bool:
    """Whether the adapted layers are those that ``wanted`` and ``layers`` name, as in a LoRAConfig."""
    there = {path for path, _ in adapters(model)}
    named = targeted_paths(model, wanted) if wanted in (None, "all-linear") else _matches(model, wanted)
    named = [path.removesuffix(".base_layer") for path in named]
    return there == {path for path in named if layers is None or layer_number(path) in layers}


def layer_number(path: str, lists: Sequence[str] = (r"[^.]*",)) -> int | None:
    """The first number in a path that stands behind a list of layers, of one of these names; None where there is none."""
    found = (re.match(rf"(?:.*?\.)?{name}\.(\d+)\.", path) for name in lists)
    return next((int(match[1]) for match in found if match), None)


def linear_shape(layer: Any) -> tuple[int, int] | None:
    """``(in, out)`` of a linear layer, None if it is something else."""
    if isinstance(layer, Linear4bit):
        return layer.in_features, layer.out_features
    if isinstance(layer, nn.Linear):
        return (layer.in_features, layer.out_features) if _multiplies(layer) else None
    if type(layer).__name__ == "Conv1D" and hasattr(layer, "nf"):  # GPT-2's linear layer, weight [in, out]
        return layer.nx, layer.nf
    return None


def _multiplies(layer: nn.Linear) -> bool:
    """Whether the layer is ``x Wᵀ + b``: a class derived from ``nn.Linear`` may be a router, so a small copy is tried."""
    if type(layer).forward is nn.Linear.forward or f"{type(layer).__module__}.".startswith(QUANTISERS):
        return True
    with torch.random.fork_rng(devices=[]):
        x = torch.randn(2, 4, 5, device="cpu", dtype=torch.float32)
        small = nn.Linear(5, 3, layer.bias is not None, device="cpu", dtype=torch.float32)
        expected = small(x)
        small.__dict__ = {name: value for name, value in vars(layer).items() if name != "forward"} | vars(small)
        small.__class__ = type(layer)
        try:
            got = small(x)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return False
    return isinstance(got, Tensor) and got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-4, atol=1e-5)


def _report_others(modules: dict[str, nn.Module]) -> None:
    """Of what is not adapted, that which is derived from a linear layer."""
    derived = {path: type(layer).__name__ for path, layer in modules.items() if isinstance(layer, nn.Linear)}
    if derived:
        names, first = ", ".join(sorted(set(derived.values()))), next(iter(derived))
        message = "lora_target_modules: %d layers are more than a linear layer and stay frozen: %s, the first is %s"
        logger.warning(message, len(derived), names, first)


def targeted_paths(
    model: Any, wanted: list[str] | str | None, excluded: list[str] | str | None = None, layers: Collection[int] | None = None,
    lists: Sequence[str] = (r"[^.]*",),
) -> list[str]:  # fmt: skip
    """Paths of the layers that ``wanted`` names, less those that ``excluded`` names.

    Args:
        layers: numbers of decoder layers, outside which nothing is named; None for no such limit.
        lists: expressions for the names of the lists that ``layers`` counts in.

    Raises:
        ValueError: there are none, a name matches nothing, or something that it matches is not a linear layer.
    """
    head, towers = model.get_output_embeddings(), beside_text(model)
    linear = {path for path, layer in model.named_modules() if linear_shape(layer) and layer is not head}
    there = f"linear layers here: {', '.join(_ends(linear)) or 'none'}"
    if wanted is None or wanted == "all-linear":
        found = sorted(path for path in linear if not is_within(path, towers))
        if towers:
            logger.info("lora_target_modules: what reads no text is not adapted: %s", ", ".join(towers))
        _report_others({path: layer for path, layer in model.named_modules() if path not in linear and layer is not head})
    elif isinstance(wanted, str):
        found = _matches(model, wanted)
    else:
        found = []
        for name in wanted:
            matches = _matches(model, [name])
            if not matches:
                raise ValueError(f"lora_target_modules: {name!r} matches no layer; {there}")
            found += matches
    found = sorted(set(found) - set(_matches(model, excluded or [])))
    if layers is not None:
        found = _within(layers, found, lists)
    if not found:
        raise ValueError(f"lora_target_modules={wanted!r}: matches no layer, so nothing would be trained; {there}")
    for path in found:
        layer = model.get_submodule(path)
        if linear_shape(layer) is None:
            raise ValueError(f"lora_target_modules: {path!r} is {type(layer).__name__}; only linear layers can be adapted")
    return found


def _within(layers: Collection[int], paths: list[str], lists: Sequence[str]) -> list[str]:
    """Those of the paths in these decoder layers.

    Raises:
        ValueError: one of the layers has none of the paths.
    """
    numbers = {path: layer_number(path, lists) for path in paths}
    there = {number for number in numbers.values() if number is not None}
    if absent := sorted(set(layers) - there):
        known = f"{min(there)} to {max(there)}" if there else "none, for no target is in a numbered layer"
        raise ValueError(f"lora_layers: no target is in layer {absent[0]}; layers with targets: {known}")
    return [path for path in paths if numbers[path] in layers]


def _matches(model: nn.Module, wanted: list[str] | str) -> list[str]:
    """Paths that a regular expression matches, or that are or end in one of the names."""
    paths = [path for path, _ in model.named_modules()]
    if isinstance(wanted, str):
        return [path for path in paths if re.fullmatch(wanted, path)]
    return [path for path in paths if any(f".{path}".endswith(f".{name}") for name in wanted)]
