"""Answers for fields of other trainers: by their value, or the reason to leave them out.

An answer by value is written as in Python, ``use_lora=True and quantization='nf4'``, with ``VALUE`` for the
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

ABSENT_OBJECTIVES: dict[str, str] = {
    **dict.fromkeys(
        (
            "ppo",
            "reinforce",
            "online_dpo",
            "xpo",
            "nash_md",
            "ebft",
            "gold",
            "prm",
            "process_reward_model",
            "bco",
            "exo",
            "nca",
            "sppo",
        ),
        "its loss is not written yet",
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

_BY_REASON: dict[str, str] = {
    "every step is a line of metrics.jsonl": (
        "logging_first_step logging_nan_inf_filter log_on_each_node "
        "include_num_input_tokens_seen include_tokens_per_second "
        "include_effective_tokens_per_second include_tkps"
    ),
    "what a run decides is logged; verbose logs more": ("log_level log_level_replica disable_tqdm"),
    "the report has a plot of the loss": ("plot_loss"),
    "evaluation takes batch_size packs at a time": (
        "per_device_eval_batch_size eval_batch_size per_gpu_eval_batch_size eval_accumulation_steps"
    ),
    "loss, perplexity and token accuracy are measured": (
        "eval_do_concat_batches eval_use_gather_object "
        "compute_accuracy do_causal_lm_eval eval_causal_lm_metrics do_bench_eval bench_dataset "
        "bench_split "
        "prediction_loss_only include_for_metrics batch_eval_metrics predict_with_generate "
        "eval_table_size "
        "eval_max_new_tokens eval_delay eval_on_start"
    ),
    "evaluate and generate are commands of their own": (
        "do_eval do_predict generate_samples num_generation_samples sample_backend"
    ),
    "merge and export are commands of their own": (
        "export_device export_legacy_format export_hf_on_finish export_quantization_bit "
        "export_quantization_dataset"
    ),
    "the best is that of the lowest held-out loss": ("metric_for_best_model greater_is_better"),
    "held-out rows are packed as the others": (
        "eval_sample_packing eval_packing eval_sequence_len"
    ),
    "the report shows what was held out": ("eval_on_each_dataset"),
    "batches are assembled ahead in a thread": (
        "dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order "
        "dataloader_multiprocessing_context dataloader_drop_last dataset_keep_in_memory "
        "dispatch_batches "
        "accelerator_config"
    ),
    "documents are packed, without padding": (
        "padding_free pad_to_sequence_len pad_to_multiple_of batch_flattening length_column_name "
        "sample_packing_group_size sample_packing_bin_size sample_packing_sequentially "
        "multipack_real_batches "
        "batching_strategy block_diag_attn curriculum_sampling train_sampling_strategy pad_token_id "
        "max_packed_sequence_len sample_packing_eff_est sample_packing_seq_len_multiplier "
        "total_num_tokens pretrain_multipack_attn use_packed_sequences"
    ),
    "data are read as they come and tokens are kept in files": (
        "streaming dataset_streaming buffer_size overwrite_cache preprocessing_batch_size "
        "tokenized_path "
        "skip_prepare_dataset is_preprocess preprocess_iterable dataset_kwargs "
        "data_shared_file_system "
        "dataset_shard_num dataset_shard_idx num_dataset_shards_to_save "
        "streaming_multipack_buffer_size "
        "pretrain_multipack_buffer_size"
    ),
    "the name of data is a path, a pattern or a hub name": (
        "dataset_dir media_dir push_dataset_to_hub hf_use_auth_token"
    ),
    "a weight of data says how much of it is used: path=0.5": (
        "max_samples mix_strategy interleave_probs dataset_mixture"
    ),
    "rows that stand twice are found by the checks on the data": ("dataset_exact_deduplication"),
    "packs are shuffled by the seed": (
        "shuffle_dataset shuffle_merged_datasets shuffle_before_merging_datasets disable_shuffling"
    ),
    "the token that ends a trained message is trained": (
        "train_on_eos train_on_eot eot_tokens eos_token"
    ),
    "the tokenizer has its tokens": (
        "special_tokens tokens added_tokens_overrides add_tokens add_special_tokens pad_token "
        "bos_token "
        "mean_resizing_embeddings shrink_embeddings new_special_tokens_config init_special_tokens "
        "fix_untrained_tokens split_special_tokens resize_token_embeddings_to_32x"
    ),
    "the class of model and tokenizer is read from their files": (
        "model_type tokenizer_type tokenizer_config base_model_config cls_model_config "
        "processor_type type_of_model "
        "is_llama_derived_model is_mistral_derived_model is_qwen_derived_model "
        "is_falcon_derived_model "
        "tokenizer_use_fast tokenizer_legacy use_fast_tokenizer use_fast "
        "tokenizer_use_mistral_common "
        "tokenizer_save_jinja_files trainer_cls model_class auto_mapping model_init_kwargs "
        "processor_kwargs"
    ),
    "a model is taken as its files have it": (
        "overrides_of_model_config overrides_of_model_kwargs model_config "
        "reinit_weights "
        "low_cpu_mem_usage device_map device max_memory gpu_memory_limit use_cache use_kv_cache "
        "shift_attn "
        "s2_attention experimental_skip_move_to_device offload_folder train_from_scratch "
        "base_model_ignore_patterns"
    ),
    "name a folder of another revision as model": (
        "model_revision revision revision_of_model hub_revision"
    ),
    "log in by huggingface-cli login": ("hub_token hf_hub_token token use_auth_token"),
    "quantization='nf4' decides it, with double quantization": (
        "bnb_4bit_quant_type bnb_4bit_use_double_quant bnb_4bit_compute_dtype "
        "bnb_4bit_quant_storage "
        "use_bnb_nested_quant double_quantization quantization_type quantization_method "
        "quantization_device_map "
        "bnb_config_kwargs qlora_sharded_model_loading gptq quantize_moe_experts quant_config"
    ),
    "kernels are chosen and proved for each model": (
        "liger_rms_norm liger_glu_activation liger_layer_norm liger_rope liger_kernel_config "
        "liger_fused_linear_cross_entropy liger_cross_entropy cut_cross_entropy "
        "chunked_cross_entropy lora_mlp_kernel "
        "lora_qkv_kernel lora_o_kernel lora_embedding_kernel use_kernels use_unsloth "
        "experts_implementation "
        "flash_attn_cross_entropy flash_attn_fuse_mlp flash_attn_rms_norm flash_optimum "
        "fused_attn_kernel "
        "use_scattermoe use_sonicmoe kernel_config use_v1_kernels dsv4_fp4_grouped_mode "
        "use_dsv4_kernels use_glm_dsa_kernels gptq_disable_exllama"
    ),
    "there are no plugins": ("plugins strict debug"),
    "compilation has no settings": (
        "torch_compile_backend torch_compile_mode torch_compile_options flex_attn_compile_kwargs"
    ),
    "recomputation has no settings": (
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs use_reentrant_gc"
    ),
    "memory is freed without being told": (
        "torch_empty_cache_steps gc_steps gc_collect_steps skip_memory_metrics"
    ),
    "a batch size that was not set is fitted to the data": ("auto_find_batch_size"),
    "norms and the loss are computed in fp32": (
        "upcast_layernorm upcast_lmhead_output fp32_norms embeddings_skip_upcast"
    ),
    "weights are in bf16; master_weights=False keeps no fp32 masters": (
        "pure_bf16 bf16_full_eval fp16_full_eval"
    ),
    "adapters are kept and saved as PEFT has them": (
        "peft_type lora_task_type inference_mode fan_in_fan_out lora_fan_in_fan_out "
        "create_new_adapter layers_pattern "
        "peft_layers_pattern pissa_convert lora_on_cpu peft_autocast_adapter_dtype "
        "ensure_weight_tying "
        "peft_ensure_weight_tying merge_lora autocast_adapter_dtype ephemeral_gpu_offload"
    ),
    "this kind of adapter is not part of this version": (
        "megatron_config megatron_core lora_ga_config velora_config alora_invocation_tokens "
        "qalora_group_size "
        "monteclora_config runtime_config kasa_config peft_version base_model_name_or_path "
        "exclude_modules layer_replication peft_layer_replication use_qalora use_bdlora lora_bias "
        "eva_config "
        "corda_config arrow_config relora use_llama_pro relora_prune_ratio relora_cpu_offload "
        "oft_rank oft_block_size oft_target "
        "module_dropout"
    ),
    "training some weights alone is not part of this version; lora_layers and "
    "lora_modules_to_save choose": (
        "unfrozen_parameters freeze_trainable_layers freeze_trainable_modules "
        "freeze_extra_modules lisa_n_layers "
        "use_badam badam_mode badam_switch_mode badam_switch_interval badam_verbose "
        "lisa_step_interval lisa_layers_attribute"
    ),
    "what reads no text is frozen": (
        "freeze_vision_tower freeze_multi_modal_projector freeze_language_model freeze_mm_modules "
        "image_max_pixels "
        "image_min_pixels video_max_pixels video_min_pixels video_fps video_maxlen image_size "
        "image_resize_algorithm"
    ),
    "the optimizer is AdamW, and its settings are adam_beta1, adam_beta2, adam_epsilon and "
    "weight_decay": (
        "optim_args optim_target_modules adam_beta3 adam_epsilon2 use_galore use_apollo "
        "use_adam_mini use_muon "
        "galore_rank galore_target apollo_rank embedding_lr embedding_lr_scale lr_groups "
        "lr_quadratic_warmup "
        "cosine_constant_lr_ratio lr_div_factor torchdistx_path galore_layerwise galore_scale "
        "apollo_layerwise apollo_target apollo_scale apollo_scale_type optim_config"
    ),
    "losses are divided by the trained tokens of all processes": (
        "average_tokens_across_devices num_items_in_batch"
    ),
    "label smoothing of the cross-entropy is not part of this version": ("label_smoothing_factor"),
    "a loss that is not finite changes no weight": (
        "loss_watchdog_threshold loss_watchdog_patience"
    ),
    "start with torchrun for several cards; sharding says what is divided": (
        "fsdp_version ddp ddp_backend ddp_timeout ddp_bucket_cap_mb ddp_broadcast_buffers "
        "ddp_static_graph local_rank "
        "world_size deepcompile fsdp_final_state_dict_type parallelism_config dp_shard_size "
        "dp_replicate_size "
        "tensor_parallel_size dist_config use_ray ray_num_workers sequence_parallel "
        "fsdp_transformer_layer_cls_to_wrap"
    ),
    "documents that one card cannot hold are split by context_parallel": (
        "ring_attn_func heads_k_stride"
    ),
    "a checkpoint has all that a run needs to go on": (
        "save_only_model save_on_each_node save_first_step save_safetensors ignore_data_skip "
        "restore_callback_states_from_checkpoint enable_jit_checkpoint export_dir export_size"
    ),
    "the trained model is in the folder of the run, for huggingface-cli to upload": (
        "hub_strategy hub_private_repo hub_always_push"
    ),
    "W&B itself is told: WANDB_ENTITY, WANDB_MODE, WANDB_WATCH": (
        "wandb_entity wandb_watch wandb_log_model wandb_run_id wandb_mode"
    ),
    "MLflow itself is told: MLFLOW_TRACKING_URI": ("mlflow_tracking_uri hf_mlflow_log_artifacts"),
    "trackers here are tensorboard, wandb and mlflow": (
        "trackio_bucket_id trackio_static_space_id "
        "use_comet use_swanlab use_trackio swanlab_project swanlab_run_name trackio_space_id "
        "trackio_project_name "
        "trackio_run_name comet_project_name swanlab_experiment_name swanlab_description "
        "swanlab_mode swanlab_log_completions swanlab_completion_log_interval "
        "swanlab_completion_max_buffer swanlab_workspace swanlab_log_model use_otel_metrics "
        "otel_metrics_host otel_metrics_port"
    ),
    "runs of one seed take the same data in the same order": ("full_determinism"),
    "the device is chosen": ("use_cpu no_cuda use_mps_device"),
    "columns that no row needs are not read": ("label_names"),
    "the reference is computed in the batches of the run": (
        "precompute_ref_batch_size ref_model_adapters ref_model_quantization_bit"
    ),
    "an entry of data has them: {path: owner/name, subset: main, split: train}": (
        "dataset_config dataset_train_split dataset_test_split"
    ),
    "FP8 has no settings: use_fp8": ("fp8_backend fp8_enable_fsdp_float8_all_gather"),
    "attention and experts are chosen and proved for each model": (
        "sage_attention gemma4_hybrid_attn_impl large_head_attention flash_attn_d512 sdpa_varlen "
        "llama4_linearized_experts "
        "model_quantization_config model_quantization_config_kwargs liger_rms_norm_gated"
    ),
    "start with torchrun for several cards": (
        "compute_environment distributed_type num_machines num_processes rdzv_backend "
        "same_network machine_rank "
        "main_training_function downcast_bf16 main_process_ip main_process_port "
        "expert_parallel_size "
        "tensor_model_parallel_size pipeline_model_parallel_size use_distributed_optimizer "
        "use_megatron_bridge use_mca expert_model_parallel_size "
        "overlap_param_gather overlap_grad_reduce bias_activation_fusion apply_rope_fusion moe_grouped_gemm "
        "moe_token_dispatcher_type recompute_granularity init_config cp_mode "
        "expert_parallel_num_nvl_bytes expert_parallel_token_capacity"
    ),
    "it is not part of this version": (
        "use_pose scaling_softmax use_onebitllms gptq_groupsize gptq_model_v1 dynamic_checkpoint "
        "selective_checkpointing "
        "use_eaft eval_num_beams infer_backend reward_model_type print_param_status "
        "dpo_generate_during_eval qgalore_rank "
        "f_divergence_type f_alpha_divergence_coef discopop_tau pref_bco_weight dpo_use_weighting "
        "dpo_loss_weights "
        "dpo_norm_loss num_labels process_reward_model qat quantization_config "
        "ppo_target vllm trl ebft "
        "use_dft_loss use_asft_loss "
        "use_eaft_loss "
        "mixture_of_depths use_kt diffusion asft_alpha eaft_alpha eaft_k kt_config "
        "kt_cpu_activation kt_weight_path kt_non_expert_weight_path nvfp4_merge_aware llmcompressor "
        "jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps min_sample_len "
        "reward_model_path missing_eos_penalty"
    ),
    "thinking is part of the answers, as rows and template have it": (
        "enable_thinking preserve_thinking tool_format default_system default_system_message "
        "chat_template_kwargs"
    ),
    "the router has its own section: router: {balance: 0.001}": (
        "router_aux_loss_coef moe_aux_loss_coef output_router_logits"
    ),
    "losses are of trained tokens alone": ("ignore_pad_token_for_loss ignore_bias_buffers"),
    "profile a run by chronicals benchmark --profile": ("profiler_steps enable_torch_profiler"),
}

UNNEEDED = {name: reason for reason, names in _BY_REASON.items() for name in names.split()}
"""Reason to leave a field out, by its name."""


def as_key(value: Any) -> str:
    """Return a value as a key of the tables: lower-case text.

    A list with one value stands for that value.
    """
    while isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    return str(value).lower()
