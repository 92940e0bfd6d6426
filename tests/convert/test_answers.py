"""The tables of names answer a setting with fields, with a reason, or with what is missing."""

import dataclasses

import pytest

from chronicals.config import Recipe, foreign, foreign_values
from chronicals.convert.answers import FIELDS, from_tables

MAPPED = [
    ("lora_r", 8, {"lora_rank": 8}),
    ("adapter", "qlora", {"use_lora": True, "quantization": "nf4"}),
    (
        "optimizer",
        "paged_adamw_8bit",
        {"use_8bit_optimizer": True, "memory": ["offload_optimizer_states"]},
    ),
    ("optim", "adamw_anyprecision", {"optimizer_state_dtype": "bf16"}),
    ("bf16", True, {"mixed_precision": "bf16"}),
    ("bf16", False, {"mixed_precision": "fp32"}),
    ("wandb_project", "p", {"project": "p", "trackers": ["wandb"]}),
    ("dataset_text_field", "body", {"columns": {"text": "body"}}),
    ("max_grad_norm", 0, {"max_grad_norm": "inf"}),
    ("packing_strategy", "bfd_split", {"packing_strategy": "best-fit", "overlong": "split"}),
    ("quantization_bit", 4, {"quantization": "nf4"}),
    ("attn_implementation", "sdpa", {"use_flash_attention": False}),
    ("mask_history", True, {"train_on_turns": "last"}),
    ("seed", 7, {"seed": 7}),
]


@pytest.mark.parametrize(("name", "value", "fields"), MAPPED)
def test_a_setting_becomes_fields(name, value, fields):
    answer = from_tables(name, value, "sft")
    assert (answer.kind, answer.fields) == ("mapped", fields)


@pytest.mark.parametrize(
    ("name", "value", "kind", "said"),
    [
        ("logging_steps", 10, "not needed", "metrics.jsonl"),
        ("optim", "adamw_torch", "not needed", "AdamW is the optimizer"),
        ("fp16", False, "not needed", "off"),
        ("flash_attention", True, "not needed", "on wherever card and model allow it"),
        ("optim", "lion", "not there", "no other one is part of this version"),
        ("neftune_noise_alpha", 5, "not there", "NEFTune is not part"),
        ("adapter", "llama-adapter", "not there", "adapters of other kinds"),
        ("quantization_bit", 8, "not there", "others are not part"),
        ("nobody_knows", 1, "not known", "no table has this name"),
    ],
)
def test_a_setting_without_fields_has_a_reason(name, value, kind, said):
    answer = from_tables(name, value, "sft")
    assert answer.kind == kind and said in answer.reason and not answer.fields


def test_a_setting_of_a_loss_goes_to_the_section_of_the_objective():
    assert from_tables("beta", 0.2, "kto").fields == {"kto.beta": 0.2}
    assert from_tables("pref_beta", 0.2, "orpo").fields == {"orpo.beta": 0.2}
    assert from_tables("beta", 0.2, "sft").kind == "not needed"


def test_every_name_of_the_tables_is_known_and_sets_fields_that_exist():
    names = {
        *foreign.OUR_NAMES,
        *foreign.INSTEAD,
        *foreign.NOWHERE,
        *foreign.SETTINGS_BY_NAME,
        *foreign_values.BY_VALUE,
    }
    assert set(FIELDS) == {field.name for field in dataclasses.fields(Recipe)} and len(names) > 600
    for name in names:
        values = [value for value in foreign_values.BY_VALUE.get(name, {}) if value != "*"]
        for value in [True, False, "unheard-of", *values]:
            answer = from_tables(name, value, "dpo")
            assert answer.kind != "not known" and (answer.fields or answer.reason), (name, value)
            assert {one.partition(".")[0] for one in answer.fields} <= {
                *FIELDS,
                "dpo",
                "grpo",
                "rloo",
            }, name
