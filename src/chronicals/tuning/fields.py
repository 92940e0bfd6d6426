"""Fields of a recipe by what a change of them changes, which decides what may be tuned by it.

A score compares trials only if it is a score of the same thing. A held-out loss is one if all
trials predict the same tokens of the same rows; a speed is one if all compute the same steps.
"""

from __future__ import annotations

from chronicals.config.config import TARGET_FIELDS

LEARNING = frozenset(
    [
        "learning_rate",
        "batch_size",
        "gradient_accumulation_steps",
        "warmup_steps",
        "warmup_ratio",
        "warmup_from_zero",
        "lr_scheduler",
        "min_lr_ratio",
        "wsd_decay_ratio",
        "use_sequence_packing",
        "use_lora",
        "lora_rank",
        "lora_alpha",
        "lora_dropout",
        "lora_target_modules",
        "lora_target_parameters",
        "lora_rank_pattern",
        "lora_alpha_pattern",
        "lora_layers",
        "lora_modules_to_save",
        "lora_trainable_tokens",
        "lora_init",
        "use_rslora",
        "use_dora",
        "use_lora_plus",
        "lora_plus_ratio",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
        "packing_strategy",
        "max_documents",
        "resize_embeddings",
        "rope_scaling",
        "reward_on_error",
        "reward_aggregation",
    ]
)
"""Fields that change what is learned, and leave the held-out tokens as they are."""

ROUNDING = frozenset(
    [
        "quantization",
        "load_in_4bit",
        "use_8bit_optimizer",
        "optimizer_state_dtype",
        "master_weights",
        "mixed_precision",
        "use_fp8",
    ]
)
"""Fields that change a result by rounding, and memory and time."""

COST = frozenset(
    [
        "use_flash_attention",
        "use_fused_kernels",
        "use_gradient_checkpointing",
        "use_torch_compile",
        "use_cuda_graphs",
        "activation_offload",
        "memory",
        "logits_chunk_size",
        "fit",
        "sharding",
        "sharding_ranks",
        "context_parallel",
        "context_heads",
    ]
)
"""Fields that change memory and time alone."""

HELD_OUT = frozenset(
    [
        *TARGET_FIELDS,
        "objective",
        "model",
        "base_model",
        "data",
        "validation_data",
        "validation_split",
        "validation_seed",
        "columns",
        "chat_template",
        "rewards",
    ]
)
"""Fields that change what is predicted of the held-out rows, or by what it is scored."""

OF_THE_STUDY = frozenset(
    [
        "max_steps",
        "num_epochs",
        "seed",
        "eval_steps",
        "early_stopping_patience",
        "keep",
        "pack_parts",
        "rank_timeout",
        "reward_timeout",
        "gpu_memory",
        "cache_memory",
        "expert_memory",
        "expert_predictor",
        "generation_exact",
        "check_memory",
        "dataset_num_proc",
        "save_steps",
        "save_total_limit",
        "trackers",
        "project",
        "run_name",
        "report_samples",
        "output_dir",
        "overwrite",
        "cache_dir",
        "trust_remote_code",
        "sections",
        "tune",
    ]
)
"""Fields that all trials share: their length, their seed, their limits and where they are written."""

OF_ADAPTERS = frozenset(
    name
    for name in LEARNING
    if name.startswith("lora_") or name in ("use_rslora", "use_dora", "use_lora_plus")
)
"""Fields that change nothing where all weights are trained."""


CROSS_ENTROPY = frozenset({"sft", "pretraining", "distill", "orpo", "cpo"})
"""Objectives whose evaluations have a cross-entropy, on which their settings have no influence."""

OF_REWARDS = frozenset({"grpo", "rloo"})
"""Objectives whose evaluation is the mean reward of answers, whatever their settings."""


SPEED = "tokens_per_second"
"""The metric of studies that do not look at what is learned."""


def why_not_compared(name: str, objective: str, metric: str) -> str | None:
    """Return why trials that differ in a field cannot be compared; None if they can.

    Args:
        name: of the field; settings of an objective have a point in their name.
        objective: of the recipe.
        metric: by which they are compared.
    """
    if metric == SPEED:
        return _why_not_by_speed(name)
    return _why_not_by_score(name, objective, metric)


def _why_not_by_score(name: str, objective: str, metric: str) -> str | None:
    if "." in name and metric == "loss" and objective not in CROSS_ENTROPY | OF_REWARDS:
        return (
            "is a part of the loss, by which trials could not be compared then; name another "
            "metric, as rewards/accuracies"
        )
    if name in HELD_OUT:
        return "changes what is predicted of the held-out rows, so scores could not be compared"
    if name in COST:
        return "changes memory or speed alone, and no loss; tune it by metric: tokens_per_second"
    if name in OF_THE_STUDY:
        return "is the same for all trials of a study"
    return None


def _why_not_by_speed(name: str) -> str | None:
    if name in COST or name in ROUNDING or name == "batch_size":
        return None
    if name in OF_THE_STUDY:
        return "is the same for all trials of a study"
    return "changes what is trained, so speeds could not be compared; tune it by a held-out score"
