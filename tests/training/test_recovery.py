"""A run that runs out of memory goes on as one that never did.

A cap on the tokens of a micro-batch stands for the memory of a card.
"""

import re
from pathlib import Path

import pytest
import torch

import runs
import tiny
import two_processes
from chronicals.config import ChronicalsConfig
from chronicals.memory import recomputes
from chronicals.optimizers import adamw
from chronicals.policies import facts
from chronicals.training import Callback, ChronicalsTrainer, Interrupted, TrainingError
from chronicals.training.run import length, recovery
from chronicals.training.step import training_step

pytestmark = pytest.mark.slow

WIDTH = 128
FULL = "Tried to allocate 3.00 GiB"
RANKS = str(Path(__file__).with_name("recovering_ranks.py"))
USUAL = {"batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 4, "fit": "auto"}
TWICE = "batch_size 4 x gradient_accumulation_steps 2 becomes batch_size 2 x gradient_accumulation_steps 4"


@pytest.fixture(autouse=True)
def all_is_logged(caplog):
    caplog.set_level("INFO", "chronicals")


class Cap:
    """Memory for micro-batches of so many packs.

    Args:
        packs: most packs that a micro-batch may have.
        place: where in its step a larger one asks for more: ``forward`` or ``backward``, in the
            first layer, or ``update``.
        spared: number of larger ones that find enough.

    Attributes:
        refused: number of larger ones that did not.
    """

    def __init__(self, packs, place, spared=0):
        self.packs = packs
        self.place = place
        self.spared = spared
        self.refused = 0
        self.tokens = 0

    def on(self, model):
        model.model.layers[0].register_forward_hook(self.passed)
        return model

    def passed(self, module, given, output):
        if not torch.is_grad_enabled():
            return
        hidden = output[0] if isinstance(output, tuple) else output
        self.tokens = hidden.shape[:-1].numel()
        if self.place == "forward":
            self.ask()
        elif self.place == "backward":
            hidden.register_hook(lambda gradient: self.ask())

    def ask(self):
        if self.tokens <= self.packs * WIDTH:
            return
        if self.spared:
            self.spared -= 1
            return
        self.refused += 1
        raise torch.OutOfMemoryError(FULL)


@pytest.fixture(scope="module", params=[True, False], ids=["packed", "alone"])
def reference(request, tmp_path_factory):
    """The trajectory of a run that has enough memory, and its fields."""
    folder = tmp_path_factory.mktemp("reference")
    fields = {**USUAL, "use_sequence_packing": request.param}
    runs.train(folder, **{**fields, "fit": "off"})
    return runs.trajectory(folder), fields


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_step_that_runs_out_of_memory_is_taken_in_smaller_batches(
    reference, tmp_path, caplog, place
):
    """In its second micro-batch, when there are gradients of the first, after a whole step."""
    expected, fields = reference
    cap = Cap(2, place, spared=3)
    runs.train(tmp_path, model=cap.on(tiny.llama()), **fields)
    runs.assert_one_trajectory(runs.trajectory(tmp_path), expected)
    assert cap.refused == 1
    assert f"in step 2: out of memory ({FULL}): {TWICE} (1 of at most 3 times)" in caplog.text
    assert "dropout" not in caplog.text


def test_an_update_that_has_not_begun_is_repeated_in_smaller_batches(
    reference, tmp_path, caplog, monkeypatch
):
    """Where freeing memory is not enough."""
    expected, fields = reference
    cap = Cap(2, "update", spared=1)
    monkeypatch.setattr(adamw.FusedAdamW, "allocate", lambda self: cap.ask())
    fused_adamw = adamw.fused_adamw_

    def launch(*given):
        cap.ask()
        fused_adamw(*given)

    cap.spared = 3  # a step allocates once and launches for matrices and for vectors
    monkeypatch.setattr(adamw, "fused_adamw_", launch)
    runs.train(tmp_path, model=cap.on(tiny.llama()), **fields)
    runs.assert_one_trajectory(runs.trajectory(tmp_path), expected)
    assert cap.refused == 2 and f"in step 2: out of memory ({FULL}): {TWICE}" in caplog.text


def test_an_update_that_has_begun_is_finished(reference, tmp_path, caplog, monkeypatch):
    """Bit for bit: what was updated is not updated again."""
    expected, fields = reference
    fused_adamw = adamw.fused_adamw_
    launches = []

    def launch(*given):
        launches.append(len(launches))
        if len(launches) == 4:  # of vectors, in the second step
            raise torch.OutOfMemoryError(FULL)
        fused_adamw(*given)

    monkeypatch.setattr(adamw, "fused_adamw_", launch)
    runs.train(tmp_path, **fields)
    assert runs.trajectory(tmp_path) == expected
    assert "in step 2: out of memory in the update" in caplog.text
    assert len(launches) == 9 and "becomes" not in caplog.text


def test_an_update_that_cannot_be_finished_ends_the_run(tmp_path, monkeypatch):
    fused_adamw = adamw.fused_adamw_
    launches = []

    def launch(*given):
        launches.append(len(launches))
        if len(launches) in (4, 5):
            raise torch.OutOfMemoryError(FULL)
        fused_adamw(*given)

    monkeypatch.setattr(adamw, "fused_adamw_", launch)
    with pytest.raises(TrainingError, match=r"step 2.*updated already, at least in part.*resume"):
        runs.train(tmp_path, **USUAL)


def test_a_run_goes_on_from_a_checkpoint_of_after_it(reference, tmp_path, caplog):
    """With the smaller batches, so that it does not run out of memory again."""
    expected, fields = reference

    class StopAfterTwo(Callback):
        def step_done(self, metrics):
            if metrics.step == 2:  # known when the third is done
                trainer.stop()

    cap = Cap(2, "forward", spared=2)
    trainer = ChronicalsTrainer(
        cap.on(tiny.llama()),
        tiny.tokenizer(),
        runs.config(tmp_path, **fields),
        [StopAfterTwo()],
    )
    with pytest.raises(Interrupted):
        trainer.train(tiny.chat_rows())
    assert cap.refused == 1
    cap = Cap(2, "forward")
    runs.train(tmp_path, model=cap.on(tiny.llama()), resume=True, **fields)
    assert cap.refused == 0 and "gradient_accumulation_steps 4 x batch_size 2" in caplog.text
    assert cap.tokens == 2 * WIDTH  # of the fourth step
    runs.assert_one_trajectory(runs.trajectory(tmp_path), expected)


def test_fit_gives_a_run_that_goes_on_no_larger_batches(tmp_path, caplog, let_return, monkeypatch):
    """On a card of which the plan says that they fit, as it did before."""
    let_return(facts, card_memory=1 << 40)
    monkeypatch.setattr(length, "STEPS_AN_EPOCH", 1)  # the default batch stays
    usual = runs.config(tmp_path, fit="auto", max_steps=2)
    kept = usual.explicit - {"batch_size", "gradient_accumulation_steps"}
    fields = {name: getattr(usual, name) for name in kept}
    cap = Cap(2, "forward")
    for steps, resume in ((2, False), (3, True)):
        config = ChronicalsConfig(**{**fields, "max_steps": steps})
        trainer = ChronicalsTrainer(cap.on(tiny.llama()), tiny.tokenizer(), config)
        trainer.train(tiny.chat_rows(), resume=resume)
        assert cap.tokens == 2 * WIDTH
        assert cap.refused == caplog.text.count("becomes") > 0


def test_three_times_are_enough(tmp_path, caplog):
    cap = Cap(0, "forward")
    with pytest.raises(TrainingError, match=r"step 1: out of memory.*taken less 3 times before"):
        runs.train(tmp_path, model=cap.on(tiny.llama()), **{**USUAL, "batch_size": 16})
    assert cap.refused == 4
    assert re.findall(
        r"becomes batch_size (\d+) x gradient_accumulation_steps (\d+)", caplog.text
    ) == [
        ("8", "4"),
        ("4", "8"),
        ("2", "16"),
    ]


class RecomputingOnly(Cap):
    """Memory for a micro-batch only if layers are recomputed."""

    def on(self, model):
        self.model = model
        return super().on(model)

    def ask(self):
        if not recomputes(self.model):
            self.refused += 1
            raise torch.OutOfMemoryError(FULL)


ALONE = {"batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 3, "fit": "auto"}


def test_a_single_pack_is_trained_with_policies_that_change_no_result(tmp_path, caplog):
    """With the same masks of dropout: the batches are the same."""
    lora = {"use_lora": True, "lora_rank": 4, "lora_dropout": 0.1}
    runs.train(tmp_path / "enough", **{**ALONE, "fit": "off"}, **lora)
    cap = RecomputingOnly(0, "backward")
    runs.train(tmp_path / "capped", model=cap.on(tiny.llama()), **ALONE, **lora)
    runs.assert_one_trajectory(
        runs.trajectory(tmp_path / "capped"), runs.trajectory(tmp_path / "enough")
    )
    assert cap.refused == 2
    assert "logits_chunk_size becomes 1024 (1 of at most 3 times)" in caplog.text
    assert "all layers are recomputed (2 of at most 3 times)" in caplog.text


def test_what_cannot_take_less_ends_and_says_so(tmp_path):
    fixed = {"use_gradient_checkpointing": False, "logits_chunk_size": 1024}
    with pytest.raises(TrainingError, match="no policy is left that changes no result"):
        runs.train(tmp_path, model=Cap(0, "forward").on(tiny.llama()), **ALONE, **fixed)


def test_masks_of_dropout_are_said_to_differ(tmp_path, caplog):
    lora = {"use_lora": True, "lora_rank": 4, "lora_dropout": 0.1}
    runs.train(tmp_path, model=Cap(2, "forward").on(tiny.llama()), **USUAL, **lora)
    assert f"{TWICE}, and dropout draws other masks" in caplog.text


def test_an_update_in_the_backward_pass_is_not_repeated(tmp_path):
    fields = {"memory": ["optimizer_in_backward"], "max_grad_norm": float("inf")}
    fields |= {**USUAL, "gradient_accumulation_steps": 1}
    with pytest.raises(TrainingError, match=r"may have updated some weights already.*resume=True"):
        runs.train(tmp_path, model=Cap(2, "backward").on(tiny.llama()), **fields)


def test_without_it_the_error_names_what_helps_with_its_bytes(tmp_path):
    cap = Cap(2, "forward")
    with pytest.raises(TrainingError) as told:
        runs.train(tmp_path, model=cap.on(tiny.llama()), **{**USUAL, "fit": "off"})
    ways = str(told.value).partition("Less is taken by ")[2].split("; or ")
    assert ["saves about" in way for way in ways[:4]] == [True, True, True, False]
    assert "batch_size=2 with gradient_accumulation_steps=4 (saves about 2.74 MiB)" in ways[0]


@pytest.fixture
def limited(monkeypatch):
    monkeypatch.setattr(recovery, "is_limited", lambda device: True)


@pytest.mark.parametrize("memory", [[], ["optimizer_in_backward"]])
def test_a_rehearsal_changes_nothing(tmp_path, limited, caplog, memory):
    fields = {**USUAL, "gradient_accumulation_steps": 1, "memory": memory}
    fields |= {"use_lora": True, "lora_rank": 4, "lora_dropout": 0.1, "max_grad_norm": float("inf")}
    runs.train(tmp_path / "rehearsed", **fields)
    assert "a step of the longest documents was rehearsed, and fits" in caplog.text
    runs.train(tmp_path / "plain", **{**fields, "fit": "off"})
    assert runs.trajectory(tmp_path / "rehearsed") == runs.trajectory(tmp_path / "plain")


def test_a_rehearsal_runs_out_of_memory_before_the_first_step(reference, tmp_path, limited, caplog):
    expected, fields = reference
    cap = Cap(2, "backward")
    runs.train(tmp_path, model=cap.on(tiny.llama()), **fields)
    runs.assert_one_trajectory(runs.trajectory(tmp_path), expected)
    assert f"{recovery.REHEARSAL}: out of memory ({FULL}): {TWICE}" in caplog.text
    assert cap.refused == 1


def test_a_rehearsal_is_of_the_longest_documents(tmp_path, limited, monkeypatch):
    micro = training_step.micro_step
    longest = []

    def seen(model, objective, batch, *given):
        longest.append(int(batch.cu_seqlens.diff().max()))
        return micro(model, objective, batch, *given)

    monkeypatch.setattr(training_step, "micro_step", seen)
    rows = tiny.chat_rows(40)
    rows[25]["messages"][1]["content"] = "very " * 40
    runs.train(tmp_path, rows, **{**USUAL, "batch_size": 1, "max_steps": 1})
    assert longest[0] == max(longest) and longest[0] > max(longest[1:3])
    assert len(longest) == 4


def test_two_ranks_go_on_together(reference, tmp_path):
    """Where one of them runs out of memory, in the last micro-batch before they sum gradients."""
    expected, fields = reference
    if not fields["use_sequence_packing"]:
        pytest.skip("ranks agree whatever a pack holds")
    codes, said = two_processes.run(RANKS, tmp_path, "goes on")
    assert codes == [0, 0], said
    runs.assert_one_trajectory(runs.trajectory(tmp_path), expected)
    for words in said:
        assert f"in step 2: out of memory (rank 1: {FULL}): batch_size 2 x" in words


def test_two_ranks_end_with_the_same_words(tmp_path):
    codes, said = two_processes.run(RANKS, tmp_path, "ends")
    assert all(codes)
    for words in said:
        assert f"TrainingError: in step 1: out of memory (rank 1: {FULL}): batch_size 1 x" in words
