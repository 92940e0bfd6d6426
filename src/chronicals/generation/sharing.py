"""Teams of answers that share the pages of their prompt, which attention reads once for all.

    prompt of 40 tokens, pages of 16        answers 0 to 7: their first 32 keys are the same

A team has as many answers as one program of the kernel takes; the rest of a prompt's answers are
another team. Teams are read in layers without a sliding window.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from chronicals.generation.pages import LayerSizes
from chronicals.generation.schedule import Prompt, Sample
from chronicals.kernels.host_memory import sent
from chronicals.kernels.launch import next_power_of_2
from chronicals.kernels.paged_attention import SharedPages, most_members

WORTH_SHARING = 16 << 20
"""Fewest bytes of keys and values that a layer must be spared.

An H200 reads them in 4 µs; the kernel that shared keys take takes 3 µs more.
"""


@dataclass(frozen=True)
class PromptSharing:
    """Limits and gains of sharing in the layers of a model.

    Attributes:
        members: most answers of a team; less than 2 where no layer can share.
        token_bytes: bytes of a token's keys and values in a layer that shares.
        worth: fewest bytes that a layer must be spared.
    """

    members: int
    token_bytes: int
    worth: int = WORTH_SHARING

    @classmethod
    def of(cls, layers: Collection[LayerSizes]) -> PromptSharing:
        """Read what the layers without a window store."""
        whole = [layer for layer in layers if layer.window is None]
        if not whole:
            return cls(0, 0)
        members = [most_members(layer.queries, layer.heads, layer.value) for layer in whole]
        return cls(min(members), max(layer.bytes for layer in whole))

    def shared_pages(
        self, samples: Sequence[Sample], rows: int, page_size: int, device: torch.device
    ) -> SharedPages | None:
        """Return the teams of answers that decode together; None if sharing is not worth it.

        The number of teams is a power of two, so that few graphs serve all steps.

        Args:
            samples: the answers, in the order of their rows.
            rows: number of rows, with padding.
            page_size: tokens of a page.
            device: where the teams are needed.
        """
        teams = list[list[int]]()
        lengths = list[int]()
        for prompt, members in _rows_of_prompts(samples).items():
            length = prompt.wanted // page_size * page_size
            for first in range(0, len(members), max(self.members, 1)):
                team = members[first : first + self.members]
                if len(team) > 1 and length:
                    teams.append(team)
                    lengths.append(length)
        spared = sum((len(team) - 1) * length for team, length in zip(teams, lengths))
        if not teams or spared * self.token_bytes < self.worth:
            return None
        starts = [0] * rows
        for team, length in zip(teams, lengths):
            for row in team:
                starts[row] = length
        unused = next_power_of_2(len(teams)) - len(teams)
        padded = [team + [-1] * (self.members - len(team)) for team in teams]
        padded += [[-1] * self.members] * unused
        return SharedPages(
            sent(padded, torch.int32, device),
            sent(lengths + [0] * unused, torch.int32, device),
            sent(starts, torch.int32, device),
        )


def _rows_of_prompts(samples: Sequence[Sample]) -> dict[Prompt, list[int]]:
    """Return the rows of the answers that run on the pages of each stored prompt."""
    found = dict[Prompt, list[int]]()
    for row, one in enumerate(samples):
        if one.prompt.pages:
            found.setdefault(one.prompt, []).append(row)
    return found
