"""Best settings written into a recipe: exactly their fields, with where they come from in a comment.

All other text stays as it is. Places are those of YAML's own parser, and the file is read again
before it gets its name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from chronicals.config import ConfigurationError, Recipe
from chronicals.config.config import EXCLUSIVE_PAIRS, laid_over
from chronicals.config.sections import SECTIONS_FIELD

MARK = "# tuned:"
"""Beginning of the comment above a field that was written."""


def write_fields(file: Path, fields: Mapping[str, Any], words: str) -> None:
    """Write fields into a recipe.

    Args:
        file: the recipe.
        fields: by name, with sections under ``sections``.
        words: the comment.

    Raises:
        ConfigurationError: the file cannot be read, or cannot be changed without changing more.
    """
    before = Recipe.read_yaml(file)
    text = file.read_text()
    for first, second in EXCLUSIVE_PAIRS:
        for kept, other in ((first, second), (second, first)):
            if kept in fields:
                text = without_entry(text, other)
    flat = {(name,): value for name, value in fields.items() if name != SECTIONS_FIELD}
    for section, settings in fields.get(SECTIONS_FIELD, {}).items():
        flat |= {(section, name): value for name, value in settings.items()}
    for path, value in flat.items():
        text = with_value(text, path, value, f"{MARK} {words}")
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    aside.write_text(text)
    try:
        if Recipe.read_yaml(aside) != laid_over(before, fields):
            raise ConfigurationError(
                f"{file}: its form does not let the fields be written alone; write them yourself: "
                f"{_in_yaml(dict(fields))}"
            )
        os.replace(aside, file)
    finally:
        aside.unlink(missing_ok=True)


def with_value(text: str, path: tuple[str, ...], value: Any, comment: str) -> str:
    """Return the text of a recipe with another value of a field, or of a setting of a section.

    Args:
        text: of the recipe.
        path: name of the field, or of the section and the setting.
        value: the value.
        comment: that stands in the line above; it replaces an earlier one.
    """
    entry = _entry(_fields(text), path[0])
    if entry is None:
        shown = _in_yaml(value) if len(path) == 1 else _in_yaml({path[1]: value})
        end = "" if text.endswith("\n") or not text else "\n"
        return f"{text}{end}{comment}\n{path[0]}: {shown}\n"
    key, node = entry
    if len(path) == 2:
        if not isinstance(node, yaml.MappingNode):
            shown = _in_yaml({path[1]: value})
            return _commented(_replaced(text, key, node, shown), key, comment)
        inner = _entry(node, path[1])
        if inner is None:
            return _with_new_setting(text, key, node, path[1], value, comment)
        above = key if node.flow_style else inner[0]
        return _commented(_replaced(text, *inner, _in_yaml(value)), above, comment)
    return _commented(_replaced(text, key, node, _in_yaml(value)), key, comment)


def without_entry(text: str, name: str) -> str:
    """Return the text of a recipe without the lines of a field."""
    entry = _entry(_fields(text), name)
    if entry is None:
        return text
    begin = _line_begin(text, entry[0].start_mark.index)
    end = text.find("\n", _end(entry[1]))
    return text[:begin] + (text[end + 1 :] if end >= 0 else "")


def _fields(text: str) -> yaml.MappingNode:
    """Return the fields of a recipe with their places.

    Raises:
        ConfigurationError: they stand between braces.
    """
    root = yaml.compose(text)
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        raise ConfigurationError("the recipe is one line between braces; give each field its own")
    return root


def _entry(mapping: yaml.MappingNode, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    return next((pair for pair in mapping.value if pair[0].value == name), None)


def _end(node: yaml.Node) -> int:
    """Return where a value ends, without the comments and empty lines after a block."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return node.end_mark.index


def _replaced(text: str, key: yaml.Node, node: yaml.Node, shown: str) -> str:
    """Return the text with another value of a key, in the key's line."""
    return f"{text[: key.end_mark.index]}: {shown}{text[_end(node) :]}"


def _with_new_setting(
    text: str, key: yaml.Node, node: yaml.MappingNode, name: str, value: Any, comment: str
) -> str:
    """Return the text with a setting more in a section."""
    if node.flow_style:
        close = node.end_mark.index - 1
        comma = ", " if node.value else ""
        added = f"{text[:close].rstrip()}{comma}{name}: {_in_yaml(value)}{text[close:]}"
        return _commented(added, key, comment)
    indent = " " * node.start_mark.column
    end = text.find("\n", _end(node))
    end = len(text) if end < 0 else end
    return f"{text[:end]}\n{indent}{comment}\n{indent}{name}: {_in_yaml(value)}{text[end:]}"


def _commented(text: str, key: yaml.Node, comment: str) -> str:
    """Return the text with a comment in the line above a key, in the place of an earlier one."""
    begin = _line_begin(text, key.start_mark.index)
    indent = " " * key.start_mark.column
    before = text[:begin]
    earlier = re.search(rf"(?:^|(?<=\n))[ ]*{re.escape(MARK)}[^\n]*\n\Z", before)
    if earlier is not None:
        before = before[: earlier.start()]
    return f"{before}{indent}{comment}\n{text[begin:]}"


def _line_begin(text: str, index: int) -> int:
    return text.rfind("\n", 0, index) + 1


def _in_yaml(value: Any) -> str:
    shown = yaml.safe_dump(value, default_flow_style=True, width=1 << 16, sort_keys=False)
    return shown.removesuffix("...\n").strip()
