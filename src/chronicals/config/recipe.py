"""Recipe: a configuration together with the model and the data, as the command line and YAML
files have it.
"""

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

KEPT = "resume.yaml"
"""In the folder of a run, the recipe that ``--resume`` reads; a user's own ``recipe.yaml`` may
well lie there.
"""

PATHS = {
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
    """A field of paths with absolute ones."""
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
        """From a preset, a YAML file and single fields, each of which wins over the ones before.

        Args:
            resume: without a file, go by the one that the run in ``output_dir`` has kept; as a
                folder, of a checkpoint or a run, by that of this run, which also goes on there
                unless ``output_dir`` is given.

        Raises:
            ConfigurationError: there is no such preset, file or run, a field is wrong, or the run
                has another objective.
        """
        if resume and file is None:
            run = Path(os.path.expanduser(flags.get("output_dir", ChronicalsConfig().output_dir)))
            if isinstance(resume, Path):
                run = resume.parent.parent if resume.parent.name == "checkpoints" else resume
                flags = {"output_dir": str(run), **flags}
            file = cls._kept_by(run, whole="model" in flags and "data" in flags)
            if file is not None:
                cls._check_objective(run, cls.read_yaml(file), flags)
        fields = laid_over(
            preset_fields(preset) if preset is not None else {},
            cls.read_yaml(file) if file is not None else {},
        )
        return cls(**laid_over(fields, flags))

    @staticmethod
    def _kept_by(run: Path, whole: bool) -> Path | None:
        """The recipe that a run has kept; None where there is none and what else was given is
        ``whole``.
        """
        if (run / KEPT).exists():
            return run / KEPT
        if not whole:
            raise ConfigurationError(
                f"resume: {str(run)!r} holds no run to go on with (there is no {KEPT}); name the "
                "folder of one by output_dir, "
                "or give model and data to begin one"
            )
        return None

    @staticmethod
    def _check_objective(run: Path, kept: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
        """Raises ConfigurationError where another objective is asked for than the run's."""
        own = kept.get("objective", ChronicalsConfig().objective)
        if (asked := flags.get("objective", own)) != own:
            raise ConfigurationError(
                f"objective={asked!r}: the run in {str(run)!r} goes on with its own, which is "
                f"{own!r}; leave it out, or begin "
                "a new run with another output_dir"
            )

    def write_to(self, folder: Path) -> None:
        """Write what was set, for ``given`` to resume by from any folder: aside, then renamed."""
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f".{KEPT}.{os.getpid()}"
        kept = {name: _lasting(getattr(self, name)) for name in PATHS & self.explicit}
        kept |= (
            {"overwrite": False} if self.overwrite else {}
        )  # the run that goes on is the one to keep
        self.replace(**kept, **lasting_sections(self.sections)).to_yaml(aside)
        os.replace(aside, folder / KEPT)

    def check(self) -> None:
        """Check what concerns more than one field, and what is evaluated on."""
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
        """``data`` and ``validation_data``, with ``columns`` for the sources that name none of
        their own.
        """
        return with_columns(self.data, self.columns), with_columns(
            self.validation_data, self.columns
        )

    def config(self) -> ChronicalsConfig:
        """The configuration without the model and the data."""
        own = {
            "model",
            "base_model",
            "data",
            "validation_data",
            "columns",
            "chat_template",
            "trust_remote_code",
        }
        return ChronicalsConfig(**{name: getattr(self, name) for name in self.explicit - own})
