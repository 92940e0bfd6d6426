"""Whole runs whose layers run in tiles: pairs behind a long prompt, and all weights updated within
the backward pass. Sums differ by their order only.
"""

import random

import pytest
import torch

import preferences
import runs
import tiny
from chronicals.memory import recompute
from chronicals.patching import decoder_layer, patch_parts, tiled_layer
from chronicals.policies import facts
from mutants import mutant

TILE = 48
"""Rows of a tile: prompts and answers end within tiles."""

PAIRS = {
    "objective": "dpo",
    "use_lora": True,
    "lora_rank": 4,
    "lora_dropout": 0.0,
    "max_seq_length": 512,
    "batch_size": 1,
}
IN_BACKWARD = {"memory": ["optimizer_in_backward"], "max_grad_norm": float("inf")}
FULL = {"use_lora": False, "max_seq_length": 256, "batch_size": 1, "gradient_accumulation_steps": 1}


def long_pairs(count=12):
    """Two short answers behind a prompt of some 200 tokens, which a pack has once."""
    draw = random.Random(5)
    found = preferences.rows(count)
    for row in found:
        row["prompt"][0]["content"] = " ".join(draw.choices(preferences.WORDS, k=60))
    return found


def model():
    """A model whose layers run fused on the CPU, by the kernels' references."""
    made = tiny.llama()
    patch_parts(made, whole_layers=True)
    return made


@pytest.fixture(autouse=True)
def fused_on_the_cpu(monkeypatch, set_constants):
    set_constants(recompute, TILE=TILE, GROUP_ROWS=1)
    monkeypatch.setattr(facts, "why_not_fused", lambda config, presented: None)
    monkeypatch.setattr(facts.Facts, "fuses_halves", True)


def run(folder, entry, rows=None, memory=(), **fields):
    """Trajectory and weights of a run with one more entry of ``memory``, and tokens of its tiled layers."""
    torch.manual_seed(0)
    counted = []
    usual = tiled_layer.TiledLayer.backward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            tiled_layer.TiledLayer,
            "backward",
            lambda self, *given: counted.append(len(given[0])) or usual(self, *given),
        )
        runs.train(folder, rows, model(), memory=[*memory, entry], max_steps=4, **fields)
    return runs.trajectory(folder), runs.weights(folder), counted


def compare(folder, rows=None, **fields):
    whole, weights, none = run(folder / "whole", "recompute_layers", rows, **fields)
    tiled, ours, tokens = run(folder / "tiled", "tiled_layers", rows, **fields)
    assert not none and tokens and min(tokens) > TILE
    assert weights.keys() == ours.keys()
    runs.assert_one_trajectory(whole, tiled)
    for name, weight in weights.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_pairs_behind_a_long_prompt(tmp_path):
    compare(tmp_path, long_pairs(), **PAIRS)


@pytest.mark.slow
@pytest.mark.parametrize("beside", [{}, IN_BACKWARD], ids=["after", "within the backward pass"])
def test_all_weights(beside, tmp_path):
    compare(tmp_path, **FULL, **beside)


@pytest.mark.slow
def test_a_tile_that_is_lost_is_found(tmp_path, monkeypatch):
    broken = mutant(tiled_layer, "total.add_(gradient)", "total", "GradientSums._add")
    monkeypatch.setattr(decoder_layer, "run_in_tiles", broken.run_in_tiles)
    monkeypatch.setattr(tiled_layer.TiledLayer, "backward", broken.TiledLayer.backward)
    with pytest.raises(AssertionError):
        compare(tmp_path, **FULL)
