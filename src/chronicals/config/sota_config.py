"""The presets, under a module name that older scripts import."""

from chronicals.config.config import ChronicalsConfig
from chronicals.config.presets import PRESETS
from chronicals.config.recipe import preset

__all__ = ["PRESETS", "ChronicalsConfig", "preset"]
