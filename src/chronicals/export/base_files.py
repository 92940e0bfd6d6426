"""The files of an adapter's base, with dense weights under the names that transformers uses.

A base may be a folder, a hub name or a GGUF file, and its files may hold packed weights. A GGUF
file is written out as files of transformers; packed weights are dequantised as they are read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, ClassVar

import torch
from torch import Tensor

from chronicals.export.adapter_changes import MergeError
from chronicals.formats.gguf.reader import GGUFFile, gguf_of
from chronicals.formats.gguf.tokenizer import tokenizer_of
from chronicals.formats.weight_files import FLOAT_DTYPES, StoredTensor
from chronicals.models.gguf_loading import load_gguf
from chronicals.models.saved_tokenizer import save_tokenizer
from chronicals.quantization.packed import PACKED_FORMATS, PackedWeight
from chronicals.saving import SavedModel

_NAMES = {dtype: name for name, dtype in FLOAT_DTYPES.items()}
_TYPES = {**FLOAT_DTYPES, "U8": torch.uint8}


@contextmanager
def base_folder(saved: SavedModel, place: Path) -> Iterator[Path]:
    """Yield the folder of an adapter's base.

    For a base in a GGUF file it is made beside ``place``, and removed afterwards.

    Raises:
        MergeError: there is no such model, or it computes with several adapters.
    """
    if saved.others:
        raise MergeError(
            f"{saved.beside or saved.place}: the model computes with the sum of "
            f"{1 + len(saved.others)} adapters of PEFT; load it "
            "(chronicals.saving.SavedModel.find(…).model), call model.merge_and_unload(), and "
            "save that"
        )
    if not saved.base:
        raise MergeError(
            f"{saved.place}: an adapter that does not name its model; give base_model "
            "(--base-model)"
        )
    file = gguf_of(saved.base)
    if file is None:
        yield folder_of(saved.base)
        return
    with dequantised(file, place) as folder:
        yield folder


def folder_of(base: str) -> Path:
    """Return the folder of a base; a hub name is downloaded, unless the cache has it."""
    if Path(base).is_dir():
        return Path(base)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
    try:
        return Path(snapshot_download(base, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = str(error).partition("\n")[0]
        raise MergeError(
            f"{base}: the adapter's model is no folder, nor downloaded ({reason}); give base_model"
        ) from None


@contextmanager
def dequantised(file: Path, place: Path) -> Iterator[Path]:
    """Yield a folder with the files of a model in GGUF, which is removed afterwards.

    The weights are fp32, as exact as the blocks, so that an artefact made of them is rounded once.

    Args:
        file: in GGUF.
        place: the folder is made beside it; its parent may not exist yet.

    Raises:
        ValueError: the file or its tokenizer cannot be read; the message says why.
    """
    parent = next(folder for folder in place.absolute().parents if folder.exists())
    with tempfile.TemporaryDirectory(dir=parent, prefix=".dequantised-") as folder:
        model = load_gguf(file, torch.float32, packed=False)
        model.save_pretrained(folder)
        save_tokenizer(tokenizer_of(GGUFFile(file)), Path(folder), model.config)
        yield Path(folder)


@dataclass(frozen=True)
class PackedTensor(StoredTensor):
    """A weight that is read dequantised in fp32, and copied in its dtype.

    Attributes:
        dtype: that it had before it was quantised.
        begin, end: 0 and its bytes.
        parts: the tensors that are stored of it, by name, in whatever files.
        form: the format of the weight.
    """

    is_packed: ClassVar[bool] = True
    parts: Mapping[str, StoredTensor]
    form: type[PackedWeight]

    def read(self) -> Tensor:
        """Return the values, fp32; raise ValueError if a stored tensor is missing or damaged."""
        parts = {name: _read(self.parts, name) for name in self.parts}
        return self.form.read_dense(self.name, parts)

    def copy_to(self, out: BinaryIO) -> None:
        """Write the values in the dtype that the weight had before it was quantised."""
        rounded = self.read().to(FLOAT_DTYPES[self.dtype])
        out.write(rounded.view(-1).view(torch.uint8).numpy().data)


def unpacked(files: Mapping[Path, list[StoredTensor]]) -> dict[Path, list[StoredTensor]]:
    """Return the tensors of files with dense weights in place of packed ones.

    What is stored beside packed weights, such as scales, is left out.

    Raises:
        ValueError: what describes a packed weight is damaged.
    """
    there = {stored.name: stored for tensors in files.values() for stored in tensors}
    weights: dict[str, PackedTensor] = {}
    beside = set[str]()
    for form in PACKED_FORMATS.values():
        for name, (codes, *others) in form.stored_weights(there.keys()).items():
            beside |= set(others)
            if codes not in there:
                continue
            parts = {part: there[part] for part in (codes, *others)}
            shapes = {part: tuple(stored.shape) for part, stored in parts.items()}
            shape, dtype = form.stored_shape(name, shapes, partial(_read, parts))
            size = torch.Size(shape).numel() * dtype.itemsize
            weights[codes] = PackedTensor(
                there[codes].file, name, _NAMES[dtype], shape, 0, size, parts, form
            )
    dense = {}
    for file, tensors in files.items():
        kept = [stored for stored in tensors if stored.name not in beside]
        dense[file] = [weights.get(stored.name, stored) for stored in kept]
    return dense


def _read(parts: Mapping[str, StoredTensor], name: str) -> Tensor:
    """Return a stored tensor; raise ValueError for a dtype that no packed weight is stored in."""
    stored = parts[name]
    if stored.dtype not in _TYPES:
        raise ValueError(
            f"{stored.file}: {stored.name} is {stored.dtype}, not one of {', '.join(_TYPES)}"
        )
    return stored.content().view(_TYPES[stored.dtype]).view(stored.shape)
