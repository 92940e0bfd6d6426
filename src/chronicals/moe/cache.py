"""The cache of the native model, and the argument name that the installed transformers gives it.

A latent layer caches the latent as keys and the rotary key as values, ``[B, 1, T, R]`` and ``[B, 1,
T, P]``. A sliding layer caches the last ``sliding_window - 1`` keys and values of its heads. Both
are layers of transformers' ``DynamicCache`` (and of its static and offloaded caches). These count
every token seen, so positions stay correct after a window has dropped tokens.
"""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import Cache, DynamicCache

from chronicals.versions import cache_name

CACHE = cache_name()
"""Name of the cache in the arguments and outputs of a model."""


def the_cache(
    config: Any, cache: Cache | None, past_key_values: Cache | None, use_cache: bool | None
) -> Cache | None:
    """Return the cache for a forward pass.

    It is the one given under either argument name, else a new ``DynamicCache`` if ``use_cache`` is
    set, else None.
    """
    given = past_key_values if cache is None else cache
    return DynamicCache(config=config) if given is None and use_cache else given


def seen_tokens(cache: Cache | None) -> int:
    """Return the number of tokens the cache has seen, including those a window has dropped."""
    return 0 if cache is None else cache.get_seq_length()
