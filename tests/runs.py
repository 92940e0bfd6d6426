"""Short training runs that several tests share."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tiny
from chronicals.config.config import ChronicalsConfig, laid_over
from chronicals.training import ChronicalsTrainer, TrainingResult
from chronicals.training.run import report
from chronicals.training.run.callbacks import read_metrics
from comparison import equal

if "pytest" not in sys.modules:  # a program that a test starts; in tests, conftest.py sees to it
    report._figure = lambda metrics: b"<svg/>"

SHORT = [
    "--max-steps",
    "2",
    "--max-seq-length",
    "128",
    "--cache-dir",
    "tokens",
    "--no-use-torch-compile",
]
"""Of a run by the command."""


FULL = {"mixed_precision": "bf16", "use_lora": False, "gradient_accumulation_steps": 1}
"""Fields of a plan of full fine-tuning, with one micro-batch a step."""


def config(folder: Path, **changes: Any) -> ChronicalsConfig:
    usual = {
        "learning_rate": 3e-3,
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_seq_length": 128,
        "max_steps": 6,
        "mixed_precision": "fp32",
        "report_samples": 0,
        "use_torch_compile": False,  # on a card every layer would be compiled, for minutes
        "output_dir": folder / "run",
        "cache_dir": folder / "tokens",
    }
    return ChronicalsConfig(**laid_over(usual, changes))


def train(
    folder: Path,
    rows: Any = None,
    model: Any = None,
    resume: bool = False,
    callbacks: Any = (),
    eval_rows: Any = None,
    **changes: Any,
) -> TrainingResult:
    """Train a tiny Llama; ``changes`` are fields of the configuration."""
    trainer = ChronicalsTrainer(
        model or tiny.llama(), tiny.tokenizer(), config(folder, **changes), callbacks=callbacks
    )
    return trainer.train(rows or tiny.chat_rows(), eval_rows, resume=resume)


def trajectory(folder: Path) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of each step of a run."""
    lines = read_metrics(folder / "run" / "metrics.jsonl")
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """What the run ended with."""
    from safetensors.torch import load_file

    (path,) = (folder / "run" / "model").glob("*.safetensors")
    return load_file(path)


def assert_same_bits(folder: Path, whole: Path, what: str = "") -> None:
    """Two runs have the same steps, losses, gradient norms and weights, to the bit."""
    expected = trajectory(whole)
    assert expected and trajectory(folder) == expected, what
    left = weights(folder)
    right = weights(whole)
    assert right and left.keys() == right.keys(), what
    for name, weight in right.items():
        assert equal(left[name], weight), f"{name} {what}"


def assert_same_steps(folder: Path, whole: Path, tolerance: float) -> None:
    """Two runs have the same steps, and losses and gradient norms that differ by rounding.

    Args:
        folder: of one run.
        whole: of the other run.
        tolerance: relative.
    """
    left = np.array(trajectory(folder))
    right = np.array(trajectory(whole))
    assert len(right) and left.shape == right.shape
    assert np.allclose(left, right, rtol=tolerance, atol=0.0)


EXACT = 2e-6
"""Relative: fp32 sums in another order."""


def assert_one_trajectory(left: Any, right: Any, tolerance: float = EXACT) -> None:
    """Compare what two runs gave as ``trajectory``."""
    left = np.array(left)
    right = np.array(right)
    assert left.shape == right.shape
    deviation = (left[:, 1:] - right[:, 1:]) / right[:, 1:]
    # Rounding grows along a run: each step may add its own.
    allowed = tolerance * (1 + left[:, :1])
    assert (np.abs(deviation) <= allowed).all(), np.abs(deviation).max(0)
    # One-sided drift: the mean must be far within what single steps may deviate.
    assert (np.abs(deviation.mean(0)) <= 0.7 * allowed.max()).all()
