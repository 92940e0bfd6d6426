"""YAML in which each field stands once."""

from __future__ import annotations

from typing import Any

import yaml

MERGE = "tag:yaml.org,2002:merge"
"""Tag of the key ``<<``, which may occur several times."""


class EachOnce(yaml.SafeLoader):
    """Safe loader of YAML that refuses a field which occurs twice, because the first would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping.

        Raises:
            ConstructorError: a field stands twice.
        """
        seen = set[str]()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} stands twice; keep one", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)
