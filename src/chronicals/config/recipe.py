"""Recipe: a configuration with model and data, for the command line and YAML files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass

from chronicals.config.config import (
    STRICT,
    ChronicalsConfig,
    ConfigurationError,
    configuration,
    laid_over,
    raise_together,
)
from chronicals.config.data_source import Columns, OptionalSources, Sources, with_columns
from chronicals.config.headings import Heading
from chronicals.config.paths import lasting
from chronicals.config.presets import preset_fields
from chronicals.config.sections import lasting_sections
from chronicals.config.values import not_foreign

RESUME_FILE = "resume.yaml"
"""File in the folder of a run with the recipe that ``--resume`` reads. A user's own recipe there
may be called ``recipe.yaml``."""

PATH_FIELDS = {
    "model",
    "base_model",
    "data",
    "validation_data",
    "chat_template",
    "output_dir",
    "cache_dir",
}
"""Fields that name files and folders."""


def _lasting(value: Any) -> Any:
    """Return the value of a field of paths with absolute paths."""
    if isinstance(value, list):
        return [dataclasses.replace(source, path=lasting(source.path)) for source in value]
    if isinstance(value, Path):
        return value.absolute()
    return value and lasting(value)


@configuration
@dataclass(kw_only=True, config=STRICT)
class Recipe(ChronicalsConfig):
    """A run that can be repeated from a file: ``chronicals train recipe.yaml``."""

    _model: ClassVar = Heading("Model and data")
    model: Annotated[str, AfterValidator(os.path.expanduser)] = Field(
        description="What to start from: folder, hub name or GGUF file of a model, folder of an "
        "adapter or a run, to train on"
    )
    base_model: Annotated[
        str | None, AfterValidator(lambda name: name and os.path.expanduser(name))
    ] = Field(default=None, description="The model of an adapter, where it does not say")
    data: Sources = Field(
        description="What to train on: a file, a folder, a pattern or a hub name; path=2 sees "
        "each row twice"
    )
    validation_data: OptionalSources = Field(
        default=None, description="What to evaluate on, as data"
    )
    columns: Columns = Field(
        default=None,
        description="Names of columns, THEIRS=OURS: question=prompt,answer=completion; in a "
        "recipe ours to theirs",
    )
    chat_template: Annotated[str | None, BeforeValidator(not_foreign("chat_template"))] = Field(
        default=None,
        description="For a tokenizer without one: chatml, llama3, ... or a file with Jinja text; "
        "it is saved with it",
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that comes with the model"
    )

    @classmethod
    def given(
        cls,
        preset: str | None = None,
        file: Path | None = None,
        resume: bool | Path = False,
        **flags: Any,
    ) -> Recipe:
        """Return the recipe of a preset, a YAML file and single fields; later ones win.

        Args:
            resume: without a file, take the recipe that the run in ``output_dir`` has written. The
                folder of a checkpoint or a run stands for this run, whose folder is the default of
                ``output_dir``.

        Raises:
            ConfigurationError: there is no such preset, file or run, a field is wrong, or the run
                has another objective.
        """
        if resume and file is None:
            run = Path(os.path.expanduser(flags.get("output_dir", ChronicalsConfig().output_dir)))
            if isinstance(resume, Path):
                run = resume.parent.parent if resume.parent.name == "checkpoints" else resume
                flags = {"output_dir": str(run), **flags}
            file = run / RESUME_FILE
            if file.exists():
                cls._check_objective(run, cls.read_yaml(file), flags)
            elif "model" in flags and "data" in flags:
                file = None
            else:
                raise ConfigurationError(
                    f"resume: {str(run)!r} holds no run to go on with (there is no {RESUME_FILE}); "
                    "name the folder of one by output_dir, or give model and data to begin one"
                )
        fields = laid_over(
            preset_fields(preset) if preset is not None else {},
            cls.read_yaml(file) if file is not None else {},
        )
        return cls(**laid_over(fields, flags))

    @staticmethod
    def _check_objective(run: Path, recipe: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
        """Raise ConfigurationError if another objective is set than the run's."""
        objective = recipe.get("objective", ChronicalsConfig().objective)
        asked = flags.get("objective", objective)
        if asked != objective:
            raise ConfigurationError(
                f"objective={asked!r}: the run in {str(run)!r} goes on with its own, which is "
                f"{objective!r}; leave it out, or begin "
                "a new run with another output_dir"
            )

    def write_to(self, folder: Path) -> None:
        """Write the fields that were set, from which ``given`` resumes in any working folder. The
        file is written under another name first, then renamed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f".{RESUME_FILE}.{os.getpid()}"
        changes = {name: _lasting(getattr(self, name)) for name in PATH_FIELDS & self.explicit}
        if self.overwrite:  # a resumed run must not replace itself
            changes["overwrite"] = False
        self.replace(**changes, **lasting_sections(self.sections)).to_yaml(aside)
        os.replace(aside, folder / RESUME_FILE)

    def check(self) -> None:
        """Check rules that concern more than one field, and the data for evaluation."""
        raise_together(super().check, self._check_split, self._check_keep, self._check_eval_steps)

    def _check_split(self) -> None:
        if self.validation_data is not None and self.validation_split:
            raise ConfigurationError(
                f"validation_split={self.validation_split}: validation_data is set too, and only "
                "one can say what is held out; "
                "leave out one of them"
            )

    def _check_keep(self) -> None:
        if self.keep == "best" and self.validation_data is None and not self.validation_split:
            raise ConfigurationError(
                "keep='best': nothing is held out to tell which is the best; set validation_data "
                "or validation_split"
            )

    def _check_eval_steps(self) -> None:
        if (
            self.eval_steps is not None
            and self.validation_data is None
            and not self.validation_split
        ):
            raise ConfigurationError(
                f"eval_steps={self.eval_steps}: nothing is held out to evaluate on; set "
                "validation_data or validation_split"
            )

    @property
    def sources(self) -> tuple[Any, Any]:
        """``data`` and ``validation_data``, with ``columns`` for the sources that have none of
        their own.
        """
        data = with_columns(self.data, self.columns)
        return data, with_columns(self.validation_data, self.columns)

    def config(self) -> ChronicalsConfig:
        """Return the configuration without the model and the data."""
        shared = {field.name for field in dataclasses.fields(ChronicalsConfig)}
        return ChronicalsConfig(**{name: getattr(self, name) for name in self.explicit & shared})
