"""``memory: [offload_experts]`` beside every objective and way to start a run: the same bits."""

import json

import pytest
import torch
from typer.testing import CliRunner

import chronicals
import distillations
import families
import mixtures
import preferences
import rollouts
import runs
import tiny
from chronicals.cli.app import app
from chronicals.config import ChronicalsConfig
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.patching.patch import patch_parts
from chronicals.policies import Facts
from chronicals.policies.fit import combinations, fit_settings
from chronicals.training import ChronicalsTrainer

EXPERTS = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
ADAPTERS = {
    "use_lora": True,
    "lora_rank": 4,
    "lora_dropout": 0.0,
    "lora_target_modules": ["q_proj", "v_proj"],
    "lora_target_parameters": [*EXPERTS, "mlp.gate.weight"],
    "max_steps": 2,
}
STREAMED = {"memory": ["offload_experts"], "expert_memory": "0.06MiB"}
"""Five of twelve experts in fp32."""


def model():
    torch.manual_seed(1)
    sizes = {"vocab_size": len(tiny.tokenizer()), "num_experts": 6, "hidden_size": 64}
    given = families.routed("Qwen3Moe", max_position_embeddings=256, **sizes)
    patch_parts(given)
    return given


def learned(given):
    return {n: p.detach().clone() for n, p in given.named_parameters() if p.requires_grad}


def assert_the_same(folder, run, build=model):
    """``run(folder, model, **fields)`` gives the same bits with experts in slots as without."""
    given = build()
    run(folder / "resident", given, **ADAPTERS)
    streamed = build()
    run(folder / "streamed", streamed, **ADAPTERS, **STREAMED)
    expected, got = (runs.trajectory(folder / name) for name in ("resident", "streamed"))
    assert expected == got and len(got) == 2 and all(norm > 0 for _, _, norm in got)
    before, after = learned(given), learned(streamed)
    assert before.keys() == after.keys() and any("experts" in name for name in before)
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    report = streamed.offload.report()
    assert report.misses > 0 and report.slots < streamed.offload.engine.experts
    streamed.offload.close()


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["dpo", "orpo"])
def test_preferences(tmp_path, objective):
    def run(folder, given, **fields):
        rows = preferences.rows(8)
        runs.train(folder, rows, given, objective=objective, **fields)

    assert_the_same(tmp_path, run)


@pytest.mark.slow
def test_distillation(tmp_path):
    teacher = tmp_path / "teacher"
    distillations.sharp(tiny.llama()).save_pretrained(teacher)
    tiny.tokenizer().save_pretrained(teacher)

    def run(folder, given, **fields):
        runs.train(folder, model=given, **distillations.fields(teacher), **fields)

    assert_the_same(tmp_path, run)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["grpo", "rloo"])
def test_drawn_answers(tmp_path, objective):
    def run(folder, given, **fields):
        rollouts.train(folder, model=given, objective=objective, **fields)

    assert_the_same(tmp_path, run)


NATIVE = {
    "vocab_size": len(tiny.tokenizer()),
    "num_experts": 6,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 256,
}


def native():
    given = mixtures.mixture(**NATIVE)
    patch_parts(given)
    return given


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"quantization": "nf4"}], ids=str)
def test_the_native_model(tmp_path, fields):
    """Adapters on attention, routers and experts, in 32 and in 4 bits."""

    def run(folder, given, **named):
        size = "0.02MiB" if "expert_memory" in named and fields else None
        changes = {"expert_memory": size} if size else {}
        attention = {"lora_target_modules": ["q_proj", "o_proj", "kv_b_proj"]}
        runs.train(folder, model=given, **{**named, **attention, **fields, **changes})

    assert_the_same(tmp_path, run, native)


def trained_by_command(folder, name, *more):
    """A run of ``chronicals train`` on a folder: its trajectory and its adapter."""
    words = ["train", "--model", folder / "base", "--data", folder / "rows.jsonl"]
    words += ["--output-dir", folder / name / "run", "--cache-dir", folder / "tokens"]
    words += ["--use-lora", "--lora-rank", 4, "--lora-target-modules", "o_proj"]
    for parameter in EXPERTS:
        words += ["--lora-target-parameters", parameter]
    words += ["--max-seq-length", 128, "--max-steps", 2, "--mixed-precision", "fp32"]
    words += ["--report-samples", 0, "--no-use-torch-compile", *more]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output + str(result.exception or "")
    return runs.trajectory(folder / name), runs.weights(folder / name)


@pytest.mark.slow
def test_a_folder_by_command(tmp_path, monkeypatch):
    """``model:`` a folder; with ``fit``, too, which takes nothing without a card."""
    made = ChronicalsTrainer.__init__

    def with_products(self, given, *more, **named):
        patch_parts(given)  # as on a card
        made(self, given, *more, **named)

    monkeypatch.setattr(ChronicalsTrainer, "__init__", with_products)
    base = tmp_path / "base"
    model().save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    lines = (f"{json.dumps(row)}\n" for row in tiny.chat_rows())
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    expected, weights = trained_by_command(tmp_path, "resident")
    offload = ("--memory", "offload_experts", "--expert-memory", "0.06MiB")
    for name, more in (("streamed", ()), ("fitted", ("--fit", "settings"))):
        got, learned_weights = trained_by_command(tmp_path, name, *offload, *more)
        assert got == expected and learned_weights.keys() == weights.keys()
        for key, value in weights.items():
            assert torch.equal(learned_weights[key], value), key


def test_fit_keeps_experts_in_host_memory():
    """Whatever else it takes of a card that is too small."""
    given = families.routed("Qwen3Moe", num_experts=16, hidden_size=256, intermediate_size=512)
    experts = sum(p.nbytes for n, p in given.named_parameters() if "experts" in n)
    streamed = chronicals.offload(given, vram=experts // 4, ram="1GiB", device="cpu")
    apply_lora(streamed, LoRAConfig(rank=4, dropout=0.0, target_modules=["q_proj"]))
    config = ChronicalsConfig(
        fit="settings",
        use_lora=True,
        max_seq_length=4096,
        memory=["auto", "offload_experts"],
        expert_memory=experts / 4e9,
    )
    facts = Facts(config, streamed, total=int(0.1e9))
    settled = fit_settings(facts)
    tried = [changes[-1].config for changes in combinations(facts)]
    assert tried and all("offload_experts" in one.memory_policies for one in tried)
    assert "offload_experts" in settled.facts.config.memory_policies
    assert settled.taken.fits and settled.taken.settings and settled.taken.fitted.recomputed.runs
    streamed.offload.close()
