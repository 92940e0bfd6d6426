"""Fields of data entries in other trainers, and the text to write here instead.

The names are those of Axolotl's ``datasets`` and LLaMA-Factory's ``dataset_info.json``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from chronicals.config.foreign_values import ROLE_NAMES

COLUMNS: dict[str, str] = {
    "field": "text",
    "text_column": "text",
    "text_field": "text",
    "dataset_text_field": "text",
    "field_messages": "messages",
    "field_tools": "tools",
    "field_system": "system",
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_prompt": "prompt",
    "field_completion": "completion",
    "field_label": "label",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field_human": "prompt",
    "field_model": "completion",
}
"""Fields that name a column, and the name of the column here."""

PATHS = ("data_files", "file_name", "hf_hub_url", "file", "url", "dataset")
"""Fields that name files or folders with rows."""

WEIGHT_FIELDS = ("ratio", "fraction", "prob", "probability", "repeat", "proportion")
"""Fields that say how much of an entry is used."""

FOUND = "the kind of rows is found by their columns"
TURNS = "role and content, or from and value, are read of a message"
SHARDED = "all rows are read; weight takes a part of them"
_NOT_NEEDED = {
    FOUND: "type ds_type conversation format formatting input_format input_transform ranking",
    TURNS: "message_field_role message_field_content message_property_mappings tags",
    "the token that ends a trained message is trained": "train_on_eos train_on_eot",
    "which messages are trained is decided by their role": "message_field_training "
    "message_field_training_detail",
    "roles have their usual names": "roles",
    SHARDED: "shards shards_idx preprocess_shards num_samples skip",
    "the chat template is one for all, chat_template of the recipe": "chat_template "
    "chat_template_jinja",
    "the system message is part of the conversation": "drop_system_message system_prompt "
    "system_format",
    "the tokenizer's chat template decides it": "split_thinking field_thinking "
    "template_thinking_key no_input_format",
    "hub data are read at their newest revision": "revision",
    "code of data sets is not run": "trust_remote_code",
    "the column name decides it": "subset_column",
    "scores of steps are not part of this version": "step_separator train_on_last_step_only",
}
NOT_NEEDED = {name: reason for reason, names in _NOT_NEEDED.items() for name in names.split()}
"""Fields that are not needed here, and why."""


def advice_on_data_field(name: str, value: Any) -> str | None:
    """Return what to do about an unknown field of an entry of data; None if there is no answer."""
    if name in COLUMNS:
        return (
            f"use columns={{{COLUMNS[name]!r}: {value!r}}}"
            if value != COLUMNS[name]
            else f"leave it out: {value!r} is read"
        )
    if name in PATHS:
        return f"use path={value!r}"
    if name in WEIGHT_FIELDS:
        return f"use weight={value!r}"
    if name == "roles_to_train":
        return f"use train_on_roles={roles(value)!r} beside data"
    if name in NOT_NEEDED:
        return f"leave it out: {NOT_NEEDED[name]}"
    return None


def roles(value: Any) -> Any:
    """Return roles by the names that they have here."""
    if isinstance(value, str):
        return ROLE_NAMES.get(value, value)
    return [roles(one) for one in value] if isinstance(value, list) else value


def converted(value: Any, fields: Collection[str]) -> tuple[Any, dict[str, Any]]:
    """Convert another trainer's list of data sets.

    Args:
        value: the list, or one of its entries.
        fields: fields of an entry of data here.

    Returns:
        The data as written here, and fields of the recipe that were in its entries.
    """
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        return value, {}
    entries: list[Any] = []
    beside: dict[str, Any] = {}
    for given in value:
        if not isinstance(given, Mapping):
            entries.append(given)
            continue
        entry: dict[str, Any] = {}
        columns: dict[str, str] = {}
        for name, set_to in given.items():
            if set_to is None:
                continue
            if name == "name":  # of a configuration on the hub, elsewhere
                entry["subset"] = set_to
            elif name in fields:
                entry[name] = set_to
            elif name in COLUMNS and set_to != COLUMNS[name]:
                columns[COLUMNS[name]] = set_to
            elif name in WEIGHT_FIELDS:
                entry["weight"] = set_to
        for name in PATHS:
            if isinstance(given.get(name), str):
                entry["path"] = given[name]
        if columns:
            entry["columns"] = columns
        entries.append(entry)
        if given.get("roles_to_train"):
            beside["train_on_roles"] = roles(given["roles_to_train"])
    paths = [
        entry["path"] if isinstance(entry, dict) and list(entry) == ["path"] else entry
        for entry in entries
    ]
    return (paths[0] if len(paths) == 1 and isinstance(paths[0], str) else paths), beside
