"""Headings that group fields of a configuration, written between them; help texts show them."""

from __future__ import annotations

import dataclasses


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
