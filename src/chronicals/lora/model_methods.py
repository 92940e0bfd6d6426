"""Methods of a model with our adapters: what is saved, and merging.

They replace those of transformers, which would write or do something wrong.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.lora.embeddings import STORED_EMBEDDINGS
from chronicals.lora.layers import AdapterLayer, adapters
from chronicals.lora.magnitude import has_plain_values
from chronicals.lora.parameter_layer import LoRAParameter
from chronicals.lora.peft_format import CHANGED, save_adapter
from chronicals.lora.tokens import merge_tokens
from chronicals.models import describe_packed
from chronicals.quantization import packed_experts, packed_layers, packed_weight

logger = logging.getLogger(__name__)

NAMED = "_chronicals_named_adapters"
ACTIVE = "_chronicals_active_adapter"
"""Attributes of a model with several adapters: all by name, and the name of the attached one."""

UPLOAD_ARGUMENTS = {
    "repo_id",
    "commit_message",
    "commit_description",
    "private",
    "revision",
    "create_pr",
    "tags",
}
"""Arguments of ``model.push_to_hub``."""

DEFAULTS = {"save_peft_format": True, "save_original_format": True, "distributed_checkpoint": False}
"""Arguments of transformers' ``save_pretrained`` with the only values that have no effect here."""


@functools.cache
def adapted_class(kind: type) -> Any:
    """Return the subclass of a class of models that has these methods, with the same name.

    A model is an instance of it until its adapters are merged. Methods bound on the instance would
    refer to it in a cycle, so that only the garbage collector would free its memory.
    """
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (AdaptedModel, kind), {**names, "plain_class": kind})


def _new(kind: type) -> Any:
    """Return an empty instance, from which a copy of a model is built."""
    adapted = adapted_class(kind)
    return adapted.__new__(adapted)


def save_pretrained(
    model: Any,
    save_directory: str | Path,
    is_main_process: bool = True,
    state_dict: Mapping[str, Tensor] | None = None,
    push_to_hub: bool = False,
    max_shard_size: int | str | None = None,
    variant: str | None = None,
    token: str | bool | None = None,
    safe_serialization: bool = True,
    **others: Any,
) -> None:
    """Write the adapter in PEFT's format.

    ``AutoModelForCausalLM`` and PEFT load it over the model's base.

    Args:
        model: the model.
        save_directory: folder for ``adapter_config.json`` and ``adapter_model.safetensors``.
        is_main_process: False writes nothing.
        state_dict: values to write instead of the model's, by the names of ``model.state_dict()``.
        push_to_hub: also upload the folder, to ``repo_id`` or a repository of its name.
        max_shard_size: ignored, since an adapter is one file.
        variant: ignored, since that file has a fixed name.
        token: access token of the hub.
        safe_serialization: must be True.
        **others: arguments of ``model.push_to_hub``; other arguments of transformers are ignored,
            with a warning.

    Raises:
        ValueError: ``safe_serialization=False``; adapters are written as safetensors only.
    """
    if not safe_serialization:
        raise ValueError(
            "safe_serialization=False: adapters are written as safetensors only; leave it out"
        )
    if not is_main_process:
        return
    upload = (
        {name: others.pop(name) for name in UPLOAD_ARGUMENTS & others.keys()} if push_to_hub else {}
    )
    arguments = {"variant": variant, **others}
    ignored = sorted(
        name
        for name, value in arguments.items()
        if value is not None and value is not DEFAULTS.get(name)
    )
    if ignored:
        logger.warning("save_pretrained of a model with adapters ignores %s", ", ".join(ignored))
    save_adapter(model, save_directory, state_dict=state_dict)
    if push_to_hub:
        model.push_to_hub(upload.pop("repo_id", Path(save_directory).name), token=token, **upload)


@torch.no_grad()
def merge_adapters(model: Any) -> None:
    """Replace every adapted layer by its base layer with the merged weight.

    That is ``W + s · B A``, with scaled rows if the adapter has magnitudes (``magnitude.py``); it
    is summed in fp32 and rounded once to its dtype. Layers and experts in 4 bits are dequantised,
    also those without an adapter. Rows of trained tokens go into the embedding. A head that is tied
    to the embedding gets a weight of its own if one of the two is adapted. All weights stay frozen,
    as in PEFT.

    Raises:
        ValueError: there are no adapters of ours, or a weight is quantised; the model is unchanged.
    """
    adapted = dict(adapters(model))
    if not adapted:
        raise ValueError(
            f"{type(model).__name__} has no adapters of apply_lora or load_adapter to merge"
        )
    for path, layer in adapted.items():
        if isinstance(layer, LoRAParameter):
            weight = layer.parameter
            can_be_merged = not isinstance(weight, Tensor) or has_plain_values(weight)
        elif packed_weight(layer.base_layer) is None:
            can_be_merged = has_plain_values(layer.base_layer.weight)
        else:
            can_be_merged = True
        if not can_be_merged:
            raise ValueError(
                f"the weights of {path} are quantised and cannot take its adapter; save the "
                "adapter, load the base in 16 bit, attach it with chronicals.lora.load_adapter, "
                "and merge that"
            )

    for path, experts in list(packed_experts(model)):
        model.set_submodule(path, experts.plain())

    # Merging would change the other end, too, if the head and the embedding share an adapted weight.
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    end_is_adapted = isinstance(head, AdapterLayer) or isinstance(embedding, AdapterLayer)
    plain: Any = head.base_layer if isinstance(head, AdapterLayer) else head
    if end_is_adapted and plain is not None and plain.weight is embedding.weight:
        plain.weight = nn.Parameter(plain.weight.clone(), requires_grad=False)
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
        model.all_tied_weights_keys = {}

    for path, layer in reversed(adapted.items()):  # of several around one layer the innermost first
        layer.merge()
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layer.base_layer)
    merge_tokens(model)
    for path, linear in list(packed_layers(model)):
        model.set_submodule(path, linear.plain())


def merge_and_unload(model: Any) -> Any:
    """Merge the adapters into the weights in place, and return ``model``, which is plain then.

    No file holds these weights yet, so adapters trained on them later name no base until the model
    is saved and loaded.

    Raises:
        ValueError: there are no adapters of ours, or a weight is quantised; the model is as it was.
    """
    merge_adapters(model)
    plain_again(model)
    for name in (STORED_EMBEDDINGS, NAMED, ACTIVE):
        vars(model).pop(name, None)
    setattr(model, CHANGED, True)
    describe_packed(model)
    return model


def plain_again(model: Any) -> None:
    """Remove from a model without adapters the methods and configuration of ``apply_lora``."""
    if isinstance(model, AdaptedModel):
        model.__class__ = model.plain_class
    vars(model).pop("chronicals_lora", None)


def _refuse(method: str, remedy: str) -> Callable[..., None]:
    """Return a method that raises ValueError; ``remedy`` says what to do instead."""

    def refuse(model: Any, *_: Any, **__: Any) -> None:
        raise ValueError(
            f"{method}: the model has adapters of chronicals, beside which PEFT's would not be "
            f"saved; {remedy}, and merge_and_unload() first makes the model plain"
        )

    return refuse


class AdaptedModel:
    """A model with our adapters; ``plain_class`` is its own class."""

    plain_class: type

    save_pretrained = save_pretrained
    merge_and_unload = merge_and_unload
    add_adapter = _refuse("add_adapter", "chronicals trains them")
    load_adapter = _refuse("load_adapter", "chronicals.lora.load_adapter refills them")

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _new, (self.plain_class,), super().__reduce_ex__(2)[2]
