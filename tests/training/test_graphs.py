"""Steps replayed as CUDA graphs: the losses, gradient norms and weights of steps run as usual."""

import gc
import logging
import weakref
from dataclasses import replace
from types import SimpleNamespace

import emulated_graphs
import pytest
import torch
from emulated_graphs import EmulatedStep

import runs
import tiny
from chronicals.batch import Batch
from chronicals.memory import offload, recompute
from chronicals.patching import layer_policies
from chronicals.policies.cuda_graphs import CudaGraphs
from chronicals.training import Callback, ChronicalsTrainer, enable_cuda_graphs, session
from chronicals.training.step import in_backward
from chronicals.training.step.graphs import (
    SHARES,
    GraphedStep,
    _bounds,
    _other_sizes,
    _rounded,
    _shape,
)
from comparison import equal
from preferences import rows

STEPS = 8
ADAPTERS = {"use_lora": True, "lora_rank": 4}
ARMS = {
    "full": {},
    "accumulated": {"gradient_accumulation_steps": 3},
    "adapters": {**ADAPTERS, "lora_dropout": 0.0},
    "dropout": {**ADAPTERS, "lora_dropout": 0.3},
    "dora": {
        **ADAPTERS,
        "use_dora": True,
        "gradient_accumulation_steps": 2,
        "validation_split": 0.2,
        "eval_steps": 3,
    },
    "dora recomputed": {**ADAPTERS, "use_dora": True, "use_gradient_checkpointing": True},
    "recomputed": {"use_gradient_checkpointing": True},
    "recomputed with dropout": {"use_gradient_checkpointing": True, **ADAPTERS},
    "recomputed in part": {"memory": ["recompute_elementwise"]},
    "offloaded": {"activation_offload": True},
    "offloaded, nothing brought back": {
        "activation_offload": True,
        "use_gradient_checkpointing": True,
        **ADAPTERS,
    },
    "offloaded, recomputed, in tiles": {
        "memory": ["recompute_layers", "offload_activations", "tiled_mlp"],
        **ADAPTERS,
    },
    "layers in tiles, inputs offloaded": {
        "memory": ["tiled_layers", "offload_activations"],
        **ADAPTERS,
    },
    "offloaded, recomputed in part": {
        "memory": ["recompute_elementwise", "offload_activations"],
        **ADAPTERS,
    },
    "bf16 states": {"optimizer_state_dtype": "bf16"},
    "8-bit states": {"use_8bit_optimizer": True},
    "updated in the backward pass": {
        "memory": ["optimizer_in_backward"],
        "max_grad_norm": float("inf"),
    },
    "in little memory": {
        "memory": ["recompute_layers", "offload_activations", "optimizer_in_backward"],
        "max_grad_norm": float("inf"),
        "optimizer_state_dtype": "bf16",
        "master_weights": False,
    },
    "no masters": {"optimizer_state_dtype": "bf16", "master_weights": False},
    "fp8": {"use_fp8": True},
    "fp8 under adapters": {"use_fp8": True, **ADAPTERS, "gradient_accumulation_steps": 2},
    "fp8 whose weights wait": {
        "use_fp8": True,
        **ADAPTERS,
        "memory": ["offload_frozen_weights", "recompute_layers"],
    },
    "evaluated": {"validation_split": 0.2, "eval_steps": 3},
    "pairs and a reference": {
        "objective": "dpo",
        **ADAPTERS,
        "lora_dropout": 0.0,
        "rows": rows(60),
    },
    "pairs and a stored reference": {"objective": "dpo", "rows": rows(60)},
}


def run(folder, graphed, **changes):
    torch.manual_seed(11)
    options = {
        "mixed_precision": "bf16",
        "max_steps": STEPS,
        "gradient_accumulation_steps": 1,
        "save_steps": None,
        **changes,
    }
    result = runs.train(folder, use_cuda_graphs=graphed, **options)
    return runs.trajectory(folder), runs.weights(folder), result


@pytest.mark.gpu
@pytest.mark.parametrize("arm", ARMS)
def test_replayed_is_as_usual(arm, tmp_path, caplog, set_constants):
    set_constants(offload, SMALLEST=1)
    set_constants(offload, WINDOW_TENSORS=1000 if "nothing" in arm else 1)
    set_constants(recompute, TILE=48)
    set_constants(layer_policies, MIN_FP8_WIDTH=16)
    set_constants(in_backward, HELD=1 << 12)
    with caplog.at_level(logging.WARNING):
        (usual, weights, first), (replayed, ours, second) = (
            run(tmp_path / name, graphed, **ARMS[arm])
            for name, graphed in (("usual", False), ("graphs", True))
        )
    assert "could not be captured" not in caplog.text
    for (_, loss, norm), (_, our_loss, our_norm) in zip(usual, replayed, strict=True):
        assert our_loss == pytest.approx(loss, rel=2e-3) and our_norm == pytest.approx(
            norm, rel=2e-2
        )
    for name, weight in weights.items():
        assert (ours[name].float() - weight.float()).norm() <= 2e-2 * weight.float().norm(), name
    if first.evaluation:
        assert second.evaluation.loss == pytest.approx(first.evaluation.loss, rel=2e-3)


@pytest.mark.gpu
def test_resumed_is_uninterrupted(tmp_path):
    """Dropout's random state, kept for graphs by torch, is in the checkpoint too."""
    options = {**ARMS["dropout"], "save_steps": 4}
    whole, weights, _ = run(tmp_path / "whole", True, **options)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "part", True, **options, callbacks=[_Stops(at=6)])
    rest, ours, _ = run(tmp_path / "part", True, **options, resume=True)
    assert rest[-1] == pytest.approx(whole[-1], rel=1e-6)
    assert all(equal(weights[name], ours[name]) for name in weights)


class _Stops(Callback):
    def __init__(self, at):
        self.at = at

    def step_done(self, metrics):
        if metrics.step == self.at:
            raise KeyboardInterrupt


@pytest.mark.gpu
def test_what_cannot_be_captured_runs_as_usual_and_is_said(tmp_path, caplog, monkeypatch):
    from chronicals.objectives import NextToken

    usual = NextToken.__call__

    def asks_the_host(self, model, batch):
        assert bool((batch.targets > -200).all())
        return usual(self, model, batch)

    expected, weights, _ = run(tmp_path / "usual", False)
    monkeypatch.setattr(NextToken, "__call__", asks_the_host)
    with caplog.at_level(logging.WARNING):
        got, ours, _ = run(tmp_path / "graphs", True)
    assert caplog.text.count("could not be captured") == 1
    assert [loss for _, loss, _ in got] == pytest.approx(
        [loss for _, loss, _ in expected], rel=2e-3
    )
    assert weights.keys() == ours.keys()


@pytest.mark.gpu
def test_a_capture_that_fails_midway_loses_no_gradient(tmp_path, monkeypatch):
    """Of the third of four micro-steps; what the first two added up stays."""
    usual = GraphedStep._captured
    changes = {"gradient_accumulation_steps": 4}
    expected, _, _ = run(tmp_path / "usual", False, **changes)
    calls = []

    def fails(self, run):
        calls.append(None)
        self.failed = True
        return

    monkeypatch.setattr(GraphedStep, "_captured", fails)
    got, _, _ = run(tmp_path / "graphs", True, **changes)
    assert calls and usual is not fails
    for (_, loss, norm), (_, our_loss, our_norm) in zip(expected, got, strict=True):
        assert our_loss == pytest.approx(loss, rel=2e-3) and our_norm == pytest.approx(
            norm, rel=2e-2
        )


@pytest.mark.gpu
@pytest.mark.parametrize("arm", ["full", "updated in the backward pass"])
def test_graphs_are_really_replayed(arm, tmp_path, monkeypatch, set_constants):
    set_constants(in_backward, HELD=1 << 12)
    seen = []
    release = GraphedStep.release

    def spy(self):
        looked_up = [len(captured.graph.looked_up) for captured in self.of_micro.values()]
        seen.append(
            (
                len(self.of_micro),
                self.of_update is not None,
                bool(self.gradients),
                looked_up,
                self.failed,
            )
        )
        release(self)

    monkeypatch.setattr(GraphedStep, "release", spy)
    run(tmp_path, True, **ARMS[arm])
    ((shapes, updated, gradients, looked_up, failed),) = seen
    apart = arm == "full"
    assert shapes >= 1 and updated == gradients == apart and all(looked_up) != apart and not failed


class Releasing(Callback):
    """Asks for the graphs' memory after the fourth step, whose successor has been launched by
    then.
    """

    def step_done(self, metrics):
        if metrics.step == 4:
            before = torch.cuda.memory_allocated()
            self.trainer.release_graphs()
            torch.cuda.empty_cache()
            self.freed = before - torch.cuda.memory_allocated()


@pytest.mark.gpu
@pytest.mark.parametrize("arm", ["accumulated", "dropout"])
def test_released_they_are_captured_anew(arm, tmp_path):
    usual, weights, _ = run(tmp_path / "usual", False, **ARMS[arm])
    torch.manual_seed(11)
    options = {
        "mixed_precision": "bf16",
        "max_steps": STEPS,
        "gradient_accumulation_steps": 1,
        "save_steps": None,
    }
    releasing = Releasing()
    config = runs.config(tmp_path / "graphs", use_cuda_graphs=True, **{**options, **ARMS[arm]})
    trainer = releasing.trainer = ChronicalsTrainer(
        tiny.llama(), tiny.tokenizer(), config, callbacks=[releasing]
    )
    trainer.train(tiny.chat_rows())
    assert releasing.freed > 0
    for (_, loss, norm), (_, our_loss, our_norm) in zip(
        usual, runs.trajectory(tmp_path / "graphs"), strict=True
    ):
        assert our_loss == pytest.approx(loss, rel=2e-3) and our_norm == pytest.approx(
            norm, rel=2e-2
        )
    for name, weight in runs.weights(tmp_path / "graphs").items():
        assert (weights[name].float() - weight.float()).norm() <= 2e-2 * weight.float().norm(), name


class Moving(Callback):
    """Gives frozen weights other memory, after which they are laid anew."""

    def __init__(self, model):
        self.model = model

    def step_done(self, metrics):
        if metrics.step == 4:
            for name, p in self.model.named_parameters():
                if "q_proj.base_layer" in name:
                    p.data = p.data.clone()


@pytest.mark.gpu
def test_weights_that_moved_are_followed(tmp_path):
    model = tiny.llama()
    usual, _, _ = run(tmp_path / "usual", True, **ARMS["adapters"])
    torch.manual_seed(11)
    run_options = {
        "mixed_precision": "bf16",
        "max_steps": STEPS,
        "gradient_accumulation_steps": 1,
        "save_steps": None,
    }
    runs.train(
        tmp_path / "moved",
        model=model,
        callbacks=[Moving(model)],
        use_cuda_graphs=True,
        **run_options,
        **ARMS["adapters"],
    )
    for (_, loss, norm), (_, our_loss, our_norm) in zip(
        usual, runs.trajectory(tmp_path / "moved"), strict=True
    ):
        assert our_loss == pytest.approx(loss, rel=2e-3) and our_norm == pytest.approx(
            norm, rel=2e-2
        )


EVEN = [
    {
        "prompt": [{"role": "user", "content": f"what is the answer to {n // 10} {n % 10}?"}],
        "chosen": [{"role": "assistant", "content": f"it is {n // 10} {n % 10}"}],
        "rejected": [{"role": "assistant", "content": "no"}],
    }
    for n in range(60)
]
"""Pairs of one length: their Batches have one shape."""

EMULATED = {
    "full": {},
    "accumulated": {"gradient_accumulation_steps": 3},
    "8-bit states": {"use_8bit_optimizer": True},
    "updated in the backward pass": {
        "memory": ["optimizer_in_backward"],
        "max_grad_norm": float("inf"),
    },
    "pairs and a reference": {"objective": "dpo", **ADAPTERS, "lora_dropout": 0.0, "rows": EVEN},
}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a card has graphs of its own")
@pytest.mark.parametrize("arm", EMULATED)
def test_what_is_captured_is_the_step(arm, tmp_path, monkeypatch, let_return):
    """Emulated: which micro-steps and updates are replayed, and that gradients are begun, added
    and dropped as usual.
    """
    usual, weights, _ = run(
        tmp_path / "usual", False, **{"mixed_precision": "fp32"} | EMULATED[arm]
    )
    let_return(CudaGraphs, why_not=None)
    monkeypatch.setattr(session, "GraphedStep", EmulatedStep)
    replayed, ours, _ = run(
        tmp_path / "graphs", True, **{"mixed_precision": "fp32"} | EMULATED[arm]
    )
    graphed = EmulatedStep.last
    assert graphed.recorder.replays > len(graphed.met) and not graphed.failed, (
        graphed.recorder.replays,
        len(graphed.met),
    )
    for step, ours_of_step in zip(usual, replayed, strict=True):
        assert ours_of_step == pytest.approx(step, rel=1e-5)
    assert all(torch.allclose(ours[name], weights[name], rtol=1e-4, atol=1e-6) for name in weights)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a card has graphs of its own")
def test_graphs_are_given_up_where_one_more_has_no_memory(
    tmp_path, monkeypatch, let_return, caplog
):
    """What those before keep is free for steps without graphs, and the gradients so far count."""
    fields = {"mixed_precision": "fp32", "gradient_accumulation_steps": 3}
    usual, weights, _ = run(tmp_path / "usual", False, **fields)
    let_return(CudaGraphs, why_not=None)
    monkeypatch.setattr(session, "GraphedStep", EmulatedStep)
    capture = emulated_graphs.Recorder.capture
    captured = []

    def full(recorder, run):
        if len(captured) == 2:
            raise torch.OutOfMemoryError("Tried to allocate 1.00 GiB")
        captured.append(run)
        return capture(recorder, run)

    monkeypatch.setattr(emulated_graphs.Recorder, "capture", full)
    usual_captured = EmulatedStep._captured
    left = []

    def noted(graphed, run):
        result = usual_captured(graphed, run)
        if result is None:
            left.append((dict(graphed.of_micro), graphed.of_update, graphed.gradients))
        return result

    monkeypatch.setattr(EmulatedStep, "_captured", noted)
    replayed, ours, _ = run(tmp_path / "graphs", True, **fields)
    graphed = EmulatedStep.last
    assert len(captured) == 2 and graphed.failed and graphed.recorder.replays > 0
    assert left == [({}, None, None)]
    assert "a step could not be captured (Tried to allocate 1.00 GiB)" in caplog.text
    for step, ours_of_step in zip(usual, replayed, strict=True):
        assert ours_of_step == pytest.approx(step, rel=1e-5)
    assert all(torch.allclose(ours[name], weights[name], rtol=1e-4, atol=1e-6) for name in weights)


@pytest.mark.parametrize("fails_again", [False, True], ids=["once", "at its end too"])
def test_nothing_of_a_failed_capture_stays(fails_again):
    """Its tensors are freed at once, not when cycles are next collected."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = SimpleNamespace(weights_moved=lambda: None)
    graphed = EmulatedStep(None, [weight], [weight], optimizer)
    made = []

    def run():
        activations = torch.zeros(1000)
        made.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("Tried to allocate 1.00 GiB")

    class Capture:
        """As torch.cuda.graph, which may fail once more at its end."""

        def __enter__(self):
            pass

        def __exit__(self, *_):
            if fails_again:
                raise RuntimeError("the capture is invalid")

    def capture(run):
        with Capture():
            return run()

    graphed.recorder.capture = capture
    gc.disable()
    try:
        assert graphed._captured(run) is None and graphed.failed
        assert [there() for there in made] == [None]
    finally:
        gc.enable()


def test_targets_are_rounded_up():
    ids = torch.zeros(160, dtype=torch.int64)
    batch = Batch(ids, ids, ids, torch.tensor([0, 160], dtype=torch.int32), 160, 41)
    assert _rounded(batch).trained == 50 and 160 // SHARES == 10
    assert _rounded(replace(batch, trained=160)).trained == 160
    assert _rounded(replace(batch, trained=None)).trained is None


def batch_of(lengths, trained, **more):
    """Documents of these lengths, each longest one the bound."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.zeros(sum(lengths), dtype=torch.int64)
    return Batch(ids, ids, ids, ends.to(torch.int32), max(lengths), trained, **more)


class Rank(GraphedStep):
    """Of which only what it agrees on with another is asked; the other says the same of
    ``other``.
    """

    def __init__(self, other):
        self.given_up = False
        self.failed = False
        self.releases = 0
        self.of_micro = {}
        self.parameters = []
        self.other = other
        self.exchange = self.tell
        self.others_state = [False, 0]
        self.released = 0

    def tell(self, numbers):
        return [numbers, [*self.others_state, *_bounds(self.other), _other_sizes(self.other)]]

    def release(self):
        self.released += 1


def test_ranks_take_the_largest_bounds_of_all():
    one = batch_of([3, 5], 4)
    other = batch_of([6, 1, 1], 2)
    found, alike = Rank(other)._agreed(one, False)
    again, also = Rank(one)._agreed(other, False)
    assert alike and also
    assert [(b.max_seqlen, b.trained, b.cu_seqlens.tolist()) for b in (found, again)] == [
        (6, 4, [0, 3, 8, 8]),
        (6, 4, [0, 6, 7, 8]),
    ]
    assert _shape(found, True) == _shape(again, True)


@pytest.mark.parametrize(
    "other",
    [
        batch_of([3, 6], 4),
        batch_of([3, 5], None),
        batch_of([3, 5], 4, weights=torch.ones(8)),
        batch_of([3, 5], 4, segments={"pairs": torch.zeros(2)}),
    ],
    ids=["tokens", "trained", "weights", "segments"],
)
def test_shapes_that_cannot_be_made_alike_run_as_usual_on_all_ranks(other):
    batch = batch_of([3, 5], 4)
    assert Rank(other)._agreed(batch, False) == (batch, False)
    assert Rank(batch)._agreed(other, False) == (other, False)


def test_documents_that_segments_count_are_not_made_more():
    one, other = (
        batch_of(lengths, 4, segments={"pairs": torch.zeros(2)}) for lengths in ([3, 5], [3, 4, 1])
    )
    assert Rank(other)._agreed(one, False) == (one, False)


def test_graphs_that_another_rank_released_or_gave_up_are_so_here(caplog):
    batch = batch_of([3, 5], 4)
    rank = Rank(batch_of([3, 5], 4))
    rank.others_state = [False, 2]
    rank._agreed(batch, True)
    assert rank.released == 1 and rank.releases == 2 and not rank.given_up
    rank._agreed(batch, True)
    assert rank.released == 1
    rank.others_state = [True, 2]
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    rank.parameters = [weight]
    rank._agreed(batch, True)
    assert rank.given_up and rank.failed and rank.exchange is None and weight.grad is None
    assert "another process could not go on" in caplog.text


def test_what_another_rank_could_not_capture_is_not_replayed(caplog):
    rank = Rank(batch_of([3, 5], 4))
    rank.optimizer = SimpleNamespace(weights_moved=lambda: None)
    rank._captured = lambda run: ("graph", run())
    told = []
    rank.exchange = lambda numbers: told.append(numbers) or [numbers, [1]]
    assert rank._captured_by_all(dict) == ("graph", {}) and not rank.failed
    rank.exchange = lambda numbers: [numbers, [0]]
    assert rank._captured_by_all(dict) is None and rank.failed
    assert told == [[True]] and "could not be captured (of another process)" in caplog.text


@pytest.mark.slow
def test_off_without_a_card_and_refused_where_asked_for(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    runs.train(tmp_path / "permitted", max_steps=2)
    with pytest.raises(
        ValueError, match="use_cuda_graphs=True cannot be honoured here: not on a card"
    ):
        runs.train(tmp_path / "asked", max_steps=2, use_cuda_graphs=True, model=tiny.llama())


def test_asked_for_by_name(tmp_path):
    trainer = ChronicalsTrainer(tiny.llama(), tiny.tokenizer(), runs.config(tmp_path, max_steps=2))
    enable_cuda_graphs(trainer)
    assert trainer.config.use_cuda_graphs and "use_cuda_graphs" in trainer.config.explicit
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="use_cuda_graphs=True cannot be honoured"):
            trainer.train(tiny.chat_rows())
