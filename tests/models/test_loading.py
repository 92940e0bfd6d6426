"""What is said of a folder from which no model can be loaded."""

import pytest
import torch

import tiny
from chronicals.models import load_config, load_model

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 429816\n"


@pytest.mark.parametrize("damage", [lambda _: POINTER, lambda whole: whole[:-100], lambda whole: whole[:50], lambda _: b""])
def test_a_damaged_file_of_weights_is_named_with_the_remedy(tmp_path, damage):
    tiny.llama().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=rf"^model='{tmp_path}': .*\.safetensors .*Git LFS pointer.*; download it again$"):
        load_model(tmp_path, torch.float32)


def test_a_folder_that_is_there_is_not_said_to_be_missing(tmp_path):
    with pytest.raises(ValueError, match=f"^model='{tmp_path}': no configuration could be loaded: "):
        load_config(tmp_path)
    with pytest.raises(ValueError, match=f"^model='{tmp_path}/x': there is no such folder here, and as a hub name: no config"):
        load_config(tmp_path / "x")
