"""What the installed transformers calls the keys and values of earlier tokens, and the cache of the
native model.

A latent layer caches the latent as keys and the rotary key as values, ``[B, 1, T, R]`` and ``[B, 1,
T, P]``; a sliding layer the last ``sliding_window - 1`` keys and values of its heads. Both are
layers of transformers' own ``DynamicCache`` (and of its static and offloaded ones), which count all
tokens seen, so positions go on beyond what a window has dropped.
"""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import Cache, DynamicCache

from chronicals.versions import cache_name

CACHE = cache_name()
"""The name of arguments and outputs."""


def the_cache(
    config: Any, cache: Cache | None, past_key_values: Cache | None, use_cache: bool | None
) -> Cache | None:
    """What a forward pass reads and fills: what it was given under either name, a new one if it
    is to make one, else None.
    """
    given = past_key_values if cache is None else cache
    return DynamicCache(config=config) if given is None and use_cache else given


def seen_tokens(cache: Cache | None) -> int:
    """How many tokens went through the cache, those that a window dropped included."""
    return 0 if cache is None else cache.get_seq_length()
