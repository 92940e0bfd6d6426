import pytest

from chronicals.config import PRESETS, ChronicalsConfig, ConfigurationError, preset


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_is_a_valid_configuration_that_differs_from_the_default(name):
    config = preset(name)
    assert type(config) is ChronicalsConfig
    assert config.explicit == set(PRESETS[name])
    assert {field: getattr(config, field) for field in PRESETS[name]} == PRESETS[name]
    assert config != ChronicalsConfig()


def test_what_they_promise():
    assert preset("memory-lean").use_lora and preset("memory-lean").batch_size == 1
    assert not preset("fast").use_gradient_checkpointing
    assert preset("long-context").max_seq_length > 16 * ChronicalsConfig().max_seq_length - 1


def test_overrides_win():
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
