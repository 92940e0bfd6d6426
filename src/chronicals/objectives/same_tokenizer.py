"""Models that a setting names beside the one that is trained, a teacher or a reference: they
must read the same texts in the same ids."""

from __future__ import annotations

from typing import Any

from chronicals.config import ConfigurationError
from chronicals.data.tokens.template import FINGERPRINT_TEXT

OF_ITS_BASE = (
    "write where it is into the adapter's adapter_config.json (base_model_name_or_path), or name "
    "the model that chronicals "
    "merge makes of it"
)
"""What to do where the named model is an adapter whose own model is not known."""


def check_same_tokenizer(tokenizer: Any, others: Any, said: str, remedy: str) -> None:
    """What another model predicts for ids says something about the same texts only.

    Args:
        others: tokenizer of the other model.
        said: the setting that names it, for the message.
        remedy: what to do, likewise.

    Raises:
        ConfigurationError: a text has other ids with the other tokenizer, or a special token is
            another.
    """
    ours = tokenizer.get_vocab()
    theirs = others.get_vocab()
    if ours != theirs:
        token = min(
            dict(ours.items() ^ theirs.items()), key=lambda text: ours.get(text, theirs.get(text))
        )
        ids = " and ".join(
            f"{side} {vocabulary.get(token, 'none')}"
            for side, vocabulary in (("ours", ours), ("its", theirs))
        )
        raise ConfigurationError(
            f"{said}: its tokenizer has another vocabulary ({len(theirs):,} tokens, ours "
            f"{len(ours):,}; {token!r} has "
            f"id {ids}); {remedy}"
        )
    special, other = (
        {at: str(token) for at, token in side.added_tokens_decoder.items() if token.special}
        for side in (tokenizer, others)
    )
    if special != other:
        at = min(key for key in {*special, *other} if special.get(key) != other.get(key))
        raise ConfigurationError(
            f"{said}: its tokenizer has other special tokens (id {at} is {other.get(at)!r}, ours "
            f"{special.get(at)!r}); {remedy}"
        )
    if tokenizer(FINGERPRINT_TEXT)["input_ids"] != others(FINGERPRINT_TEXT)["input_ids"]:
        raise ConfigurationError(
            f"{said}: its tokenizer divides texts otherwise than ours; {remedy}"
        )
