"""Folders: experts are read one by one into records, and what cannot be read is said."""

import json
import struct
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

import chronicals
import families
from chronicals.models.four_bits import quantise_layers
from chronicals.models.loading import load_model
from chronicals.moe.offload import files
from chronicals.patching.patch import patch_parts

FAMILIES = [*families.ROUTED]
IDS = torch.arange(1, 19).view(2, 9)


def saved(folder, name, **changes):
    model = families.routed(name, **changes).bfloat16()
    model.save_pretrained(folder)
    return folder


def from_folder(folder, **options):
    usual = {"vram": "1MiB", "ram": "1GiB", "device": "cpu"}
    return chronicals.offload(folder, **{**usual, **options})


def logits(model):
    patch_parts(model)
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_gives_the_same_bits(name, tmp_path):
    folder = saved(tmp_path, name)
    expected = logits(load_model(folder, torch.bfloat16))
    streamed = from_folder(folder)
    assert torch.equal(logits(streamed), expected)
    assert all(p.device.type == "cpu" for p in streamed.parameters())
    streamed.offload.close()


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss", "Mixtral"])
def test_a_folder_in_4_bits(name, tmp_path):
    """Codes and scales are those of whole stacks, also where a block of scales has two experts."""
    folder = saved(tmp_path, name, hidden_size=64, moe_intermediate_size=32)
    expected = logits(load_model(folder, torch.bfloat16, quantization="nf4"))
    streamed = from_folder(folder, quantization="nf4")
    assert torch.equal(logits(streamed), expected)
    streamed.offload.close()


def test_a_folder_in_mxfp4(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    model = families.routed("GptOss", **sizes).bfloat16()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        count, inner, outer = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(
            0, 256, (count, outer, inner // 32, 16), dtype=torch.uint8
        )
        tensors[f"{name}_scales"] = torch.randint(
            118, 124, (count, outer, inner // 32), dtype=torch.uint8
        )
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    expected = logits(load_model(tmp_path, torch.bfloat16))
    streamed = from_folder(tmp_path)
    assert "MXFP4" in repr(streamed)
    assert torch.equal(logits(streamed), expected)
    streamed.offload.close()


def test_one_expert_at_a_time_is_read(tmp_path, monkeypatch):
    folder = saved(tmp_path, "Qwen3Moe", num_experts=8)
    alive, most = [], []
    read = files.StoredTensor.read

    def counted(self):

        tensor = read(self)
        alive.append(weakref.ref(tensor))
        most.append(sum(ref() is not None for ref in alive))
        return tensor

    monkeypatch.setattr(files.StoredTensor, "read", counted)
    streamed = from_folder(folder)
    assert len(alive) == 2 * 8 * 3 and max(most) <= 3  # gate, up and down of one
    streamed.offload.close()


def cut(folder, bytes_left_off):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) - bytes_left_off])


def end_of(folder, part):
    """The bytes behind the first tensor with ``part`` in its name, and that name."""
    content = (folder / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    name = next(n for n in sorted(header) if part in n)
    return len(content) - (8 + length + header[name]["data_offsets"][1]), name


def test_a_truncated_file_names_layer_and_expert(tmp_path):
    folder = saved(tmp_path, "Qwen3Moe")
    behind, name = end_of(folder, "layers.1.mlp.experts.2.")
    cut(folder, behind + 10)
    with pytest.raises(ValueError, match=r"ends within .*layers\.\d\..*") as error:
        from_folder(folder)
    assert "layers." in str(error.value) and name.split(".")[2].isdecimal()


def test_a_file_that_is_cut_while_it_is_read(tmp_path, monkeypatch):
    folder = saved(tmp_path, "Qwen3Moe")
    opened = files.ExpertFiles(folder)
    behind, name = end_of(folder, "layers.1.mlp.experts.2.down_proj")
    monkeypatch.setattr("chronicals.patching.expert_offload.ExpertFiles", lambda *_: opened)
    size = (folder / "model.safetensors").stat().st_size
    whole = files.StoredTensor.content

    def cut_short(self):
        if self.name == name:
            cut(folder, behind + 10)
        return whole(self)

    monkeypatch.setattr(files.StoredTensor, "content", cut_short)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts, expert 2: .*ends within"):
        from_folder(folder)
    assert (folder / "model.safetensors").stat().st_size < size


def test_experts_under_other_names_are_refused(tmp_path):
    folder = saved(tmp_path, "Qwen3Moe")
    tensors = load_file(folder / "model.safetensors")
    other = {name.replace(".gate_proj.", ".door_proj."): tensor for name, tensor in tensors.items()}
    save_file(other, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="is not in the files of .* under a known name"):
        from_folder(folder)


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(ValueError, match="is no folder; download the model first"):
        from_folder(tmp_path / "nothing")
    with pytest.raises(ValueError, match="are for a folder that is loaded"):
        chronicals.offload(families.routed("Qwen3Moe"), vram="1MiB", quantization="nf4")


def test_quantised_as_a_whole_model_is(tmp_path):
    """A model that was quantised in memory and then offloaded, and a folder: one and the same."""
    folder = saved(tmp_path, "Olmoe", hidden_size=64, intermediate_size=32)
    model = load_model(folder, torch.bfloat16)
    quantise_layers(model)
    one = chronicals.offload(model, vram="1MiB", ram="1GiB", device="cpu")
    other = from_folder(folder, quantization="nf4")
    assert torch.equal(logits(one), logits(other))
    one.offload.close()
    other.offload.close()
