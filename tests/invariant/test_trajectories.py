"""Equivalence classes of whole runs: each must give one trajectory of loss and gradient norm."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import preferences
import runs
import tiny
from chronicals.memory import LAYERS, NOTHING, ActivationOffload, Estimate, recompute
from chronicals.patching import halves, patch_parts
from chronicals.patching.plan import PatchPlan
from chronicals.policies import facts, needed_memory
from chronicals.training import ChronicalsTrainer
from chronicals.training.step import in_backward
from runs import EXACT, assert_one_trajectory

pytestmark = pytest.mark.of_file(4)

TESTS = Path(__file__).parent.parent
LORA = {"use_lora": True, "lora_rank": 4, "lora_dropout": 0.0, "learning_rate": 3e-3 / 16}
"""With the rate of full fine-tuning for B, which LoRA+ gives 16 times that of A: with 16 times
the former, from some weights an error of 3e-7 is one of 1e-3 two steps later."""


@pytest.fixture(scope="module", params=[{}, LORA], ids=["full", "lora"])
def reference(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    runs.train(folder, batch_size=2, gradient_accumulation_steps=4, max_steps=8, **request.param)
    return runs.trajectory(folder), request.param


@pytest.mark.parametrize("batch, accumulation", [(1, 8), (8, 1)])
def test_batch_times_accumulation(reference, tmp_path, batch, accumulation):
    expected, changes = reference
    runs.train(
        tmp_path, batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=8, **changes
    )
    assert_one_trajectory(runs.trajectory(tmp_path), expected)


def with_two_ranks(folder, program):
    """What the processes print; ``program`` begins with what it needs to train in ``folder``."""
    script = folder / "ranked.py"
    begin = (
        "import os, pathlib, signal, sys, runs, torch\ntorch.set_num_threads(1)\nfolder = "
        f"pathlib.Path({str(folder)!r})\n"
    )
    script.write_text(begin + program)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


needs_two = pytest.mark.skipif(
    torch.cuda.device_count() == 1, reason="two ranks need two cards, or none"
)


@pytest.mark.sample(1)
@needs_two
@pytest.mark.parametrize(
    "batch, accumulation", [(2, 2), pytest.param(4, 1, marks=pytest.mark.long)]
)
def test_two_ranks(reference, tmp_path, batch, accumulation):
    expected, changes = reference
    with_two_ranks(
        tmp_path,
        f"runs.train(folder, batch_size={batch}, gradient_accumulation_steps={accumulation}, "
        f"max_steps=8, **{changes!r})",
    )
    assert_one_trajectory(runs.trajectory(tmp_path), expected)


OBJECTIVES = {
    "dpo": {"objective": "dpo"},
    "kto": {"objective": "kto", "use_lora": True, "lora_rank": 4, "lora_dropout": 0.0},
    "orpo": {"objective": "orpo"},
    "reward": {"objective": "reward", "reward": {"center_coefficient": 0.1}},
}


@pytest.mark.sample(1)
@needs_two
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_two_ranks_of_a_preference(objective, tmp_path):
    """The reference is stored by both ranks together, KTO's divergence is of both."""
    given = "preferences.judged_rows(40)" if objective == "kto" else "preferences.rows(40)"
    changes = {
        **OBJECTIVES[objective],
        "learning_rate": 1e-3,
        "max_steps": 4,
        "max_seq_length": 128,
    }
    rows = (preferences.judged_rows if objective == "kto" else preferences.rows)(40)
    runs.train(tmp_path / "alone", rows, batch_size=4, gradient_accumulation_steps=2, **changes)
    (tmp_path / "together").mkdir()
    with_two_ranks(
        tmp_path / "together",
        f"import preferences\nruns.train(folder, {given}, batch_size=2, "
        f"gradient_accumulation_steps=2, **{changes!r})",
    )
    assert_one_trajectory(
        runs.trajectory(tmp_path / "together"), runs.trajectory(tmp_path / "alone"), 1e-4
    )


@needs_two
def test_two_ranks_stop_together(tmp_path):
    """Where a signal comes to one of them while they evaluate, so that the other has not heard
    of it.
    """
    told = """
import faulthandler
from chronicals.training import Interrupted
from chronicals.training.run import loop

faulthandler.dump_traceback_later(120, exit=True)
evaluate = loop.evaluate

def signalled(*given):
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGTERM)
    return evaluate(*given)

loop.evaluate = signalled
try:
    runs.train(folder, validation_split=0.2, eval_steps=2, max_steps=6)
except Interrupted as error:
    print(error)
"""
    said = with_two_ranks(tmp_path, told)
    assert (
        "stopped by SIGTERM after step 2" in said
        and "stopped by SIGTERM on rank 0 after step 2" in said
    )


def test_packed_and_alone(tmp_path):
    """Documents packed together train as the same documents in packs of their own.

    Both runs take whole epochs as single steps, so that a step holds the same documents.
    """
    rows = tiny.chat_rows(24)
    packed = tmp_path / "packed"
    alone = tmp_path / "alone"
    packs = packs_of(rows, tmp_path)
    assert packs < len(rows) // 2
    runs.train(packed, rows=rows, batch_size=packs, gradient_accumulation_steps=1, max_steps=5)
    runs.train(
        alone,
        rows=rows,
        batch_size=len(rows),
        gradient_accumulation_steps=1,
        max_steps=5,
        use_sequence_packing=False,
    )
    assert_one_trajectory(runs.trajectory(packed), runs.trajectory(alone))


def packs_of(rows, folder):
    from chronicals.data import create_dataloader

    return len(create_dataloader(rows, tiny.tokenizer(), runs.config(folder)).plan)


def test_fused_and_plain_head(tmp_path):
    runs.train(tmp_path / "fused")
    runs.train(tmp_path / "plain", use_fused_kernels=False)
    assert_one_trajectory(runs.trajectory(tmp_path / "fused"), runs.trajectory(tmp_path / "plain"))


def test_logits_in_chunks_and_at_once(tmp_path):
    runs.train(tmp_path / "at once")
    runs.train(tmp_path / "in chunks", logits_chunk_size=37)
    assert_one_trajectory(
        runs.trajectory(tmp_path / "in chunks"), runs.trajectory(tmp_path / "at once")
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"use_lora": True, "lora_rank": 4, "lora_dropout": 0.2}],
    ids=["full", "adapters"],
)
def test_recomputed_and_kept(tmp_path, changes):
    runs.train(tmp_path / "kept", **changes)
    runs.train(tmp_path / "recomputed", **changes, use_gradient_checkpointing=True)
    assert runs.trajectory(tmp_path / "kept") == runs.trajectory(tmp_path / "recomputed")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "changes",
    [{}, {"use_lora": True, "lora_rank": 4, "lora_dropout": 0.2}],
    ids=["full", "adapters"],
)
def test_recomputed_in_fused_layers_and_kept(tmp_path, changes, let_return, record_calls):
    """Such layers, which a run has on a card only."""
    let_return(facts, why_not_fused=None)
    # a proof runs layers, too
    let_return(facts, plan_for=PatchPlan())
    remakes = record_calls(halves, "Remake")
    found = []
    for memory in ([], ["recompute_elementwise"], ["recompute_layers"]):
        model = tiny.llama()
        patch_parts(model, whole_layers=True)  # which proves them, once
        before = len(remakes)
        runs.train(
            tmp_path / str(memory), model=model, mixed_precision="bf16", memory=memory, **changes
        )
        found.append((runs.trajectory(tmp_path / str(memory)), len(remakes) - before))
    (kept, units), (elementwise, with_norms), (layers, again) = found
    assert kept == elementwise == layers
    assert with_norms == 3 * units > 0 and again == 2 * units


def test_recomputed_as_far_as_memory_needs_it(tmp_path, let_return):
    """On a card that one layer's activations do not fit on, and later, with the same model, on
    one where all do.
    """
    runs.train(tmp_path / "kept")
    model = tiny.llama()
    recomputed = []
    gib = 2**30  # beside which what an update needs on the CPU is nothing
    for name, total in (("first layer", 5 * gib), ("nothing", 9 * gib)):
        card = Estimate(gib, 2, {NOTHING: 3 * gib, LAYERS: 0}, total)
        let_return(facts, card_memory=total)
        let_return(needed_memory, estimate=card)
        runs.train(tmp_path / name, model=model)
        recomputed.append([layer.gradient_checkpointing for layer in model.get_decoder().layers])
        model.load_state_dict(tiny.llama().state_dict())
        assert runs.trajectory(tmp_path / "kept") == runs.trajectory(tmp_path / name)
    assert recomputed == [[True, False], [False, False]]


def test_what_the_user_recomputes_stays(tmp_path, caplog):
    model = tiny.llama()
    model.gradient_checkpointing_enable()
    caplog.set_level("INFO")
    runs.train(tmp_path / "kept")
    runs.train(tmp_path / "the user's", model=model)
    assert runs.trajectory(tmp_path / "kept") == runs.trajectory(tmp_path / "the user's")
    assert all(layer.gradient_checkpointing for layer in model.get_decoder().layers)
    assert "activation recomputation (the model's own, which stays as it is)" in caplog.text


@pytest.mark.parametrize(
    "changes", [{"memory": []}, {"use_gradient_checkpointing": False}], ids=str
)
def test_what_the_user_recomputes_is_kept_where_the_run_says_so(tmp_path, changes):
    model = tiny.llama()
    model.gradient_checkpointing_enable()
    runs.train(tmp_path, model=model, max_steps=1, **changes)
    assert not any(layer.gradient_checkpointing for layer in model.get_decoder().layers)


def test_gradients_that_were_left_behind_are_dropped(tmp_path):
    model = tiny.llama()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    runs.train(tmp_path / "fresh")
    runs.train(tmp_path / "used", model=model)
    assert runs.trajectory(tmp_path / "fresh") == runs.trajectory(tmp_path / "used")


def test_a_step_that_fails_leaves_the_model_as_it_was_given(tmp_path):
    """In its second micro-batch, after the first has left its gradients, in fp32, at weights in
    bf16.
    """
    model = tiny.llama()
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("planted")

    hook = model.get_decoder().register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        runs.train(tmp_path / "failed", model=model, mixed_precision="bf16")
    hook.remove()
    assert len(calls) == 4 and all(
        p.grad is None and p.grad_dtype == p.dtype for p in model.parameters()
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "changes",
    [{}, {"use_lora": True, "lora_rank": 4, "lora_dropout": 0.2}],
    ids=["full", "adapters"],
)
@pytest.mark.parametrize("recomputed", [False, True])
def test_offloaded_and_resident(tmp_path, recomputed, changes):
    changes = {**changes, "use_gradient_checkpointing": recomputed}
    runs.train(tmp_path / "resident", **changes)
    model = tiny.llama()  # on the CPU still
    with ActivationOffload(model.get_decoder(), smallest=1, window=50_000) as offload:
        runs.train(tmp_path / "offloaded", model=model, **changes)
    assert offload.moved > 0
    assert runs.trajectory(tmp_path / "resident") == runs.trajectory(tmp_path / "offloaded")


@pytest.mark.parametrize("mixed_precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recomputed", [[], ["recompute_layers"]], ids=["kept", "recomputed"])
def test_tiled_and_whole(tmp_path, recomputed, mixed_precision, set_constants):
    """In bf16 both add up what several micro-batches, or tiles, give in fp32."""
    set_constants(recompute, TILE=48)
    changes = {"mixed_precision": mixed_precision, "max_steps": 6}
    runs.train(tmp_path / "whole", **changes, memory=recomputed)
    runs.train(tmp_path / "tiled", **changes, memory=[*recomputed, "tiled_mlp"])
    whole, tiled = (runs.trajectory(tmp_path / name) for name in ("whole", "tiled"))
    assert whole != tiled
    if mixed_precision == "fp32":
        assert_one_trajectory(whole, tiled)
    else:
        for (_, loss, norm), (_, our_loss, our_norm) in zip(whole, tiled, strict=True):
            assert our_loss == pytest.approx(loss, rel=1e-2) and our_norm == pytest.approx(
                norm, rel=3e-2
            )


UNCLIPPED = {"max_grad_norm": float("inf"), "gradient_accumulation_steps": 1, "max_steps": 6}


@pytest.mark.parametrize(
    ("held", "memory"),
    [(1, []), (40_000, []), (1 << 26, []), (40_000, ["recompute_layers", "tiled_mlp"])],
    ids=["one by one", "some", "all", "recomputed in tiles"],
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mixed_precision": "bf16"},
        {"optimizer_state_dtype": "bf16"},
        {"mixed_precision": "bf16", "use_8bit_optimizer": True},
        {"use_lora": True, "lora_rank": 4},
    ],
    ids=["fp32", "bf16", "bf16 states", "8-bit states", "adapters"],
)
def test_updated_in_the_backward_pass_and_after_it(tmp_path, changes, memory, held, set_constants):
    set_constants(recompute, TILE=48)
    set_constants(in_backward, HELD=held)
    found = []
    for name, policies in (("after", memory), ("within", [*memory, "optimizer_in_backward"])):
        result = runs.train(tmp_path / name, **UNCLIPPED, **changes, memory=policies)
        found.append(
            (runs.trajectory(tmp_path / name), runs.weights(tmp_path / name), result.coverage)
        )
    (after, weights, coverage), (within, ours, our_coverage) = found
    assert our_coverage == coverage
    if "optimizer_state_dtype" in changes:  # its rounding draws other numbers
        assert_one_trajectory(after, within, tolerance=50 * EXACT)
    else:
        assert_one_trajectory(after, within)
        assert all(torch.equal(weights[name], ours[name]) for name in weights)


def test_bf16_follows_fp32(tmp_path):
    """The exact master keeps bf16 weights on the fp32 trajectory up to the rounding of products."""
    runs.train(tmp_path / "fp32", max_steps=20)
    runs.train(tmp_path / "bf16", max_steps=20, mixed_precision="bf16")
    full, half = (np.array(runs.trajectory(tmp_path / kind)) for kind in ("fp32", "bf16"))
    deviation = (half[:, 1] - full[:, 1]) / full[:, 1]
    assert np.abs(deviation).max() < 4 * torch.finfo(torch.bfloat16).eps
    assert abs(deviation.mean()) < torch.finfo(torch.bfloat16).eps


def test_bf16_without_masters_follows_fp32(tmp_path):
    """Its losses as a whole, each with the noise of the rounding; rounded to the nearest, small
    updates would be lost.
    """
    calm = {"max_steps": 20, "learning_rate": 3e-4}
    runs.train(tmp_path / "fp32", **calm)
    runs.train(tmp_path / "bf16", **calm, mixed_precision="bf16", master_weights=False)
    full, half = (np.array(runs.trajectory(tmp_path / kind))[:, 1] for kind in ("fp32", "bf16"))
    assert np.abs((half - full) / full).max() < 8 * torch.finfo(torch.bfloat16).eps
    assert (half[0] - half[-1]) == pytest.approx(full[0] - full[-1], rel=0.1)


@pytest.mark.parametrize(
    ("again", "kind"),
    [(False, {}), (True, {}), (False, {"use_dora": True})],
    ids=["another trainer", "the same", "dora"],
)
def test_resumed_and_uninterrupted(tmp_path, again, kind):
    from chronicals.training import Callback, Interrupted

    class StopAt(Callback):
        def step_done(self, metrics):
            if metrics.step == 3:
                import signal

                os.kill(os.getpid(), signal.SIGINT)

    changes = {"max_steps": 9, "use_lora": True, "lora_rank": 4, "lora_dropout": 0.2, **kind}
    runs.train(tmp_path / "whole", **changes)
    trainer = ChronicalsTrainer(
        tiny.llama(), tiny.tokenizer(), runs.config(tmp_path / "parts", **changes), [StopAt()]
    )
    with pytest.raises(Interrupted, match="resume=True"):
        trainer.train(tiny.chat_rows())
    if again:
        trainer.train(tiny.chat_rows(), resume=True)
    else:
        runs.train(tmp_path / "parts", resume=True, **changes)
    assert runs.trajectory(tmp_path / "parts") == runs.trajectory(tmp_path / "whole")
    left = runs.weights(tmp_path / "parts")
    right = runs.weights(tmp_path / "whole")
    assert all(torch.equal(left[name], right[name]) for name in right)
