"""Values as JSON has them, from whatever library a row came.

They are lists, objects, text, numbers, and None for what is missing. A missing value has many
spellings: None, NaN, NaT, pandas' NA, a null of Arrow. A list may be a tuple, an array of numpy, a
column of pandas or a tensor. Text is never a list, whatever its length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

_JSON_SCALARS = frozenset({str, int, bool, type(None)})
"""Types of JSON's values that hold no others."""

_NEVER_NULL = frozenset({str, int, bool, bytes, list, dict})
"""The usual types of a row's values, of which none is null."""

_PANDAS_NULLS = ("NAType", "NaTType")
"""Types of ``pandas.NA`` and ``pandas.NaT``, by name: pandas need not be installed."""


def is_object(value: Any) -> bool:
    """Return True for a value with named fields."""
    # The test for a dict is much faster than the one for a Mapping.
    return type(value) is dict or isinstance(value, Mapping)


def is_null(value: Any) -> bool:
    """Return True for every spelling of a null."""
    kind = type(value)
    if value is None:
        return True
    if kind in _NEVER_NULL:
        return False
    if isinstance(value, (float, np.floating)):
        return bool(value != value)
    if isinstance(value, (np.datetime64, np.timedelta64)):
        return bool(np.isnat(value))
    if isinstance(value, Decimal):
        return value.is_nan()
    if isinstance(value, np.ndarray) and value.shape == ():
        return is_null(value.item())
    if _is_arrow_scalar(value):
        return not value.is_valid
    return kind.__name__ in _PANDAS_NULLS and kind.__module__.startswith("pandas.")


def is_missing(value: Any) -> bool:
    """Return True if a field holds nothing: a null, or an empty list, array or object.

    Empty text counts as text: an empty answer must be refused, not passed over.
    """
    if type(value) is str:
        return False
    if is_null(value):
        return True
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
        return False
    has_length = getattr(value, "shape", None) != ()  # an array without dimensions has none
    return has_length and len(value) == 0


def is_filled(value: Any) -> bool:
    """Return True if an optional field says something: neither missing nor empty text."""
    return not is_missing(value) and not (isinstance(value, str) and value == "")


def list_items(value: Any) -> list[Any] | None:
    """Return the items of a list, tuple, array or column as a list; None for anything else.

    Text is no sequence here.
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
    """Return ``value`` as JSON has it, with None for every null.

    A value that JSON has no form for is returned unchanged.

    Raises:
        RecursionError: it is nested too deeply.
    """
    if type(value) in _JSON_SCALARS:
        return value
    if is_null(value):
        return None
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    items = list_items(value)
    if items is not None:
        return [plain(item) for item in items]
    if _is_arrow_scalar(value):
        return plain(value.as_py())
    return value.tolist() if hasattr(value, "tolist") else value


def _is_arrow_scalar(value: Any) -> bool:
    """Return True for a ``pyarrow.Scalar``, without the import of pyarrow, which takes long."""
    return type(value).__module__ == "pyarrow.lib" and hasattr(value, "as_py")
