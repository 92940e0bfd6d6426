"""The self-test of the kernels: everything passes here, and what is wrong is named."""

import importlib.metadata
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from chronicals.verification import (
    inspect_machine,
    machine,
    missing_extras,
    self_test,
    untested_versions,
)

MODULE = sys.modules["chronicals.verification.self_test"]


def test_every_kernel_passes_here():
    results = self_test()
    assert {result.name for result in results} >= {
        "rmsnorm",
        "layernorm",
        "softmax",
        "add_rmsnorm",
        "swiglu",
        "geglu",
        "token_log_probability",
        "qk_rope",
        "qk_norm_rope",
        "qkv_norm_rope",
        "linear_cross_entropy",
        "linear_distillation",
        "attention",
        "fp8_linear",
        "adamw",
        "gradient_norm",
        "dropped_products",
    }
    for result in results:
        assert result.passed, result
        assert 0 < result.error < (0.1 if result.name == "fp8_linear" else 0.05)


def test_a_wrong_kernel_is_found(plant):
    plant(MODULE, "fused_swiglu", lambda right, gate, up: 1.02 * right(gate, up))
    assert [result.name for result in self_test() if not result.passed] == ["swiglu"]


def test_a_wrong_norm_of_gradients_is_found(plant):
    """Every step is clipped by it."""
    plant(MODULE, "gradient_norm", lambda right, tensors: right(tensors[1:]))
    assert [result.name for result in self_test() if not result.passed] == ["gradient_norm"]


@pytest.mark.parametrize("name", ["dropped_gradient_of_down", "add_dropped_product_"])
def test_another_mask_in_the_backward_pass_is_found(plant, name):
    plant(
        MODULE,
        name,
        lambda right, *given: right(*given[:-2], given[-2] + 1, given[-1]),
    )
    assert [result.name for result in self_test() if not result.passed] == ["dropped_products"]


def test_a_wrong_scale_is_found(plant):
    plant(MODULE, "fp8_linear", lambda right, x, w: 1.1 * right(x, w))
    assert [result.name for result in self_test() if not result.passed] == ["fp8_linear"]


def test_the_machine_is_described():
    found = inspect_machine()
    assert torch.__version__.startswith(found["torch"])
    assert found["cores"] >= 1


def test_what_is_missing_is_named_with_the_command_that_installs_it(monkeypatch):
    version = importlib.metadata.version

    def without(name):
        if name in ("wandb", "alembic"):
            raise importlib.metadata.PackageNotFoundError(name)
        return {"tensorboard": "2.1.0", "torch": "2.2.0"}.get(name) or version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    lacking = missing_extras()
    assert (
        lacking["wandb"]
        == "wandb is not installed: curves in Weights & Biases; pip install 'chronicals[wandb]'"
    )
    assert "alembic is not installed: " in lacking["mlflow"] and "data" not in lacking
    assert lacking["tensorboard"].startswith("tensorboard 2.1.0 is installed and >=2.18 is needed")
    assert [words.partition(" is installed and")[0] for words in untested_versions()] == [
        "torch 2.2.0"
    ]


def test_every_extra_for_users_has_a_purpose():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"].keys() - {"dev"} == machine.PURPOSES.keys()
