"""``chronicals moe``: from sizes to a model, a trace of its routers, and heads that predict
them.
"""

import json

import numpy as np
import pytest
import torch

import tiny
from chronicals.cli import main
from chronicals.lora import LoRAConfig, apply_lora, save_adapter
from chronicals.models import load_model

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_experts": 5,
    "moe_intermediate_size": 24,
    "lookahead_rank": 8,
    "q_lora_rank": "null",
}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the command line in this process, in a folder with a tokenizer and data."""
    tiny.tokenizer().save_pretrained(tmp_path / "words")
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in tiny.chat_rows(150))
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def ran(*arguments):
        with pytest.raises(SystemExit) as done:
            main(["moe", *map(str, arguments)])
        out, error = capsys.readouterr()
        return done.value.code or 0, out, error

    return ran


def new(run, *more):
    given = [word for name, value in SIZES.items() for word in ("--set", f"{name}={value}")]
    return run("new", "model", "--tokenizer", "words", "--dtype", "fp32", *given, *more)


@pytest.mark.slow
def test_from_sizes_to_predictions(run, tmp_path):
    code, out, _ = new(run)
    assert code == 0 and "parameters" in out
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (
        config["num_experts"] == 5
        and config["vocab_size"] == len(tiny.tokenizer())
        and config["q_lora_rank"] is None
    )

    code, out, error = run(
        "trace",
        "model",
        "--data",
        "data.jsonl",
        "--output",
        "trace",
        "--max-seq-length",
        128,
        "--features",
    )
    assert code == 0 and "2 layers of 5 experts, k=2" in out, error
    said = json.loads((tmp_path / "trace" / "trace.json").read_text())
    assert (
        said["tokens"] == sum(file["tokens"] for file in said["files"]) > 1000 and said["features"]
    )

    given = [
        "--max-seq-length",
        128,
        "--batch-size",
        2,
        "--rank",
        8,
        "--tokens",
        4000,
        "--held-out-tokens",
        500,
    ]
    code, out, error = run(
        "predict-train", "model", "--data", "data.jsonl", "--output", "heads", *given
    )
    assert code == 0 and "layers ahead" in error
    found = json.loads(out)
    assert found["recalls"]["tokens"] >= 500 and found["trained_on_tokens"] > 1000
    assert (
        json.loads((tmp_path / "heads" / "predictor.json").read_text())["recalls"]
        == found["recalls"]
    )


def test_parameters_are_counted_without_the_model(run, tmp_path):
    code, counted, _ = new(run, "--count")
    assert code == 0 and "parameters" in counted and not (tmp_path / "model").exists()
    assert new(run)[1] == counted and (tmp_path / "model").exists()


@pytest.mark.slow
def test_part_of_the_data_is_traced(run, tmp_path):
    new(run)
    given = ["--max-seq-length", 128, "--batch-size", 1, "--tokens", 300]
    assert run("trace", "model", "--data", "data.jsonl", "--output", "trace", *given)[0] == 0
    assert 300 <= json.loads((tmp_path / "trace" / "trace.json").read_text())["tokens"] <= 300 + 128


WRONG = [
    (["--set", "num_expert=3"], "did you mean 'num_experts'"),
    (["--set", "num_experts"], "give NAME=VALUE"),
    (["--set", "num_experts_per_tok=9"], "num_experts_per_tok=9"),
    (["--dtype", "int8"], "choose"),
]


@pytest.mark.parametrize("more, says", WRONG, ids=[says for _, says in WRONG])
def test_wrong_sizes_are_named(more, says, run):
    code, _, error = new(run, *more)
    assert code == 1 and says in " ".join(error.split())


@pytest.mark.slow
def test_what_is_no_mixture_is_named(run, tmp_path):
    tiny.llama().save_pretrained(tmp_path / "dense")
    tiny.tokenizer().save_pretrained(tmp_path / "dense")
    code, _, error = run("trace", "dense", "--data", "data.jsonl", "--output", "trace")
    assert code == 1 and "has no layer with routed experts" in " ".join(error.split())
    assert new(run)[0] == 0 and new(run)[0] == 1


HEADS = ["--rank", 8, "--tokens", 4000, "--held-out-tokens", 500]


@pytest.mark.slow
def test_heads_from_a_trace(run, tmp_path):
    new(run)
    given = ["--output", "trace", "--max-seq-length", 128, "--batch-size", 2, "--features"]
    assert run("trace", "model", "--data", "data.jsonl", *given)[0] == 0
    code, out, error = run(
        "predict-train", "model", "--trace", "trace", "--output", "heads", "--passes", 2, *HEADS
    )
    assert code == 0 and "layers ahead" in error, error
    found = json.loads(out)
    said = json.loads((tmp_path / "trace" / "trace.json").read_text())
    assert (
        found["model_sha256"] == said["model_sha256"]
        and 4000 <= found["trained_on_tokens"] / 2 <= 4000 + 256
    )
    code, out, error = run(
        "predict-train",
        "model",
        "--trace",
        "trace",
        "--held-out",
        "trace",
        "--output",
        "other",
        *HEADS,
    )
    assert code == 0 and json.loads(out)["recalls"]["tokens"] >= 500, error
    tokens = json.loads(out)["trained_on_tokens"]
    assert 4000 <= tokens <= 4000 + 256
    assert new_of_other_sizes(run)[0] == 0
    code, _, error = run("predict-train", "larger", "--trace", "trace", "--output", "heads", *HEADS)
    assert (
        code == 1
        and "is a trace of model (chronicals_moe), whose configuration is not that of"
        in " ".join(error.split())
    )


def new_of_other_sizes(run):
    given = [
        word
        for name, value in {**SIZES, "num_experts": 6}.items()
        for word in ("--set", f"{name}={value}")
    ]
    return run("new", "larger", "--tokenizer", "words", "--dtype", "fp32", *given)


def adapted(tmp_path):
    """An adapter over ``model``, in a folder that does not name it."""
    model = load_model(tmp_path / "model", torch.float32)
    apply_lora(model, LoRAConfig(2, 4, 0.0, ["o_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    save_adapter(model, tmp_path / "adapter", str(tmp_path / "elsewhere"))


FORMS = {
    "adapter": ["adapter", "--base-model", "model"],
    "4 bits": ["model", "--load-in-4bit"],
    "adapter over 4 bits": ["adapter", "--base-model", "model", "--load-in-4bit"],
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_adapters_and_bases_in_4_bits(form, run, tmp_path):
    new(run)
    adapted(tmp_path)
    given = ["--data", "data.jsonl", "--max-seq-length", 128, "--batch-size", 2, "--tokens", 2500]
    code, _, error = run("trace", *FORMS[form], *given, "--output", "trace", "--features")
    assert code == 0, error
    assert run("trace", "model", *given, "--output", "plain", "--features")[0] == 0
    found, plain = (np.load(tmp_path / name / "trace-00000.npz") for name in ("trace", "plain"))
    assert np.array_equal(found["token_ids"], plain["token_ids"])
    assert not np.allclose(found["logits"], plain["logits"], atol=0.01)
    heads = [
        "--trace",
        "trace",
        "--output",
        "heads",
        "--rank",
        8,
        "--tokens",
        1000,
        "--held-out-tokens",
        300,
    ]
    code, _, error = run("predict-train", "model", *heads)
    assert code == 1 and "is a trace of" in error and "with weights" in " ".join(error.split())
    code, out, error = run("predict-train", *FORMS[form], *heads)
    assert code == 0, error
    again = [
        "--max-seq-length",
        128,
        "--output",
        "beside",
        "--rank",
        8,
        "--tokens",
        1000,
        "--held-out-tokens",
        300,
    ]
    code, beside, error = run("predict-train", *FORMS[form], "--data", "data.jsonl", *again)
    assert code == 0 and json.loads(beside)["model_sha256"] == json.loads(out)["model_sha256"], (
        error
    )


CONTRADICTIONS = [
    ([], "give one of the two"),
    (["--data", "data.jsonl", "--trace", "trace"], "give one of the two"),
    (["--data", "data.jsonl", "--passes", 2], "passes 2: the model runs over data once"),
    (["--trace", "trace", "--batch-size", 2], "batch-size 2: is for data"),
    (["--trace", "nowhere"], "no trace is there"),
    (["--data", "data.jsonl", "--base-model", "words"], "is no adapter's folder"),
]


@pytest.mark.parametrize("more, says", CONTRADICTIONS, ids=[says for _, says in CONTRADICTIONS])
def test_contradictions_are_named(more, says, run):
    new(run)
    code, _, error = run("predict-train", "model", "--output", "heads", *more)
    assert code == 1 and says in " ".join(error.split())
