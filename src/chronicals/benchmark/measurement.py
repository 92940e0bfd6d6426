"""What an arm reports, and the clock that all arms share."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

COMPARED = 5
"""First steps whose losses and gradient norms are set beside the reference."""

RESUMED = 3
"""Steps told apart when a process goes on after it waited."""

ROUND = "round"
"""The line that asks a waiting process for a round."""


@dataclass
class Measurement:
    """One run of an arm, step by step from the first.

    Attributes:
        settings: how it ran, in words.
        tokens: real tokens of each step: of documents, neither filler nor padding.
        slots: positions computed in each step.
        seconds: of each step, whole steps; a card's own clock where there is one.
        losses, grad_norms: of each step, before clipping; None where the arm does not say.
        warm_up: first steps that are no sample.
        peak_gib: most device memory held while stepping; 0 without a card.
        trained_share: of the model's parameters.
        moved_share: of the trained parameters, in tensors that training changed.
        load_seconds: from the start of the process to the first step.
        own_batches: token ids of the documents of the first steps, where the arm chose other documents than the work's.
        profile: where the time of some more steps went, if asked for.
        first: whether these are the process's first steps, which have a reference.
        held_gib: device memory that it keeps while it waits for another round.
    """

    settings: str
    tokens: list[int]
    slots: list[int]
    seconds: list[float]
    losses: list[float | None]
    grad_norms: list[float | None]
    warm_up: int
    peak_gib: float
    trained_share: float
    moved_share: float
    load_seconds: float = 0.0
    own_batches: list[list[list[int]]] | None = None
    profile: dict[str, Any] | None = None
    first: bool = True
    held_gib: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def rates(self) -> list[float]:
        """Real tokens per second of each step after the warm-up."""
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds)][self.warm_up :]

    def write(self, path: Path) -> None:
        """Whole or not at all: somebody waits for it."""
        aside = path.with_suffix(".part")
        aside.write_text(json.dumps(asdict(self)))
        aside.replace(path)

    @classmethod
    def read(cls, path: Path) -> Measurement:
        return cls(**json.loads(path.read_text()))


@dataclass
class Plan:
    """What an arm is asked for: rounds of so many steps, each after some that are told apart.

    Attributes:
        steps: measured in a round.
        warm_up: steps before those of the first round.
        trace: of a few steps more after the first round, into this file.
        changes: fields of our configuration.
        documents: of each step, for the reference.
        further: rounds that may be asked for after the first; until then the process waits with all it has made.
        out: where the first round is written; later ones beside it.
        began: when the process began.
        rounds: handed in so far.
    """

    steps: int
    warm_up: int
    trace: Path | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    documents: Path | None = None
    further: int = 0
    out: Path | None = None
    began: float = field(default_factory=time.perf_counter)
    rounds: int = 0

    @property
    def discarded(self) -> int:
        """Steps of this round that are no sample."""
        return self.warm_up if not self.rounds else RESUMED

    @property
    def in_all(self) -> int:
        """Steps of this round."""
        return self.discarded + self.steps

    @property
    def at_most(self) -> int:
        """Steps of all rounds."""
        return self.warm_up + self.steps + self.further * (RESUMED + self.steps)

    def hand_in(self, measured: Measurement) -> bool:
        """Write a round, and wait for whoever asked: whether another is wanted."""
        reset_peak()
        measured.held_gib = held_gib()
        if self.out is not None:
            measured.write(round_file(self.out, self.rounds))
        self.rounds += 1
        return self.rounds <= self.further and asked_for_a_round()


def asked_for_a_round() -> bool:
    """Wait for whoever started this process: whether a round is wanted."""
    return sys.stdin.readline().strip() == ROUND


def round_file(out: Path, number: int) -> Path:
    """Where round ``number`` (from 0) of a process is written."""
    return out.with_name(f"{out.stem}.{number}.json")


class Clock:
    """Marks between steps, on the card's own clock where there is one: nothing waits until the end.

    Peers' processes import nothing of our training, which touches what transformers shares; so this is not its ``Moment``.
    """

    def __init__(self) -> None:
        self.on_card = torch.cuda.is_available()
        self.marks: list[Any] = []

    def mark(self) -> None:
        if not self.on_card:
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def seconds(self) -> list[float]:
        """Between each mark and the next."""
        if self.on_card:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1000 for a, b in zip(self.marks, self.marks[1:])]
        return [b - a for a, b in zip(self.marks, self.marks[1:])]


class Movement:
    """Which trained tensors change: compared by the sum of their bit patterns."""

    def __init__(self, model: torch.nn.Module):
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.total = sum(p.numel() for p in model.parameters())
        self.before = self._sums()

    def _sums(self) -> dict[str, int]:
        kinds = {2: torch.int16, 4: torch.int32}
        return {
            name: int(p.detach().reshape(-1).view(kinds[p.element_size()]).sum(dtype=torch.int64))
            for name, p in self.trained.items()
        }

    @property
    def trained_share(self) -> float:
        return sum(p.numel() for p in self.trained.values()) / self.total

    def moved_share(self) -> float:
        after = self._sums()
        moved = sum(p.numel() for name, p in self.trained.items() if after[name] != self.before[name])
        return moved / max(sum(p.numel() for p in self.trained.values()), 1)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def held_gib() -> float:
    return torch.cuda.memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
