"""Nulls of columnar data, which fills every object up to the fields of all objects of its column.

In a list of objects (messages, calls, tools) such a null says that the row had no such field, so it
is left out. A null of JSON was written by whoever wrote the row, and is kept. Objects outside of
lists keep their nulls, too: ``columns`` may lead into them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from chronicals.log_once import log_once

logger = logging.getLogger(__name__)

Clean = Callable[[Any], Any]

FREE_FORM_FIELDS = ("tools", "arguments")
"""Fields in which a null may well be meant."""


def cleaner(schema: pa.Schema) -> Clean | None:
    """Return a function that removes such nulls from a row; None if no column can hold one.

    A value that is not of its column's type, because a transform has replaced it, stays as it is.
    """
    columns = {}
    for field in schema:
        clean = _cleaner_of(field.type, field.name)
        if clean is not None:
            columns[field.name] = clean
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
    """Return a row whose types are not known without such nulls.

    Args:
        value: the row, or a value in it.
        inside: the value lies in a list.
    """
    if isinstance(value, Mapping):
        return {
            name: without_nulls(inner, inside)
            for name, inner in value.items()
            if not (inside and inner is None)
        }
    if isinstance(value, (list, tuple)):
        return [without_nulls(inner, True) for inner in value]
    return value


def _cleaner_of(kind: pa.DataType, name: str, inside: bool = False) -> Clean | None:
    """Return a function that removes such nulls from a value; None if it can hold none.

    Args:
        kind: Arrow's type of the value.
        name: of the field, or of the free-form field around it.
        inside: the value lies in a list.
    """
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        clean_item = _cleaner_of(kind.value_type, name, True)
        return clean_item and functools.partial(_clean_list, clean_item)
    if pa.types.is_map(kind):
        clean_item = _cleaner_of(kind.item_type, name, inside)
        return clean_item and functools.partial(_clean_map, clean_item)
    if not pa.types.is_struct(kind):
        return None
    cleaners = {}
    for number in range(kind.num_fields):
        field = kind.field(number)
        around = field.name if field.name in FREE_FORM_FIELDS else name
        clean = _cleaner_of(field.type, around, inside)
        if clean is not None:
            cleaners[field.name] = clean
    if not cleaners and not inside:
        return None

    def clean_struct(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        if inside and any(inner is None for inner in value.values()):
            if name in FREE_FORM_FIELDS:
                log_once(
                    logger.info,
                    f"a null in {name} of columnar data (Parquet, Arrow, datasets) counts as a "
                    f"field that is not there; where nulls are meant, write {name} as JSON text, "
                    "or the rows as .jsonl",
                )
            value = {field: inner for field, inner in value.items() if inner is not None}
        if not cleaners:
            return value
        return {
            field: cleaners[field](inner) if field in cleaners else inner
            for field, inner in value.items()
        }

    return clean_struct


def _clean_list(clean: Clean, values: Any) -> Any:
    if not isinstance(values, (list, tuple, np.ndarray)):
        return values
    return [clean(value) for value in values]


def _clean_map(clean: Clean, values: Any) -> Any:
    is_pairs = isinstance(values, (list, tuple)) and all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in values
    )
    if not is_pairs and not isinstance(values, Mapping):
        return values
    return {name: clean(value) for name, value in dict(values).items()}
