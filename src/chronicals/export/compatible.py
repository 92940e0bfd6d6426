"""Settings beside a model's weights in the words of older programs, too.

transformers 5 writes some settings under new names alone, which programs that know version 4 pass
over without a word: positions are then computed with another base, and a chat has no template. Here
both names are written; transformers 5 reads what it read before.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OLD_TEMPLATE = "chat_template.json"
"""Where processors of images look first, before the tokenizer's file."""

EXPERTS = ("num_experts", "num_local_experts")
"""Two names of one number."""


def make_compatible(folder: Path, stops: list[int]) -> None:
    """Add older names to ``config.json``, ``tokenizer_config.json`` and ``generation_config.json``;
    give a processor's template, where it has a file of its own, the tokenizer's text.

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
    _edit(
        folder / "generation_config.json",
        lambda config: {**config, **({"eos_token_id": stops} if stops else {})},
        {},
    )


def _edit(file: Path, change: Any, absent: dict[str, Any] | None = None) -> None:
    if not file.exists() and absent is None:
        return
    before = json.loads(file.read_text()) if file.exists() else absent
    after = change(dict(before or {}))
    if after != before:
        file.write_text(json.dumps(after, indent=2, ensure_ascii=False) + "\n")


def _with_older_names(config: dict[str, Any]) -> dict[str, Any]:
    found = {**config, **older_names(config)}
    for part in ("text_config", "vision_config"):
        if isinstance(config.get(part), dict):
            found[part] = {**config[part], **older_names(config[part])}
    return found


def older_names(config: dict[str, Any]) -> dict[str, Any]:
    """What version 4 calls what a configuration has: the rotation, the window's pattern, the
    number of experts.
    """
    found: dict[str, Any] = {}
    rope = config.get("rope_parameters") or {}
    whole = rope.get("full_attention", rope)
    local = rope.get("sliding_attention")
    if "rope_theta" in whole:
        found["rope_theta"] = whole["rope_theta"]
        scaling = {
            key: value
            for key, value in whole.items()
            if key not in ("rope_theta", "partial_rotary_factor")
        }
        found["rope_scaling"] = (
            None if scaling.get("rope_type", "default") == "default" else scaling
        )
    if "partial_rotary_factor" in whole:
        found["partial_rotary_factor"] = whole["partial_rotary_factor"]
    if local:
        found["rope_local_base_freq"] = local["rope_theta"]
    if pattern := _pattern(config.get("layer_types")):
        found["sliding_window_pattern"] = pattern
    named = next((config[name] for name in EXPERTS if name in config), None)
    if named is not None:
        found |= dict.fromkeys(EXPERTS, named)
    return {key: value for key, value in found.items() if key not in config}


def _pattern(kinds: list[str] | None) -> int | None:
    """n where every n-th layer attends to everything, and the others have a window."""
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
