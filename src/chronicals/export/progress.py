"""No progress bars of libraries while an artefact is written and read back: what is compared is
what is printed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial


@contextmanager
def without_bars() -> Iterator[None]:
    """Within: transformers and compressed-tensors show none; afterwards transformers does as it
    did before.
    """
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with _without_those_of_compressed_tensors():
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _without_those_of_compressed_tensors() -> Iterator[None]:
    """It asks nobody whether to show them (0.17)."""
    if importlib.util.find_spec("compressed_tensors") is None:
        yield
        return
    from compressed_tensors.compressors.model_compressors import model_compressor

    own = getattr(model_compressor, "tqdm", None)
    if own is None:
        yield
        return
    model_compressor.tqdm = partial(own, disable=True)
    try:
        yield
    finally:
        model_compressor.tqdm = own
