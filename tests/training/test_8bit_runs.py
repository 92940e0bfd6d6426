"""Runs with AdamW in 8 bits: whose moments are, that they train as with fp32 moments, and go on
bit by bit.
"""

import logging
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import runs
import tiny
from chronicals.config import ConfigurationError
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.models import present
from chronicals.optimizers import Adam8bit
from chronicals.policies import Facts, decide, needed_memory
from chronicals.training import Callback, CheckpointError, session

sys.path.insert(0, str(Path(__file__).parent))
import test_ranks

from comparison import equal

IN_8_BITS = {"use_8bit_optimizer": True}
STEADY = {"lr_scheduler": "constant", "warmup_steps": 0, "save_steps": 2, "save_total_limit": 9}


def kinds(model, config):
    """Of every trained weight by name: dtype of the moments, learning rate, weight decay."""
    optimizer = session.build_optimizer(model, config)
    assert type(optimizer) is Adam8bit
    of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(of) == len(trained) == sum(len(group["params"]) for group in optimizer.param_groups)
    return {
        name: (optimizer.state_of(p)["exp_avg"].dtype, of[id(p)]["peak"], of[id(p)]["weight_decay"])
        for name, p in trained.items()
    }


@pytest.mark.parametrize("tied", [False, True])
def test_moments_of_large_matrices_but_embeddings_are_in_8_bits(tmp_path, tied):
    model = tiny.llama(tie_word_embeddings=tied)
    config = runs.config(tmp_path, **IN_8_BITS, weight_decay=0.1)
    for name, (dtype, _, decay) in kinds(model, config).items():
        weight = model.get_parameter(name)
        large = weight.ndim > 1 and weight.numel() >= 4096 and "embed_tokens" not in name
        assert dtype == (torch.uint8 if large else torch.float32), name
        assert decay == (0.1 if weight.ndim > 1 else 0.0), name
    assert ("lm_head.weight" in dict(model.named_parameters())) != tied


def test_adapters_keep_their_two_rates(tmp_path):
    config = runs.config(
        tmp_path, **IN_8_BITS, use_lora=True, lora_plus_ratio=8.0, weight_decay=0.1
    )
    for name, (dtype, rate, decay) in kinds(
        apply_lora(tiny.llama(), LoRAConfig(rank=64)), config
    ).items():
        small = "k_proj.lora_B" in name or "v_proj.lora_B" in name
        assert rate == pytest.approx(2.4e-2 if name.endswith("lora_B") else 3e-3), name
        assert (dtype, decay) == (torch.float32 if small else torch.uint8, 0.1), name


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mixed_precision": "bf16"},
        {"mixed_precision": "fp16"},
        {"use_lora": True, "lora_rank": 64, "lora_dropout": 0.0},
    ],
    ids=str,
)
def test_a_run_follows_the_one_with_states_in_fp32(tmp_path, changes):
    full = []
    ours = []
    for name, found, more in (("full", full, {}), ("ours", ours, IN_8_BITS)):
        runs.train(tmp_path / name, max_steps=12, max_grad_norm=0.5, **changes, **more)
        found += runs.trajectory(tmp_path / name)
    assert ours != full and ours[0] == full[0]
    for (_, loss, _), (_, our_loss, _) in zip(full, ours, strict=True):
        assert our_loss == pytest.approx(loss, rel=1e-2)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two processes need two cards, or none")
def test_two_processes_train_what_one_does(tmp_path):
    changes = {**IN_8_BITS, "max_steps": 4}
    test_ranks.train(tmp_path / "one", 4, **changes)
    test_ranks.train_by_two(tmp_path / "two", 4, **changes)
    steps = (
        torch.tensor(runs.trajectory(tmp_path / name), dtype=torch.float64)
        for name in ("one", "two")
    )
    torch.testing.assert_close(*steps, rtol=2e-3, atol=0.0)


class Breaks(Callback):
    def step_done(self, metrics):
        if metrics.step == 3:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_states_are_gone_on_with_bit_by_bit(tmp_path, precision):
    options = {**STEADY, **IN_8_BITS, "mixed_precision": precision}
    runs.train(tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        runs.train(tmp_path / "part", callbacks=[Breaks()], **options)
    runs.train(tmp_path / "part", resume=True, **options)
    left, right = (states(tmp_path / name, 6) for name in ("whole", "part"))
    assert left.keys() == right.keys() and all(equal(left[name], right[name]) for name in left)
    narrow = [name for name, tensor in left.items() if tensor.dtype == torch.uint8]
    assert "model.layers.0.mlp.up_proj.weight:exp_avg" in narrow and f"{narrow[0]}_amax" in left


def states(folder, step):
    return load_file(folder / "run" / "checkpoints" / f"step-{step:08d}" / "optimizer.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_a_run_does_not_go_on_with_states_of_the_other_kind(tmp_path, first):
    runs.train(tmp_path, max_steps=2, use_8bit_optimizer=first, **STEADY)
    said = (
        f"in {'8 bits' if first else 'fp32 or bf16'}, so use_8bit_optimizer={not first} "
        f".*use_8bit_optimizer={first}, or"
    )
    with pytest.raises(CheckpointError, match=said):
        runs.train(tmp_path, max_steps=4, use_8bit_optimizer=not first, resume=True, **STEADY)


def test_where_nothing_is_large_it_is_refused(tmp_path):
    with pytest.raises(
        ConfigurationError,
        match="use_8bit_optimizer=True cannot be honoured here: no trained matrix",
    ):
        runs.train(tmp_path, use_lora=True, lora_rank=4, **IN_8_BITS)


@pytest.mark.slow
def test_the_log_says_it(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        runs.train(tmp_path, max_steps=1, **IN_8_BITS)
    assert "8-bit AdamW (as asked, the moments of " in caplog.text
    runs.train(tmp_path / "full", max_steps=1)
    assert caplog.text.count("8-bit AdamW") == 1


@pytest.mark.parametrize("changes", [{}, {"use_lora": True}], ids=str)
def test_the_estimate_counts_the_bytes_that_there_are(tmp_path, changes, monkeypatch):
    fixed = []
    usual = needed_memory.estimate

    def estimate(model, step, weights):
        fixed.append((weights.trained, usual(model, step, weights)))
        return fixed[-1][1]

    monkeypatch.setattr(needed_memory, "estimate", estimate)
    sizes = []
    for more in ({}, IN_8_BITS):
        model = tiny.llama()
        config = runs.config(tmp_path, **changes, **more)
        model = apply_lora(model, LoRAConfig(rank=64)) if changes else model
        decide(Facts.of(config, present(model, True, True, pack_width=128)))
        optimizer = session.build_optimizer(model, config)
        trained = [p for p in model.parameters() if p.requires_grad]
        parts = [
            x
            for p in trained
            for name, x in optimizer.state_of(p).items()
            if name.startswith("exp")
        ]
        sizes.append(sum(x.nbytes for x in parts))
    count = sum(p.numel() for p in trained)
    assert (fixed[0][0] - fixed[1][0]) * count == pytest.approx(sizes[0] - sizes[1])
    assert fixed[0][1].fixed - fixed[1][1].fixed == pytest.approx(
        sizes[0] - sizes[1], abs=len(trained)
    )
