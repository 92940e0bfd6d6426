"""Attach adapters to a model."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from chronicals.lora.config import LoRAConfig
from chronicals.lora.embeddings import (
    ends_in,
    modules_to_save,
    rows_in_files,
    with_score,
)
from chronicals.lora.layers import adapters
from chronicals.lora.loftq import check_quantised, start_from_quantisation
from chronicals.lora.model_methods import adapted_class
from chronicals.lora.parameter_layer import LoRAParameter, without_wraps
from chronicals.lora.starting_values import Start, check_base_weights, start_from_weights
from chronicals.lora.targets import (
    Target,
    ends,
    layer_number,
    matches,
    targeted_paths,
    targets_of,
)
from chronicals.lora.tokens import attach_tokens, plan_tokens
from chronicals.models import BASE_ROWS, score_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def apply_lora(
    model: PreTrainedModel, config: LoRAConfig, start: Mapping[str, Start] | None = None
) -> PreTrainedModel:
    """Attach an adapter to each targeted linear layer, embedding and parameter, in place.

    Everything else is frozen.

    Args:
        model: a Hugging Face model.
        config: shape and targets; see ``LoRAConfig``.
        start: starting values by path, used instead of those that an ``init`` computes from the
            weights. With ``loftq`` none are computed either: the caller fills the adapters.

    Returns:
        ``model``, with ``model.chronicals_lora`` set to ``config`` and two methods:
        ``save_pretrained`` (and so ``push_to_hub``) writes the adapter in PEFT's format,
        ``merge_and_unload`` returns the plain model.

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
            "those (leave use_lora out), or attach ours to what merge_and_unload() gives"
        )

    config = with_score(config, model)
    whole = modules_to_save(model, config.modules_to_save)
    targets = targets_of(model, config, whole)
    paths = [target.path for target in targets]

    if score_of(model) is not None:
        head = model.get_output_embeddings()
        for target in targets:
            if model.get_submodule(target.layer) is head:
                raise ValueError(
                    f"lora_target_modules: {target.path!r} predicts tokens, which a reward model "
                    "does not; leave it out"
                )

    tokens = plan_tokens(model, config.trainable_token_indices, {*paths, *whole})
    _check_targets(model, config, targets)
    if config.takes_from_weights:
        check_base_weights(model, paths, config)
    if config.init == "loftq" and start is None:
        check_quantised(model, paths, config)

    # Everything is checked: the model is changed from here on.
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

    if getattr(model, BASE_ROWS, None) is None and model.config._name_or_path:
        # when the adapter is saved, the base's files may be gone
        setattr(model, BASE_ROWS, rows_in_files(model, model.config._name_or_path))
    model.chronicals_lora = config
    plain_class: type = type(model)
    model.__class__ = adapted_class(plain_class)
    return model


def _check_targets(model: Any, config: LoRAConfig, targets: Sequence[Target]) -> None:
    """Refuse a pattern that matches no target, and warn if one end of a tied pair is adapted."""
    names = [target.named for target in targets]
    used = config.fitted(names)
    for field in ("rank_pattern", "alpha_pattern"):
        for key in getattr(config, field):
            if key not in getattr(used, field):
                raise ValueError(
                    f"lora_{field}: {key!r} matches no adapted layer; adapted are "
                    f"{', '.join(ends(names))}"
                )
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return
    layers = [model.get_submodule(target.layer) for target in targets]
    for end, name, other in ((head, "head", "embedding"), (embedding, "embedding", "head")):
        if any(layer is end for layer in layers):
            logger.warning(
                "lora_target_modules: the %s is adapted, and its weight is the %s's too, which "
                "has no adapter; PEFT's merge_and_unload would change both and give another model: "
                "merge with that of chronicals, or leave it out. chronicals export takes it as it "
                "is (--to adapter), and refuses to merge it (merged, gguf, fp8 …, chronicals "
                "merge): for those leave it out, or untie the two in the base first "
                "(tie_word_embeddings: false)",
                name,
                other,
            )


def adapts(
    model: nn.Module, wanted: list[str] | str | None, layers: Collection[int] | None = None
) -> bool:
    """Return whether the adapted layers are those that ``wanted`` and ``layers`` name.

    They are ``target_modules`` and ``layers`` of a LoRAConfig.
    """
    adapted = {
        without_wraps(path)
        for path, layer in adapters(model)
        if not isinstance(layer, LoRAParameter)
    }
    targeted = (
        targeted_paths(model, wanted)
        if wanted is None or wanted == "all-linear"
        else matches(model, wanted)
    )
    paths = [without_wraps(path) for path in targeted]
    return adapted == {path for path in paths if layers is None or layer_number(path) in layers}


def adapts_parameters(
    model: nn.Module, wanted: Collection[str] | None, layers: Collection[int] | None = None
) -> bool:
    """Return whether the adapted parameters are those that ``wanted`` and ``layers`` name.

    They are ``target_parameters`` and ``layers`` of a LoRAConfig.
    """
    adapted = {
        layer.named_at(path) for path, layer in adapters(model) if isinstance(layer, LoRAParameter)
    }
    keys = {without_wraps(key) for key, _ in model.named_parameters() if ".lora_" not in key}
    named = {key for key in keys if ends_in(key, *(wanted or ()))}
    return adapted == {key for key in named if layers is None or layer_number(key) in layers}
