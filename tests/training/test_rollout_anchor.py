"""The anchor of routers where the model draws the answers: it replays prompts with answers."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

import mixtures
import rollouts
import runs
import tiny
from chronicals.data.tokens.template import stop_token_ids
from chronicals.generation import Ending, Engine, Request
from chronicals.moe.router_terms import FILE
from chronicals.objectives import build_objective
from chronicals.training.rollouts.draws import DrawSettings
from chronicals.training.run.callbacks import read_metrics
from comparison import equal

TOKENS = 150
ROUTER = {"anchor": 0.5, "anchor_tokens": TOKENS}
SECTION = {"prompts": 2, "temperature": 0.8}


def mixture():
    return mixtures.mixture(random=False, vocab_size=300, num_hidden_layers=2)


def drawn_by(model, folder):
    """Prompts with an answer each, as ``Engine`` draws them from a model."""
    config = rollouts.config(folder, section=SECTION)
    settings = DrawSettings.of(build_objective(config).settings)
    tokenizer = tiny.tokenizer()
    ending = Ending(tokenizer, stop_token_ids(tokenizer, False))
    prompts = [tokenizer(row["prompt"]).input_ids for row in rollouts.prompts()]
    sampling = settings.sampling(config.seed)
    requests = [
        Request(prompt, settings.max_new_tokens, sampling, 1, number, ending)
        for number, prompt in enumerate(prompts)
    ]
    answers = Engine(model.eval()).generate(requests)
    return prompts, [one.tokens for (one,) in answers]


@pytest.mark.slow
def test_it_replays_prompts_with_answers_of_the_model_as_it_was(tmp_path):
    prompts, answers = drawn_by(mixture(), tmp_path)
    rollouts.train(tmp_path, model=mixture(), router=ROUTER, section=SECTION)
    found = load_file(tmp_path / "run" / FILE)
    bounds = found["cu_seqlens"].tolist()
    documents = [found["input_ids"][a:b].tolist() for a, b in zip(bounds, bounds[1:])]
    assert sum(map(len, documents)) == TOKENS and len(documents) > SECTION["prompts"]
    assert all(map(len, answers))
    *whole, cut = [[*prompt, *answer] for prompt, answer in zip(prompts, answers)][: len(documents)]
    assert documents[:-1] == whole and documents[-1] == cut[: len(documents[-1])]
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert lines[0]["router/anchor"] == 0.0 and lines[-1]["router/anchor"] > 0.0


@pytest.mark.slow
def test_a_resumed_run_reads_it_and_goes_on_to_the_bit(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    fields = {"router": ROUTER, "section": SECTION, "max_steps": 4, "save_steps": 2}
    rollouts.train(whole, model=mixture(), **fields)
    name = "run/checkpoints/step-00000002"
    shutil.copytree(whole / name, broken / name)
    shutil.copy(whole / "run" / FILE, broken / "run" / FILE)
    rollouts.train(broken, model=mixture(), resume=True, **fields)
    once, twice = runs.weights(whole), runs.weights(broken)
    assert all(equal(once[key], twice[key]) for key in once)
    assert torch.equal(*(load_file(run / "run" / FILE)["input_ids"] for run in (whole, broken)))
