"""A model as a run calls it: on Batches of its packs, for its objective."""

from __future__ import annotations

from typing import Any

from chronicals.config import ChronicalsConfig
from chronicals.models import PresentedModel, present
from chronicals.objectives import Objective


def present_for(objective: Objective, model: Any, config: ChronicalsConfig) -> PresentedModel:
    """Decide how ``model`` takes the Batches of a run or of an evaluation.

    Args:
        objective: says whether answers share prompts.
        model: a Hugging Face model, with or without PEFT's wrapper.
        config: kernels and width of packs.

    Raises:
        ValueError: the model is not causal: it sees the tokens that it is to predict.
    """
    return present(
        model,
        config.use_fused_kernels,
        config.use_flash_attention,
        config.max_seq_length,
        objective.shares_prompts(),
    )
