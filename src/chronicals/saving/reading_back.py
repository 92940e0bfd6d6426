"""A model's folder, read back and compared with the model that was trained, before a run says that
it ended.

No second model is made. Compared are the facts that the folder states, its tokenizer, every value
of adapters, and of whole models the name, shape and type of every weight with a row of its values.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from chronicals.data.tokens.template import FINGERPRINT_TEXT
from chronicals.lora import adapters
from chronicals.lora.adapter_layer import AdapterLayer, in_file
from chronicals.lora.loading import describe_adapter, shape_of
from chronicals.lora.peft_format import CONFIG_FILE, PREFIX, WEIGHTS_FILE
from chronicals.lora.tokens import FILE_NAME, trained_tokens
from chronicals.models import (
    form_without_weights,
    load_tokenizer,
    saved_form,
    score_of,
    within_adapters,
)
from chronicals.models.base_format import BaseFormat
from chronicals.models.peft_kinds import active_adapters
from chronicals.models.rows import files_by_name
from chronicals.saving.model_files import FSDP, SHAPED_BY
from chronicals.saving.saved_model import DEFAULT, GENERATION
from chronicals.standard_json import to_json

logger = logging.getLogger(__name__)

SETTINGS = (
    "eos_token_id",
    "pad_token_id",
    "bos_token_id",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
)
"""Fields of the generation settings that are compared."""

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")


def differences(
    folder: Path, model: Any, tokenizer: Any, about: Mapping[str, Any], divided: bool = False
) -> Iterator[str]:
    """Yield in what a folder that ``save_model`` wrote is not the model that was trained, a clause
    for each.

    Args:
        tokenizer: of the model.
        about: what was trained, which ``chronicals.json`` holds.
        divided: whether no process has the model's weights whole; their values are not compared
            then.
    """
    yield from _of_statements(folder, model, about)
    if next(adapters(model), None) is not None:
        yield from _of_adapters(folder, model)
    elif active_adapters(model):
        yield from _of_peft(folder, model)
    else:
        yield from _of_whole_model(folder, model, divided)
    yield from _of_generation(folder, model)
    yield from _of_tokenizer(folder, tokenizer)


def _of_statements(folder: Path, model: Any, about: Mapping[str, Any]) -> Iterator[str]:
    stated = json.loads((folder / "chronicals.json").read_text())
    if stated != json.loads(to_json(about)):
        yield "chronicals.json does not hold what was noted of the run"
    there = BaseFormat.read(stated.get("base"))
    here = BaseFormat.of(model)
    if there != here:
        yield f"chronicals.json says that the base is {_format(there)}, it is {_format(here)}"
    if stated.get("active_adapters", []) != active_adapters(model):
        named = stated.get("active_adapters", [])
        yield f"chronicals.json names the adapters {named}, the model computes with {active_adapters(model)}"


def _format(form: BaseFormat | None) -> str:
    if form is None:
        return "not quantised"
    counted = len(form.layers or ()) + len(form.experts or ())
    products = ", ".join(sorted({kind.products for kind in form.kinds}))
    return f"in {form} ({counted} layers, products in {products})"


# --- adapters
# ----------------------------------------------------------------------------------------------------------


def _of_adapters(folder: Path, model: Any) -> Iterator[str]:
    described = describe_adapter(folder)
    shape = shape_of(described, described["target_modules"])
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        left = set(file.keys())
        for path, layer in adapters(model):
            stated = shape.at(layer.named_at(path)).scale
            if abs(stated - layer.scale) > 1e-9 * abs(layer.scale):
                yield f"{CONFIG_FILE} scales the adapter of {path} by {stated:g}, it is {layer.scale:g}"
            for name in layer.trained:
                stored = f"{PREFIX}{path}.{in_file(name)}"
                left.discard(stored)
                yield from _of_tensor(
                    file, stored, layer.get_parameter(name), len(layer.pair[0]), layer
                )
        for path, tokens in trained_tokens(model):
            left.discard(f"{PREFIX}{path}.{FILE_NAME}")
            yield from _of_tensor(file, f"{PREFIX}{path}.{FILE_NAME}", tokens.values)
        values = model.state_dict(keep_vars=True)
        for name in sorted(left):
            own = name.removeprefix(PREFIX).replace(".token_adapter.", ".")
            if own not in values:
                yield f"{WEIGHTS_FILE} holds {name}, which the model has not"
            else:
                yield from _of_tensor(file, name, values[own])
    stored_whole = {name.removeprefix(PREFIX).replace(".token_adapter.", ".") for name in left}
    beside = (
        name for name, p in model.named_parameters() if p.requires_grad and ".lora_" not in name
    )
    if absent := [name for name in beside if name not in stored_whole]:
        yield f"{WEIGHTS_FILE} lacks {absent[0]}, which was trained"


def _of_tensor(
    file: Any, name: str, trained: Tensor, rank: int = 0, layer: AdapterLayer | None = None
) -> Iterator[str]:
    """Compare a stored tensor with the one that was trained, which may be the first ``rank``
    rows or columns of it where the adapter began with a part of the weight."""
    if name not in set(file.keys()):
        yield f"{name} is missing"
        return
    stored = file.get_tensor(name)
    value = trained.detach().cpu()
    if (
        layer is not None
        and getattr(layer, "lora_start_A", None) is not None
        and stored.shape != value.shape
    ):
        stored = stored[:rank] if name.endswith("lora_A.weight") else stored[:, :rank]
    if stored.shape != value.shape:
        yield f"{name} is {list(stored.shape)}, {list(value.shape)} was trained"
    elif stored.dtype != value.dtype:
        yield f"{name} is {stored.dtype}, {value.dtype} was trained"
    elif not torch.equal(stored, value):
        yield f"{name} has other values than were trained"


def _of_peft(folder: Path, model: Any) -> Iterator[str]:
    from peft import PeftConfig, get_peft_model_state_dict

    wrapped = hasattr(model, "get_base_model")  # else transformers writes the active adapter alone
    for adapter in model.peft_config if wrapped else active_adapters(model):
        config = model.peft_config[adapter]
        place = folder / adapter
        if adapter == DEFAULT or not wrapped:
            place = folder
        if not (place / CONFIG_FILE).exists():
            yield f"the adapter {adapter!r} is missing"
            continue
        stated = PeftConfig.from_pretrained(str(place))
        for field in SHAPED_BY:
            there, here = (getattr(each, field, None) for each in (stated, config))
            if there != here:
                yield f"adapter {adapter!r} has {field}={there!r}, {here!r} was trained"
        tensors = get_peft_model_state_dict(
            model, adapter_name=adapter, save_embedding_layers=False
        )
        with safe_open(place / WEIGHTS_FILE, framework="pt") as file:
            for name, tensor in tensors.items():
                yield from _of_tensor(file, name if wrapped else PREFIX + name, tensor)


# --- whole models
# ------------------------------------------------------------------------------------------------------


def _of_whole_model(folder: Path, model: Any, divided: bool) -> Iterator[str]:
    form = form_without_weights(model) if divided else saved_form(model)
    config = json.loads((folder / "config.json").read_text())
    kind = getattr(type(form), "plain_class", type(form)).__name__.removeprefix(FSDP)
    if config.get("architectures") != [kind]:
        yield f"config.json names the class {config.get('architectures')}, it is {kind}"
    there = bool(config.get("quantization_config"))
    here = BaseFormat.of(model) is not None
    if there != here:
        yield f"config.json has {'a' if there else 'no'} quantization_config, the model is {'' if here else 'not '}quantised"
    values = {} if divided else form.state_dict(keep_vars=True)
    stored = files_by_name(folder)
    for name in sorted(stored.keys() & values.keys()):
        yield from _of_weight(stored[name], name, values[name])
    if (
        not divided
        and not here
        and config.get("dtype") not in (None, str(form.dtype).removeprefix("torch."))
    ):
        yield f"config.json says that weights are {config['dtype']}, they are {form.dtype}"
    if stored.keys() <= values.keys():  # else transformers wrote some under other names
        yield from _of_missing(stored, values, form)


def _of_weight(path: Path, name: str, value: Tensor) -> Iterator[str]:
    """Compare a stored weight with that of the model, of whose values the first row."""
    with safe_open(path, framework="pt") as file:
        stored = file.get_slice(name)
        shape = list(stored.get_shape())
        if shape != list(value.shape):
            if torch.Size(shape).numel() != value.numel():  # else transformers turns it as it saves
                yield f"{name} is {shape}, {list(value.shape)} was trained"
            return
        row = stored[:1] if value.ndim else file.get_tensor(name)
    own = (value[:1] if value.ndim else value).detach().cpu()
    if row.dtype != own.dtype:
        yield f"{name} is {row.dtype}, {own.dtype} was trained"
    elif not torch.equal(row, own) and not bool((row != row).any()):
        yield f"{name} has other values than were trained"


def _of_missing(
    stored: Mapping[str, Path], values: Mapping[str, Tensor], form: Any
) -> Iterator[str]:
    """Yield the first weight that is in no file, nor shares its memory with one that is."""
    there = {values[name].data_ptr() for name in stored if name in values}
    tied = getattr(form, "all_tied_weights_keys", None) or {}
    absent = (
        name
        for name, value in values.items()
        if name not in stored and value.data_ptr() not in there
    )
    first = next((name for name in absent if name not in tied), None)
    if first is not None:
        yield f"{first} is missing"


# --- what is beside the weights
# ----------------------------------------------------------------------------------------


def _of_generation(folder: Path, model: Any) -> Iterator[str]:
    from transformers import GenerationConfig

    inner = within_adapters(model)
    trained = getattr(inner, "generation_config", None)
    if trained is None or score_of(inner) is not None:
        return
    if not (folder / GENERATION).exists():
        yield f"{GENERATION}, which says where generation ends, is missing"
        return
    stated = GenerationConfig.from_pretrained(folder)
    for field in SETTINGS:
        there = getattr(stated, field, None)
        here = getattr(trained, field, None)
        if there != here:
            yield f"{GENERATION} has {field}={there!r}, the model {here!r}"


def _of_tokenizer(folder: Path, tokenizer: Any) -> Iterator[str]:
    """Compare the saved tokenizer as transformers loads it. Where that takes another class for a
    model of this kind, which splits text otherwise, the files are right, and their own class
    reads them so."""
    try:
        first = list(_between(load_tokenizer(folder), tokenizer))
    except (ValueError, ImportError) as error:
        first = [f"AutoTokenizer cannot load it ({error})"]
    if not first:
        return
    kind = type(tokenizer)
    by_its_class = list(_between(kind.from_pretrained(folder), tokenizer))
    yield from by_its_class
    if not by_its_class:
        logger.warning(
            "the saved tokenizer is right as %s reads it, not by AutoTokenizer: %s",
            kind.__name__,
            first[0],
        )


def _between(stored: Any, tokenizer: Any) -> Iterator[str]:
    """Yield in what a tokenizer that was loaded is not the one that was trained with."""
    if stored.get_vocab() != tokenizer.get_vocab():
        yield "the tokenizer has another vocabulary than the one that was trained with"
    if _merges(stored) != _merges(tokenizer):
        yield "the tokenizer has other merges than the one that was trained with"
    for field in SPECIAL:
        there = getattr(stored, field, None)
        here = getattr(tokenizer, field, None)
        if there != here:
            yield f"the tokenizer has {field}={there!r}, {here!r} was trained with"
    if tokenizer.chat_template is not None and stored.chat_template != tokenizer.chat_template:
        yield "the tokenizer has another chat template than was trained with"
    text = FINGERPRINT_TEXT + "".join(str(token) for token in tokenizer.all_special_tokens)
    if stored(text)["input_ids"] != tokenizer(text)["input_ids"]:
        yield "the tokenizer gives other ids than the one that was trained with"


def _merges(tokenizer: Any) -> Any:
    """The pairs of tokens that become one, where Python does not do it."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    return json.loads(tokenizer.backend_tokenizer.to_str())["model"].get("merges")
