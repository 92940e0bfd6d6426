"""Experts in host memory and in slots on the card."""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.distributed import Mesh
from chronicals.formats.gguf.reader import gguf_of
from chronicals.kernels.host_memory import available_memory
from chronicals.models.loading import IN_FP8 as FP8_FILES
from chronicals.models.loading import (
    WEIGHT_DTYPES,
    folder_of_weights,
    load_config,
    named,
    quantization_of,
)
from chronicals.models.routed_experts import is_experts
from chronicals.moe.offload.budget import Budgets, size_words
from chronicals.moe.offload.errors import NotExpertByExpert
from chronicals.moe.offload.events import IO_FILE
from chronicals.moe.offload.eviction import LeastRecentlyUsed
from chronicals.moe.offload.layers import wave_dense_bytes
from chronicals.moe.offload.module import streamed_experts_of
from chronicals.moe.offload.predictors import NamedPredictor
from chronicals.patching.expert_offload import (
    WERE_DEQUANTISED,
    hold_experts,
    load_held,
    open_experts,
)
from chronicals.policies.exclusions import streams_experts
from chronicals.policies.facts import DIVIDE_WEIGHTS, Facts
from chronicals.policies.policy import Decision, MemoryLoad, Policy, Stage, register_policy

logger = logging.getLogger(__name__)

SETTING = "memory=['offload_experts']"

FULL_TRAINING = (
    "{}: the experts are in host memory and stay as they are, and use_lora=False trains all "
    "weights; set use_lora=True, or leave it out"
)


STANDS_IN = (
    "chronicals.offload(mode='soft'): replaces experts that are missing and has no gradients; "
    "offload the model with mode='exact' to train it"
)


class OffloadExperts(Policy):
    """All experts are in host memory, and those that tokens chose are copied to the card."""

    name = "offload_experts"
    title = "experts in host memory"
    setting = SETTING
    stage = Stage.LAYERS

    def why_not(self, facts: Facts) -> str | None:
        """Return that there are no experts, or no such predictor, if so."""
        modules = facts.model.modules()
        if not streams_experts(facts.model) and not any(map(is_experts, modules)):
            return f"{type(facts.model).__name__} has no routed experts; leave it out"
        try:
            predictor_asked(facts.config).check_name()
        except ValueError as error:
            return str(error)
        return None

    def words(self, facts: Facts) -> str:
        """Return who asked for it, and the memory of the slots."""
        size = (facts.config.expert_bytes or 0) / 2**30
        return f"{facts.who_asked(self.name)}, {size:.2f} GiB of them on the card at a time"

    def bytes(self, facts: Facts, load: MemoryLoad) -> MemoryLoad:
        """Return ``load`` with slots and predictor in place of the experts, which host memory has.

        Dequantised values of a wave are counted once the experts are streamed; before that they are
        among those of a layer of packed weights.
        """
        slots = facts.config.expert_bytes or 0
        beside = predictor_asked(facts.config).bytes(facts.model)
        streamed = list(streamed_experts_of(facts.model))
        if streamed:  # their weights are in no parameter any more
            host = sum(module.bytes for _, module in streamed)
            engine = streamed[0][1].source.engine
            dense = wave_dense_bytes(engine.layers, slots // engine.slot_bytes)
            held = min(slots, host) + dense + beside
            return replace(load, fixed=load.fixed + held, host={**load.host, self.title: host})
        values = sum(
            p.numel()
            for module in facts.model.modules()
            if is_experts(module)
            for p in module.parameters(recurse=False)
        )
        resident = int(values * load.frozen)
        in_fp8 = stays_in_fp8(facts.config, facts.model.config)
        host = values if in_fp8 else resident
        held = min(slots, host) - resident + beside
        return replace(load, fixed=load.fixed + held, host={**load.host, self.title: host})

    def apply(self, model: Any, facts: Facts, decision: Decision) -> None:
        """Check that the experts are streamed: they are since the model was brought to the card.

        Raises:
            ConfigurationError: they are not.
        """
        if not streams_experts(model):
            raise ConfigurationError(
                f"{self.setting}: experts move before the model is brought to the card; give the "
                "model to ChronicalsTrainer, or to chronicals.offload before"
            )


def load_experts_as_asked(
    place: str | Path, config: ChronicalsConfig, ranks: Mesh, trust_remote_code: bool
) -> Any | None:
    """Load a model in FP8 with a scale a block, whose experts stay so in host memory.

    Args:
        place: a folder or a hub name of a whole model.
        config: configuration of the run.
        ranks: all processes; those of a machine share the experts.
        trust_remote_code: run code that comes with the model.

    Returns:
        The model, whose experts have no slots yet; None if it has to be loaded as otherwise, because
        ``config`` asks for something else, or its files do not hold such experts.

    Raises:
        ConfigurationError: the model cannot be loaded, or its experts do not fit.
    """
    if not OFFLOAD_EXPERTS.asked(config) or gguf_of(place) is not None:
        return None
    if _why_not_held(config, adapted=False) is not None:
        return None
    if not stays_in_fp8(config, load_config(place, trust_remote_code)):
        return None
    _check_predictor(config, None)
    try:
        model, _ = load_held(
            folder_of_weights(place),
            _budgets(config),
            WEIGHT_DTYPES[config.mixed_precision],
            shared=_shared_name(config, ranks),
            trust_remote_code=trust_remote_code,
        )
    except NotExpertByExpert as error:
        logger.warning(WERE_DEQUANTISED, error)
        return None
    except ValueError as error:
        raise ConfigurationError(f"{SETTING}: {error}") from error
    logger.info("experts: in FP8 with a scale a block, as their files hold them")
    return named(model, place)


def stays_in_fp8(config: ChronicalsConfig, of_model: Any) -> bool:
    """Return whether experts in host memory stay in FP8 as files hold them, with a scale a block.

    Args:
        config: configuration of the run. With ``use_fp8`` products run in FP8, which has a scale a
            row, so that experts are dequantised first.
        of_model: configuration of the model.
    """
    if config.use_fp8 or config.quantization is not None:
        return False
    return quantization_of(of_model).get("quant_method") == FP8_FILES


def _why_not_held(config: ChronicalsConfig, adapted: bool) -> str | None:
    """Return why a run cannot have its experts in host memory, or None.

    Args:
        config: configuration of the run.
        adapted: the model has adapters already.
    """
    if not config.use_lora and not adapted:
        asked = OFFLOAD_EXPERTS.asked(config)
        return FULL_TRAINING.format(SETTING if asked else "chronicals.offload")
    if config.sharding == DIVIDE_WEIGHTS:
        return (
            "sharding='weights': every process would hold a share of the experts, which are in "
            "host memory; take sharding='optimizer' or 'none'"
        )
    if config.mixed_precision == "fp16":
        return (
            f"mixed_precision='fp16': runs under autocast, where no product reads experts from "
            f"slots; take 'bf16' or 'fp32', or leave {SETTING} out"
        )
    return None


def hold_experts_as_asked(model: Any, config: ChronicalsConfig, ranks: Mesh) -> None:
    """Move the experts of a loaded model to host memory, if the configuration asks for it.

    Args:
        model: the model, with its weights in their final format, before it is on a card. Its experts
            may be there already.
        config: configuration of the run.
        ranks: all processes; those of a machine share the experts.

    Raises:
        ConfigurationError: they cannot be moved, or would be trained.
    """
    asked = OFFLOAD_EXPERTS.asked(config)
    streamed = [module for _, module in streamed_experts_of(model)]
    if not asked and not streamed:
        return
    reason = _why_not_held(
        config, hasattr(model, "chronicals_lora") or hasattr(model, "peft_config")
    )
    if any(module.source.engine.stands_in for module in streamed):
        reason = STANDS_IN
    if reason is not None:
        raise ConfigurationError(reason)
    if not asked or (streamed and streamed[0].source.engine.slots):
        _check_predictor_of(model, config)
        return
    _check_predictor(config, model)
    if streamed:  # while it was loaded
        return
    try:
        shared = _shared_name(config, ranks)
        hold_experts(model, _budgets(config), shared, in_fp8=config.use_fp8)
    except ValueError as error:
        raise ConfigurationError(f"{SETTING}: {error}") from error


def open_experts_as_asked(model: Any, config: ChronicalsConfig, device: torch.device) -> None:
    """Make the slots of experts that ``hold_experts_as_asked`` moved."""
    engine = next((m.source.engine for _, m in streamed_experts_of(model)), None)
    if engine is None or engine.slots or not OFFLOAD_EXPERTS.asked(config):
        return
    io = Path(config.output_dir) / IO_FILE
    predictor = predictor_asked(config)
    open_experts(model, engine, _budgets(config), device, LeastRecentlyUsed(), predictor, io)


def predictor_asked(config: ChronicalsConfig) -> NamedPredictor:
    """Return the predictor that a configuration asks for."""
    return NamedPredictor(config.expert_predictor, "expert_predictor")


def _check_predictor(config: ChronicalsConfig, model: Any | None) -> None:
    """Check that the predictor is there, and fits the model, if that is known.

    Raises:
        ConfigurationError: it is not, or does not.
    """
    asked = predictor_asked(config)
    try:
        if model is None:
            asked.check_name()
        else:
            asked.check(model)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def _check_predictor_of(model: Any, config: ChronicalsConfig) -> None:
    """Refuse a predictor that is asked for where the model was offloaded with another one.

    Raises:
        ConfigurationError: it was.
    """
    asked = predictor_asked(config)
    opened = getattr(model, "offload", None)
    if opened is None or asked.field not in config.explicit or opened.predictor == asked:
        return
    raise ConfigurationError(
        f"{asked.words}: the model was offloaded with another one; give "
        f"chronicals.offload(predictor={asked.name!r}), or leave {asked.field} out"
    )


def _budgets(config: ChronicalsConfig) -> Budgets:
    """Return the memory that experts may take."""
    assert config.expert_bytes is not None
    asked = f"expert_memory={size_words(config.expert_bytes)}"
    return Budgets(config.expert_bytes, asked, available_memory())


def _shared_name(config: ChronicalsConfig, ranks: Mesh) -> str | None:
    """Return the name of the memory that the processes of a run on this machine share."""
    if ranks.count == 1:
        return None
    run = [str(config.output_dir), *(os.environ.get(n, "") for n in ("MASTER_ADDR", "MASTER_PORT"))]
    return f"experts-{os.getuid()}-{hashlib.sha256('|'.join(run).encode()).hexdigest()[:16]}"


OFFLOAD_EXPERTS = register_policy(OffloadExperts())
