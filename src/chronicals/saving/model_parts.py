"""The weights of a model that no process has whole, written by several of them, each a file at a
time.

A file holds whole layers, so that what transformers splits, joins or renames as it saves a model
lies in one file.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from chronicals.models import form_without_weights

FILE_BYTES = 4 << 30
"""Of a file, about: a process has as much of the model in memory while it writes."""

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class ModelParts:
    """Which weights are in which file, the same in all processes.

    Args:
        model: whose weights may be divided.

    Attributes:
        form: what is written, as of ``form_without_weights``.
        files: of each file the names of its weights in ``model.state_dict()``; of tied ones the one
            that transformers writes.
    """

    def __init__(self, model: Any):
        self.form = form_without_weights(model)
        written = set(self.form.state_dict())
        values = {
            name: value
            for name, value in model.state_dict(keep_vars=True).items()
            if name in written
        }
        self.files = _filled(
            _untied(values, getattr(self.form, "all_tied_weights_keys", None) or {})
        )

    def write(
        self,
        folder: Path,
        turn: int,
        turns: int,
        read: Callable[[Sequence[str]], Mapping[str, Tensor]],
    ) -> None:
        """Write every file whose turn it is: ``turn`` of ``turns`` processes, from 0.

        Args:
            read: returns weights by their names.
        """
        from transformers.core_model_loading import revert_weight_conversion

        for number in range(turn, len(self.files), turns):
            saved = revert_weight_conversion(self.form, dict(read(self.files[number])))
            save_file(
                {name: x.contiguous() for name, x in saved.items()},
                folder / _part(number),
                {"format": "pt"},
            )

    def name_files(self, folder: Path) -> None:
        """Give the files, once all are written, the names by which transformers finds them.

        Raises:
            FileNotFoundError: one was not written.
        """
        count = len(self.files)
        places = dict[str, str]()
        size = 0
        names = (
            [WHOLE]
            if count == 1
            else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        )
        for number, name in enumerate(names):
            file = (folder / _part(number)).rename(folder / name)
            with safe_open(file, "pt") as opened:
                places |= dict.fromkeys(opened.keys(), name)
            size += _bytes_of_tensors(file)
        if count > 1:
            (folder / INDEX).write_text(
                json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2)
            )


def _part(number: int) -> str:
    return f"part-{number:05d}.safetensors"


def _bytes_of_tensors(file: Path) -> int:
    """Of a safetensors file what follows its header, whose length stands in the first eight
    bytes.
    """
    with file.open("rb") as content:
        return file.stat().st_size - 8 - int.from_bytes(content.read(8), "little")


def _untied(values: Mapping[str, Tensor], tied: Iterable[str]) -> dict[str, Tensor]:
    """Of each weight one name, which is not among those of ``tied`` if it has another."""
    names = defaultdict(list)
    for name, value in values.items():
        names[id(value)].append(name)
    return {
        name: values[name]
        for same in names.values()
        for name in [next((n for n in same if n not in tied), same[0])]
    }


def _filled(values: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of each file: layers one after the other, the first file with what is in no layer."""
    layers = defaultdict(list)
    for name in values:
        numbered = re.match(r".*?\.\d+(?=\.)", name)
        layers[numbered[0] if numbered else ""].append(name)
    files = list[list[str]]()
    held = 0
    for _, names in sorted(layers.items(), key=lambda layer: bool(layer[0])):
        size = sum(values[name].numel() * values[name].element_size() for name in names)
        if not files or held + size > FILE_BYTES:
            files.append([])
            held = 0
        files[-1] += names
        held += size
    return files
