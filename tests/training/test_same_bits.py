"""What killed runs are compared by finds each difference (``runs.assert_same_bits``)."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    runs.train(folder, max_steps=2)
    return folder


def another_bit(weights):
    first = next(iter(weights.values())).view(-1)[:1]
    first.view(torch.uint8)[0] ^= 1


def a_weight_less(weights):
    weights.pop(next(iter(weights)))


def another_loss(lines):
    lines[-1]["loss"] *= 1 + 1e-12


def a_step_less(lines):
    del lines[-1]


def no_steps(lines):
    lines.clear()


@pytest.mark.parametrize("change", [another_bit, a_weight_less])
def test_other_weights_are_found(change, whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "copy")
    runs.assert_same_bits(folder, whole)
    (path,) = (folder / "run" / "model").glob("*.safetensors")
    weights = load_file(path)
    change(weights)
    save_file(weights, path)
    with pytest.raises(AssertionError):
        runs.assert_same_bits(folder, whole)


@pytest.mark.parametrize("change", [another_loss, a_step_less, no_steps])
def test_other_steps_are_found(change, whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "copy")
    path = folder / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    change(steps)
    path.write_text("".join(json.dumps(line) + "\n" for line in steps))
    with pytest.raises(AssertionError):
        runs.assert_same_bits(folder, whole)
    if not steps:
        with pytest.raises(AssertionError):
            runs.assert_same_bits(folder, folder)
