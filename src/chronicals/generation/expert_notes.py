"""Notes of the experts that tokens of answers go to while the answers are drawn.

A trainer's pass over the same tokens may send them elsewhere: rounding differs between a step of a
few answers and a pack of whole ones, and a router's choice jumps.

Shapes: N slots, L layers with experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from chronicals.generation.decode_graphs import Slots
from chronicals.generation.schedule import Sample
from chronicals.models.routed_experts import called_for_experts, receiving


class ExpertNotes:
    """The experts of the tokens of some answers, by decode steps.

    Args:
        model: a mixture of experts.
        samples: the answers that are noted.
        longest: most tokens of any answer of the call with its prompt.
        device: of the model.
    """

    def __init__(self, model: Any, samples: Sequence[Sample], longest: int, device: torch.device):
        self._called = called_for_experts(model)
        self._rows = {one: row for row, one in enumerate(samples)}
        self._longest = longest
        self._device = device
        self._noted: Tensor | None = None

    @classmethod
    def of(
        cls, model: Any, samples: Sequence[Sample], longest: int, device: torch.device
    ) -> ExpertNotes | None:
        """Return the notes of the answers whose requests ask for them; None if there are none."""
        asked = [one for one in samples if one.prompt.request.notes_experts]
        return cls(model, asked, longest, device) if asked and called_for_experts(model) else None

    def rows(self, slots: Sequence[Sample | None]) -> list[int]:
        """Return the row of each slot's answer; slots that are not noted share the last one."""
        unnoted = len(self._rows)
        return [unnoted if one is None else self._rows.get(one, unnoted) for one in slots]

    @contextmanager
    def taken(self, slots: Slots) -> Iterator[None]:
        """Note the experts of the tokens of a decode step, which runs within.

        The first step makes the memory, and runs eagerly; later ones may be captured.
        """
        with receiving(self._called) as found:
            yield
        experts = torch.stack(found, 1)
        if self._noted is None:
            shape = len(self._rows) + 1, self._longest + 1, *experts.shape[1:]
            self._noted = torch.full(shape, -1, dtype=torch.int16, device=self._device)
        assert slots.noted is not None
        self._noted[slots.noted, slots.positions] = experts.to(torch.int16)

    def deliver(self) -> None:
        """Give each answer the experts of its tokens but the last, which no step has read."""
        for one, row in self._rows.items():
            first = len(one.prompt.request.prompt)
            last = first + max(len(one.answer.tokens) - 1, 0)
            if self._noted is not None:
                one.answer.experts = self._noted[row, first:last].cpu()
