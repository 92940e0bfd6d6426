"""The configuration of a run, its presets, and recipes in YAML."""

from chronicals.config.config import (
    LONGEST_TIMEOUT,
    ChronicalsConfig,
    Overlong,
    Role,
    TrainOn,
    Turns,
)
from chronicals.config.data_source import DataSource
from chronicals.config.errors import ConfigurationError
from chronicals.config.explanations import explain
from chronicals.config.presets import PRESETS
from chronicals.config.recipe import Recipe, preset

__all__ = [
    "LONGEST_TIMEOUT",
    "PRESETS",
    "ChronicalsConfig",
    "ConfigurationError",
    "DataSource",
    "Overlong",
    "Recipe",
    "Role",
    "TrainOn",
    "Turns",
    "explain",
    "preset",
]


def __dir__() -> list[str]:
    return sorted(__all__)
