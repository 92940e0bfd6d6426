"""Tensors that are read from files of weights by themselves."""

import pytest
import torch
from safetensors.torch import save_file

from chronicals.formats.weight_files import tensors_in


def test_a_tensor_of_a_file_that_was_cut_is_not_filled_with_zeros(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(3, 5)}, file)
    (stored,) = tensors_in(file)
    assert torch.equal(stored.read(), torch.ones(3, 5))
    file.write_bytes(file.read_bytes()[:-8])
    for read in (stored.read, stored.content):
        with pytest.raises(ValueError, match=r"model\.safetensors: ends within weight; download"):
            read()


def test_a_tensor_without_elements_has_its_dtype(tmp_path):
    save_file({"weight": torch.ones(0, 5, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    (stored,) = tensors_in(tmp_path / "model.safetensors")
    assert stored.read().shape == (0, 5) and stored.read().dtype == torch.bfloat16
