"""Adapters of a run: attached if the configuration asks for them, checked if the model has some.

They are ours or PEFT's.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.lora import (
    LoRAConfig,
    adapters,
    adapts,
    adapts_parameters,
    apply_lora,
    report_frozen_experts,
)
from chronicals.lora.embeddings import modules_to_save, with_score
from chronicals.lora.loading import stored_start
from chronicals.lora.loftq import LoftQ
from chronicals.lora.peft_format import CHANGED, WEIGHTS_FILE
from chronicals.lora.targets import ends_in
from chronicals.lora.tokens import trained_tokens
from chronicals.models import (
    beside_text,
    has_4bit_experts,
    has_4bit_layers,
    has_packed_layers,
    is_within,
    quantise_layers,
    read_processors,
    unfused_kind,
    within_adapters,
)
from chronicals.models.gguf_loading import GGUF_FILE
from chronicals.models.peft_kinds import REFUSED, kinds
from chronicals.models.routed_experts import is_of_head, lookahead_heads

logger = logging.getLogger(__name__)

ADAPTERS = {
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "lora_target_modules": "target_modules",
    "use_rslora": "use_rslora",
    "lora_rank_pattern": "rank_pattern",
    "lora_alpha_pattern": "alpha_pattern",
    "lora_layers": "layers",
    "use_dora": "use_dora",
    "lora_init": "init",
    "lora_modules_to_save": "modules_to_save",
    "lora_trainable_tokens": "trainable_token_indices",
    "lora_target_parameters": "target_parameters",
}
"""Fields of the configuration about adapters, and their names in a LoRAConfig."""

_LISTED_LAYERS = 4
"""Names of layers that an error lists."""


def attach_adapters(
    model: Any, config: ChronicalsConfig, resumed: Path | None = None, heads: Collection[str] = ()
) -> None:
    """Attach the adapters that ``config`` asks for, or keep those that the model has.

    Towers that read no text are frozen, and experts that are not trained are logged.

    Args:
        model: the model, which is changed.
        config: configuration of the run.
        resumed: folder of the model in the checkpoint that the run resumes from; it holds the
            starting values that were computed from the base's weights.
        heads: names of the lookahead heads that have a loss: beside adapters they are trained whole
            and saved with them.

    Raises:
        ConfigurationError: the model's adapters have another shape than the configuration asks for;
            it has none and its weights cannot be trained; something is trained that would not be
            saved; or PEFT's adapters are prompts, frozen or merged.
    """
    quantise_as_asked(model, config)
    _check_that_pefts_learn(model)
    # Ours or transformers'; only some of transformers' kinds can be trained.
    quantiser = getattr(model, "hf_quantizer", None)
    theirs = bool(getattr(model, "is_quantized", False)) and not getattr(
        quantiser, "is_qat_trainable", False
    )
    is_quantised = theirs or has_packed_layers(model) or has_4bit_experts(model)
    if hasattr(model, "chronicals_lora"):
        _keep_adapters(model, config)
        model.chronicals_lora = _with_heads(model.chronicals_lora, heads)
    elif config.use_lora:
        asked = _with_heads(lora_config_of(config), heads)
        start = None
        if resumed is not None and (resumed / WEIGHTS_FILE).exists():
            start = stored_start(resumed) if asked.takes_from_weights else {}
        apply_lora(model, asked, start)
    elif is_quantised and not any(
        type(module).__module__.startswith("peft.") for module in model.modules()
    ):
        raise ConfigurationError(
            "use_lora=False: the model's weights are quantised and cannot be trained; set "
            "use_lora=True"
        )
    else:
        usual = ChronicalsConfig()
        unused = [name for name in ADAPTERS if getattr(config, name) != getattr(usual, name)]
        if unused:
            logger.warning(
                "%s: set, but use_lora is off, so no adapters are attached; set use_lora",
                ", ".join(unused),
            )
    if hasattr(model, "chronicals_lora"):
        for name, module in lookahead_heads(model).items():
            module.requires_grad_(name in heads)
    _freeze_what_reads_no_text(model)
    _check_what_is_trained(model)
    report_frozen_experts(model)


def lora_config_of(config: ChronicalsConfig) -> LoRAConfig:
    """Return the adapters that the configuration asks for."""
    fields = {own: getattr(config, name) for name, own in ADAPTERS.items()}
    return LoRAConfig(**fields)


def _with_heads(shape: LoRAConfig, heads: Collection[str]) -> LoRAConfig:
    """Return the adapters with the heads among the modules that are trained whole."""
    named = list(shape.modules_to_save or ())
    more = [head for head in heads if not any(ends_in(name, head) for name in named)]
    return replace(shape, modules_to_save=[*named, *more] or None)


def watcher(config: ChronicalsConfig) -> LoftQ | None:
    """Return the observer that ``lora_init`` needs while a base is quantised; None for none."""
    return (
        LoftQ(lora_config_of(config)) if config.use_lora and config.lora_init == "loftq" else None
    )


def quantise_as_asked(
    model: Any, config: ChronicalsConfig, device: torch.device | None = None
) -> None:
    """Quantise a model that was loaded in 16 or 32 bits, if ``config`` asks for 4 bits.

    Args:
        model: the model; its weights stay on their device.
        config: configuration of the run.
        device: where they are quantised; by default their own.

    Raises:
        ConfigurationError: it has nothing to quantise, or is in blocks of GGUF.
    """
    if config.quantization is None:
        return
    file = getattr(within_adapters(model), GGUF_FILE, None)
    if file is not None:
        raise ConfigurationError(
            f"quantization={config.quantization!r}: the weights of {file['file']} stay as they "
            "are in the file; leave it out"
        )
    if not has_4bit_layers(model):
        watch = None if hasattr(model, "chronicals_lora") else watcher(config)
        try:
            quantise_layers(within_adapters(model), watch, device=device)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error


def with_token_ids(config: ChronicalsConfig, tokenizer: Any) -> ChronicalsConfig:
    """Return the configuration with ids instead of texts in ``lora_trainable_tokens``.

    Raises:
        ConfigurationError: a text is not one token.
    """
    asked = config.lora_trainable_tokens
    if asked is None:
        return config
    vocabulary = tokenizer.get_vocab()

    def id_of(token: int | str) -> int:
        if isinstance(token, int):
            return token
        if token in vocabulary:
            return int(vocabulary[token])
        ids = tokenizer.encode(token, add_special_tokens=False)
        if len(ids) != 1:
            raise ConfigurationError(
                f"lora_trainable_tokens={token!r}: is {len(ids)} tokens; add it "
                f"(tokenizer.add_tokens([{token!r}])), and call "
                "model.resize_token_embeddings(len(tokenizer))"
            )
        return int(ids[0])

    if isinstance(asked, dict):
        by_module = {}
        for name, tokens in asked.items():
            by_module[name] = [id_of(token) for token in tokens]
        return config.fitted(lora_trainable_tokens=by_module)
    return config.fitted(lora_trainable_tokens=[id_of(token) for token in asked])


def _check_that_pefts_learn(model: Any) -> None:
    """Check that PEFT's adapters, if there are any, learn and can be saved.

    Raises:
        ConfigurationError: they are frozen or merged, or could not be saved.
    """
    theirs = [
        module for module in model.modules() if type(module).__module__.startswith("peft.tuners.")
    ]
    if not theirs:
        return
    if any(getattr(module, "merged", False) for module in theirs):
        raise ConfigurationError(
            "PEFT's adapters are merged into the weights and would not learn; call "
            "unmerge_adapter() or merge_and_unload()"
        )
    if not any(parameter.requires_grad for module in theirs for parameter in module.parameters()):
        raise ConfigurationError(
            "PEFT's adapters are frozen, as they are when loaded for inference; load them with "
            "PeftModel.from_pretrained(model, folder, is_trainable=True)"
        )
    if not hasattr(model, "get_base_model") and hasattr(model, "active_adapters"):
        try:
            model.active_adapters()  # transformers calls it to save the model
        except (ValueError, ImportError) as error:
            raise ConfigurationError(
                f"PEFT's adapters could not be saved by {type(model).__name__}: {error}"
            ) from error


def _freeze_what_reads_no_text(model: Any) -> None:
    """Freeze towers that read no text.

    Rows are text, so that they would get weight decay and no gradient.
    """
    text = within_adapters(model)
    towers = beside_text(text) if hasattr(text, "get_decoder") else []
    if towers:
        read_processors(text)
    learning = [
        p for name, p in text.named_parameters() if p.requires_grad and is_within(name, towers)
    ]
    for parameter in learning:
        parameter.requires_grad_(False)
    if learning:
        count = sum(parameter.numel() for parameter in learning)
        logger.warning(
            "rows are text, so what reads none is frozen: %s parameters of %s",
            f"{count:,}",
            ", ".join(towers),
        )


def _check_what_is_trained(model: Any) -> None:
    """Check that everything that is trained beside adapters is saved with them.

    Raises:
        ConfigurationError: something would be lost, or PEFT's adapters are prompts.
    """
    if hasattr(model, "chronicals_lora"):
        saved: list[Any] = []
        for _, layer in (*adapters(model), *trained_tokens(model)):
            saved += layer.parameters(recurse=False)
        for module in modules_to_save(model, model.chronicals_lora.modules_to_save).values():
            saved += module.parameters()
    elif theirs := getattr(model, "peft_config", None):
        from peft import get_peft_model_state_dict

        prompts = [name for name, kind in theirs.items() if kind.is_prompt_learning]
        if prompts:
            raise ConfigurationError(
                f"PEFT's adapter {prompts[0]!r} learns a prompt, which stands before every "
                "document and fits no pack; take LoRA"
            )
        refused = next((kind for kind in kinds(model) if kind in REFUSED), None)
        if refused:
            raise ConfigurationError(f"PEFT's {refused} {REFUSED[refused]}")
        kind = unfused_kind(model)
        if kind:
            logger.info(
                "PEFT's %s runs through PEFT's own modules: the layers that have it are not fused",
                kind,
            )
        saved = []
        for name in theirs:
            tensors = get_peft_model_state_dict(
                model, adapter_name=name, save_embedding_layers=False
            )
            saved += tensors.values()
    else:
        # Adapters of a later run go over other weights than those that the model was loaded from.
        setattr(model, CHANGED, True)
        return
    places = {tensor.data_ptr() for tensor in saved}
    lost = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and p.data_ptr() not in places
    ]
    if lost:
        more = len(lost) - _LISTED_LAYERS
        others = f" and {more} others" if more > 0 else ""
        raise ConfigurationError(
            f"{', '.join(lost[:_LISTED_LAYERS])}{others}: would be trained beside adapters, which alone are "
            "saved; freeze them, or train "
            "without adapters"
        )


def _keep_adapters(model: Any, config: ChronicalsConfig) -> None:
    """Keep the model's adapters, with the dropout of ``config`` if it is set.

    Raises:
        ConfigurationError: a field asks for other adapters.
    """
    unlimited = config.lora_target_modules is None and config.lora_layers is None
    for name in sorted(config.explicit & ADAPTERS.keys() - {"lora_dropout"}):
        asked = getattr(config, name)
        actual = getattr(model.chronicals_lora, ADAPTERS[name])
        if name == "lora_target_parameters":
            as_asked = adapts_parameters(model, asked, config.lora_layers)
        elif name == "lora_modules_to_save":
            kept = set(asked or ())
            # Heads that the run adds by itself are not compared.
            as_asked = kept == {
                module for module in actual or () if not is_of_head(module) or module in kept
            }
        elif name in ("lora_target_modules", "lora_layers"):
            # Layers are compared by their places in the model, not by their names.
            as_asked = unlimited or adapts(model, config.lora_target_modules, config.lora_layers)
        else:
            as_asked = asked == actual
        if not as_asked:
            if isinstance(actual, list) and len(actual) > _LISTED_LAYERS:
                more = len(actual) - _LISTED_LAYERS
                actual = f"{', '.join(actual[:_LISTED_LAYERS])} and {more} others"
            raise ConfigurationError(
                f"{name}={asked!r}: the model has adapters already, with {actual}; leave {name} "
                "out to train those, or begin "
                "with the model without them"
            )
    model.chronicals_lora = with_score(model.chronicals_lora, model)
    if "lora_dropout" in config.explicit:
        model.chronicals_lora = replace(model.chronicals_lora, dropout=config.lora_dropout)
        for _, layer in adapters(model):
            layer.dropout = config.lora_dropout
