"""Values that rules compute with: what is no number is told with its place, never a traceback."""

import math

import pytest
import yaml

from chronicals.config import ConfigurationError
from chronicals.convert import convert
from chronicals.convert.numbers import DIVISORS, NUMBERS

BASES = {
    "Axolotl": {"base_model": "m", "datasets": ["d"], "learning_rate": 2e-4},
    "LLaMA-Factory": {"model_name_or_path": "m", "stage": "sft", "dataset": "d"},
    "TRL": {"model_name_or_path": "m", "dataset_name": "d"},
    "GRPO": {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": "lib.f"},
}


def converted(folder, settings):
    file = folder / "theirs.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    return convert(file)


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_what_is_no_number_is_told_with_its_place(base, tmp_path):
    for name in sorted(NUMBERS):
        for value in (math.nan, math.inf, "two", {}, [[]]):
            with pytest.raises(ConfigurationError, match="must be a number") as refused:
                converted(tmp_path, {**base, name: value})
            lines = (tmp_path / "theirs.yaml").read_text().splitlines()
            line = [text.partition(":")[0] for text in lines].index(name) + 1
            assert f"theirs.yaml:{line}: {name}: " in str(refused.value)


def test_a_divisor_is_above_0(tmp_path):
    for name in sorted(DIVISORS):
        with pytest.raises(ConfigurationError, match=f"{name}: 0: must be greater than 0"):
            converted(tmp_path, {**BASES["TRL"], name: 0})


def test_numbers_inside_the_settings_of_a_schedule(tmp_path):
    base = {**BASES["TRL"], "lr_scheduler_type": "cosine_with_min_lr"}
    written = "".join(f"{name}: {value}\n" for name, value in base.items())
    file = tmp_path / "theirs.yaml"
    file.write_text(f"{written}learning_rate: 1e-4\nlr_scheduler_kwargs: {{min_lr: 1e-5}}\n")
    assert convert(file).fields["min_lr_ratio"] == pytest.approx(0.1)
    with pytest.raises(ConfigurationError, match="lr_scheduler_kwargs: 'low': must be a number"):
        converted(tmp_path, {**base, "lr_scheduler_kwargs": {"min_lr_rate": "low"}})


def test_a_least_rate_without_a_rate_is_not_there(tmp_path):
    settings = {**BASES["TRL"], "lr_scheduler_kwargs": {"min_lr": 1e-6}}
    answers = {line.setting.name: line.answer for line in converted(tmp_path, settings).lines}
    assert answers["lr_scheduler_kwargs"].kind == "not there"
    assert "learning_rate, which is not set" in answers["lr_scheduler_kwargs"].reason


@pytest.mark.parametrize("value", [0, False, {"a": 1}], ids=str)
def test_a_tracker_of_another_type_is_named(value, tmp_path):
    answers = [
        line.answer
        for line in converted(tmp_path, {**BASES["TRL"], "report_to": value}).lines
        if line.setting.name == "report_to"
    ]
    assert answers[0].kind == "not there" and str(value) in answers[0].reason


def test_data_that_are_no_list_are_no_traceback(tmp_path):
    converted(tmp_path, {**BASES["Axolotl"], "datasets": 5})
