"""Rules that concern several fields of a configuration.

A rule takes a configuration and raises ConfigurationError if its fields contradict each other. Some
rules give a field that was left out the value that other fields imply (``IMPLIED``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from chronicals.config.errors import ConfigurationError
from chronicals.config.memory_entries import check_memory

if TYPE_CHECKING:
    from chronicals.config.config import ChronicalsConfig

IMPLIED = ("quantization", "use_lora", "lora_dropout")
"""Fields that other fields may set if they were left out."""


def _check_length(config: ChronicalsConfig) -> None:
    """Check that fields on the length of a run and of its warm-up do not contradict."""
    if config.max_steps is not None and config.num_epochs is not None:
        raise ConfigurationError(
            f"num_epochs={config.num_epochs} and max_steps={config.max_steps}: give one of the two"
        )
    if "warmup_steps" in config.explicit and config.warmup_ratio is not None:
        raise ConfigurationError(
            f"warmup_steps={config.warmup_steps} and warmup_ratio={config.warmup_ratio}: each "
            "says how long the learning rate rises; give one of the two"
        )
    if config.warmup_from_zero and 0 in (config.warmup_steps, config.warmup_ratio):
        raise ConfigurationError(
            "warmup_from_zero=True: there is no warm-up, which is 0 steps; leave it out"
        )
    if (
        "warmup_steps" in config.explicit
        and config.max_steps is not None
        and config.warmup_steps > config.max_steps
    ):
        raise ConfigurationError(
            f"warmup_steps={config.warmup_steps} exceeds max_steps={config.max_steps}: the peak "
            "would never be reached"
        )


def _check_target_parameters(config: ChronicalsConfig) -> None:
    """Check options that adapters of parameters do not have: dropout, DoRA and ``lora_init``.

    Raises:
        ConfigurationError: one of them is set.
    """
    if not config.lora_target_parameters:
        if config.lora_target_modules == []:
            raise ConfigurationError(
                "lora_target_modules='none': nothing is adapted; set lora_target_parameters, "
                "or name layers"
            )
        return
    if "lora_dropout" not in config.explicit:
        object.__setattr__(config, "lora_dropout", 0.0)
    for name, is_set in (
        ("lora_dropout", config.lora_dropout > 0),
        ("use_dora", config.use_dora),
        ("lora_init", config.lora_init not in ("default", "gaussian")),
    ):
        if is_set:
            raise ConfigurationError(
                f"{name}={getattr(config, name)!r} with "
                f"lora_target_parameters={config.lora_target_parameters}: adapters of "
                f"parameters do not have it; leave out {name}, or adapt linear layers alone "
                "(lora_target_modules)"
            )


def _check_quantization(config: ChronicalsConfig) -> None:
    """Check quantization against LoRA and FP8; apply ``load_in_4bit``, an alias of ``nf4``.

    Quantised weights are frozen, so ``use_lora`` is set if it was left out.

    Raises:
        ConfigurationError: the fields contradict each other.
    """
    if {"load_in_4bit", "quantization"} <= config.explicit and config.load_in_4bit != (
        config.quantization is not None
    ):
        raise ConfigurationError(
            f"quantization={config.quantization!r} and load_in_4bit={config.load_in_4bit}: they "
            "contradict; keep one"
        )
    if config.load_in_4bit:
        object.__setattr__(config, "quantization", "nf4")
    if config.quantization is None:
        return
    if "use_lora" not in config.explicit:
        object.__setattr__(config, "use_lora", True)
    said = f"quantization={config.quantization!r}"
    if not config.use_lora:
        raise ConfigurationError(
            f"{said}: weights in 4 bits are frozen, and use_lora=False trains all; leave out "
            "use_lora, or quantization"
        )
    if config.use_fp8:
        raise ConfigurationError(f"{said} and use_fp8=True: a weight has one format; keep one")


def _check_adapter_start(config: ChronicalsConfig) -> None:
    """Check the start of adapters against DoRA and quantization."""
    if config.use_dora and config.lora_init not in ("default", "gaussian", "loftq"):
        raise ConfigurationError(
            f"lora_init={config.lora_init!r}: with use_dora=True lengths are those of whole "
            "weights; leave one of them out"
        )
    if config.lora_init == "loftq" and config.quantization is None:
        raise ConfigurationError(
            "lora_init='loftq': makes up for what quantising takes from the weights, and "
            "quantization is not set; set quantization='nf4', or take lora_init='pissa' over 16 "
            "bits"
        )


def _check_optimizer(config: ChronicalsConfig) -> None:
    """Check that formats of weights, states and products do not contradict."""
    if config.use_8bit_optimizer and config.optimizer_state_dtype == "bf16":
        raise ConfigurationError(
            "use_8bit_optimizer=True and optimizer_state_dtype='bf16': each says how states "
            "are kept; leave out one"
        )
    if not config.master_weights and (config.use_lora or config.mixed_precision != "bf16"):
        other = f"mixed_precision={config.mixed_precision!r}"
        if config.use_lora:
            other = "use_lora=True"
        raise ConfigurationError(
            f"master_weights=False: with {other} no bf16 weight is trained; leave it out"
        )


def _check_patience(config: ChronicalsConfig) -> None:
    """Check that a run which may stop early evaluates."""
    if config.early_stopping_patience is not None and config.eval_steps is None:
        raise ConfigurationError(
            "early_stopping_patience needs eval_steps: without evaluations nothing can stop"
        )


RULES: tuple[Callable[[ChronicalsConfig], None], ...] = (
    _check_length,
    _check_target_parameters,
    _check_quantization,
    _check_adapter_start,  # after quantization has its value
    check_memory,
    _check_optimizer,
    _check_patience,
)
"""All rules, in the order in which their errors are listed."""
