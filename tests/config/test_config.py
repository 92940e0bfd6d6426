"""ChronicalsConfig: its defaults, its errors, and what it remembers."""

import copy
import dataclasses
import json
import pickle
from pathlib import Path

import pytest

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.config.checked_class import DECIDED

PUBLISHED = {
    "learning_rate": 2e-4,
    "batch_size": 4,
    "max_seq_length": 2048,
    "gradient_accumulation_steps": 4,
    "max_steps": None,
    "warmup_steps": 100,
    "use_flash_attention": True,
    "use_fused_kernels": True,
    "use_sequence_packing": True,
    "use_gradient_checkpointing": True,
    "use_torch_compile": True,
    "use_lora": False,
    "lora_rank": 64,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "lora_target_modules": None,
    "use_lora_plus": True,
    "lora_plus_ratio": 16.0,
    "use_8bit_optimizer": False,
    "optimizer_state_dtype": "fp32",
    "master_weights": True,
    "activation_offload": False,
    "mixed_precision": "bf16",
    "use_fp8": False,
}
"""The fields and defaults that users were promised."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_defaults(name):
    value = getattr(ChronicalsConfig(), name)
    assert value == PUBLISHED[name]
    assert isinstance(value, bool) == isinstance(PUBLISHED[name], bool)


def test_defaults_are_valid_when_written_out():
    """Every default is a value that may be given."""
    config = ChronicalsConfig()
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    again = ChronicalsConfig(**fields)
    assert again == config
    assert again.explicit == set(fields) and config.explicit == frozenset()


def test_every_field_explains_itself():
    fields = ChronicalsConfig.__pydantic_fields__
    assert set(fields) == {field.name for field in dataclasses.fields(ChronicalsConfig)}
    assert not [name for name, field in fields.items() if not field.description]


@pytest.mark.parametrize(
    "wrong, near",
    [
        ("learnin_rate", "learning_rate"),
        ("batchsize", "batch_size"),
        ("use_flash_attn", "use_flash_attention"),
    ],
)
def test_unknown_field_names_the_nearest(wrong, near):
    with pytest.raises(
        ConfigurationError, match=f"^{wrong}: no such field; did you mean '{near}'\\?$"
    ):
        ChronicalsConfig(**{wrong: 1})


def test_unknown_field_like_nothing():
    with pytest.raises(ConfigurationError, match=r"^zzzz: no such field$"):
        ChronicalsConfig(zzzz=1)


WRONG = [
    ("learning_rate", 0),
    ("learning_rate", -1e-4),
    ("learning_rate", "fast"),
    ("learning_rate", None),
    ("learning_rate", float("nan")),
    ("batch_size", 0),
    ("batch_size", 2.5),
    ("batch_size", "four"),
    ("max_seq_length", -1),
    ("max_steps", 0),
    ("num_epochs", 0),
    ("num_epochs", 1.5),
    ("warmup_steps", -1),
    ("lr_scheduler", "exponential"),
    ("trackers", "wand"),
    ("min_lr_ratio", 1.0),
    ("wsd_decay_ratio", 0.0),
    ("use_lora", "maybe"),
    ("use_lora", 2),
    ("lora_rank", 0),
    ("lora_alpha", 0),
    ("lora_dropout", 1.0),
    ("lora_dropout", -0.1),
    ("lora_target_modules", 3),
    ("lora_layers", "0-"),
    ("lora_layers", "7-3"),
    ("lora_rank_pattern", {"q(": 3}),
    ("lora_plus_ratio", 0.5),
    ("weight_decay", -0.1),
    ("adam_beta2", 1.0),
    ("adam_epsilon", 0.0),
    ("max_grad_norm", 0),
    ("optimizer_state_dtype", "int8"),
    ("mixed_precision", "fp8"),
    ("objective", 3),
    ("validation_split", 1.0),
    ("save_steps", 0),
    ("seed", -1),
    ("seed", 2**63),
]


@pytest.mark.parametrize("name, value", WRONG)
def test_wrong_values_name_field_and_value(name, value):
    with pytest.raises(ConfigurationError) as error:
        ChronicalsConfig(**{name: value})
    message = str(error.value)
    assert message.startswith(f"{name}="), message
    assert repr(value) in message
    assert len(message) > len(f"{name}={value!r}: ") + 5, "nothing is said about what is allowed"


def test_adapters_of_parameters_have_no_dropout():
    """That is implied where it was not set; what was set and cannot be had is refused."""
    config = ChronicalsConfig(lora_target_parameters="mlp.experts.up_proj, down_proj")
    assert (
        config.lora_target_parameters == ["mlp.experts.up_proj", "down_proj"]
        and config.lora_dropout == 0.0
    )
    assert (
        "lora_dropout" not in config.explicit
        and config.replace(lora_target_parameters=None).lora_dropout == 0.05
    )
    config = ChronicalsConfig()
    config.lora_target_parameters = ["down_proj"]
    assert config.lora_dropout == 0.0
    assert ChronicalsConfig(lora_target_parameters=["a"], lora_dropout=0.0, lora_init="gaussian")
    for name, value in (("lora_dropout", 0.05), ("use_dora", True), ("lora_init", "pissa")):
        with pytest.raises(
            ConfigurationError,
            match=rf"^{name}={value!r} with lora_target_par.*: .*leave out {name}",
        ):
            ChronicalsConfig(lora_target_parameters=["a"], **{name: value})


@pytest.mark.parametrize("given", ["none", ["none"], []])
def test_no_layer_beside_parameters(given):
    assert (
        ChronicalsConfig(
            lora_target_modules=given, lora_target_parameters=["a"]
        ).lora_target_modules
        == []
    )
    with pytest.raises(
        ConfigurationError,
        match="^lora_target_modules='none': nothing is adapted; set lora_target_parameters",
    ):
        ChronicalsConfig(lora_target_modules=given)


@pytest.mark.parametrize("given", ["0-3,20", ["0-3", "20"], [20, 0, 1, 2, 3], "20, 0 - 3"])
def test_layers_are_numbers_and_ranges(given):
    assert ChronicalsConfig(lora_layers=given).lora_layers == [0, 1, 2, 3, 20]


def test_patterns_of_adapters_come_as_a_mapping_or_from_the_command_line():
    for given in ({"down_proj": 8}, ["down_proj=8"]):
        assert ChronicalsConfig(lora_rank_pattern=given).lora_rank_pattern == {"down_proj": 8}
        assert ChronicalsConfig(lora_alpha_pattern=given).lora_alpha_pattern == {"down_proj": 8.0}


@pytest.mark.parametrize("name", ["lora_rank_pattern", "lora_alpha_pattern"])
def test_a_wrong_value_of_a_pattern_is_named(name):
    with pytest.raises(ConfigurationError, match=name):
        ChronicalsConfig(**{name: {"down_proj": 0}})


def test_a_wrong_entry_of_a_list_is_named():
    with pytest.raises(ConfigurationError, match=r"^lora_target_modules=1: "):
        ChronicalsConfig(lora_target_modules=["q_proj", 1])


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigurationError) as error:
        ChronicalsConfig(batch_size=0, lora_rnk=3, learning_rate=-1)
    assert all(
        part in str(error.value)
        for part in ("batch_size=0", "did you mean 'lora_rank'?", "learning_rate=-1")
    )


def test_a_configuration_error_is_a_value_error():
    assert issubclass(ConfigurationError, ValueError)


def test_positional_arguments_are_refused():
    with pytest.raises(TypeError):
        ChronicalsConfig(2e-4)


def test_states_are_kept_in_one_way():
    assert ChronicalsConfig(
        use_8bit_optimizer=True, optimizer_state_dtype="fp32"
    ).use_8bit_optimizer
    with pytest.raises(
        ConfigurationError,
        match="^use_8bit_optimizer=True and optimizer_state_dtype='bf16': .* leave out one",
    ):
        ChronicalsConfig(use_8bit_optimizer=True, optimizer_state_dtype="bf16")


def test_steps_and_epochs_exclude_each_other():
    with pytest.raises(
        ConfigurationError, match="num_epochs=2 and max_steps=50: give one of the two"
    ):
        ChronicalsConfig(max_steps=50, num_epochs=2)
    assert ChronicalsConfig(num_epochs=2).num_epochs == 2
    assert ChronicalsConfig(max_steps=50, num_epochs=None).max_steps == 50


@pytest.mark.parametrize(
    "fields, epochs", [({}, 1), ({"num_epochs": 3}, 3), ({"max_steps": 5}, None)]
)
def test_one_epoch_unless_steps_or_epochs_are_given(fields, epochs):
    assert ChronicalsConfig(**fields).epochs == epochs


def test_what_is_fitted_is_not_what_was_set(tmp_path):
    fitted = ChronicalsConfig(seed=7).fitted(batch_size=1)
    assert (fitted.batch_size, fitted.explicit) == (1, {"seed"})
    fitted.to_yaml(tmp_path / "config.yaml")
    assert ChronicalsConfig.from_yaml(tmp_path / "config.yaml").batch_size == 4


def test_a_warm_up_longer_than_the_run():
    with pytest.raises(ConfigurationError, match="warmup_steps=51 exceeds max_steps=50"):
        ChronicalsConfig(warmup_steps=51, max_steps=50)
    assert ChronicalsConfig(warmup_steps=50, max_steps=50).warmup_steps == 50
    assert (
        ChronicalsConfig(max_steps=50).warmup_steps == 100
    )  # a default is fitted to the run later
    assert (
        ChronicalsConfig(warmup_steps=5000, num_epochs=3).warmup_steps == 5000
    )  # the steps are not known yet


def test_only_bf16_weights_that_are_trained_have_masters():
    assert not ChronicalsConfig(master_weights=False).master_weights
    for other in ({"use_lora": True}, {"mixed_precision": "fp16"}, {"mixed_precision": "fp32"}):
        with pytest.raises(
            ConfigurationError,
            match="master_weights=False: with .* no bf16 weight is trained; leave it out",
        ):
            ChronicalsConfig(master_weights=False, **other)


@pytest.mark.parametrize(
    ("fields", "policies"),
    [
        ({}, set()),
        ({"memory": []}, set()),
        ({"use_gradient_checkpointing": True}, {"recompute_layers"}),
        ({"use_gradient_checkpointing": False}, set()),
        ({"activation_offload": True}, {"offload_activations"}),
        (
            {"memory": ["tiled_mlp", "recompute_elementwise"]},
            {"tiled_mlp", "recompute_elementwise"},
        ),
        (
            {"memory": ["recompute_elementwise"], "use_gradient_checkpointing": True},
            {"recompute_elementwise"},
        ),
        (
            {"memory": ["recompute_layers", "offload_activations"], "activation_offload": True},
            {"recompute_layers", "offload_activations"},
        ),
    ],
)
def test_older_switches_are_aliases_of_memory(fields, policies):
    assert ChronicalsConfig(**fields).memory_policies == policies


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory": ["offload"]}, "memory='offload'"),
        ({"memory": ["recompute_layers", "recompute_elementwise"]}, "leave out the other"),
        (
            {"memory": ["tiled_mlp"], "use_gradient_checkpointing": True},
            "use_gradient_checkpointing=True: they contradict",
        ),
        (
            {"memory": ["recompute_layers"], "use_gradient_checkpointing": False},
            "use_gradient_checkpointing=False: they contradict",
        ),
        ({"memory": [], "activation_offload": True}, "activation_offload=True: they contradict"),
        (
            {"memory": ["offload_frozen_weights"], "use_lora": True},
            "set use_fp8=True, or leave it out",
        ),
        (
            {"memory": ["offload_activations"], "activation_offload": False},
            "activation_offload=False: they contradict",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        ChronicalsConfig(**fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_grad_norm", 1.0), ("gradient_accumulation_steps", 2), ("mixed_precision", "fp16")],
)
def test_updates_in_the_backward_pass_need_nothing_of_other_gradients(name, value):
    fields = {
        "memory": ["optimizer_in_backward"],
        "max_grad_norm": float("inf"),
        "gradient_accumulation_steps": 1,
    }
    assert ChronicalsConfig(**fields).max_grad_norm is None
    with pytest.raises(
        ConfigurationError, match=f"optimizer_in_backward'.* {name}={value!r} .* set {name}="
    ):
        ChronicalsConfig(**{**fields, name: value})
    with pytest.raises(
        ConfigurationError,
        match="set max_grad_norm=inf, gradient_accumulation_steps=1, or leave out",
    ):
        ChronicalsConfig(memory=["optimizer_in_backward"])


@pytest.mark.parametrize("value", [float("inf"), "inf", None])
def test_no_clipping_is_plain_json(value, tmp_path):
    config = ChronicalsConfig(max_grad_norm=value)
    assert config.max_grad_norm is None
    json.loads(json.dumps(config.to_dict()), parse_constant=pytest.fail)
    config.to_yaml(tmp_path / "recipe.yaml")
    assert ChronicalsConfig.from_yaml(tmp_path / "recipe.yaml").max_grad_norm is None


def test_patience_needs_evaluations():
    with pytest.raises(ConfigurationError, match="early_stopping_patience needs eval_steps"):
        ChronicalsConfig(early_stopping_patience=3)
    assert ChronicalsConfig(early_stopping_patience=3, eval_steps=10).early_stopping_patience == 3


# --- what was set
# --------------------------------------------------------------------------------------------------


def test_explicit():
    assert ChronicalsConfig().explicit == frozenset()
    assert ChronicalsConfig(use_lora=False, max_steps=50).explicit == {"use_lora", "max_steps"}


def test_auto_leaves_the_decision_to_the_run(tmp_path):
    """As leaving the field out does; it takes a value back."""
    for name in DECIDED:
        config = ChronicalsConfig(**{name: "auto"})
        assert config == ChronicalsConfig() and config.explicit == frozenset()
    config = ChronicalsConfig(batch_size=2, seed=7, warmup_steps=5)
    config.batch_size = "auto"
    assert config.replace(warmup_steps="auto").explicit == {"seed"} and config.batch_size == 4
    (tmp_path / "c.yaml").write_text("learning_rate: auto\nnum_epochs: 2\nbatch_size: 3\n")
    config = ChronicalsConfig.from_yaml(tmp_path / "c.yaml", batch_size="auto", max_steps="auto")
    assert config == ChronicalsConfig(num_epochs=2) and config.explicit == {"num_epochs"}
    with pytest.raises(ConfigurationError, match="seed='auto'"):
        ChronicalsConfig(seed="auto")
    assert ChronicalsConfig(run_name="auto").run_name == "auto"


def test_explicit_is_each_ones_own():
    first = ChronicalsConfig(seed=1)
    second = ChronicalsConfig(batch_size=2)
    assert (first.explicit, second.explicit) == ({"seed"}, {"batch_size"})
    assert ChronicalsConfig().explicit == frozenset() == ChronicalsConfig.explicit


def test_replace_keeps_what_was_explicit():
    config = ChronicalsConfig(use_flash_attention=True, seed=7)
    other = config.replace(batch_size=2, seed=8)
    assert type(other) is ChronicalsConfig
    assert other.explicit == {"use_flash_attention", "seed", "batch_size"}
    assert (other.batch_size, other.seed, config.batch_size, config.seed) == (2, 8, 4, 7)
    assert config.replace() == config and config.replace().explicit == config.explicit


def test_replace_checks():
    with pytest.raises(ConfigurationError, match="batch_size=0"):
        ChronicalsConfig().replace(batch_size=0)
    with pytest.raises(ConfigurationError, match="did you mean 'batch_size'"):
        ChronicalsConfig().replace(batch_sise=1)
    with pytest.raises(ConfigurationError, match="give one of the two"):
        ChronicalsConfig(max_steps=5).replace(num_epochs=1)


def test_an_assignment_is_as_if_the_field_had_been_passed(tmp_path):
    config = ChronicalsConfig(seed=7)
    config.use_lora = True
    config.learning_rate = 1
    config.warmup_steps = 5
    config.output_dir = "~/run"
    passed = ChronicalsConfig(
        seed=7, use_lora=True, learning_rate=1, warmup_steps=5, output_dir="~/run"
    )
    assert config == passed and config.explicit == passed.explicit
    assert type(config.learning_rate) is float and config.output_dir == Path.home() / "run"
    assert config.replace() == passed and config.replace(batch_size=2).use_lora
    config.to_yaml(tmp_path / "config.yaml")
    assert ChronicalsConfig.from_yaml(tmp_path / "config.yaml") == passed


REFUSED = [
    ("batch_size", "four", r"^batch_size='four': Input should be a valid integer"),
    ("learning_rate", 0, r"^learning_rate=0: Input should be greater than 0$"),
    ("learning_rte", 3, r"^learning_rte: no such field; did you mean 'learning_rate'\?$"),
    ("explicit", frozenset(), r"^explicit: no such field"),
    ("use_8bit_optimizer", "yes please", "^use_8bit_optimizer='yes please': "),
    ("num_epochs", 2, r"^num_epochs=2 and max_steps=50: give one of the two$"),
    ("warmup_steps", 51, r"^warmup_steps=51 exceeds max_steps=50"),
    ("early_stopping_patience", 3, "needs eval_steps"),
]


@pytest.mark.parametrize("name, value, message", REFUSED, ids=[name for name, *_ in REFUSED])
def test_an_assignment_that_is_refused_changes_nothing(name, value, message):
    config, same = (ChronicalsConfig(max_steps=50, gate={"empty": 0.5}) for _ in range(2))
    with pytest.raises(ConfigurationError, match=message):
        setattr(config, name, value)
    assert vars(config) == vars(same)


def test_an_assignment_leaves_the_other_values_alone():
    config = ChronicalsConfig()
    gate = config.gate
    config.seed = 3
    assert config.gate is gate


def test_copies_are_assigned_to_by_themselves():
    config = ChronicalsConfig(seed=7)
    config.batch_size = 2
    for copied in (
        copy.copy(config),
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        config.replace(),
    ):
        assert copied == config and copied.explicit == {"seed", "batch_size"}
        copied.max_steps = 50
        assert copied.explicit == {"seed", "batch_size", "max_steps"} and config.explicit == {
            "seed",
            "batch_size",
        }
    other = dataclasses.replace(config, warmup_steps=5)
    assert (other.batch_size, other.warmup_steps, config.warmup_steps) == (2, 5, 100)


# --- YAML
# ----------------------------------------------------------------------------------------------------------

FULL = {
    "learning_rate": 3e-5,
    "batch_size": 2,
    "num_epochs": 3,
    "use_lora": True,
    "lora_target_modules": ["q_proj", "v_proj"],
    "mixed_precision": "fp32",
    "adam_epsilon": 1e-7,
    "cache_dir": Path("some/where"),
    "output_dir": Path("run 1"),
    "save_steps": None,
    "lr_scheduler": "wsd",
    "trackers": ["wandb", "tensorboard"],
}


@pytest.mark.parametrize(
    "fields", [{}, {"seed": 3}, FULL, {"lora_target_modules": ".*[qv]_proj"}], ids=str
)
def test_yaml_round_trip(tmp_path, fields):
    config = ChronicalsConfig(**fields)
    config.to_yaml(tmp_path / "config.yaml")
    again = ChronicalsConfig.from_yaml(tmp_path / "config.yaml")
    assert again == config and again.explicit == config.explicit == set(fields)


@pytest.mark.parametrize("text", ["2e-4", "2.0e-4", "0.0002", "'2e-4'", "2E-4"])
@pytest.mark.parametrize("name", ["learning_rate", "adam_epsilon", "weight_decay", "min_lr_ratio"])
def test_yaml_reads_every_way_to_write_a_number(tmp_path, text, name):
    """YAML 1.1 takes 2e-4 for text."""
    (tmp_path / "c.yaml").write_text(f"{name}: {text}\n")
    value = getattr(ChronicalsConfig.from_yaml(tmp_path / "c.yaml"), name)
    assert type(value) is float and value == 2e-4


def test_yaml_overrides_win(tmp_path):
    (tmp_path / "c.yaml").write_text("seed: 1\nbatch_size: 2\n")
    config = ChronicalsConfig.from_yaml(tmp_path / "c.yaml", seed=5, max_steps=9)
    assert (config.seed, config.batch_size, config.max_steps) == (5, 2, 9)
    assert config.explicit == {"seed", "batch_size", "max_steps"}


BAD_YAML = {
    "fast": ("learning_rate: fast", "learning_rate='fast': Input should be a valid number"),
    "range": ("batch_size: 0", "batch_size=0: "),
    "unknown": ("batchsize: 1", "batchsize: no such field; did you mean 'batch_size'"),
    "list": ("- 1\n- 2", "expected 'field: value' lines, found list"),
    "text": ("hello", "expected 'field: value' lines, found str"),
    "empty": ("", "expected 'field: value' lines, found NoneType"),
    "syntax": ("a: [1", "not YAML"),
    "number as a name": ("1: 2", "1: no such field"),
    "switch as a name": ("on: 2", "no such field"),
}


@pytest.mark.parametrize("case", BAD_YAML)
def test_bad_yaml_is_a_configuration_error(tmp_path, case):
    text, message = BAD_YAML[case]
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigurationError) as error:
        ChronicalsConfig.from_yaml(tmp_path / "c.yaml")
    assert message in str(error.value)


def test_a_missing_file_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigurationError, match=r"nothing\.yaml: cannot be read"):
        ChronicalsConfig.from_yaml(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        ChronicalsConfig.from_yaml(tmp_path)


def test_a_file_that_is_not_text_is_a_configuration_error(tmp_path):
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigurationError, match=r"c\.yaml"):
        ChronicalsConfig.from_yaml(tmp_path / "c.yaml")


def test_to_dict_is_plain_and_whole(tmp_path):
    config = ChronicalsConfig(output_dir=tmp_path, lora_target_modules=["a"])
    fields = json.loads(json.dumps(config.to_dict()))
    assert set(fields) == {field.name for field in dataclasses.fields(config)}
    assert fields["output_dir"] == str(tmp_path) and fields["lora_target_modules"] == ["a"]
    assert ChronicalsConfig(**fields) == config
