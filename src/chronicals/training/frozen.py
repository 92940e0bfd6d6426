"""Frozen models that an objective needs beside the one that is trained, such as a teacher: from
loading to release.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from chronicals.config import ChronicalsConfig
from chronicals.models import PresentedModel, check_positions, input_device, present
from chronicals.objectives import Objective
from chronicals.patching import fuse_weights, patch_parts
from chronicals.policies.facts import why_not_fused

logger = logging.getLogger(__name__)


def bring_frozen(
    objective: Objective, model: Any, tokenizer: Any, config: ChronicalsConfig
) -> None:
    """Ask the objective for its frozen models and make them ready: ``objective.frozen`` holds them
    afterwards.

    Call it before ``model``, on its device, is changed in any way.

    Raises:
        ConfigurationError: one cannot be had, or does not fit; the message names the setting.
    """
    release_frozen(objective)
    made_ready(objective, objective.bring(model, tokenizer, config), model, config)


def made_ready(
    objective: Objective, models: Mapping[str, Any], model: Any, config: ChronicalsConfig
) -> None:
    """Freeze models, move them to the device of ``model``, give them kernels, and put them into
    ``objective.frozen``.
    """
    for name, brought in models.items():
        brought.requires_grad_(False).eval().to(input_device(model))
        brought.config.use_cache = False
        objective.frozen[name] = _ready(brought, config, objective.shares_prompts())
        size = sum(parameter.nbytes for parameter in brought.parameters()) / 2**30
        logger.info(
            "%s: %s, frozen, %.2f GiB on %s",
            name,
            type(brought).__name__,
            size,
            input_device(model),
        )


def _ready(model: Any, config: ChronicalsConfig, shared_prompts: bool) -> PresentedModel:
    """Presented, and on a card with kernels, as the model that is trained: adapters of the
    frozen model stay as they are.
    """
    presented = present(
        model,
        config.use_fused_kernels,
        config.use_flash_attention,
        config.max_seq_length,
        shared_prompts,
    )
    if config.use_fused_kernels and input_device(model).type == "cuda":
        patch_parts(presented.model, whole_layers=why_not_fused(config, presented) is None)
        fuse_weights(model)
    return presented


def check_frozen_positions(objective: Objective, longest: int) -> None:
    """As ``check_positions``, of each frozen model.

    Raises:
        ValueError: one has no position for a document of ``longest`` tokens.
    """
    for presented in objective.frozen.values():
        check_positions(presented.model, longest)


@contextmanager
def frozen_attending(objective: Objective) -> Iterator[None]:
    """Within: the frozen models of ``objective`` attend within documents, as the trained one
    does, and may be called.
    """
    with ExitStack() as around:
        for presented in objective.frozen.values():
            around.enter_context(presented.attending_documents())
        yield


def release_frozen(objective: Objective) -> None:
    """Give back the memory of the frozen models."""
    objective.frozen.clear()
