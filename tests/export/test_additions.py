"""What adapters of stacked experts and of embeddings add to files, which hold each expert by
itself or all together.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, core_model_loading
from typer.testing import CliRunner

import families
import tiny
from chronicals.cli.app import app
from chronicals.export import MergeError, export, merge
from chronicals.export.additions import STAND_IN_SIZE, StoredPart, parts_in_files
from chronicals.lora import LoRAConfig, apply_lora, load_adapter, merge_and_unload, save_adapter
from comparison import equal

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ROUTERS = {"mixtral": "gate.weight", "qwen3_moe": "gate.weight", "gpt_oss": "router.weight"}


def adapted(folder, base, std=0.05, **fields):
    model = AutoModelForCausalLM.from_pretrained(base)
    apply_lora(model, LoRAConfig(**{"rank": 3, "alpha": 6, "dropout": 0.0, **fields}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=std)
    save_adapter(model, folder, str(base))
    return model


@torch.no_grad()
def logits(model):
    ids = torch.randint(1, families.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    return model.eval()(ids).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["experts", "a router"])
@pytest.mark.parametrize("name", families.MIXTURES)
def test_files_are_those_of_the_merged_model(tmp_path, name, case, dtype):
    """Bit-equal to what merging in memory gives; names in files and in the model differ."""
    families.mixture(name).to(dtype).save_pretrained(tmp_path / "base", max_shard_size="40KB")
    wanted = BOTH if case == "experts" else [ROUTERS[name], "down_proj"]
    adapted(
        tmp_path / "adapter", tmp_path / "base", target_modules=["q_proj"], target_parameters=wanted
    )
    merged = merge(tmp_path / "adapter", tmp_path / "merged")
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=dtype)
    model = load_adapter(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype), tmp_path / "adapter"
    )
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    expected = merge_and_unload(model).state_dict()
    assert got.state_dict().keys() == expected.keys()
    assert all(equal(weight, expected[key]) for key, weight in got.state_dict().items())
    assert any(
        "down_proj" in key and not equal(weight, expected[key.replace(".base_layer", "")])
        for key, weight in before.items()
        if key.replace(".base_layer", "") in expected
    )
    stored = {
        key for file in (tmp_path / "merged").glob("*.safetensors") for key in load_file(file)
    }
    assert merged.changes.keys() <= stored and len(merged.changes) == len(
        json.loads((tmp_path / "merged" / "merge.json").read_text())["weights"]
    )


def test_the_command_merges_them(tmp_path):
    families.mixture("qwen3_moe").save_pretrained(tmp_path / "base")
    model = adapted(
        tmp_path / "adapter", tmp_path / "base", target_modules=[], target_parameters=BOTH
    )
    found = CliRunner().invoke(
        app, ["merge", str(tmp_path / "adapter"), "--output", str(tmp_path / "merged")]
    )
    assert found.exit_code == 0, found.output
    got = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    expected = logits(model)
    assert (got - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("whose", ["ours", "peft"])
def test_an_adapted_embedding(tmp_path, whose):
    """PEFT stores the embedding's own weight beside its adapter."""
    tiny.llama(3).save_pretrained(tmp_path / "base")
    model = adapted(
        tmp_path / "adapter", tmp_path / "base", target_modules=["q_proj", "embed_tokens"]
    )
    if whose == "peft":
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["embed_tokens"])
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.1)
        model.save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "merged")
    got = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    expected = logits(model)
    assert (got - expected).norm() <= 1e-5 * expected.norm()


def test_the_embedding_of_a_tied_head_is_refused(tmp_path):
    tiny.llama(3, tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    adapted(tmp_path / "adapter", tmp_path / "base", target_modules=["embed_tokens"])
    with pytest.raises(
        MergeError,
        match=r"model.embed_tokens has an adapter, and its weight is that of the head.*unload",
    ):
        merge(tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["embed_tokens", "lm_head"])
def test_an_adapter_on_one_end_of_a_tied_pair_is_exported_by_itself(tmp_path, end, caplog):
    """What works and what is refused is said when it is attached, before anything is trained."""
    tiny.llama(3, tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    with caplog.at_level("WARNING"):
        adapted(tmp_path / "adapter", tmp_path / "base", target_modules=[end])
    assert (
        "chronicals export takes it as it is (--to adapter), and refuses to merge it" in caplog.text
    )
    (exported,) = export(tmp_path / "adapter", "adapter", tmp_path / "artefacts")
    assert not exported.proof.failed and (exported.path / "adapter_model.safetensors").exists()
    with pytest.raises(MergeError, match="head"):
        export(tmp_path / "adapter", "merged", tmp_path / "artefacts")


def test_an_adapter_of_other_experts_is_refused(tmp_path):
    families.mixture("mixtral").save_pretrained(tmp_path / "base")
    families.mixture("mixtral", intermediate_size=24).save_pretrained(tmp_path / "narrow")
    adapted(tmp_path / "adapter", tmp_path / "base", target_modules=[], target_parameters=BOTH)
    with pytest.raises(MergeError, match=r"experts.* changes a weight \(.*, that of the base is"):
        merge(tmp_path / "adapter", tmp_path / "merged", base_model=str(tmp_path / "narrow"))


def reverted(monkeypatch, change):
    monkeypatch.setattr(
        core_model_loading,
        "revert_weight_conversion",
        lambda _, tensors: {key: change(t) for key, t in tensors.items()},
    )
    return parts_in_files(None, "experts", torch.Size((3, 8, 6)))


@pytest.mark.parametrize("turned", [False, True])
def test_parts_of_matrices(monkeypatch, turned):
    def change(stacked):
        part = stacked[2, STAND_IN_SIZE // 2 :, : STAND_IN_SIZE // 3]
        return part.t() if turned else part

    part = reverted(monkeypatch, change)["experts"]
    matrix = torch.randn(8, 6)
    expected = matrix[4:, :2].t() if turned else matrix[4:, :2]
    assert part.expert == 2 and equal(part.of(matrix), expected)


def test_whole_parameters(monkeypatch):
    assert reverted(monkeypatch, lambda stacked: stacked) == {"experts": StoredPart()}


@pytest.mark.parametrize(
    "change", [lambda t: t[0].flip(0), lambda t: t[0][::2], lambda t: t.flip(0), lambda t: t[:, 0]]
)
def test_what_is_no_block_is_refused(monkeypatch, change):
    with pytest.raises(ValueError, match=r"no block of the model's weight; .*merge_and_unload\(\)"):
        reverted(monkeypatch, change)
