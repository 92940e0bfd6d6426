"""LLaMA-Factory's data sets, which its configuration names by ``dataset_info.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chronicals.convert.reading import Theirs

INDEX = "dataset_info.json"

USUAL_FOLDER = "data"
"""Folder of the index where ``dataset_dir`` is not set."""

COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "messages": "messages",
    "system": "system",
    "tools": "tools",
    "chosen": "chosen",
    "rejected": "rejected",
    "kto_tag": "label",
}
"""Names of columns in the index, and ours."""


def entries(names: str, theirs: Theirs) -> list[Any]:
    """Return entries of data by their names, which stand in one text.

    A name that is in no index here is left as it is.
    """
    index = _index(theirs)
    found: list[Any] = []
    for name in (one.strip() for one in names.split(",")):
        about = index.get(name)
        found.append(_entry(about, index["folder"]) if isinstance(about, Mapping) else name)
    return found


def _index(theirs: Theirs) -> dict[str, Any]:
    """Return the index and, as ``folder``, where its files lie; it is empty if there is none."""
    folder = Path(str(theirs.get("dataset_dir", default=USUAL_FOLDER)))
    for place in (folder, theirs.file.parent / folder, theirs.file.parent):
        file = place / INDEX
        if file.is_file():
            return {**json.loads(file.read_text()), "folder": place}
    return {}


def _entry(about: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return an entry of data for one of the index."""
    hub = about.get("hf_hub_url")
    path = str(folder / about["file_name"]) if "file_name" in about else hub
    entry = {"path": path, "subset": about.get("subset"), "split": about.get("split")}
    columns = {
        COLUMNS[name]: theirs
        for name, theirs in (about.get("columns") or {}).items()
        if name in COLUMNS and theirs != COLUMNS[name]
    }
    entry["columns"] = columns or None
    return {name: value for name, value in entry.items() if value is not None}
