"""Settings beside a model's weights under the names of older programs as well.

transformers 5 writes some settings only under new names, which programs for version 4 ignore
silently: they compute positions with another base, and have no chat template. Here both names are
written; transformers 5 reads the same as before.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

OLD_TEMPLATE = "chat_template.json"
"""File in which processors of images look for a template before the tokenizer's."""

EXPERT_COUNTS = ("num_experts", "num_local_experts")
"""Two names of the number of experts."""


def make_compatible(folder: Path, stops: list[int]) -> None:
    """Add older names to the JSON files of a model's folder.

    They are added to ``config.json``, ``tokenizer_config.json`` and ``generation_config.json``. A
    processor's template in a file of its own gets the tokenizer's text.

    Args:
        stops: ids at which generation ends, all of which the generation settings name afterwards.
    """
    _edit(folder / "config.json", _with_older_names)
    template = folder / "chat_template.jinja"
    _edit(folder / "tokenizer_config.json", lambda config: _tokenizer(config, template))
    _edit(
        folder / OLD_TEMPLATE,
        lambda config: {"chat_template": template.read_text()} if template.exists() else config,
    )
    if stops:
        ends = {"eos_token_id": stops}
        _edit(folder / "generation_config.json", lambda config: {**config, **ends}, make=True)


def _edit(
    file: Path, change: Callable[[dict[str, Any]], dict[str, Any]], make: bool = False
) -> None:
    """Write the changed content of a JSON file; ``make`` one that does not exist."""
    if not file.exists() and not make:
        return
    before = json.loads(file.read_text()) if file.exists() else {}
    after = change(dict(before))
    if after != before:
        file.write_text(json.dumps(after, indent=2, ensure_ascii=False) + "\n")


def _with_older_names(config: dict[str, Any]) -> dict[str, Any]:
    changed = {**config, **older_names(config)}
    for part in ("text_config", "vision_config"):
        if isinstance(config.get(part), dict):
            changed[part] = {**config[part], **older_names(config[part])}
    return changed


def older_names(config: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a configuration under version 4's names, without those that it has.

    They are the rotation, the pattern of layers with a window, and the number of experts.
    """
    found: dict[str, Any] = {}
    rope = config.get("rope_parameters") or {}
    whole = rope.get("full_attention", rope)
    local = rope.get("sliding_attention")
    if "rope_theta" in whole:
        found["rope_theta"] = whole["rope_theta"]
        others = ("rope_theta", "partial_rotary_factor")
        scaling = {key: value for key, value in whole.items() if key not in others}
        is_scaled = scaling.get("rope_type", "default") != "default"
        found["rope_scaling"] = scaling if is_scaled else None
    if "partial_rotary_factor" in whole:
        found["partial_rotary_factor"] = whole["partial_rotary_factor"]
    if local:
        found["rope_local_base_freq"] = local["rope_theta"]
    pattern = _full_attention_period(config.get("layer_types"))
    if pattern is not None:
        found["sliding_window_pattern"] = pattern
    count = next((config[name] for name in EXPERT_COUNTS if name in config), None)
    if count is not None:
        found |= dict.fromkeys(EXPERT_COUNTS, count)
    return {key: value for key, value in found.items() if key not in config}


def _full_attention_period(kinds: list[str] | None) -> int | None:
    """Return n if every n-th layer attends to all tokens and the others have a window."""
    if not kinds or "sliding_attention" not in kinds or "full_attention" not in kinds:
        return None
    period = kinds.index("full_attention") + 1
    regular = all(
        (kind == "full_attention") == ((n + 1) % period == 0) for n, kind in enumerate(kinds)
    )
    return period if regular else None


def _tokenizer(config: dict[str, Any], template: Path) -> dict[str, Any]:
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if template.exists() and "chat_template" not in config:
        config["chat_template"] = template.read_text()
    return config
