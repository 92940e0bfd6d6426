"""Saved models, optimizer states, and folders that are whole or not there."""

from chronicals.saving.background import Background
from chronicals.saving.errors import CheckpointError
from chronicals.saving.folders import (
    MANIFEST,
    check_folder,
    describe,
    hash_file,
    remove,
    write_folder,
)
from chronicals.saving.model_files import (
    load_weights,
    save_beside,
    save_model,
    save_without_weights,
    stored_weights,
    text_files,
    trained,
)
from chronicals.saving.model_parts import ModelParts
from chronicals.saving.optimizer_states import (
    Piece,
    StoredStates,
    optimizer_files,
    read_optimizer,
    write_optimizer,
    write_pieces,
)
from chronicals.saving.reading_back import differences
from chronicals.saving.saved_model import SavedModel
from chronicals.saving.staging import Staging

__all__ = [
    "MANIFEST",
    "Background",
    "CheckpointError",
    "ModelParts",
    "Piece",
    "SavedModel",
    "Staging",
    "StoredStates",
    "check_folder",
    "describe",
    "differences",
    "hash_file",
    "load_weights",
    "optimizer_files",
    "read_optimizer",
    "remove",
    "save_beside",
    "save_model",
    "save_without_weights",
    "stored_weights",
    "text_files",
    "trained",
    "write_folder",
    "write_optimizer",
    "write_pieces",
]


def __dir__() -> list[str]:
    return sorted(__all__)
