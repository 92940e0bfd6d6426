"""Whole configurations of other tools, written here, become recipes that say what they do."""

import json
import math

import pytest
import yaml

import tiny
from chronicals.cli import main
from chronicals.config import ConfigurationError, Recipe
from chronicals.convert import convert

AXOLOTL = """\
base_model: base
trust_remote_code: true
datasets:
  - path: chats.jsonl
    type: chat_template
    field_messages: messages
sequence_len: 128
sample_packing: false
micro_batch_size: 2
gradient_accumulation_steps: 3
num_epochs: 2
warmup_ratio: 0.1
learning_rate: 2e-4
lr_scheduler: cosine
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
neftune_noise_alpha: 5
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    tiny.llama().save_pretrained(folder / "base")
    tiny.tokenizer().save_pretrained(folder / "base")
    rows = "".join(json.dumps(row) + "\n" for row in tiny.chat_rows(40))
    (folder / "chats.jsonl").write_text(rows)
    return folder


def written(folder, text, name="theirs.yaml"):
    path = folder / name
    path.write_text(text)
    return path


def converted(folder, text, name="theirs.yaml", **options):
    return convert(written(folder, text, name), **options)


def kinds(conversion):
    return {line.setting.name: line.answer.kind for line in conversion.lines}


def test_no_setting_is_dropped_and_each_has_a_reason_or_fields(tmp_path):
    conversion = converted(tmp_path, AXOLOTL)
    assert {*yaml.safe_load(AXOLOTL)} <= {*kinds(conversion)}
    assert {f"datasets[0].{name}" for name in ("path", "type", "field_messages")} <= {
        *kinds(conversion)
    }
    for line in conversion.lines:
        assert line.answer.fields or line.answer.reason, line
    assert kinds(conversion)["neftune_noise_alpha"] == "not there"
    assert "# neftune_noise_alpha: 5: NEFTune is not part of this version" in conversion.text()


def test_code_of_a_model_is_never_asked_for_and_lora_plus_only_where_theirs_has_it(tmp_path):
    fields = yaml.safe_load(converted(tmp_path, AXOLOTL).text())
    assert "trust_remote_code" not in fields and fields["use_lora_plus"] is False
    with_ratio = converted(tmp_path, AXOLOTL + "loraplus_lr_ratio: 8\n").recipe()
    assert with_ratio.use_lora_plus and with_ratio.lora_plus_ratio == 8


def test_a_value_out_of_range_is_told_with_its_line(tmp_path):
    wrong = AXOLOTL.replace("learning_rate: 2e-4", "learning_rate: -1")
    with pytest.raises(ConfigurationError, match=r"theirs\.yaml:13: learning_rate: -1: .*greater"):
        converted(tmp_path, wrong).text()


def test_an_objective_that_is_not_here_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="'ppo' is not part of this version"):
        converted(tmp_path, "model_name_or_path: m\nstage: ppo\ndataset: d\n").text()


def test_what_is_left_out_has_the_default_of_the_tool(tmp_path):
    factory = converted(tmp_path, "model_name_or_path: m\nstage: sft\ndataset: d\nlora_rank: 4\n")
    recipe = factory.recipe()
    assert (recipe.batch_size, recipe.gradient_accumulation_steps, recipe.num_epochs) == (8, 1, 3)
    assert (recipe.lora_rank, recipe.lora_alpha, recipe.use_lora_plus) == (4, 8, False)
    assert (recipe.learning_rate, recipe.lr_scheduler, recipe.warmup_steps) == (5e-5, "linear", 0)
    full = converted(
        tmp_path, "model_name_or_path: m\nfinetuning_type: full\ndataset: d\nlora_rank: 4\n"
    )
    assert not full.recipe().use_lora and kinds(full)["lora_rank"] == "not needed"


def test_a_section_of_a_recipe_stands_once(tmp_path):
    """With what is set there, and with what is left out."""
    file = tmp_path / "grpo.yaml"
    file.write_text(
        "model_name_or_path: m\ndataset_name: d\nreward_funcs: accuracy_reward\n"
        "num_generations: 4\nbeta: 0.1\n"
    )
    conversion = convert(file)
    written = tmp_path / "recipe.yaml"
    written.write_text(conversion.text())
    assert Recipe.from_yaml(written) == conversion.recipe()
    settings = yaml.safe_load(written.read_text())["grpo"]
    assert settings == {"answers": 4, "beta": 0.1, "max_new_tokens": 512}
    assert "# grpo.max_new_tokens: left out there: what TRL takes" in written.read_text()


def test_a_step_has_as_many_documents_on_other_cards(tmp_path):
    eight = converted(tmp_path, AXOLOTL, cards=8, nproc=2).recipe()
    assert eight.gradient_accumulation_steps == 12
    with pytest.raises(ConfigurationError, match="take a divisor of 6"):
        converted(tmp_path, AXOLOTL, cards=2, nproc=4)


def test_the_command_writes_a_recipe_that_passes_the_check(place, monkeypatch, capsys, caplog):
    written(place, AXOLOTL)
    monkeypatch.chdir(place)
    with pytest.raises(SystemExit) as done:
        main(["convert", "theirs.yaml"])
    assert done.value.code == 0 and "the recipe is recipe.yaml" in capsys.readouterr().out
    with pytest.raises(SystemExit) as again:
        main(["convert", "theirs.yaml"])
    assert again.value.code == 1 and "is there already" in capsys.readouterr().err
    with pytest.raises(SystemExit) as checked:
        main(["train", "recipe.yaml", "--check", "--cache-dir", "tokens"])
    assert checked.value.code == 0, capsys.readouterr().err
    steps = 2 * math.ceil(40 / (2 * 3))
    assert f"{steps} steps" in caplog.text
