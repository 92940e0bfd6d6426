"""Names of fields in other trainers, and the text to write here instead.

The names are those of transformers and TRL, PEFT, Axolotl, LLaMA-Factory, Unsloth, torchtune and
nanoGPT.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from chronicals.config import foreign_data
from chronicals.config.errors import ConfigurationError
from chronicals.config.foreign_values import (
    ABSENT_OBJECTIVES,
    ANY,
    BY_VALUE,
    OWN_VALUES,
    UNNEEDED,
    as_key,
)

RENAMED: dict[str, str] = {
    "learning_rate": "lr peak_lr max_lr",
    "num_epochs": "epochs num_train_epochs num_train_epoch n_epochs max_epochs total_epochs",
    "overwrite": "overwrite_output_dir",
    "max_steps": "steps num_steps train_steps max_train_steps total_steps max_iters",
    "batch_size": "bs micro_batch micro_batch_size per_device_train_batch_size "
    "per_device_batch_size train_batch_size "
    "per_gpu_train_batch_size device_batch_size local_batch_size",
    "gradient_accumulation_steps": "grad_accum grad_accum_steps gradient_accumulation "
    "grad_accumulation_steps "
    "accumulate_grad_batches accumulation_steps",
    "max_seq_length": "max_length max_seq_len max_sequence_length seq_len seq_length sequence_len "
    "sequence_length cutoff_len "
    "block_size context_length context_len model_max_length",
    "warmup_steps": "warmup num_warmup_steps lr_warmup_steps warmup_iters",
    "warmup_ratio": "warmup_proportion warmup_fraction",
    "lr_scheduler": "lr_scheduler_type scheduler lr_schedule lr_scheduler_name lr_decay_style",
    "min_lr_ratio": "cosine_min_lr_ratio min_lr_rate",
    "use_flash_attention": "flash_attention flash_attention_2 flash_attn use_flash_attention_2",
    "use_fused_kernels": "use_liger_kernel use_liger enable_liger_kernel",
    "use_sequence_packing": "packing sample_packing pack packed neat_packing",
    "use_gradient_checkpointing": "gradient_checkpointing activation_checkpointing "
    "enable_activation_checkpointing",
    "use_torch_compile": "torch_compile compile",
    "use_lora": "lora peft use_peft",
    "lora_rank": "r rank lora_r lora_dim",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "lora_target_modules": "target_modules lora_target lora_attn_modules",
    "lora_rank_pattern": "rank_pattern",
    "lora_alpha_pattern": "alpha_pattern",
    "lora_modules_to_save": "modules_to_save additional_target",
    "lora_trainable_tokens": "trainable_token_indices peft_trainable_token_indices",
    "resize_embeddings": "resize_vocab",
    "lora_target_parameters": "target_parameters",
    "lora_init": "init_lora_weights",
    "lora_layers": "layers_to_transform lora_layers_to_transform peft_layers_to_transform",
    "use_rslora": "rslora use_rs_lora peft_use_rslora",
    "use_dora": "dora lora_use_dora peft_use_dora",
    "lora_plus_ratio": "loraplus_lr_ratio loraplus_ratio",
    "weight_decay": "wd",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "adam_eps eps",
    "max_grad_norm": "gradient_clipping gradient_clip_val clip_grad_norm clip_grad grad_clip "
    "max_norm",
    "activation_offload": "activation_offloading enable_activation_offloading",
    "use_fp8": "fp8",
    "objective": "stage rl",
    "rewards": "reward_funcs reward_functions reward_func reward_fn",
    "reward_aggregation": "multi_objective_aggregation",
    "train_on_roles": "roles_to_train",
    "max_documents": "max_packed_sequences",
    "validation_split": "val_set_size val_size test_size eval_split",
    "eval_steps": "evaluation_steps eval_every eval_interval eval_every_n_steps "
    "run_val_every_n_steps",
    "dataset_num_proc": "num_proc preprocessing_num_workers dataset_processes",
    "save_steps": "save_every save_interval save_every_n_steps",
    "save_total_limit": "keep_last_n_checkpoints max_checkpoints",
    "trackers": "report_to log_with tracker logger",
    "project": "wandb_project mlflow_experiment_name project_name",
    "run_name": "wandb_name wandb_run_name experiment_name mlflow_run_name",
    "output_dir": "out_dir save_dir output_path",
    "cache_dir": "dataset_prepared_path",
    "chat_template": "chat_template_path",
    "seed": "random_seed random_state data_seed",
    "model": "model_name_or_path model_name model_id pretrained_model_name_or_path",
    "data": "dataset datasets dataset_name dataset_path dataset_id train_file train_data "
    "train_dataset data_path "
    "pretraining_dataset data_files",
    "validation_data": "eval_dataset eval_data val_data validation_file test_datasets",
}
"""Our names, and other trainers' names of fields with the same values."""

FURTHER_ADVICE: dict[str, str] = {
    "lora_plus_ratio": "LoRA+ is on by default: A learns at learning_rate, B at lora_plus_ratio "
    "times that (A 2.0e-4, B 3.2e-3 "
    "by default); use_lora_plus=False for one rate",
}
"""Further advice for messages that name one of our fields."""

_OF_ROLLOUTS: dict[str, str] = {
    "answers": "num_generations num_return_sequences group_size",
    "max_new_tokens": "max_completion_length max_new_tokens",
    "temperature": "temperature",
    "iterations": "num_iterations ppo_epochs",
    "clip_low": "epsilon epsilon_low clip_ratio_low cliprange",
    "clip_high": "epsilon_high clip_ratio_high",
    "beta": "beta pref_beta rl_beta",
    "entropy": "entropy_coef entropy_coeff",
    "importance": "vllm_importance_sampling_mode",
    "importance_cap": "vllm_importance_sampling_cap vllm_importance_sampling_clip_max",
    "reference_model": "reference_model ref_model ref_model_name_or_path ref_model_path",
}
"""Settings of objectives that draw answers, and their names in other trainers."""

SETTINGS: dict[str, str] = {
    "dpo.beta": "beta pref_beta rl_beta dpo_beta",
    "dpo.loss": "loss_type pref_loss dpo_loss_type",
    "dpo.label_smoothing": "label_smoothing dpo_label_smoothing",
    "dpo.reference_model": "reference_model ref_model ref_model_name_or_path ref_model_path",
    "ipo.tau": "tau beta pref_beta rl_beta",
    "simpo.gamma": "simpo_gamma gamma",
    "cpo.alpha": "cpo_alpha",
    "orpo.beta": "orpo_alpha orpo_beta beta pref_beta rl_beta",
    "kto.beta": "beta pref_beta rl_beta kto_beta",
    "simpo.beta": "beta pref_beta rl_beta simpo_beta",
    "cpo.beta": "beta pref_beta rl_beta cpo_beta",
    "cpo.label_smoothing": "label_smoothing",
    "kto.reference_model": "reference_model ref_model ref_model_name_or_path ref_model_path",
    "ipo.reference_model": "reference_model ref_model ref_model_name_or_path ref_model_path",
    "kto.desirable_weight": "desirable_weight kto_desirable_weight kto_chosen_weight",
    "kto.undesirable_weight": "undesirable_weight kto_undesirable_weight kto_rejected_weight",
    "reward.center_coefficient": "center_rewards_coefficient center_coefficient",
    **{
        f"{objective}.{setting}": names
        for objective in ("grpo", "rloo")
        for setting, names in _OF_ROLLOUTS.items()
    },
    "grpo.loss": "loss_type",
    "grpo.level": "importance_sampling_level",
    "grpo.clip_bound": "delta",
    "grpo.scale": "scale_rewards",
    "distill.teacher": "teacher teacher_model teacher_model_name_or_path",
    "distill.temperature": "temperature kd_temperature",
    "distill.alpha": "kd_alpha",
}
"""Settings of an objective, in a section of its name, and their names in other trainers."""

OBJECTIVE_NAMES: dict[str, str] = {
    "rm": "reward",
    "reward_model": "reward",
    "gkd": "distill",
    "kd": "distill",
    "dapo": "grpo",
    "dr_grpo": "grpo",
    "gspo": "grpo",
    "gdpo": "grpo",
    "pt": "pretraining",
    "pretrain": "pretraining",
}
"""Our objectives by their names in other trainers."""

INSTEAD: dict[str, str] = {
    "reward_weights": "rewards, whose entries end with their weights",
    "custom_reward_function": "rewards=['FILE.py:NAME'], the path of the function",
    "precompute_ref_log_probs": "dpo={'reference': 'stored'}, or the same in the section of "
    "another objective",
    "reference_free": "objective='simpo' (or cpo, or orpo), which has no reference",
    "kd_trainer": "objective='distill'",
    "max_prompt_length": "max_seq_length, which bounds prompt and answer together",
    "steps_per_generation": "grpo.updates, the optimizer steps between two rollouts",
    "generation_batch_size": "grpo.prompts and grpo.answers, whose product a step has",
    "mask_truncated_completions": "grpo={'truncated': 'mask'}",
    "normalize_advantages": "rloo={'scale': 'batch'}",
    "bf16": "mixed_precision='bf16'",
    "fp16": "mixed_precision='fp16'",
    "fp32": "mixed_precision='fp32'",
    "half": "mixed_precision='fp16'",
    "precision": "mixed_precision, which is 'bf16', 'fp16' or 'fp32'",
    "dtype": "mixed_precision, which is 'bf16', 'fp16' or 'fp32'",
    "torch_dtype": "mixed_precision, which is 'bf16', 'fp16' or 'fp32'",
    "truncation": "overlong, which is 'cut', 'split' or 'drop'",
    "truncation_mode": "overlong, which is 'cut', 'split' or 'drop'",
    "excess_length_strategy": "overlong, which is 'cut', 'split' or 'drop'",
    "tf32": "mixed_precision='bf16', or 'fp32', which uses no TF32",
    "eta_min": "min_lr_ratio, the final learning rate as a share of the peak",
    "min_lr": "min_lr_ratio, the final learning rate as a share of the peak",
    "lr_scheduler_kwargs": "min_lr_ratio and wsd_decay_ratio",
    "global_batch_size": "batch_size and gradient_accumulation_steps, whose product every process "
    "takes in a step",
    "total_batch_size": "batch_size and gradient_accumulation_steps, whose product every process "
    "takes in a step",
    "attn_implementation": "use_flash_attention; the attention that fits card and model is chosen "
    "by itself",
    "adapter": "use_lora=True",
    "finetuning_type": "use_lora=True, or leave it out to train all weights",
    "peft_config": "use_lora=True with lora_rank, lora_alpha, lora_dropout and lora_target_modules",
    "load_in_16bit": "mixed_precision='bf16'",
    "bfloat16": "mixed_precision='bf16'",
    "float16": "mixed_precision='fp16'",
    "float32": "mixed_precision='fp32'",
    "full_finetuning": "use_lora=False",
    "tiled_mlp": "memory=['tiled_mlp']",
    "layer_offloading": "memory=['offload_activations']",
    "sequence_parallel_degree": "context_parallel=2, as many processes as share each pack",
    "context_parallel_size": "context_parallel=2, as many processes as share each pack",
    "cp_size": "context_parallel=2, as many processes as share each pack",
    "lora_target_linear": "use_lora=True, which adapts every linear layer but the head",
    "quantization_bit": "quantization='nf4', which is 4 bits",
    "loftq_config": "lora_init='loftq' with quantization='nf4': 4 bits and one alternation",
    "loftq_iter": "lora_init='loftq', one alternation: further ones change the base, which would "
    "have to be saved, too",
    "loftq_bits": "quantization='nf4', which is 4 bits",
    "use_qlora": "quantization='nf4', which trains adapters over 4 bits",
    "assistant_only_loss": "train_on_roles=['assistant'], the default",
    "completion_only_loss": "objective='sft', the default, which trains of prompts and "
    "completions the completions alone",
    "train_on_inputs": "train_on_roles, whose messages are trained; or objective='pretraining' "
    "for every token",
    "mask_history": "train_on_turns='last'",
    "eval_strategy": "eval_steps, a number of steps",
    "evaluation_strategy": "eval_steps, a number of steps",
    "evals_per_epoch": "eval_steps, a number of steps",
    "save_strategy": "save_steps, a number of steps",
    "saves_per_epoch": "save_steps, a number of steps",
    "use_wandb": "trackers=['wandb']",
    "resume_from_checkpoint": "resume=True where the run is started",
    "auto_resume_from_checkpoints": "resume=True where the run is started",
    "load_best_model_at_end": "keep='best', the default where something is held out",
}
"""Other trainers' fields with another kind of value, and what to write here instead."""

TURNED_OFF: dict[str, str] = {
    "bf16": "mixed_precision='fp32', or 'fp16'",
    "load_best_model_at_end": "keep='last'",
    "assistant_only_loss": "objective='pretraining', which trains every token",
    "completion_only_loss": "objective='pretraining', which trains every token",
    "truncation": INSTEAD["truncation"],
}
"""Replacements of such fields with the value false, if our default differs.

Fields without an entry are left out.
"""

NOWHERE: dict[str, str] = {
    "sync_ref_model": "the reference stays what the run began with",
    "ref_model_sync_steps": "the reference stays what the run began with",
    "ref_model_mixup_alpha": "the reference stays what the run began with",
    "rpo_alpha": "cross-entropy beside DPO is not part of this version; the objectives cpo and "
    "orpo have it",
    "pref_ftx": "cross-entropy beside DPO is not part of this version; the objectives cpo and "
    "orpo have it",
    "ld_alpha": "it is not part of this version",
    "use_weighting": "it is not part of this version",
    "loss_weights": "sums of several losses are not part of this version",
    "lmbda": "answers of the student are not generated during training in this version",
    "seq_kd": "answers of the teacher are not generated during training in this version",
    **dict.fromkeys(
        ("top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs"),
        "answers are drawn from the model's whole distribution, of which the ratios are; only "
        "temperature changes both",
    ),
    **dict.fromkeys(
        (
            "use_vllm",
            "vllm_mode",
            "vllm_gpu_memory_utilization",
            "vllm_tensor_parallel_size",
            "vllm_server_host",
            "vllm_server_port",
            "vllm_server_timeout",
            "vllm_server_base_url",
            "async_prefetch",
        ),
        "answers are drawn with the trainer's own modules",
    ),
    "logging_steps": "every step is a line of metrics.jsonl",
    "logging_strategy": "every step is a line of metrics.jsonl",
    "log_every_n_steps": "every step is a line of metrics.jsonl",
    "logging_dir": "TensorBoard's files are in the folder of the run",
    "log_completions": "the report shows answers before and after training",
    "num_completions_to_print": "report_samples says how many the report shows",
    "dataloader_num_workers": "batches are assembled ahead in a thread",
    "num_workers": "batches are assembled ahead in a thread",
    "dataloader_pin_memory": "batches are in pinned memory on a card",
    "remove_unused_columns": "columns that no row needs are not read",
    "group_by_length": "documents are packed, without padding",
    "ddp_find_unused_parameters": "start with torchrun; parameters without a gradient are found",
    "deepspeed": "start with torchrun for several cards",
    "fsdp": "start with torchrun for several cards",
    "fsdp_config": "start with torchrun for several cards",
    "push_to_hub": "the trained model is in the folder of the run, for huggingface-cli to upload",
    "hub_model_id": "the trained model is in the folder of the run, for huggingface-cli to upload",
    "neftune_noise_alpha": "NEFTune is not part of this version",
    "loraplus_lr_embedding": "adapters of embeddings learn at learning_rate, as A does",
    "bias": "biases are frozen beside adapters",
    "task_type": "models here are causal language models",
}
"""Other trainers' fields without a field here: why none is needed, or where the setting is."""

NOWHERE |= UNNEEDED

OUR_NAMES = {theirs: ours for ours, names in RENAMED.items() for theirs in names.split()}

SETTINGS_BY_NAME: dict[str, list[str]] = {}
"""Our settings of objectives by their names in other trainers."""
for _ours, _names in SETTINGS.items():
    for _theirs in _names.split():
        SETTINGS_BY_NAME.setdefault(_theirs, []).append(_ours)

SOURCE_FIELDS = ("path", "subset", "split", "weight", "columns", "name")
"""Fields of an entry of data."""

SHORT_NAME_LENGTH = 5
"""Length up to which a name is short: a larger share of its letters may be misspelled."""

NOT_SHOWN = object()
"""Placeholder for a value that is not known."""


def suggestion(
    name: str, value: Any, fields: Collection[str], given: Mapping[str, Any] | None = None
) -> str | None:
    """Return short advice about an unknown field; None if no known field resembles it.

    Args:
        name: of the field.
        value: its value, or ``NOT_SHOWN``.
        fields: the fields that exist.
        given: the other fields, which show the objective that a setting belongs to.
    """
    name = name.replace("-", "_")
    known = (
        name in OUR_NAMES
        or name in INSTEAD
        or name in NOWHERE
        or name in SETTINGS_BY_NAME
        or name in BY_VALUE
    )
    if value is None and known:
        return "leave it out"
    meant = _by_value(name, value, fields) or _renamed(name, value, fields)
    if meant is not None:
        return meant
    if OUR_NAMES.get(name) in ("model", "data", "validation_data"):
        return (
            "model and data are arguments: ChronicalsTrainer(model, tokenizer, "
            "config).train(train_dataset, eval_dataset)"
        )
    if value is False and name in TURNED_OFF:
        return f"use {TURNED_OFF[name]}"
    if name in INSTEAD:
        return "leave it out" if value is False else f"use {INSTEAD[name]}"
    if name in NOWHERE:
        return f"leave it out: {NOWHERE[name]}"
    if name in SETTINGS_BY_NAME and "objective" in fields:
        # The setting of the run's objective, which ``given`` has by our or another trainer's name,
        # if that has it; else of the first objective that has it.
        given = given or {}
        objective = ""
        for field in ("objective", *RENAMED["objective"].split()):
            if isinstance(given.get(field), str):
                named = given[field].lower()
                loss = BY_VALUE["pref_loss"].get(as_key(given.get("pref_loss")), "")
                by_loss = loss.partition("objective='")[2].rstrip("'")
                objective = by_loss or OBJECTIVE_NAMES.get(named, named)
                break
        several = [ours.partition(".") for ours in SETTINGS_BY_NAME[name]]
        section, _, setting = next((one for one in several if one[0] == objective), several[0])
        shown = "..." if value is NOT_SHOWN else repr(value)
        return f"use {setting} in the section of the objective: {section}={{{setting!r}: {shown}}}"
    return _near(name, fields)


def _by_value(name: str, value: Any, fields: Collection[str]) -> str | None:
    """Return the advice for a name whose value decides it.

    It is None if there is none, or if it names a field that is not in ``fields``.
    """
    answers = BY_VALUE.get(name, {})
    answer = answers.get("true" if value is NOT_SHOWN else as_key(value), answers.get(ANY))
    if answer is None:
        return None
    if answer.startswith("leave it out"):
        return answer
    sections = {ours.partition(".")[0] for ours in SETTINGS} if "objective" in fields else set()
    if not set(re.findall(r"(\w+)=", answer)) <= {*fields, *sections}:
        return None
    if value is NOT_SHOWN:
        return "use " + answer.replace("=VALUE", "")
    return "use " + answer.replace("'VALUE'", "VALUE").replace("VALUE", repr(value))


def _renamed(name: str, value: Any, fields: Collection[str]) -> str | None:
    """Return the advice for a field that has another name here; None if it has none."""
    ours = OUR_NAMES.get(name) or (
        name if f"lora_{name}" not in fields and name.removeprefix("lora_") in fields else None
    )
    if ours is not None and ours not in fields:
        ours = ours.removeprefix("lora_")
    if ours is None or ours not in fields:
        return None
    remark = f"; {FURTHER_ADVICE[ours]}" if ours in FURTHER_ADVICE else ""
    if value is NOT_SHOWN:
        return f"use {ours}{remark}"
    beside: dict[str, Any] = {}
    if ours == "objective" and isinstance(value, str):
        value = OBJECTIVE_NAMES.get(value.lower(), value.lower())
        if value in ABSENT_OBJECTIVES:
            return f"{value!r} is not part of this version: {ABSENT_OBJECTIVES[value]}"
    elif ours in ("data", "validation_data"):
        value, beside = foreign_data.converted(value, SOURCE_FIELDS)
        if name == "pretraining_dataset":
            beside = {"objective": "pretraining", **beside}
    elif ours == "train_on_roles":
        value = foreign_data.roles(value)
    fields_to_set: dict[str, Any] = {str(ours): value, **beside}
    return "use " + " and ".join(f"{each}={one!r}" for each, one in fields_to_set.items()) + remark


def no_such_objective(name: str, known: Collection[str]) -> str:
    """Return the error text for an unknown objective."""
    called = OBJECTIVE_NAMES.get(name.lower(), name.lower())
    there = f"there are {', '.join(known)}"
    if called in ABSENT_OBJECTIVES:
        return f"objective={name!r}: not part of this version: {ABSENT_OBJECTIVES[called]}; {there}"
    near = [called] if called in known else difflib.get_close_matches(name, known, n=1)
    return f"objective={name!r}: no such objective; " + (
        f"did you mean {near[0]!r}?" if near else there
    )


def own_value(name: str, value: Any) -> str | None:
    """Return what to write instead of another trainer's value of a field that exists here."""
    answer = OWN_VALUES.get(name, {}).get(as_key(value))
    if answer is None or answer.startswith("leave it out"):
        return answer
    return f"use {answer}"


def _near(name: str, fields: Collection[str]) -> str | None:
    near = difflib.get_close_matches(
        name, fields, n=1, cutoff=0.6 if len(name) <= SHORT_NAME_LENGTH else 0.75
    )
    return f"did you mean {near[0]!r}?" if near else None


def setting_called(name: str, known: Collection[str]) -> str | None:
    """Return advice about an unknown setting of an objective; None if none is similar."""
    for ours in SETTINGS_BY_NAME.get(name, ()):
        if ours.partition(".")[2] in known:
            return f"use {ours.partition('.')[2]}"
    if name in INSTEAD or name in NOWHERE or name in OUR_NAMES:
        return suggestion(name, NOT_SHOWN, {OUR_NAMES[name]} if name in OUR_NAMES else ())
    return _near(name, known)


def no_such_field(
    name: str, value: Any, fields: Collection[str], given: Mapping[str, Any] | None = None
) -> str:
    """Return the error text for an unknown field; see ``suggestion``."""
    meant = suggestion(name, value, fields, given)
    return f"{name}: no such field" + (f"; {meant}" if meant else "")


def no_such_field_of_data(
    name: str, value: Any, fields: Collection[str], given: Mapping[str, Any] | None = None
) -> str:
    """Return the error text for an unknown field of an entry of data."""
    meant = foreign_data.advice_on_data_field(name, value) or _near(name, fields)
    return f"{name}: no such field of data" + (f"; {meant}" if meant else "")


_T = TypeVar("_T", bound=type)


def suggests_fields(cls: _T) -> _T:
    """Decorate a dataclass so that an unknown field raises an error with a suggestion.

    The error is a ConfigurationError that names the most similar field.
    """
    made = cls.__init__  # type: ignore[misc]
    fields = [field.name for field in dataclasses.fields(cls)]

    @functools.wraps(made)
    def __init__(self: Any, *values: Any, **given: Any) -> None:
        wrong = [
            no_such_field(name, value, fields)
            for name, value in given.items()
            if name not in fields
        ]
        if wrong:
            raise ConfigurationError("; ".join(wrong))
        made(self, *values, **given)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls
