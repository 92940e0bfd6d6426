"""Sums of base and adapter are fp32 and rounded once, to the type asked for; a proof is made
against base and adapter apart.
"""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tiny
from chronicals.export import MergeError, NotProved, export, merge, nf4, source
from chronicals.export.gguf import GGUFModel
from chronicals.export.proof import relative_error
from chronicals.formats.gguf.reader import GGUFFile
from chronicals.formats.gguf.writer import WEIGHT_TYPES
from chronicals.lora import LoRAConfig, apply_lora, save_adapter
from chronicals.quantization import Packed

merge_module = sys.modules[merge.__module__]

SCALE = 2.0
"""alpha over rank of the adapters here."""


def saved_adapter(folder, std=0.05, **options):
    """The folder of an adapter whose B is not zero, over a base whose files are bf16."""
    base = folder / "base"
    tiny.llama(3, hidden_size=128, intermediate_size=128).to(torch.bfloat16).save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    apply_lora(model, LoRAConfig(**{"rank": 4, "alpha": 8, "dropout": 0.0, **options}))
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.normal_(std=std)
    save_adapter(model, folder / "adapter", str(base))
    tiny.tokenizer().save_pretrained(folder / "adapter")
    return folder / "adapter"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    return saved_adapter(tmp_path_factory.mktemp("over-bf16"))


def exact_sums(adapter):
    """W + s B A of every adapted layer, fp32, by the names of weights."""
    base = load_file(adapter.parent / "base" / "model.safetensors")
    matrices = load_file(adapter / "adapter_model.safetensors")
    sums = {}
    for name, weight in base.items():
        path = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{path}B.weight" in matrices:
            update = (
                SCALE * matrices[f"{path}B.weight"].float() @ matrices[f"{path}A.weight"].float()
            )
            sums[name] = weight.float() + update
    assert len(sums) == 14
    return sums


WHOLE = {"merged-fp32": "float32", "merged-fp16": "float16", "merged": "bfloat16"}
GGUF = ["gguf-f32", "gguf-bf16", "gguf-q8_0"]


@pytest.fixture(scope="module")
def artefacts(adapter, tmp_path_factory):
    """By format, made in one go."""
    made = export(adapter, [*WHOLE, *GGUF], tmp_path_factory.mktemp("artefacts"))
    return {exported.format: exported for exported in made}


@pytest.mark.parametrize("kind, dtype", WHOLE.items())
def test_merged_weights_are_rounded_once(kind, dtype, adapter, artefacts):
    exported = artefacts[kind]
    found = load_file(exported.path / "model.safetensors")
    for name, total in exact_sums(adapter).items():
        assert relative_error(found[name], total.to(getattr(torch, dtype))) < 1e-6, name
    logits = next(
        check
        for check in exported.proof.checks
        if check.name == "logits beside the trained model's"
    )
    assert kind != "merged-fp32" or logits.value < 1e-5


@pytest.mark.parametrize("kind", GGUF)
def test_gguf_is_made_of_the_sums(kind, adapter, artefacts):
    package = pytest.importorskip("gguf")
    written = GGUFFile(artefacts[kind].path)
    of_kind = package.GGMLQuantizationType[WEIGHT_TYPES[kind.removeprefix("gguf-")]]
    total = exact_sums(adapter)["model.layers.1.mlp.up_proj.weight"]
    expected = package.quants.dequantize(package.quants.quantize(total.numpy(), of_kind), of_kind)
    found = written.read("blk.1.ffn_up.weight")
    assert torch.allclose(found, torch.from_numpy(expected.copy()), rtol=0, atol=1e-7)


def test_what_llama_cpp_quantises_is_given_fp32(adapter, tmp_path):
    """Its own types are made of a whole file, which holds the sums as they are."""
    with source.opened(adapter, None, tmp_path) as opened:
        assert GGUFModel("q4_k_m").own_kind(opened) == "f32"


def test_codes_of_nf4_are_those_of_the_sums(adapter, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    total = exact_sums(adapter)[name]
    with source.opened(adapter, None, tmp_path) as opened:
        tensors = nf4._replacements(opened.tensors[name], {name: name})
    codes = tensors[0].made().view(-1)
    assert torch.equal(codes, Packed.of(total).codes.view(-1))
    assert not torch.equal(codes, Packed.of(total.bfloat16()).codes.view(-1))


@pytest.mark.parametrize(
    "options",
    [{"use_dora": True}, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}],
    ids=str,
)
def test_other_adapters_are_exact_in_fp32(options, tmp_path):
    (exported,) = export(saved_adapter(tmp_path, **options), "merged-fp32")
    values = {check.name: check.value for check in exported.proof.checks}
    assert values["logits beside the trained model's"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["merged-fp32", "merged-fp16", "gguf-q8_0", "fp8", "nf4"])
def test_a_rounding_on_the_way_is_found(kind, adapter, tmp_path, monkeypatch):
    """A merge in the dtype of the base's files, as it was once."""
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(merge_module.Sums, "dtype_of", lambda self, stored: stored.dtype)
    with pytest.raises(
        NotProved, match=r"weights beside the trained ones rounded once, \w+, \w+: FAILED"
    ):
        export(adapter, kind, tmp_path)
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]


@pytest.mark.slow
def test_an_adapter_that_only_fp32_keeps(tmp_path):
    """In 16 bits or fewer the model would be its base again, which is said; in fp32 it is the
    trained one.
    """
    small = saved_adapter(tmp_path, std=3e-4)
    for kind in ("merged", "gguf-q8_0"):
        with pytest.raises(
            MergeError, match=r"is lost: .* spacing of bfloat16; .* \(--to merged-fp32\)"
        ):
            export(small, kind)
    assert not export(small, "merged-fp32")[0].proof.failed


@pytest.mark.slow
def test_a_base_in_4_bits_is_what_products_of_the_run_read(tmp_path):
    """A run in bf16 multiplies with values that are rounded to it, and so does the model that a
    proof compares with.
    """
    import runs
    from chronicals.models import load_model

    base = tmp_path / "base"
    tiny.llama().to(torch.bfloat16).save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    model = load_model(base, torch.bfloat16, quantization="nf4")
    given = {"quantization": "nf4", "mixed_precision": "bf16", "lora_dropout": 0.0, "max_steps": 2}
    runs.train(tmp_path, model=model, **given)
    (exported,) = export(tmp_path / "run", "merged-fp32")
    kept = json.loads((exported.path.parent / f"{exported.path.name}.proof.json").read_text())
    assert all(check["value"] < 1e-5 for check in kept["checks"] if check["value"] is not None)
