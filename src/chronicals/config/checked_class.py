"""Dataclasses of configurations: checked when they are made, with headings and fields left open."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import pydantic

from chronicals.config.explanations import explain
from chronicals.config.sections import gathered

AUTO = "auto"
"""Value of a field that the run decides, as if it had been left out."""

DECIDED = frozenset(
    {
        "learning_rate",
        "batch_size",
        "gradient_accumulation_steps",
        "max_steps",
        "num_epochs",
        "warmup_steps",
        "memory",
        "keep",
        "overlong",
        "train_on",
        "max_documents",
        "dataset_num_proc",
        "trackers",
        "use_flash_attention",
        "use_fused_kernels",
        "use_sequence_packing",
        "use_gradient_checkpointing",
        "use_torch_compile",
        "use_cuda_graphs",
        "use_lora_plus",
        "use_rslora",
        "use_dora",
        "lora_rank",
        "lora_alpha",
        "lora_dropout",
        "lora_target_modules",
    }
)
"""Fields whose default depends on the objective, the data, the model or the machine."""


def is_auto(name: str, value: Any) -> bool:
    """Return whether a field's value leaves the decision to the run."""
    return name in DECIDED and value in ([AUTO], AUTO)


_T = TypeVar("_T", bound=type)


STRICT = pydantic.ConfigDict(extra="forbid", validate_default=True)


def configuration(cls: _T) -> _T:
    """Decorate a checked dataclass, so that its errors are ConfigurationErrors.

    Its attribute ``explicit`` has the names of the fields that were set, that is, passed with a
    value other than ``auto``. Its docstring gets a line for each field, which ``help`` shows.
    """
    checked: Callable[..., None] = cls.__init__  # type: ignore[misc]
    names = {field.name for field in dataclasses.fields(cls)}

    @functools.wraps(checked)
    def __init__(self: Any, **given: Any) -> None:
        fields = {
            name: value
            for name, value in gathered(given, names).items()
            if not is_auto(name, value)
        }
        try:
            checked(self, **fields)
        except pydantic.ValidationError as error:
            raise explain(cls, error, fields) from None
        object.__setattr__(self, "explicit", frozenset(fields))
        self.check()

    cls.__init__ = __init__  # type: ignore[misc]
    lines = [inspect.getdoc(cls) or cls.__name__, "", "Attributes:"]
    for name, field in cls.__pydantic_fields__.items():  # type: ignore[attr-defined]
        default = (
            "required"
            if field.is_required()
            else f"default {field.get_default(call_default_factory=True)!r}"
        )
        lines.append(f"    {name} ({default}): {field.description}")
    cls.__doc__ = "\n".join(lines)
    return cls


@dataclasses.dataclass(frozen=True)
class Heading:
    """Class attribute that is the heading of the fields after it, up to the next heading."""

    title: str


def headings_of(cls: type) -> dict[str, str]:
    """Return the heading of each field of a dataclass by name.

    A class's own fields come before those it inherits. A field above all headings of its class has
    none and is left out.
    """
    found: dict[str, str] = {}
    for owner in cls.__mro__:
        title = None
        for name in vars(owner).get("__annotations__", {}):
            value = vars(owner).get(name)
            if isinstance(value, Heading):
                title = value.title
            elif title is not None and name not in found:
                found[name] = title
    return found
