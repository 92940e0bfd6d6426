"""Folders that are whole or not there, saved models, optimizer states."""

from chronicals.saving.errors import CheckpointError
from chronicals.saving.folders import MANIFEST, check_folder, describe, remove, write_folder
from chronicals.saving.model_files import load_weights, save_model, trained
from chronicals.saving.optimizer_states import optimizer_files, read_optimizer, write_optimizer
from chronicals.saving.saved_model import SavedModel

__all__ = [
    "MANIFEST",
    "CheckpointError",
    "SavedModel",
    "check_folder",
    "describe",
    "load_weights",
    "optimizer_files",
    "read_optimizer",
    "remove",
    "save_model",
    "trained",
    "write_folder",
    "write_optimizer",
]
