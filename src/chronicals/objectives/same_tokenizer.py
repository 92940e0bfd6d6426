"""A check that a teacher or a reference model, named by a setting, reads texts as the same token
ids as the trained model.
"""

from __future__ import annotations

from typing import Any

from chronicals.config import ConfigurationError
from chronicals.data.tokens.template import PROBE

ADAPTER_BASE_REMEDY = (
    "write where it is into the adapter's adapter_config.json (base_model_name_or_path), or name "
    "the model that chronicals "
    "merge makes of it"
)
"""Remedy if the named model is an adapter whose base model is not known."""


def check_same_tokenizer(tokenizer: Any, other: Any, setting: str, remedy: str) -> None:
    """Check that another model's predictions for token ids are of the same texts.

    Args:
        tokenizer: of the trained model.
        other: tokenizer of the other model.
        setting: names the other model, for the message.
        remedy: advice for the message.

    Raises:
        ConfigurationError: a text has other ids with the other tokenizer, or a special token is
            another.
    """
    ours = tokenizer.get_vocab()
    theirs = other.get_vocab()
    if ours != theirs:
        differing = dict(ours.items() ^ theirs.items())
        token = min(differing, key=lambda text: ours.get(text, theirs.get(text)))
        raise ConfigurationError(
            f"{setting}: its tokenizer has another vocabulary ({len(theirs):,} tokens, ours "
            f"{len(ours):,}; {token!r} has "
            f"id ours {ours.get(token, 'none')} and its {theirs.get(token, 'none')}); {remedy}"
        )
    special = _special_tokens(tokenizer)
    other_special = _special_tokens(other)
    if special != other_special:
        differing_ids = {*special, *other_special}
        at = min(key for key in differing_ids if special.get(key) != other_special.get(key))
        raise ConfigurationError(
            f"{setting}: its tokenizer has other special tokens (id {at} is "
            f"{other_special.get(at)!r}, ours {special.get(at)!r}); {remedy}"
        )
    if tokenizer(PROBE)["input_ids"] != other(PROBE)["input_ids"]:
        raise ConfigurationError(
            f"{setting}: its tokenizer divides texts otherwise than ours; {remedy}"
        )


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the texts of the special tokens by their ids."""
    added = tokenizer.added_tokens_decoder
    return {at: str(token) for at, token in added.items() if token.special}
