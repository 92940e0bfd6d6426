"""No progress bars of libraries while an artefact is written and read back."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial


@contextmanager
def without_bars() -> Iterator[None]:
    """Hide the bars of transformers and compressed-tensors inside the context."""
    from transformers.utils import logging

    were_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with _without_compressed_tensors_bars():
            yield
    finally:
        if were_shown:
            logging.enable_progress_bar()


@contextmanager
def _without_compressed_tensors_bars() -> Iterator[None]:
    """Hide the bars of compressed-tensors, which has no setting for them (0.17)."""
    if importlib.util.find_spec("compressed_tensors") is None:
        yield
        return
    from compressed_tensors.compressors.model_compressors import model_compressor

    tqdm = getattr(model_compressor, "tqdm", None)
    if tqdm is None:
        yield
        return
    model_compressor.tqdm = partial(tqdm, disable=True)
    try:
        yield
    finally:
        model_compressor.tqdm = tqdm
