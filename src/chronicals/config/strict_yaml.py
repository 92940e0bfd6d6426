"""Files of YAML in which each field stands once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from chronicals.config.errors import ConfigurationError

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


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; its keys become texts.

    Raises:
        ConfigurationError: the file cannot be read, is not YAML, or holds something else.
    """
    path = Path(path)
    try:
        fields = yaml.load(path.read_text(), EachOnce)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: not YAML: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigurationError(
            f"{path}: expected 'field: value' lines, found {type(fields).__name__}"
        )
    return {str(name): value for name, value in fields.items()}
