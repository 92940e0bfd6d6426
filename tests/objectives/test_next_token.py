"""Targets with weights: the loss is their weighted mean over the whole step."""

from dataclasses import replace

import pytest
import torch

import runs
import tiny
from chronicals.batch import IGNORED
from chronicals.data.packs.step_memory import StepMemory
from chronicals.distributed import Mesh
from chronicals.models import present
from chronicals.objectives import Term, divide
from chronicals.training import Callback
from chronicals.training.step.training_step import counts_of


def weigh(monkeypatch, weight_of):
    """Every Batch gets ``weight_of`` its targets as weights."""
    made = StepMemory.batches

    def batches(self, steps):
        for step in made(self, steps):
            yield [replace(batch, weights=weight_of(batch.targets).float()) for batch in step]

    monkeypatch.setattr(StepMemory, "batches", batches)


def by_token(targets):
    return (targets % 5) * 0.01


@pytest.fixture(params=[True, False], ids=["fused head", "own logits"])
def fused(request):
    return request.param


@pytest.mark.slow
def test_batch_times_accumulation(tmp_path, monkeypatch, fused):
    weigh(monkeypatch, by_token)
    found = []
    for batch, accumulation in ((1, 4), (4, 1)):
        folder = tmp_path / str(batch)
        changes = {
            "batch_size": batch,
            "gradient_accumulation_steps": accumulation,
            "use_fused_kernels": fused,
        }
        runs.train(folder, max_steps=3, max_grad_norm=float("inf"), **changes)
        found.append(torch.tensor(runs.trajectory(folder)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=0)


def test_the_loss_is_the_weighted_mean(tmp_path, monkeypatch, fused):
    """Of a step: the sums by hand from the model's own logits, over weights that add up to less
    than one.
    """
    weigh(monkeypatch, lambda targets: by_token(targets) * 1e-3)
    seen = []

    class Look(Callback):
        def step_done(self, metrics):
            seen.append(metrics.loss)

    from chronicals.data import create_dataloader

    config = runs.config(tmp_path, max_steps=1, use_fused_kernels=fused)
    (step,) = create_dataloader(tiny.chat_rows(), tiny.tokenizer(), config).steps(count=1)
    presented = present(tiny.llama(), fused_head=False)
    total = 0.0
    weight = 0.0
    with torch.no_grad(), presented.attending_documents():
        for batch in step.batches:
            likelihood = presented.logits(batch).log_softmax(-1)
            trained = batch.targets != IGNORED
            losses = -likelihood[trained].gather(-1, batch.targets[trained][:, None])[:, 0]
            total += float((losses * batch.weights[trained]).sum())
            weight += float(batch.weights[trained].sum())
    assert 0 < weight < 1
    runs.train(tmp_path, callbacks=[Look()], max_steps=1, use_fused_kernels=fused)
    assert seen == [pytest.approx(total / weight, rel=1e-5)]


@pytest.mark.slow
def test_equal_weights_change_nothing(tmp_path, monkeypatch, fused):
    changes = {"max_steps": 3, "validation_split": 0.2, "use_fused_kernels": fused}
    expected = runs.train(tmp_path / "without", **changes)
    weigh(monkeypatch, lambda targets: torch.full_like(targets, 3, dtype=torch.float32))
    found = runs.train(tmp_path / "with", **changes)
    without, weighted = (
        torch.tensor(runs.trajectory(tmp_path / name)) for name in ("without", "with")
    )
    torch.testing.assert_close(weighted, without, rtol=1e-5, atol=0)
    assert found.evaluation.loss == pytest.approx(expected.evaluation.loss, rel=1e-5)
    assert found.evaluation.token_accuracy == expected.evaluation.token_accuracy


def test_several_processes_must_be_told(tmp_path, monkeypatch):
    from chronicals.data import create_dataloader

    weigh(monkeypatch, by_token)
    (step,) = create_dataloader(tiny.chat_rows(), tiny.tokenizer(), runs.config(tmp_path)).steps(
        count=1
    )
    with pytest.raises(ValueError, match=r"Batch.weights.*2 processes as counts"):
        counts_of(step, Mesh(0, 2))
    told = replace(step, counts={**step.counts, "weight": 0.75})
    assert counts_of(told, Mesh(0, 2)) == {**step.counts, "weight": 0.75}


@pytest.mark.parametrize("as_tensor", [False, True])
def test_what_nothing_is_counted_for_is_not_divided(as_tensor):
    for count, expected in ((0, 3.0), (0.5, 6.0), (2, 1.5)):
        given = torch.tensor(float(count)) if as_tensor else count
        assert divide({"x": Term(torch.tensor(3.0), per="pairs")}, {"pairs": given}) == {
            "loss": expected
        }
