"""Trackers, really run: what TensorBoard, W&B (offline) and MLflow (SQLite) stored is read back
and compared.
"""

import importlib.util
import json
import logging
import os
import signal
import struct
import threading
import time
from importlib.machinery import ModuleSpec

import pytest

import runs
import tiny
from chronicals.config import ConfigurationError
from chronicals.distributed import Mesh
from chronicals.training import Callback, ChronicalsTrainer, Interrupted
from chronicals.training.run import trackers as module
from chronicals.training.run.callbacks import read_metrics
from chronicals.training.run.trackers import TRACKERS, build_trackers

ALL = list(TRACKERS)


@pytest.fixture(scope="module", autouse=True)
def stay_here(tmp_path_factory):
    """Nothing leaves the machine; one database, as making it takes seconds: every test has an
    experiment of its own in it.
    """
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in {
            "WANDB_MODE": "offline",
            "WANDB_SILENT": "true",
            "WANDB_ERROR_REPORTING": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db",
        }.items():
            patch.setenv(variable, value)
        yield


def need(name):
    """Skip, visibly, where a tracker's extra is not installed."""
    for package in (TRACKERS[name].module, *(("sqlalchemy",) if name == "mlflow" else ())):
        pytest.importorskip(package)


@pytest.fixture(params=ALL)
def name(request):
    need(request.param)
    return request.param


def train(folder, name, **changes):
    """Six steps, evaluated after each second."""
    options = {
        "validation_split": 0.2,
        "eval_steps": 2,
        "save_steps": 2,
        "project": folder.name,
        "run_name": "a name",
    }
    return runs.train(folder, **{"trackers": [name], **options, **changes})


class At(Callback):
    """Does something when a step's metrics have arrived."""

    def __init__(self, step, do):
        self.step = step
        self.do = do

    def step_done(self, metrics):
        if metrics.step == self.step:
            self.do()


def fail():
    raise RuntimeError("planted")


def refuse(tracker, points):
    raise ConnectionError("no route to host")


# --- reading back
# ------------------------------------------------------------------------------------------------------


def known(folder):
    """What metrics.jsonl has beside the time, which trackers keep themselves, as (name, step,
    value), sorted.
    """
    found = []
    for line in read_metrics(folder / "run" / "metrics.jsonl"):
        for key, value in line.items():
            if key not in ("step", "time"):
                found.append(
                    (
                        key.replace("eval_", "eval/") if "eval_loss" in line else f"train/{key}",
                        line["step"],
                        float(value),
                    )
                )
    return sorted(found)


def in_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run" / "tensorboard"))
    events.Reload()
    return sorted(
        (tag, event.step, event.value)
        for tag in events.Tags()["scalars"]
        for event in events.Scalars(tag)
    )


def wandb_records(path):
    """A transaction log, as far as it is written: seven bytes, then LevelDB's log of protobuf
    records in blocks of 32 KiB.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    content = path.read_bytes()
    at = 7
    record = b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _checksum, size, kind = struct.unpack("<IHB", content[at : at + 7])
        if at + 7 + size > len(content):
            return
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(record)
            record = b""


def wandb_parts(folder, kind):
    """Of each part of the run, in order, its records of a kind."""
    paths = list((folder / "run" / "wandb").glob("offline-run-*/*.wandb"))
    parts = [wandb_part(path) for path in paths]
    parts.sort(key=lambda part: part["run"][0].start_time.ToNanoseconds())
    return [part.get(kind, []) for part in parts]


def wandb_part(path):
    """Its records by kind; W&B's own process writes the last of them when it is told that the
    run ended, or soon after.
    """
    deadline = time.monotonic() + 20
    while True:
        kinds = {}
        for record in wandb_records(path):
            kind = record.WhichOneof("record_type")
            kinds.setdefault(kind, []).append(getattr(record, kind))
        if "exit" in kinds or time.monotonic() > deadline:
            return kinds
        time.sleep(0.05)


def in_wandb(folder):
    found = []
    for row in (row for part in wandb_parts(folder, "history") for row in part):
        values = {
            item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
            for item in row.item
        }
        found += [
            (key, values["_step"], float(value))
            for key, value in values.items()
            if not key.startswith("_")
        ]
    return sorted(found)


def mlflow_run(folder):
    from mlflow import MlflowClient

    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name(folder.name).experiment_id])
    return client, run


def in_mlflow(folder):
    client, run = mlflow_run(folder)
    return sorted(
        (key, m.step, m.value)
        for key in run.data.metrics
        for m in client.get_metric_history(run.info.run_id, key)
    )


STORED = {"tensorboard": in_tensorboard, "wandb": in_wandb, "mlflow": in_mlflow}


def state_of(folder, name):
    """How the run ended, in the tracker's own words."""
    if name == "mlflow":
        return mlflow_run(folder)[1].info.status
    return [record.exit_code for part in wandb_parts(folder, "exit") for record in part]


def assert_stored(folder, name, expected):
    stored = STORED[name](folder)
    assert [(tag, step) for tag, step, _ in stored] == [(tag, step) for tag, step, _ in expected]
    rounding = 1e-6 if name == "tensorboard" else 1e-15  # it stores fp32
    assert [value for _, _, value in stored] == pytest.approx(
        [value for _, _, value in expected], rel=rounding
    )


# --- what is stored
# ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_has_the_metrics_the_configuration_and_the_end(tmp_path, name):
    train(tmp_path, name)
    expected = known(tmp_path)
    assert {tag for tag, _, _ in expected} > {
        "train/loss",
        "train/learning_rate",
        "eval/loss",
        "eval/perplexity",
    }
    assert {step for tag, step, _ in expected if tag == "eval/loss"} == {2, 4, 6}
    assert_stored(tmp_path, name, expected)
    state = json.loads(
        (tmp_path / "run" / "checkpoints" / "step-00000006" / "state.json").read_text()
    )
    CONFIGURED[name](tmp_path, state["config"])


def configured_in_tensorboard(folder, config):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run" / "tensorboard"))
    events.Reload()
    (text,) = events.Tensors("configuration/text_summary")
    assert json.loads(text.tensor_proto.string_val[0]) == config


def configured_in_wandb(folder, config):
    (run,) = wandb_parts(folder, "run")[0]
    assert (run.project, run.display_name) == (folder.name, "a name")
    updates = [
        *run.config.update,
        *(update for record in wandb_parts(folder, "config")[0] for update in record.update),
    ]
    found = {
        update.key or update.nested_key[0]: json.loads(update.value_json) for update in updates
    }
    assert {key: value for key, value in found.items() if key != "_wandb"} == config
    assert state_of(folder, "wandb") == [0]


def configured_in_mlflow(folder, config):
    _, run = mlflow_run(folder)
    assert run.info.run_name == "a name" and run.info.status == "FINISHED"
    assert run.data.params == {field: str(value) for field, value in config.items()}


CONFIGURED = {
    "tensorboard": configured_in_tensorboard,
    "wandb": configured_in_wandb,
    "mlflow": configured_in_mlflow,
}


# --- resumed
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_resumed_it_is_the_same_run_with_every_step_once(tmp_path, name):
    """Failed after step 5, resumed from the checkpoint of step 4."""
    with pytest.raises(RuntimeError, match="planted"):
        train(tmp_path, name, callbacks=[At(5, fail)])
    assert name == "tensorboard" or state_of(tmp_path, name) in ("FAILED", [1])
    first = known(tmp_path)
    assert_stored(tmp_path, name, first)
    train(tmp_path, name, resume=True, save_total_limit=3)

    expected = known(tmp_path)
    if name != "tensorboard":  # the others keep what they had of step 5; only speeds differ
        expected = sorted(
            {**{key[:2]: key for key in expected}, **{key[:2]: key for key in first}}.values()
        )
    assert {step for tag, step, _ in expected if tag == "train/loss"} == {1, 2, 3, 4, 5, 6}
    assert_stored(tmp_path, name, expected)
    if name == "wandb":
        (before,), (after,) = wandb_parts(tmp_path, "run")
        assert (
            before.run_id
            == after.run_id
            == json.loads((tmp_path / "run" / "trackers.json").read_text())["wandb"]
        )
        assert state_of(tmp_path, name) == [1, 0]
    elif name == "mlflow":
        _, run = mlflow_run(tmp_path)
        assert run.info.status == "FINISHED"
        assert {tag: v for tag, v in run.data.tags.items() if tag.startswith("resumed.")} == {
            "resumed.save_total_limit": "3"
        }


@pytest.mark.slow
@pytest.mark.sample(1)
def test_an_evaluation_that_was_missed_is_made_up_for(tmp_path, name):
    """Stopped between the metrics of step 6 and its evaluation."""
    with pytest.raises(RuntimeError, match="planted"):
        train(tmp_path, name, callbacks=[At(6, fail)])
    train(tmp_path, name, resume=True)
    assert [step for tag, step, _ in STORED[name](tmp_path) if tag == "eval/loss"] == [2, 4, 6]
    assert [step for tag, step, _ in STORED[name](tmp_path) if tag == "train/loss"] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


@pytest.mark.slow
def test_new_to_a_resumed_run_it_is_given_what_was_before(tmp_path, name):
    with pytest.raises(RuntimeError, match="planted"):
        train(tmp_path, name, trackers=[], callbacks=[At(5, fail)])
    train(tmp_path, name, resume=True)
    assert {step for _, step, _ in known(tmp_path)} == {1, 2, 3, 4, 5, 6}
    assert_stored(tmp_path, name, known(tmp_path))


@pytest.mark.slow
def test_resumed_it_is_given_what_could_not_be_stored(tmp_path, monkeypatch):
    need("mlflow")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="planted"):
        patch.setattr(TRACKERS["mlflow"], "store", refuse)
        train(tmp_path, "mlflow", callbacks=[At(5, fail)])
    train(tmp_path, "mlflow", resume=True)
    assert_stored(tmp_path, "mlflow", known(tmp_path))


@pytest.mark.slow
def test_begun_anew_it_is_another_run(tmp_path):
    """In the same folder, after a failure before the first checkpoint."""
    need("wandb")
    with pytest.raises(RuntimeError, match="planted"):
        train(tmp_path, "wandb", callbacks=[At(1, fail)])
    train(tmp_path, "wandb", resume=True, max_steps=1)
    (before,), (after,) = wandb_parts(tmp_path, "run")
    assert before.run_id != after.run_id


@pytest.mark.slow
def test_an_earlier_run_that_is_gone_is_named(tmp_path):
    need("mlflow")
    train(tmp_path, "mlflow", max_steps=1)
    (tmp_path / "run" / "trackers.json").write_text('{"mlflow": "gone"}')
    with pytest.raises(
        ConfigurationError,
        match=r"trackers: 'mlflow' cannot be started .*MLFLOW_TRACKING_URI.*gone",
    ):
        train(tmp_path, "mlflow", max_steps=2, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("name, mark", [("wandb", [255]), ("mlflow", "KILLED")], indirect=["name"])
def test_an_interrupted_run_is_marked(tmp_path, name, mark):
    with pytest.raises(Interrupted):
        train(tmp_path, name, callbacks=[At(3, lambda: os.kill(os.getpid(), signal.SIGTERM))])
    assert state_of(tmp_path, name) == mark


# --- when it does not work
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "found", [None, ModuleSpec("a folder of that name", None)], ids=["nothing", "folder"]
)
@pytest.mark.parametrize("name", ALL)
def test_not_installed_names_the_extra(tmp_path, let_return, name, found):
    let_return(importlib.util, find_spec=found)
    with pytest.raises(
        ConfigurationError, match=rf"'{name}' is not installed; pip install 'chronicals\[{name}\]'"
    ):
        runs.train(tmp_path, trackers=[name])
    assert not (tmp_path / "run").exists()
    assert build_trackers(runs.config(tmp_path)) == []


def test_tensorboard_is_the_default_and_none_can_be_had(tmp_path):
    need("tensorboard")
    assert [tracker.name for tracker in build_trackers(runs.config(tmp_path))] == ["tensorboard"]
    assert build_trackers(runs.config(tmp_path, trackers=[])) == []


@pytest.mark.parametrize("name", ["project", "run_name"])
def test_a_name_that_no_tracker_shows_is_said(tmp_path, caplog, name, monkeypatch):
    build_trackers(runs.config(tmp_path, trackers=[], **{name: "x"}))
    said = (
        f"{name}='x' is shown nowhere: W&B and MLflow have it, and the trackers of this run "
        "are none; set trackers=['wandb']"
    )
    assert [record.getMessage().startswith(said) for record in caplog.records] == [True]
    caplog.clear()
    monkeypatch.setitem(TRACKERS, "wandb", lambda config: None)
    build_trackers(runs.config(tmp_path, trackers=["wandb"], **{name: "x"}))
    build_trackers(runs.config(tmp_path, trackers=[]))
    assert not caplog.records


def test_only_the_first_rank_has_trackers(tmp_path, monkeypatch):
    config = runs.config(tmp_path, trackers=["tensorboard"])
    monkeypatch.setattr(Mesh, "current", classmethod(lambda cls: Mesh(rank=1, count=2)))
    monkeypatch.setattr(
        Mesh, "gather_values", lambda self, value: [value, value]
    )  # of cards, where there are some
    assert ChronicalsTrainer(tiny.llama(), tiny.tokenizer(), config).callbacks == []


@pytest.mark.slow
def test_one_that_cannot_be_started_stops_the_run_and_those_begun_are_closed(tmp_path, monkeypatch):
    need("wandb")
    need("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "gopher://nowhere")
    with pytest.raises(
        ConfigurationError,
        match=r"trackers: 'mlflow' cannot be started .*leave it out of trackers.*gopher",
    ):
        runs.train(tmp_path, trackers=["wandb", "mlflow"])
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert state_of(tmp_path, "wandb") == [1]


@pytest.mark.slow
def test_one_that_fails_is_named_once_and_training_goes_on(
    tmp_path, monkeypatch, set_constants, caplog, name
):
    monkeypatch.setattr(TRACKERS[name], "store", refuse)
    set_constants(module, MAX_WAITING=3)
    result = train(tmp_path, name)
    assert result.steps == 6 and [step for step, _, _ in runs.trajectory(tmp_path)] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == [
        f"{name}: cannot store what arrives, training goes on: no route to host",
        f"{name}: 9 points were not stored; metrics.jsonl has them",
    ]
    assert name == "tensorboard" or state_of(tmp_path, name) in ("FINISHED", [0])


@pytest.mark.slow
def test_what_failed_is_stored_when_the_network_is_back(tmp_path, monkeypatch, caplog):
    need("mlflow")
    from mlflow import MlflowClient

    log_batch = MlflowClient.log_batch
    refused = threading.Event()

    def unreliable(self, run_id, metrics=(), **rest):
        if any(metric.step == 3 for metric in metrics) and not refused.is_set():
            refused.set()
            raise ConnectionError("no route to host")
        log_batch(self, run_id, metrics=metrics, **rest)

    monkeypatch.setattr(MlflowClient, "log_batch", unreliable)
    train(tmp_path, "mlflow", callbacks=[At(3, lambda: refused.wait(20))])
    assert refused.is_set() and caplog.text.count("no route to host") == 1
    assert_stored(tmp_path, "mlflow", known(tmp_path))


@pytest.mark.slow
def test_one_that_hangs_is_left_to_itself(tmp_path, monkeypatch, set_constants, caplog):
    need("tensorboard")
    released = threading.Event()
    monkeypatch.setattr(TRACKERS["tensorboard"], "store", lambda self, points: released.wait())
    set_constants(module, SECONDS_TO_STORE_THE_REST=0.05)
    try:
        result = train(tmp_path, "tensorboard")
        assert result.report.exists() and "tensorboard: still not done" in caplog.text
    finally:
        released.set()
