"""A model's folder: weights for Hugging Face or PEFT, the tokenizer, and ``chronicals.json``.

Weights of a model that no process has whole are written by several processes. A file holds whole
layers then, so that weights that transformers splits, joins or renames when it saves a model lie in
one file.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from chronicals.lora import adapters, load_adapter, name_base_by_absolute_path, save_adapter
from chronicals.lora.peft_format import CHANGED
from chronicals.models import (
    describe_packed,
    form_without_weights,
    load_whole,
    save_processors,
    saved_form,
    score_of,
    within_adapters,
)
from chronicals.models.rows import NotByRows, StoredRows, StoredWeights
from chronicals.models.saved_tokenizer import save_tokenizer
from chronicals.standard_json import to_json

FSDP_PREFIX = "FSDP"
"""Prefix that torch puts before the name of a module's class when it shards its weights."""

ADAPTER_FIELDS = (
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "alpha",
)
"""Fields of PEFT's configuration that the meaning of an adapter's matrices depends on."""

FILE_BYTES = 4 << 30
"""Approximate size of a file; a process has as much of the model in memory while it writes."""

PART_FILE = "part-{:05d}.safetensors"
"""Name of a file until all are written, with its number."""

WHOLE_FILE = "model.safetensors"
PARTS_INDEX = "model.safetensors.index.json"


def save_model(
    folder: Path,
    model: Any,
    text_files: Mapping[str, bytes],
    about: Mapping[str, Any],
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a model so that Hugging Face or PEFT loads it.

    Args:
        folder: is made if it does not exist.
        model: whole, or with adapters of ours or of PEFT.
        text_files: see ``text_files``.
        about: content of ``chronicals.json``: what was trained.
        weights: values to write instead of the model's own, by the names of ``model.state_dict()``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if next(adapters(model), None) is not None:
        save_adapter(model, folder, state_dict=weights)
        _save_generation_settings(model, folder)
    else:
        describe_packed(within_adapters(model))
        form = saved_form(model, weights)
        own_weights = None if form is not model or weights is None else dict(weights)
        _save_form(form, folder, own_weights)
    save_beside(folder, text_files, about)


def save_without_weights(
    folder: Path, form: Any, text_files: Mapping[str, bytes], about: Mapping[str, Any]
) -> None:
    """Write the files that ``save_model`` writes beside the weights of a whole model.

    Args:
        folder: exists.
        form: of ``form_without_weights``.
        text_files: see ``text_files``.
        about: content of ``chronicals.json``: what was trained.
    """
    _save_form(form, folder, {})
    for file in folder.glob("model*.safetensors"):  # an empty file of weights
        file.unlink()
    save_beside(folder, text_files, about)


def _save_form(form: Any, folder: Path, weights: Mapping[str, Tensor] | None) -> None:
    """Write a model by its own ``save_pretrained``, with the names that others know it by."""
    form.save_pretrained(folder, state_dict=weights)
    file = folder / "config.json"
    if file.exists():  # transformers writes it only in the first of several processes
        config = json.loads(file.read_text())
        names = config.get("architectures") or []
        # The model's own class, not the subclass that FSDP makes of it.
        if any(name.startswith(FSDP_PREFIX) for name in names):
            config["architectures"] = [name.removeprefix(FSDP_PREFIX) for name in names]
            file.write_text(to_json(config, indent=2))
    inner = within_adapters(form)
    name_base_by_absolute_path(folder, known=not getattr(inner, CHANGED, False))
    if hasattr(form, "peft_config"):
        _save_generation_settings(inner, folder)


def _save_generation_settings(model: Any, folder: Path) -> None:
    """Write the generation settings beside adapters, as whole models have them.

    A reward model generates nothing and has none.
    """
    settings = getattr(model, "generation_config", None)
    if settings is not None and score_of(model) is None:
        settings.save_pretrained(folder)


def save_beside(folder: Path, text_files: Mapping[str, bytes], about: Mapping[str, Any]) -> None:
    """Write the tokenizer's files and ``chronicals.json``."""
    for name, content in text_files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "chronicals.json").write_text(to_json(about, indent=1))


def text_files(model: Any, tokenizer: Any) -> dict[str, bytes]:
    """Return the files of the tokenizer and of the processors beside it, by name.

    They are made once a run, since a thread that writes a checkpoint must not use a tokenizer that
    others use at the same time.

    Raises:
        ValueError: the tokenizer would be read back as another; the message says what to do.
    """
    with TemporaryDirectory() as place:
        folder = Path(place)
        save_processors(within_adapters(model), folder)
        save_tokenizer(tokenizer, folder, within_adapters(model).config)
        return {
            str(file.relative_to(folder)): file.read_bytes()
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }


@torch.no_grad()
def load_saved_weights(folder: Path, model: Any) -> None:
    """Copy the weights, or adapters, that ``save_model`` wrote into the model.

    Raises:
        ValueError, KeyError, OSError, RuntimeError: they belong to another model; the model is
            unchanged.
    """
    if next(adapters(model), None) is not None:
        load_adapter(model, folder)
        return
    if hasattr(model, "get_base_model"):
        _load_peft(folder, model)
        return
    if (folder / "adapter_config.json").exists():
        raise ValueError("it holds adapters, and the model has none; set use_lora as before")
    dtypes = {parameter.dtype for parameter in model.parameters()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32  # holds the values of any dtype
    form = saved_form(model)
    # from_pretrained undoes all that save_pretrained does to names.
    stored = load_whole(type(form), folder, dtype=dtype, use_safetensors=True).state_dict()
    weights = form.state_dict()
    unmatched = stored.keys() ^ weights.keys()
    if unmatched:
        raise ValueError(f"{len(unmatched)} tensors are not in both, the first is {min(unmatched)}")
    for name, tensor in weights.items():
        if tensor.shape != stored[name].shape:
            raise ValueError(
                f"{name} is {list(stored[name].shape)} there and {list(tensor.shape)} here"
            )
    for name, tensor in weights.items():
        tensor.copy_(stored[name])


def stored_weights(folder: Path, model: Any) -> Mapping[str, Tensor]:
    """Return the weights that ``save_model`` wrote of a whole model, by its parameters' names.

    Each is read when it is asked for; all are read at once if transformers wrote some under other
    names.

    Raises:
        ValueError, OSError: they belong to another model.
    """
    with suppress(NotByRows):
        return StoredWeights(StoredRows(folder, model))
    kinds = [kind for kind in type(model).__mro__ if not kind.__name__.startswith(FSDP_PREFIX)]
    stored = load_whole(kinds[0], folder, dtype="auto", use_safetensors=True).state_dict()
    missing = [name for name, _ in model.named_parameters() if name not in stored]
    if missing:
        raise ValueError(f"it has no {missing[0]}")
    return stored


def _load_peft(folder: Path, model: Any) -> None:
    """Load the adapters of a model of PEFT; those that are not ``default`` have folders.

    If one cannot be loaded, all get their values back.
    """
    from peft import PeftConfig, set_peft_model_state_dict

    before = {name: tensor.clone() for name, tensor in trained(model)}
    try:
        for adapter, config in model.peft_config.items():
            place = folder if adapter == "default" else folder / adapter
            saved = PeftConfig.from_pretrained(str(place))
            for field in ADAPTER_FIELDS:
                theirs = getattr(saved, field, None)
                ours = getattr(config, field, None)
                if theirs != ours:
                    raise ValueError(
                        f"adapter {adapter!r} has {field}={theirs!r} there and {ours!r} here"
                    )
            stored = load_file(place / "adapter_model.safetensors")
            loaded = set_peft_model_state_dict(model, stored, adapter_name=adapter)
            # A projection of VeRA, which is not trained. PEFT below 0.21 reports it as unexpected:
            # it looks for it under a name without the adapter's.
            buffers = dict(model.named_buffers(remove_duplicate=False))
            for name in loaded.unexpected_keys:
                projection = buffers.get(f"{name}.{adapter}")
                if projection is None:
                    raise ValueError(f"the model has no {name}")
                if not torch.equal(projection.cpu(), stored[name].to(projection.dtype)):
                    raise ValueError(
                        f"{name} is another there; projection_prng_key must be the same"
                    )
    except BaseException:  # Ctrl-C too: the model is as it was, or as the file is
        for name, tensor in trained(model):
            tensor.copy_(before[name])
        raise


def trained(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Return names and tensors of the trained parameters."""
    return (
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    )


class ModelParts:
    """The division of a model's weights into files, the same in all processes.

    Args:
        model: its weights may be sharded.

    Attributes:
        form: the model that is written, of ``form_without_weights``.
        files: names in ``model.state_dict()`` of the weights in each file; of tied weights the name
            that transformers writes.
    """

    def __init__(self, model: Any):
        self.form = form_without_weights(model)
        written = set(self.form.state_dict())
        tied = getattr(self.form, "all_tied_weights_keys", None) or {}
        state = model.state_dict(keep_vars=True)
        values = {name: value for name, value in state.items() if name in written}
        # Each weight under one name, which is not among those tied to another if it has another.
        names_by_id = defaultdict(list)
        for name, value in values.items():
            names_by_id[id(value)].append(name)
        untied = {}
        for names in names_by_id.values():
            name = next((name for name in names if name not in tied), names[0])
            untied[name] = values[name]
        # Layer after layer, first the weights outside of layers.
        layers = defaultdict(list)
        for name in untied:
            numbered = re.match(r".*?\.\d+(?=\.)", name)
            layers[numbered[0] if numbered else ""].append(name)
        self.files: list[list[str]] = []
        file_size = 0
        for _, names in sorted(layers.items(), key=lambda layer: bool(layer[0])):
            size = sum(untied[name].numel() * untied[name].element_size() for name in names)
            if not self.files or file_size + size > FILE_BYTES:
                self.files.append([])
                file_size = 0
            self.files[-1] += names
            file_size += size

    def write(
        self,
        folder: Path,
        turn: int,
        turns: int,
        read: Callable[[Sequence[str]], Mapping[str, Tensor]],
    ) -> None:
        """Write every ``turns``-th file, beginning with number ``turn``.

        Args:
            folder: of the files.
            turn: number of this process among those that write, from 0.
            turns: how many processes write.
            read: returns weights by their names.
        """
        from transformers.core_model_loading import revert_weight_conversion

        for number in range(turn, len(self.files), turns):
            saved = revert_weight_conversion(self.form, dict(read(self.files[number])))
            tensors = {name: x.contiguous() for name, x in saved.items()}
            save_file(tensors, folder / PART_FILE.format(number), {"format": "pt"})

    def name_files(self, folder: Path) -> None:
        """Rename the files, once all are written, to the names by which transformers finds them.

        Raises:
            FileNotFoundError: one was not written.
        """
        count = len(self.files)
        files_by_weight: dict[str, str] = {}
        size = 0
        for number in range(count):
            name = f"model-{number + 1:05d}-of-{count:05d}.safetensors" if count > 1 else WHOLE_FILE
            file = (folder / PART_FILE.format(number)).rename(folder / name)
            with safe_open(file, "pt") as opened:
                files_by_weight |= dict.fromkeys(opened.keys(), name)
            with file.open("rb") as content:
                # A file begins with the length of its header, in eight bytes.
                header = int.from_bytes(content.read(8), "little")
            size += file.stat().st_size - 8 - header
        if count > 1:
            index = {"metadata": {"total_size": size}, "weight_map": files_by_weight}
            (folder / PARTS_INDEX).write_text(json.dumps(index, indent=2))
