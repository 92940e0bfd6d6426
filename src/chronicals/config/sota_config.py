"""The presets under the name of a module that older scripts import."""

from chronicals.config.config import ChronicalsConfig
from chronicals.config.presets import PRESETS, preset

__all__ = ["PRESETS", "ChronicalsConfig", "preset"]
