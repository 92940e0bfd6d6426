from pathlib import Path

import pytest

from chronicals.cli.wording import Wording
from chronicals.config import PRESETS, ChronicalsConfig, ConfigurationError, Recipe, preset

GIVEN = {"model": "some/model", "data": "rows.jsonl"}


def test_one_epoch_by_default():
    config = Recipe(**GIVEN).config()
    assert type(config) is ChronicalsConfig
    assert config.epochs == 1 and config.explicit == frozenset()


def test_steps_or_epochs_that_were_given_stay():
    assert Recipe(**GIVEN, num_epochs=3).config().num_epochs == 3
    config = Recipe(**GIVEN, max_steps=7).config()
    assert (config.max_steps, config.num_epochs) == (7, None)


def test_a_length_that_is_given_later_sets_aside_the_other_way_to_say_it(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("model: m\ndata: d\nnum_epochs: 2\n")
    for read in (Recipe.given(None, file, max_steps=7), Recipe.from_yaml(file, max_steps=7)):
        assert (read.config().max_steps, read.config().num_epochs) == (7, None)
    assert Recipe.given(None, file).config().num_epochs == 2
    file.write_text("model: m\ndata: d\nmax_steps: 7\n")
    assert Recipe.given(None, file, num_epochs=2).config().explicit == {"num_epochs"}
    with pytest.raises(ConfigurationError, match="give one of the two"):
        Recipe.given(None, file, max_steps=7, num_epochs=2)
    file.write_text("model: m\ndata: d\nmax_steps: 7\nnum_epochs: 2\n")
    with pytest.raises(ConfigurationError, match="give one of the two"):
        Recipe.given(None, file)


def test_no_number_of_epochs_is_one_epoch(tmp_path):
    (tmp_path / "recipe.yaml").write_text("model: m\ndata: d\nnum_epochs: null\n")
    recipe = Recipe.from_yaml(tmp_path / "recipe.yaml")
    assert recipe.config().epochs == 1
    assert recipe.replace(max_steps=7).config().epochs is None


def test_no_trackers():
    for said in ("none", ["none"], []):
        assert Recipe(**GIVEN, trackers=said).config().trackers == []
    with pytest.raises(ConfigurationError, match="trackers='none': Input should be 'tensorboard'"):
        Recipe(**GIVEN, trackers=["wandb", "none"])


def test_the_configuration_has_what_was_set_and_nothing_else():
    recipe = Recipe(
        **GIVEN,
        validation_data="held.jsonl",
        trust_remote_code=True,
        use_lora=True,
        seed=9,
        max_steps=3,
    )
    config = recipe.config()
    assert config == ChronicalsConfig(use_lora=True, seed=9, max_steps=3)
    assert config.explicit == {"use_lora", "seed", "max_steps"}
    assert not hasattr(config, "model")


def test_defaults():
    recipe = Recipe(**GIVEN)
    assert (recipe.validation_data, recipe.trust_remote_code) == (None, False)


@pytest.mark.parametrize("missing", GIVEN)
def test_model_and_data_are_required(missing):
    fields = {name: value for name, value in GIVEN.items() if name != missing}
    with pytest.raises(ConfigurationError, match=f"^{missing}: required, and was not given$"):
        Recipe(**fields)


def test_evaluations_need_something_held_out():
    with pytest.raises(
        ConfigurationError, match="^eval_steps=5: nothing is held out .*; set validation_data or"
    ):
        Recipe(**GIVEN, eval_steps=5)
    assert Recipe(**GIVEN, eval_steps=5, validation_split=0.1).config().eval_steps == 5
    assert Recipe(**GIVEN, eval_steps=5, validation_data="held.jsonl").config().eval_steps == 5
    with pytest.raises(ConfigurationError, match="early_stopping_patience needs eval_steps"):
        Recipe(**GIVEN, early_stopping_patience=2)


def test_errors_are_those_of_the_configuration():
    with pytest.raises(ConfigurationError, match="modle: no such field; did you mean 'model'"):
        Recipe(**GIVEN, modle="x")
    with pytest.raises(ConfigurationError, match="batch_size=0: "):
        Recipe(**GIVEN, batch_size=0)
    with pytest.raises(ConfigurationError, match="use_8bit_optimizer=True and "):
        Recipe(**GIVEN, use_8bit_optimizer=True, optimizer_state_dtype="bf16")
    with pytest.raises(ConfigurationError, match="give one of the two"):
        Recipe(**GIVEN, max_steps=5, num_epochs=2)


def test_a_section_without_a_line_is_empty_and_one_without_names_is_refused(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("model: m\ndata: d\ndpo:\n")
    asked = {"objective": "dpo", "sections": {"dpo": {"beta": 0.2}}}
    assert Recipe.given(file=file, **asked).sections == asked["sections"]
    file.write_text("model: m\ndata: d\nobjective: dpo\ndpo:\n")
    assert Recipe.given(file=file).sections == {"dpo": {}}
    for unnamed in ("0.1", "[beta]"):
        file.write_text(f"model: m\ndata: d\nobjective: dpo\ndpo: {unnamed}\n")
        with pytest.raises(
            ConfigurationError, match=r"^dpo=.*: settings .* have names; give 'dpo: {NAME: VALUE}"
        ):
            Recipe.given(file=file)


def test_a_path_in_a_section_is_a_text(tmp_path):
    given = Recipe(**GIVEN, objective="dpo", dpo={"reference_model": tmp_path})
    assert given.sections == {"dpo": {"reference_model": str(tmp_path)}}


def test_yaml_round_trip(tmp_path):
    recipe = Recipe(
        **GIVEN, learning_rate=1e-5, lora_target_modules=["q_proj"], trust_remote_code=True
    )
    recipe.to_yaml(tmp_path / "recipe.yaml")
    again = Recipe.from_yaml(tmp_path / "recipe.yaml")
    assert again == recipe and again.explicit == recipe.explicit
    assert again.config() == recipe.config()


def test_yaml_numbers_and_overrides(tmp_path):
    (tmp_path / "recipe.yaml").write_text("model: m\ndata: d\nlearning_rate: 2e-4\n")
    recipe = Recipe.from_yaml(tmp_path / "recipe.yaml", data="other", num_epochs=2)
    assert (recipe.model, recipe.data, recipe.learning_rate, recipe.num_epochs) == (
        "m",
        "other",
        2e-4,
        2,
    )
    assert recipe.config().num_epochs == 2


def test_a_run_is_resumed_by_the_recipe_it_kept(tmp_path, monkeypatch):
    given = {
        **GIVEN,
        "data": [{"path": "a.jsonl", "weight": 2.0}, "b.jsonl"],
        "learning_rate": 2e-5,
        "output_dir": tmp_path,
    }
    recipe = Recipe(**given, num_epochs=3, max_grad_norm=float("inf"), gate={"cut_row": 0.1})
    recipe.write_to(tmp_path)
    again = Recipe.given(None, None, resume=True, output_dir=tmp_path)
    assert again == recipe and again.explicit == recipe.explicit
    longer = Recipe.given(None, None, resume=True, output_dir=tmp_path, max_steps=9)
    assert (longer.model, longer.max_steps, longer.num_epochs) == ("some/model", 9, None)
    other = tmp_path / "other.yaml"
    other.write_text("model: m\ndata: d\n")
    assert Recipe.given(None, other, resume=True, output_dir=tmp_path).learning_rate == 2e-4
    assert [path.name for path in tmp_path.iterdir()].count("resume.yaml") == 1 and len(
        list(tmp_path.iterdir())
    ) == 2
    with pytest.raises(ConfigurationError, match="model: required"):
        Recipe.given(None, None, output_dir=tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigurationError,
        match="'chronicals-output' holds no run to go on with .*give model and data",
    ):
        Recipe.given(None, None, resume=True)
    assert Recipe.given(None, None, resume=True, **GIVEN).model == GIVEN["model"]
    recipe.write_to(tmp_path / "chronicals-output")
    assert Recipe.given(None, None, resume=True) == recipe


def test_a_checkpoint_is_resumed_by_the_recipe_of_its_run(tmp_path):
    """Which goes on in its own folder, wherever it was begun, or in one that is given."""
    run = tmp_path / "run"
    Recipe(**GIVEN, output_dir=Path("elsewhere"), learning_rate=2e-5).write_to(run)
    for named in (run, run / "checkpoints" / "step-00000002"):
        again = Recipe.given(None, None, resume=named)
        assert (again.output_dir, again.learning_rate) == (run, 2e-5)
        assert (
            Recipe.given(None, None, resume=named, output_dir=tmp_path / "b").output_dir
            == tmp_path / "b"
        )
    with pytest.raises(ConfigurationError, match="other' holds no run to go on with"):
        Recipe.given(None, None, resume=tmp_path / "other" / "checkpoints" / "step-00000002")


@pytest.mark.parametrize("own", ["dpo", "sft"])
def test_a_run_goes_on_with_its_own_objective(own, tmp_path):
    """Whose settings it has kept; sft is what a run has that named none."""
    Recipe(
        **GIVEN, **({"objective": "dpo", "dpo": {"beta": 0.1}} if own == "dpo" else {})
    ).write_to(tmp_path)
    for asked in ({"resume": True, "output_dir": tmp_path}, {"resume": tmp_path}):
        assert Recipe.given(**asked, objective=own).objective == own
        with pytest.raises(ConfigurationError) as refused:
            Recipe.given(**asked, objective="ipo")
        assert Wording({"objective": False, "output_dir": False})(str(refused.value)) == (
            f"--objective ipo: the run in '{tmp_path}' goes on with its own, which is '{own}'; "
            "leave it out, or begin "
            "a new run with another --output-dir"
        )


def test_the_best_needs_something_held_out():
    with pytest.raises(
        ConfigurationError, match="keep='best': nothing is held out.*validation_split"
    ):
        Recipe(**GIVEN, keep="best")
    assert Recipe(**GIVEN, keep="best", validation_split=0.1).config().keep == "best"


def test_the_home_folder_of_a_recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "recipe.yaml").write_text(
        "model: ~/base\ndata: d\noutput_dir: ~/out\ncache_dir: ~/tokens\n"
    )
    recipe = Recipe.from_yaml(tmp_path / "recipe.yaml")
    assert (recipe.model, recipe.output_dir, recipe.cache_dir) == (
        f"{tmp_path}/base",
        tmp_path / "out",
        tmp_path / "tokens",
    )
    assert (
        recipe.config().output_dir == tmp_path / "out"
        and Recipe(model="owner/name", data="d").model == "owner/name"
    )


@pytest.mark.parametrize(
    "text, twice",
    [("model: a\nmodel: b\ndata: d\n", "model"), ("data: {path: a, path: b}\n", "path")],
)
def test_a_field_that_stands_twice_is_refused(tmp_path, text, twice):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=rf"{twice} stands twice; keep one\n.*line"):
        Recipe.from_yaml(tmp_path / "recipe.yaml")


@pytest.mark.parametrize(
    "field", ["learning_rate", "lora_alpha", "lora_plus_ratio", "weight_decay", "adam_epsilon"]
)
def test_infinity_is_no_size(field):
    with pytest.raises(ConfigurationError, match=f"^{field}=inf: Input should be a finite number"):
        Recipe(**GIVEN, **{field: float("inf")})


def test_a_pattern_of_layers_is_a_regular_expression():
    with pytest.raises(
        ConfigurationError,
        match=r"^lora_target_modules='\(q': is no regular expression: missing \)",
    ):
        Recipe(**GIVEN, lora_target_modules="(q")
    for targets in (None, "all-linear", ".*q_proj", ["q_proj", "("]):
        assert Recipe(**GIVEN, lora_target_modules=targets).lora_target_modules == targets


@pytest.mark.parametrize(
    "line, meant",
    [
        ("lora_target_modules: q_proj", ["q_proj"]),
        ("lora_target_modules: q_proj, v_proj", ["q_proj", "v_proj"]),
        ("lora_target_modules: all-linear", "all-linear"),
        ("lora_target_modules: .*q_proj", ".*q_proj"),
        ("lora_target_modules: model.layers.0.mlp.up_proj", ["model.layers.0.mlp.up_proj"]),
        ("lora_target_modules: self_attn.q_proj, mlp.up_proj", ["self_attn.q_proj", "mlp.up_proj"]),
        ("memory: recompute_layers", ["recompute_layers"]),
        ("memory: recompute_layers,tiled_mlp", ["recompute_layers", "tiled_mlp"]),
        ("trackers: tensorboard", ["tensorboard"]),
        ("trackers: none", []),
        ("train_on_roles: assistant", ["assistant"]),
    ],
)
def test_a_word_where_words_are_listed_is_a_list_of_it(tmp_path, line, meant):
    (tmp_path / "recipe.yaml").write_text(f"model: m\ndata: d\n{line}\n")
    assert getattr(Recipe.from_yaml(tmp_path / "recipe.yaml"), line.partition(":")[0]) == meant


def test_a_wrong_word_is_told_with_those_there_are():
    with pytest.raises(
        ConfigurationError,
        match="^train_on_roles='assistent': Input should be 'system', 'developer'",
    ):
        Recipe(**GIVEN, train_on_roles="assistent")


def test_a_wrong_share_of_the_gate_is_named_with_its_rule():
    with pytest.raises(
        ConfigurationError, match="^gate: cut_stop='x': Input should be a valid number"
    ):
        Recipe(**GIVEN, gate=["duplicate_row=0.1", "cut_stop=x"])


def test_replace_keeps_the_kind():
    recipe = Recipe(**GIVEN).replace(seed=3)
    assert type(recipe) is Recipe and recipe.seed == 3 and recipe.explicit == {*GIVEN, "seed"}


def test_a_recipe_wins_over_the_preset_and_a_flag_over_both(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("model: some/model\ndata: rows.jsonl\nlora_rank: 64\nbatch_size: 3\n")
    recipe = Recipe.given("memory-lean", file, batch_size=5)
    assert (recipe.use_lora, recipe.gradient_accumulation_steps) == (True, 16)
    assert (recipe.lora_rank, recipe.batch_size) == (64, 5)
    with pytest.raises(ConfigurationError, match="preset='turbo': no such preset; there are fast"):
        Recipe.given("turbo", file)


def test_an_assignment_to_a_recipe_reaches_its_configuration():
    recipe = Recipe(**GIVEN)
    recipe.use_lora = True
    recipe.data = [{"path": "a.jsonl", "weight": 2}, "b.jsonl"]
    assert recipe == Recipe(**GIVEN | {"data": ["a.jsonl=2", "b.jsonl"]}, use_lora=True)
    assert recipe.config().explicit == {"use_lora"}
    with pytest.raises(ConfigurationError, match="nothing is held out to evaluate on"):
        recipe.eval_steps = 5
    assert recipe.eval_steps is None


def test_what_is_held_out_is_said_once(tmp_path):
    with pytest.raises(
        ConfigurationError, match="^validation_split=0.5: validation_data is set too"
    ):
        Recipe(**GIVEN, validation_split=0.5, validation_data="held.jsonl")
    file = tmp_path / "recipe.yaml"
    file.write_text("model: m\ndata: d.jsonl\nvalidation_split: 0.1\n")
    with pytest.raises(
        ConfigurationError, match="^validation_split=0.1: validation_data is set too"
    ):
        Recipe.given(file=file, validation_data="held.jsonl")
    assert Recipe.given(
        file=file, validation_data="held.jsonl", validation_split=0.0
    ).validation_data


def test_what_is_kept_names_files_from_anywhere(tmp_path, monkeypatch):
    """Folders, files and patterns that are here; hub names and what was left to its default stay
    as they are.
    """
    monkeypatch.chdir(tmp_path)
    for name in ("base", "more"):
        (tmp_path / name).mkdir()
    (tmp_path / "rows.jsonl").touch()
    data = ["rows.jsonl=2", "*.jsonl", {"path": "more", "split": "test"}, "owner/name"]
    recipe = Recipe(
        model="base",
        base_model="owner/model",
        data=data,
        validation_data="rows.jsonl",
        output_dir="out",
    )
    recipe.write_to(tmp_path / "run")
    kept = Recipe.read_yaml(tmp_path / "run" / "resume.yaml")
    assert kept == {
        "model": f"{tmp_path}/base",
        "base_model": "owner/model",
        "validation_data": f"{tmp_path}/rows.jsonl",
        "data": [
            {"path": f"{tmp_path}/rows.jsonl", "weight": 2.0},
            {"path": f"{tmp_path}/*.jsonl"},
            {"path": f"{tmp_path}/more", "split": "test"},
            {"path": "owner/name"},
        ],
        "output_dir": f"{tmp_path}/out",
    }
    monkeypatch.chdir(tmp_path / "more")
    assert Recipe.given(resume=True, output_dir=tmp_path / "run").model == f"{tmp_path}/base"


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_is_a_valid_configuration_that_differs_from_the_default(name):
    config = preset(name)
    assert type(config) is ChronicalsConfig
    assert config.explicit == set(PRESETS[name])
    assert {field: getattr(config, field) for field in PRESETS[name]} == PRESETS[name]
    assert config != ChronicalsConfig()


def test_what_presets_promise():
    assert preset("memory-lean").use_lora and preset("memory-lean").batch_size == 1
    assert not preset("fast").use_gradient_checkpointing
    assert preset("long-context").max_seq_length > 16 * ChronicalsConfig().max_seq_length - 1
    assert preset("long-context").fit == "settings"


def test_overrides_win_over_a_preset():
    config = preset("fast", batch_size=3, seed=5)
    assert (config.batch_size, config.seed, config.gradient_accumulation_steps) == (3, 5, 2)
    assert PRESETS["fast"]["batch_size"] == 8, "the preset itself is not changed"


def test_unknown_preset_lists_those_there_are():
    with pytest.raises(
        ConfigurationError,
        match="preset='quick': no such preset; there are fast, memory-lean, long",
    ):
        preset("quick")


def test_a_wrong_override_is_named():
    with pytest.raises(ConfigurationError, match="batch_size=0"):
        preset("fast", batch_size=0)
