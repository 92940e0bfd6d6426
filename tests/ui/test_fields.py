"""Forms: every field is there, and form, YAML and recipe are the same."""

import dataclasses

import pytest

from chronicals.config import Recipe
from chronicals.config.recipe import preset_fields
from chronicals.ui.command_forms import CommandForm
from chronicals.ui.drafts import Drafts
from chronicals.ui.fields import FormField, recipe_fields, section_fields
from chronicals.ui.place import Place
from chronicals.ui.recipes import Faults, RecipeForm, fields_of

SCHEMA = {
    "properties": {
        "beta": {"type": "number", "default": 0.1, "exclusiveMinimum": 0, "description": "held"},
        "loss": {"enum": ["sigmoid", "hinge"], "default": "sigmoid"},
        "reference_model": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "trust_remote_code": {"type": "boolean", "default": False},
    }
}
"""Settings of an objective; the real ones need torch to be read."""

VALUES = {
    "model": "owner/name",
    "base_model": "owner/base",
    "data": "train.jsonl",
    "validation_data": [{"path": "a,b.jsonl", "weight": 2.0}, {"path": "c.jsonl"}],
    "columns": {"prompt": "question"},
    "chat_template": "chatml",
    "trust_remote_code": True,
    "num_epochs": 3,
    "lora_target_modules": ["q_proj", "v_proj"],
    "lora_target_parameters": ["experts.down_proj"],
    "lora_rank_pattern": {"q_proj": 3},
    "lora_alpha_pattern": {"q_proj": 3.0},
    "lora_layers": [0, 1, 20],
    "lora_modules_to_save": ["lm_head"],
    "lora_trainable_tokens": ["<a>", 7],
    "lora_init": "gaussian",
    "max_grad_norm": None,
    "memory": ["recompute_layers"],
    "quantization": "nf4",
    "rewards": ["regex([.]$)=2", "length(512)"],
    "reward_on_error": 0.5,
    "train_on_roles": ["assistant", "tool"],
    "gate": {"empty": 0.1},
    "validation_split": 0.0,
    "keep": "last",
    "trackers": ["tensorboard"],
    "project": "null hypothesis",
    "run_name": "true",
    "output_dir": "runs/a",
    "cache_dir": "cache",
    "gpu_memory": 24.0,
    "cache_memory": 1.5,
    "expert_memory": 8.0,
    "expert_predictor": "none",
    "overlong": "cut",
    "train_on": "answers",
    "tune": {"lora_rank": [8, 16], "learning_rate": [1.5, 2.5, "log"]},
}
"""Values of fields that do not follow from their kind."""


@pytest.fixture
def form(tmp_path):
    return RecipeForm(
        Place(tmp_path.resolve()), "dpo", fields_of(section_fields("dpo", SCHEMA)), remote_code=True
    )


def sample(name):
    field = recipe_fields()[name]
    if name in VALUES:
        return VALUES[name]
    if field.kind == "switch":
        return field.default != "true"
    if field.kind == "choice":
        return field.choices[-1]
    return {"number": lambda: 1 if "< 1" not in field.bounds else 0.5}[field.kind]()


def test_each_field_of_a_recipe_is_in_the_form_with_its_help():
    fields = recipe_fields()
    assert fields.keys() | {"sections"} == {field.name for field in dataclasses.fields(Recipe)}
    assert all(field.help for field in fields.values())
    assert fields["batch_size"].bounds == "> 0" and fields["batch_size"].default == "4"
    assert fields["lr_scheduler"].choices == ("cosine", "linear", "constant", "wsd")
    assert fields["model"].required and not fields["base_model"].required
    assert fields["learning_rate"].heading == "Length, batch and learning rate"


@pytest.mark.parametrize("name", sorted(recipe_fields().keys() - {"objective"}))
def test_form_to_yaml_to_recipe_is_the_identity(form, name, tmp_path):
    """Of each field by itself, so that none needs another."""
    value = sample(name)
    field = recipe_fields()[name]
    assert field.value(field.text(value)) == value or name in ("rewards",)
    beside = {"model": "m", "data": "d"}
    together = {
        "quantization": {"use_lora": True},
        "use_dora": {"use_lora": True},
        "early_stopping_patience": {"eval_steps": 5, "validation_split": 0.5},
        "eval_steps": {"validation_split": 0.5},
        "expert_memory": {"memory": ["offload_experts"]},
        "expert_predictor": {"memory": ["offload_experts"], "expert_memory": 8.0},
        "load_in_4bit": {"quantization": "nf4"},
    }.get(name, {})
    given = {**beside, **together, name: value, "objective": "dpo"}
    try:
        recipe = Recipe(**given)
    except ValueError as error:
        pytest.fail(f"the sample is wrong: {error}")
    texts = form.texts({key: given[key] for key in given if key != "objective"})
    assert form.recipe(texts) == recipe
    file = tmp_path / "recipe.yaml"
    file.write_text(form.yaml(texts))
    again = Recipe.from_yaml(file)
    assert again == recipe and again.explicit == recipe.explicit
    assert form.recipe(form.texts(Recipe.read_yaml(file))) == recipe


def test_settings_of_the_objective_go_to_its_section(form, tmp_path):
    texts = {"model": "m", "data": "d", "dpo.beta": "0.3", "dpo.loss": "hinge"}
    assert form.recipe(texts).sections == {"dpo": {"beta": 0.3, "loss": "hinge"}}
    file = tmp_path / "recipe.yaml"
    file.write_text(form.yaml(texts))
    assert form.texts(Recipe.read_yaml(file)) == texts


def test_texts_are_read_as_the_command_line_reads_them(form):
    texts = {
        "model": "m",
        "data": "a.jsonl=2\nb.jsonl",
        "learning_rate": "2e-5",
        "lora_layers": "0-2,7",
        "memory": "recompute_layers, offload_optimizer_states",
        "gpu_memory": "24GB",
        "columns": "question=prompt",
        "max_grad_norm": "inf",
        "max_steps": "auto",
    }
    recipe = form.recipe(texts)
    assert [source.weight for source in recipe.data] == [2.0, 1.0]
    assert recipe.learning_rate == 2e-5 and recipe.lora_layers == [0, 1, 2, 7]
    assert recipe.memory == ["recompute_layers", "offload_optimizer_states"]
    assert recipe.gpu_memory == 24.0 and recipe.columns == {"prompt": "question"}
    assert recipe.max_grad_norm is None and "max_steps" not in recipe.explicit


def test_a_wrong_value_is_told_at_its_field_in_words_of_a_recipe(form):
    form = dataclasses.replace(form, in_words=lambda text: f"words: {text}")
    with pytest.raises(Faults) as raised:
        form.recipe({"model": "m", "batch_size": "-1", "learning_rate": "fast"})
    assert raised.value.by_field["batch_size"].startswith("words: batch_size=-1: Input should be")
    assert raised.value.by_field.keys() == {"batch_size", "learning_rate", "data"}


def test_errors_of_settings_belong_to_their_setting(form):
    found = form.faults("dpo={'beta': -1.0}: Input should be greater than 0\nno field at all")
    assert found.by_field.keys() == {"dpo.beta"} and found.others == ("no field at all",)


@pytest.mark.parametrize(
    "name, text",
    [
        ("model", "../elsewhere"),
        ("model", "link"),
        ("data", "/etc/passwd"),
        ("data", "{path: ../x.jsonl, weight: 2}"),
        ("data", "../*.jsonl"),
        ("data", "link/*.jsonl"),
        ("validation_data", "a.jsonl\n~/x.jsonl"),
        ("output_dir", "/tmp/elsewhere"),
        ("cache_dir", ".."),
        ("chat_template", "../template.jinja"),
        ("dpo.reference_model", "../model"),
        ("rewards", "../reward.py:score"),
        ("rewards", "/tmp/reward.py:score"),
    ],
)
def test_paths_out_of_the_root_are_refused(form, tmp_path, name, text):
    (tmp_path / "link").symlink_to("/etc")
    texts = {"model": "m", "data": "d", name: text}
    form = dataclasses.replace(form, objective="grpo") if name == "rewards" else form
    with pytest.raises(Faults) as raised:
        form.recipe(texts)
    assert "is outside of" in str(raised.value) or "leads upwards" in str(raised.value)


@pytest.mark.parametrize(
    "text", ["rows", "rows/deep", "ro*", "{root}/r*", "rows/**/*", "a.jsonl\nrows"]
)
@pytest.mark.parametrize("target", ["secret.jsonl", ""])
def test_links_below_a_folder_of_rows_may_not_lead_out_of_the_root(form, tmp_path, text, target):
    """To a file, or to a folder; also behind a link to a folder in the root."""
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "secret.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "rows").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "rows" / "deep").symlink_to(tmp_path / "other")
    (tmp_path / "other" / "circle").symlink_to(tmp_path / "rows")
    (tmp_path / "other" / ".hidden").symlink_to("/etc")  # is not read
    text = text.format(root=tmp_path)
    form.recipe({"model": "m", "data": text})
    (tmp_path / "other" / "out").symlink_to(outside / target)
    with pytest.raises(Faults, match="is outside of"):
        form.recipe({"model": "m", "data": text})
    show = CommandForm(
        form.place,
        ["data", "show"],
        {"file": FormField("file", "", "text", "")},
        ["file"],
        ["file"],
    )
    if "\n" not in text:
        with pytest.raises(Faults, match="file='"):
            show.check({"file": text})


def test_names_of_the_hub_and_patterns_in_the_root_are_taken(form, tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "a.jsonl").touch()
    recipe = form.recipe({"model": "Qwen/Qwen2.5-0.5B", "data": "parts/*.jsonl\nowner/set"})
    assert recipe.model == "Qwen/Qwen2.5-0.5B"
    assert [source.path for source in recipe.data] == ["parts/*.jsonl", "owner/set"]


def test_a_reward_is_built_in_or_of_a_file_in_the_root(form, tmp_path):
    form = dataclasses.replace(form, objective="grpo")
    texts = {"model": "m", "data": "d"}
    (tmp_path / "mine.py").touch()
    for reward in ("arithmetic", "mine.py:score", "mine:score"):
        form.recipe({**texts, "rewards": reward})
    with pytest.raises(Faults, match="functions of files in its root"):
        form.recipe({**texts, "rewards": "subprocess:getoutput"})


@pytest.mark.parametrize("name", ["trust_remote_code", "dpo.trust_remote_code"])
def test_code_of_a_model_runs_only_where_the_server_permits_it(form, name):
    texts = {"model": "m", "data": "d", name: "true"}
    form.recipe(texts)
    with pytest.raises(Faults, match="--trust-remote-code"):
        dataclasses.replace(form, remote_code=False).recipe(texts)


def test_a_field_that_is_not_there_is_told_by_the_recipe(form):
    with pytest.raises(Faults, match="learning_rate"):
        form.texts({"lr": 1e-4})
    with pytest.raises(Faults, match="no such field"):
        form.recipe({"nonsense": "1"})


def test_presets_have_texts(form):
    for name in ("memory-lean", "qlora-24gb", "lora-experts"):
        fields = preset_fields(name)
        texts = {key: form.fields[key].text(value) for key, value in fields.items()}
        recipe = form.recipe({"model": "m", "data": "d", **texts})
        assert {key: getattr(recipe, key) for key in fields} == fields


def test_a_draft_is_in_a_file(tmp_path):
    drafts = Drafts(Place(tmp_path.resolve()))
    assert drafts.texts("sft") == {} and drafts.revision("sft") == 0
    drafts.fill_in("sft", "model", "<script>alert(1)</script>")
    first = drafts.revision("sft")
    drafts.fill_in("sft", "batch_size", "abc")  # wrong, and kept
    other = Drafts(Place(tmp_path.resolve()))
    assert other.texts("sft") == {"model": "<script>alert(1)</script>", "batch_size": "abc"}
    assert other.revision("sft") != first and other.texts("dpo") == {}
    other.fill_in("sft", "model", " ")
    assert drafts.texts("sft") == {"batch_size": "abc"}
