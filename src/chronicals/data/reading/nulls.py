"""Nulls of columnar data, which fills every object up to the fields that any object of its column
has.

Within a list of objects (messages, calls, tools) such a null says that the row had no such field,
so it is left out. In JSON a null is written by whoever wrote the row, and is kept. Objects outside
of lists keep their nulls, too: ``columns`` may lead into them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

logger = logging.getLogger(__name__)

Clean = Callable[[Any], Any]

VALUES_OF_USERS = ("tools", "arguments")
"""Fields in which a null may well be meant."""


def cleaner(schema: pa.Schema) -> Clean | None:
    """What makes of a row, a dict, the same row without such nulls; None where no column can hold
    one.

    A value that is not of its column's type, because a transform has replaced it, stays as it is.
    """
    columns = {
        field.name: clean
        for field in schema
        if (clean := _clean(field.type, field.name)) is not None
    }
    if not columns:
        return None

    def clean_row(row: Any) -> Any:
        if not isinstance(row, Mapping):
            return row
        return {
            name: columns[name](value) if name in columns else value for name, value in row.items()
        }

    return clean_row


def without_nulls(value: Any, inside: bool = False) -> Any:
    """The same for a row whose types are not known.

    Args:
        inside: of a list.
    """
    if isinstance(value, Mapping):
        return {
            name: without_nulls(one, inside)
            for name, one in value.items()
            if not (inside and one is None)
        }
    return (
        [without_nulls(one, True) for one in value] if isinstance(value, (list, tuple)) else value
    )


def _clean(kind: pa.DataType, name: str, inside: bool = False) -> Clean | None:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        one = _clean(kind.value_type, name, True)
        return one and functools.partial(_clean_list, one)
    if pa.types.is_map(kind):
        one = _clean(kind.item_type, name, inside)
        return one and functools.partial(_clean_map, one)
    return _clean_struct(kind, name, inside) if pa.types.is_struct(kind) else None


def _clean_list(clean: Clean, values: Any) -> Any:
    return (
        [clean(value) for value in values]
        if isinstance(values, (list, tuple, np.ndarray))
        else values
    )


def _clean_map(clean: Clean, values: Any) -> Any:
    pairs = isinstance(values, (list, tuple)) and all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in values
    )
    return (
        {name: clean(value) for name, value in dict(values).items()}
        if pairs or isinstance(values, Mapping)
        else values
    )


def _clean_struct(kind: pa.StructType, name: str, inside: bool) -> Clean | None:
    names = [kind.field(n).name for n in range(kind.num_fields)]
    of_users = {field: field if field in VALUES_OF_USERS else name for field in names}
    fields = {
        field: clean
        for n, field in enumerate(names)
        if (clean := _clean(kind.field(n).type, of_users[field], inside)) is not None
    }
    if not fields and not inside:
        return None

    def clean_struct(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        if inside and any(one is None for one in value.values()):
            if name in VALUES_OF_USERS:
                _say(name)
            value = {field: one for field, one in value.items() if one is not None}
        return (
            {field: fields[field](one) if field in fields else one for field, one in value.items()}
            if fields
            else value
        )

    return clean_struct


@functools.cache
def _say(name: str) -> None:
    logger.info(
        "a null in %s of columnar data (Parquet, Arrow, datasets) counts as a field that is not "
        "there; where nulls are meant, "
        "write %s as JSON text, or the rows as .jsonl",
        name,
        name,
    )
