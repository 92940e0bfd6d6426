"""Search spaces: which values of which fields are tried.

A dimension is written as a list: values to choose from, ``[8, 16, 64]``, or a range with its scale,
``[1e-5, 1e-3, log]`` or ``[0.0, 0.3, linear]``. A range between whole numbers has whole numbers.
Settings of an objective have its name before them, ``dpo.beta``. ``lora_alpha_ratio`` is alpha as a
ratio of the rank; without it, alpha keeps the ratio of the recipe where the rank is tuned.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from chronicals.config import ConfigurationError, Recipe
from chronicals.config.config import laid_over
from chronicals.config.foreign import no_such_field
from chronicals.config.sections import SECTIONS_FIELD, SHARED
from chronicals.tuning import mixture
from chronicals.tuning.fields import OF_ADAPTERS, why_not_compared

ALPHA_RATIO = "lora_alpha_ratio"
"""Dimension that is no field: ``lora_alpha`` as a ratio of ``lora_rank``."""

SCALES = ("log", "linear")


@dataclass(frozen=True)
class Choice:
    """Values of which a trial has one."""

    values: tuple[Any, ...]

    @property
    def labels(self) -> list[Any]:
        """The values as optuna takes them: plain ones as they are, others as JSON."""
        plain = (type(None), bool, int, float, str)
        return [one if isinstance(one, plain) else json.dumps(one) for one in self.values]

    def label(self, value: Any) -> Any:
        """Return one of the values as optuna takes it."""
        return self.labels[self.values.index(value)]

    def holds(self, value: Any) -> bool:
        """Return whether this is one of the values."""
        return value in self.values

    def height(self, value: Any) -> float:
        """Return where a value stands among the values, from 0 to 1; NaN if it is none of them."""
        if value not in self.values:
            return math.nan
        return self.values.index(value) / (len(self.values) - 1)

    def to_json(self) -> list[Any]:
        """Return the dimension as a recipe has it."""
        return list(self.values)


@dataclass(frozen=True)
class Interval:
    """Numbers between two, both included; whole numbers if both are."""

    low: float
    high: float
    scale: str

    @property
    def whole(self) -> bool:
        """True if its numbers are whole."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def values(self) -> tuple[Any, ...]:
        """Both ends."""
        return (self.low, self.high)

    def label(self, value: Any) -> Any:
        """Return a value as optuna takes it, which is as it is."""
        return value

    def height(self, value: Any) -> float:
        """Return where a value stands between the ends, from 0 to 1, or beyond them.

        NaN for what is no number, or has no logarithm where the scale is one.
        """
        if not isinstance(value, (int, float)) or (self.scale == "log" and value <= 0):
            return math.nan
        scale = math.log if self.scale == "log" else float
        low = scale(self.low)
        return (scale(value) - low) / (scale(self.high) - low)

    def holds(self, value: Any) -> bool:
        """Return whether a value lies within."""
        kinds = int if self.whole else (int, float)
        return isinstance(value, kinds) and self.low <= value <= self.high

    def to_json(self) -> list[Any]:
        """Return the dimension as a recipe has it."""
        return [self.low, self.high, self.scale]


Dimension = Choice | Interval


def dimension_of(name: str, given: Any) -> Dimension:
    """Return the dimension that a recipe describes.

    Args:
        name: of the field, for messages.
        given: values, or both ends and a scale.

    Raises:
        ConfigurationError: there is nothing to choose, or the range is upside down.
    """
    said = f"tune={{{name!r}: {given!r}}}"
    values = [_number(one) for one in given] if isinstance(given, (list, tuple)) else [given]
    if len(values) == 3 and values[2] in SCALES:
        low, high, scale = values
        numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (low, high))
        if not numbers:
            raise ConfigurationError(f"{said}: the ends of a range are numbers; give two")
        if low > high:
            raise ConfigurationError(
                f"{said}: the range is upside down; write [{high!r}, {low!r}, {scale}]"
            )
        if scale == "log" and low <= 0:
            raise ConfigurationError(
                f"{said}: a logarithmic range begins above 0; raise {low!r}, or take linear"
            )
        values = [low] if low == high else values
        if low < high:
            return Interval(low, high, scale)
    kinds = [(type(one), one) for one in values]
    distinct = [one for number, one in enumerate(values) if kinds[number] not in kinds[:number]]
    if len(distinct) < 2:
        raise ConfigurationError(
            f"{said}: leaves no choice; give two values or more, or a range as [1e-5, 1e-3, log]"
        )
    return Choice(tuple(distinct))


def _number(value: Any) -> Any:
    """Return a text that is a finite number as one, because YAML 1.1 reads 1e-5 as text."""
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return number if math.isfinite(number) else value


@dataclass(frozen=True)
class SearchSpace:
    """The dimensions of a study, by name.

    Attributes:
        dimensions: of each field that is tuned.
        recipe: the user's own settings, with which fields agree.
    """

    dimensions: Mapping[str, Dimension]
    recipe: Recipe

    @classmethod
    def of(cls, given: Mapping[str, Any], recipe: Recipe, metric: str) -> SearchSpace:
        """Return the space of a recipe, checked.

        Args:
            given: dimensions as a recipe has them, by name.
            recipe: the user's own settings.
            metric: by which trials are compared.

        Raises:
            ConfigurationError: a field does not exist, a dimension is wrong, a value is refused, or
                trials that differ in a field cannot be compared. One error has all mistakes.
        """
        lines: list[str] = []
        dimensions: dict[str, Dimension] = {}
        for name, values in given.items():
            try:
                _check_name(name, values, recipe, metric, given)
                dimensions[name] = dimension_of(name, values)
            except ConfigurationError as error:
                lines.append(str(error))
        if ALPHA_RATIO in given and "lora_alpha" in given:
            lines.append(f"tune: lora_alpha and {ALPHA_RATIO} are the same; keep one")
        space = cls(dimensions, recipe)
        for name, dimension in dimensions.items():
            for value in dimension.values:
                try:
                    _check_settings(space.recipe_of({name: value}), name)
                except ConfigurationError as error:
                    lines.append(f"tune={{{name!r}: {dimension.to_json()}}}: {error}")
                    break
        if lines:
            raise ConfigurationError("\n".join(lines))
        return space

    def own(self) -> dict[str, Any]:
        """Return the user's own value of each dimension."""
        return {name: self._own_value(name) for name in self.dimensions}

    def _own_value(self, name: str) -> Any:
        if name == ALPHA_RATIO:
            return self.recipe.lora_alpha / self.recipe.lora_rank
        section, _, setting = name.rpartition(".")
        if not section:
            return getattr(self.recipe, name)
        if section == mixture.PREFIX:
            return mixture.own_size(self.recipe, setting)
        given = self.recipe.sections.get(section, {})
        return given[setting] if setting in given else _default_setting(section, setting)

    def holds(self, params: Mapping[str, Any]) -> bool:
        """Return whether the values of all dimensions lie in the space."""
        return all(dimension.holds(params[name]) for name, dimension in self.dimensions.items())

    def all(self) -> Iterator[dict[str, Any]]:
        """Yield all combinations of values; none if a dimension is of real numbers."""
        values: list[Iterable[Any]] = []
        for dimension in self.dimensions.values():
            if isinstance(dimension, Choice):
                values.append(dimension.values)
            elif dimension.whole:
                values.append(range(int(dimension.low), int(dimension.high) + 1))
            else:
                return
        for combination in itertools.product(*values):
            yield dict(zip(self.dimensions, combination))

    def fields(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a recipe that values of dimensions stand for.

        Args:
            params: values by dimension; settings of sections become a section each. Sizes of the
                model are no fields.
        """
        fields: dict[str, Any] = {}
        sections: dict[str, dict[str, Any]] = {}
        for name, value in params.items():
            section, _, setting = name.rpartition(".")
            if section and section != mixture.PREFIX:
                sections.setdefault(section, {})[setting] = value
            elif not section and name != ALPHA_RATIO:
                fields[name] = value
        rank = fields.get("lora_rank", self.recipe.lora_rank)
        ratio = params.get(ALPHA_RATIO)
        if ratio is None and "lora_rank" in fields and "lora_alpha" not in fields:
            ratio = self.recipe.lora_alpha / self.recipe.lora_rank
        if ratio is not None:
            fields["lora_alpha"] = ratio * rank
        if sections:
            fields[SECTIONS_FIELD] = sections
        return fields

    def flat_fields(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that values stand for, with settings of sections as ``dpo.beta``."""
        fields = self.fields(params)
        for section, settings in fields.pop(SECTIONS_FIELD, {}).items():
            fields |= {f"{section}.{name}": value for name, value in settings.items()}
        return fields

    def recipe_of(self, params: Mapping[str, Any]) -> Recipe:
        """Return the user's recipe with the values of some dimensions.

        What the user has already is left as it is: the first trial is the user's own run.

        Raises:
            ConfigurationError: the values are not taken.
        """
        changed = {name: value for name, value in params.items() if value != self._own_value(name)}
        explicit = {name: getattr(self.recipe, name) for name in self.recipe.explicit}
        return Recipe(**laid_over(explicit, self.fields(changed)))

    def to_json(self) -> dict[str, Any]:
        """Return the dimensions as a recipe has them."""
        return {name: dimension.to_json() for name, dimension in self.dimensions.items()}


def _check_name(
    name: str, values: Any, recipe: Recipe, metric: str, given: Mapping[str, Any]
) -> None:
    """Check that a field exists, and that trials which differ in it can be compared.

    Raises:
        ConfigurationError: it does not, or they cannot.
    """
    known = [field.name for field in dataclasses.fields(Recipe)]
    section, _, setting = name.rpartition(".")
    if section == mixture.PREFIX:
        mixture.check_size(recipe, setting, values)
    elif section and section not in (recipe.objective, SHARED):
        raise ConfigurationError(
            f"tune={{{name!r}: {values!r}}}: {section!r} is not the objective of the recipe, which "
            f"is {recipe.objective!r}; leave it out"
        )
    if not section and name not in (*known, ALPHA_RATIO):
        raise ConfigurationError(f"tune: {no_such_field(name, values, [*known, ALPHA_RATIO])}")
    reason = why_not_compared(name, recipe.objective, metric)
    adapters = name in OF_ADAPTERS or name == ALPHA_RATIO
    if reason is None and adapters and not recipe.use_lora and "use_lora" not in given:
        reason = "changes nothing where all weights are trained; set use_lora=True, or leave it out"
    if reason is not None:
        raise ConfigurationError(f"tune={{{name!r}: {values!r}}}: {reason}")


def _check_settings(recipe: Recipe, name: str) -> None:
    """Check the settings of a recipe's objective, if a dimension is one of them.

    Raises:
        ConfigurationError: there is no such setting, or it does not take its value.
    """
    section = name.rpartition(".")[0]
    if section and section != mixture.PREFIX:
        from chronicals.objectives import build_objective

        build_objective(recipe.config())


def _default_setting(section: str, setting: str) -> Any:
    """Return the default of a setting of an objective; None if it has none."""
    from chronicals.objectives.registry import BESIDE, OBJECTIVES

    settings = BESIDE[section] if section in BESIDE else OBJECTIVES[section].Settings
    found = {field.name: field.default for field in dataclasses.fields(settings)}
    default = found.get(setting)
    default = getattr(default, "default", default)  # of pydantic's Field
    return None if default is dataclasses.MISSING else default
