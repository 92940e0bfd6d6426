"""A model in a GGUF file as files of transformers, for what reads those alone: dequantised, in
fp32.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from chronicals.models.gguf_loading import load_gguf
from chronicals.models.gguf_reader import File
from chronicals.models.gguf_tokenizer import tokenizer_of
from chronicals.models.saved_tokenizer import save_tokenizer


@contextmanager
def dequantised(file: Path, place: Path) -> Iterator[Path]:
    """A folder of the model's files, which is gone afterwards.

    The weights are fp32, as exact as the blocks are, so that what is made of them is rounded once.

    Args:
        place: beside which it is made; its folder may not be there yet.

    Raises:
        ValueError: the file cannot be read, or its tokenizer; the message says why.
    """
    parent = next(folder for folder in place.absolute().parents if folder.exists())
    with tempfile.TemporaryDirectory(dir=parent, prefix=".dequantised-") as folder:
        model = load_gguf(file, torch.float32, packed=False)
        model.save_pretrained(folder)
        save_tokenizer(tokenizer_of(File(file)), Path(folder), model.config)
        yield Path(folder)
