"""Generate answers with a trained model."""

from chronicals.generation.answer import (
    Chat,
    Trained,
    generate,
    generate_answer,
    generate_many,
    load_trained,
    prompt_ids,
)
from chronicals.generation.engine import Engine, free_memory, why_not_served
from chronicals.generation.exact import packed_log_probabilities, why_layers_not_exact
from chronicals.generation.exact_operations import NotExact
from chronicals.generation.requests import Answer, Ending, Request
from chronicals.generation.sampling import Sampling
from chronicals.generation.schedule import EngineSettings

__all__ = [
    "Answer",
    "Chat",
    "Ending",
    "Engine",
    "EngineSettings",
    "NotExact",
    "Request",
    "Sampling",
    "Trained",
    "free_memory",
    "generate",
    "generate_answer",
    "generate_many",
    "load_trained",
    "packed_log_probabilities",
    "prompt_ids",
    "why_layers_not_exact",
    "why_not_served",
]


def __dir__() -> list[str]:
    return sorted(__all__)
