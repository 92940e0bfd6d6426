"""Frozen models that an objective needs besides the trained one, such as a teacher."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from chronicals.config import ChronicalsConfig
from chronicals.models import input_device, present
from chronicals.objectives import Objective
from chronicals.patching import fuse_weights, patch_parts
from chronicals.policies.facts import why_not_fused

logger = logging.getLogger(__name__)


def bring_frozen(
    objective: Objective, model: Any, tokenizer: Any, config: ChronicalsConfig
) -> None:
    """Load the objective's frozen models into ``objective.frozen``, ready to be called.

    Call it before ``model``, on its device, is changed in any way.

    Raises:
        ConfigurationError: a model cannot be loaded or does not fit; the message names the setting.
    """
    objective.frozen.clear()
    present_frozen(objective, objective.bring(model, tokenizer, config), model, config)


def present_frozen(
    objective: Objective, models: Mapping[str, Any], model: Any, config: ChronicalsConfig
) -> None:
    """Freeze models and put them into ``objective.frozen``.

    They get the device of ``model`` and its kernels.

    Their own adapters stay as they are.
    """
    device = input_device(model)
    for name, frozen in models.items():
        frozen.requires_grad_(False).eval().to(device)
        frozen.config.use_cache = False
        presented = present(
            frozen,
            config.use_fused_kernels,
            config.use_flash_attention,
            config.max_seq_length,
            objective.shares_prompts(),
        )
        if config.use_fused_kernels and device.type == "cuda":
            patch_parts(presented.model, whole_layers=why_not_fused(config, presented) is None)
            fuse_weights(frozen)
        objective.frozen[name] = presented
        size = sum(parameter.nbytes for parameter in frozen.parameters()) / 2**30
        logger.info("%s: %s, frozen, %.2f GiB on %s", name, type(frozen).__name__, size, device)


@contextmanager
def frozen_attending(objective: Objective) -> Iterator[None]:
    """Return a context in which the frozen models may be called and attend within documents."""
    with ExitStack() as contexts:
        for presented in objective.frozen.values():
            contexts.enter_context(presented.attending_documents())
        yield
