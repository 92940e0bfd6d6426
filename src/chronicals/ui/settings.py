"""Schemas of what only packages with torch know, printed as JSON: ``python -m chronicals.ui.settings``.

They are the settings of each objective and of a native mixture of experts.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import Any

import pydantic

PLAIN = (bool, int, float, str)


def schemas() -> dict[str, Any]:
    """Return the JSON schema of each objective's settings, and sizes of the mixture by default."""
    from chronicals.moe import ChronicalsMoeConfig
    from chronicals.objectives import OBJECTIVES

    sizes = {
        field.name: field.default
        for field in dataclasses.fields(ChronicalsMoeConfig)
        if isinstance(field.default, PLAIN)
        and field.name in inspect.get_annotations(ChronicalsMoeConfig)
    }
    return {
        "objectives": {
            name: pydantic.TypeAdapter(objective.Settings).json_schema()
            for name, objective in OBJECTIVES.items()
        },
        "mixture": sizes,
    }


if __name__ == "__main__":
    print(json.dumps(schemas()))  # noqa: T201
