"""Answers of a model between its training steps, in the memory that steps give back.

Keys and values and the activations of a step are never needed at the same time:

    a step          weights, states | gradients, activations
    a rollout       weights, states | keys and values, logits of few rows

After a step no gradients are left, after a rollout no pages. On a card the allocator's blocks go
back in between, since pages have other sizes than activations. What the graphs of steps keep stays
theirs, and pages are made in it (``SharingRecorder``); so the graphs stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from chronicals.config import ChronicalsConfig
from chronicals.generation import (
    Answer,
    Engine,
    EngineSettings,
    Request,
    free_memory,
    why_not_served,
)
from chronicals.kernels.cuda_graphs import SharingRecorder
from chronicals.policies.facts import fillable
from chronicals.policies.needed_memory import cache_room
from chronicals.training.errors import TrainingError
from chronicals.training.run.guard import peak_bytes
from chronicals.training.session import Session


class Turns:
    """Generate with the model of a session, between its steps.

    Args:
        session: trains the model; answers are generated inside its ``stepping``.
        settings: sizes of the engine; a ``cache_memory`` in them is that of each rollout, by default
            it is what ``cache_memory`` returns at its beginning.

    Raises:
        TrainingError: the engine cannot generate with the model; the message says why.
    """

    def __init__(self, session: Session, settings: EngineSettings | None = None):
        config = session.config
        reason = why_not_served(session.model, config.max_seq_length)
        if reason:
            raise TrainingError(
                f"{type(session.model).__name__} cannot generate between steps: {reason}; train it "
                "on data that has its answers"
            )
        usual = EngineSettings(
            use_cuda_graphs=config.use_cuda_graphs, generation_exact=config.generation_exact
        )
        self.session = session
        self.settings = settings or usual

    def generate(
        self,
        requests: Sequence[Request],
        each: Callable[[int, int, list[int]], None] | None = None,
        seconds: float | None = None,
    ) -> list[list[Answer]]:
        """Return the answers of each request, as ``Engine.generate``, and give all memory back."""
        session = self.session
        settings = self.settings
        if settings.cache_memory is None:
            planned = 0 if session.planned is None else session.planned.held
            memory = cache_memory(session.config, session.precision.device, planned)
            settings = replace(settings, cache_memory=memory)
        of_steps = session.recorder
        recorder = None if of_steps is None else SharingRecorder(of_steps)
        engine = Engine(session.model, settings, recorder)
        try:
            with session.presented.attending_as_before(), session.precision.autocast():
                return engine.generate(requests, each, seconds)
        finally:
            engine.release()


def cache_memory(config: ChronicalsConfig, device: torch.device, planned: int) -> int | None:
    """Return the most bytes of keys and values of a run; None where the engine decides.

    Args:
        config: configuration of the run.
        device: device of the model; without a card the engine decides.
        planned: bytes that are expected at the largest moment of a step; 0 if unknown.
    """
    if config.cache_bytes is not None or device.type != "cuda":
        return config.cache_bytes
    _, whole = torch.cuda.mem_get_info(device)
    peak = max(planned, peak_bytes(device))
    room = cache_room(fillable(whole, config), peak, torch.cuda.memory_allocated(device))
    return min(room, free_memory(device))
