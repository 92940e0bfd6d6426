"""Attaching adapters to a model."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from chronicals.lora.config import LoRAConfig
from chronicals.lora.embeddings import modules_to_save, remember_base_rows, with_score
from chronicals.lora.layers import adapters
from chronicals.lora.loftq import check_quantised, start_from_quantisation
from chronicals.lora.model_methods import bind_methods
from chronicals.lora.parameter_layer import LoRAParameter, without_wraps
from chronicals.lora.starting_values import Start, check_weights, start_from_weights
from chronicals.lora.targets import (
    Target,
    ends,
    ends_in,
    layer_number,
    matches,
    targeted_paths,
    targets_of,
)
from chronicals.lora.tokens import attach_tokens, plan_tokens
from chronicals.models import score_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def apply_lora(
    model: PreTrainedModel, config: LoRAConfig, start: Mapping[str, Start] | None = None
) -> PreTrainedModel:
    """Attach an adapter to each targeted linear layer, embedding and parameter, in place;
    everything else is frozen.

    Args:
        model: a Hugging Face model.
        config: shape and targets; see ``LoRAConfig``.
        start: starting values by path, for an ``init`` that takes them from the weights; they are
            taken instead. For ``loftq`` none are taken then: the caller fills the adapters.

    Returns:
        ``model``, with ``model.chronicals_lora`` set to ``config`` and methods of its own:
        ``save_pretrained`` (and so ``push_to_hub``) writes the adapter in PEFT's format,
        ``merge_and_unload`` gives the plain model.

    Raises:
        ValueError: the model has adapters already, ours or PEFT's, a target matches nothing, or
            cannot be adapted.
    """
    if next(adapters(model), None) is not None:
        raise ValueError("the model has adapters already; load it anew to attach others")
    theirs = next(
        (type(m) for m in model.modules() if type(m).__module__.startswith("peft.")), None
    )
    if theirs is not None:
        kind = f"{theirs.__module__}.{theirs.__qualname__}"
        raise ValueError(
            f"the model has PEFT's adapters already ({kind}), into which ours would go; train "
            "those (leave use_lora out), or "
            "attach ours to what merge_and_unload() gives"
        )
    config = with_score(config, model)
    whole = modules_to_save(model, config.modules_to_save)
    targets = targets_of(model, config, whole)
    paths = [target.path for target in targets]
    _refuse_a_head_beside_a_score(model, targets)
    tokens = plan_tokens(model, config.trainable_token_indices, {*paths, *whole})
    _refuse_unused_patterns(config, targets)
    _warn_of_a_tied_head(model, targets)
    if config.takes_from_weights:
        check_weights(model, paths, config)
    if config.init == "loftq" and start is None:
        check_quantised(model, paths, config)
    model.requires_grad_(False)
    for target in targets:
        target.attach(model, config)
    if config.takes_from_weights:
        start_from_weights(model, config.init, start)
    if config.init == "loftq" and start is None:
        start_from_quantisation(model)
    for module in whole.values():
        module.requires_grad_(True)
    attach_tokens(model, tokens)
    remember_base_rows(model)
    model.chronicals_lora = config
    bind_methods(model)
    return model


def _refuse_a_head_beside_a_score(model: Any, targets: Sequence[Target]) -> None:
    head = model.get_output_embeddings()
    adapted = next(
        (target.path for target in targets if model.get_submodule(target.layer) is head), None
    )
    if adapted is not None and score_of(model) is not None:
        raise ValueError(
            f"lora_target_modules: {adapted!r} predicts tokens, which a reward model does not; "
            "leave it out"
        )


def _warn_of_a_tied_head(model: Any, targets: Sequence[Target]) -> None:
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return
    layers = [model.get_submodule(target.layer) for target in targets]
    for end, name, other in ((head, "head", "embedding"), (embedding, "embedding", "head")):
        if any(layer is end for layer in layers):
            logger.warning(
                "lora_target_modules: the %s is adapted, and its weight is the %s's too, which "
                "has no adapter; PEFT's "
                "merge_and_unload would change both and give another model: merge with that of "
                "chronicals, or leave it out. "
                "chronicals export takes it as it is (--to adapter), and refuses to merge it "
                "(merged, gguf, fp8 …, chronicals "
                "merge): for those leave it out, or untie the two in the base first "
                "(tie_word_embeddings: false)",
                name,
                other,
            )


def _refuse_unused_patterns(config: LoRAConfig, targets: Sequence[Target]) -> None:
    named = [target.named for target in targets]
    used = config.fitted(named)
    for name in ("rank_pattern", "alpha_pattern"):
        if unused := [key for key in getattr(config, name) if key not in getattr(used, name)]:
            raise ValueError(
                f"lora_{name}: {unused[0]!r} matches no adapted layer; adapted are "
                f"{', '.join(ends(named))}"
            )


def adapts(
    model: nn.Module, wanted: list[str] | str | None, layers: Collection[int] | None = None
) -> bool:
    """Whether the adapted layers are those that ``wanted`` and ``layers`` name, as in a
    LoRAConfig.
    """
    there = {
        without_wraps(path)
        for path, layer in adapters(model)
        if not isinstance(layer, LoRAParameter)
    }
    named = (
        targeted_paths(model, wanted) if wanted in (None, "all-linear") else matches(model, wanted)
    )
    named = [without_wraps(path) for path in named]
    return there == {path for path in named if layers is None or layer_number(path) in layers}


def adapts_parameters(
    model: nn.Module, wanted: Collection[str] | None, layers: Collection[int] | None = None
) -> bool:
    """Whether the parameters with adapters of their own are those that ``wanted`` and ``layers``
    name, as in a LoRAConfig.
    """
    there = {
        layer.named_at(path) for path, layer in adapters(model) if isinstance(layer, LoRAParameter)
    }
    keys = {without_wraps(key) for key, _ in model.named_parameters() if ".lora_" not in key}
    named = {key for key in keys if any(ends_in(key, name) for name in wanted or ())}
    return there == {key for key in named if layers is None or layer_number(key) in layers}
