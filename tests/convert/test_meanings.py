"""Values that mean another thing here: computed, with the reason."""

import json

import pytest
import yaml

from chronicals.convert import convert

AXOLOTL = {"base_model": "m", "datasets": [{"path": "d"}], "learning_rate": 2e-4}
FACTORY = {"model_name_or_path": "m", "stage": "sft", "dataset": "d"}
TRL = {"model_name_or_path": "m", "dataset_name": "d"}

MEANT = [
    (FACTORY, {"stage": "dpo", "cutoff_len": 512}, {"max_seq_length": 1024}, "both together"),
    (FACTORY, {"stage": "kto", "cutoff_len": 512}, {"max_seq_length": 512}, ""),
    (AXOLOTL, {"max_steps": 10, "warmup_ratio": 0.25}, {"warmup_steps": 2}, "of 10 steps"),
    (FACTORY, {"max_steps": 10, "warmup_ratio": 0.25}, {"warmup_steps": 3}, "of 10 steps"),
    (TRL, {"warmup_steps": 0.1}, {"warmup_ratio": 0.1}, "a share of the steps"),
    (AXOLOTL, {"eta_min": 2e-5}, {"min_lr_ratio": 0.1}, "of the peak"),
    (AXOLOTL, {"num_epochs": 0.5}, {"num_epochs": 1}, "weight of data"),
    (AXOLOTL, {"batch_size": 12, "micro_batch_size": 4}, {"gradient_accumulation_steps": 3}, "12"),
    (TRL, {"eval_strategy": "steps", "eval_steps": 0.1, "max_steps": 50}, {"eval_steps": 5}, "50"),
    (
        TRL,
        {"reward_funcs": ["lib.f", "own/model"], "reward_weights": [0.5, 2]},
        {"rewards": ["lib:f=0.5", "own/model=2"]},
        "module:function",
    ),
    (
        TRL,
        {"reward_funcs": "lib.f", "num_generations": 4, "per_device_train_batch_size": 8},
        {"grpo.prompts": 2, "grpo.answers": 4},
        "2 prompts of 4 answers",
    ),
    (FACTORY, {"dataset": "a_demo,b"}, {"data": ["a_demo", "b"]}, "write the files"),
    (TRL, {"dataset_config": "en", "dataset_train_split": "train[:9]"},
     {"data": [{"path": "d", "subset": "en", "split": "train[:9]"}]}, ""),
    (TRL, {"report_to": ["trackio", "wandb"]}, {"trackers": ["wandb"]}, "trackio"),
    (FACTORY, {"pissa_init": True, "pissa_iter": 4}, {"lora_init": "pissa_niter_4"}, ""),
    (AXOLOTL, {"gradient_checkpointing": True, "optimizer": "paged_adamw_32bit"},
     {"memory": ["offload_optimizer_states", "recompute_layers"]}, ""),
]  # fmt: skip


def converted(folder, base, changes):
    path = folder / "theirs.yaml"
    path.write_text(yaml.safe_dump({**base, **changes}))
    return convert(path)


@pytest.mark.parametrize(("base", "changes", "fields", "said"), MEANT)
def test_a_value_that_means_another_thing_is_computed_and_said(
    base, changes, fields, said, tmp_path
):
    conversion = converted(tmp_path, base, changes)
    found = {name: conversion.fields.get(name) for name in fields}
    for name, value in fields.items():
        assert found[name] == (pytest.approx(value) if isinstance(value, float) else value)
    reasons = " ".join(
        line.answer.reason for line in conversion.lines if line.setting.key in changes
    )
    assert said in reasons
    yaml.safe_load(conversion.text())


@pytest.mark.parametrize(
    ("base", "changes", "said"),
    [
        (AXOLOTL, {"lr_scheduler": "rex"}, "'rex' is not part of this version"),
        (AXOLOTL, {"load_in_8bit": True}, "8 bits is not part of this version"),
        (AXOLOTL, {"val_set_size": 100}, "100 rows: a share is held out here"),
        (AXOLOTL, {"val_set_size": 0.1, "evals_per_epoch": 4}, "set eval_steps to 1/4 of them"),
        (FACTORY, {"finetuning_type": "oft"}, "'oft' is not part of this version"),
        (FACTORY, {"max_samples": 10}, "set weight to 10 over its number of rows"),
    ],
)
def test_what_is_not_there_is_named_with_what_to_do(base, changes, said, tmp_path):
    lines = converted(tmp_path, base, changes).lines
    assert said in " ".join(one.answer.reason for one in lines if one.answer.kind == "not there")


def test_the_most_rows_of_data_that_are_here_are_a_weight(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"instruction": str(n), "input": "", "target": str(n)} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    index = {"own": {"file_name": "rows.jsonl", "columns": {"response": "target"}}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(index))
    conversion = converted(tmp_path, FACTORY, {"dataset": "own", "max_samples": 10})
    (entry,) = conversion.fields["data"]
    assert entry["weight"] == 0.25 and entry["columns"] == {"output": "target"}
    assert entry["path"].endswith("rows.jsonl") and conversion.recipe()


def test_evaluations_of_an_epoch_are_steps_where_rows_are_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n' * 100)
    changes = {"datasets": [{"path": "d.jsonl"}], "val_set_size": 0.2, "evals_per_epoch": 4}
    assert converted(tmp_path, AXOLOTL, changes).fields["eval_steps"] == 20


def test_trl_is_told_that_its_masks_depend_on_rows_that_are_not_here(tmp_path):
    assert "train_on: all" in converted(tmp_path, TRL, {}).text()
    assert "train_on: all" not in converted(tmp_path, TRL, {"assistant_only_loss": True}).text()
