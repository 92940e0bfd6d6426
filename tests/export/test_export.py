"""``chronicals export``: whole models, adapters and runs, proved or not kept; what older
programs read; cards for Ollama.
"""

import importlib
import json
import shutil
import sys
import weakref
from collections import namedtuple
from dataclasses import replace

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig
from typer.testing import CliRunner

import gguf_models
import runs
import tiny
from chronicals.cli.app import app
from chronicals.export import (
    ExportError,
    NotExpressible,
    NotProved,
    Proof,
    export,
    nf4,
    ollama,
    source,
    whole,
)
from chronicals.export.adapter import GGUFAdapter
from chronicals.export.gguf import GGUFModel
from chronicals.export.hub import UploadError, hub_card
from chronicals.export.nf4 import NF4Folder
from chronicals.export.proof import cross_entropy, largest_error
from chronicals.export.whole import make_compatible, older_names
from chronicals.formats import weight_files
from chronicals.formats.gguf.reader import GGUFFile
from chronicals.models import load_model
from chronicals.saving import SavedModel
from comparison import equal
from hub import Hub

USUAL = {"max_steps": 3, "use_fused_kernels": False}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny.llama().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\nA base.\n")
    (folder / "LICENSE").write_text("words of a licence")
    return folder


def adapted(folder, base, **changes):
    """The folder of a run with adapters over the base."""
    settings = {"use_lora": True, "lora_rank": 4, "lora_dropout": 0.0, **USUAL, **changes}
    runs.train(folder, model=load_model(base, torch.float32), **settings)
    return folder / "run"


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    return adapted(tmp_path_factory.mktemp("adapted"), base)


def results(exported):
    return {check.name: check for check in exported.proof.checks}


# --- whole models and adapters
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["merged", "merged-fp16", "merged-fp32"])
def test_a_run_with_adapters_becomes_a_whole_model(kind, run, tmp_path):
    (exported,) = export(run, kind, tmp_path)
    folder = exported.path
    dtype = {"merged": "bfloat16", "merged-fp16": "float16", "merged-fp32": "float32"}[kind]
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, dtype)}
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    assert (folder / "LICENSE").read_text() == "words of a licence"
    assert not (folder / "adapter_config.json").exists() and not (folder / "merge.json").exists()
    text = results(exported)["greedy text, nats"]
    assert text.passed and (kind != "merged-fp32" or text.detail.startswith("32 of 32 tokens"))
    kept = json.loads((tmp_path / f"{folder.name}.proof.json").read_text())
    assert kept["format"] == kind and all(check["passed"] is not False for check in kept["checks"])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.slow
def test_a_model_that_was_trained_whole_keeps_its_weights(tmp_path):
    runs.train(tmp_path, **USUAL)
    (exported,) = export(tmp_path / "run", "merged-fp32")
    ours, theirs = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "run" / "model", exported.path)
    )
    assert exported.path == tmp_path / "run" / "export" / "run-fp32"
    assert ours.keys() == theirs.keys() and all(equal(ours[name], theirs[name]) for name in ours)
    assert results(exported)["logits beside the trained model's"].value == 0.0


KINDS = {
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True, "learning_rate": 5e-4},
    "nf4": {"quantization": "nf4"},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_every_kind_of_adapter(changes, base, tmp_path):
    """Merged from the weights that the adapter saw; by PEFT where it can load them."""
    folder = adapted(tmp_path, base, **changes)
    formats = (
        ["merged-fp32", "gguf-f32"]
        if "quantization" in changes
        else ["merged-fp32", "adapter", "gguf-f32"]
    )
    for exported in export(folder, formats):
        assert not exported.proof.failed


def test_an_adapter_by_itself(run, tmp_path):
    (exported,) = export(run, "adapter", tmp_path)
    assert results(exported)["logits beside the trained model's"].passed
    assert (exported.path / "adapter_model.safetensors").exists()
    config = json.loads((exported.path / "tokenizer_config.json").read_text())
    assert config["chat_template"] == tiny.tokenizer().chat_template


SCALES = [{}, {"use_rslora": True, "learning_rate": 5e-4}, {"lora_rank_pattern": {"q_proj": 2}}]


@pytest.mark.slow
@pytest.mark.parametrize("changes", SCALES)
def test_an_adapter_as_gguf(changes, base, tmp_path):
    """B times A with its scale, whatever makes it."""
    (exported,) = export(adapted(tmp_path, base, **changes), "gguf-adapter")
    assert results(exported)["what is added"].value < 1e-6


@pytest.mark.llama_cpp
@pytest.mark.parametrize("changes", SCALES)
def test_llama_cpp_adds_an_adapter_to_its_base(changes, base, tmp_path):
    (exported,) = export(adapted(tmp_path, base, **changes), "gguf-adapter")
    assert results(exported)["logits beside the trained model's"].client == "llama.cpp"


@pytest.mark.slow
def test_rows_of_b_are_reordered_as_those_of_the_base(base, tmp_path):
    """Element 2 i of a head in the file is element i of the model's, element 2 i + 1 is i +
    half; of q and k alone.
    """
    folder = adapted(tmp_path, base, lora_target_modules=["q_proj", "k_proj", "v_proj"])
    (exported,) = export(folder, "gguf-adapter")
    file = GGUFFile(exported.path)
    trained = load_file(folder / "model" / "adapter_model.safetensors")
    for name in ("q", "k", "v"):
        (b,) = [
            tensor
            for key, tensor in trained.items()
            if f"layers.1.self_attn.{name}_proj.lora_B" in key
        ]
        ours, theirs = (
            x.view(-1, 16, b.shape[1]) for x in (b, file.read(f"blk.1.attn_{name}.weight.lora_b"))
        )
        expected = (
            ours if name == "v" else torch.stack([ours[:, :8], ours[:, 8:]], dim=2).flatten(1, 2)
        )
        torch.testing.assert_close(theirs, expected)
    given = source.SourceModel(SavedModel.find(folder), base)
    assert GGUFAdapter("adapter").size(given) == sum(
        tensor.n_bytes for tensor in file.tensors.values()
    )


@pytest.mark.slow
def test_adapters_that_gguf_has_no_place_for(base, tmp_path):
    with pytest.raises(
        NotExpressible, match=r"DoRA: GGUF has no place for it in an adapter; export it merged"
    ):
        export(adapted(tmp_path / "dora", base, use_dora=True), "gguf-adapter")
    with pytest.raises(ValueError, match="was trained whole and has no adapter"):
        export(base, "gguf-adapter", tmp_path / "whole")


@pytest.mark.slow
def test_a_scale_that_is_left_out_of_gguf_is_found(base, tmp_path, plant):
    """As by a program that takes alpha over r for rsLoRA."""
    folder = adapted(tmp_path, base, use_rslora=True, learning_rate=5e-4)
    writing = []

    def write(right, *given):
        writing.append(True)
        right(*given)
        writing.clear()

    def read_pairs(right, source):
        pairs = right(source)
        if not writing:
            return pairs
        return {path: replace(pair, scale=pair.scale / 2) for path, pair in pairs.items()}

    plant(GGUFAdapter, "write", write)
    plant(importlib.import_module("chronicals.export.adapter"), "_read_pairs", read_pairs)
    with pytest.raises(NotProved, match="what is added, gguf: FAILED"):
        export(folder, "gguf-adapter")


def test_a_whole_model_has_no_adapter(base, tmp_path):
    with pytest.raises(ValueError, match="was trained whole and has no adapter; export it merged"):
        export(base, "adapter", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("with_adapters", [False, True])
def test_a_model_in_memory(with_adapters, base, tmp_path):
    from chronicals.lora import LoRAConfig, apply_lora

    model = load_model(base, torch.float32)
    if with_adapters:
        apply_lora(model, LoRAConfig(rank=4))
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("lora_B"):
                    parameter.normal_(std=0.05)
    (exported,) = export(model, "merged-fp32", tmp_path, tokenizer=tiny.tokenizer())
    assert exported.path.name == "model-fp32"
    ids = torch.tensor([[5, 7, 9, 11]])
    with torch.no_grad():
        expected, found = (
            m.eval()(ids).logits for m in (model, load_model(exported.path, torch.float32))
        )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ExportError, match="tokenizer=None: a model in memory"):
        export(model, "merged")


@pytest.mark.slow
def test_checkpoints_are_exported_too(base, tmp_path):
    folder = adapted(tmp_path, base, save_steps=2)
    (checkpoint,) = (folder / "checkpoints").glob("step-*2")
    (exported,) = export(checkpoint, "merged-fp32", tmp_path / "out", name="early")
    assert exported.path.name == "early-fp32"


@pytest.mark.slow
def test_how_much_survives(run, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in tiny.chat_rows()[:20]))
    first, second = (
        results(exported)
        for exported in export(run, ["gguf-f32", "gguf-q4_0"], tmp_path, data=data)
    )
    losses = [first[f"loss on the data, {name}"].value for name in ("base", "trained", "exported")]
    assert losses[0] > losses[1] == pytest.approx(losses[2], abs=1e-5)
    assert first["ratio of the training's gain that is kept"].value == pytest.approx(1.0, abs=1e-3)
    assert second["ratio of the training's gain that is kept"].value != pytest.approx(1.0, abs=1e-5)


@pytest.mark.slow
def test_large_models_are_compared_in_16_bits(run, tmp_path, set_constants):
    """By bounds that allow for what torch itself rounds then."""
    set_constants(source, LARGE_MODEL_BYTES=0)
    for exported in export(run, ["merged-fp32", "gguf-f32", "adapter", "fp8"], tmp_path):
        assert not exported.proof.failed
    bounds = {
        check.bound
        for check in exported.proof.checks
        if check.name.startswith("logits beside torch")
    }
    assert bounds <= {5e-2}


# --- what is not proved is not kept
# --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_adapter_that_is_applied_twice_is_found(run, tmp_path, plant):
    changes = importlib.import_module("chronicals.export.adapter_changes")

    def twice(right, self, stored, changes):
        total = right(self, stored, changes)
        return total if total is None else 2 * total - stored.read().float()

    plant(changes.AdapterChanges, "merged", twice)
    for kind in ("merged-fp32", "gguf-f32"):
        with pytest.raises(NotProved, match="beside the trained model"):
            export(run, kind, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_text_that_another_model_goes_on_with_is_found(run, tmp_path, plant):
    """Whose logits of whole documents are right."""

    def other(right, model, documents):
        found = right(model, documents)
        return [replace(x, log_probabilities=[1.1 * p for p in x.log_probabilities]) for x in found]

    (whole_one,) = export(run, "merged-fp32", tmp_path / "right")
    assert not whole_one.proof.failed
    plant(source, "greedy_texts", once_right(other))
    with pytest.raises(NotProved, match="greedy text"):
        export(run, "merged-fp32", tmp_path)


def once_right(other):
    """The first call is right, that of the trained model."""
    calls = []

    def chosen(right, *given):
        calls.append(given)
        return right(*given) if len(calls) == 1 else other(right, *given)

    return chosen


@pytest.mark.parametrize("planted", ["template", "stop", "tokenizer", "settings"])
def test_faults_beside_the_weights_are_found(planted, run, tmp_path, plant):
    def wrong(right, folder, stops):
        right(folder, stops)
        if planted == "template":
            file = folder / "chat_template.jinja"
            file.write_text(file.read_text().replace("assistant", "Assistant"))
        if planted == "stop":
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops[:1]}))
        if planted == "settings":
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.3}))
        if planted == "tokenizer":
            described = json.loads((folder / "tokenizer.json").read_text())
            described["model"]["merges"] = described["model"]["merges"][:5]
            (folder / "tokenizer.json").write_text(json.dumps(described))

    plant(whole, "make_compatible", wrong)
    said = {
        "template": "chat template",
        "stop": "where generation ends",
        "tokenizer": "ids of texts",
        "settings": "settings",
    }[planted]
    with pytest.raises(NotProved, match=said):
        export(run, "merged-fp32", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_number_is_found_behind_what_is_right():
    right = torch.randn(4, 8)
    wrong = torch.randn(4, 8)
    wrong[2, 3] = torch.nan
    for found in ([right, wrong], [wrong, right]):
        assert largest_error(found, [right, right]) == float("inf")
    proof = Proof({})
    proof.bounded("x", "y", largest_error([right, wrong], [right, right]), 0.1)
    proof.bounded("x", "y", float("nan"), 0.1)
    assert len(proof.failed) == 2


def test_cross_entropy_is_of_each_token_after_the_first():
    logits = torch.randn(4, 8)
    ids = [5, 2, 7, 1]
    expected = -sum(float(logits[n].log_softmax(-1)[ids[n + 1]]) for n in range(3)) / 3
    assert cross_entropy([logits], [ids]) == pytest.approx(expected, rel=1e-5)


def test_a_weight_too_large_for_fp16_is_named(tmp_path):
    model = tiny.llama()
    with torch.no_grad():
        model.model.norm.weight[0] = 1e5
    model.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(
        ValueError,
        match=r"model.norm.weight: has 1e\+05, and float16 ends at 65504; write bfloat16",
    ):
        export(tmp_path / "model", "merged-fp16")
    assert list((tmp_path / "model" / "export").iterdir()) == []


# --- what is refused
# -----------------------------------------------------------------------------------------------------


def test_no_such_format(run):
    with pytest.raises(
        ExportError, match="to='gguf-q9': no such format; there are merged, merged-fp16"
    ):
        export(run, "gguf-q9")


@pytest.mark.slow
def test_what_is_there_is_not_replaced(run, tmp_path):
    export(run, "gguf-f16", tmp_path, name="x")
    before = (tmp_path / "x-f16.gguf").read_bytes()
    with pytest.raises(
        ExportError, match=r"x-f16.gguf: is there already \(--to gguf-f16\); delete it"
    ):
        export(run, ["merged", "gguf-f16"], tmp_path, name="x")
    assert (tmp_path / "x-f16.gguf").read_bytes() == before and not (tmp_path / "x-bf16").exists()


@pytest.mark.slow
def test_a_full_disk_is_said_before_anything_is_written(run, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 1 << 30))
    export(run, "gguf-f32", tmp_path / "enough")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 1000))
    with pytest.raises(ValueError, match="the disk has 0.00; free some"):
        export(run, "gguf-f32", tmp_path / "full")
    assert list((tmp_path / "full").iterdir()) == []


@pytest.mark.parametrize("kind", ["gguf", "nf4"])
def test_memory_is_one_tensor(kind, tmp_path, monkeypatch):
    """No more than one tensor of the file is read at a time, however many there are."""
    model = gguf_models.build("llama", num_hidden_layers=6)
    model.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    alive = set()
    most = []
    right = weight_files.StoredTensor.read
    packed = nf4.stored_tensors

    def watched(name, tensor):
        alive.add(name)
        weakref.finalize(tensor.untyped_storage(), alive.discard, name)

    def read(self):
        tensor = right(self)
        watched(self.name, tensor)
        most.append(len(alive))
        return tensor

    def stored_tensors(name, weight):
        tensors = packed(name, weight)
        watched(f"{name} in 4 bits", tensors[name])
        return tensors

    monkeypatch.setattr(weight_files.StoredTensor, "read", read)
    monkeypatch.setattr(nf4, "stored_tensors", stored_tensors)
    given = source.SourceModel(SavedModel.find(tmp_path), tmp_path)
    chosen = GGUFModel("q8_0") if kind == "gguf" else NF4Folder("nf4")
    chosen.write(given, tmp_path / "x")
    assert len(most) == len(given.tensors) and max(most) <= 2


# --- older programs
# ------------------------------------------------------------------------------------------------------


def test_both_spellings_of_the_rotation(tmp_path):
    gguf_models.build("llama 3").save_pretrained(tmp_path)
    ours = AutoConfig.from_pretrained(tmp_path)
    make_compatible(tmp_path, [3, 4])
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_theta"] == 1e4 and config["rope_scaling"]["factor"] == 8.0
    assert "rope_theta" not in config["rope_scaling"]
    assert config["rope_parameters"] == ours.rope_parameters
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == ours.rope_parameters
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [3, 4]


def test_other_names_of_older_programs():
    gemma = gguf_models.build("gemma3").config.to_dict()
    found = older_names(gemma)
    assert found["rope_local_base_freq"] == 1e4 and found["sliding_window_pattern"] == 6
    assert older_names({"num_experts": 8}) == {"num_local_experts": 8}
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert older_names(plain) == {"rope_theta": 1e6, "rope_scaling": None}
    assert (
        older_names({"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]})
        == {}
    )


def test_a_tokenizer_of_transformers_5_has_a_name_that_version_4_knows(tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**config, "tokenizer_class": "TokenizersBackend"})
    )
    make_compatible(tmp_path, [])
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (
        config["tokenizer_class"] == "PreTrainedTokenizerFast"
        and config["chat_template"] == tiny.tokenizer().chat_template
    )


# --- Ollama
# --------------------------------------------------------------------------------------------------------------


def test_a_modelfile_says_the_template_and_the_stops(run, tmp_path):
    export(run, "gguf-f16", tmp_path, name="mine", ollama=True)
    text = (tmp_path / "mine-f16.Modelfile").read_text()
    assert text.startswith("FROM ./mine-f16.gguf\n") and 'PARAMETER stop "<|im_end|>"' in text
    assert ollama.template_of(tiny.tokenizer()) in text
    assert '{{ else if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n{{ ' in text
    assert (
        '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n{{ '
        "end }}" in text
    )


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ loop.index }}:{{ m['content'] }}\n{% endfor %}",
        "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}",
        "{{ raise_exception('no') }}",
        "{% for m in messages %}{% if loop.last %}!{% endif %}{{ m['role'] }}{{ m['content'] "
        "}};{% endfor %}",
    ],
)
def test_templates_that_do_more_are_left_to_ollama(template):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    assert ollama.template_of(tokenizer) is None


# --- cards and uploads
# ---------------------------------------------------------------------------------------------------


def test_a_card_says_what_was_trained_and_compared(run, tmp_path):
    (exported,) = export(run, "merged-fp32", tmp_path, name="mine")
    text = (exported.path / "README.md").read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert (
        head["license"] == "apache-2.0"
        and head["library_name"] == "transformers"
        and head["tags"][0] == "chronicals"
    )
    assert (
        "base_model" not in head and str(tmp_path) not in text and str(run) not in text
    )  # no path of this machine
    assert "| 3 | " in text and "| chat template | transformers | equal |" in text


def test_a_card_names_the_model_that_the_run_began_with(run, tmp_path):
    """Of a recipe: by its name on the hub, or by a folder's last part."""
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    recipe = {
        "model": "someone/small",
        "data": ["/home/me/secret/rows.jsonl"],
        "learning_rate": 1e-3,
    }
    (folder / "resume.yaml").write_text(yaml.safe_dump(recipe))
    given = source.SourceModel(replace(SavedModel.find(folder), base=None), folder / "model")
    text = hub_card(given, "x", "merged", Proof({}))
    assert "base_model: someone/small" in text and "| learning_rate | 0.001 |" in text
    assert "| data | rows.jsonl |" in text and "secret" not in text


@pytest.mark.slow
def test_artefacts_are_uploaded_with_their_proofs(run, tmp_path, let_return):
    import huggingface_hub

    hub = Hub()
    let_return(huggingface_hub, HfApi=hub)
    export(run, ["gguf-f16", "merged"], tmp_path, name="mine", push_to_hub="mine")
    assert hub.made == {"mine": True}
    assert {
        "mine-f16.gguf",
        "mine-f16.gguf.proof.json",
        "mine-bf16/model.safetensors",
        "README.md",
    } <= set(hub.files)


def test_an_upload_that_fails_leaves_the_artefacts(run, tmp_path, monkeypatch, let_return):
    import huggingface_hub

    hub = Hub()
    monkeypatch.setattr(
        hub, "create_repo", lambda *_, **__: (_ for _ in ()).throw(OSError("no route"))
    )
    let_return(huggingface_hub, HfApi=hub)
    with pytest.raises(UploadError, match="push_to_hub='mine': the upload failed: no route"):
        export(run, "gguf-f16", tmp_path, name="mine", push_to_hub="mine")
    assert (tmp_path / "mine-f16.gguf").exists()


# --- vLLM, by a stand-in
# -------------------------------------------------------------------------------------------------


STAND_IN = """
import json, pathlib, sys, torch, transformers
from types import SimpleNamespace
FAULT = {fault!r}
class SamplingParams(SimpleNamespace):
    pass
class LLM:
    def __init__(self, model, enforce_eager, max_model_len, enable_lora, **more):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    def generate(self, prompts, params, lora_request=None):
        assert params.prompt_logprobs == 0 and params.max_tokens == 1
        model = self.model
        if lora_request is not None:
            import peft
            model = peft.PeftModel.from_pretrained(model, lora_request.path).eval()
        outputs = []
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            with torch.no_grad():
                rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            shift = 2 if FAULT == "shifted" else 1
            of = lambda n, t: SimpleNamespace(logprob=float(rows[max(n - shift + 1, 0), t]))
            logprobs = [None] + [{{t: of(n, t)}} for n, t in enumerate(ids[1:])]
            outputs.append(SimpleNamespace(prompt_logprobs=logprobs))
        if FAULT == "raises":
            raise RuntimeError("no kernel for this card")
        return outputs
"""


def stand_in(folder, fault=None):
    """The interpreter of an environment in which ``vllm`` is the stand-in."""
    (folder / "vllm" / "lora").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text(STAND_IN.format(fault=fault))
    (folder / "vllm" / "lora" / "__init__.py").write_text("")
    request = (
        "class LoRARequest:\n    def __init__(self, name, number, path):\n        self.path "
        "= path\n"
    )
    (folder / "vllm" / "lora" / "request.py").write_text(request)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.slow
def test_vllm_is_asked_in_an_environment_of_its_own(run, tmp_path):
    python = stand_in(tmp_path / "environment")
    for exported in export(run, ["merged", "adapter"], tmp_path / "out", vllm_python=python):
        check = results(exported)["log-probabilities"]
        assert check.client == "vLLM" and check.passed and check.value <= check.bound


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["shifted", "raises"])
def test_what_vllm_computes_otherwise_is_not_kept(fault, run, tmp_path):
    python = stand_in(tmp_path / "environment", fault)
    said = (
        "log-probabilities, vLLM: FAILED"
        if fault == "shifted"
        else "ended with 1 and said: RuntimeError: no kernel for this card"
    )
    with pytest.raises(ValueError, match=said):
        export(run, "merged", tmp_path / "out", vllm_python=python)
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(ValueError, match="vllm_python='/nowhere/python': "):
        export(run, "merged", tmp_path / "out", vllm_python="/nowhere/python")


# --- serving
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_how_to_serve_what_was_written(run, base, tmp_path):
    kinds = ["merged", "gguf-f16", "gguf-adapter", "adapter", "merged-fp32", "fp8"]
    found = {
        exported.format: exported.serve for exported in export(run, kinds, tmp_path, name="a b")
    }
    assert (
        found["merged"] == f"vllm serve '{tmp_path}/a b-bf16'"
        and found["fp8"] == f"vllm serve '{tmp_path}/a b-fp8'"
    )
    assert (
        found["gguf-f16"] == f"llama-server -m '{tmp_path}/a b-f16.gguf'"
        and found["merged-fp32"] is None
    )
    assert found["gguf-adapter"].startswith("llama-server -m BASE.gguf --lora ")
    assert found["adapter"].startswith(
        f"vllm serve {base} --enable-lora --max-lora-rank 8 --lora-modules 'a b-adapter'="
    )


@pytest.mark.slow
def test_an_adapter_that_vllm_refuses_is_not_offered_to_it(base, tmp_path):
    (exported,) = export(adapted(tmp_path, base, use_dora=True), "adapter")
    assert exported.serve is None


# --- the command
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command(run, tmp_path):
    done = CliRunner().invoke(
        app,
        ["export", str(run), "--to", "merged-fp32,gguf-q8_0", "--output", str(tmp_path)],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    assert {path.name for path in tmp_path.iterdir()} == {
        "run-fp32",
        "run-fp32.proof.json",
        "run-q8_0.gguf",
        "run-q8_0.gguf.proof.json",
    }
    assert "equal" in done.output and "chat template" in done.output


def test_the_command_lists_formats(run):
    done = CliRunner().invoke(app, ["export", str(run), "--to", "list"], catch_exceptions=False)
    assert (
        done.output.split()[:3] == ["merged", "merged-fp16", "merged-fp32"]
        and "gguf-q4_0" in done.output
    )
