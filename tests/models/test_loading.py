"""What is said of a folder from which no model can be loaded."""

import builtins
import json
import logging

import pytest
import torch
from safetensors.torch import load_file

import families
import runs
import tiny
from chronicals.distributed import Mesh
from chronicals.models import count_values, load_config, load_model
from chronicals.models.loading import load_for_rows, load_without_weights
from chronicals.models.rows import STORED_ROWS, NotByRows
from chronicals.saving import SavedModel
from chronicals.training import loading
from chronicals.training.adapters import attach_adapters
from comparison import equal
from fp8_checkpoints import refuse_to_keep, saved_in_fp8

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 429816\n"


@pytest.mark.parametrize(
    "damage",
    [lambda _: POINTER, lambda whole: whole[:-100], lambda whole: whole[:50], lambda _: b""],
)
def test_a_damaged_file_of_weights_is_named_with_the_remedy(tmp_path, damage):
    tiny.llama().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(
        ValueError,
        match=rf"^model='{tmp_path}': .*\.safetensors .*Git LFS pointer.*; download it again$",
    ):
        load_model(tmp_path, torch.float32)


def test_a_folder_that_is_there_is_not_said_to_be_missing(tmp_path):
    with pytest.raises(
        ValueError, match=f"^model='{tmp_path}': no configuration could be loaded: "
    ):
        load_config(tmp_path)
    message = f"model='{tmp_path}/x': there is no such folder here, and no hub name has such a form"
    with pytest.raises(ValueError, match=f"^{message}"):
        load_config(tmp_path / "x")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_weights_in_fp8_are_dequantised_on_any_machine(
    family, dtype, tmp_path, monkeypatch, caplog
):
    """Of linear layers and of experts, whose matrices are one by one in the files."""
    sizes = {"hidden_size": 256, "head_dim": 32}
    model = (
        families.mixture(family, moe_intermediate_size=384, **sizes)
        if family == "qwen3_moe"
        else families.build(family)
    )
    meant = saved_in_fp8(tmp_path, model.bfloat16(), kept=["o_proj"])
    assert family == "llama" or any(".experts.3.up_proj" in name for name in meant)
    refuse_to_keep(monkeypatch)
    caplog.set_level(logging.INFO)
    loaded = load_model(tmp_path, dtype)
    assert (
        "its weights are in FP8 with scales of blocks; they are dequantised as they are read"
        in caplog.text
    )
    assert getattr(loaded.config, "quantization_config", None) is None
    # it refuses quantised weights without adapters
    attach_adapters(loaded, runs.config(tmp_path))
    loaded.save_pretrained(tmp_path / "again")
    found = load_file(tmp_path / "again" / "model.safetensors")
    assert found.keys() == meant.keys()
    for name, weight in meant.items():
        assert found[name].dtype == dtype
        torch.testing.assert_close(found[name].float(), weight.float(), rtol=2**-8, atol=0)


def test_blocks_that_end_within_a_weight_are_refused(tmp_path):
    """Which transformers would dequantise by blocks of another size without a word, or refuse
    without a name.
    """
    saved_in_fp8(tmp_path, families.mixture("qwen3_moe", moe_intermediate_size=144).bfloat16())
    with pytest.raises(
        ValueError,
        match=r"experts.gate_up_proj is \[144, 32\] in FP8 .* take a checkpoint in 16 bit",
    ):
        load_model(tmp_path, torch.bfloat16)
    saved_in_fp8(
        tmp_path, families.mixture("qwen3_moe", head_dim=40).bfloat16(), kept=["q_proj", "o_proj"]
    )
    assert load_model(tmp_path, torch.bfloat16) is not None, "what is not in FP8 may have any size"


def test_weights_in_fp8_are_not_read_by_rows(tmp_path):
    """Whose scales would be left out."""
    saved_in_fp8(tmp_path, families.build("llama").bfloat16())
    with pytest.raises(
        ValueError,
        match=r"sharding='weights': .* are quantised already \(fp8\); take the model in 16 bit",
    ):
        load_for_rows(tmp_path, torch.bfloat16)
    with pytest.raises(
        ValueError,
        match=r"quantization='nf4': its weights are quantised already \(fp8\); leave it out",
    ):
        load_model(tmp_path, torch.bfloat16, quantization="nf4")


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.mark.parametrize("by_rows", [False, True], ids=["shapes", "rows"])
def test_a_model_with_code_of_its_own_is_read_where_its_code_is_trusted(
    tmp_path, monkeypatch, let_return, by_rows
):
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.syspath_prepend(tmp_path / "modules")
    let_return(builtins, input="n")
    folder, whole = (
        tmp_path / f"model-{by_rows}",
        tiny.llama(),
    )  # classes are known by the name of the folder
    whole.save_pretrained(folder)
    (folder / "own.py").write_text(CODE)
    described = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    described |= {
        "model_type": "own_llama",
        "architectures": ["OwnForCausalLM"],
        "auto_map": classes,
    }
    (folder / "config.json").write_text(json.dumps(described))
    found = (
        load_for_rows(folder, torch.float32, True)
        if by_rows
        else load_without_weights(folder, True)
    )
    assert type(found).__name__ == "OwnForCausalLM" and all(p.is_meta for p in found.parameters())
    if by_rows:
        name = "model.layers.0.mlp.up_proj.weight"
        rows = range(8)
        read = getattr(found, STORED_ROWS).read(name, found.get_parameter(name), rows)
        assert equal(read[:8], whole.get_parameter(name)[:8])
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_for_rows(folder, torch.float32) if by_rows else load_without_weights(folder)


@pytest.mark.parametrize("fields", [{}, {"use_lora": True, "lora_rank": 4}], ids=["full", "LoRA"])
@pytest.mark.parametrize("kind", ["experts one by one", "FP8"])
def test_files_of_another_form_are_loaded_whole_unless_weights_were_to_be_divided(
    tmp_path, monkeypatch, let_return, caplog, kind, fields
):
    """Nobody named anything wrong where the memory asks for it. Linear layers beside experts are
    read by themselves.
    """

    class Alike(Mesh):
        def gather_values(self, value):
            return [value] * self.count

    if kind == "FP8":
        model = families.build("llama").bfloat16()
        saved_in_fp8(tmp_path, model)
        refuse_to_keep(monkeypatch)
    else:
        model = families.mixture("qwen3_moe")
        model.save_pretrained(tmp_path)
    let_return(loading, choose_sharding="weights")
    saved = SavedModel.find(tmp_path)
    config = runs.config(tmp_path, **fields)
    if kind == "FP8" or not fields:
        with pytest.raises(NotByRows, match=r"sharding='weights': .*sharding='optimizer'"):
            loading.load_to_train(saved, config.replace(sharding="weights"), Alike(0, 2))
        found, fitted = loading.load_to_train(saved, config, Alike(0, 2))
        assert "every process loads the whole model, before it is divided" in caplog.text
        assert count_values(found) == count_values(model) and not any(
            p.is_meta for p in found.parameters()
        )
    else:
        _, fitted = loading.load_to_train(saved, config, Alike(0, 2))
        assert "loads the whole model" not in caplog.text
    assert fitted.sharding == "weights"
