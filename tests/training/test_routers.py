"""What a run shows of routers, and says where their losses train none."""

from types import SimpleNamespace

import pytest
import torch

import families
import runs
import tiny
from chronicals.config import ConfigurationError
from chronicals.moe.router_settings import RouterSettings
from chronicals.training.run.callbacks import read_metrics
from chronicals.training.step.routers import keep_anchor
from comparison import equal

SHOWN = {
    f"router/{name}{end}"
    for name in ("busiest", "idle", "entropy", "dropped")
    for end in ("", "_worst")
}


def routed(name, **changes):
    torch.manual_seed(3)
    return families.routed(name, vocab_size=300, max_position_embeddings=512, **changes)


def lines_of(folder, model, **fields):
    fields = {"max_steps": 2, "batch_size": 2, "gradient_accumulation_steps": 1, **fields}
    runs.train(folder, tiny.chat_rows(20), model, **fields)
    return [line for line in read_metrics(folder / "run" / "metrics.jsonl") if "loss" in line]


def shown(line):
    return {name for name in line if name.startswith("router/")}


@pytest.mark.parametrize("name", families.ROUTED)
def test_every_family_trains_its_routers_and_shows_them(name, tmp_path):
    changes = families.GROUPED.get(name, {})
    router = {
        "balance": 0.1,
        "z": 0.01,
        "temporal": 0.01,
        "locality": 0.01,
        "anchor": 0.1,
        "anchor_tokens": 32,
    }
    model = routed(name, **changes)
    ends = ("gate.weight", "router.weight")
    before = {
        path: p.detach().clone() for path, p in model.named_parameters() if path.endswith(ends)
    }
    lines = lines_of(tmp_path, model, router=router)
    for line in lines:
        assert shown(line) == SHOWN | {
            f"router/{loss}" for loss in router if loss != "anchor_tokens"
        }
        assert line["router/dropped"] == line["router/dropped_worst"] == 0.0
        assert line["router/busiest_worst"] >= line["router/busiest"] >= 1.0
        assert (
            line["router/idle_worst"] >= line["router/idle"]
            and 0 < line["router/entropy_worst"] <= line["router/entropy"]
        )
    assert lines[0]["router/anchor"] == 0.0
    assert before and all(
        not equal(p, before[path]) for path, p in model.named_parameters() if path in before
    )


@pytest.mark.slow
def test_metrics_alone_change_nothing_else(tmp_path):
    plain = lines_of(tmp_path / "plain", routed("DeepseekV3"))
    with_them = lines_of(tmp_path / "with", routed("DeepseekV3"), router={"metrics": True})
    assert all(shown(line) == SHOWN for line in with_them) and not any(
        shown(line) for line in plain
    )
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in plain] == [line[name] for line in with_them]


@pytest.mark.slow
def test_the_loss_of_the_class_comes_with_metrics(tmp_path):
    lines = lines_of(
        tmp_path, routed("Mixtral", output_router_logits=True, router_aux_loss_coef=0.1)
    )
    assert all(shown(line) == SHOWN and line["router_loss"] > 0 for line in lines)


LORA = {"use_lora": True, "lora_rank": 4, "lora_target_modules": "q_proj,o_proj"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, end", [("Qwen3Moe", "mlp.gate.weight"), ("GptOss", "mlp.router.weight")]
)
def test_losses_that_train_no_router_are_said_with_the_remedy(name, end, tmp_path, caplog):
    router = {"balance": 0.1, "z": 0.01}
    lines_of(tmp_path / "without", routed(name), router=router, **LORA)
    (said,) = [
        record.getMessage()
        for record in caplog.records
        if "no router is trained" in record.getMessage()
    ]
    assert (
        "router.balance=0.1, router.z=0.01: no router is trained" in said
        and f"add {end} to lora_target_parameters" in said
    )
    caplog.clear()
    model = routed(name)
    lines_of(tmp_path / "with", model, router=router, **LORA, lora_target_parameters=end)
    assert "no router is trained" not in caplog.text
    changed = [
        p
        for path, p in model.named_parameters()
        if end.split(".")[1] in path.split(".") and "lora_B" in path
    ]
    assert changed and all(p.abs().sum() > 0 for p in changed)


@pytest.mark.slow
def test_frozen_routers_and_the_loss_of_the_class_are_said(tmp_path, caplog):
    model = routed("Mixtral", output_router_logits=True, router_aux_loss_coef=0.1)
    lines_of(tmp_path / "adapters", model, **LORA)
    assert "output_router_logits=True: no router is trained" in caplog.text
    caplog.clear()
    model = routed("Olmoe")
    for path, parameter in model.named_parameters():
        parameter.requires_grad_("gate.weight" not in path)
    lines_of(tmp_path / "frozen", model, router={"z": 0.01})
    assert "let mlp.gate.weight require a gradient" in caplog.text
    caplog.clear()
    lines_of(tmp_path / "anchor", routed("Olmoe"), router={"anchor": 0.01}, **LORA)
    assert "no router is trained" not in caplog.text


def test_an_anchor_beside_divided_weights_is_refused(tmp_path):
    """A replay would look up tokens in a part of the embedding."""
    divided = {"sharding": SimpleNamespace(how="weights")}
    session = SimpleNamespace(
        objective=SimpleNamespace(router=RouterSettings(anchor=0.1)),
        presented=None,
        precision=SimpleNamespace(device=None),
        decisions=divided,
    )
    with pytest.raises(
        ConfigurationError, match=r"router\.anchor=0\.1: .*take sharding: optimizer"
    ):
        keep_anchor(session, None, tmp_path, None)
