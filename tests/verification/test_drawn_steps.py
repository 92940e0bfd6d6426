"""Runs over answers that the model draws, beside their definitions."""

import pytest

import rollouts
import tiny
from chronicals.objectives.grpo import GRPO
from chronicals.verification import verify

CASES = {
    "dapo": ("grpo", {}, {}),
    "gspo over lora": (
        "grpo",
        {"loss": "grpo", "level": "sequence", "beta": 0.1, "temperature": 0.8},
        {"use_lora": True, "lora_rank": 4},
    ),
    "cispo, twice": (
        "grpo",
        {"loss": "cispo", "iterations": 2, "importance": "token_truncate", "entropy": 0.1},
        {},
    ),
    "sapo": ("grpo", {"loss": "sapo", "truncated": "mask", "max_new_tokens": 40}, {}),
    "rloo": ("rloo", {"iterations": 2}, {}),
}


def verified(folder, objective="grpo", section=None, **changes):
    rows = [{"prompt": f"what is the answer to everything, life and {n}?"} for n in range(12)]
    config = rollouts.config(
        folder,
        objective=objective,
        section=section,
        rewards=["length(12, 12)", "regex(a)"],
        max_steps=5,
        **changes,
    )
    return verify(tiny.llama(), tiny.tokenizer(), config, rows, steps=5)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_run_is_its_definition(name, tmp_path):
    objective, section, changes = CASES[name]
    found = verified(tmp_path, objective, section, **changes)
    assert found.passed, found.failures
    assert not (tmp_path / "run" / "samples.jsonl").exists()


@pytest.mark.slow
def test_another_loss_than_the_definitions_is_found(tmp_path, monkeypatch):
    own = GRPO.losses

    def wrong(self, log_ratio, log_p, advantage, answers):
        return own(self, log_ratio, log_p, advantage.clamp(min=0), answers)

    monkeypatch.setattr(GRPO, "losses", wrong)
    assert not verified(tmp_path).passed
