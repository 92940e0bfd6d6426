"""Settings of other tools' files: each with its line; the tool is told by its keys."""

import pytest

from chronicals.config import ConfigurationError
from chronicals.convert import read


def written(folder, text, name="theirs.yaml"):
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "tool", "objective"),
    [
        ("base_model: m\nsequence_len: 64\n", "Axolotl", "sft"),
        ("base_model: m\nrl: kto\ndatasets: []\n", "Axolotl", "kto"),
        ("base_model: m\ndatasets: [{path: a, type: completion}]\n", "Axolotl", "pretraining"),
        ("base_model: m\ndatasets: [{path: a, type: {format: x}}]\n", "Axolotl", "sft"),
        ("model_name_or_path: m\nstage: pt\n", "LLaMA-Factory", "pretraining"),
        ("model_name_or_path: m\nstage: dpo\npref_loss: orpo\n", "LLaMA-Factory", "orpo"),
        ("model_name_or_path: m\ndataset_name: d\n", "TRL", "sft"),
        ("model_name_or_path: m\ndataset_name: d\nreward_funcs: f\n", "TRL", "grpo"),
    ],
)
def test_the_tool_and_the_objective_are_told_by_the_keys(text, tool, objective, tmp_path):
    theirs = read(written(tmp_path, text))
    assert (theirs.tool, theirs.objective) == (tool, objective)


def test_a_setting_has_its_line_and_the_block_it_stands_in(tmp_path):
    text = "base_model: m\n\n# a remark\ntrl:\n  beta: 1e-3\nadapter: lora\n"
    settings = {one.name: one for one in read(written(tmp_path, text)).settings}
    assert [(name, one.line) for name, one in settings.items()] == [
        ("base_model", 1),
        ("trl.beta", 5),
        ("adapter", 6),
    ]
    assert settings["trl.beta"].value == 0.001 and settings["trl.beta"].key == "beta"


def test_a_file_of_no_tool_is_refused_with_the_keys_looked_for(tmp_path):
    with pytest.raises(ConfigurationError) as refused:
        read(written(tmp_path, "learning_rate: 1\nmodel: m\n"))
    message = str(refused.value)
    for word in ("base_model", "finetuning_type", "dataset_name", "learning_rate, model"):
        assert word in message


COMMAND = """#!/bin/sh
# trl sft --learning_rate 9
accelerate launch --num_processes 4 --config_file zero3.yaml --num_machines 1 \\
    examples/scripts/dpo.py \\
    --model_name_or_path m --dataset_name "a b" \\
    --learning_rate=5e-7 --lora_target_modules q_proj v_proj \\
    --use_peft --no_remove_unused_columns
"""


def test_a_command_line_is_read_behind_its_launcher(tmp_path):
    theirs = read(written(tmp_path, COMMAND, "train.sh"))
    assert (theirs.tool, theirs.command, theirs.cards, theirs.objective) == ("TRL", "dpo", 4, "dpo")
    assert {one.name: one.value for one in theirs.settings} == {
        "model_name_or_path": "m",
        "dataset_name": "a b",
        "learning_rate": 5e-7,
        "lora_target_modules": ["q_proj", "v_proj"],
        "use_peft": True,
        "remove_unused_columns": False,
    }
    assert {one.line for one in theirs.settings} == {3}


def test_a_command_overrides_the_file_that_it_names(tmp_path):
    written(tmp_path, "model_name_or_path: m\nlearning_rate: 1e-4\n", "sft.yaml")
    command = "trl sft --config sft.yaml --learning_rate 2e-4"
    theirs = read(written(tmp_path, command, "train.sh"))
    assert theirs.get("model_name_or_path") == "m" and theirs.get("learning_rate") == 2e-4
    factory = written(tmp_path, "llamafactory-cli train f.yaml --stage kto", "f.sh")
    written(tmp_path, "model_name_or_path: m\nstage: sft\n", "f.yaml")
    assert read(factory).objective == "kto" and read(factory).tool == "LLaMA-Factory"


def test_a_command_that_does_not_close_a_quotation_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="line 2: no command line"):
        read(written(tmp_path, "\ntrl sft --model_name_or_path 'm", "train.sh"))


def test_settings_that_another_mapping_gives_are_read(tmp_path):
    """YAML's ``<<``, at the head and within a block."""
    file = tmp_path / "config.yaml"
    file.write_text(
        "_usual: &usual\n  learning_rate: 2e-4\n  lora_r: 8\n"
        "base_model: m\n<<: *usual\nlora_r: 16\nsequence_len: 64\nadapter: lora\n"
    )
    found = {setting.name: (setting.value, setting.line) for setting in read(file).settings}
    assert found["learning_rate"] == (2e-4, 5)
    assert found["lora_r"] == (16, 6) and "<<" not in found
