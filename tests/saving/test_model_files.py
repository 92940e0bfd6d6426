"""Files of a model by several processes: what transformers itself would write, in any number of
files.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import families
import tiny
from chronicals.models import attach_score
from chronicals.saving import (
    ModelParts,
    model_files,
    save_model,
    save_without_weights,
    stored_weights,
)
from chronicals.saving.model_files import PARTS_INDEX, WHOLE_FILE
from comparison import equal

MODELS = {
    "untied": lambda: tiny.llama(tie_word_embeddings=False),
    "tied": lambda: tiny.llama(tie_word_embeddings=True),
    "mixture, whose experts are split": lambda: families.mixture("qwen3_moe"),
    "mixture, whose names change": lambda: families.mixture("mixtral"),
}


def scored():
    model = tiny.llama()
    attach_score(model, 0)
    torch.nn.init.normal_(model.score.weight)
    return model


def written(model, folder, turns=3):
    """By so many processes, one after the other."""
    parts = ModelParts(model)
    folder.mkdir()
    values = {name: value.detach() for name, value in model.state_dict().items()}
    for turn in reversed(range(turns)):
        parts.write(folder, turn, turns, lambda names: {name: values[name] for name in names})
    save_without_weights(folder, parts.form, {"beside.txt": b"x"}, {"about": 1})
    parts.name_files(folder)
    return parts


def tensors(folder):
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 1 << 15, 1 << 40])
@pytest.mark.parametrize("make", [*MODELS.values(), scored], ids=[*MODELS, "with a score"])
def test_the_files_hold_what_transformers_writes(tmp_path, set_constants, make, size):
    set_constants(model_files, FILE_BYTES=size)
    model = make()
    save_model(tmp_path / "whole", model, {"beside.txt": b"x"}, {"about": 1})
    parts = written(model, tmp_path / "parts")
    expected = tensors(tmp_path / "whole")
    found = tensors(tmp_path / "parts")
    assert expected.keys() == found.keys() and all(
        equal(x, found[name]) for name, x in expected.items()
    )
    own = [
        {file.name for file in folder.iterdir() if file.suffix != ".safetensors"}
        for folder in tmp_path.iterdir()
    ]
    assert own[0] - {PARTS_INDEX} == own[1] - {PARTS_INDEX} and (
        PARTS_INDEX in {*own[0], *own[1]}
    ) == (len(parts.files) > 1)
    kind = AutoModelForSequenceClassification if make is scored else AutoModelForCausalLM
    one, other = (kind.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "parts"))
    assert all(equal(x, other[name]) for name, x in one.items())


def test_files_are_of_bounded_size_and_have_an_index(tmp_path, set_constants):
    model = tiny.llama(num_hidden_layers=4)
    layer = sum(p.numel() for p in model.model.layers[0].parameters()) * 4
    rest = sum(p.numel() for p in model.parameters()) * 4 - 4 * layer
    set_constants(model_files, FILE_BYTES=max(rest, 2 * layer))
    parts = written(model, tmp_path / "parts")
    assert (
        len(parts.files) == (3 if rest + layer > max(rest, 2 * layer) else 2)
        and not (tmp_path / "parts" / WHOLE_FILE).exists()
    )
    index = json.loads((tmp_path / "parts" / PARTS_INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in model.parameters())
    places = index["weight_map"]
    assert {name: load_file(tmp_path / "parts" / file)[name].shape for name, file in places.items()}
    assert len({places[name] for name in places if ".layers.1." in name}) == 1


def test_a_file_that_nobody_wrote_is_missed(tmp_path, set_constants):
    set_constants(model_files, FILE_BYTES=1)
    model = tiny.llama()
    parts = ModelParts(model)
    parts.write(tmp_path, 0, 2, lambda names: {name: model.state_dict()[name] for name in names})
    with pytest.raises(FileNotFoundError):
        parts.name_files(tmp_path)


def test_weights_are_read_when_they_are_asked_for(tmp_path, set_constants):
    """Of a model in several files, too; where names are others in the files, all at once."""
    set_constants(model_files, FILE_BYTES=1)
    model = tiny.llama(tie_word_embeddings=True)
    written(model, tmp_path / "parts")
    found = stored_weights(tmp_path / "parts", model)
    assert not isinstance(found, dict) and {*found} == {
        name for name, _ in model.named_parameters()
    }
    assert all(equal(found[name], p) for name, p in model.named_parameters())
    mixture = families.mixture("qwen3_moe")
    written(mixture, tmp_path / "mixture")
    found = stored_weights(tmp_path / "mixture", mixture)
    assert isinstance(found, dict) and all(
        equal(found[name], p) for name, p in mixture.named_parameters()
    )
