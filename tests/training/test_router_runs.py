"""Every stage on the native mixture and on one of transformers', with losses of routers: they
train, and a run that is broken off goes on to the bit."""

import shutil

import numpy as np
import pytest
import torch

import families
import mixtures
import preferences
import runs
import tiny
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.moe.router_terms import FILE
from chronicals.objectives import build_objective
from chronicals.training.run.callbacks import read_metrics
from chronicals.verification import verify
from comparison import equal

pytestmark = [pytest.mark.of_file(5), pytest.mark.slow]

ROUTER = {
    "balance": 0.1,
    "z": 0.01,
    "temporal": 0.01,
    "locality": 0.01,
    "anchor": 0.5,
    "anchor_tokens": 64,
}
HEADS = {"layer_ahead": 0.3, "token_ahead": 0.1}
FAMILIES = ["chronicals_moe", "qwen3_moe"]
OBJECTIVES = ["pretraining", "sft", "dpo", "orpo", "distill"]


def mixture(family, seed=0):
    if family == "chronicals_moe":
        return mixtures.mixture(seed, random=False, vocab_size=300)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = families.MIXTURES["qwen3_moe"][1]
        import transformers

        return transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(**{**config, "vocab_size": 300})
        )


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    tiny.llama(7).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def stage(objective, family, teacher, **router):
    """Fields of a run, and its rows."""
    heads = HEADS if family == "chronicals_moe" else {}
    fields = {
        "objective": objective,
        "router": {**ROUTER, **heads, **router},
        "max_steps": 4,
        "save_steps": 2,
    }
    if objective == "distill":
        fields["distill"] = {"teacher": str(teacher), "teacher_precision": "fp32"}
    pairs = objective in ("dpo", "orpo")
    rows = preferences.rows(24) if pairs else tiny.chat_rows(40)
    if objective == "pretraining":
        rows = [
            {"text": f"the answer to {n} is {2 * n}, and to life it is forty two"}
            for n in range(40)
        ]
    return fields, rows


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_resumed_to_the_bit(objective, family, adapters, teacher, tmp_path):
    fields, rows = stage(objective, family, teacher)
    if adapters:
        fields |= {
            "use_lora": True,
            "lora_rank": 4,
            "lora_target_modules": "q_proj,o_proj",
            "lora_target_parameters": ("mlp.experts.gate_up_proj"),
        }
    whole = tmp_path / "whole"
    broken = tmp_path / "broken"
    runs.train(whole, rows, mixture(family), **fields)
    shutil.copytree(
        whole / "run/checkpoints/step-00000002", broken / "run/checkpoints/step-00000002"
    )
    shutil.copy(whole / "run" / FILE, broken / "run" / FILE)
    runs.train(broken, rows, mixture(family), resume=True, **fields)
    once = runs.weights(whole)
    twice = runs.weights(broken)
    assert once.keys() == twice.keys() and all(equal(once[name], twice[name]) for name in once)
    assert runs.trajectory(whole)[2:] == runs.trajectory(broken)
    lines = [line for line in read_metrics(whole / "run" / "metrics.jsonl") if "loss" in line]
    assert lines[0]["router/anchor"] == 0.0 and lines[-1]["router/anchor"] > 0.0
    for line in lines:
        assert line["router/dropped"] == 0.0 and line["router/busiest"] >= 1.0
        assert 0.0 < line["router/entropy"] <= np.log(5) + 1e-6
        for name in ("balance", "z", "temporal", "locality", *(HEADS if "chron" in family else ())):
            assert line[f"router/{name}"] > 0.0


@pytest.mark.parametrize("family", FAMILIES)
def test_batch_times_accumulation(family, teacher, tmp_path):
    fields, rows = stage("sft", family, teacher)
    found = []
    for size, accumulation in ((4, 1), (2, 2), (1, 4)):
        folder = tmp_path / f"{size}"
        runs.train(
            folder,
            rows,
            mixture(family),
            **fields,
            batch_size=size,
            gradient_accumulation_steps=accumulation,
        )
        lines = [line for line in read_metrics(folder / "run" / "metrics.jsonl") if "loss" in line]
        names = sorted(
            name for name in lines[0] if name.startswith("router/") or name in ("loss", "grad_norm")
        )
        found.append([[line[name] for name in names] for line in lines])
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=2e-4, atol=1e-6)


def test_terms_are_a_part_of_the_loss(teacher, tmp_path):
    fields, rows = stage("sft", "chronicals_moe", teacher)
    runs.train(tmp_path / "with", rows, mixture("chronicals_moe"), **fields)
    runs.train(
        tmp_path / "without",
        rows,
        mixture("chronicals_moe"),
        **{**fields, "router": {"balance": 1e-12}},
    )
    first, plain = (
        read_metrics(tmp_path / name / "run" / "metrics.jsonl")[0] for name in ("with", "without")
    )
    weights = {
        name: weight for name, weight in {**ROUTER, **HEADS}.items() if name != "anchor_tokens"
    }
    added = sum(weight * first[f"router/{name}"] for name, weight in weights.items())
    assert first["loss"] - plain["loss"] == pytest.approx(added, rel=1e-4)


def test_heads_train_where_they_have_a_loss(tmp_path, caplog):
    caplog.set_level("INFO")
    before = mixture("chronicals_moe").state_dict()
    model = mixture("chronicals_moe")
    runs.train(tmp_path, model=model, router={"layer_ahead": 0.3}, max_steps=3)
    changed = {name for name, value in model.state_dict().items() if not equal(value, before[name])}
    assert "model.layer_ahead.up" in changed and "model.token_ahead.up" not in changed
    assert "lookahead heads without a loss are not trained: router.token_ahead" in caplog.text


@pytest.mark.parametrize("recompute", [[], ["recompute_layers"]])
def test_recomputed_layers_train_them_alike(recompute, teacher, tmp_path):
    fields, rows = stage("sft", "chronicals_moe", teacher)
    runs.train(tmp_path / "plain", rows, mixture("chronicals_moe"), **fields)
    runs.train(tmp_path / "again", rows, mixture("chronicals_moe"), **fields, memory=recompute)
    np.testing.assert_allclose(
        *(runs.trajectory(tmp_path / name) for name in ("plain", "again")), rtol=1e-5
    )


def test_an_anchor_that_is_not_there_is_made_anew_and_said(teacher, tmp_path, caplog):
    fields, rows = stage("sft", "qwen3_moe", teacher)
    runs.train(tmp_path, rows, mixture("qwen3_moe"), **{**fields, "max_steps": 2})
    (tmp_path / "run" / FILE).unlink()
    runs.train(tmp_path, rows, mixture("qwen3_moe"), resume=True, **fields)
    assert "the routers of the model as it was loaded are the anchor" in caplog.text
    (tmp_path / "run" / FILE).write_bytes(b"damaged")
    with pytest.raises(ConfigurationError, match=r"router\.anchor=0\.5: .*cannot be read"):
        runs.train(tmp_path, rows, mixture("qwen3_moe"), resume=True, **{**fields, "max_steps": 6})


@pytest.mark.parametrize("family", FAMILIES)
def test_verify_leaves_them_out_and_says_so(family, tmp_path):
    config = runs.config(tmp_path, router={"balance": 0.1})
    found = verify(mixture(family), tiny.tokenizer(), config, tiny.chat_rows())
    assert found.passed, found.failures
    assert any("'balance': 0.1" in note and "in no arm" in note for note in found.notes)


REFUSED = [
    ("llama", {"balance": 0.1}, r"router: LlamaForCausalLM has no layer with routed experts"),
    (
        "qwen3_moe",
        {"layer_ahead": 0.1},
        r"router\.layer_ahead=0\.1: Qwen3MoeForCausalLM has no such heads",
    ),
]


@pytest.mark.parametrize("family, router, says", REFUSED)
def test_models_that_cannot_are_named(family, router, says, tmp_path):
    model = tiny.llama() if family == "llama" else mixture(family)
    with pytest.raises(ConfigurationError, match=says):
        runs.train(tmp_path, model=model, router=router)


def test_one_balance_is_enough(tmp_path):
    model = mixture("chronicals_moe")
    model.config.output_router_logits = True
    with pytest.raises(
        ConfigurationError, match=r"router\.balance=0\.1: output_router_logits=True"
    ):
        runs.train(tmp_path, model=model, router={"balance": 0.1})
    with pytest.raises(
        ConfigurationError, match=r"router\.layer_ahead=0\.1: Qwen3MoeForCausalLM has no such heads"
    ):
        runs.train(tmp_path, model=mixture("qwen3_moe"), router={"layer_ahead": 0.1}, use_lora=True)


@pytest.mark.parametrize(
    "router, says",
    [
        ({"balanse": 1.0}, "router={'balanse': 1.0}: no such setting; did you mean 'balance'"),
        ({"z": -1.0}, "router={'z': -1.0}"),
        ({"anchor_tokens": 4}, "router: no loss has a weight"),
    ],
)
def test_settings_are_checked_before_anything_is_loaded(router, says):
    with pytest.raises(ConfigurationError) as error:
        build_objective(ChronicalsConfig(router=router))
    assert says in str(error.value)
