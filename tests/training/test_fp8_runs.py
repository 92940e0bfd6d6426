"""use_fp8 in the trainer: it trains as without, and is refused where it cannot run."""

import copy
import logging

import pytest
import torch

import runs
import tiny
from chronicals.config import ConfigurationError
from chronicals.memory import recompute
from chronicals.patching import layer_policies, patch_parts
from chronicals.patching.fused_weights import DEVICES, MERGED, PRODUCT_FORMATS
from chronicals.policies import facts, fp8
from chronicals.training import Callback
from comparison import equal


@pytest.fixture
def fused_anywhere(let_return, set_constants):
    """Fused layers, which a run has on a card only, and FP8 for small products."""
    let_return(facts, why_not_fused=None)
    set_constants(layer_policies, MIN_FP8_WIDTH=16)
    model = tiny.llama()
    patch_parts(model, whole_layers=True)
    return model


ADAPTERS = {"use_lora": True, "lora_rank": 4, "lora_dropout": 0.0, "use_lora_plus": False}


LEAN = ["offload_frozen_weights", "recompute_layers"]


CALM = {"learning_rate": 1e-3}
"""At three times this the gradient norm leaps in the fifth step, and any rounding moves it by a
tenth and more.
"""


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("changes", "fall"), [(CALM, 0.9), (ADAPTERS, 0.98)], ids=["full", "lora"])
def test_trains_as_without(changes, fall, tmp_path, fused_anywhere, caplog):
    options = {"mixed_precision": "bf16", "max_steps": 20, **changes}
    runs.train(tmp_path / "without", **options)
    with caplog.at_level(logging.INFO):
        runs.train(tmp_path / "with", model=fused_anywhere, use_fp8=True, **options)
    assert "use_fp8: 8 of 8 products of fused layers" in caplog.text
    without, ours = (runs.trajectory(tmp_path / name) for name in ("without", "with"))
    assert without[-1][1] < fall * without[0][1]
    for (_, loss, norm), (_, our_loss, our_norm) in zip(without, ours, strict=True):
        assert our_loss == pytest.approx(loss, rel=0.01) and our_norm == pytest.approx(
            norm, rel=0.1
        )
    assert [row[1] for row in ours] != [row[1] for row in without]
    assert not any(
        PRODUCT_FORMATS in vars(module) for module in fused_anywhere.modules()
    )  # the run is over


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "memory", [["recompute_layers"], ["recompute_elementwise"], ["tiled_mlp"]], ids=str
)
def test_policies_change_nothing_under_full_fine_tuning(
    memory, tmp_path, fused_anywhere, set_constants
):
    """Where what is kept is in 8 bits; a tile has a scale of its own."""
    set_constants(recompute, TILE=48)
    options = {"mixed_precision": "bf16", "max_steps": 6, "use_fp8": True, **CALM}
    for name, policies in (("kept", []), ("lean", memory)):
        runs.train(tmp_path / name, model=copy.deepcopy(fused_anywhere), memory=policies, **options)
    kept, lean = (runs.trajectory(tmp_path / name) for name in ("kept", "lean"))
    if memory == ["tiled_mlp"]:
        assert [loss for _, loss, _ in lean] == pytest.approx(
            [loss for _, loss, _ in kept], rel=0.01
        ) and lean != kept
    else:
        assert lean == kept


@pytest.mark.slow
def test_weights_that_wait_change_nothing(tmp_path, fused_anywhere, caplog):
    options = {"mixed_precision": "bf16", "max_steps": 6, "use_fp8": True, **ADAPTERS}
    with caplog.at_level(logging.INFO):
        for name, memory in (("there", []), ("away", ["offload_frozen_weights"]), ("lean", LEAN)):
            runs.train(
                tmp_path / name, model=copy.deepcopy(fused_anywhere), memory=memory, **options
            )
    there, *others = (runs.trajectory(tmp_path / name) for name in ("there", "away", "lean"))
    assert others == [there, there]
    assert len([line for line in caplog.messages if "GiB wait in host memory" in line]) == 2


@pytest.mark.slow
def test_weights_that_wait_come_back(tmp_path, fused_anywhere):
    before = {name: p.detach().clone() for name, p in fused_anywhere.named_parameters()}
    options = {
        "mixed_precision": "bf16",
        "use_fp8": True,
        "memory": ["offload_frozen_weights"],
        **ADAPTERS,
    }
    runs.train(tmp_path, model=fused_anywhere, max_steps=2, **options)
    assert not any(
        DEVICES in vars(module) or MERGED in vars(module) for module in fused_anywhere.modules()
    )
    after = {
        name.replace(".base_layer", ""): p
        for name, p in fused_anywhere.named_parameters()
        if "lora_" not in name
    }
    assert {p.device for p in after.values()} == {fused_anywhere.device}
    assert all(equal(p, before[name].to(p)) for name, p in after.items())


def test_weights_come_back_where_a_run_does_not_begin(tmp_path, fused_anywhere):
    class Down(Callback):
        def run_began(self, run):
            raise ConnectionError("the tracker is down")

    options = {
        "mixed_precision": "bf16",
        "use_fp8": True,
        "memory": ["offload_frozen_weights"],
        **ADAPTERS,
    }
    with pytest.raises(ConnectionError):
        runs.train(tmp_path, model=fused_anywhere, callbacks=[Down()], **options)
    assert not any(DEVICES in vars(module) for module in fused_anywhere.modules())
    assert not any(
        isinstance(m, torch.nn.Linear) and "forward" in vars(m) for m in fused_anywhere.modules()
    )


def test_with_nothing_frozen_there_is_nothing_to_move(tmp_path, fused_anywhere):
    with pytest.raises(
        ConfigurationError, match="every weight that runs in FP8 is trained; leave it out"
    ):
        runs.train(
            tmp_path,
            model=fused_anywhere,
            use_fp8=True,
            mixed_precision="bf16",
            memory=["offload_frozen_weights"],
        )


@pytest.mark.slow
def test_layers_that_do_not_run_fused_are_said(tmp_path, fused_anywhere, caplog):
    layers = fused_anywhere.get_decoder().layers
    layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    runs.train(tmp_path, model=fused_anywhere, use_fp8=True, mixed_precision="bf16", max_steps=2)
    assert "some layers do not run fused and stay in 16 bit: up_proj has hooks" in caplog.text
    for linear in (layers[1].mlp.up_proj, *(layer.self_attn.q_proj for layer in layers)):
        linear.register_forward_hook(lambda *_: None)
    with pytest.raises(
        ConfigurationError,
        match="use_fp8=True cannot be.*do not run fused: q_proj has hooks.*leave it out",
    ):
        runs.train(tmp_path / "none", model=fused_anywhere, use_fp8=True, mixed_precision="bf16")


def test_what_cannot_run_is_refused(tmp_path, let_return):
    small = "no product of this model has inputs and outputs of a harmonic mean of 2304"
    reason = small if torch.cuda.is_available() else "only fused decoder layers"
    with pytest.raises(ConfigurationError, match=f"use_fp8=True.*{reason}.*leave it out"):
        runs.train(tmp_path, use_fp8=True, mixed_precision="bf16")
    let_return(facts, why_not_fused=None)
    with pytest.raises(
        ConfigurationError, match=r"batch_size \* max_seq_length=200 is no multiple of 16"
    ):
        runs.train(tmp_path / "rows", use_fp8=True, mixed_precision="bf16", max_seq_length=100)
    let_return(fp8, lacks_fp8="NVIDIA A100 (8.0) has no FP8")
    with pytest.raises(ConfigurationError, match=r"NVIDIA A100 \(8.0\) has no FP8; leave it out"):
        runs.train(tmp_path / "card", use_fp8=True, mixed_precision="bf16")
