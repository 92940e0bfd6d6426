"""Comparison of a saved folder with the model that was trained, before a run ends.

No second model is loaded. Compared are the facts in the folder's JSON files, its tokenizer, every
value of adapters, and for whole models the name, shape and dtype of every weight and its first row.
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
from chronicals.lora.layers import AdapterLayer, in_file
from chronicals.lora.loading import describe_adapter, described_config
from chronicals.lora.peft_format import ADAPTER_PREFIX, CONFIG_FILE, WEIGHTS_FILE
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
from chronicals.saving.model_files import ADAPTER_FIELDS, FSDP_PREFIX
from chronicals.saving.saved_model import DEFAULT_ADAPTER, GENERATION_FILE
from chronicals.standard_json import to_json

logger = logging.getLogger(__name__)

GENERATION_FIELDS = (
    "eos_token_id",
    "pad_token_id",
    "bos_token_id",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
)
"""Fields of the generation settings that are compared."""

SPECIAL_TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")


def differences(
    folder: Path, model: Any, tokenizer: Any, about: Mapping[str, Any], divided: bool = False
) -> Iterator[str]:
    """Yield the differences of a folder that ``save_model`` wrote from the trained model.

    Each is a clause of a sentence.

    Args:
        folder: that was written.
        model: that was trained.
        tokenizer: of the model.
        about: expected content of ``chronicals.json``.
        divided: no process has the model's weights whole, so their values are not compared.
    """
    stated = json.loads((folder / "chronicals.json").read_text())
    if stated != json.loads(to_json(about)):
        yield "chronicals.json does not hold what was noted of the run"
    stated_base = BaseFormat.read(stated.get("base"))
    base = BaseFormat.of(model)
    if stated_base != base:
        yield (
            f"chronicals.json says that the base is {_described(stated_base)}, it is "
            f"{_described(base)}"
        )
    names = stated.get("active_adapters", [])
    active = active_adapters(model)
    if names != active:
        yield f"chronicals.json names the adapters {names}, the model computes with {active}"
    if next(adapters(model), None) is not None:
        yield from _compare_adapters(folder, model)
    elif active_adapters(model):
        yield from _compare_peft(folder, model)
    else:
        yield from _compare_whole_model(folder, model, divided)
    yield from _compare_generation(folder, model)
    yield from _compare_tokenizer(folder, tokenizer)


def _described(form: BaseFormat | None) -> str:
    if form is None:
        return "not quantised"
    count = len(form.layers or ()) + len(form.experts or ())
    products = ", ".join(sorted({kind.products for kind in form.kinds}))
    return f"in {form} ({count} layers, products in {products})"


# --- adapters
# --------------------------------------------------------------------------------------------------


def _compare_adapters(folder: Path, model: Any) -> Iterator[str]:
    """Compare the scales and all tensors of our adapters' folder with the model."""
    described = describe_adapter(folder)
    shape = described_config(described, described["target_modules"])
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        remaining = set(file.keys())
        for path, layer in adapters(model):
            stated = shape.at(layer.named_at(path)).scale
            if abs(stated - layer.scale) > 1e-9 * abs(layer.scale):
                yield (
                    f"{CONFIG_FILE} scales the adapter of {path} by {stated:g}, it is "
                    f"{layer.scale:g}"
                )
            for name in layer.trained:
                stored = f"{ADAPTER_PREFIX}{path}.{in_file(name)}"
                remaining.discard(stored)
                parameter = layer.get_parameter(name)
                yield from _compare_tensor(file, stored, parameter, len(layer.pair[0]), layer)
        for path, tokens in trained_tokens(model):
            remaining.discard(f"{ADAPTER_PREFIX}{path}.{FILE_NAME}")
            yield from _compare_tensor(file, f"{ADAPTER_PREFIX}{path}.{FILE_NAME}", tokens.values)
        values = model.state_dict(keep_vars=True)
        stored_whole = set()
        for name in sorted(remaining):
            parameter_name = name.removeprefix(ADAPTER_PREFIX).replace(".token_adapter.", ".")
            stored_whole.add(parameter_name)
            if parameter_name not in values:
                yield f"{WEIGHTS_FILE} holds {name}, which the model has not"
            else:
                yield from _compare_tensor(file, name, values[parameter_name])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and ".lora_" not in name and name not in stored_whole:
            yield f"{WEIGHTS_FILE} lacks {name}, which was trained"
            return


def _compare_tensor(
    file: Any, name: str, trained: Tensor, rank: int = 0, layer: AdapterLayer | None = None
) -> Iterator[str]:
    """Compare a stored tensor with the trained one.

    An adapter that began with a part of the weight is stored with the matrices of that part behind
    its own ``rank`` rows or columns.
    """
    if name not in set(file.keys()):
        yield f"{name} is missing"
        return
    stored = file.get_tensor(name)
    value = trained.detach().cpu()
    has_start = getattr(layer, "lora_start_A", None) is not None
    if has_start and stored.shape != value.shape:
        stored = stored[:rank] if name.endswith("lora_A.weight") else stored[:, :rank]
    if stored.shape != value.shape:
        yield f"{name} is {list(stored.shape)}, {list(value.shape)} was trained"
    elif stored.dtype != value.dtype:
        yield f"{name} is {stored.dtype}, {value.dtype} was trained"
    elif not torch.equal(stored, value):
        yield f"{name} has other values than were trained"


def _compare_peft(folder: Path, model: Any) -> Iterator[str]:
    """Compare the adapters of PEFT, or those of transformers' own, with the folder."""
    from peft import PeftConfig, get_peft_model_state_dict

    wrapped = hasattr(model, "get_base_model")  # else transformers writes only the active adapter
    for adapter in model.peft_config if wrapped else active_adapters(model):
        config = model.peft_config[adapter]
        place = folder / adapter
        if adapter == DEFAULT_ADAPTER or not wrapped:
            place = folder
        if not (place / CONFIG_FILE).exists():
            yield f"the adapter {adapter!r} is missing"
            continue
        stated = PeftConfig.from_pretrained(str(place))
        for field in ADAPTER_FIELDS:
            stored_value = getattr(stated, field, None)
            value = getattr(config, field, None)
            if stored_value != value:
                yield f"adapter {adapter!r} has {field}={stored_value!r}, {value!r} was trained"
        tensors = get_peft_model_state_dict(
            model, adapter_name=adapter, save_embedding_layers=False
        )
        with safe_open(place / WEIGHTS_FILE, framework="pt") as file:
            for name, tensor in tensors.items():
                stored_name = name if wrapped else ADAPTER_PREFIX + name
                yield from _compare_tensor(file, stored_name, tensor)


# --- whole models
# --------------------------------------------------------------------------------------------------


def _compare_whole_model(folder: Path, model: Any, divided: bool) -> Iterator[str]:
    """Compare class, quantisation, dtype and weights of a whole model with the folder.

    Of each weight shape, dtype and first row are compared. A weight that is in no file must share
    its memory with one that is.
    """
    form = form_without_weights(model) if divided else saved_form(model)
    config = json.loads((folder / "config.json").read_text())
    kind = getattr(type(form), "plain_class", type(form)).__name__.removeprefix(FSDP_PREFIX)
    if config.get("architectures") != [kind]:
        yield f"config.json names the class {config.get('architectures')}, it is {kind}"
    says_quantised = bool(config.get("quantization_config"))
    is_quantised = BaseFormat.of(model) is not None
    if says_quantised != is_quantised:
        article = "a" if says_quantised else "no"
        state = "quantised" if is_quantised else "not quantised"
        yield f"config.json has {article} quantization_config, the model is {state}"
    values = {} if divided else form.state_dict(keep_vars=True)
    stored = files_by_name(folder)
    for name in sorted(stored.keys() & values.keys()):
        value = values[name]
        with safe_open(stored[name], framework="pt") as file:
            there = file.get_slice(name)
            shape = list(there.get_shape())
            if shape != list(value.shape):
                # With the same number of elements transformers transposes it as it saves.
                if torch.Size(shape).numel() != value.numel():
                    yield f"{name} is {shape}, {list(value.shape)} was trained"
                continue
            row = there[:1] if value.ndim else file.get_tensor(name)
        trained = (value[:1] if value.ndim else value).detach().cpu()
        if row.dtype != trained.dtype:
            yield f"{name} is {row.dtype}, {trained.dtype} was trained"
        elif not torch.equal(row, trained) and not bool((row != row).any()):
            yield f"{name} has other values than were trained"
    dtypes = (None, str(form.dtype).removeprefix("torch."))
    if not divided and not is_quantised and config.get("dtype") not in dtypes:
        yield f"config.json says that weights are {config['dtype']}, they are {form.dtype}"
    if not stored.keys() <= values.keys():  # transformers wrote some under other names
        return
    pointers = {values[name].data_ptr() for name in stored}
    tied = getattr(form, "all_tied_weights_keys", None) or {}
    for name, value in values.items():
        if name not in stored and value.data_ptr() not in pointers and name not in tied:
            yield f"{name} is missing"
            return


# --- what is beside the weights
# --------------------------------------------------------------------------------------------------


def _compare_generation(folder: Path, model: Any) -> Iterator[str]:
    """Compare the stored generation settings with the model's."""
    from transformers import GenerationConfig

    inner = within_adapters(model)
    trained = getattr(inner, "generation_config", None)
    if trained is None or score_of(inner) is not None:
        return
    if not (folder / GENERATION_FILE).exists():
        yield f"{GENERATION_FILE}, which says where generation ends, is missing"
        return
    stated = GenerationConfig.from_pretrained(folder)
    for field in GENERATION_FIELDS:
        stored_value = getattr(stated, field, None)
        value = getattr(trained, field, None)
        if stored_value != value:
            yield f"{GENERATION_FILE} has {field}={stored_value!r}, the model {value!r}"


def _compare_tokenizer(folder: Path, tokenizer: Any) -> Iterator[str]:
    """Compare the saved tokenizer, as AutoTokenizer or its own class loads it.

    AutoTokenizer may take another class for a model of this kind, which splits text otherwise. If
    the tokenizer's own class reads the files rightly, they are right, and a warning says so.
    """
    try:
        differing = list(_between(load_tokenizer(folder), tokenizer))
    except (ValueError, ImportError) as error:
        differing = [f"AutoTokenizer cannot load it ({error})"]
    if not differing:
        return
    kind = type(tokenizer)
    differing_by_class = list(_between(kind.from_pretrained(folder), tokenizer))
    yield from differing_by_class
    if not differing_by_class:
        logger.warning(
            "the saved tokenizer is right as %s reads it, not by AutoTokenizer: %s",
            kind.__name__,
            differing[0],
        )


def _between(stored: Any, tokenizer: Any) -> Iterator[str]:
    """Yield the differences of a loaded tokenizer from the one that was trained with."""
    if stored.get_vocab() != tokenizer.get_vocab():
        yield "the tokenizer has another vocabulary than the one that was trained with"
    merges = []  # pairs of tokens that become one; None for a tokenizer in Python
    for one in (stored, tokenizer):
        described = "{}"
        if getattr(one, "is_fast", False):
            described = one.backend_tokenizer.to_str()
        merges.append(json.loads(described).get("model", {}).get("merges"))
    if merges[0] != merges[1]:
        yield "the tokenizer has other merges than the one that was trained with"
    for field in SPECIAL_TOKEN_FIELDS:
        stored_value = getattr(stored, field, None)
        value = getattr(tokenizer, field, None)
        if stored_value != value:
            yield f"the tokenizer has {field}={stored_value!r}, {value!r} was trained with"
    if tokenizer.chat_template is not None and stored.chat_template != tokenizer.chat_template:
        yield "the tokenizer has another chat template than was trained with"
    text = FINGERPRINT_TEXT + "".join(str(token) for token in tokenizer.all_special_tokens)
    if stored(text)["input_ids"] != tokenizer(text)["input_ids"]:
        yield "the tokenizer gives other ids than the one that was trained with"
