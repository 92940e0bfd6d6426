"""``verify`` of objectives over pairs and judged answers: healthy runs pass, faults of the road to the loss do not."""

import sys

import pytest
import torch

import runs
import tiny
from chronicals.verification import verify
from preferences import judged_rows, rows

LORA = {"use_lora": True, "lora_rank": 4, "lora_dropout": 0.0}

HEALTHY = {
    "dpo, stored": {"objective": "dpo", "dpo": {"beta": 0.3}},
    "dpo, off": {"objective": "dpo", **LORA, "gradient_accumulation_steps": 1},
    "dpo, bf16": {"objective": "dpo", **LORA, "mixed_precision": "bf16"},
    "ipo": {"objective": "ipo", **LORA},
    "simpo": {"objective": "simpo"},
    "cpo": {"objective": "cpo", "cpo": {"label_smoothing": 0.1}},
    "orpo": {"objective": "orpo"},
    "kto": {"objective": "kto", **LORA},
    "kto, stored": {"objective": "kto"},
}


def found(folder, **changes):
    given = judged_rows(40) if changes["objective"] == "kto" else rows(40)
    config = runs.config(folder, **{"max_seq_length": 128, "learning_rate": 1e-3, **changes})
    return verify(tiny.llama(), tiny.tokenizer(), config, given)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_passes(name, tmp_path):
    verification = found(tmp_path, **HEALTHY[name])
    assert verification.passed, verification.failures
    assert len(verification.losses) == 5 and not (tmp_path / "run").exists()


def test_another_model_as_the_reference(tmp_path):
    tiny.llama(seed=7).save_pretrained(tmp_path / "other")
    tiny.tokenizer().save_pretrained(tmp_path / "other")
    verification = found(tmp_path, objective="dpo", dpo={"reference_model": str(tmp_path / "other")}, **LORA)
    assert verification.passed, verification.failures


pairs, kto, reference, log_probabilities = (
    sys.modules[f"chronicals.objectives.{name}"] for name in ("pairs", "kto", "reference", "log_probabilities")
)


def sides_swapped(monkeypatch):
    right = pairs.by_item
    monkeypatch.setattr(pairs, "by_item", lambda values, batch, side: right(values, batch, 1 - side))


def no_reference(monkeypatch):
    right = reference.WithReference.reference_sums
    wrong = lambda *given: torch.zeros_like(right(*given))  # noqa: E731
    monkeypatch.setattr(reference.WithReference, "reference_sums", wrong)


def a_document_late(monkeypatch):
    """Each document's sum is that of the one before."""
    right = log_probabilities.document_sums
    for module in (pairs, kto):
        monkeypatch.setattr(module, "document_sums", lambda values, batch: right(values, batch).roll(1))


def of_a_micro_batch(monkeypatch):
    """KTO's divergence is of each Batch by itself."""
    right = kto.KTO.__call__

    def wrong(self, model, batch):
        _, terms = self.before_step(model, batch)
        items = (batch.segments["side"] == 0).sum().clamp(min=1)
        batch.segments["kl"] = (terms["kl"].sum / items)[None]
        return right(self, model, batch)

    monkeypatch.setattr(kto.KTO, "__call__", wrong)


FAULTS = [
    (sides_swapped, "dpo, off"), (sides_swapped, "orpo"), (no_reference, "kto"), (a_document_late, "simpo"),
    (of_a_micro_batch, "kto"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "name"), FAULTS, ids=lambda x: getattr(x, "__name__", x))
def test_a_planted_fault_fails(fault, name, tmp_path, monkeypatch):
    fault(monkeypatch)
    changes = HEALTHY[name]
    if fault is no_reference or fault is of_a_micro_batch:
        tiny.llama(seed=7).save_pretrained(tmp_path / "other")
        tiny.tokenizer().save_pretrained(tmp_path / "other")
        changes = {**changes, changes["objective"]: {"reference_model": str(tmp_path / "other"), "beta": 0.5}}
    assert not found(tmp_path, **changes).passed
