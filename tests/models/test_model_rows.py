"""Rows of weights that processes read, each its own, from what must be the same files."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import runs
import tiny
from chronicals.config import ConfigurationError
from chronicals.distributed import Mesh
from chronicals.models.rows import digest_of_files
from chronicals.saving import SavedModel
from chronicals.training import loading


def saved(folder, seed=0, size="50MB"):
    tiny.llama(seed, hidden_size=256, intermediate_size=512).save_pretrained(
        folder, max_shard_size=size
    )
    return folder


@pytest.mark.parametrize("size", ["50MB", "1MB"], ids=["one file", "several"])
def test_the_same_files_have_one_digest_and_others_another(tmp_path, size):
    first = saved(tmp_path / "a", size=size)
    second = saved(tmp_path / "b", size=size)
    other = saved(tmp_path / "c", 1, size)
    digests = [digest_of_files(folder) for folder in (first, second, other)]
    assert digests[0] == digests[1] != digests[2]


def test_the_last_weight_and_the_header_are_told(tmp_path):
    """Whose file has the same size."""
    before = digest_of_files(saved(tmp_path))
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    with file.open("r+b") as written:
        written.seek(-4, 2)
        end = written.read(4)
        written.seek(-4, 2)
        written.write(bytes(255 - byte for byte in end))
    after = digest_of_files(tmp_path)
    weights["model.norm.another"] = weights.pop("model.norm.weight")
    save_file(weights, file, {"format": "pt"})
    assert len({before, after, digest_of_files(tmp_path)}) == 3


@pytest.mark.parametrize("fields", [{}, {"use_lora": True, "lora_rank": 4}], ids=["full", "LoRA"])
def test_another_copy_on_another_machine_is_refused(tmp_path, monkeypatch, fields):
    here = saved(tmp_path / "here")
    there = saved(tmp_path / "there", 1)

    class Two(Mesh):
        def gather_values(self, value):
            other = (
                {name: digest_of_files(there) for name in value}
                if isinstance(value, dict)
                else value
            )
            return [value, other]

    config = runs.config(tmp_path, sharding="weights", **fields)
    with pytest.raises(
        ConfigurationError, match="do not train the same: the content of the model's files is"
    ):
        loading.load_to_train(SavedModel.find(here), config, Two(0, 2))
    there = here
    model, _ = loading.load_to_train(SavedModel.find(here), config, Two(0, 2))
    assert isinstance(model, torch.nn.Module)
