"""A teacher's predictions stored before the run: what they are, that training is that with the
teacher, what is refused.
"""

import json
import os
import shutil
import threading
import time
from dataclasses import replace

import huggingface_hub
import numpy as np
import pytest
import torch
from transformers import dynamic_module_utils

import runs
import tiny
from chronicals.batch import IGNORED
from chronicals.config import ConfigurationError
from chronicals.data import BatchStream
from chronicals.data.making.opening import open_store
from chronicals.models import present
from chronicals.objectives import build_objective
from chronicals.objectives.distill import STORED_IDS, STORED_LOG_P, Distill
from chronicals.training import CheckpointError
from chronicals.training.columns.frozen import with_frozen_columns
from chronicals.training.columns.stored_columns import ColumnSource, StoredColumns
from chronicals.training.run.callbacks import read_metrics
from chronicals.training.run.evaluation import evaluate_data
from chronicals.verification import verify
from distillations import SETTINGS, fields, refused, sharp, train

ALL = 300
"""Ids of the student, which the teacher has too."""


def metrics(folder):
    return [line for line in read_metrics(folder / "run" / "metrics.jsonl") if "loss" in line]


def stored(folder, teacher, rows=None, **settings):
    """The objective, the store with predictions, and a student."""
    config = runs.config(folder, **fields(teacher, **settings))
    objective = build_objective(config)
    student = sharp(tiny.llama())
    store = open_store(rows or tiny.chat_rows(), tiny.tokenizer(), config)
    return (
        objective,
        *with_frozen_columns([store], objective, student, tiny.tokenizer(), config),
        config,
    )


# --- what is stored
# ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_batch_has_the_predictions_of_its_targets(teacher, tmp_path):
    """Each document's own, wherever it is packed: of the whole store, of a part of it, in any
    order.
    """
    _, store, config = stored(tmp_path, teacher, stored_tokens=7)
    model = sharp(tiny.llama(7, hidden_size=96, num_hidden_layers=1, vocab_size=310))
    some = store.subset(np.sort(np.random.permutation(len(store))[: len(store) // 2]))
    for part in (store, some):
        for batch in BatchStream(part, config, shuffle=True):
            ids = batch.tokens[STORED_IDS].long()
            log_p = batch.tokens[STORED_LOG_P]
            bounds = batch.cu_seqlens.tolist()
            for first, last in zip(bounds, bounds[1:]):
                at = batch.targets[first:last] != IGNORED
                if not at.any():
                    continue
                with torch.no_grad():
                    logits = model(batch.input_ids[None, first:last]).logits[0, at]
                expected = logits[:, :ALL].log_softmax(-1)
                torch.testing.assert_close(
                    log_p[first:last][at], expected.topk(7).values, rtol=1e-4, atol=1e-5
                )
                torch.testing.assert_close(
                    expected.gather(1, ids[first:last][at]),
                    log_p[first:last][at],
                    rtol=1e-4,
                    atol=1e-5,
                )
            assert (
                not ids[batch.targets == IGNORED].any()
                and not log_p[batch.targets == IGNORED].any()
            )


def test_what_is_stored_of_documents_is_not_read_for_others_of_their_lengths(teacher, tmp_path):
    """Training and held-out documents may be as many and as long as each other: each have what
    is stored of the whole.
    """
    rows = [
        {"messages": [{"role": "user", "content": "what is it?"}, answer(n)]} for n in range(1, 9)
    ]
    objective, whole, config = stored(tmp_path / "whole", teacher, rows, stored_tokens=5)
    store = open_store(rows, tiny.tokenizer(), runs.config(tmp_path))
    halves = np.split(np.arange(len(store)), 2)
    parts = [store.subset(half) for half in halves]
    assert np.array_equal(parts[0].lengths, parts[1].lengths)
    parts = with_frozen_columns(parts, objective, sharp(tiny.llama()), tiny.tokenizer(), config)
    for half, part in zip(halves, parts):
        for name in (STORED_IDS, STORED_LOG_P):
            expected = whole.of_targets[name]
            np.testing.assert_allclose(
                part.of_targets[name].values, expected.values[expected.rows(half)], rtol=1e-4
            )


def answer(number):
    return {"role": "assistant", "content": f"the answer is {number}"}


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_drawn_tokens_are_the_teachers_distribution_in_the_mean(temperature, teacher, tmp_path):
    objective, _, _ = stored(
        tmp_path, teacher, stored_tokens=40, stored="drawn", temperature=temperature
    )
    logits = torch.randn(1, 30) * 2
    n = 20_000
    ids, log_p = objective.tokens_to_store(
        logits.expand(n, -1), torch.Generator().manual_seed(torch.seed() % 2**31)
    )
    p = (logits[0] / temperature).softmax(-1)
    shares = torch.full((n, 30), -torch.inf).scatter_(1, ids, log_p / temperature).softmax(-1)
    error = (p * (1 - p) / 40 / n).sqrt()
    assert ((shares.mean(0) - p).abs() < 6 * error).all()
    assert torch.allclose(
        torch.zeros(n, 30).scatter_(1, ids, (log_p / temperature).exp()).sum(-1), torch.ones(n)
    )


def test_places_beyond_the_vocabulary_are_not_used(teacher, tmp_path):
    objective, _, _ = stored(tmp_path, teacher, stored_tokens=320)
    ids, log_p = objective.tokens_to_store(torch.randn(3, ALL), torch.Generator())
    assert (
        ids.shape == log_p.shape == (3, 320)
        and (log_p[:, ALL:] == -torch.inf).all()
        and ids.max() < ALL
    )


# --- runs
# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("fused", [True, False], ids=["fused heads", "own logits"])
@pytest.mark.parametrize(
    "settings",
    [SETTINGS, {"temperature": 2.0, "temperature_squared": True}, {"divergence": "skew_kl"}],
)
def test_all_tokens_are_the_teacher(settings, fused, teacher, tmp_path):
    """Trained on all of its tokens the student is what it is beside the teacher itself."""
    changes = {"max_steps": 3, "use_fused_kernels": fused}
    train(tmp_path / "beside", teacher, settings, **changes)
    train(tmp_path / "stored", teacher, {**settings, "stored_tokens": ALL}, **changes)
    beside = metrics(tmp_path / "beside")
    found = metrics(tmp_path / "stored")
    for a, b in zip(beside, found, strict=True):
        for name in {"loss", "grad_norm", "token_agreement", "cross_entropy"}:
            assert b[name] == pytest.approx(a[name], rel=1e-4), name
        assert (
            b["teacher_kept"] == pytest.approx(1.0, rel=1e-5) and "teacher_cross_entropy" not in b
        )


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False], ids=["fused heads", "own logits"])
def test_few_tokens_are_what_is_kept_of_the_teacher_normalised_anew(fused, teacher, tmp_path):
    train(
        tmp_path,
        teacher,
        {"stored_tokens": 5, "temperature": 1.5},
        max_steps=1,
        use_fused_kernels=fused,
    )
    config = runs.config(tmp_path, max_steps=1)
    (step,) = BatchStream(open_store(tiny.chat_rows(), tiny.tokenizer(), config), config).steps(
        count=1
    )
    student = sharp(tiny.llama())
    model = sharp(tiny.llama(7, hidden_size=96, num_hidden_layers=1, vocab_size=310))
    losses = []
    kept = []
    for batch in step.batches:
        bounds = batch.cu_seqlens.tolist()
        for first, last in zip(bounds, bounds[1:]):
            at = batch.targets[first:last] != IGNORED
            if at.any():
                with torch.no_grad():
                    z, theirs = (
                        m(batch.input_ids[None, first:last]).logits[0, at][:, :ALL]
                        for m in (student, model)
                    )
                best = theirs.log_softmax(-1).topk(5)
                p = (best.values / 1.5).softmax(-1)
                q = (z / 1.5).log_softmax(-1).gather(1, best.indices)
                losses += (p * (p.log() - q)).sum(-1).tolist()
                kept += best.values.exp().sum(-1).tolist()
    (line,) = metrics(tmp_path)
    assert line["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert line["teacher_kept"] == pytest.approx(np.mean(kept), rel=1e-4)


def test_weights_of_targets_weigh_every_sum(teacher, tmp_path):
    """What is shown of the stored tokens as much as the loss: as if targets of each weight were
    alone.
    """
    objective, store, config = stored(tmp_path, teacher, stored_tokens=5, alpha=0.7)
    (batch, *_), student = list(BatchStream(store, config, epochs=1)), present(sharp(tiny.llama()))
    weights = (batch.targets % 5) * 0.1
    with torch.no_grad(), student.attending_documents():
        whole = objective(student, replace(batch, weights=weights))
        parts = []
        for k in range(5):
            targets = batch.targets.where(batch.targets % 5 == k, IGNORED)
            parts.append(objective(student, replace(batch, targets=targets, trained=None)))
    assert "teacher_kept" in whole
    for name, term in whole.items():
        expected = sum(0.1 * k * float(part[name].sum) for k, part in enumerate(parts))
        assert float(term.sum) == pytest.approx(expected, rel=1e-4), name


@pytest.mark.slow
def test_a_second_run_needs_no_teacher(teacher, tmp_path, must_not_call):
    """What is stored is found: by a run that is resumed, by another with other rates, by
    evaluation of the held-out part.
    """
    settings = {"stored_tokens": 9}
    train(tmp_path, teacher, settings, max_steps=2, validation_split=0.2, eval_steps=1)
    must_not_call(Distill, "teacher", "the teacher was loaded")
    train(tmp_path, teacher, settings, max_steps=4, validation_split=0.2, eval_steps=1, resume=True)
    assert len(metrics(tmp_path)) == 4
    again = {
        "cache_dir": tmp_path / "tokens",
        "validation_split": 0.2,
        "max_steps": 1,
        "learning_rate": 1e-4,
    }
    train(tmp_path / "again", teacher, {**settings, "temperature": 3.0}, **again)
    assert not list((tmp_path / "tokens").rglob("*.aside"))


@pytest.mark.slow
def test_what_was_stored_of_another_teacher_is_not_taken(teacher, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    cache = {"cache_dir": tmp_path / "tokens", "max_steps": 1, "use_fused_kernels": False}
    train(tmp_path / "first", other, {"stored_tokens": 9}, **cache)
    sharp(tiny.llama(8, hidden_size=96, num_hidden_layers=1, vocab_size=310)).save_pretrained(other)
    train(tmp_path / "then", other, {"stored_tokens": 9}, **cache)
    for name, changes in {
        "k": {"stored_tokens": 8},
        "drawn": {"stored_tokens": 9, "stored": "drawn"},
    }.items():
        train(tmp_path / name, other, changes, **cache)
    assert len(list((tmp_path / "tokens").rglob("*.teacher"))) == 4


@pytest.mark.slow
def test_a_student_learns_from_drawn_tokens(teacher, tmp_path):
    """Measured beside the teacher itself."""
    student = sharp(tiny.llama())
    config = runs.config(tmp_path, **fields(teacher))
    before = evaluate_data(student, tiny.tokenizer(), tiny.chat_rows(), config).loss
    settings = fields(teacher, stored_tokens=60, stored="drawn")
    runs.train(
        tmp_path,
        model=student,
        max_steps=30,
        learning_rate=1e-2,
        use_fused_kernels=False,
        **settings,
    )
    assert evaluate_data(student, tiny.tokenizer(), tiny.chat_rows(), config).loss < 0.7 * before
    assert "teacher_kept" not in metrics(tmp_path)[0]


def test_evaluation_stores_too(teacher, tmp_path):
    """Of a model that is the teacher, whose divergence from itself is that from its own
    likeliest tokens.
    """
    from chronicals.models.loading import load_model

    config = runs.config(tmp_path, **fields(teacher, stored_tokens=310))
    score = evaluate_data(
        load_model(teacher, torch.float32), tiny.tokenizer(), tiny.chat_rows(), config
    )
    assert score.loss == pytest.approx(0.0, abs=1e-6) and score.others["token_agreement"] == 1.0


# --- verification
# --------------------------------------------------------------------------------------------------------


def checked(folder, teacher, seed, **settings):
    given = fields(teacher, **{"stored_tokens": 12, "temperature": 1.5, "alpha": 0.8, **settings})
    config = runs.config(
        folder, **given, learning_rate=2e-4, batch_size=1, seed=seed, use_fused_kernels=False
    )
    return verify(sharp(tiny.llama(seed)), tiny.tokenizer(), config, tiny.chat_rows())


@pytest.mark.slow
def test_a_healthy_run_passes_verification(teacher, tmp_path, seed):
    found = checked(tmp_path, teacher, seed)
    assert found.passed, found.failures


@pytest.mark.slow
def test_one_token_less_fails_verification(teacher, tmp_path, seed, monkeypatch):
    right = Distill.tokens_to_store

    def planted(self, logits, drawing):
        ids, log_p = right(self, logits, drawing)
        return ids, torch.cat([log_p[:, :-1], torch.full_like(log_p[:, -1:], -torch.inf)], 1)

    monkeypatch.setattr(Distill, "tokens_to_store", planted)
    assert not checked(tmp_path, teacher, seed).passed


@pytest.mark.slow
def test_predictions_of_the_token_before_fail_verification(teacher, tmp_path, seed, monkeypatch):
    from chronicals.data.making.store import TargetColumn

    monkeypatch.setattr(TargetColumn, "laid", _laid_one_late(TargetColumn.laid))
    assert not checked(tmp_path, teacher, seed).passed


def _laid_one_late(laid):
    def planted(self, documents, is_target):
        found = laid(self, documents, is_target)
        found[is_target] = np.roll(found[is_target], 1, axis=0)
        return found

    return planted


# --- an 8-bit teacher
# ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_teacher_in_8_bits(teacher, tmp_path):
    """bitsandbytes' layers, whose divergence is nearly that of 16 bits, by less than that of 4
    bits.
    """
    found = {}
    for precision in ("fp32", "int8", "nf4"):
        settings = {"teacher_precision": precision}
        train(tmp_path / precision, teacher, settings, max_steps=1, use_fused_kernels=False)
        found[precision] = metrics(tmp_path / precision)[0]["forward_kl"]
    assert 0 < abs(found["int8"] - found["fp32"]) < 0.02 * found["fp32"]
    assert abs(found["int8"] - found["fp32"]) < abs(found["nf4"] - found["fp32"])


def test_an_adapter_does_not_go_over_8_bits(tmp_path):
    tiny.llama().save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    from chronicals.models.loading import load_model

    runs.train(
        tmp_path / "run",
        model=load_model(tmp_path / "base", torch.float32),
        use_lora=True,
        max_steps=1,
    )
    with pytest.raises(
        ConfigurationError,
        match="is an adapter, which does not go over a base in LLM.int8; take nf4",
    ):
        train(tmp_path, tmp_path / "run" / "run", {"teacher_precision": "int8"}, max_steps=1)


# --- what is refused
# -------------------------------------------------------------------------------------------------------


def test_what_cannot_be_stored_is_refused(teacher, tmp_path):
    for settings in ({"divergence": "reverse_kl"}, {"divergence": "jsd", "beta": 1.0}):
        assert "the reverse KL needs all of the teacher's tokens" in refused(
            teacher="x", stored_tokens=5, **settings
        )
    infinite = refused(teacher="x", stored_tokens=5, divergence="skew_reverse_kl", skew=0)
    assert infinite.startswith(
        "distill={'stored_tokens': 5}: skew=0 of divergence='skew_reverse_kl' is the reverse KL, "
        "which"
    )
    assert "with divergence='forward_kl' alone" in refused(
        teacher="x", stored_tokens=5, stored="drawn", divergence="skew_kl"
    )
    assert "belongs to stored_tokens, which is not set" in refused(teacher="x", stored="drawn")


def test_draws_are_not_verified_and_cost_no_pass_of_the_teacher(teacher, tmp_path, must_not_call):
    must_not_call(StoredColumns, "_compute_targets", "the teacher ran")
    with pytest.raises(
        ConfigurationError,
        match="^objective='distill': .* no draws.*; verify with stored='likeliest'",
    ):
        checked(tmp_path, teacher, 1, stored="drawn")


def test_a_full_disk_is_said_before_anything_is_computed(teacher, tmp_path, let_return):
    few = type("Usage", (), {"free": 10})()
    let_return(shutil, disk_usage=few)
    with pytest.raises(
        ConfigurationError, match=r"distill.stored_tokens=9: 0.0 GiB are needed for [\d,]+ targets"
    ):
        stored(tmp_path, teacher, stored_tokens=9)


def on_hub(cache, commit):
    """A teacher with Python code of its own in a cache of the hub, at ``commit``."""
    place = cache / "models--me--teacher"
    folder = place / "snapshots" / commit
    (place / "refs").mkdir(parents=True, exist_ok=True)
    (place / "refs" / "main").write_text(commit)
    sharp(tiny.llama(7)).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text())
    names = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    (folder / "config.json").write_text(
        json.dumps({**described, "model_type": "own", "auto_map": names})
    )
    (folder / "configuration_own.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass OwnConfig(LlamaConfig):\n    model_type "
        "= 'own'\n"
    )
    (folder / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\n\nfrom .configuration_own import "
        "OwnConfig\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )


@pytest.mark.slow
def test_of_a_teacher_on_the_hub_with_its_own_code(tmp_path, monkeypatch, set_constants):
    """Only where the user trusts it; another commit of it is another teacher."""
    set_constants(
        huggingface_hub.constants, HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE=True
    )
    set_constants(dynamic_module_utils, HF_MODULES_CACHE=str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    for number, commit in enumerate("aab", 1):
        on_hub(tmp_path / "hub", commit * 40)
        with pytest.raises(ConfigurationError, match="trust_remote_code"):
            stored(tmp_path, "me/teacher", stored_tokens=5)
        _, store, _ = stored(tmp_path, "me/teacher", stored_tokens=5, trust_remote_code=True)
        assert np.isfinite(store.of_targets[STORED_LOG_P].values).all()
        assert len(left_in(tmp_path)) == (2 if number == 3 else 1)


def left_in(folder):
    return [
        path for path in (folder / "tokens").rglob("*") if path.suffix in (".aside", ".teacher")
    ]


def test_a_computation_that_was_broken_off_is_done_anew(teacher, tmp_path, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(
            Distill,
            "tokens_to_store",
            lambda *_: (_ for _ in ()).throw(CheckpointError("broken off")),
        )
        with pytest.raises(CheckpointError, match="broken off"):
            stored(tmp_path, teacher, stored_tokens=9)
    assert not left_in(tmp_path)
    _, store, _ = stored(tmp_path, teacher, stored_tokens=9)
    assert store.of_targets[STORED_LOG_P].values.shape == (store.targets.sum(), 9)
    assert np.isfinite(store.of_targets[STORED_LOG_P].values).all()


@pytest.mark.parametrize("seconds", [60, 7200])
def test_what_a_killed_process_left_is_removed_when_it_is_old(seconds, teacher, tmp_path):
    """It may be another run's, which computes the same, as long as it is written to."""
    stored(tmp_path, teacher, stored_tokens=9)
    (folder,) = left_in(tmp_path)
    left = folder.with_suffix(".0123abcd.aside")
    folder.rename(left)
    for path in (left, *left.iterdir()):
        os.utime(path, (time.time() - seconds,) * 2)
    stored(tmp_path, teacher, stored_tokens=9)
    assert (
        left_in(tmp_path) == [folder]
        if seconds > 3600
        else sorted(left_in(tmp_path)) == [left, folder]
    )


@pytest.mark.parametrize(
    "ends_first", [True, False], ids=["the second ends first", "the first ends first"]
)
def test_two_runs_that_compute_the_same_at_the_same_time_keep_apart(
    ends_first, teacher, tmp_path, monkeypatch
):
    """The second begins when the first has written a Batch; all that either trains on is the
    teacher's.
    """
    _, expected, _ = stored(tmp_path / "alone", teacher, stored_tokens=9)
    whole = ColumnSource.values
    began = threading.Event()
    goes_on = threading.Event()
    others = []

    def second(self, *given):
        for number, found in enumerate(whole(self, *given)):
            if number == 1:
                began.set()
                assert ends_first or goes_on.wait(60)
            yield found

    def first(self, *given):
        monkeypatch.setattr(ColumnSource, "values", second)
        for number, found in enumerate(whole(self, *given)):
            if number == 1:
                other.start()
                other.join() if ends_first else began.wait(60)
            yield found

    def holds_all():
        _, store, _ = stored(tmp_path, teacher, stored_tokens=9)
        columns = [
            [each.of_targets[name].values for each in (store, expected)]
            for name in (STORED_IDS, STORED_LOG_P)
        ]
        return all(np.array_equal(*both) for both in columns)

    other = threading.Thread(target=lambda: others.append(holds_all()))
    monkeypatch.setattr(ColumnSource, "values", first)
    assert holds_all()
    goes_on.set()
    other.join()
    assert others == [True] and len(left_in(tmp_path)) == 1
