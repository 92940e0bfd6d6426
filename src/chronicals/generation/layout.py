"""Number of pages of keys and values that a call of the engine gets, within a number of bytes.

Layers are grouped by their sliding window, None for those without one. Pages of the layers without
a window hold all tokens of a sequence. Those of a window's layers hold what a prefill pass computes
and what the next step sees:

    an answer        window + steps of a look
    its prompt       window, beside the answers that have passed it
    a pass           its chunk
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from chronicals.generation.pages import LayerSizes
from chronicals.generation.schedule import EngineSettings, Prompt

LayerWindow = int | None
"""A sliding window of layers, or None for the layers without one."""


class TooLarge(ValueError):
    """A request does not fit the cache even alone."""


@dataclass(frozen=True)
class CacheLayout:
    """Sizes of what the attention layers of a model store, and of the engine.

    Attributes:
        sizes: by attention module.
        device: device of all layers.
        settings: sizes of the engine.
    """

    sizes: dict[nn.Module, LayerSizes]
    device: torch.device
    settings: EngineSettings

    @property
    def page_bytes(self) -> dict[LayerWindow, int]:
        """Bytes of a page of each group; 0 of layers without a window if there is none."""
        found: dict[LayerWindow, int] = {None: 0}
        for one in self.sizes.values():
            found[one.window] = found.get(one.window, 0) + self.settings.page_size * one.bytes
        return found

    def bytes(self, pages: dict[LayerWindow, int]) -> int:
        """Return the bytes of a number of pages of each group."""
        return sum(self.page_bytes[group] * count for group, count in pages.items())

    def alone(self, prompt: Prompt) -> dict[LayerWindow, int]:
        """Return the pages that one answer takes, with the prompt that others share.

        A prompt that takes more of one group than another one takes no fewer of all groups.
        """
        whole = self._whole(prompt)
        chunk = self._spanned(self.settings.chunk_tokens)
        return {
            group: whole if group is None else min(sum(self._seen(group)) + chunk, whole)
            for group in self.page_bytes
        }

    def at_once(self, prompts: Sequence[Prompt]) -> dict[LayerWindow, int]:
        """Return the most pages that answers, of a prompt each, can take at one time."""
        slots = self.settings.slots
        chunk = self._spanned(self.settings.chunk_tokens)
        most = dict[LayerWindow, int]()
        for group in self.page_bytes:
            each = [self._beside_others(prompt, group) for prompt in prompts]
            most[group] = sum(sorted(each, reverse=True)[:slots])
        whole = most[None]
        return {
            group: whole if group is None else min(pages + chunk, whole)
            for group, pages in most.items()
        }

    def within(self, memory: int, prompts: Sequence[Prompt]) -> dict[LayerWindow, int]:
        """Return the pages of each group that fit a number of bytes, no more than are of use.

        Each group has what the largest answer needs alone, and of what is left a part of what all
        would take at once.

        Raises:
            TooLarge: an answer does not fit alone.
        """
        largest = max(prompts, key=lambda prompt: self.bytes(self.alone(prompt)))
        least = self.alone(largest)
        if self.bytes(least) > memory:
            request = largest.request
            raise TooLarge(
                f"{request}: {len(request.prompt):,} tokens and {largest.limit:,} new ones take "
                f"{self.bytes(least) / 2**20:,.1f} MiB of keys and values, the cache has "
                f"{memory / 2**20:,.1f} MiB (cache_memory); ask for fewer tokens, or give it more "
                "memory"
            )
        most = self.at_once(prompts)
        wanted = max(self.bytes(most) - self.bytes(least), 1)
        left = min(memory - self.bytes(least), wanted)
        return {
            group: least[group] + (most[group] - least[group]) * left // wanted
            if self.page_bytes[group]
            else most[group]
            for group in most
        }

    def _beside_others(self, prompt: Prompt, group: LayerWindow) -> int:
        """Return the pages of a group that one answer takes while others decode, too."""
        whole = self._whole(prompt)
        if group is None:
            return whole
        own, shared = self._seen(group)
        return min(own + shared * (prompt.request.answers > 1), whole)

    def _seen(self, window: int) -> tuple[int, int]:
        """Return the most pages that a look of steps sees, and that a stored prompt keeps."""
        steps = self.settings.steps(as_graphs=True)
        return self._spanned(window + steps - 1), self._spanned(window - 1)

    def _whole(self, prompt: Prompt) -> int:
        """Return the pages of all tokens of an answer and its prompt."""
        size = self.settings.page_size
        tokens = len(prompt.request.prompt)
        # the last token's keys are never needed; a shared page that is not full exists twice
        pages = -(-(tokens + prompt.limit - 1) // size)
        return pages + (prompt.request.answers > 1 and tokens % size > 0)

    def _spanned(self, tokens: int) -> int:
        """Return the most pages in which successive tokens lie, wherever they begin."""
        return -(-(tokens - 1) // self.settings.page_size) + 1
