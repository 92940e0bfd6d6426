"""Names of other trainers are answered with ours, in the configuration, the recipe and the adapters' own."""

import dataclasses

import pytest

from chronicals.config import ChronicalsConfig, ConfigurationError, Recipe
from chronicals.config.foreign import (
    INSTEAD,
    NOT_SHOWN,
    NOWHERE,
    OBJECTIVE_NAMES,
    OURS,
    RENAMED,
    SETTING,
    SETTINGS,
    TURNED_OFF,
    suggestion,
)
from chronicals.lora import LoRAConfig
from chronicals.objectives import registry

FIELDS = [field.name for field in dataclasses.fields(Recipe)]

MEANT = {
    "lr": (1e-4, "use learning_rate=0.0001"),
    "num_train_epochs": (3, "use num_epochs=3"),
    "per_device_train_batch_size": (2, "use batch_size=2"),
    "micro_batch_size": (2, "use batch_size=2"),
    "max_length": (512, "use max_seq_length=512"),
    "max_seq_len": (512, "use max_seq_length=512"),
    "cutoff_len": (512, "use max_seq_length=512"),
    "sequence_len": (512, "use max_seq_length=512"),
    "lora_r": (8, "use lora_rank=8"),
    "r": (8, "use lora_rank=8"),
    "target_modules": (["q_proj"], "use lora_target_modules=['q_proj']"),
    "optim": (
        "adamw_torch",
        "use use_8bit_optimizer=True or optimizer_state_dtype='bf16' for smaller states, memory for states that are paged; "
        "the optimizer is AdamW",
    ),
    "bf16": (True, "use mixed_precision='bf16'"),
    "gradient_checkpointing": (True, "use use_gradient_checkpointing=True"),
    "packing": (True, "use use_sequence_packing=True"),
    "report_to": ("wandb", "use trackers='wandb'"),
    "val_set_size": (0.1, "use validation_split=0.1"),
    "adapter": ("lora", "use use_lora=True"),
    "logging_steps": (10, "leave it out: every step is a line of metrics.jsonl"),
    "model_name_or_path": ("m", "use model='m'"),
    "load_best_model_at_end": (True, "use keep='best', the default where something is held out"),
    "fp16": (False, "leave it out"),
    "use_qlora": (None, "leave it out"),
    "quantization_bit": (4, "use quantization='nf4', which is 4 bits"),
    "tf32": (False, "leave it out"),
    "half": (True, "use mixed_precision='fp16'"),
    "completion_only_loss": (False, "use objective='pretraining', which trains every token"),
    "learnin_rate": (1, "did you mean 'learning_rate'?"),
    "rl": ("dpo", "use objective='dpo'"),
    "stage": ("rm", "use objective='reward'"),
    "pref_beta": (0.2, "use beta in the section of the objective: dpo={'beta': 0.2}"),
    "ref_model": ("m", "use reference_model in the section of the objective: dpo={'reference_model': 'm'}"),
    "max_prompt_length": (64, "use max_seq_length, which bounds prompt and answer together"),
    "sync_ref_model": (True, "leave it out: the reference stays what the run began with"),
}


@pytest.mark.parametrize("name", MEANT)
def test_a_recipe_answers_with_our_name(name):
    value, meant = MEANT[name]
    with pytest.raises(ConfigurationError) as error:
        Recipe(**{"model": "m", "data": "d", name: value})
    assert str(error.value) == f"{name}: no such field; {meant}"


def test_what_is_suggested_is_accepted():
    for name, (value, meant) in MEANT.items():
        if meant.startswith("use ") and name in OURS:
            ours = meant.removeprefix("use ").partition("=")[0]
            fields = {"model": "m", "data": "d", ours: OBJECTIVE_NAMES.get(value, value) if ours == "objective" else value}
            assert Recipe(**fields)


def test_model_and_data_are_no_part_of_the_configuration():
    with pytest.raises(ConfigurationError, match=r"^dataset: no such field; model and data are arguments: ChronicalsTrainer"):
        ChronicalsConfig(dataset="d")


def test_the_table_is_of_fields_there_are_and_names_there_are_not():
    assert set(RENAMED) <= set(FIELDS)
    theirs = [*OURS, *INSTEAD, *NOWHERE]
    assert len(theirs) == len(set(theirs)) == sum(len(names.split()) for names in RENAMED.values()) + len({*INSTEAD, *NOWHERE})
    assert not set(theirs) & set(FIELDS)
    assert set(TURNED_OFF) <= set(INSTEAD)
    assert set(OBJECTIVE_NAMES.values()) <= set(registry.OBJECTIVES) and not set(OBJECTIVE_NAMES) & set(registry.OBJECTIVES)
    for name in SETTINGS:
        section, _, setting = name.partition(".")
        assert setting in {field.name for field in dataclasses.fields(registry.OBJECTIVES[section].Settings)}
    assert not set(SETTING) & {*theirs, *FIELDS}
    named = " ".join([*INSTEAD.values(), *TURNED_OFF.values()]).replace("=", " ").replace(",", " ").replace(";", " ").split()
    assert {word for word in named if "_" in word} <= set(FIELDS)


@pytest.mark.parametrize(
    "name, value, meant",
    [
        ("r", 8, "use rank=8"),
        ("lora_rank", 8, "use rank=8"),
        ("lora_alpha", 8, "use alpha=8"),
        ("lora_target", ["q_proj"], r"use target_modules=\['q_proj'\]"),
        ("rslora", True, "use use_rslora=True"),
        ("dora", True, "use use_dora=True"),
        ("rnk", 1, r"did you mean 'rank'\?"),
    ],
)
def test_the_adapters_configuration_answers_in_its_own_names(name, value, meant):
    with pytest.raises(ConfigurationError, match=f"^{name}: no such field; {meant}"):
        LoRAConfig(**{name: value})


@pytest.mark.parametrize(
    "setting, meant",
    [
        ("loss_type", "use loss$"), ("bta", r"did you mean 'beta'\?"), ("max_length", "use max_seq_length"),
        ("rpo_alpha", "leave it out: cross-entropy beside DPO"), ("zzzz", "there are 'reference', "),
    ],
)  # fmt: skip
def test_the_section_of_an_objective_answers_with_its_settings(setting, meant):
    with pytest.raises(ConfigurationError, match=f"no such setting; {meant}"):
        registry.build_objective(ChronicalsConfig(objective="dpo", dpo={setting: 1}))


@pytest.mark.parametrize("name, meant", [("DPO", "dpo"), ("rm", "reward"), ("gkd", "distill"), ("dop", "dpo")])
def test_an_objective_by_another_name(name, meant):
    with pytest.raises(ConfigurationError, match=rf"^objective='{name}': no such objective; did you mean '{meant}'\?"):
        registry.build_objective(ChronicalsConfig(objective=name))


def test_a_name_like_nothing():
    assert suggestion("zzzz", 1, FIELDS) is None
    assert suggestion("per-device-train-batch-size", NOT_SHOWN, FIELDS) == "use batch_size"
