"""Loads models and tokenizers: safetensors only, and no remote code unless the user asks for it."""

from __future__ import annotations

import importlib.util
import logging
import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn

from chronicals.config.values import lasting
from chronicals.formats.gguf.configuration import config_of
from chronicals.formats.gguf.reader import GGUFFile, gguf_of
from chronicals.formats.gguf.tokenizer import tokenizer_of
from chronicals.model_shape import ModelShape
from chronicals.models.base_format import BaseFormat, OtherBase
from chronicals.models.checkpoint_checks import (
    check_exists,
    check_loaded_weights,
    is_reward_model,
    why_no_language_model,
)
from chronicals.models.four_bits import (
    Take,
    Watch,
    linear_layers,
    quantise_layers,
    quantising_while_reading,
)
from chronicals.models.gguf_loading import load_gguf
from chronicals.models.host_tables import table_of
from chronicals.models.preparing import is_prepared, preparing_by
from chronicals.models.rows import STORED_ROWS, NotByRows, StoredRows, parameters_on_meta
from chronicals.models.saved_tokenizer import as_declared
from chronicals.models.towers import read_processors
from chronicals.quantization import format_of_files
from chronicals.versions import check_versions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

WEIGHT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float32, "fp32": torch.float32}
"""Dtype of the weights by ``mixed_precision``.

For fp16 the weights are fp32, since fp16 would lose small updates.
"""

BASE_ROWS = "_chronicals_base_rows"
"""Attribute of a model: rows of the embedding in its checkpoint; None or absent if unknown."""

RUNS_ON = "_chronicals_runs_on"
"""Attribute of a model: the device that it will run on, while its weights are still elsewhere."""

IN_FP8 = "fp8"
"""``quant_method`` of checkpoints in FP8 with a scale a block (``weight_scale_inv``).

DeepSeek V3's are of this kind.
"""

DEQUANTISED = "_chronicals_dequantised"
"""Attribute of a model: its files hold FP8, which was dequantised as it was read."""

FP8_BLOCK = (128, 128)
"""Rows and columns of such a block if the configuration does not say."""

NO_FOLDER = "there is no such folder here, and as a hub name: "
"""Beginning of an error about a name that was looked up on the hub."""

DAMAGED = "damaged or cut, or a Git LFS pointer instead of weights; download it again"
"""Part of an error about a safetensors file that cannot be read."""


def load_tokenizer(name: str | Path, trust_remote_code: bool = False) -> Any:
    """Load a tokenizer from a folder, a hub name or a GGUF file.

    Raises:
        ValueError: it cannot be loaded; the message says why.
    """
    from transformers import AutoTokenizer

    file = gguf_of(name)
    if file is not None:
        return tokenizer_of(GGUFFile(file))
    return as_declared(
        _load(AutoTokenizer, "tokenizer", name, trust_remote_code), name, trust_remote_code
    )


def load_config(name: str | Path, trust_remote_code: bool = False) -> Any:
    """Load a model's configuration from a folder, a hub name or a GGUF file.

    Raises:
        ValueError: it cannot be loaded; the message says why.
        VersionError: torch or transformers is too old.
    """
    from transformers import AutoConfig

    check_versions()
    file = gguf_of(name)
    if file is not None:
        return config_of(GGUFFile(file))
    return _load(AutoConfig, "configuration", name, trust_remote_code)


def _load(auto_class: Any, what: str, name: str | Path, trust_remote_code: bool) -> Any:
    try:
        check_exists(str(name))
    except ValueError as error:
        raise ValueError(f"model={str(name)!r}: {error}") from None
    try:
        return auto_class.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        where = "" if Path(name).is_dir() else NO_FOLDER
        raise ValueError(
            f"model={str(name)!r}: {where}no {what} could be loaded: {error}"
        ) from error


def without_field(error: Exception) -> str:
    """Return a loading error without its prefix ``model='…': ``.

    It is for a model that another field names.
    """
    return re.sub(r"""^model=('[^'\n]*'|"[^"\n]*"): """, "", str(error))


def load_model(
    name: str | Path,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    quantization: str | None = None,
    watch: Watch | None = None,
    form: BaseFormat | None = None,
) -> PreTrainedModel:
    """Load a causal language model, or one of images and text, into host memory.

    The linear layers of a GGUF file keep the file's blocks (``gguf_loading.py``). FP8 weights with
    a scale a block, as in DeepSeek V3, are dequantised as they are read, on any machine.

    Args:
        name: a folder, a hub name or a GGUF file.
        dtype: dtype of the dense weights and of dequantised ones.
        trust_remote_code: run code that comes with the model.
        quantization: ``nf4`` quantises the linear layers and stacked experts of the decoder layers
            to 4 bits as they are read. ``int8`` makes linear layers bitsandbytes' layers for
            LLM.int8 (Dettmers et al., 2022), for inference only.
        watch: called with each weight that is quantised; also stored on the model, for
            ``lora.loftq``.
        form: with ``nf4``, the layers to quantise instead of the usual ones, and their formats.

    Raises:
        ValueError: it cannot be loaded, or checkpoint and class do not fit; the message says why.
        VersionError: torch or transformers is older than the oldest supported version.
    """
    from transformers import AutoConfig

    check_versions()
    file = gguf_of(name)
    if file is not None:
        if quantization is not None:
            raise ValueError(
                f"quantization={quantization!r}: {file.name} is a GGUF file, whose weights stay as "
                "they are; leave it out "
                "(--load-in-4bit too)"
            )
        return named(load_gguf(file, dtype), name)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        if is_reward_model(config):
            raise ValueError(why_no_language_model(name))
        in_fp8 = quantization_of(config).get("quant_method") == IN_FP8
        options: dict[str, Any] = {
            "dtype": dtype,
            "trust_remote_code": trust_remote_code,
            "use_safetensors": True,
        }
        load: Any = load_whole
        if is_packed(config):
            # It registers quantizers with transformers, which other checkpoints do not need.
            from chronicals.models.packed_loading import load_packed

            load = load_packed
        if quantization is not None and load is load_whole:
            options |= _quantising(config, watch, quantization, form)
        elif in_fp8:
            options |= _dequantising(config, load_without_weights(name, trust_remote_code))
        elif is_prepared() and load is load_whole:
            options["quantization_config"] = quantising_while_reading(form=BaseFormat())
        with preparing_by(IN_FP8) if in_fp8 else nullcontext():
            model = load(_auto_class(config), name, **options)
        if in_fp8:
            # transformers below 5.21 would apply the inverse conversion when the model is saved.
            vars(model).pop("_weight_conversions", None)
            setattr(model, DEQUANTISED, True)
    except (OSError, ValueError) as error:
        where = "" if Path(name).is_dir() else NO_FOLDER
        raise ValueError(f"model={str(name)!r}: {where}cannot be loaded: {error}") from error
    except SafetensorError as error:
        raise ValueError(
            f"model={str(name)!r}: a .safetensors file of it cannot be read ({error}): {DAMAGED}"
        ) from error
    read_processors(named(model, name))
    return model


def load_base(
    name: str | Path, dtype: torch.dtype, trust_remote_code: bool, form: BaseFormat
) -> Any:
    """Load the base of an adapter into host memory, with the values that it was trained with.

    Args:
        name: a folder, a hub name or a GGUF file.
        dtype: dtype of weights that are not quantised, and of dequantised ones.
        trust_remote_code: run code that comes with the model.
        form: the formats of the base's layers in training. Layers that the files hold unquantised
            are quantised so as they are read.

    Raises:
        ValueError: it cannot be loaded; the message says why.
        OtherBase: the layers of the files cannot be brought to these formats.
    """
    sources = {kind.quantized_from for kind in form.kinds if kind.quantized_from is not None}
    read_in = dtype
    if len(sources) == 1:
        read_in = getattr(torch, sources.pop())
    elif sources:
        read_in = torch.float32  # holds every value of each dtype that layers were quantised from
    described = (
        {} if gguf_of(name) is not None else quantization_of(load_config(name, trust_remote_code))
    )
    if described or gguf_of(name) is not None:
        model = load_model(name, read_in, trust_remote_code)
    elif form.by_transformers is not None:
        model = load_model(name, read_in, trust_remote_code, "int8" if form.in_8_bits else None)
    else:
        model = load_model(name, read_in, trust_remote_code, "nf4", form=form)
    if form.by_transformers is None and not described.get("load_in_4bit"):
        quantise_layers(model, form=form)  # layers that reading left unquantised
    difference = form.difference(BaseFormat.of(model))
    if difference:
        raise OtherBase(
            f"model={str(name)!r}: is another base than the adapter was trained over "
            f"({difference}); give the one that it was "
            "trained over"
        )
    return model if form.by_transformers is not None else model.to(dtype)


def named(model: Any, name: str | Path) -> Any:
    """Return the model, and record on it where it was loaded from and the size of its vocabulary."""
    model.config._name_or_path = lasting(name)
    setattr(model, BASE_ROWS, ModelShape.of(model.config).vocabulary or None)
    return model


def is_packed(config: Any) -> bool:
    """Return True if the checkpoint is in a packed format, such as bitsandbytes' 4 bits or MXFP4.

    Raises:
        ValueError: it is in bitsandbytes' 8 bits.
    """
    described = quantization_of(config)
    if described.get("load_in_8bit"):
        raise ValueError(
            "quantization_config has load_in_8bit=True: weights in LLM.int8 cannot be trained "
            "here; take the model in 16 bits, "
            "or a copy of it in 4 bits (load_in_4bit)"
        )
    return format_of_files(described) is not None


def quantization_of(config: Any) -> dict[str, Any]:
    """Return ``quantization_config`` of a checkpoint's configuration as a dictionary."""
    described = getattr(config, "quantization_config", None) or {}
    return described if isinstance(described, dict) else described.to_dict()


def load_whole(auto_class: Any, name: str | Path, **options: Any) -> Any:
    """Call ``auto_class.from_pretrained`` and check that it loaded exactly the class's weights.

    Raises:
        ValueError: it did not; the message names the weights.
    """
    try:
        model, report = auto_class.from_pretrained(
            name, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # transformers raises it for weights that it cannot convert
        raise ValueError(str(error)) from error
    check_loaded_weights(model, report)
    return model


def folder_of_weights(name: str | Path) -> Path:
    """Return a folder with the safetensors files of a model; those of a hub name are downloaded."""
    from huggingface_hub import snapshot_download

    if Path(name).is_dir():
        return Path(name)
    return Path(snapshot_download(str(name), allow_patterns=["*.safetensors", "*.json"]))


def load_for_rows(name: str | Path, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """Load a model without its weights; each process later reads the rows that it holds.

    Raises:
        ValueError: it cannot be loaded, or its weights cannot be read by rows; the message says
            why.
    """
    from transformers import GenerationConfig

    config = load_config(name, trust_remote_code)
    _check_in_16_bit(config, name)
    folder = folder_of_weights(name)
    with parameters_on_meta():
        model = _auto_class(config).from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    setattr(model, STORED_ROWS, StoredRows(folder, model))
    read_processors(named(model, name))
    return model


def load_replacing(
    name: str | Path, dtype: torch.dtype, take: Take, trust_remote_code: bool = False
) -> Any:
    """Load a model in 16 bit, replacing each linear layer of the decoder layers as it is read.

    Args:
        name: a folder or a hub name.
        dtype: dtype of the weights.
        take: returns the replacement of a layer.
        trust_remote_code: run code that comes with the model.

    Raises:
        ValueError: as in ``load_whole``, or the checkpoint is quantised.
    """
    config = load_config(name, trust_remote_code)
    _check_in_16_bit(config, name)
    options = {"dtype": dtype, "trust_remote_code": trust_remote_code, "use_safetensors": True}
    model = load_whole(
        _auto_class(config),
        name,
        quantization_config=quantising_while_reading(None, take),
        **options,
    )
    read_processors(named(model, name))
    return model


def _check_in_16_bit(config: Any, name: str | Path) -> None:
    described = quantization_of(config)
    if described:
        raise NotByRows(
            f"sharding='weights': the weights of {name} are quantised already "
            f"({described.get('quant_method')}); take the "
            "model in 16 bit, or sharding='optimizer'"
        )


def quantised_names(name: str | Path, trust_remote_code: bool = False) -> set[str]:
    """Return the names of the linear weights that ``load_model`` quantises.

    Raises:
        ValueError: the configuration cannot be loaded.
    """
    return {
        f"{path}.weight" for path in linear_layers(load_without_weights(name, trust_remote_code))
    }


def load_without_weights(name: str | Path, trust_remote_code: bool = False) -> Any:
    """Build the model of a folder or hub name on the meta device: names and shapes only.

    Raises:
        ValueError: the configuration cannot be loaded.
    """
    config = load_config(name, trust_remote_code)
    with torch.device("meta"):
        return _auto_class(config).from_config(config, trust_remote_code=trust_remote_code)


def classifier_without_weights(name: str | Path, trust_remote_code: bool = False) -> Any:
    """Build a sequence classifier, such as a reward model, on the meta device.

    Raises:
        ValueError: the configuration cannot be loaded, or is of a model that classifies nothing.
    """
    from transformers import AutoModelForSequenceClassification

    config = load_config(name, trust_remote_code)
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(
            config, trust_remote_code=trust_remote_code
        )


def _quantising(
    config: Any, watch: Watch | None, quantization: str, form: BaseFormat | None = None
) -> dict[str, Any]:
    """Return arguments of ``from_pretrained`` that quantise the weights as they are read.

    Raises:
        ValueError: the weights are quantised already, or bitsandbytes is needed and missing.
    """
    described = quantization_of(config)
    if described:
        raise ValueError(
            f"quantization={quantization!r}: its weights are quantised already "
            f"({described.get('quant_method')}); leave it out "
            "(--load-in-4bit too)"
        )
    if quantization == "int8":
        from transformers import BitsAndBytesConfig

        if importlib.util.find_spec("bitsandbytes") is None:
            raise ValueError(
                "quantization='int8' needs bitsandbytes, which is not installed: pip install "
                "bitsandbytes"
            )
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    return {"quantization_config": quantising_while_reading(watch, form=form)}


def _dequantising(config: Any, model: Any) -> dict[str, Any]:
    """Return arguments of ``from_pretrained`` that dequantise FP8 blocks to 16 bit.

    By default transformers does so only on machines without an FP8 GPU; with one it uses layers
    of its own, which this package does not support.

    Args:
        config: a configuration with a ``quantization_config`` of method ``fp8``.
        model: the model on the meta device.

    Raises:
        ValueError: a weight is not a whole number of blocks, so that transformers would infer
            another block size.
    """
    from transformers import FineGrainedFP8Config
    from transformers.quantizers.quantizers_utils import should_convert_module

    described = quantization_of(config)
    kept = described.get("modules_to_not_convert") or described.get("ignored_layers") or []
    block = described.get("weight_block_size", FP8_BLOCK)
    for path, module in model.named_modules() if block else ():
        if module is model.get_output_embeddings() or not should_convert_module(path, list(kept)):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            is_stack = parameter.ndim == 3
            if not is_stack and not (isinstance(module, nn.Linear) and parameter.ndim == 2):
                continue
            rows, columns = parameter.shape[-2:]
            if is_stack and name == "gate_up_proj":
                rows //= 2  # gate and up of an expert are two tensors in the files
            if any(size > of and size % of for size, of in zip((rows, columns), block)):
                raise ValueError(
                    f"{path}.{name} is {[rows, columns]} in FP8 with a scale of each {block[0]} x "
                    f"{block[1]}, which transformers dequantises only where such blocks fill a "
                    "weight; take a checkpoint in 16 bit"
                )
    logger.info(
        "its weights are in FP8 with scales of blocks; they are dequantised as they are read"
    )
    return {
        "quantization_config": FineGrainedFP8Config(
            dequantize=True, modules_to_not_convert=kept or None
        )
    }


def _auto_class(config: Any) -> Any:
    """Return transformers' Auto class for the model.

    It is the one for images and text if the configuration names such a class or has no other, else
    the one for causal language models.
    """
    import transformers
    from transformers.models.auto import modeling_auto as auto

    of_text = type(config) in auto.MODEL_FOR_CAUSAL_LM_MAPPING or hasattr(config, "auto_map")
    with_images = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if with_images is not None and (
        not of_text or with_images.__name__ in (config.architectures or ())
    ):
        return transformers.AutoModelForImageTextToText
    if not of_text:
        raise ValueError(f"{type(config).__name__} is of a model that is no causal language model")
    return transformers.AutoModelForCausalLM


def embedding_table(model: Any) -> torch.Tensor:
    """Return the stored weight ``[V, D]`` of the input embedding, without trained rows."""
    layer = model.get_input_embeddings()
    return getattr(layer, "base_layer", layer).weight


def input_device(model: Any) -> torch.device:
    """Return the device for token ids: where the embedding is used, or where it will be moved."""
    coming: torch.device | None = vars(model).get(RUNS_ON)
    if coming is not None:
        return coming
    table = table_of(model.get_input_embeddings())
    return embedding_table(model).device if table is None else table.device


def kept_in_fp32(model: Any, dtype: torch.dtype) -> set[str]:
    """Return name parts of the weights that transformers keeps in fp32 despite ``dtype``."""
    fields = {torch.bfloat16: ("_strict",), torch.float16: ("", "_strict")}.get(dtype, ())
    return {
        part
        for field in fields
        for part in getattr(model, f"_keep_in_fp32_modules{field}", None) or ()
    }
