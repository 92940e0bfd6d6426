"""Headings: which fields belong together, written between the fields themselves; help texts are
divided by them.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Heading:
    """A class attribute under which the fields after it stand, up to the next one of that class."""

    title: str


def headings_of(cls: type) -> dict[str, str]:
    """Return the heading of each field of a dataclass by name, a class's own fields before those
    that it inherits.

    A field that stands above all headings of its class has none, and is left out.
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
