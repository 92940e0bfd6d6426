"""A score for a whole document: a linear head on the hidden state of its last token, and the class
it is saved as.

The head is a part of the causal language model, under the name that it has in transformers'
``XForSequenceClassification``; files hold a model of that class with one label, which has no head
that predicts tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.config.paths import lasting
from chronicals.models.loading import (
    BASE_ROWS,
    embedding_table,
    input_device,
    is_packed,
    load_config,
    load_whole,
)

SCORE = "score"
"""The head's name in the model."""


class Score(nn.Linear):
    """``r = w · h``, ``[1, D]`` without a bias.

    Attributes:
        pad_token_id: that rows of the saved classifier are padded with; its score is of the last
            token that is another.
    """

    def __init__(self, wide: int, pad_token_id: int):
        super().__init__(wide, 1, bias=False)
        self.pad_token_id = pad_token_id

    def of(self, states: Tensor) -> Tensor:
        """fp32 at least ``[N]``, of hidden states ``[N, D]``."""
        wide = torch.promote_types(states.dtype, torch.float32)
        return (states.to(wide) * self.weight[0].to(wide)).sum(-1)


def score_of(model: Any) -> Score | None:
    """The head of ``attach_score``, if the model has one."""
    found = getattr(model, SCORE, None)
    return found if isinstance(found, Score) else None


def attach_score(model: Any, pad_token_id: int) -> Score:
    """Give a causal language model a new head, drawn by torch's random numbers as transformers
    draws its own; the head that predicts tokens, which would not be saved, is frozen unless it is
    the embedding.

    Raises:
        ValueError: transformers has no class that holds the model and the head.
    """
    _check_class(model)
    if (score := score_of(model)) is None:
        text = model.config.get_text_config()
        table = embedding_table(model)
        score = Score(text.hidden_size, pad_token_id)
        nn.init.normal_(score.weight, std=getattr(text, "initializer_range", 0.02))
        setattr(model, SCORE, score.to(input_device(model), table.dtype).train(model.training))
    score.pad_token_id = pad_token_id
    model.get_input_embeddings().padding_idx = (
        None  # answers may hold the token, which would get no gradient
    )
    embeddings = list(model.get_input_embeddings().parameters())
    for parameter in model.get_output_embeddings().parameters():
        if all(parameter is not other for other in embeddings):
            parameter.requires_grad_(False)
    return score


def classifier_class(model: Any) -> Any | None:
    """transformers' class for a sequence of this architecture with a label, or None."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(model.config), None)


def _check_class(model: Any) -> None:
    own = getattr(type(model), "plain_class", type(model))
    kind = classifier_class(model)
    if kind is None:
        raise ValueError(
            f"transformers has no class for a score of {own.__name__}'s architecture "
            "(XForSequenceClassification)"
        )
    plain = _without_weights(own, model.config)
    head = next(
        path for path, module in plain.named_modules() if module is plain.get_output_embeddings()
    )
    ours = {name for name in plain.state_dict() if not name.startswith(f"{head}.")} | {
        f"{SCORE}.weight"
    }
    theirs = _without_weights(kind, _configured(model, 0)).state_dict().keys()
    if ours != theirs:
        raise ValueError(
            f"{kind.__name__} is not {own.__name__} with a linear head '{SCORE}' in the place of "
            f"'{head}': "
            f"{min(ours ^ theirs)} is only in one of them"
        )


def saved_form(model: Any, weights: Mapping[str, Tensor] | None = None) -> Any:
    """What a model is written as: itself, or with a score the classifier, whose tensors share the
    model's memory.

    Args:
        weights: tensors in the place of the model's own, by the names of ``model.state_dict()``.
    """
    score = score_of(model)
    if score is None:
        return model
    form = _without_weights(*classifier_of(model))
    values = model.state_dict() if weights is None else weights
    form.load_state_dict({name: values[name].detach() for name in form.state_dict()}, assign=True)
    return form


def form_without_weights(model: Any) -> Any:
    """What a model is written as: itself, or with a score the classifier, on the meta device."""
    return model if score_of(model) is None else _without_weights(*classifier_of(model))


def classifier_of(model: Any) -> tuple[Any, Any]:
    """Class and configuration that a model with a score is saved as."""
    score = score_of(model)
    assert score is not None
    return classifier_class(model), _configured(model, score.pad_token_id)


def _configured(model: Any, pad_token_id: int) -> Any:
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    config.get_text_config().pad_token_id = pad_token_id
    return config


def _without_weights(kind: Any, config: Any) -> Any:
    with torch.device("meta"):
        return kind(copy.deepcopy(config))


def load_scored(name: str | Path, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """The language model with a score that was saved as a classifier. It predicts nothing: a head
    that is not the embedding is zero, for no file holds it.

    Raises:
        ValueError: it cannot be loaded, with the reason.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if is_packed(load_config(name, trust_remote_code)):
        raise ValueError(
            f"model={str(name)!r}: is a reward model in 4 bits, which cannot be loaded here; take "
            "it in 16 bits"
        )
    options = {"dtype": dtype, "trust_remote_code": trust_remote_code, "use_safetensors": True}
    loaded = load_whole(transformers.AutoModelForSequenceClassification, name, **options)
    with torch.device("meta"):
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(loaded.config)](loaded.config)
    setattr(model, model.base_model_prefix, getattr(loaded, loaded.base_model_prefix))
    head = model.get_output_embeddings()
    table = embedding_table(model)
    for path, parameter in list(head.named_parameters()):
        setattr(head, path, nn.Parameter(torch.zeros(parameter.shape, dtype=dtype)))
    if model.config.get_text_config().tie_word_embeddings:
        head.weight = table
    attach_score(
        model, loaded.config.get_text_config().pad_token_id or 0
    ).weight = loaded.score.weight
    model.config._name_or_path = lasting(name)
    setattr(model, BASE_ROWS, len(table))
    return model.eval()
