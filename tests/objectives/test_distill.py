"""Distillation: the loss by hand and by TRL, what it must not depend on, a student that comes
nearer, what is refused.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from typer.testing import CliRunner

import runs
import tiny
from chronicals.batch import IGNORED
from chronicals.cli import wording
from chronicals.cli.app import app
from chronicals.config import ConfigurationError
from chronicals.data import create_dataloader
from chronicals.data.tokens.tokenizer_training import train_tokenizer
from chronicals.models import present
from chronicals.objectives import build_objective
from chronicals.training import Callback, ChronicalsTrainer
from chronicals.training.columns.frozen import bring_frozen, frozen_attending
from chronicals.training.run.callbacks import read_metrics
from chronicals.training.run.evaluation import evaluate_data
from chronicals.verification import verify
from distillations import SETTINGS, fields, refused, sharp, train

DIVERGENCES = ["forward_kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl"]
METRICS = {"cross_entropy", "teacher_cross_entropy", "token_agreement"}


def of_a_step(folder, teacher, fused=True, **settings):
    """The objective, a step of the data, and both models presented."""
    config = runs.config(folder, **fields(teacher, **settings))
    objective = build_objective(config)
    student = sharp(tiny.llama())
    (step,) = create_dataloader(tiny.chat_rows(), tiny.tokenizer(), config).steps(count=1)
    bring_frozen(objective, student, tiny.tokenizer(), config.replace(use_fused_kernels=fused))
    return objective, step, present(student, fused_head=fused)


# --- the loss
# ----------------------------------------------------------------------------------------------------------


def logits_by_document(model, batch):
    """Logits of every document by itself, one behind the other."""
    bounds = batch.cu_seqlens.tolist()
    return torch.cat(
        [model(batch.input_ids[None, a:b]).logits[0] for a, b in zip(bounds, bounds[1:]) if b > a]
    )


@pytest.mark.parametrize("fused", [True, False], ids=["fused heads", "own logits"])
@pytest.mark.parametrize(("beta", "temperature"), [(0.0, 1.0), (0.3, 1.0), (0.5, 2.0), (1.0, 2.0)])
def test_it_is_trls_loss(beta, temperature, fused, teacher, tmp_path):
    """Of packed documents the sum that GKDTrainer's function gives of each document's own
    logits, and its gradients.
    """
    gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    objective, step, student = of_a_step(
        tmp_path, teacher, fused, divergence="jsd", beta=beta, temperature=temperature
    )
    batch = step.batches[0]
    found = []
    assert (student.head is not None) == fused
    with student.attending_documents(), frozen_attending(objective):
        objective(student, batch)["distillation"].sum.backward()
        ours = objective(student, batch)["distillation"].sum.detach()
    found = [ours, *(p.grad for p in student.model.parameters())]
    student.model.zero_grad(set_to_none=True)
    plain = sharp(tiny.llama())
    with torch.no_grad():
        theirs = logits_by_document(objective.frozen["teacher"].model, batch)[:, :300]
    loss = gkd.GKDTrainer.generalized_jsd_loss(
        logits_by_document(plain, batch)[None],
        theirs[None],
        batch.targets[None],
        beta,
        temperature,
        reduction="sum",
    )
    loss.backward()
    expected = [loss.detach(), *(p.grad for p in plain.parameters())]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [True, False], ids=["fused heads", "own logits"])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_every_divergence_is_its_definition(name, fused, teacher, tmp_path):
    """Mixed with cross-entropy, times the temperature's square; and what is shown beside it."""
    objective, step, student = of_a_step(
        tmp_path,
        teacher,
        fused,
        divergence=name,
        temperature=2.0,
        temperature_squared=True,
        alpha=0.7,
    )
    batch = step.batches[0]
    with torch.no_grad(), student.attending_documents(), frozen_attending(objective):
        found = {term: float(value.sum) for term, value in objective(student, batch).items()}
        scored = {term: float(value.sum) for term, value in objective.score(student, batch).items()}
    with torch.no_grad():
        at = batch.targets != IGNORED
        z = logits_by_document(student.model, batch)[at]
        targets = batch.targets[at]
        theirs = logits_by_document(objective.frozen["teacher"].model, batch)[at][:, :300]
        losses = objective.definition(z, targets, {"teacher": theirs})
    p, q = ((x / 2).log_softmax(-1) for x in (theirs, z))
    m = {"jsd": 0.5, "skew_kl": 0.1, "skew_reverse_kl": 0.9}.get(name, 0.0)
    mixture = (m * p.exp() + (1 - m) * q.exp()).log()
    forward, reverse = (
        F.kl_div(mixture, side, log_target=True, reduction="sum") for side in (p, q)
    )
    expected = {
        "forward_kl": forward,
        "jsd": (forward + reverse) / 2,
        "skew_kl": forward,
        "skew_reverse_kl": reverse,
        "reverse_kl": F.kl_div(p, q, log_target=True, reduction="sum"),
    }[name]
    own = F.cross_entropy(z, targets, reduction="sum")
    assert found[name] == pytest.approx(float(expected), rel=1e-5)
    assert found["cross_entropy"] == pytest.approx(float(own), rel=1e-5)
    assert found["teacher_cross_entropy"] == pytest.approx(
        float(F.cross_entropy(theirs, targets, reduction="sum")), rel=1e-5
    )
    assert found["token_agreement"] == float((z.argmax(1) == theirs.argmax(1)).sum())
    assert found["distillation"] == pytest.approx(float(0.7 * 4 * expected + 0.3 * own), rel=1e-5)
    assert float(losses.sum()) == pytest.approx(found["distillation"], rel=1e-5)
    assert scored == {
        **{term: pytest.approx(value, rel=1e-6) for term, value in found.items()},
        "token_accuracy": float((z.argmax(1) == targets).sum()),
    }


# --- what it must not depend on
# ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False], ids=["fused heads", "own logits"])
def test_batch_times_accumulation(fused, teacher, tmp_path):
    """The same losses, gradient norms and metrics, step for step."""
    found = []
    for batch, accumulation in ((1, 8), (2, 4), (8, 1)):
        folder = tmp_path / str(batch)
        sizes = {
            "batch_size": batch,
            "gradient_accumulation_steps": accumulation,
            "use_fused_kernels": fused,
        }
        train(folder, teacher, SETTINGS, max_steps=3, max_grad_norm=float("inf"), **sizes)
        lines = read_metrics(folder / "run" / "metrics.jsonl")
        found.append(
            torch.tensor(
                [
                    [line[name] for name in ("loss", "grad_norm", "jsd", *sorted(METRICS))]
                    for line in lines
                ]
            )
        )
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=2e-5, atol=1e-7)


def test_packed_equals_unpacked(teacher, tmp_path):
    """Documents in packs, and each in a row of its own, for both sides."""
    found = []
    for packed in (True, False):
        objective, step, student = of_a_step(tmp_path, teacher, **SETTINGS)
        student.packed = objective.frozen["teacher"].packed = packed
        batch = step.batches[0]
        with student.attending_documents(), frozen_attending(objective):
            loss = objective(student, batch)["distillation"].sum
            loss.backward()
        found.append([loss.detach(), *(p.grad for p in student.model.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_weights_of_targets_weigh_both_parts(teacher, tmp_path):
    from dataclasses import replace

    objective, step, student = of_a_step(tmp_path, teacher, **SETTINGS)
    batch = step.batches[0]
    weights = (batch.targets % 5) * 0.1
    with torch.no_grad(), student.attending_documents(), frozen_attending(objective):
        whole = objective(student, replace(batch, weights=weights.float()))
        parts = [
            objective(
                student,
                replace(
                    batch,
                    targets=batch.targets.where(batch.targets % 5 == k, IGNORED),
                    trained=None,
                ),
            )
            for k in range(5)
        ]
    for name, term in whole.items():
        expected = sum(0.1 * k * float(part[name].sum) for k, part in enumerate(parts))
        assert float(term.sum) == pytest.approx(expected, rel=1e-5), name


# --- runs
# --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_lora": True, "lora_target_modules": ["q_proj", "down_proj", "lm_head"]},
        {"mixed_precision": "bf16"},
    ],
    ids=["full", "adapters", "bf16"],
)
def test_a_student_comes_nearer_to_its_teacher(changes, teacher, tmp_path):
    """The held-out divergence falls, and the teacher stays as it was."""
    kept = []

    class Look(Callback):
        def evaluated(self, step, evaluation):
            kept.append(evaluation)

    before = {path.name: path.read_bytes() for path in Path(teacher).glob("*.safetensors")}
    result = train(
        tmp_path,
        teacher,
        {"divergence": "forward_kl", "teacher_precision": "bf16"},
        max_steps=60,
        eval_steps=10,
        validation_split=0.2,
        learning_rate=5e-3,
        callbacks=[Look()],
        **changes,
    )
    assert kept[-1].loss < 0.7 * kept[0].loss and result.evaluation.loss < 0.7 * kept[0].loss
    assert kept[-1].others["token_agreement"] > kept[0].others["token_agreement"]
    assert METRICS | {"forward_kl"} <= kept[0].others.keys() and kept[0].perplexity is not None
    assert before == {path.name: path.read_bytes() for path in Path(teacher).glob("*.safetensors")}


@pytest.mark.slow
def test_resumed_it_goes_on(teacher, tmp_path):
    changes = {"save_steps": 2, "lr_scheduler": "constant", "warmup_steps": 0}
    train(tmp_path / "whole", teacher, SETTINGS, max_steps=4, **changes)
    train(tmp_path / "halves", teacher, SETTINGS, max_steps=2, **changes)
    train(tmp_path / "halves", teacher, SETTINGS, max_steps=4, resume=True, **changes)
    halves, whole = (torch.tensor(runs.trajectory(tmp_path / name)) for name in ("halves", "whole"))
    torch.testing.assert_close(halves, whole, rtol=1e-6, atol=0)


def test_a_teacher_in_4_bits(teacher, tmp_path):
    objective, _, _ = of_a_step(tmp_path, teacher, teacher_precision="nf4")
    from chronicals.models import has_4bit_layers

    assert has_4bit_layers(objective.frozen["teacher"].model)
    train(tmp_path, teacher, {"teacher_precision": "nf4"}, max_steps=1)


@pytest.mark.slow
def test_the_command_line(teacher, tmp_path, monkeypatch):
    """``--teacher``, found again from another folder by ``--resume`` and ``evaluate``."""
    student = tmp_path / "student"
    tiny.llama().save_pretrained(student)
    tiny.tokenizer().save_pretrained(student)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in tiny.chat_rows())
    )
    usual = runs.config(tmp_path).to_dict()
    names = (
        "batch_size",
        "max_seq_length",
        "mixed_precision",
        "report_samples",
        "output_dir",
        "cache_dir",
    )
    given = {name: usual[name] for name in names} | {
        "model": student,
        "data": tmp_path / "rows.jsonl",
        "max_steps": 1,
    }
    flags = [
        text
        for name, value in given.items()
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "large").symlink_to(teacher)
    monkeypatch.chdir(tmp_path / "here")
    run = CliRunner()
    done = run.invoke(
        app,
        [
            "train",
            *flags,
            "--objective",
            "distill",
            "--teacher",
            "large",
            "--distill.divergence",
            "jsd",
        ],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    monkeypatch.chdir(tmp_path)
    kept = yaml.safe_load((tmp_path / "run" / "resume.yaml").read_text())["distill"]
    assert kept == {"teacher": str(tmp_path / "here" / "large"), "divergence": "jsd"}
    again = ["train", "--resume", "--output-dir", str(given["output_dir"]), "--max-steps", "2"]
    assert run.invoke(app, again, catch_exceptions=False).exit_code == 0
    scored = run.invoke(
        app,
        ["evaluate", str(given["output_dir"]), "--data", str(given["data"])],
        catch_exceptions=False,
    )
    assert (
        scored.exit_code == 0
        and "teacher_cross_entropy" in scored.stdout
        and "jsd" in scored.stdout
    )
    alone = [
        "evaluate",
        str(given["output_dir"]),
        "--data",
        str(given["data"]),
        "--objective",
        "sft",
    ]
    scored = run.invoke(app, alone, catch_exceptions=False)
    assert (
        scored.exit_code == 0 and "perplexity" in scored.stdout and "teacher" not in scored.stdout
    )


def test_a_model_is_scored_beside_its_teacher(teacher, tmp_path):
    """The teacher itself has no divergence, and agrees with itself."""
    from chronicals.models.loading import load_model

    config = runs.config(tmp_path, **fields(teacher))
    score = evaluate_data(
        load_model(teacher, torch.float32), tiny.tokenizer(), tiny.chat_rows(), config
    )
    assert score.loss == pytest.approx(0.0, abs=1e-6) and score.others["token_agreement"] == 1.0
    assert score.others["cross_entropy"] == pytest.approx(score.others["teacher_cross_entropy"])


# --- verification
# ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"mixed_precision": "fp32"}, {"mixed_precision": "bf16", "use_lora": True}],
    ids=["fp32", "bf16"],
)
def test_a_healthy_run_passes_verification(changes, teacher, tmp_path, seed):
    found = checked(tmp_path, teacher, seed, **changes)
    assert found.passed, found.failures
    assert len(found.losses) == 5


def checked(folder, teacher, seed, **changes):
    given = {
        **fields(teacher, **SETTINGS, temperature_squared=True),
        "learning_rate": 2e-4,
        "batch_size": 1,
        "seed": seed,
    }
    given["distill"]["teacher_precision"] = "bf16"
    return verify(
        sharp(tiny.llama(seed)),
        tiny.tokenizer(),
        runs.config(folder, **{**given, **changes}),
        tiny.chat_rows(),
    )


@pytest.mark.slow
def test_a_divergence_of_half_its_weight_fails_verification(teacher, tmp_path, seed, monkeypatch):
    from chronicals.objectives.distill import Distill

    right = Distill.weights.fget
    monkeypatch.setattr(
        Distill, "weights", property(lambda self: (0.5 * right(self)[0], right(self)[1]))
    )
    assert not checked(tmp_path, teacher, seed, mixed_precision="fp32").passed


def test_an_objective_without_a_definition_is_not_verified(teacher, tmp_path, seed, monkeypatch):
    from chronicals.objectives import Objective
    from chronicals.objectives.distill import Distill

    monkeypatch.setattr(Distill, "definition", Objective.definition)
    with pytest.raises(ConfigurationError, match="objective='distill': it has no definition"):
        checked(tmp_path, teacher, seed)


# --- what is refused
# -----------------------------------------------------------------------------------------------------


def test_settings_that_contradict_are_refused():
    assert (
        refused()
        == "distill: teacher is required, and was not given; set distill={'teacher': '...'}"
    )
    assert "distill={'beta': 0.3}: belongs to jsd, and divergence is forward_kl" in refused(
        teacher="x", beta=0.3
    )
    assert "{'skew': 0.3}: belongs to skew_kl and skew_reverse_kl" in refused(
        teacher="x", divergence="jsd", skew=0.3
    )
    for wrong in (
        {"beta": 1.5, "divergence": "jsd"},
        {"temperature": 0},
        {"alpha": 0},
        {"alpha": 1.2},
        {"divergence": "kl"},
    ):
        name, value = next(iter(wrong.items()))
        assert f"distill={{{name!r}: {value!r}}}: " in refused(teacher="x", **wrong)


@pytest.mark.parametrize(
    ("what", "reason"),
    [("nothing", "no tokenizer could"), ("nowhere", "there is no such folder here")],
)
def test_a_teacher_that_cannot_be_loaded_is_named(what, reason, tmp_path):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ConfigurationError) as error:
        train(tmp_path, tmp_path / what, max_steps=1)
    assert f"distill={{'teacher': '{tmp_path / what}'}}: {reason}" in str(error.value)


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path):
    def with_tokenizer(name, tokenizer):
        tiny.llama(vocab_size=400).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        with pytest.raises(ConfigurationError) as error:
            train(tmp_path, tmp_path / name, max_steps=1)
        assert f"distill={{'teacher': '{tmp_path / name}'}}: its tokenizer " in str(error.value)
        return str(error.value)

    other = train_tokenizer(["another language altogether, with other merges"] * 40, vocab_size=290)
    assert "has another vocabulary (" in with_tokenizer("other", other)
    more = tiny.tokenizer()
    more.add_tokens(["<tool>"], special_tokens=True)
    assert "'<tool>' has id ours none and its 300" in with_tokenizer("more", more)


@pytest.mark.parametrize("stored", [None, 8])
def test_a_teacher_that_does_not_know_all_tokens_is_refused(stored, tmp_path):
    tiny.llama(vocab_size=290).save_pretrained(tmp_path / "teacher")
    tiny.tokenizer().save_pretrained(tmp_path / "teacher")
    reason = "'teacher': '.*'}: its embedding has 290 rows, the tokenizer 300 tokens; distil from"
    with pytest.raises(ConfigurationError, match=reason):
        train(tmp_path, tmp_path / "teacher", {"stored_tokens": stored})
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_teacher_with_too_few_positions_is_refused(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(
        GPT2Config(
            vocab_size=300,
            n_positions=16,
            n_embd=32,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).save_pretrained(tmp_path / "short")
    tiny.tokenizer().save_pretrained(tmp_path / "short")
    with pytest.raises(ValueError, match="GPT2LMHeadModel is made for 16 positions"):
        train(tmp_path, tmp_path / "short", max_steps=1)


def test_messages_name_the_flag(tmp_path):
    wording.set_wording({}, False, set())
    with pytest.raises(ConfigurationError) as error:
        CliRunner().invoke(
            app,
            [
                "train",
                "--model",
                "m",
                "--data",
                "d",
                "--objective",
                "distill",
                "--teacher",
                "t",
                "--distill.alpha",
                "2",
            ],
            catch_exceptions=False,
        )
    assert "--distill.alpha 2: Input should be less than or equal to 1" in wording.in_users_form(
        str(error.value)
    )


def test_the_trainer_gives_the_teacher_back(teacher, tmp_path):
    trainer = ChronicalsTrainer(
        tiny.llama(), tiny.tokenizer(), runs.config(tmp_path, max_steps=1, **fields(teacher))
    )
    trainer.train(tiny.chat_rows())
    assert trainer.objective.frozen == {}
