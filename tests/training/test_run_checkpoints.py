"""The best of a run is what it leaves, beside its last checkpoint."""

import contextlib
import json
import math
import shutil

import pytest
from safetensors.torch import load_file

import runs
import tiny
from chronicals.config import ConfigurationError
from chronicals.saving import manifest_entry
from chronicals.training import Callback, CheckpointError, Evaluation
from chronicals.training.run import checkpoint, loop
from chronicals.training.run.checkpoint import checkpoints
from chronicals.training.run.run_state import Run
from comparison import equal

OPTIONS = {
    "validation_split": 0.2,
    "eval_steps": 1,
    "save_steps": None,
    "lr_scheduler": "constant",
    "warmup_steps": 0,
}


@pytest.fixture
def losses(monkeypatch):
    """Lets the held-out loss after each step be what is said."""

    def are(*values):
        given = iter(values)
        monkeypatch.setattr(loop, "evaluate", lambda *_: Evaluation(next(given), 1.0, 0.0, 1))

    return are


def kept(folder):
    return [int(path.name.removeprefix("step-")) for path in checkpoints(folder / "run")]


def best_weights(folder, step):
    return load_file(
        folder / "run" / "checkpoints" / f"step-{step:08d}" / "model" / "model.safetensors"
    )


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_best_and_last_are_kept_and_the_best_is_left(tmp_path, losses, caplog, limit):
    losses(3.0, 2.0, 2.5, 2.6, 2.7, 2.8)
    model = tiny.llama()
    with caplog.at_level("INFO"):
        result = runs.train(
            tmp_path, model=model, early_stopping_patience=3, save_total_limit=limit, **OPTIONS
        )
    assert (result.steps, result.model_step, result.evaluation.loss) == (5, 2, 2.0)
    assert kept(tmp_path) == ([5, 2, 1] if limit == 3 else [5, 2])
    written = runs.weights(tmp_path)
    best = best_weights(tmp_path, 2)
    memory = model.state_dict()
    assert all(
        equal(written[name], best[name]) and equal(memory[name].cpu(), best[name]) for name in best
    )
    assert any(not equal(weight, best[name]) for name, weight in best_weights(tmp_path, 5).items())
    assert (
        "stopped early after step 5: the lowest held-out loss was 2.0000, after step 2"
        in caplog.text
    )
    assert (
        "model holds the weights of step 2" in caplog.text
        and "of step 2" in result.report.read_text()
    )


@pytest.mark.parametrize(
    ("loss", "gains"), [(2.0, False), (2.5, False), (math.nan, False), (1.9, True)]
)
def test_only_a_lower_loss_is_a_gain(loss, gains, tmp_path):
    """A plateau is none: the first step that reached it stays the best, and patience runs out."""
    run = Run(9, tmp_path, step=3, best_loss=2.0, best_step=2, evaluations_without_gain=1)
    found = Evaluation(loss, 1.0, 0.0, 1)
    assert run.evaluated(found) == gains and run.evaluation is found
    assert (run.best_step, run.evaluations_without_gain) == ((3, 0) if gains else (2, 2))
    assert run.best_loss == (loss if gains else 2.0)


def test_the_last_is_left_where_that_is_asked_for(tmp_path, losses):
    """And no checkpoint is written for the best."""
    losses(2.0, 3.0, 3.0)
    result = runs.train(tmp_path, keep="last", max_steps=3, **OPTIONS)
    assert (result.model_step, result.evaluation.loss, kept(tmp_path)) == (3, 3.0, [3])
    last = best_weights(tmp_path, 3)
    assert all(equal(weight, last[name]) for name, weight in runs.weights(tmp_path).items())


@pytest.mark.slow
@pytest.mark.parametrize("stopped_at", [2, 4])
def test_a_resumed_run_knows_its_best(tmp_path, losses, stopped_at):
    values = 3.0, 2.0, 2.5, 2.5, 2.5

    class Stop(Callback):
        def evaluated(self, step, evaluation):
            if step == stopped_at:
                raise KeyboardInterrupt

    losses(*values)
    with contextlib.suppress(KeyboardInterrupt):
        runs.train(tmp_path, max_steps=5, callbacks=[Stop()], **{**OPTIONS, "save_steps": 1})
    losses(*values[kept(tmp_path)[0] :])
    result = runs.train(tmp_path, max_steps=5, resume=True, **{**OPTIONS, "save_steps": 1})
    assert (result.steps, result.model_step, result.evaluation.loss) == (5, 2, 2.0)
    best = best_weights(tmp_path, 2)
    assert all(equal(weight, best[name]) for name, weight in runs.weights(tmp_path).items())


@pytest.mark.slow
def test_a_best_that_is_gone_is_told_and_looked_for_anew(tmp_path, losses, caplog):
    losses(1.0, 2.0)
    runs.train(tmp_path, max_steps=2, **OPTIONS)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000001")
    losses(1.8, 1.9)
    result = runs.train(tmp_path, max_steps=4, resume=True, **OPTIONS)
    assert result.model_step == 3 and "the best is looked for anew" in caplog.text


def test_adapters_of_the_best_are_left(tmp_path, losses):
    losses(1.0, 2.0)
    model = tiny.llama()
    result = runs.train(tmp_path, model=model, use_lora=True, lora_rank=4, max_steps=2, **OPTIONS)
    last, best = (
        load_file(path / "model" / "adapter_model.safetensors")
        for path in checkpoints(tmp_path / "run")
    )
    written = load_file(result.model_dir / "adapter_model.safetensors")
    assert all(equal(written[name], best[name]) for name in best)
    assert any(not equal(last[name], best[name]) for name in best)


def test_the_best_needs_held_out_data(tmp_path):
    with pytest.raises(ConfigurationError, match="keep='best': nothing is held out"):
        runs.train(tmp_path, keep="best")


@pytest.mark.slow
def test_a_checkpoint_says_which_is_the_best(tmp_path, losses):
    losses(3.0, 2.0, 2.5)
    runs.train(tmp_path, max_steps=3, **OPTIONS)
    state = json.loads((checkpoints(tmp_path / "run")[0] / "state.json").read_text())
    assert (state["step"], state["best_step"], state["best_evaluation"]["loss"]) == (3, 2, 2.0)


def without_the_best_step(folder):
    """The state of the newest checkpoint as it was before the best step was kept."""
    newest = checkpoints(folder / "run")[0]
    state = json.loads((newest / "state.json").read_text())
    kept = {name: state[name] for name in state.keys() - {"best_step", "best_evaluation"}}
    (newest / "state.json").write_text(json.dumps(kept))
    described = json.loads((newest / "manifest.json").read_text())
    (newest / "manifest.json").write_text(
        json.dumps(described | {"state.json": manifest_entry(newest / "state.json")})
    )


@pytest.mark.slow
def test_a_best_of_no_known_step_is_looked_for_anew(tmp_path, losses, caplog):
    losses(1.0, 2.0)
    runs.train(tmp_path, max_steps=2, **OPTIONS)
    without_the_best_step(tmp_path)
    losses(1.8, 1.9)
    result = runs.train(tmp_path, max_steps=4, resume=True, **OPTIONS)
    assert result.model_step == 3 and "does not say after which step" in caplog.text


def test_early_stopping_after_a_best_of_no_known_step(tmp_path, losses, caplog):
    losses(1.0, 2.0)
    runs.train(tmp_path, max_steps=2, keep="last", **OPTIONS)
    without_the_best_step(tmp_path)
    losses(1.8, 1.9)
    with caplog.at_level("INFO"):
        result = runs.train(
            tmp_path, max_steps=6, resume=True, keep="last", early_stopping_patience=2, **OPTIONS
        )
    assert (
        result.steps == 3
        and "stopped early after step 3: the lowest held-out loss was 1.0000\n"
        in caplog.text + "\n"
    )


@pytest.mark.slow
def test_a_best_that_cannot_be_loaded_leaves_the_last(tmp_path, losses, caplog, let_raise):
    losses(1.0, 2.0)
    let_raise(checkpoint, load_checkpoint_weights=CheckpointError("does not belong to this model"))
    result = runs.train(tmp_path, max_steps=2, **OPTIONS)
    assert result.model_step == 2 and "the model of the last step is written instead" in caplog.text
    last = best_weights(tmp_path, 2)
    assert all(equal(weight, last[name]) for name, weight in runs.weights(tmp_path).items())
