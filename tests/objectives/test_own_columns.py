"""Columns of an objective of one's own: declared in one file, computed before the run, stored,
trained on, found again; and columns that earlier versions stored.
"""

import hashlib
import json
import logging
import shutil

import numpy as np
import pytest
import torch
from pydantic import Field
from safetensors.numpy import load_file, save_file

import runs
import tiny
from chronicals.batch import IGNORED
from chronicals.data import BatchStream, TokenStore, open_store
from chronicals.distributed.rank_agreement import fingerprint_over
from chronicals.objectives import (
    OBJECTIVES,
    Column,
    Columns,
    Objective,
    Term,
    build_objective,
    register,
    settings,
)
from chronicals.objectives.distill import STORED_IDS, STORED_LOG_P, Distill
from chronicals.objectives.log_probabilities import document_sums, score_tokens
from chronicals.saving import SavedModel
from chronicals.training import CheckpointError
from chronicals.training.columns.frozen import with_frozen_columns
from chronicals.training.columns.start_columns import StartColumns, model_config_digest
from chronicals.training.run.callbacks import read_metrics
from chronicals.training.session import prepared
from distillations import fields
from preferences import rows


@pytest.fixture(autouse=True)
def guided():
    """Cross-entropy of targets, each weighed by the probability that a frozen guide gives it; the
    distance of a document's log-probability from that at the start is a metric.
    """

    @register("guided")
    class Guided(Objective):
        full_learning_rate = 1e-3

        @settings
        class Settings:
            guide: str = Field(description="Folder of the frozen model")
            power: float = Field(default=1.0, description="Exponent of the guide's probability")

        def frozen_columns(self, model, tokenizer, config):
            saved = SavedModel.find(self.settings.guide)
            columns = (Column("guide_weight", np.float32), Column("guide_best", np.int16, (2,)))
            return (
                Columns(
                    "guide",
                    "weights",
                    "target",
                    columns,
                    self.guide,
                    load=lambda: saved.model(torch.float32),
                    identity=[saved.identity(), self.settings.power],
                    setting=f"guided.guide={self.settings.guide!r}",
                ),
            )

        def guide(self, model, batch, generator):
            trained = batch.targets != IGNORED
            log_p = model.head.logits(model.hidden_states(batch)[trained]).log_softmax(-1)
            weight = log_p.gather(-1, batch.targets[trained][:, None])[:, 0].exp()
            for part in range(0, len(weight), 7):  # a few targets at a time
                best = log_p[part : part + 7].topk(2).indices
                yield weight[part : part + 7] ** self.settings.power, best

        def start_columns(self, model):
            columns = (Column("start_log_p", np.float32), Column("start_targets", np.int32))
            return (Columns("start", "log-probabilities", "document", columns, self.start),)

        def start(self, model, batch, generator):
            log_p = model.as_forward(lambda: score_tokens(model, batch, self.chunk_size).log_p)
            count = document_sums((batch.targets != IGNORED).float(), batch)
            yield document_sums(log_p, batch), count

        def __call__(self, model, batch):
            scores = score_tokens(model, batch, self.chunk_size)
            distance = document_sums(scores.log_p, batch) - batch.segments["start_log_p"]
            exists = batch.segments["start_targets"] > 0
            return {
                "guided": Term(-(scores.log_p * batch.tokens["guide_weight"]).sum()),
                "distance": Term(distance[exists].detach().abs().sum(), 0.0),
                **scores.auxiliary,
            }

    yield Guided
    del OBJECTIVES["guided"]


@pytest.fixture(scope="module")
def guide(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guide")
    tiny.llama(7).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def train(folder, guide, **changes):
    section = {"guide": str(guide), **changes.pop("guided", {})}
    usual = {"lr_scheduler": "constant", "save_steps": 2}
    return runs.train(folder, objective="guided", guided=section, **{**usual, **changes})


def steps_of(folder):
    return [line for line in read_metrics(folder / "run" / "metrics.jsonl") if "loss" in line]


def computed(caplog):
    """Names of the columns that were computed, and forget them."""
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return [line.partition(":")[0] for line in lines if ": computing " in line]


# --- an objective of one's own
# -----------------------------------------------------------------------------------------------------


def test_the_stored_values_are_those_of_the_declared_functions(guide, tmp_path):
    """Each document's and each target's own, against a model that sees documents one by one."""
    config = runs.config(tmp_path, objective="guided", guided={"guide": str(guide), "power": 2.0})
    store = open_store(tiny.chat_rows(), tiny.tokenizer(), config)
    model = tiny.llama()
    objective = build_objective(config)
    (store,) = with_frozen_columns([store], objective, model, tiny.tokenizer(), config)
    assert objective.frozen == {}
    with prepared(model, config, objective, tokenizer=tiny.tokenizer()) as session:

        def batches(store):
            return BatchStream(store, config, 0, epochs=1, shuffle=False)

        store = StartColumns(session, batches).beside(store)
    weight, best = (store.of_targets[name] for name in ("guide_weight", "guide_best"))
    assert weight.values.dtype == np.float32 and best.values.dtype == np.int16
    guiding = tiny.llama(7)
    for number in range(0, len(store), 9):
        ids, trained = store.document(number)
        predicted = np.flatnonzero(trained[1:])
        targets = torch.from_numpy(ids[1:][predicted].astype(np.int64))[:, None]
        with torch.no_grad():
            given = torch.from_numpy(ids.astype(np.int64))[None]
            of_guide, of_model = (
                m(given).logits[0, predicted].log_softmax(-1) for m in (guiding, model)
            )
        place = weight.rows(np.array([number]))
        expected = of_guide.gather(1, targets)[:, 0].exp() ** 2
        np.testing.assert_allclose(weight.values[place], expected, rtol=1e-4, atol=1e-8)
        likeliest = of_guide.gather(1, torch.from_numpy(best.values[place].astype(np.int64)))
        torch.testing.assert_close(likeliest, of_guide.topk(2).values, rtol=1e-4, atol=1e-5)
        log_p = float(of_model.gather(1, targets).sum())
        assert store.columns["start_log_p"][number] == pytest.approx(log_p, rel=1e-4)
        assert store.columns["start_targets"][number] == len(predicted)


@pytest.mark.slow
def test_it_trains_stores_and_resumes(guide, tmp_path, caplog, must_not_call, guided):
    """Resumed, the run is the uninterrupted one; nothing is computed a second time."""
    caplog.set_level(logging.INFO)
    train(tmp_path / "whole", guide, max_steps=4)
    first, *_, last = steps_of(tmp_path / "whole")
    assert first["distance"] < 1e-4 < last["distance"]
    assert computed(caplog) == ["guide", "start"]
    train(tmp_path / "halves", guide, max_steps=2)
    assert computed(caplog) == ["guide", "start"]
    must_not_call(guided, "guide", "the guide was asked")
    must_not_call(guided, "start", "the model was asked")
    train(tmp_path / "halves", guide, max_steps=4, resume=True)
    assert runs.trajectory(tmp_path / "halves") == runs.trajectory(tmp_path / "whole")
    (targets,) = (tmp_path / "halves" / "tokens").rglob("*.guide")
    assert sorted(path.name for path in targets.iterdir()) == ["guide_best.npy", "guide_weight.npy"]
    (documents,) = (tmp_path / "halves" / "tokens").rglob("*.start.safetensors")
    assert load_file(documents)["start_targets"].dtype == np.int32


@pytest.mark.slow
def test_other_settings_or_another_start_are_computed_anew(guide, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    shared = {"cache_dir": tmp_path / "tokens", "max_steps": 1}
    train(tmp_path / "first", guide, **shared)
    assert computed(caplog) == ["guide", "start"]
    train(tmp_path / "power", guide, **shared, guided={"power": 2.0})
    assert computed(caplog) == ["guide"]
    train(tmp_path / "model", guide, **shared, model=tiny.llama(seed=5))
    assert computed(caplog) == ["start"]
    train(tmp_path / "again", guide, **shared)
    assert computed(caplog) == []


@pytest.mark.slow
def test_a_run_goes_on_from_its_own_start_alone(guide, tmp_path):
    train(tmp_path, guide, max_steps=2)
    with pytest.raises(CheckpointError, match="reference.json: .*this is another one"):
        train(tmp_path, guide, max_steps=4, model=tiny.llama(seed=5), resume=True)


def test_a_column_of_documents_has_one_number_each():
    with pytest.raises(ValueError, match="start: a document has one number in a column"):
        Columns("start", "pairs", "document", (Column("pair", np.float32, (2,)),), lambda *_: [])


# --- files that earlier versions wrote
# ---------------------------------------------------------------------------------------------


def store_in(folder):
    """The only token store of a cache."""
    (path,) = (folder / "tokens").rglob("*.arrow")
    return TokenStore.open(path)


def digest(store, text):
    """The name of a file of columns: 32 digits of a hash, as since the first version."""
    found = hashlib.sha256(f"{store.key} {text}".encode())
    for numbers in (store.id_starts, store.lengths):
        found.update(np.ascontiguousarray(numbers).tobytes())
    return found.hexdigest()[:32]


@pytest.mark.slow
def test_an_earlier_reference_is_read_and_its_run_goes_on(tmp_path, caplog):
    """The file in the cache and ``reference.json``, both written here as earlier versions did."""
    caplog.set_level(logging.INFO)
    changes = {"objective": "dpo", "lr_scheduler": "constant", "save_steps": 1}
    cache = {"cache_dir": tmp_path / "tokens"}
    runs.train(tmp_path / "computed", rows(16), max_steps=1, **changes, **cache)
    store = store_in(tmp_path)
    model = tiny.llama()
    weights = fingerprint_over(model.parameters())
    facts = {
        "weights": weights.values,
        "places": weights.places,
        "divided": 1,
        "model": model_config_digest(model.config),
        "scales": [],
        "active": [],
    }
    name = digest(store, f"{json.dumps(facts, sort_keys=True)} fp32 False")
    file = store.path.with_name(f"{name}.reference.safetensors")
    assert list(store.path.parent.glob("*.reference.safetensors")) == [file]
    values = np.linspace(-90, -60, len(store), dtype=np.float32)
    save_file({"reference": values}, file)
    caplog.clear()
    runs.train(tmp_path, rows(16), max_steps=1, **changes, **cache)
    assert computed(caplog) == []
    # Beside other values than the model's own the first loss is not log 2.
    assert abs(steps_of(tmp_path)[0]["loss"] - np.log(2)) > 1e-3
    record = tmp_path / "run" / "reference.json"
    assert json.loads(record.read_text()) == {**facts, "reference": {"how": "stored"}}
    record.write_text(json.dumps({**facts, "reference": {"how": "stored"}}))
    runs.train(tmp_path, rows(16), max_steps=2, resume=True, **changes, **cache)
    assert computed(caplog) == [] and len(steps_of(tmp_path)) == 2


@pytest.mark.slow
def test_earlier_predictions_are_read(teacher, tmp_path, caplog, must_not_call):
    """A folder in the cache, written here as earlier versions did: of two tokens that the teacher
    gives a quarter each, half is kept.
    """
    caplog.set_level(logging.INFO)
    given = fields(teacher, stored_tokens=2)
    cache = {"cache_dir": tmp_path / "tokens"}
    runs.train(tmp_path / "computed", max_steps=1, **given, **cache)
    store = store_in(tmp_path)
    identity = [SavedModel.find(str(teacher)).identity(), "fp32", 2, "likeliest", 300]
    folder = store.path.with_name(f"{digest(store, json.dumps(identity))}.teacher")
    assert list(store.path.parent.glob("*.teacher")) == [folder]
    shutil.rmtree(folder)
    folder.mkdir()
    targets = int(store.targets.sum())
    ids = np.tile(np.array([3, 5], np.int32), (targets, 1))
    np.save(folder / f"{STORED_IDS}.npy", ids)
    np.save(folder / f"{STORED_LOG_P}.npy", np.full((targets, 2), np.log(0.25), np.float32))
    caplog.clear()
    must_not_call(Distill, "teacher", "the teacher was loaded")
    runs.train(tmp_path, max_steps=1, **given, **cache)
    (line,) = steps_of(tmp_path)
    assert computed(caplog) == [] and line["teacher_kept"] == pytest.approx(0.5, rel=1e-5)
