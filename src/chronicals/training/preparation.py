"""From what the user brings to what the loop needs: the device, the data, the model, the optimizer."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.data import Source, TokenStore, open_held_out, open_store, stop_token_ids
from chronicals.distributed import Ranks, card_of
from chronicals.lora import LoRAConfig, adapters, adapts, apply_lora, report_frozen_experts
from chronicals.lora.peft_format import CHANGED
from chronicals.memory import (
    CHEAP,
    decoder_layers,
    disable_gradient_checkpointing,
    enable_gradient_checkpointing,
    recomputes,
)
from chronicals.models import (
    PresentedModel,
    beside_text,
    input_device,
    is_within,
    present,
    read_processors,
    why_neighbours_matter,
    within_lora,
)
from chronicals.optimizers import FusedAdamW, create_lora_plus_optimizer
from chronicals.patching import (
    forget_policies,
    lay_side_by_side,
    offload_frozen_weights,
    patch_parts,
    recompute_norms_and_units,
    run_in_fp8,
    tile_mlps,
)
from chronicals.patching.fp8_layers import LEAST
from chronicals.training.decisions import Decision, decide, summary, why_not_fused
from chronicals.training.precision import Precision

logger = logging.getLogger(__name__)

CHECKPOINTED = "_chronicals_checkpointed"
"""Attribute of a decoder whose layers an earlier run recomputed, which a later one may not need."""


def one_device(model: Any, ranks: Ranks) -> torch.device:
    """The single device of the model, which becomes the current one; a process of several moves it to its own card.

    Raises:
        ConfigurationError: the model is spread over devices.
    """
    if ranks.count > 1 and torch.cuda.is_available():
        model.to(f"cuda:{card_of(ranks.local_rank)}")
    elif torch.cuda.is_available() and getattr(model, "hf_device_map", None) is None:
        model.to("cuda")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or torch.device("meta") in devices:
        raise ConfigurationError(
            f"the model is spread over {', '.join(sorted(map(str, devices)))}; load it on one device, for example with "
            'device_map={"": 0}'
        )
    device = input_device(model)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # where kernels are launched
    return device


def check_class(model: Any) -> None:
    """Raises ValueError where the model is no causal language model."""
    name = type(model).__name__
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "torch.compile(model) is a shell around the model; give the model itself, which model.compile() compiles in place"
        )
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} has an encoder beside its decoder; only causal language models are trained here")
    if model.get_output_embeddings() is None:
        raise ValueError(f"{name} has no head that predicts tokens; load it with AutoModelForCausalLM")


def check_precision(config: ChronicalsConfig, device: torch.device) -> None:
    """Raises ConfigurationError where the card has no bf16."""
    on_card = device.type == "cuda"
    if config.mixed_precision == "bf16" and on_card and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigurationError("mixed_precision='bf16': this card has no bf16; use mixed_precision='fp16'")


def open_stores(
    train: Source,
    held_out: Source | None,
    embedding_rows: int,
    tokenizer: Any,
    config: ChronicalsConfig,
    ranks: Ranks,
    reports: Path | None = None,
) -> tuple[TokenStore, TokenStore | None]:
    """Tokenised data that has passed the gate.

    Args:
        embedding_rows: of the model.
        ranks: the first on each machine tokenises, while the others wait for its file.
        reports: folder for the gate's reports, ``train_dataset.json`` and ``eval_dataset.json``.

    Raises:
        ConfigurationError: there is held-out data, and a share to hold out as well.
        DataError: training on it would be wrong.
    """

    def report_of(name: str) -> Path | None:
        return reports / f"{name}.json" if reports and ranks.first else None

    def opened(name: str, source: Source, training: TokenStore | None = None) -> TokenStore:
        called = str(source) if isinstance(source, (str, Path)) else name
        return open_store(source, tokenizer, config, called, ranks.local_rank == 0, embedding_rows, training, report_of(name))

    if held_out is not None and config.validation_split:
        raise ConfigurationError(
            f"validation_split={config.validation_split}: eval_dataset is given too, and only one can say what is held out; "
            "give one of them"
        )
    store = opened("train_dataset", train)
    if held_out is not None:
        return store, opened("eval_dataset", held_out, training=store)
    if not config.validation_split:
        return store, None
    training, rest = store.split(config.validation_split, config.seed)
    return training, open_held_out(rest, config, report_of("eval_dataset"))


ADAPTERS = {
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "lora_target_modules": "target_modules",
    "use_rslora": "use_rslora",
}
"""Fields about adapters, and what each is called in a LoRAConfig."""

FEW = 4
"""Names of layers that an error tells."""


def _attach_adapters(model: Any, config: ChronicalsConfig) -> None:
    """Those that are asked for; where there are some already, they are trained.

    Raises:
        ConfigurationError: they have another shape than was asked for, or there are none and the weights cannot be trained.
    """
    usual = ChronicalsConfig()
    _check_that_pefts_learn(model)
    if hasattr(model, "chronicals_lora"):
        _keep_adapters(model, config)
    elif config.use_lora:
        apply_lora(model, LoRAConfig(**{own: getattr(config, name) for name, own in ADAPTERS.items()}))
    elif _is_quantised(model) and not any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise ConfigurationError("use_lora=False: the model's weights are quantised and cannot be trained; set use_lora=True")
    elif unused := [name for name in ADAPTERS if getattr(config, name) != getattr(usual, name)]:
        logger.warning("%s: set, but use_lora is off, so no adapters are attached; set use_lora", ", ".join(unused))


def _check_that_pefts_learn(model: Any) -> None:
    """Raises ConfigurationError where PEFT's adapters are frozen, merged, or could not be saved."""
    theirs = [module for module in model.modules() if type(module).__module__.startswith("peft.tuners.")]
    if not theirs:
        return
    if any(getattr(module, "merged", False) for module in theirs):
        raise ConfigurationError(
            "PEFT's adapters are merged into the weights and would not learn; call unmerge_adapter() or merge_and_unload()"
        )
    if not any(parameter.requires_grad for module in theirs for parameter in module.parameters()):
        raise ConfigurationError(
            "PEFT's adapters are frozen, as they are when loaded for inference; load them with "
            "PeftModel.from_pretrained(model, folder, is_trainable=True)"
        )
    if not hasattr(model, "get_base_model") and hasattr(model, "active_adapters"):
        try:
            model.active_adapters()  # which transformers asks for when it saves
        except (ValueError, ImportError) as error:
            raise ConfigurationError(f"PEFT's adapters could not be saved by {type(model).__name__}: {error}") from error


def _freeze_what_reads_no_text(model: Any) -> None:
    """Rows are text: a vision tower gets no gradient, only the decay of its weights."""
    text = within_lora(model)
    towers = beside_text(text) if hasattr(text, "get_decoder") else []
    if towers:
        read_processors(text)
    learning = [p for name, p in text.named_parameters() if p.requires_grad and is_within(name, towers)]
    for parameter in learning:
        parameter.requires_grad_(False)
    if learning:
        count = sum(parameter.numel() for parameter in learning)
        logger.warning("rows are text, so what reads none is frozen: %s parameters of %s", f"{count:,}", ", ".join(towers))


def _check_adapters(model: Any) -> None:
    """What adapters leave out is told, if it is most of the model.

    Raises:
        ConfigurationError: something is trained beside adapters, which alone are saved, or PEFT's are prompts.
    """
    if hasattr(model, "chronicals_lora"):
        saved = [matrix for _, layer in adapters(model) for matrix in (layer.lora_A, layer.lora_B)]
    elif theirs := getattr(model, "peft_config", None):
        from peft import get_peft_model_state_dict

        if prompts := [name for name, kind in theirs.items() if kind.is_prompt_learning]:
            raise ConfigurationError(
                f"PEFT's adapter {prompts[0]!r} learns a prompt, which stands before every document and fits no pack; take LoRA"
            )
        each = [get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False) for name in theirs]
        saved = [tensor for tensors in each for tensor in tensors.values()]
    else:
        setattr(model, CHANGED, True)  # what adapters are trained on later is not what the model was loaded from
        return
    places = {tensor.data_ptr() for tensor in saved}
    lost = [name for name, p in model.named_parameters() if p.requires_grad and p.data_ptr() not in places]
    if lost:
        others = f" and {len(lost) - FEW} others" if len(lost) > FEW else ""
        raise ConfigurationError(
            f"{', '.join(lost[:FEW])}{others}: would be trained beside adapters, which alone are saved; freeze them, or train "
            "without adapters"
        )
    report_frozen_experts(model)


def _is_quantised(model: Any) -> bool:
    """Whether transformers loaded it so, and not in a way that is made for training."""
    quantiser = getattr(model, "hf_quantizer", None)
    return bool(getattr(model, "is_quantized", False)) and not getattr(quantiser, "is_qat_trainable", False)


def _keep_adapters(model: Any, config: ChronicalsConfig) -> None:
    """Go on with what is attached, under the dropout that was asked for."""
    for name in sorted(config.explicit & ADAPTERS.keys() - {"lora_dropout"}):
        asked, found = getattr(config, name), getattr(model.chronicals_lora, ADAPTERS[name])
        as_asked = asked is None or adapts(model, asked) if name == "lora_target_modules" else asked == found
        if not as_asked:
            if isinstance(found, list) and len(found) > FEW:
                found = f"{', '.join(found[:FEW])} and {len(found) - FEW} others"
            raise ConfigurationError(
                f"{name}={asked!r}: the model has adapters already, with {found}; leave {name} out to train those, or begin "
                "with the model without them"
            )
    if "lora_dropout" in config.explicit:
        model.chronicals_lora = replace(model.chronicals_lora, dropout=config.lora_dropout)
        for _, layer in adapters(model):
            layer.dropout = config.lora_dropout


def prepare_model(model: Any, config: ChronicalsConfig, ranks: int = 1) -> tuple[PresentedModel, dict[str, Decision]]:
    """Adapters, the way in, what runs of what is permitted; logged with the reasons."""
    _attach_adapters(model, config)
    _freeze_what_reads_no_text(model)
    _check_adapters(model)
    presented = present(model, config.use_fused_kernels, config.use_flash_attention, pack_width=config.max_seq_length)
    model = presented.model
    if reason := why_neighbours_matter(model.config, config.max_seq_length):
        logger.warning("%s", reason)
    forget_policies(model)
    if vars(model.get_decoder()).pop(CHECKPOINTED, False):
        disable_gradient_checkpointing(model)
    decisions = decide(config, presented, ranks)
    whole_layers = why_not_fused(config, presented) is None
    for decision in decisions.values():
        logger.debug("%s", decision)
    for line in summary(decisions.values()):
        logger.info("%s", line)
    recomputed = decisions["use_gradient_checkpointing"]
    own = recomputed.runs and recomputed.layers == 0 and recomputed.how != CHEAP
    if recomputes(model) and not own:
        disable_gradient_checkpointing(model)
    if recomputed.layers != 0:
        enable_gradient_checkpointing(model, whole_layers, recomputed.layers)
        setattr(model.get_decoder(), CHECKPOINTED, True)
    if recomputed.how == CHEAP:
        recompute_norms_and_units(model)
    if config.use_fused_kernels and input_device(model).type == "cuda":
        patched = patch_parts(model, whole_layers).counts()
        logger.info("fused kernels: %s", ", ".join(f"{count} x {by}" for by, count in patched.items()) or "no module has one")
    if decisions["tiled_mlp"].runs:
        tile_mlps(model)
    if decisions["use_torch_compile"].runs:
        for layer in decoder_layers(model):
            layer.compile()  # the entries of the bounds become dynamic when they first change
    return presented, decisions


def teach_generation_to_stop(model: Any, tokenizer: Any, chats: bool) -> None:
    """The stop token that is trained is where generation ends, also for whoever loads the model. Where its settings contradict
    each other, that is settled now: transformers would refuse to save them when the run ends."""
    generation = model.generation_config = model.generation_config or GenerationConfig()
    _settle(generation)
    known = generation.eos_token_id
    known = [] if known is None else [known] if isinstance(known, int) else list(known)
    stops = known + [stop for stop in stop_token_ids(tokenizer, chats) if stop not in known]
    generation.eos_token_id = stops or None
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id < model.get_input_embeddings().weight.shape[0]:
        generation.pad_token_id = tokenizer.pad_token_id


def _settle(generation: Any) -> None:
    """Settings of sampling without ``do_sample``, as some models come with, mean that it samples.

    Raises:
        ConfigurationError: they contradict each other in something else.
    """
    try:
        generation.validate(strict=True)
    except ValueError:
        before, generation.do_sample = generation.do_sample, True
        try:
            generation.validate(strict=True)
        except ValueError as error:
            generation.do_sample = before
            raise ConfigurationError(f"the model's generation_config could not be saved: {error}; mend it first") from error
        logger.warning("generation_config: it has settings of sampling, so do_sample is set")


def build_optimizer(model: Any, config: ChronicalsConfig, precision: Precision, sums_gradients: bool) -> FusedAdamW:
    """AdamW over what is trained: LoRA+ groups or decay on matrices only, master weights, fp32 sums of gradients.

    Args:
        sums_gradients: whether several micro-batches, tiles or ranks meet in a gradient.

    Raises:
        ConfigurationError: nothing requires a gradient, no product is large enough for FP8, which was asked for, or none that
            is has a frozen weight, which was to wait in host memory.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        adapted = hasattr(model, "chronicals_lora")
        remedy = "unfreeze lora_A and lora_B of its adapters" if adapted else "unfreeze some or set use_lora=True"
        raise ConfigurationError(f"the model has no parameter that requires a gradient; {remedy}")
    options: dict[str, Any] = {
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
        "state_dtype": torch.bfloat16 if config.optimizer_state_dtype == "bf16" else torch.float32,
        "master": config.master_weights,
    }
    of_peft = bool(getattr(model, "peft_config", None)) and "use_lora_plus" in config.explicit
    if config.use_lora_plus and (hasattr(model, "chronicals_lora") or of_peft):
        optimizer = create_lora_plus_optimizer(
            model, config.learning_rate, config.lora_plus_ratio, config.weight_decay, **options
        )
    else:
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = FusedAdamW([g for g in groups if g["params"]], lr=config.learning_rate, **options)
    for group in optimizer.param_groups:
        group["peak"] = group["lr"]
    precision.prepare(model, optimizer)
    lay_side_by_side(model)
    if config.use_fp8:
        _run_in_fp8(model)
    if "offload_frozen_weights" in config.memory_policies:
        _offload_frozen_weights(model)
    optimizer.weights_moved()
    if sums_gradients:
        for parameter in trained:
            parameter.grad_dtype = torch.float32
    return optimizer


def _run_in_fp8(model: Any) -> None:
    found = run_in_fp8(model)
    if not found.chosen:
        small = f"no product of this model has inputs and outputs of a harmonic mean of {LEAST}, and FP8 does not pay for less"
        reason = f"its layers do not run fused: {', '.join(found.left)}" if found.left else small
        raise ConfigurationError(f"use_fp8=True cannot be honoured here: {reason}; leave it out")
    if found.left:
        logger.warning("use_fp8: some layers do not run fused and stay in 16 bit: %s", ", ".join(found.left))
    sizes = f"those whose inputs and outputs have a harmonic mean of at least {LEAST}"
    logger.info("use_fp8: %d of %d products of fused layers, %s", found.chosen, found.there, sizes)


def _offload_frozen_weights(model: Any) -> None:
    moved = offload_frozen_weights(model)
    if not moved:
        raise ConfigurationError("memory=['offload_frozen_weights']: every weight that runs in FP8 is trained; leave it out")
    logger.info("offload_frozen_weights: %.1f GiB wait in host memory", moved / 2**30)
