"""The longest document that fits a card, by the preset ``long-context``."""

import json
import re
from dataclasses import replace

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

import tiny
from chronicals.cards import rates_of
from chronicals.cli.app import app
from chronicals.config import ConfigurationError, Recipe
from chronicals.planning.longest import GRANULE, longest_document
from chronicals.planning.ways import GIGA, planned_facts
from chronicals.policies.fit import can_fit, fit_settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model's configuration: nothing else is read."""
    place = tmp_path_factory.mktemp("model")
    LlamaConfig(**tiny.PLANNED, architectures=["LlamaForCausalLM"]).save_pretrained(place)
    return place


def recipe(folder, **fields):
    fields = {"model": str(folder), "data": ["not read"], "fit": "settings", **fields}
    return Recipe.given("long-context", None, **fields)


@pytest.mark.slow
def test_it_fits_and_a_longer_one_does_not(folder):
    total = int(1.5 * GIGA)
    asked = recipe(folder, use_lora=True, quantization="nf4")
    longest = longest_document(asked, total)
    facts = planned_facts(asked, total, 1)
    fits = [
        can_fit(replace(facts, config=facts.config.fitted(max_seq_length=length)))
        for length in (longest, longest + GRANULE)
    ]
    assert longest > GRANULE and longest % GRANULE == 0 and fits == [True, False]
    assert longest_document(asked, 2 * total) > longest


def test_where_no_document_fits_it_says_what_would_do(folder):
    with pytest.raises(ConfigurationError, match="not even 1,024 tokens .* fit 1 x 0.1 GB; "):
        longest_document(recipe(folder), int(0.1 * GIGA))


def planned(folder, *more):
    arguments = ["plan", "--model", str(folder), "--preset", "long-context", "--gpu-memory", "2"]
    way = ["--use-lora", "--quantization", "nf4", "--card", "H100"]
    result = CliRunner().invoke(app, [*arguments, *way, *more])
    assert result.exit_code == 0, result.output
    return result.output


WAYS = {
    "pairs": {"use_lora": True, "objective": "dpo"},
    "full": {"memory": ["auto", "optimizer_in_backward"], "max_grad_norm": float("inf")},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_pairs_and_full_training_go_the_same_way(way, folder):
    """Their longest pack fits by the estimate that a run is checked against, and is long."""
    total = (5 if way == "pairs" else 10) * GIGA
    asked = recipe(folder, gradient_accumulation_steps=1, **WAYS[way])
    longest = longest_document(asked, total)
    taken = fit_settings(
        planned_facts(asked.replace(max_seq_length=longest), total, 1), rates=rates_of("H100")
    ).taken
    assert longest > 64 * GRANULE and taken.fits
    assert "tiled_layers" in taken.facts.config.memory_policies
    assert taken.fitted.memory.moved_inputs
    assert set(WAYS[way].get("memory", [])) <= {"auto", *taken.facts.config.memory}
    assert 0.8 * total < taken.fitted.held <= 0.9 * total


@pytest.mark.slow
def test_the_command_plans_it_and_writes_it(folder, tmp_path):
    file = tmp_path / "recipe.yaml"
    said = re.search(
        r"fits has ([\d,]+) tokens .* takes ([\d.,]+) s", planned(folder, "--output", str(file))
    )
    longest = int(said[1].replace(",", ""))
    assert f"max_seq_length: {longest}\n" in file.read_text()
    plan = json.loads(planned(folder, "--json"))[0]
    assert plan["tokens"] == 4 * longest and plan["fits"]
    assert f"{plan['computing'] + plan['exposed'] + plan['slowed']:,.1f}" == said[2]


def test_a_length_that_was_given_stays(folder):
    plan = json.loads(planned(folder, "--max-seq-length", "2048", "--json"))[0]
    assert plan["tokens"] == 4 * 2048


@pytest.mark.parametrize(
    "fields, backend",
    [
        ({}, "flash"),
        ({"use_flash_attention": False}, ""),
        ({"mixed_precision": "fp32"}, "per-document"),
    ],
    ids=str,
)
def test_a_plan_counts_on_the_attention_that_torch_has(folder, fields, backend):
    """So that it knows whether layers can keep what attention gives."""
    assert planned_facts(recipe(folder, use_lora=True, **fields), GIGA, 1).backend == backend
