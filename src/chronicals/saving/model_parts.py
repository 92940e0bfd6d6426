"""Weights of a model that no process has whole, written by several processes.

A file holds whole layers, so that weights that transformers splits, joins or renames when it saves
a model lie in one file.
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
"""Approximate size of a file; a process has as much of the model in memory while it writes."""

WHOLE_FILE = "model.safetensors"
PARTS_INDEX = "model.safetensors.index.json"


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
        self.files = _by_layers(_untied(values, tied))

    def write(
        self,
        folder: Path,
        turn: int,
        turns: int,
        read: Callable[[Sequence[str]], Mapping[str, Tensor]],
    ) -> None:
        """Write every ``turns``-th file, beginning with number ``turn``.

        Args:
            turn: number of this process among those that write, from 0.
            turns: how many processes write.
            read: returns weights by their names.
        """
        from transformers.core_model_loading import revert_weight_conversion

        for number in range(turn, len(self.files), turns):
            saved = revert_weight_conversion(self.form, dict(read(self.files[number])))
            tensors = {name: x.contiguous() for name, x in saved.items()}
            save_file(tensors, folder / _part(number), {"format": "pt"})

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
            file = (folder / _part(number)).rename(folder / name)
            with safe_open(file, "pt") as opened:
                files_by_weight |= dict.fromkeys(opened.keys(), name)
            size += _bytes_of_tensors(file)
        if count > 1:
            index = {"metadata": {"total_size": size}, "weight_map": files_by_weight}
            (folder / PARTS_INDEX).write_text(json.dumps(index, indent=2))


def _part(number: int) -> str:
    return f"part-{number:05d}.safetensors"


def _bytes_of_tensors(file: Path) -> int:
    """Return the bytes behind the header, whose length is in the file's first eight bytes."""
    with file.open("rb") as content:
        return file.stat().st_size - 8 - int.from_bytes(content.read(8), "little")


def _untied(values: Mapping[str, Tensor], tied: Iterable[str]) -> dict[str, Tensor]:
    """Return each weight under one name, which is not among ``tied`` if it has another."""
    names_by_id = defaultdict(list)
    for name, value in values.items():
        names_by_id[id(value)].append(name)
    untied = {}
    for names in names_by_id.values():
        name = next((name for name in names if name not in tied), names[0])
        untied[name] = values[name]
    return untied


def _by_layers(values: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of each file: layer after layer, first the weights outside of layers."""
    layers = defaultdict(list)
    for name in values:
        numbered = re.match(r".*?\.\d+(?=\.)", name)
        layers[numbered[0] if numbered else ""].append(name)
    files: list[list[str]] = []
    file_size = 0
    for _, names in sorted(layers.items(), key=lambda layer: bool(layer[0])):
        size = sum(values[name].numel() * values[name].element_size() for name in names)
        if not files or file_size + size > FILE_BYTES:
            files.append([])
            file_size = 0
        files[-1] += names
        file_size += size
    return files
