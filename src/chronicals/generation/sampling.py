"""Choice of the next token, as settings of transformers' ``generate``."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig

DISTRIBUTION_SETTINGS = (
    "top_k",
    "top_p",
    "min_p",
    "top_h",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "sequence_bias",
    "renormalize_logits",
)
"""Settings that change the probabilities of tokens and need only the logits. No other settings are
taken from a model's generation config: they choose another algorithm (beams, assistants, caches),
or need a tokenizer or a download.
"""

WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "top_h": (None, 1.0),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "sequence_bias": (None, [], {}),
}
"""``DISTRIBUTION_SETTINGS`` that only transformers' ``generate`` knows, and the values with which
they change nothing. (``renormalize_logits`` never changes what is drawn.)
"""

ALL_TOKENS = 0
"""``top_k`` that keeps every token; without it transformers keeps 50."""


@dataclass(frozen=True)
class Sampling:
    """Settings of the choice of the next token.

    Attributes:
        temperature: divisor of the logits before a token is drawn; 0 takes the likeliest token each
            time.
        seed: seed of the random numbers.
        top_p: draw from the fewest tokens whose probabilities add up to this; by default the
            model's own value.
        top_k: draw from this many of the likeliest tokens, 0 from all; by default the model's own
            value, or else all.
        min_p: draw from tokens at least this likely relative to the likeliest one; by default the
            model's own value.
        repetition_penalty: above 1, tokens that are in the text already become less likely; also at
            temperature 0.

    Raises:
        ValueError: a value is out of its range, or has no effect.
    """

    temperature: float = 0.0
    seed: int = 0
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        top_p = self.top_p
        top_k = self.top_k
        penalty = self.repetition_penalty
        min_p = self.min_p
        for name, valid, expected in (
            ("temperature", 0 <= self.temperature < math.inf, "a number from 0"),
            ("top_p", top_p is None or 0 < top_p <= 1, "a number above 0 and at most 1"),
            ("top_k", top_k is None or top_k >= 0, "a whole number from 0"),
            ("min_p", min_p is None or 0 <= min_p <= 1, "a number from 0 to 1"),
            ("repetition_penalty", penalty is None or 0 < penalty < math.inf, "a number above 0"),
        ):
            if not valid:
                raise ValueError(f"{name}={getattr(self, name)}: must be {expected}")
        for name in ("top_p", "top_k", "min_p"):
            if self.temperature == 0 and getattr(self, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)}: has no effect at temperature 0, which takes "
                    "the likeliest token each time; give a temperature above 0, or leave it out"
                )

    def config(self, own: GenerationConfig | None, **fixed: Any) -> GenerationConfig:
        """Return a complete generation config.

        Args:
            own: the model's; with a temperature above 0 its ``DISTRIBUTION_SETTINGS`` apply unless
                they are set here.
            fixed: further settings.
        """
        settings = {
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
        }
        chosen = {name: value for name, value in settings.items() if value is not None}
        if self.temperature == 0:
            return GenerationConfig(do_sample=False, num_beams=1, **chosen, **fixed)
        owned = {name: getattr(own, name, None) for name in DISTRIBUTION_SETTINGS}
        owned = {name: value for name, value in owned.items() if value is not None}
        shaping = {"top_k": ALL_TOKENS, **owned, **chosen}
        return GenerationConfig(
            do_sample=True, num_beams=1, temperature=self.temperature, **shaping, **fixed
        )

    def with_own(self, own: GenerationConfig | None) -> Sampling:
        """Return the settings with the model's own values of those that are not set here.

        Args:
            own: the model's generation config; its values apply with a temperature above 0 only.
        """
        config = self.config(own)
        if self.temperature == 0:
            return self
        return replace(
            self,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            repetition_penalty=config.repetition_penalty,
        )

    def only_in_transformers(self, own: GenerationConfig | None) -> str:
        """Return a setting of the model that the engine does not know, as ``name=value``, or ""."""
        if self.temperature == 0:
            return ""
        values = {name: getattr(own, name, None) for name in WITHOUT_EFFECT}
        found = (name for name, value in values.items() if value not in WITHOUT_EFFECT[name])
        return next((f"{name}={values[name]}" for name in found), "")
