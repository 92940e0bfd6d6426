"""Distinguishes reward models from language models by configuration, before anything is loaded."""

from __future__ import annotations

from typing import Any


def is_reward_model(config: Any) -> bool:
    """Return True if the configuration is that of a sequence classifier with one label."""
    named = (getattr(config, "architectures", None) or [""])[0]
    return named.endswith("ForSequenceClassification") and config.num_labels == 1


def why_no_language_model(name: Any) -> str:
    """Return the error text for a reward model where a language model is needed."""
    return (
        f"{name}: is a reward model (a sequence classifier with one label), which scores answers "
        "and predicts no tokens; load "
        "it with transformers' AutoModelForSequenceClassification, or train it by "
        "objective='reward'; here give the language "
        "model that it was trained from"
    )
