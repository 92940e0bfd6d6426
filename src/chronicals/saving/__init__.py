"""Saved models, optimizer states, and folders that are whole or not there."""

from chronicals.saving.folders import (
    MANIFEST,
    CheckpointError,
    check_folder,
    hash_file,
    manifest_entry,
    remove_folder,
    write_folder,
)
from chronicals.saving.model_files import (
    ModelParts,
    load_saved_weights,
    save_beside,
    save_model,
    save_without_weights,
    stored_weights,
    text_files,
    trained,
)
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
from chronicals.saving.staging import Background, Staging

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
    "differences",
    "hash_file",
    "load_saved_weights",
    "manifest_entry",
    "optimizer_files",
    "read_optimizer",
    "remove_folder",
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
