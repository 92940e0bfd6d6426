"""Documents on which a student learns a teacher's distributions: what distillation is measured on.

The divergence is that of Jensen and Shannon with equal shares, at temperature 1, without
cross-entropy, which every arm has:

    ½ KL(p ‖ m) + ½ KL(q ‖ m),   m = ½ p + ½ q        p the teacher's, q the student's, mean over the targets

Teachers may be built-in shapes with random weights, too. Their products are not counted: such a row
has neither MFU nor a reference step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from chronicals.benchmark.floor import Job
from chronicals.benchmark.shapes import SHAPES
from chronicals.benchmark.work import Work
from chronicals.config import ConfigurationError

TAUGHT = "distill"
"""The objective that is measured so."""

SETTINGS = {"divergence": "jsd", "beta": 0.5}
"""Of the objective, beside the teacher."""

OURS = ("teacher", "teacher_precision")
"""Settings that are free; peers have the teacher in the type of the student's products."""


@dataclass(frozen=True)
class TaughtWork(Work):
    """``Work`` with a teacher."""

    kind: ClassVar[str] = "taught"

    @property
    def teacher(self) -> str:
        """Folder or hub name of its weights."""
        return str(self.fields["sections"][TAUGHT]["teacher"])

    @property
    def models(self) -> dict[str, str]:
        found = super().models
        name = Path(self.teacher).name
        return {**found, name: self.teacher} if name in SHAPES else found

    def write_tokenizer(self) -> None:
        """A built-in teacher has the student's; as its own, transformers would divide texts
        otherwise for another class.
        """
        if Path(self.teacher).name in SHAPES:
            from chronicals.models import load_tokenizer

            load_tokenizer(self.model).save_pretrained(self.teacher)

    def check_settings(self) -> None:
        for name, value in self.fields["sections"][TAUGHT].items():
            if name not in OURS and SETTINGS.get(name) != value:
                raise ConfigurationError(
                    f"{TAUGHT}.{name}={value!r}: not every arm has it; a benchmark takes "
                    f"{TAUGHT}.teacher, and measures the "
                    "divergence of Jensen and Shannon"
                )

    def job(self) -> Job:
        return replace(super().job(), taught=True)

    def described(self) -> dict[str, Any]:
        return {"objective": TAUGHT, "teacher": Path(self.teacher).name}

    @classmethod
    def placed(cls, folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
        given = fields.get("sections", {}).get(TAUGHT, {})
        if "teacher" not in given:
            raise ConfigurationError(
                f"{TAUGHT}.teacher is missing: give a built-in shape ({', '.join(SHAPES)}) or a "
                "model"
            )
        return {
            **fields,
            "sections": {
                TAUGHT: {**SETTINGS, **given, "teacher": cls.place_of(folder, given["teacher"])}
            },
        }
