"""Documents on which a student learns a teacher's distributions, as a unit of work.

The divergence is that of Jensen and Shannon with equal shares, at temperature 1 and without
cross-entropy, which every arm supports:

    ½ KL(p ‖ m) + ½ KL(q ‖ m),   m = ½ p + ½ q

p is the teacher's distribution and q the student's; the loss is the mean over the targets. Teachers
may also be built-in shapes with random weights. Their products are not counted, so such a row has
neither MFU nor a reference step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from chronicals.benchmark.floor import Job
from chronicals.benchmark.shapes import SHAPES
from chronicals.benchmark.work import Work
from chronicals.config import ConfigurationError

DISTILLATION = "distill"
"""Name of the objective."""

FIXED_SETTINGS = {"divergence": "jsd", "beta": 0.5}
"""Settings of the objective that all arms have."""

FREE_SETTINGS = ("teacher", "teacher_precision")
"""Settings that the user gives. Peers have the teacher in the dtype of the student's products."""


@dataclass(frozen=True)
class DistillationWork(Work):
    """A work with a teacher."""

    kind: ClassVar[str] = "distillation"

    @property
    def teacher(self) -> str:
        """Folder or hub name of its weights."""
        return str(self.fields["sections"][DISTILLATION]["teacher"])

    @property
    def models(self) -> dict[str, str]:
        models = super().models
        name = Path(self.teacher).name
        return {**models, name: self.teacher} if name in SHAPES else models

    def write_tokenizer(self) -> None:
        """Write the student's tokenizer beside a built-in teacher: for another class of models
        transformers would split texts differently.
        """
        if Path(self.teacher).name in SHAPES:
            from chronicals.models import load_tokenizer

            load_tokenizer(self.model).save_pretrained(self.teacher)

    def check_settings(self) -> None:
        for name, value in self.fields["sections"][DISTILLATION].items():
            if name not in FREE_SETTINGS and FIXED_SETTINGS.get(name) != value:
                raise ConfigurationError(
                    f"{DISTILLATION}.{name}={value!r}: not every arm has it; a benchmark takes "
                    f"{DISTILLATION}.teacher, and measures the "
                    "divergence of Jensen and Shannon"
                )

    def job(self) -> Job:
        return replace(super().job(), has_teacher=True)

    def described(self) -> dict[str, Any]:
        return {"objective": DISTILLATION, "teacher": Path(self.teacher).name}

    @classmethod
    def placed(cls, folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
        settings = fields.get("sections", {}).get(DISTILLATION, {})
        if "teacher" not in settings:
            raise ConfigurationError(
                f"{DISTILLATION}.teacher is missing: give a built-in shape ({', '.join(SHAPES)}) or a "
                "model"
            )
        teacher = cls.place_of(folder, settings["teacher"])
        section = {**FIXED_SETTINGS, **settings, "teacher": teacher}
        return {**fields, "sections": {DISTILLATION: section}}
