"""Answers for fields of other trainers whose meaning here depends on their value.

An answer is written as in Python, ``use_lora=True and quantization='nf4'``, with ``VALUE`` for the
user's value. An answer that begins with ``leave it out`` says why nothing is needed.
"""

from __future__ import annotations

from typing import Any

ANY = "*"
"""Key for all values without an answer of their own."""

LINEAR = "leave it out: every linear layer but the head is adapted"
ADAMW = "leave it out: AdamW is the optimizer"
OTHER_OPTIMIZER = "leave it out: the optimizer is AdamW, and no other one is part of this version"
PAGED = "memory=['offload_optimizer_states']"
OFFLOADED = "memory=['recompute_layers', 'offload_activations']"
CHOSEN_ATTENTION = "leave it out: the attention that fits card and model is chosen"
OWN_TEMPLATE = "leave it out: the tokenizer's own chat template is used"
CONSTANT_RATE = "lr_scheduler='constant', which warms up, too"
EVALUATED_AT_END = (
    "leave it out: without eval_steps it is evaluated at the end, where something is held out"
)
OTHER_LOSS = (
    "leave it out: this loss is not part of this version; dpo has sigmoid, hinge, robust and "
    "sigmoid_norm, and ipo, simpo, "
    "cpo, orpo and kto are objectives"
)
INSTALLED_TRACKERS = (
    "leave it out: TensorBoard is used where it is installed; trackers names others"
)
OTHER_BITS = "quantization='nf4', which is 4 bits; others are not part of this version"

_OPTIMIZERS = {
    **dict.fromkeys(
        (
            "adamw",
            "adamw_torch",
            "adamw_torch_fused",
            "adamw_hf",
            "adamw_apex_fused",
            "adamw_torch_xla",
            "optimi_adamw",
            "flash_adamw",
            "adam",
            "flash_adam",
        ),
        ADAMW,
    ),
    **dict.fromkeys(
        (
            "adamw_8bit",
            "adamw_bnb_8bit",
            "adamw_torch_8bit",
            "ao_adamw_8bit",
            "adamw_torch_4bit",
            "ao_adamw_4bit",
            "ao_adamw_fp8",
        ),
        "use_8bit_optimizer=True",
    ),
    "paged_adamw_8bit": f"use_8bit_optimizer=True and {PAGED}",
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), PAGED),
    "adamw_anyprecision": "optimizer_state_dtype='bf16'",
    ANY: OTHER_OPTIMIZER,
}

_PAIR_LOSSES = {
    **{
        loss: f"dpo={{'loss': {loss!r}}}" for loss in ("sigmoid", "hinge", "robust", "sigmoid_norm")
    },
    **{loss: f"objective={loss!r}" for loss in ("ipo", "orpo", "simpo", "cpo", "kto")},
    "kto_pair": "objective='kto'",
    "nll": "leave it out: objective='sft' has this loss",
    ANY: OTHER_LOSS,
}

_PRECISIONS = {
    **dict.fromkeys(
        ("bf16", "bfloat16", "bf16_mixed", "bf16-mixed", "bf16-true", "torch.bfloat16"),
        "mixed_precision='bf16'",
    ),
    **dict.fromkeys(
        ("fp16", "float16", "half", "16", "16-mixed", "16-true", "torch.float16"),
        "mixed_precision='fp16'",
    ),
    **dict.fromkeys(
        ("fp32", "float32", "32", "32-true", "no", "torch.float32"), "mixed_precision='fp32'"
    ),
    "auto": "leave it out: products are in bf16 unless mixed_precision says otherwise",
}

_SCHEDULES = {
    "constant_with_warmup": CONSTANT_RATE,
    "warmup_stable_decay": "lr_scheduler='wsd'",
    "cosine_with_min_lr": "lr_scheduler='cosine', and min_lr_ratio for the least rate",
    ANY: "lr_scheduler='cosine', or linear, constant or wsd",
}

_INITS = {
    "true": "leave it out: adapters begin without an effect",
    "false": "leave it out: adapters begin without an effect",
    "lora": "leave it out: adapters begin without an effect",
    ANY: "lora_init='default', or gaussian, pissa, pissa_niter_N, olora or loftq",
}

_ATTENTION = {
    **dict.fromkeys(
        ("eager", "sdpa", "flex_attention", "xformers", "disabled"), "use_flash_attention=False"
    ),
    ANY: CHOSEN_ATTENTION,
}

_OTHER_ATTENTION = {"true": "use_flash_attention=False", "false": "leave it out"}

_EVALUATIONS = {
    "no": EVALUATED_AT_END,
    "false": EVALUATED_AT_END,
    "steps": "leave it out: eval_steps says how often",
    ANY: "eval_steps, a number of steps",
}

_RECOMPUTATION = dict.fromkeys(("offload", "offload_disk", "unsloth"), OFFLOADED)

BY_VALUE: dict[str, dict[str, str]] = {
    "adapter": {
        "lora": "use_lora=True",
        "qlora": "use_lora=True and quantization='nf4'",
        "dora": "use_lora=True and use_dora=True",
        ANY: "use_lora=True; adapters of other kinds are not part of this version",
    },
    "finetuning_type": {
        "lora": "use_lora=True",
        "full": "leave it out: all weights are trained",
        ANY: "use_lora=True; other ways to train a part are not part of this version",
    },
    "lora_target": {"all": LINEAR, "all-linear": LINEAR},
    "target_modules": {"all": LINEAR, "all-linear": LINEAR},
    "lora_target_linear": {"false": "leave it out"},
    "init_lora_weights": _INITS,
    "peft_init_lora_weights": _INITS,
    "pissa_init": {"true": "lora_init='pissa'"},
    "pissa_iter": {
        "-1": "lora_init='pissa'",
        "16": "lora_init='pissa_niter_16'",
        ANY: "lora_init='pissa_niter_16', or another number of iterations",
    },
    "quantization_bit": {"4": "quantization='nf4', which is 4 bits", ANY: OTHER_BITS},
    "load_in_8bit": {"true": OTHER_BITS, "false": "leave it out"},
    "use_qlora": {"true": "use_lora=True and quantization='nf4'"},
    "optim": _OPTIMIZERS,
    "optimizer": _OPTIMIZERS,
    "pref_loss": _PAIR_LOSSES,
    "loss_type": _PAIR_LOSSES,
    "dpo_loss_type": _PAIR_LOSSES,
    "lr_scheduler_type": _SCHEDULES,
    "dataset_text_field": {"text": "leave it out: text is read", ANY: "columns={'text': 'VALUE'}"},
    "disable_dropout": {"true": "lora_dropout=0.0", "false": "leave it out"},
    "template": {ANY: f"{OWN_TEMPLATE}; chat_template is for a tokenizer without one"},
    "chat_template_jinja": {ANY: f"{OWN_TEMPLATE}; chat_template takes a file with Jinja text"},
    "bf16": {"auto": "leave it out: products are in bf16"},
    "fp16": {"auto": "leave it out: products are in bf16"},
    **{
        name: _PRECISIONS
        for name in ("dtype", "torch_dtype", "precision", "compute_dtype", "infer_dtype")
    },
    "gradient_checkpointing": _RECOMPUTATION,
    "disable_gradient_checkpointing": {
        "true": "use_gradient_checkpointing=False",
        "false": "leave it out",
    },
    "use_unsloth_gc": {"true": OFFLOADED},
    "attn_implementation": _ATTENTION,
    **{
        name: _OTHER_ATTENTION
        for name in ("xformers_attention", "sdp_attention", "flex_attention", "eager_attention")
    },
    "flash_attn": {
        **_ATTENTION,
        "true": "use_flash_attention=True",
        "false": "use_flash_attention=False",
    },
    "truncation": {"true": "overlong='cut'"},
    "truncation_mode": {
        "keep_start": "overlong='cut'",
        ANY: "overlong='cut', which keeps the beginning; or 'split' or 'drop'",
    },
    "excess_length_strategy": {
        "drop": "overlong='drop'",
        ANY: "overlong='cut', or 'split' or 'drop'",
    },
    "train_on_inputs": {"true": "train_on='all'"},
    "train_on_prompt": {"true": "train_on='all'", "false": "leave it out"},
    "eval_strategy": _EVALUATIONS,
    "evaluation_strategy": _EVALUATIONS,
    "save_strategy": {
        "no": "save_steps=None",
        "false": "save_steps=None",
        "steps": "leave it out: save_steps says how often",
        "best": "keep='best'",
        ANY: "save_steps, a number of steps",
    },
    "evals_per_epoch": {"0": EVALUATED_AT_END},
    "saves_per_epoch": {"0": "save_steps=None"},
    "report_to": {"none": "trackers='none'", "all": INSTALLED_TRACKERS},
    "wandb_project": {ANY: "project=VALUE and trackers=['wandb']"},
    "wandb_name": {ANY: "run_name=VALUE and trackers=['wandb']"},
    "wandb_run_name": {ANY: "run_name=VALUE and trackers=['wandb']"},
    "mlflow_experiment_name": {ANY: "project=VALUE and trackers=['mlflow']"},
    "mlflow_run_name": {ANY: "run_name=VALUE and trackers=['mlflow']"},
    "use_mlflow": {"true": "trackers=['mlflow']", "false": "leave it out"},
    "use_tensorboard": {"true": "trackers=['tensorboard']", "false": "leave it out"},
    "reward_model": {
        "true": "objective='reward'",
        "false": "leave it out",
        ANY: "leave it out: no objective here uses one",
    },
    "do_train": {
        "true": "leave it out: train trains",
        "false": "leave it out: evaluate is a command of its own",
    },
    "adapter_name_or_path": {
        ANY: "model=VALUE, an adapter, which is trained on and names its own model"
    },
    "lora_model_dir": {ANY: "model=VALUE, an adapter, which is trained on and names its own model"},
}
"""Answers by the name of the field, then by its value as lower-case text."""

TEMPLATES = (
    "tokenizer_default llama3_2_vision phi_4 jamba jinja qwen3_5 metharme pixtral llava gemma4 "
    "command_a default qwen mistral "
    "unsloth"
)
"""Names of other trainers' chat templates, which do not exist here.

The template of the model's own tokenizer is used.
"""

OUR_TEMPLATES = "a name of docs/templates.md (chatml, llama3, ...), or a file with Jinja text"

OWN_VALUES: dict[str, dict[str, str]] = {
    "chat_template": {
        **dict.fromkeys(TEMPLATES.split(), f"{OWN_TEMPLATE}; for one without: {OUR_TEMPLATES}"),
        "tokenizer_default_fallback_chatml": "leave it out, or set chat_template='chatml' for a "
        "tokenizer without one",
    },
    "lora_target_modules": {"all": LINEAR},
    "lora_init": _INITS,
    "lr_scheduler": {name: answer for name, answer in _SCHEDULES.items() if name != ANY},
    "mixed_precision": {
        name: answer for name, answer in _PRECISIONS.items() if name not in ("bf16", "fp16", "fp32")
    },
    "use_gradient_checkpointing": _RECOMPUTATION,
    "packing_strategy": {
        "bfd": "packing_strategy='best-fit'",
        "bfd_split": "packing_strategy='best-fit' and overlong='split'",
        "wrapped": "packing_strategy='in-order' and overlong='split'",
    },
    "max_steps": {"-1": "leave it out", "0": "leave it out"},
    "max_grad_norm": {
        "0": "max_grad_norm=inf, which does not clip",
        "0.0": "max_grad_norm=inf, which does not clip",
    },
    "trackers": {"all": INSTALLED_TRACKERS},
}
"""Answers for other trainers' values of fields that have the same name here."""

NOT_GENERATED = "answers are not generated during training"
ABSENT_OBJECTIVES: dict[str, str] = {
    **dict.fromkeys(
        (
            "grpo",
            "gdpo",
            "gspo",
            "dapo",
            "dr_grpo",
            "ppo",
            "rloo",
            "reinforce",
            "online_dpo",
            "xpo",
            "nash_md",
            "ebft",
            "gold",
        ),
        NOT_GENERATED,
    ),
    **dict.fromkeys(
        ("prm", "process_reward_model", "bco", "exo", "nca", "sppo"), "its loss is not written yet"
    ),
}
"""Objectives of other trainers that do not exist here, and what they would need."""

ROLE_NAMES = {
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "human": "user",
}
"""Roles by their names in other data."""


def as_key(value: Any) -> str:
    """Return a value as a key of the tables: lower-case text.

    A list with one value stands for that value.
    """
    while isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    return str(value).lower()
