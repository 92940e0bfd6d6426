"""QLoRA with fp16 products and a loss scale, for cards without bf16: it learns what the
dequantised weights do in fp32.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

import runs
import tiny
from chronicals.models import load_model
from chronicals.quantization import Linear4bit
from chronicals.training.run.callbacks import read_metrics
from chronicals.training.step import optimizer
from comparison import equal

ROUNDING = 2.0**-11
"""Of fp16, relative; a loss is a mean of many roundings, a gradient passes through them all."""

GIVEN = {
    "lora_rank": 8,
    "lora_dropout": 0.0,
    "learning_rate": 1e-3,
    "lr_scheduler": "constant",
    "warmup_steps": 0,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny.llama(attention_bias=True).save_pretrained(folder)
    return folder


def packed(place):
    return load_model(place, torch.float32, quantization="nf4")


def dequantised(place):
    model = packed(place)
    for path, layer in list(model.named_modules()):
        if isinstance(layer, Linear4bit):
            model.set_submodule(path, layer.plain())
    return model


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_its_losses_and_norms_are_those_of_fp32_but_for_rounding(tmp_path, place, seed, adapters):
    smooth = {
        "adam_epsilon": 1e-2,
        "learning_rate": 0.01,
        "use_lora_plus": False,
    }  # else the first update is the sign
    given = {**GIVEN, **smooth, **adapters, "seed": seed}
    model = packed(place)
    runs.train(tmp_path / "ours", model=model, quantization="nf4", mixed_precision="fp16", **given)
    layers = [layer for layer in model.modules() if isinstance(layer, Linear4bit)]
    assert layers and all(layer.dtype == torch.float16 for layer in layers), "products are in fp16"
    runs.train(
        tmp_path / "fp32", model=dequantised(place), use_lora=True, mixed_precision="fp32", **given
    )
    runs.train(
        tmp_path / "sixteen",
        model=load_model(place, torch.float32),
        use_lora=True,
        mixed_precision="fp32",
        **given,
    )
    ours, exact, other = (runs.trajectory(tmp_path / name) for name in ("ours", "fp32", "sixteen"))
    assert len(ours) == 6
    for (step, loss, norm), (_, exact_loss, exact_norm) in zip(ours, exact, strict=True):
        assert loss == pytest.approx(exact_loss, rel=ROUNDING), step
        assert norm == pytest.approx(exact_norm, rel=8 * ROUNDING), step
    assert ours != exact and ours[-1][1] < 0.99 * ours[0][1], "rounded, and it learns"
    assert abs(ours[0][1] - other[0][1]) > 5 * abs(ours[0][1] - exact[0][1]), (
        "4 bits make a difference"
    )


def checkpoints(folder):
    """Of every step: the scale that the next one has, and the adapters."""
    found = {}
    for place in sorted((folder / "run" / "checkpoints").glob("step-*")):
        state = json.loads((place / "state.json").read_text())
        found[state["step"]] = (
            state["precision"]["scale"],
            load_file(place / "model" / "adapter_model.safetensors"),
        )
    return found


def overflowing(folder, place, set_constants, steps, **changes):
    """A run that begins with a scale under which gradients exceed fp16, and doubles it after two
    good steps; whether each was skipped."""
    set_constants(optimizer, START_SCALE=2.0**26, GROWTH_INTERVAL=2)
    given = {
        **GIVEN,
        "save_steps": 1,
        "save_total_limit": 99,
        "quantization": "nf4",
        "mixed_precision": "fp16",
        **changes,
    }
    runs.train(folder, model=packed(place), max_steps=steps, **given)
    return {
        line["step"]: line["skipped"]
        for line in read_metrics(folder / "run" / "metrics.jsonl")
        if "loss" in line
    }


@pytest.mark.slow
def test_an_overflow_changes_nothing_and_the_scale_falls_and_recovers(
    tmp_path, place, set_constants
):
    skipped = overflowing(tmp_path, place, set_constants, 16)
    scale = 2.0**26
    before = None
    good = 0
    assert skipped[1] and not all(skipped.values())
    for step, (after, adapters) in sorted(checkpoints(tmp_path).items()):
        same = before is not None and all(equal(x, before[name]) for name, x in adapters.items())
        good = 0 if skipped[step] else good + 1
        if skipped[step]:
            assert after == scale / 2 and (step == 1 or same), step
            assert step > 1 or not any(
                x.count_nonzero() for name, x in adapters.items() if "lora_B" in name
            )
        else:
            assert after == (2 * scale if good == 2 else scale) and not same, step
            good %= 2
        assert all(torch.isfinite(x).all() for x in adapters.values())
        scale = after
        before = adapters
    first = min(step for step, gone in skipped.items() if not gone)
    found = [scale for step, (scale, _) in sorted(checkpoints(tmp_path).items()) if step >= first]
    assert max(found) > found[0] and any(b == a / 2 for a, b in zip(found, found[1:])), (
        "it rises, and falls again"
    )


@pytest.mark.slow
@pytest.mark.parametrize("stop", [2, 9], ids=["falling", "recovering"])
def test_a_resumed_run_has_the_scale_that_it_left(tmp_path, place, set_constants, stop):
    whole = overflowing(tmp_path / "whole", place, set_constants, 14)
    overflowing(
        tmp_path / "parts",
        place,
        set_constants,
        max(stop, min(s for s, gone in whole.items() if not gone)),
    )
    assert overflowing(tmp_path / "parts", place, set_constants, 14, resume=True) == whole
    parts, through = (
        [loss for _, loss, _ in runs.trajectory(tmp_path / name)] for name in ("parts", "whole")
    )
    assert parts == through
    one, two = (checkpoints(tmp_path / name) for name in ("whole", "parts"))
    assert {step: scale for step, (scale, _) in one.items()} == {
        step: scale for step, (scale, _) in two.items()
    }
    assert all(equal(x, two[14][1][name]) for name, x in one[14][1].items())
