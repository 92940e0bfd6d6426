"""Runs whose optimizer states are in host memory: those of the run without, and what they go
together with.
"""

import logging

import pytest
import torch
from emulated_graphs import EmulatedStep
from safetensors.torch import load_file

import runs
import tiny
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.memory import NOTHING
from chronicals.models import present
from chronicals.optimizers import buffer_bytes, host_states
from chronicals.policies import Facts, decide, needed_memory
from chronicals.policies import host_states as policy
from chronicals.policies.cuda_graphs import CudaGraphs
from chronicals.policies.needed_memory import what_helps
from chronicals.training import Callback, session
from comparison import equal

AWAY = ["offload_optimizer_states"]
STEADY = {"lr_scheduler": "constant", "warmup_steps": 0, "save_steps": 2, "save_total_limit": 9}
RUNS = {
    "fp32": {},
    "bf16": {"mixed_precision": "bf16"},
    "fp16": {"mixed_precision": "fp16"},
    "bf16 states": {"mixed_precision": "bf16", "optimizer_state_dtype": "bf16"},
    "bf16 states, no masters": {
        "mixed_precision": "bf16",
        "optimizer_state_dtype": "bf16",
        "master_weights": False,
    },
    "8 bits": {"mixed_precision": "bf16", "use_8bit_optimizer": True},
    "8 bits in fp32": {"use_8bit_optimizer": True, "weight_decay": 0.1},
    "adapters": {"use_lora": True, "lora_rank": 32, "lora_dropout": 0.0, "weight_decay": 0.1},
}


@pytest.fixture(autouse=True)
def small(set_constants):
    """So that weights of a tiny model are large, and take several parts."""
    set_constants(host_states, MIN_HOST_ELEMENTS=1000)
    set_constants(host_states, MAX_BUFFER_BYTES=2 * host_states.MIN_BUFFER_BYTES)


def states(folder, step=6):
    return load_file(folder / "run" / "checkpoints" / f"step-{step:08d}" / "optimizer.safetensors")


def same(left, right):
    assert left.keys() == right.keys() and all(equal(left[name], right[name]) for name in left)


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_is_the_one_with_states_beside_the_weights(kind, tmp_path):
    for name, memory in (("away", AWAY), ("here", [])):
        result = runs.train(tmp_path / name, **STEADY, **RUNS[kind], memory=memory)
        assert result.coverage.moved
    assert runs.trajectory(tmp_path / "away") == runs.trajectory(tmp_path / "here")
    same(states(tmp_path / "away"), states(tmp_path / "here"))
    if "lora" not in str(RUNS[kind]):
        same(runs.weights(tmp_path / "away"), runs.weights(tmp_path / "here"))


class Breaks(Callback):
    def step_done(self, metrics):
        if metrics.step == 3:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", ["bf16", "bf16 states", "8 bits"])
def test_a_run_goes_on_in_the_other_place_bit_by_bit(kind, first, tmp_path):
    options = {**STEADY, **RUNS[kind]}
    runs.train(tmp_path / "whole", **options, memory=AWAY)
    with pytest.raises(KeyboardInterrupt):
        runs.train(tmp_path / "part", callbacks=[Breaks()], **options, memory=AWAY if first else [])
    runs.train(tmp_path / "part", resume=True, **options, memory=[] if first else AWAY)
    same(states(tmp_path / "whole"), states(tmp_path / "part"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp32", "8 bits"])
def test_updates_in_the_backward_pass_go_with_it(kind, tmp_path):
    changes = {
        **STEADY,
        **RUNS[kind],
        "max_grad_norm": float("inf"),
        "gradient_accumulation_steps": 1,
    }
    for name, memory in (("away", AWAY), ("here", [])):
        runs.train(tmp_path / name, **changes, memory=[*memory, "optimizer_in_backward"])
    assert runs.trajectory(tmp_path / "away") == runs.trajectory(tmp_path / "here")
    same(states(tmp_path / "away"), states(tmp_path / "here"))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a card has graphs of its own")
@pytest.mark.parametrize("policies", [AWAY, [*AWAY, "optimizer_in_backward"]], ids=str)
def test_what_is_captured_is_the_update(policies, tmp_path, monkeypatch, let_return):
    given = {
        "max_grad_norm": float("inf"),
        "gradient_accumulation_steps": 1,
        "max_steps": 8,
        "save_steps": None,
    }
    runs.train(tmp_path / "usual", **given, memory=[])
    let_return(CudaGraphs, why_not=None)
    monkeypatch.setattr(session, "GraphedStep", EmulatedStep)
    usual = EmulatedStep.release
    captured = []
    monkeypatch.setattr(
        EmulatedStep,
        "release",
        lambda own: captured.append(own.of_update is not None) or usual(own),
    )
    runs.train(tmp_path / "graphs", **given, memory=policies, use_cuda_graphs=True)
    graphed = EmulatedStep.last
    assert graphed.recorder.replays and not graphed.failed
    assert captured[-1] == (policies == AWAY)
    for left, right in zip(
        runs.trajectory(tmp_path / "usual"), runs.trajectory(tmp_path / "graphs"), strict=True
    ):
        assert right == pytest.approx(left, rel=1e-5)


@pytest.mark.parametrize("changes", [{"use_lora": True, "lora_rank": 4}, {}], ids=str)
def test_where_no_weight_is_large_it_is_refused(changes, tmp_path, set_constants):
    set_constants(host_states, MIN_HOST_ELEMENTS=1 << 16)
    with pytest.raises(
        ConfigurationError,
        match=r"memory=\['offload_optimizer_states'\]: no trained weight has 65536.*leave",
    ):
        runs.train(tmp_path, memory=AWAY, **changes)


def test_where_host_memory_is_too_small_it_is_refused(tmp_path, let_return):
    let_return(policy, available_memory=100_000)
    with pytest.raises(
        ConfigurationError,
        match=r"memory=.*: states of 0.00 GiB, and 0.00 GiB .* set use_8bit_optimizer=True",
    ):
        runs.train(tmp_path, memory=AWAY)


@pytest.mark.slow
def test_the_log_says_it(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        runs.train(tmp_path, max_steps=1, memory=AWAY)
    assert (
        "optimizer states in host memory (as asked, of 99" in caplog.text
        and "GiB come and go" in caplog.text
    )
    runs.train(tmp_path / "here", max_steps=1)
    assert caplog.text.count("optimizer states in host memory") == 1


@pytest.mark.parametrize("kind", ["fp32", "bf16", "bf16 states, no masters", "8 bits", "adapters"])
def test_the_estimate_has_buffers_instead_of_states(kind, tmp_path, monkeypatch, set_constants):
    set_constants(host_states, MIN_HOST_ELEMENTS=5000)
    set_constants(host_states, MAX_BUFFER_BYTES=host_states.MIN_BUFFER_BYTES)
    found = []
    usual = needed_memory.estimate
    monkeypatch.setattr(
        needed_memory, "estimate", lambda *given: found.append(usual(*given)) or found[-1]
    )
    for memory in ([], AWAY):
        model = tiny.llama()
        config = runs.config(tmp_path, **RUNS[kind], memory=memory)
        if "use_lora" in RUNS[kind]:
            session.attach_adapters(model, config.replace(lora_rank=128))
        decide(Facts.of(config, present(model, True, True, pack_width=128)))
    optimizer = session.build_optimizer(model, config)
    session.Precision(config.mixed_precision, torch.device("cpu")).prepare(model, optimizer)
    large = [p for p in model.parameters() if p.requires_grad and p.numel() >= 5000]
    moved = sum(
        x.nbytes for p in large for name, x in optimizer.state_of(p).items() if name != "step"
    )
    (lane,) = optimizer.host._lanes.values()
    assert lane.held == moved > buffer_bytes(moved)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert found[0].needed(NOTHING) - found[1].needed(NOTHING) == pytest.approx(
        moved - buffer_bytes(moved), abs=count / 100
    )


@pytest.mark.parametrize(
    "asked", [{}, {"memory": AWAY}, {"use_lora": True}, {"activation_offload": True}], ids=str
)
def test_a_run_that_does_not_fit_is_told_of_it(asked):
    config = ChronicalsConfig(**asked)
    named = [
        fields["memory"] for fields, price in what_helps(config) if "memory" in fields and not price
    ]
    told = [policies for policies in named if "offload_optimizer_states" in policies]
    assert len(told) == (0 if "use_lora" in asked else 1)
    assert all(config.replace(**fields) for fields, _ in what_helps(config))


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("kind", ["bf16", "bf16 states", "8 bits"])
def test_on_a_card_a_run_is_the_one_with_states_beside_the_weights(kind, graphs, tmp_path):
    """Captured, too; and checkpoints are written while it goes on."""
    model = {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    for name, memory in (("away", AWAY), ("here", [])):
        torch.manual_seed(11)
        given = {
            **STEADY,
            **RUNS[kind],
            "max_steps": 8,
            "use_cuda_graphs": graphs,
            "memory": memory,
        }
        runs.train(tmp_path / name, model=tiny.llama(**model), **given)
    assert runs.trajectory(tmp_path / "away") == runs.trajectory(tmp_path / "here")
    for step in (2, 4, 6, 8):
        same(states(tmp_path / "away", step), states(tmp_path / "here", step))
