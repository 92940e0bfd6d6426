"""GGUF files of tiny models, written by our export."""

import pytest

import tiny
from chronicals.export.gguf import GGUFModel
from chronicals.export.source import SourceModel
from chronicals.saving import SavedModel


def write(folder, model, kind="q8_0", tokenizer=None):
    """The file of a model, in a folder of its own; the model's other files are beside that
    folder.
    """
    pytest.importorskip("gguf")
    source = folder / "source"
    place = folder / "base"
    model.save_pretrained(source)
    (tokenizer or tiny.tokenizer()).save_pretrained(source)
    place.mkdir(exist_ok=True)
    given = SourceModel(SavedModel.find(source), source)
    GGUFModel(kind).write(given, place / f"model-{kind}.gguf")
    return place / f"model-{kind}.gguf"


def wide(**changes):
    """A Llama whose rows are blocks of every kind, so that files in Q4_K_M have both of its
    types.
    """
    return tiny.llama(hidden_size=256, intermediate_size=256, **changes)
