"""Options of commands that run a model: its experts in host memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

OffloadExperts = Annotated[
    bool,
    typer.Option(
        "--offload-experts",
        help="Keep a mixture's experts in host memory, and those that tokens choose on the card",
    ),
]
ExpertMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="Memory of the card for --offload-experts, GB or with a unit as 8GiB"
    ),
]
ExpertMode = Annotated[
    str,
    typer.Option(
        help="With --offload-experts: exact; numerical, the CPU computes a share; or soft, shared "
        "experts stand in for missing ones"
    ),
]
ExpertPredictor = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="With --offload-experts, which experts are fetched before a layer chooses: last (the "
        "default), those that it chose the last time; none; heads of the native model; or a folder "
        "of `chronicals moe predict-train`",
    ),
]


def placing(
    offload_experts: bool,
    expert_memory: str | None,
    predictor: str | None,
    io: Path | None = None,
    mode: str = "exact",
) -> Callable[[Any], Any]:
    """Return a function that brings a loaded model to where it runs.

    Args:
        offload_experts: keep its experts in host memory.
        expert_memory: memory of the card for them.
        predictor: name of what says which experts are fetched early; None for the default.
        io: file for a line an event.
        mode: as of ``offload``.

    Raises:
        ValueError: one is given without the other, or there is no such mode or predictor.
    """
    from chronicals.config import ChronicalsConfig
    from chronicals.generation.answer import on_card
    from chronicals.moe.offload.predictors import LAST, NamedPredictor
    from chronicals.patching.expert_offload import MODES, offload

    if not offload_experts:
        if expert_memory is not None:
            raise ValueError(
                f"expert_memory={expert_memory}: has no effect without --offload-experts"
            )
        if mode != "exact":
            raise ValueError(f"expert_mode={mode}: has no effect without --offload-experts")
        if predictor is not None:
            raise ValueError(
                f"expert_predictor={predictor}: has no effect without --offload-experts"
            )
        return on_card
    if expert_memory is None:
        raise ValueError("offload_experts: give --expert-memory, such as 8GiB")
    if mode not in MODES:
        raise ValueError(f"expert_mode={mode}: expected one of {', '.join(MODES)}")
    named = NamedPredictor(predictor or LAST, "expert_predictor")
    named.check_name()
    memory: dict[str, Any] = {"memory": ["offload_experts"], "expert_memory": expert_memory}
    size = ChronicalsConfig(**memory).expert_bytes
    assert size is not None
    return partial(offload, vram=size, io=io, mode=mode, predictor=named)
