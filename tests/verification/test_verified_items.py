"""``verify`` of objectives over pairs and judged answers: healthy runs pass, faults of the road
to the loss do not.
"""

import itertools
import sys

import pytest
import torch

import runs
import tiny
from chronicals.objectives import Term
from chronicals.verification import verify
from preferences import IN_TREE, OF_ANSWERS, WITH_REFERENCE, rows_of

LORA = {"use_lora": True, "lora_rank": 4, "lora_dropout": 0.0}

HEALTHY = {
    **{
        name: {"objective": name, **(LORA if name in WITH_REFERENCE else {})} for name in OF_ANSWERS
    },
    "dpo, stored": {"objective": "dpo", "dpo": {"beta": 0.3}},
    "dpo, off": {"objective": "dpo", **LORA, "gradient_accumulation_steps": 1},
    "dpo, smoothed": {"objective": "dpo", "dpo": {"label_smoothing": 0.2}, **LORA},
    "dpo, hinge": {"objective": "dpo", "dpo": {"loss": "hinge", "beta": 0.02}, **LORA},
    "dpo, robust": {"objective": "dpo", "dpo": {"loss": "robust", "label_smoothing": 0.2}, **LORA},
    "dpo, by token": {"objective": "dpo", "dpo": {"loss": "sigmoid_norm", "beta": 3.0}, **LORA},
    "dpo, bf16": {"objective": "dpo", **LORA, "mixed_precision": "bf16"},
    "cpo, smoothed": {"objective": "cpo", "cpo": {"label_smoothing": 0.1}},
    "kto, stored": {"objective": "kto"},
    "kto, little room": {"objective": "kto", **LORA, "max_seq_length": 50},
}
"""Every registered objective over answers with its defaults, and variants of some."""


def found(folder, **changes):
    given = rows_of(changes["objective"], 40)
    config = runs.config(folder, **{"max_seq_length": 128, "learning_rate": 1e-3, **changes})
    return verify(tiny.llama(), tiny.tokenizer(), config, given)


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_passes(name, tmp_path):
    verification = found(tmp_path, **HEALTHY[name])
    assert verification.passed, verification.failures
    assert len(verification.losses) == 5 and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_another_model_as_the_reference(tmp_path):
    tiny.llama(seed=7).save_pretrained(tmp_path / "other")
    tiny.tokenizer().save_pretrained(tmp_path / "other")
    verification = found(
        tmp_path, objective="dpo", dpo={"reference_model": str(tmp_path / "other")}, **LORA
    )
    assert verification.passed, verification.failures


pairs, dpo, ipo, simpo, cpo, orpo, kto, reference, log_probabilities = (
    sys.modules[f"chronicals.objectives.{name}"]
    for name in (
        "pairs",
        "dpo",
        "ipo",
        "simpo",
        "cpo",
        "orpo",
        "kto",
        "reference",
        "log_probabilities",
    )
)

OF_PAIRS = {name: cls for name, cls in IN_TREE.items() if issubclass(cls, pairs.PairObjective)}
"""The registered objectives over pairs."""


def sides_swapped(plant):
    plant(pairs, "by_item", lambda right, values, batch, side: right(values, batch, 1 - side))


def no_reference(plant):
    plant(
        reference.WithReference,
        "reference_sums",
        lambda right, *given: torch.zeros_like(right(*given)),
    )


def a_document_late(plant):
    """Each document's sum is that of the one before."""
    for module in (pairs, kto):
        plant(module, "document_sums", lambda right, values, batch: right(values, batch).roll(1))


def of_a_micro_batch(plant):
    """KTO's divergence is of each Batch by itself."""

    def wrong(right, self, model, batch):
        _, terms = self.before_step(model, batch)
        items = (batch.segments["side"] == 0).sum().clamp(min=1)
        batch.segments["kl"] = (terms["kl"].sum / items)[None]
        return right(self, model, batch)

    plant(kto.KTO, "__call__", wrong)


def a_wrong_sign(plant):
    """Every loss is that of the other answer, or of the other label."""
    for module in (dpo, cpo):
        plant(module, "dpo_losses", lambda right, h, *given: right(-h, *given))
    plant(ipo, "ipo_losses", lambda right, h, tau: right(-h, tau))
    plant(simpo, "simpo_losses", lambda right, a, b, gamma: right(b, a, gamma))
    plant(orpo, "log_odds_ratio", lambda right, a, b: right(b, a))
    plant(kto, "kto_losses", lambda right, r, z, good, *given: right(r, z, ~good, *given))


def by_token(plant):
    """The loss of pairs, or of judged answers, is divided by tokens."""

    def wrong(right, *given):
        return divided_by("targets", right(*given), 1.0)

    for cls in OF_PAIRS.values():
        plant(cls, "terms", wrong)
    plant(kto.KTO, "__call__", wrong)


def a_mean_of_means(plant):
    """The loss is a mean over the items of each micro-batch, and then over micro-batches."""

    def of_pairs(right, self, pairs):
        return divided_by("packs", right(self, pairs), pairs.there.sum().clamp(min=1))

    def of_answers(right, self, model, batch):
        items = (batch.segments["side"] == 0).sum().clamp(min=1)
        return divided_by("packs", right(self, model, batch), items)

    for cls in OF_PAIRS.values():
        plant(cls, "terms", of_pairs)
    plant(kto.KTO, "__call__", of_answers)


def divided_by(per, terms, count):
    """The terms with what is minimised over items divided by ``count``, and by another count of
    the step.
    """
    return {
        name: Term(term.sum / count, term.coefficient, per)
        if term.coefficient and term.per == "items"
        else term
        for name, term in terms.items()
    }


FAULTS = [
    *itertools.product((sides_swapped, a_mean_of_means), OF_PAIRS),
    (no_reference, "kto"),
    (a_document_late, "simpo"),
    (of_a_micro_batch, "kto"),
    (a_mean_of_means, "kto"),
    *((a_wrong_sign, name) for name in ("dpo, off", "ipo", "simpo", "cpo", "orpo", "kto")),
    *itertools.product(
        (a_wrong_sign, a_mean_of_means),
        ("dpo, smoothed", "dpo, hinge", "dpo, robust", "dpo, by token"),
    ),
    (by_token, "dpo, off"),
    (by_token, "orpo"),
    (by_token, "kto"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "name"), FAULTS, ids=lambda x: getattr(x, "__name__", x))
def test_a_planted_fault_fails(fault, name, tmp_path, plant):
    fault(plant)
    changes = HEALTHY[name]
    if fault is no_reference or fault is of_a_micro_batch:
        tiny.llama(seed=7).save_pretrained(tmp_path / "other")
        tiny.tokenizer().save_pretrained(tmp_path / "other")
        changes = {
            **changes,
            changes["objective"]: {"reference_model": str(tmp_path / "other"), "beta": 0.5},
        }
    assert not found(tmp_path, **changes).passed
