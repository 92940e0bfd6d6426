"""Recipes of forms: texts of fields, checked as the command line checks them."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from chronicals.config import ConfigurationError, Recipe
from chronicals.config.recipe import PATH_FIELDS
from chronicals.config.reward_entries import reward_entry
from chronicals.config.sections import PATH_SETTINGS, SECTIONS_FIELD, in_sections
from chronicals.ui.fields import FormField, recipe_fields
from chronicals.ui.place import OutsideRoot, Place

REMOTE_CODE = "trust_remote_code"
"""Field, and setting of objectives with a second model, that runs code of a model."""

READ_BELOW = ("data", "validation_data", "file")
"""Fields that name rows, which of a folder are read from all below it, links followed."""

WILDCARDS = re.compile(r"[*?\[]")

BEGINS_WITH_FIELD = re.compile(r"(\w+)(?:[=:]|\b)")
"""Beginning of a line of an error, which names its field."""


@dataclass(frozen=True)
class Faults(Exception):
    """Messages on what is wrong with a form.

    Attributes:
        by_field: messages by the name of their field.
        others: messages on no field of the form.
    """

    by_field: Mapping[str, str]
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([*self.by_field.values(), *self.others])


def faults_of(text: str, fields: Iterable[str]) -> Faults:
    """Return the lines of an error by the fields that they begin with."""
    known = set(fields)
    by_field: dict[str, str] = {}
    others: list[str] = []
    for line in text.splitlines():
        found = BEGINS_WITH_FIELD.match(line)
        setting = re.match(r"(\w+)(?:=\{|: \{?)'?(\w+)'?(?:: | is required)", line)
        name = found[1] if found else ""
        if setting and f"{setting[1]}.{setting[2]}" in known:
            name = f"{setting[1]}.{setting[2]}"
        if name in known:
            by_field[name] = f"{by_field[name]}\n{line}" if name in by_field else line
        elif line.strip():
            others.append(line)
    return Faults(by_field, tuple(others))


@dataclass(frozen=True)
class RecipeForm:
    """The form of an objective.

    Attributes:
        place: whose paths a recipe may name.
        objective: of the recipe.
        fields: of the form by name, settings of the objective included.
        remote_code: True if the server was started with the permission to run a model's own code.
        in_words: puts the fields that a message names into the form that they have in a recipe.
    """

    place: Place
    objective: str
    fields: Mapping[str, FormField]
    remote_code: bool = False
    in_words: Callable[[str], str] = str

    def values(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """Return the fields of a recipe that texts of the form stand for.

        Raises:
            Faults: the form has no field of such a name.
        """
        unknown = texts.keys() - self.fields.keys()
        if unknown:
            raise Faults({}, tuple(f"{name}: no such field" for name in sorted(unknown)))
        values = {name: self.fields[name].value(text) for name, text in texts.items()}
        return {"objective": self.objective, **in_sections(values)}

    def check(self, texts: Mapping[str, str]) -> None:
        """Check the recipe of a form.

        Raises:
            Faults: as ``recipe``.
        """
        self.recipe(texts)

    def recipe(self, texts: Mapping[str, str]) -> Recipe:
        """Return the recipe of a form.

        Raises:
            Faults: a value is wrong, is missing, or names a path outside of the root.
        """
        try:
            recipe = Recipe(**self.values(texts))
        except ConfigurationError as error:
            raise self.faults(str(error)) from None
        self._check_permitted(recipe)
        return recipe

    def faults(self, text: str) -> Faults:
        """Return the lines of an error of the recipe, by field."""
        found = faults_of(text, self.fields)
        worded = {name: self.in_words(line) for name, line in found.by_field.items()}
        return Faults(worded, tuple(map(self.in_words, found.others)))

    def texts(self, recipe: Mapping[str, Any]) -> dict[str, str]:
        """Return the texts of the form for the fields of a recipe.

        Args:
            recipe: fields as ``Recipe.read_yaml`` returns them.

        Raises:
            Faults: the form has no field of such a name.
        """
        flat = {
            name: value
            for name, value in recipe.items()
            if name not in ("objective", SECTIONS_FIELD)
        }
        for section, settings in (recipe.get(SECTIONS_FIELD) or {}).items():
            flat |= {f"{section}.{name}": value for name, value in settings.items()}
        unknown = flat.keys() - self.fields.keys()
        if unknown:
            try:
                Recipe(**{"model": "model", "data": "data", **recipe})
            except ConfigurationError as error:  # says what to write instead
                raise Faults({}, (self.in_words(str(error)),)) from None
            raise Faults({}, tuple(f"{name}: no such field" for name in sorted(unknown)))
        return {name: self.fields[name].text(value) for name, value in flat.items()}

    def yaml(self, texts: Mapping[str, str]) -> str:
        """Return the recipe of a form as YAML.

        Raises:
            Faults: as ``recipe``.
        """
        with TemporaryDirectory() as folder:
            file = Path(folder) / "recipe.yaml"
            self.recipe(texts).to_yaml(file)
            return file.read_text()

    def _check_permitted(self, recipe: Recipe) -> None:
        """Check what a form may not ask for: paths outside of the root, and a model's own code.

        Raises:
            Faults: it does.
        """
        faults: dict[str, str] = {}
        if not self.remote_code:
            asked = [REMOTE_CODE] if recipe.trust_remote_code else []
            for section, settings in recipe.sections.items():
                asked += [f"{section}.{REMOTE_CODE}"] if settings.get(REMOTE_CODE) else []
            for name in asked:
                faults[name] = (
                    f"{name}: the page runs no code of a model; start chronicals ui with "
                    "--trust-remote-code"
                )
        for given in recipe.rewards or ():
            if not self._is_own_reward(given):
                faults["rewards"] = (
                    f"rewards={given!r}: the page calls functions of files in its root alone; give "
                    "file.py:function"
                )
        for name, path in _paths(recipe):
            try:
                check_path(self.place, path, name in READ_BELOW)
            except OutsideRoot as error:
                faults[name] = f"{name}={error}"
        if faults:
            raise Faults(faults)

    def _is_own_reward(self, given: Any) -> bool:
        """Return whether a reward is no function of a module that anybody may have written.

        A function of any installed module, called with a model's texts, could do anything.
        """
        entry = reward_entry(given)
        module = entry.place.rpartition(":")[0]
        if not entry.is_function or module.endswith(".py"):
            return True
        return (self.place.root / module.replace(".", "/")).with_suffix(".py").is_file()


def _paths(recipe: Recipe) -> Iterable[tuple[str, str]]:
    """Return fields and the paths, or hub names, that they have."""
    for name in sorted(PATH_FIELDS):
        value = getattr(recipe, name)
        for one in value if isinstance(value, list) else [value]:
            if one is not None:
                yield name, str(getattr(one, "path", one))
    for section, settings in recipe.sections.items():
        for name in sorted(PATH_SETTINGS & settings.keys()):
            yield f"{section}.{name}", str(settings[name])
    for given in recipe.rewards or ():
        entry = reward_entry(given)
        where = entry.place.rpartition(":")[0]
        if entry.is_model:
            yield "rewards", entry.place
        elif where.endswith(".py"):
            yield "rewards", where


def check_path(place: Place, path: str, reads_below: bool = False) -> None:
    """Check that a path, or what a pattern of paths finds, is in the root.

    A name of the hub, which looks like a relative path, is one in the root that does not exist.

    Args:
        place: the root.
        path: path or pattern.
        reads_below: of a folder all below it is read, where links may lead out of the root, too.

    Raises:
        OutsideRoot: it is not.
    """
    pattern = WILDCARDS.search(path)
    if pattern is None:
        found = [place.inside(path)]
    else:
        place.inside(path[: pattern.start()].rpartition("/")[0] or ".")
        if ".." in Path(path).parts:
            raise OutsideRoot(f"{path!r}: leads upwards; name a pattern in this folder")
        matches = glob.glob(path, root_dir=place.root, recursive=True)  # as rows are read
        found = [place.inside(match) for match in matches]
    for one in found:
        if reads_below and one.is_dir():
            place.check_below(one)


def fields_of(settings: Mapping[str, FormField]) -> dict[str, FormField]:
    """Return the fields of a form: all but the objective, and the objective's settings."""
    shared = {name: field for name, field in recipe_fields().items() if name != "objective"}
    return {**shared, **settings}
