"""A model in a GGUF file, written out as files of transformers for code that reads only those."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from chronicals.formats.gguf.reader import GGUFFile
from chronicals.formats.gguf.tokenizer import tokenizer_of
from chronicals.models.gguf_loading import load_gguf
from chronicals.models.saved_tokenizer import save_tokenizer


@contextmanager
def dequantised(file: Path, place: Path) -> Iterator[Path]:
    """Yield a folder of the model's files, which is removed afterwards.

    The weights are fp32, as exact as the blocks, so that an artefact made of them is rounded once.

    Args:
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
