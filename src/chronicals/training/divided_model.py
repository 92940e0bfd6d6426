"""Model files of a run whose weights are divided among the ranks by rows.

The ranks that see the checkpoint's folder make the files from it, each rank a share.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chronicals.distributed import VALUE, RankFiles, is_divided
from chronicals.kernels.adamw import split_master
from chronicals.saving import ModelParts, StoredStates, save_without_weights


class DividedModel:
    """Writer of the model files; all ranks must create it.

    Args:
        dtype: dtype of trained weights in the files.
    """

    def __init__(self, model: Any, dtype: torch.dtype):
        self._parts = ModelParts(model)
        self._dtype = dtype
        first = {id(p): name for name, p in model.named_parameters() if is_divided(p)}
        values = model.state_dict(keep_vars=True)
        self._stored = {name: first[id(p)] for name, p in values.items() if id(p) in first}
        self._here = {
            name: value.detach() for name, value in values.items() if name not in self._stored
        }

    def write(
        self,
        folder: Path,
        name: str,
        files: RankFiles,
        text_files: Mapping[str, bytes],
        about: Mapping[str, Any],
    ) -> None:
        """Write the model, on the first rank, into ``name`` of the checkpoint's folder, together
        with the ranks that see the folder.

        Raises:
            CheckpointError: another rank could not write its share.
        """
        (folder / name).mkdir()
        save_without_weights(folder / name, self._parts.form, text_files, about)
        files.share(folder, lambda *turn: self.write_share(name, *turn))
        self._parts.name_files(folder / name)

    def write_share(self, name: str, folder: Path, turn: int, turns: int) -> None:
        """Write one of ``turns`` shares of the files of ``name``."""
        stored = StoredStates(folder)
        self._parts.write(
            folder / name,
            turn,
            turns,
            lambda names: {key: self._read(stored, key) for key in names},
        )

    def _read(self, stored: StoredStates, name: str) -> Tensor:
        if name in self._here:
            return self._here[name]
        value = stored.read(f"{self._stored[name]}:{VALUE}")
        return (
            split_master(value)[0]
            if value.dtype == torch.float32 and self._dtype == torch.bfloat16
            else value
        )
