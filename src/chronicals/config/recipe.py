"""Recipe: a configuration with model and data, for the command line and YAML files."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass

from chronicals.config.checked_class import STRICT, Heading, configuration
from chronicals.config.config import ChronicalsConfig, laid_over
from chronicals.config.data_source import ColumnNames, OptionalSources, Sources, with_columns
from chronicals.config.errors import ConfigurationError
from chronicals.config.explanations import raise_together
from chronicals.config.presets import AUTO_PRESET, preset_fields
from chronicals.config.reward_entries import lasting_reward
from chronicals.config.sections import lasting_sections
from chronicals.config.values import as_dimensions, lasting, not_foreign

RESUME_FILE = "resume.yaml"
"""File in the folder of a run with the recipe that ``--resume`` reads. A user's own recipe there
may be called ``recipe.yaml``."""

METRICS_FILE = "metrics.jsonl"
"""File in the folder of a run with a line for each logged step."""

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


def preset(name: str, **overrides: Any) -> ChronicalsConfig:
    """Return the configuration of the preset ``name``, with ``overrides``.

    Args:
        name: one of ``PRESETS``, or a way and a card, as ``qlora-24gb``.
        **overrides: fields of a configuration, which win over those of the preset.

    Raises:
        ConfigurationError: there is no such preset, or a field is wrong.
    """
    if name == AUTO_PRESET:
        raise ConfigurationError(
            f"preset={name!r}: needs the model and the card; give it to chronicals train or plan, "
            "or name a way and a card, as preset='qlora-24gb'"
        )
    return ChronicalsConfig(**{**preset_fields(name), **overrides})


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
    columns: ColumnNames = Field(
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

    tune: Annotated[dict[str, Any], BeforeValidator(as_dimensions)] = Field(
        default_factory=dict,
        description="What chronicals tune tries, NAME=[LOW, HIGH, log] or NAME=[VALUE, VALUE], and "
        "settings of the study (docs/tuning.md); train does not read it",
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
            preset: name of a preset.
            file: YAML file with fields.
            resume: without a file, take the recipe that the run in ``output_dir`` has written. The
                folder of a checkpoint or a run stands for this run, whose folder is the default of
                ``output_dir``.
            **flags: single fields.

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
                objective = cls.read_yaml(file).get("objective", ChronicalsConfig().objective)
                asked = flags.get("objective", objective)
                if asked != objective:
                    raise ConfigurationError(
                        f"objective={asked!r}: the run in {str(run)!r} goes on with its own, which "
                        f"is {objective!r}; leave it out, or begin a new run with another "
                        "output_dir"
                    )
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

    def write_to(self, folder: Path) -> None:
        """Write the fields that were set, from which ``given`` resumes in any working folder.

        The file is written under another name first, then renamed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f".{RESUME_FILE}.{os.getpid()}"
        changes: dict[str, Any] = {}
        for name in PATH_FIELDS & self.explicit:
            value = getattr(self, name)
            if isinstance(value, list):
                changes[name] = [
                    dataclasses.replace(source, path=lasting(source.path)) for source in value
                ]
            elif isinstance(value, Path):
                changes[name] = value.absolute()
            else:
                changes[name] = value and lasting(value)
        if self.rewards is not None:
            changes["rewards"] = [lasting_reward(given) for given in self.rewards]
        if self.overwrite:  # a resumed run must not replace itself
            changes["overwrite"] = False
        self.replace(**changes, **lasting_sections(self.sections)).to_yaml(aside)
        os.replace(aside, folder / RESUME_FILE)

    def check(self) -> None:
        """Check rules that concern more than one field, and the data for evaluation."""
        raise_together(super().check, self._check_held_out)

    def _check_held_out(self) -> None:
        if self.validation_data is not None and self.validation_split:
            raise ConfigurationError(
                f"validation_split={self.validation_split}: validation_data is set too, and only "
                "one can say what is held out; "
                "leave out one of them"
            )
        if self.validation_data is not None or self.validation_split:
            return
        lines: list[str] = []
        if self.keep == "best":
            lines.append(
                "keep='best': nothing is held out to tell which is the best; set validation_data "
                "or validation_split"
            )
        if self.eval_steps is not None:
            lines.append(
                f"eval_steps={self.eval_steps}: nothing is held out to evaluate on; set "
                "validation_data or validation_split"
            )
        if lines:
            raise ConfigurationError("\n".join(lines))

    @property
    def sources(self) -> tuple[Any, Any]:
        """``data`` and ``validation_data``.

        Sources that have no columns of their own have ``columns``.
        """
        data = with_columns(self.data, self.columns)
        return data, with_columns(self.validation_data, self.columns)

    def config(self) -> ChronicalsConfig:
        """Return the configuration without the model and the data."""
        shared = {field.name for field in dataclasses.fields(ChronicalsConfig)}
        return ChronicalsConfig(**{name: getattr(self, name) for name in self.explicit & shared})
