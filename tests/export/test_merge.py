"""Merged files: the model with its adapter, a tensor at a time; what makes no sense is refused
and leaves nothing.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from typer.testing import CliRunner

import generic_bitsandbytes  # noqa: F401
import tiny
from chronicals.cli.app import app
from chronicals.export import MergeError, merge
from chronicals.formats import weight_files
from chronicals.lora import LoRAConfig, apply_lora, load_adapter, merge_and_unload, save_adapter
from chronicals.models import load_model
from chronicals.quantization import Linear4bit
from chronicals.saving.model_files import save_model
from comparison import equal

module = sys.modules[merge.__module__]


def base(folder, dtype=torch.float32, **changes):
    model = tiny.llama(3, **changes).to(dtype)
    model.save_pretrained(folder, max_shard_size="60KB")
    return folder


def adapter(folder, base_folder, std=0.03, **options):
    """A trained one's like: B is not zero."""
    model = AutoModelForCausalLM.from_pretrained(base_folder)
    apply_lora(model, LoRAConfig(**{"rank": 4, "alpha": 8, "dropout": 0.0, **options}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=std)
    save_adapter(model, folder, str(base_folder))
    return folder


@pytest.fixture
def trained(tmp_path):
    torch.manual_seed(5)
    return adapter(tmp_path / "adapter", base(tmp_path / "base"))


@torch.no_grad()
def answers(model, ids):
    model = model.eval()
    return model(ids).logits, model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True, "target_modules": ["q_proj", "down_proj"]}, {"use_dora": True}],
    ids=str,
)
def test_plain_transformers_answers_as_the_adapted_model_does(tmp_path, dtype, options):
    torch.manual_seed(6)
    folder = adapter(tmp_path / "adapter", base(tmp_path / "base", dtype), **options)
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 1
    merged = merge(folder, tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(merged.folder, dtype=dtype)
    exact = load_adapter(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32), folder
    )
    ids = torch.randint(1, 300, (2, 9))
    got = answers(plain.float(), ids)
    expected = answers(exact, ids)
    assert (got[0] - expected[0]).norm() <= (1e-6 if dtype == torch.float32 else 1e-2) * expected[
        0
    ].norm()
    if dtype == torch.float32:
        assert equal(got[1], expected[1])
    by_module = load_adapter(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype), folder
    )
    merge_and_unload(by_module)
    for name, weight in by_module.state_dict().items():
        assert equal(plain.state_dict()[name].to(dtype), weight), name


def test_the_report_says_what_each_weight_lost(trained, tmp_path):
    torch.manual_seed(7)
    folder = adapter(tmp_path / "small", base(tmp_path / "narrow", torch.bfloat16), std=0.01)
    merged = merge(folder, tmp_path / "merged")
    report = json.loads((tmp_path / "merged" / module.REPORT).read_text())
    assert (
        report["base"] == str(tmp_path / "narrow")
        and len(report["weights"]) == len(merged.changes) == 14
    )
    name, change = next(iter(merged.changes.items()))
    matrices = load_file(folder / "adapter_model.safetensors")
    path = f"base_model.model.{name.removesuffix('.weight')}"
    update = 2.0 * matrices[f"{path}.lora_B.weight"] @ matrices[f"{path}.lora_A.weight"]
    weights = AutoModelForCausalLM.from_pretrained(
        tmp_path / "narrow", dtype=torch.float32
    ).state_dict()
    kept = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float32
    ).state_dict()
    assert change.change == pytest.approx(float(update.norm() / weights[name].norm()), rel=1e-4)
    off = (kept[name] - weights[name] - update).norm()
    assert (
        change.lost == pytest.approx(float(off / update.norm()), rel=1e-3) and 0 < change.lost < 1
    )


def test_an_embedding_that_was_resized_comes_along(tmp_path):
    torch.manual_seed(8)
    model = AutoModelForCausalLM.from_pretrained(base(tmp_path / "base"))
    model.resize_token_embeddings(307)
    apply_lora(model, LoRAConfig(rank=4, alpha=8))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    save_adapter(model, tmp_path / "adapter", str(tmp_path / "base"))
    merge(tmp_path / "adapter", tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.tensor([[3, 306, 5]])
    assert plain.config.vocab_size == 307
    got, expected = (answers(one, ids)[0] for one in (plain, model))
    assert (got - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("std", [0.0, 30.0], ids=["nothing", "too much"])
def test_what_makes_no_sense_is_refused_and_leaves_nothing(tmp_path, std):
    folder = adapter(tmp_path / "adapter", base(tmp_path / "base"), std=std)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(MergeError, match="nothing was written"):
        merge(folder, tmp_path / "merged")
    assert sorted(tmp_path.iterdir()) == before


def test_an_adapter_that_rounding_loses_is_refused(tmp_path):
    folder = adapter(tmp_path / "adapter", base(tmp_path / "base", torch.bfloat16), std=1e-5)
    with pytest.raises(MergeError, match=r"is lost: .* base in float32"):
        merge(folder, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_other_mistakes_are_named(trained, tmp_path, monkeypatch):
    with pytest.raises(MergeError, match="holds no adapter; a model that was trained whole"):
        merge(tmp_path / "base", tmp_path / "merged")
    (tmp_path / "there").mkdir()
    with pytest.raises(MergeError, match="there': exists; give a folder that does not"):
        merge(trained, tmp_path / "there")
    other = base(tmp_path / "other", hidden_size=32)
    with pytest.raises(MergeError, match="changes a weight .* that of the base is"):
        merge(trained, tmp_path / "merged", base_model=str(other))
    with monkeypatch.context() as patch:
        patch.setattr(
            module.shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(1, 1, 1 << 10)
        )
        with pytest.raises(MergeError, match="the merged model takes .* GiB, the disk has 0.00"):
            merge(trained, tmp_path / "merged")
    file = sorted((tmp_path / "base").glob("*.safetensors"))[0]
    content = file.read_bytes()
    file.write_bytes(content[:-8])
    with pytest.raises(ValueError, match=f"{file.name}: ends within"):
        merge(trained, tmp_path / "merged")
    file.unlink()
    with pytest.raises(ValueError, match=f"{file.name} is missing"):
        merge(trained, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_quantised_base_is_refused(trained, tmp_path):
    for file in (tmp_path / "base").glob("*.safetensors"):
        save_file({name: tensor.to(torch.int8) for name, tensor in load_file(file).items()}, file)
    with pytest.raises(MergeError, match=r"is I8, .*: the base is quantised; give base_model"):
        merge(trained, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.slow
@pytest.mark.parametrize("files", [1, 4])
def test_a_base_in_four_bits_becomes_dense(tmp_path, files):
    """What is not adapted too; the scales of a weight may be in another file than its codes."""
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(9)
    base(tmp_path / "dense", torch.bfloat16)
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "dense", device_map={"": "cpu"}, quantization_config=BitsAndBytesConfig(**four)
    )
    model.save_pretrained(tmp_path / "base", max_shard_size="10KB" if files > 1 else "1GB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) >= files
    model = apply_lora(
        load_model(tmp_path / "base", torch.float32),
        LoRAConfig(rank=4, dropout=0.0, target_modules=["q_proj"]),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    model.save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (
        plain.dtype == torch.bfloat16 and type(plain.model.layers[0].mlp.up_proj) is torch.nn.Linear
    )
    for path, layer in model.named_modules():
        if isinstance(layer, Linear4bit) and not path.endswith(".base_layer"):
            assert equal(plain.get_submodule(path).weight, layer.plain().weight.bfloat16()), path
    ids = torch.randint(1, 300, (2, 9))
    got = answers(plain.float(), ids)[0]
    expected = answers(model, ids)[0]
    assert (got - expected).norm() <= 1e-2 * expected.norm()
    index = tmp_path / "merged" / weight_files.INDEX_FILE
    if files > 1:
        assert set(json.loads(index.read_text())["weight_map"]) == set(plain.state_dict())
    assert "quantization_config" not in json.loads(
        (tmp_path / "merged" / "config.json").read_text()
    )


def test_a_base_in_four_bits_that_is_damaged_is_named(tmp_path):
    pytest.importorskip("bitsandbytes")
    model = tiny.llama(3)
    for path, layer in list(model.model.named_modules(prefix="model")):
        if type(layer) is torch.nn.Linear:
            model.set_submodule(path, Linear4bit.of(layer))
    save_model(tmp_path / "base", model, {}, {})
    apply_lora(model, LoRAConfig(rank=2))
    torch.nn.init.normal_(model.model.layers[0].mlp.up_proj.lora_B)
    save_adapter(model, tmp_path / "adapter", str(tmp_path / "base"))
    file = tmp_path / "base" / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.weight.absmax"
    save_file({key: x for key, x in load_file(file).items() if key != name}, file)
    with pytest.raises(ValueError, match=f"{name}: not in the checkpoint"):
        merge(tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_tensor_at_a_time_is_in_memory(trained, tmp_path, monkeypatch):
    held = []
    most = 0
    own = weight_files.StoredTensor.read

    def read(self):
        nonlocal most
        held[:] = [tensor for tensor in held if sys.getrefcount(tensor) > 3]
        tensor = own(self)
        held.append(tensor)
        most = max(most, len(held))
        return tensor

    monkeypatch.setattr(weight_files.StoredTensor, "read", read)
    merge(trained, tmp_path / "merged")
    assert most <= 2


def test_the_command(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["merge", "adapter", "--output", "merged"])
    assert done.exit_code == 0, done.output
    assert "14 weights changed" in done.output and "rounding loses up to" in done.output
    assert "merged base and the adapter adapter" in done.output.replace(str(tmp_path) + "/", "")
    assert "of its norm away from the weight in the files of" in done.output
    assert (Path("merged") / "config.json").exists() and not (
        Path("merged") / "adapter_config.json"
    ).exists()
