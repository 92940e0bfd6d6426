"""Settings of a study: how many trials, by what they are compared, and when one is given up."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from chronicals.config import ConfigurationError
from chronicals.tuning.fields import SPEED

LARGER_IS_BETTER = ("accurac", "margin", "reward", "entropy", SPEED)
"""Parts of the names of metrics that are better when they are larger."""


def off_as_none(value: Any) -> Any:
    """Return ``off``, which YAML 1.1 reads as false, as the word for no pruner."""
    return "none" if value in (False, None, "off") else value


@dataclass(frozen=True, kw_only=True, config=pydantic.ConfigDict(extra="forbid"))
class StudySettings:
    """Settings of a study, which stand in ``tune`` beside the fields that are tuned."""

    trials: Annotated[int, Field(gt=1)] = Field(
        default=30, description="Trials of the search, the first of them with your own settings"
    )
    metric: str = Field(
        default="",
        description="What is compared: loss (held-out cross-entropy), a held-out metric of the "
        "objective, or tokens_per_second (default: the objective's)",
    )
    direction: Literal["minimize", "maximize"] | None = Field(
        default=None, description="Which values of the metric are better (default: by its name)"
    )
    pruner: Annotated[Literal["median", "hyperband", "none"], BeforeValidator(off_as_none)] = Field(
        default="median", description="What gives up a trial that is behind"
    )
    repeats: Annotated[int, Field(ge=0)] = Field(
        default=2, description="Further seeds with which the three best and your own run again"
    )

    @property
    def maximizes(self) -> bool:
        """True if larger values of the metric are better."""
        if self.direction is not None:
            return self.direction == "maximize"
        return any(part in self.metric for part in LARGER_IS_BETTER)


NAMES = frozenset(field.name for field in dataclasses.fields(StudySettings))  # type: ignore[arg-type]
"""Names in ``tune`` that are settings of the study; all others are dimensions of its space."""


def divided(tune: Mapping[str, Any]) -> tuple[StudySettings, dict[str, Any]]:
    """Return the settings and the dimensions of the space that ``tune`` of a recipe holds.

    Raises:
        ConfigurationError: a setting is wrong.
    """
    given = {name: value for name, value in tune.items() if name in NAMES}
    try:
        settings = StudySettings(**given)
    except pydantic.ValidationError as error:
        lines = [f"tune={{{e['loc'][0]!r}: {e['input']!r}}}: {e['msg']}" for e in error.errors()]
        raise ConfigurationError("\n".join(lines)) from None
    return settings, {name: value for name, value in tune.items() if name not in NAMES}
