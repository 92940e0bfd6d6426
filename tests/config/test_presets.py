"""Presets: a way and a card, what adapters are attached to, and sets of fields with a name."""

import pytest

from chronicals.config import ConfigurationError, Recipe, preset
from chronicals.config.presets import ADAPTER_PRESETS, CARDS, PRESETS, WAYS, preset_fields
from chronicals.lora.lora_presets import lora_preset


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("card", CARDS)
def test_a_way_and_a_card(way, card):
    config = preset(f"{way}-{card}gb")
    assert config.fit == "settings" and config.card_bytes == card * 10**9
    assert config.use_lora == (way != "full")
    assert config.quantization == ("nf4" if way == "qlora" else None)


@pytest.mark.parametrize("name", ADAPTER_PRESETS)
def test_presets_of_adapters_are_those_of_their_python_names(name):
    config = preset(name)
    ours = lora_preset(name.removeprefix("lora-"))
    assert config.use_lora
    assert config.lora_target_modules == ours.target_modules
    assert config.lora_target_parameters == ours.target_parameters
    assert (config.lora_dropout == 0.0) == (name == "lora-experts") == (ours.dropout == 0.0)


@pytest.mark.parametrize("name", ["qlora-32gb", "dora-24gb", "qlora", "qlora-24", "QLORA-24GB"])
def test_what_is_no_preset_is_answered_with_those_that_there_are(name):
    known = f"preset='{name}': no such preset; there are {', '.join(PRESETS)}, auto, or a way"
    with pytest.raises(ConfigurationError, match="as qlora-24gb$") as raised:
        preset(name)
    assert str(raised.value).startswith(known)


def test_a_recipe_and_a_field_win_over_a_way_and_a_card(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("model: m\ndata: rows.jsonl\nquantization: null\ngpu_memory: 20GiB\n")
    recipe = Recipe.given("qlora-24gb", file, fit="off")
    assert recipe.quantization is None and recipe.use_lora and recipe.fit == "off"
    assert recipe.card_bytes == 20 * 2**30


def test_auto_needs_the_model():
    with pytest.raises(ConfigurationError, match="preset='auto': needs the model and the card"):
        preset("auto")
    assert preset_fields("auto") == {"fit": "settings"}
