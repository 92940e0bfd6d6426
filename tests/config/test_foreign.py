"""Names of other trainers are answered with ours, in the configuration, the recipe and the
adapters' own.
"""

import ast
import dataclasses
import re
import typing

import pytest

from chronicals.config import (
    ChronicalsConfig,
    ConfigurationError,
    DataSource,
    Recipe,
    data_source,
    foreign,
    foreign_data,
)
from chronicals.config.foreign import (
    INSTEAD,
    NOT_SHOWN,
    NOWHERE,
    OBJECTIVE_NAMES,
    OUR_NAMES,
    RENAMED,
    SETTINGS,
    SETTINGS_BY_NAME,
    TURNED_OFF,
    suggestion,
)
from chronicals.config.foreign_values import ABSENT_OBJECTIVES, ANY, BY_VALUE, OWN_VALUES
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
    "optim": ("adamw_torch", "leave it out: AdamW is the optimizer"),
    "optimizer": (
        "paged_adamw_8bit",
        "use use_8bit_optimizer=True and memory=['offload_optimizer_states']",
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
    "ref_model": (
        "m",
        "use reference_model in the section of the objective: dpo={'reference_model': 'm'}",
    ),
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
        if meant.startswith("use ") and name in OUR_NAMES:
            ours = meant.removeprefix("use ").partition("=")[0]
            fields = {
                "model": "m",
                "data": "d",
                ours: OBJECTIVE_NAMES.get(value, value) if ours == "objective" else value,
            }
            assert Recipe(**fields)


def test_model_and_data_are_no_part_of_the_configuration():
    with pytest.raises(
        ConfigurationError,
        match=r"^dataset: no such field; model and data are arguments: ChronicalsTrainer",
    ):
        ChronicalsConfig(dataset="d")


def test_the_table_is_of_fields_there_are_and_names_there_are_not():
    assert set(RENAMED) <= set(FIELDS)
    theirs = [*OUR_NAMES, *INSTEAD, *NOWHERE]
    assert (
        len(theirs)
        == len(set(theirs))
        == sum(len(names.split()) for names in RENAMED.values()) + len({*INSTEAD, *NOWHERE})
    )
    assert not set(theirs) & set(FIELDS)
    assert set(TURNED_OFF) <= set(INSTEAD)
    assert set(OBJECTIVE_NAMES.values()) <= set(registry.OBJECTIVES) and not set(
        OBJECTIVE_NAMES
    ) & set(registry.OBJECTIVES)
    assert set(foreign.SOURCE_FIELDS) == {field.name for field in dataclasses.fields(DataSource)}
    assert not set(foreign.SOURCE_FIELDS) & {
        *foreign_data.COLUMNS,
        *foreign_data.NOT_NEEDED,
        *foreign_data.PATHS,
    }
    assert set(foreign_data.COLUMNS.values()) <= data_source.ROW_FIELDS
    for name in SETTINGS:
        section, _, setting = name.partition(".")
        assert setting in {
            field.name for field in dataclasses.fields(registry.OBJECTIVES[section].Settings)
        }
    assert not set(SETTINGS_BY_NAME) & {*theirs, *FIELDS}
    answers = [
        answer
        for table in (BY_VALUE, OWN_VALUES)
        for of_name in table.values()
        for answer in of_name.values()
    ]
    named = re.findall(r"\b(\w+)=", " ".join([*INSTEAD.values(), *TURNED_OFF.values(), *answers]))
    assert set(named) <= {*FIELDS, *registry.OBJECTIVES, "resume"}
    assert not set(BY_VALUE) & set(FIELDS) and set(OWN_VALUES) <= set(FIELDS)
    assert not set(ABSENT_OBJECTIVES) & {*registry.OBJECTIVES, *OBJECTIVE_NAMES}


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
        ("loss_type", "use loss$"),
        ("bta", r"did you mean 'beta'\?"),
        ("max_length", "use max_seq_length"),
        ("rpo_alpha", "leave it out: cross-entropy beside DPO"),
        ("zzzz", "there are 'reference', "),
    ],
)
def test_the_section_of_an_objective_answers_with_its_settings(setting, meant):
    with pytest.raises(ConfigurationError, match=f"no such setting; {meant}"):
        registry.build_objective(ChronicalsConfig(objective="dpo", dpo={setting: 1}))


@pytest.mark.parametrize(
    "name, meant", [("DPO", "dpo"), ("rm", "reward"), ("gkd", "distill"), ("dpoo", "dpo")]
)
def test_an_objective_by_another_name(name, meant):
    with pytest.raises(
        ConfigurationError,
        match=rf"^objective='{name}': no such objective; did you mean '{meant}'\?",
    ):
        registry.build_objective(ChronicalsConfig(objective=name))


def test_a_name_like_nothing():
    assert suggestion("zzzz", 1, FIELDS) is None
    assert suggestion("per-device-train-batch-size", NOT_SHOWN, FIELDS) == "use batch_size"


# --- advice that is followed to the letter
# -----------------------------------------------------------------------------

GIVEN = {"model": "m", "data": "d"}
SET = re.compile(r"\b(\w+)=('[^']*'|\[[^\]]*\]|\{[^}]*\}|[\w.+-]+)")
NUMBER = re.compile(r"use (\w+), a number of steps")


def problems(recipe):
    """What is wrong with it, a line each; nothing where a run would begin."""
    try:
        registry.build_objective(Recipe(**recipe).config())
    except ConfigurationError as error:
        return str(error).splitlines()
    return []


def follow(line, recipe):
    """Do what a line on one field says, as somebody who reads nothing else would."""
    in_data = "no such field of data" in line
    name, _, said = line.removeprefix("data: ").partition(": ")
    name = name.partition("=")[0]
    place = recipe["data"][0] if in_data else recipe
    advice = re.search(r"(leave it out|use |set )", said)
    assert advice, line
    value = place.pop(name, None)
    if advice[1] == "leave it out":
        return
    words = said[advice.start() :]
    if number := NUMBER.match(words):
        recipe[number[1]] = 10
    for ours, text in SET.findall(words):
        try:
            given = ast.literal_eval(text)
        except ValueError:
            given = float("inf") if text == "inf" else value
        if ours == "resume":  # an argument of the run, and no field
            continue
        if ours in registry.OBJECTIVES:
            recipe[ours] = {**recipe.get(ours, {}), **given}
            recipe["objective"] = ours
        elif in_data and ours in foreign.SOURCE_FIELDS:
            place[ours] = {**place.get(ours, {}), **given} if isinstance(given, dict) else given
        else:
            recipe[ours] = given


def followed(recipe):
    """The recipe after all advice was followed, round by round."""
    recipe = dict(recipe)
    for _ in range(4):
        lines = problems(recipe)
        if not lines:
            return recipe
        for line in lines:
            follow(line, recipe)
    raise AssertionError(problems(recipe))


def parts_of(hint):
    """A type and all that it is made of."""
    return [hint, *(inner for part in typing.get_args(hint) for inner in parts_of(part))]


def sample(name):
    """A value that our field takes, as another trainer would have it."""
    if name in ("data", "model", "validation_data"):
        return "x"
    if name == "objective":
        return "dpo"
    hint = typing.get_type_hints(Recipe)[name]
    hints = parts_of(hint)
    choices = [typing.get_args(one) for one in hints if typing.get_origin(one) is typing.Literal]
    kinds = [typing.get_origin(one) or one for one in hints]
    if choices:
        return choices[0][0]
    if dict in kinds and list not in kinds:
        return {"q_proj": 8}
    if list in kinds:
        return ["q_proj"] if name != "lora_layers" else [0, 1]
    samples = ((bool, True), (int, 2), (float, 0.5), (str, "default"))
    value = next((value for kind, value in samples if kind in kinds), "x")
    return 16.0 if name == "lora_plus_ratio" else value


def asked(table):
    """Every name of a table of values with each value that has an answer, and one that nobody
    has heard of.
    """
    for name, answers in table.items():
        for key in answers:
            value = {"true": True, "false": False, ANY: "unheard-of"}.get(key, key)
            yield (
                name,
                int(value) if isinstance(value, str) and re.fullmatch(r"-?\d+", value) else value,
            )


def sample_of_setting(name):
    """A value that the first setting of another trainer's name takes."""
    section, _, setting = SETTINGS_BY_NAME[name][0].partition(".")
    hint = typing.get_type_hints(registry.OBJECTIVES[section].Settings)[setting]
    hints = parts_of(hint)
    choices = [typing.get_args(one) for one in hints if typing.get_origin(one) is typing.Literal]
    if choices:
        return choices[0][0]
    if int in hints:
        return 2
    return 5.0 if setting in ("clip_bound", "importance_cap") else 0.25


NAMED = {
    "names": [(theirs, sample(ours)) for theirs, ours in OUR_NAMES.items()],
    "instead": [(name, True) for name in INSTEAD],
    "nowhere": [(name, True) for name in NOWHERE],
    "turned off": [(name, False) for name in TURNED_OFF],
    "settings": [
        (name, sample_of_setting(name)) for name in SETTINGS_BY_NAME if name not in BY_VALUE
    ],
    "by value": [*asked(BY_VALUE)],
    "values of ours": [pair for pair in asked(OWN_VALUES) if pair[1] != "unheard-of"],
    "empty": [(name, None) for name in [*OUR_NAMES, *BY_VALUE]],
}
"""Names of other trainers with values, by the table that answers them."""


def recipe_with(name, value):
    """A recipe with another trainer's field, and what it needs beside it."""
    strings = {
        "dpo.reference_model",
        "kto.reference_model",
        "ipo.reference_model",
        "distill.teacher",
    }
    settings = SETTINGS_BY_NAME.get(name, [])
    begun = {**GIVEN, "validation_split": 0.1, name: "x" if strings & set(settings) else value}
    if OUR_NAMES.get(name) == "validation_data":
        del begun["validation_split"]
    if settings and "distill" in settings[0]:
        begun |= {"objective": "distill", "distill": {"teacher": "x"}}
    return begun


@pytest.mark.parametrize("table", NAMED)
def test_every_answer_can_be_followed(table):
    """Of a name whose value is one of ours, and of each value that has an answer of its own."""
    wrong = {}
    for name, value in NAMED[table]:
        begun = recipe_with(name, value)
        try:
            assert problems(begun), "another trainer's name is not told"
            done = followed(begun)
            assert {"model", "data"} <= set(done) and (name not in done or name in FIELDS)
        except AssertionError as error:
            wrong[name, str(value)] = str(error)
    assert not wrong


RECIPES = {
    "axolotl": {
        "base_model": "some/model",
        "model_type": "AutoModelForCausalLM",
        "tokenizer_type": "AutoTokenizer",
        "load_in_8bit": False,
        "load_in_4bit": True,
        "strict": False,
        "adapter": "qlora",
        "lora_model_dir": None,
        "sequence_len": 4096,
        "datasets": [
            {
                "path": "some/rows",
                "type": "chat_template",
                "field_messages": "talk",
                "roles_to_train": ["gpt"],
                "train_on_eos": "turn",
                "split": "train",
            }
        ],
        "dataset_prepared_path": "prepared",
        "val_set_size": 0.05,
        "output_dir": "out",
        "sample_packing": True,
        "pad_to_sequence_len": True,
        "lora_r": 32,
        "lora_alpha": 16,
        "lora_dropout": 0.05,
        "lora_target_linear": True,
        "wandb_project": None,
        "wandb_entity": None,
        "wandb_watch": None,
        "wandb_name": None,
        "wandb_log_model": None,
        "gradient_accumulation_steps": 4,
        "micro_batch_size": 2,
        "num_epochs": 4,
        "optimizer": "paged_adamw_32bit",
        "lr_scheduler": "constant_with_warmup",
        "learning_rate": 2e-4,
        "bf16": "auto",
        "tf32": False,
        "gradient_checkpointing": "offload",
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "attn_implementation": "flash_attention_2",
        "resume_from_checkpoint": None,
        "logging_steps": 1,
        "evals_per_epoch": 4,
        "saves_per_epoch": 1,
        "weight_decay": 0.0,
        "special_tokens": {"pad_token": "x"},
        "chat_template": "tokenizer_default",
        "fsdp_config": {"fsdp_offload_params": True},
        "deepspeed": None,
        "eval_sample_packing": False,
        "plugins": ["x"],
        "liger_rope": True,
        "eot_tokens": ["x"],
    },
    "llama-factory": {
        "model_name_or_path": "some/model",
        "stage": "dpo",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_rank": 8,
        "lora_target": "all",
        "pref_beta": 0.2,
        "pref_loss": "orpo",
        "dataset": "a.jsonl, b.jsonl",
        "template": "qwen",
        "cutoff_len": 2048,
        "max_samples": 1000,
        "preprocessing_num_workers": 16,
        "dataloader_num_workers": 4,
        "output_dir": "out",
        "logging_steps": 10,
        "save_steps": 500,
        "plot_loss": True,
        "save_only_model": False,
        "report_to": "none",
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "num_train_epochs": 3.0,
        "lr_scheduler_type": "cosine",
        "bf16": True,
        "ddp_timeout": 180000000,
        "val_size": 0.1,
        "eval_strategy": "steps",
        "eval_steps": 500,
        "quantization_bit": 4,
        "quantization_method": "bnb",
        "flash_attn": "auto",
        "overwrite_cache": True,
        "enable_liger_kernel": True,
        "use_unsloth": False,
        "neat_packing": True,
        "resume_from_checkpoint": None,
    },
    "trl": {
        "model_name_or_path": "some/model",
        "dataset_name": "some/rows",
        "learning_rate": 1e-5,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "optim": "adamw_torch_fused",
        "max_steps": -1,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "bf16": True,
        "max_length": 512,
        "eval_strategy": "no",
        "save_strategy": "epoch",
        "report_to": ["wandb"],
        "run_name": "x",
        "packing": True,
        "packing_strategy": "bfd",
        "use_peft": True,
        "lora_r": 16,
        "lora_target_modules": "all-linear",
        "dataset_text_field": "body",
        "assistant_only_loss": True,
        "push_to_hub": False,
        "use_liger_kernel": True,
        "padding_free": True,
        "load_in_8bit": False,
        "torch_dtype": "bfloat16",
        "attn_implementation": "flash_attention_2",
        "max_grad_norm": 0,
    },
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_of_another_trainer_becomes_ours_by_following_what_is_said(name):
    done = followed(RECIPES[name])
    recipe = Recipe(**done)
    assert set(done) <= {*FIELDS, *registry.OBJECTIVES}
    assert recipe.use_lora and recipe.model == "some/model"
    if name == "axolotl":
        assert recipe.quantization == "nf4" and recipe.memory[0] in (
            "offload_optimizer_states",
            "recompute_layers",
        )
        assert recipe.data[0].columns == {"messages": "talk"} and recipe.train_on_roles == [
            "assistant"
        ]
    if name == "llama-factory":
        assert (recipe.objective, recipe.sections) == ("orpo", {"orpo": {"beta": 0.2}}) and len(
            recipe.data
        ) == 2
    if name == "trl":
        assert (
            recipe.max_grad_norm is None
            and recipe.trackers == ["wandb"]
            and recipe.max_steps is None
        )


@pytest.mark.parametrize(
    "said", [{"rl": "ppo"}, {"stage": "ppo"}, {"objective": "ppo"}, {"objective": "PPO"}]
)
def test_an_objective_that_is_not_here_is_said_to_be_missing(said):
    (line,) = problems({**GIVEN, **said})
    assert (
        "not part of this version: its loss is not written yet" in line
        and "leave it out" not in line
    )


@pytest.mark.parametrize(
    "name, value",
    [
        *(
            (name, "x")
            for name in [*foreign_data.COLUMNS, *foreign_data.PATHS, *foreign_data.NOT_NEEDED]
        ),
        *((name, 0.5) for name in foreign_data.WEIGHT_FIELDS),
        ("roles_to_train", ["gpt", "human"]),
    ],
)
def test_every_answer_inside_of_data_can_be_followed(name, value):
    begun = {"model": "m", "data": [{"path": "p", name: value}]}
    (line,) = problems(begun)
    assert line.startswith(f"data: {name}: no such field of data; ")
    done = Recipe(**followed(begun))
    if name in foreign_data.COLUMNS:
        assert done.data[0].columns == {foreign_data.COLUMNS[name]: "x"}
    if name == "roles_to_train":
        assert done.train_on_roles == ["assistant", "user"]


def test_a_setting_is_that_of_the_objective_of_the_run():
    for objective, setting in (("dpo", "beta"), ("kto", "beta"), ("ipo", "tau"), ("simpo", "beta")):
        said = suggestion("rl_beta", 0.2, FIELDS, {"rl": objective})
        assert (
            said
            == f"use {setting} in the section of the objective: {objective}={{{setting!r}: 0.2}}"
        )


def test_the_model_of_another_trainer_is_told_as_such():
    (line,) = problems({"base_model": "x", "data": "d"})
    assert line.startswith(
        "model: required, and was not given; base_model='x' is the model of an adapter; use "
        "model='x'"
    )


def test_all_that_is_wrong_is_a_line_each():
    lines = problems({**GIVEN, "lr": 1e-4, "batch_size": 0, "learnin_rate": 1, "datasets": "x"})
    named = [re.split("[:=]", line)[0] for line in lines]
    assert sorted(named) == ["batch_size", "datasets", "learnin_rate", "lr"]
    fields = {
        "eval_steps": 5,
        "keep": "best",
        "max_steps": 3,
        "num_epochs": 1,
        "use_dora": True,
        "lora_init": "pissa",
    }
    lines = problems({**GIVEN, **fields})
    assert [line.partition("=")[0] for line in lines] == [
        "num_epochs",
        "lora_init",
        "keep",
        "eval_steps",
    ]


@pytest.mark.parametrize(
    "name, value",
    [("report_to", "comet"), ("lora_r", "many"), ("val_set_size", 2), ("lora", {"r": 8})],
)
def test_a_value_that_our_field_does_not_take_is_not_advised(name, value):
    (line,) = problems({**GIVEN, name: value})
    ours = OUR_NAMES[name]
    assert (
        line.startswith(f"{name}: no such field; {ours}={value!r}: Input should")
        and "use " not in line
    )


def test_the_fields_of_trainers_that_are_installed_have_answers():
    """Those of transformers' and TRL's configurations and of PEFT's, as their newest versions
    have them.
    """
    from transformers import TrainingArguments

    trl = pytest.importorskip("trl")
    peft = pytest.importorskip("peft")
    kinds = [
        TrainingArguments,
        peft.LoraConfig,
        trl.ModelConfig,
        trl.SFTConfig,
        trl.DPOConfig,
        trl.KTOConfig,
        trl.RewardConfig,
    ]
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)} - set(FIELDS)
    answers = {name: suggestion(name, True, FIELDS) for name in names}
    assert len(names) > 150
    unanswered = [
        name
        for name, answer in answers.items()
        if answer is None or answer.startswith("did you mean")
    ]
    assert len(unanswered) < len(names) / 20, unanswered
