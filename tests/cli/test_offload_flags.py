"""``--offload-experts`` of the commands that run a model."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import families
import tiny
from chronicals.cli.app import app
from chronicals.moe.lookahead.predictor import ExpertPredictor, HeadSizes
from chronicals.moe.offload.engine import ExpertEngine
from chronicals.moe.offload.heads import FromHeads
from chronicals.moe.offload.prediction import Repeating


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("mixture")
    tokenizer = tiny.tokenizer()
    model = families.routed("Qwen3Moe", num_experts=8, vocab_size=len(tokenizer))
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    (place / "rows.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in tiny.chat_rows(6)))
    return place


def called(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, result.output + str(result.exception or "")


OFFLOAD = ("--offload-experts", "--expert-memory", "0.06MiB")


@pytest.mark.slow
def test_generate_says_the_same(folder):
    asked = ("generate", folder, "--prompt", "a b", "--max-new-tokens", 8)
    expected, got = called(*asked), called(*asked, *OFFLOAD)
    assert expected[0] == got[0] == 0 and expected[1].splitlines()[-1] == got[1].splitlines()[-1]


@pytest.mark.slow
def test_evaluate_measures_the_same(folder):
    asked = ("evaluate", folder, "--data", folder / "rows.jsonl", "--max-seq-length", 64)
    code, output = called(*asked, *OFFLOAD)
    assert code == 0, output


@pytest.mark.slow
def test_trace_writes_lines_of_events(folder, tmp_path):
    asked = ("moe", "trace", folder, "--data", folder / "rows.jsonl", "--output", tmp_path / "t")
    code, output = called(*asked, "--max-seq-length", 64, *OFFLOAD)
    assert code == 0, output
    assert (tmp_path / "t" / "trace.json").exists() and (tmp_path / "t" / "io.jsonl").exists()


@pytest.mark.slow
def test_evaluate_says_what_stand_ins_cost(tmp_path):
    tokenizer = tiny.tokenizer()
    model = families.routed("Qwen2Moe", num_experts=8, vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps(r)}\n" for r in tiny.chat_rows(6)))
    asked = ("evaluate", tmp_path, "--data", rows, "--max-seq-length", 64, "--output")
    plain, soft = tmp_path / "plain.json", tmp_path / "soft.json"
    assert called(*asked, plain)[0] == 0
    code, output = called(*asked, soft, *OFFLOAD, "--expert-mode", "soft")
    assert code == 0, output
    assert "exact loss" in output and "soft cost" in output and "fallback mass" in output
    exact, figures = json.loads(plain.read_text()), json.loads(soft.read_text())
    assert figures["exact_loss"] == pytest.approx(exact["loss"], rel=1e-4)
    assert figures["soft_cost"] == figures["loss"] - figures["exact_loss"] != 0
    assert 0 < figures["fallback_mass"] < 1


@pytest.fixture(scope="module")
def heads(folder, tmp_path_factory):
    """A folder with heads for the model; they name other experts than the last ones."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    made = ExpertPredictor.beside(model, HeadSizes(furthest=1, tokens=0, rank=2))
    torch.nn.init.normal_(made.layer_ahead.up, std=0.3)
    place = tmp_path_factory.mktemp("heads")
    made.save(place, {})
    return place


@pytest.mark.slow
@pytest.mark.parametrize("named", ["last", "none", "folder"])
def test_a_predictor_changes_no_answer(folder, heads, named, monkeypatch):
    """Of each command that takes one; it is the engine's."""
    made = []
    opened = ExpertEngine.open

    def noting(engine, slots, device, policy, predictor=None, *more, **named):
        made.append(type(predictor))
        return opened(engine, slots, device, policy, predictor, *more, **named)

    monkeypatch.setattr(ExpertEngine, "open", noting)
    flags = (*OFFLOAD, "--expert-predictor", heads if named == "folder" else named)
    asked = ("generate", folder, "--prompt", "a b", "--max-new-tokens", 8)
    expected, got = called(*asked), called(*asked, *flags)
    assert expected[0] == got[0] == 0 and expected[1].splitlines()[-1] == got[1].splitlines()[-1]
    data = ("--data", folder / "rows.jsonl", "--max-seq-length", 64)
    code, output = called("evaluate", folder, *data, *flags)
    assert code == 0, output
    code, output = called("moe", "trace", folder, *data, "--output", heads / named, *flags)
    assert code == 0, output
    of = {"last": Repeating, "none": type(None), "folder": FromHeads}
    assert made == [of[named]] * 3


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("--expert-predictor", "last"),
            "expert_predictor=last: has no effect without --offload-exp",
        ),
        (
            (*OFFLOAD, "--expert-predictor", "oracle"),
            "expert_predictor='oracle': expected 'last', 'none', 'heads', or a folder with trained",
        ),
        (
            (*OFFLOAD, "--expert-predictor", "heads"),
            "expert_predictor='heads': Qwen3MoeForCausalLM has no heads of its own",
        ),
    ],
)
def test_predictors_that_cannot_be(folder, words, expected):
    code, output = called("generate", folder, "--prompt", "a", *words)
    assert code and expected in output


def test_a_mode_that_is_not_known(folder):
    asked = ("generate", folder, "--prompt", "a", "--expert-mode")
    code, output = called(*asked, "soft")
    assert code and "expert_mode=soft: has no effect without --offload-experts" in output
    code, output = called(*asked, "fast", *OFFLOAD)
    assert code and "expert_mode=fast: expected one of exact, numerical, soft" in output
    code, output = called(*asked, "soft", *OFFLOAD)
    assert code and "has no shared experts that could stand in" in output


def test_one_flag_needs_the_other(folder):
    code, output = called("generate", folder, "--prompt", "a", "--offload-experts")
    assert code and "give --expert-memory, such as 8GiB" in output
    code, output = called("generate", folder, "--prompt", "a", "--expert-memory", "1GiB")
    assert code and "no effect without --offload-experts" in output
