"""Weights of a model that no process has whole, written by several processes.

A file holds whole layers, so that weights that transformers splits, joins or renames when it saves
a model lie in one file.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from chronicals.models import form_without_weights

FILE_BYTES = 4 << 30
"""Approximate size of a file; a process has as much of the model in memory while it writes."""

PART_FILE = "part-{:05d}.safetensors"
"""Name of a file until all are written, with its number."""

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
