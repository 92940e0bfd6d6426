"""Values as JSON has them, from whatever library a row came: lists, objects, text, numbers, and
None for what is missing.

A missing value has many spellings: None, NaN, NaT, pandas' NA, a null of Arrow. A list may be a
tuple, an array of numpy, a column of pandas or a tensor. Text is never a list, whatever its length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

PLAIN = frozenset({str, int, bool, type(None)})
"""Types of values that JSON has, and that hold no others."""

NEVER_NULL = frozenset({str, int, bool, bytes, list, dict})
"""The usual types of a row's values, of which none is null."""

NULLS_OF_PANDAS = ("NAType", "NaTType")
"""Types of ``pandas.NA`` and ``pandas.NaT``, by name: pandas need not be there."""


def is_null(value: Any) -> bool:
    """Return True for every spelling of a value that is not there."""
    kind = type(value)
    if value is None:
        return True
    if kind in NEVER_NULL:
        return False
    if isinstance(value, (float, np.floating)):
        return bool(value != value)
    if isinstance(value, (np.datetime64, np.timedelta64)):
        return bool(np.isnat(value))
    if isinstance(value, Decimal):
        return value.is_nan()
    if isinstance(value, np.ndarray) and value.shape == ():
        return is_null(value.item())
    if _is_scalar_of_arrow(value):
        return not value.is_valid
    return kind.__name__ in NULLS_OF_PANDAS and kind.__module__.startswith("pandas.")


def is_missing(value: Any) -> bool:
    """Return True where a field holds nothing: a null in any spelling, or an empty list, array or
    object.

    Empty text is text: an empty answer is refused, and not passed over.
    """
    if type(value) is str:
        return False
    if is_null(value):
        return True
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
        return False
    return (
        getattr(value, "shape", None) != () and len(value) == 0
    )  # without dimensions an array has no length


def items_of(value: Any) -> list[Any] | None:
    """Return what a list, tuple, array or column holds, as a list; None where ``value`` is no
    sequence, as text is none.
    """
    if type(value) is list:
        return value
    if isinstance(value, (str, bytes, bytearray, memoryview, Mapping)):
        return None
    if hasattr(value, "tolist"):
        listed = value.tolist()
        return listed if isinstance(listed, list) else None
    return list(value) if isinstance(value, Sequence) else None


def plain(value: Any) -> Any:
    """Return ``value`` as JSON has it, with None for every null; what JSON has no word for stays
    what it is.

    Raises:
        RecursionError: it is nested too deeply.
    """
    if type(value) in PLAIN:
        return value
    if is_null(value):
        return None
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    items = items_of(value)
    if items is not None:
        return [plain(item) for item in items]
    if _is_scalar_of_arrow(value):
        return plain(value.as_py())
    return value.tolist() if hasattr(value, "tolist") else value


def _is_scalar_of_arrow(value: Any) -> bool:
    """Return True for a ``pyarrow.Scalar``, without importing pyarrow: processes that tokenise
    start sooner.
    """
    return type(value).__module__ == "pyarrow.lib" and hasattr(value, "as_py")
