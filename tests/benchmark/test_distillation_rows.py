"""Distillation in the arms: ours and transformers' models train as the fp32 formula does, and a
planted fault is refused.
"""

from types import SimpleNamespace

import made
import pytest
import torch
from peers import distilled
from peers.names import chosen_peers
from test_benchmark import run
from test_pair_reference import TIGHT, measured

from chronicals.benchmark import shapes
from chronicals.benchmark.arms import ours
from chronicals.benchmark.arms import reference as distillation_reference
from chronicals.benchmark.arms.weights import prepare_work
from chronicals.benchmark.parity import refusal
from chronicals.benchmark.shapes import SHAPES, build_model
from chronicals.benchmark.work import DistillationWork, Work
from chronicals.config import ConfigurationError
from chronicals.models import load_tokenizer

MOVING = {"learning_rate": 1e-3}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Of another width than the student, with its tokenizer, and with a head of its own."""
    import transformers

    folder = tmp_path_factory.mktemp("teacher")
    sizes = {
        **SHAPES["tiny"].sizes,
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3Config(**sizes), dtype=torch.float32
    )
    for weight in model.parameters():  # at first the student is not near it
        weight.data *= 3
    model.save_pretrained(folder)
    build_model("tiny", folder / "student", "cpu")
    load_tokenizer(str(folder / "student")).save_pretrained(folder)
    return str(folder)


def planned(folder, teacher, mode="full", data="fixed", **given):
    settings = {"teacher": teacher, "teacher_precision": "fp32", **given}
    work = made.work(
        folder, mode, data, objective="distill", sections={"distill": settings}, **MOVING
    )
    assert isinstance(work, DistillationWork)
    prepare_work(work)
    return work


@pytest.fixture(
    scope="module", params=[("full", "fixed"), ("full", "ragged"), ("lora", "fixed")], ids="-".join
)
def row(request, tmp_path_factory, teacher):
    """A work, its reference, and the folder of results."""
    folder = tmp_path_factory.mktemp("row")
    work = planned(folder, teacher, *request.param)
    return work, measured(distillation_reference.train_distillation_reference, work, folder), folder


@pytest.mark.slow
@pytest.mark.parametrize("arm", [ours.ours, distilled.transformers], ids=["ours", "transformers"])
def test_an_arm_trains_as_the_formula_does(arm, row):
    work, reference, folder = row
    found = measured(arm, work, folder)
    assert refusal(found, reference, TIGHT) is None
    assert found.tokens == reference.tokens and found.moved_share > 0.9 and found.losses[0] > 0.1


def test_the_divergence_is_that_of_jensen_and_shannon():
    """Against torch's own KL of both from their mean, over the kept rows, and its gradient."""
    torch.manual_seed(0)
    student, head, teacher, other = (
        torch.randn(*size, dtype=torch.float64) for size in ((9, 4), (11, 4), (9, 6), (11, 6))
    )
    targets = torch.tensor([3, -100, 5, 1, -100, 2, 2, 8, 10])
    student.requires_grad_()
    kept = targets != -100
    log_p, log_q = ((x[kept] @ w.T).log_softmax(-1) for x, w in ((teacher, other), (student, head)))
    mean = (0.5 * log_p.exp() + 0.5 * log_q.exp()).log()
    kl = [
        torch.nn.functional.kl_div(mean, one, reduction="batchmean", log_target=True)
        for one in (log_p, log_q)
    ]
    (expected,) = torch.autograd.grad(0.5 * sum(kl), student)
    found = distillation_reference.plain_divergence(student, head, teacher, other, targets)
    torch.testing.assert_close(found.double(), (0.5 * sum(kl)).detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(found, student)[0], expected, rtol=1e-4, atol=1e-7
    )


@pytest.mark.slow
def test_another_teacher_is_refused(row, tmp_path, monkeypatch):
    work, reference, _ = row
    own = distillation_reference._hidden_states
    wrong = {96: 0.9, 64: 1.0}
    monkeypatch.setattr(
        distillation_reference,
        "_hidden_states",
        lambda model, given: own(model, given) * wrong[model.config.hidden_size],
    )
    assert "loss" in refusal(measured(distilled.transformers, work, tmp_path), reference, TIGHT)


def test_the_teacher_is_no_weight_of_the_student():
    student = torch.nn.Linear(2, 2)
    loss = distillation_reference.plain_divergence
    model = distillation_reference.StudentOfTeacher(student, torch.nn.Linear(3, 3), loss)
    assert sum(p.numel() for p in model.parameters()) == 6
    assert not any(p.requires_grad for p in model._teacher[0].parameters())


def test_settings_that_not_every_arm_has_are_refused(tmp_path, teacher):
    for setting, value in {
        "divergence": "reverse_kl",
        "temperature": 2.0,
        "alpha": 0.5,
        "beta": 0.3,
    }.items():
        with pytest.raises(
            ConfigurationError, match=rf"distill\.{setting}={value!r}: not every arm has it"
        ):
            planned(tmp_path, teacher, **{setting: value})
    with pytest.raises(
        ConfigurationError, match=r"distill\.teacher is missing: give a built-in shape"
    ):
        made.work(tmp_path, objective="distill")
    with pytest.raises(
        ConfigurationError,
        match="against='trl': has no trainer for documents with a teacher; .* liger",
    ):
        chosen_peers(["trl"], "fixed", lora=False, objective="distill")


def test_a_built_in_teacher_lies_beside_the_student(tmp_path, let_return, record_calls):
    let_return(shapes, build_model=None)
    built = record_calls(shapes, "build_model")
    let_return(Work, stream=None)
    let_return(DistillationWork, write_tokenizer=None)
    work = made.work(tmp_path, objective="distill", sections={"distill": {"teacher": "qwen3-8b"}})
    prepare_work(work)
    assert {name: place for name, place, _ in built} == {
        name: tmp_path.absolute() / "weights" / name for name in ("tiny", "qwen3-8b")
    }
    assert work.described == {"objective": "distill", "teacher": "qwen3-8b"}


@pytest.mark.long
def test_the_command_measures_ours_and_transformers(tmp_path, teacher):
    _, result, _ = run(
        tmp_path,
        "--objective",
        "distill",
        "--distill.teacher",
        teacher,
        "--distill.teacher-precision",
        "fp32",
        "--steps",
        2,
        "--learning-rate",
        1e-3,
        "--against",
        "transformers",
        "--loss-tolerance",
        1e-3,
        "--norm-tolerance",
        1e-3,
    )
    assert result["row"]["objective"] == "distill" and result["floor"] is None
    assert {arm["status"] for arm in result["arms"].values()} == {"measured"} and len(
        result["arms"]
    ) == 2
    assert (
        "teacher are not counted" in " ".join(result["notes"])
        and SimpleNamespace(**result["row"]).teacher
    )
