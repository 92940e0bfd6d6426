"""JSON by RFC 8259, which has no NaN and no infinity: they are written as ``null``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def to_json(value: Any, indent: int | None = None) -> str:
    """Return ``value`` as JSON text, with NaN and infinities at any depth as ``null``."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_with_null(value), indent=indent, allow_nan=False)


def _with_null(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _with_null(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_null(entry) for entry in value]
    return value
