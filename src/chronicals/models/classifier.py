"""A scalar score of a whole document: a linear head on the hidden state of its last token.

The head is part of the causal language model, under the name that it has in transformers'
``XForSequenceClassification``. The model is saved as that class with one label, which has no head
that predicts tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.config.values import lasting
from chronicals.models.loading import (
    BASE_ROWS,
    embedding_table,
    input_device,
    is_packed,
    load_config,
    load_whole,
)

SCORE = "score"
"""Name of the head in the model."""


class Score(nn.Linear):
    """A linear head ``r = w · h`` with weight ``[1, D]`` and no bias.

    Attributes:
        pad_token_id: padding token of the saved classifier, which scores the last other token of a
            row.
    """

    def __init__(self, wide: int, pad_token_id: int):
        super().__init__(wide, 1, bias=False)
        self.pad_token_id = pad_token_id

    def of(self, states: Tensor) -> Tensor:
        """Return the scores ``[N]`` of hidden states ``[N, D]``, in at least fp32."""
        wide = torch.promote_types(states.dtype, torch.float32)
        return (states.to(wide) * self.weight[0].to(wide)).sum(-1)


def score_of(model: Any) -> Score | None:
    """Return the head that ``attach_score`` added, or None."""
    found = getattr(model, SCORE, None)
    return found if isinstance(found, Score) else None


def attach_score(model: Any, pad_token_id: int) -> Score:
    """Add a score head to a causal language model, or return the one that it has.

    A new head is drawn from torch's random numbers with transformers' standard deviation. The head
    that predicts tokens is not saved, so it is frozen unless it is tied to the embedding.

    Raises:
        ValueError: transformers has no class that holds the model and the head.
    """
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
    ours = {name for name in plain.state_dict() if not name.startswith(f"{head}.")}
    ours.add(f"{SCORE}.weight")
    theirs = _without_weights(kind, _configured(model, 0)).state_dict().keys()
    if ours != theirs:
        raise ValueError(
            f"{kind.__name__} is not {own.__name__} with a linear head '{SCORE}' in the place of "
            f"'{head}': "
            f"{min(ours ^ theirs)} is only in one of them"
        )
    score = score_of(model)
    if score is None:
        text = model.config.get_text_config()
        table = embedding_table(model)
        score = Score(text.hidden_size, pad_token_id)
        nn.init.normal_(score.weight, std=getattr(text, "initializer_range", 0.02))
        setattr(model, SCORE, score.to(input_device(model), table.dtype).train(model.training))
    score.pad_token_id = pad_token_id
    # The row of padding_idx gets no gradient, but answers may contain the token.
    model.get_input_embeddings().padding_idx = None
    embeddings = list(model.get_input_embeddings().parameters())
    for parameter in model.get_output_embeddings().parameters():
        if all(parameter is not other for other in embeddings):
            parameter.requires_grad_(False)
    return score


def classifier_class(model: Any) -> Any | None:
    """Return transformers' sequence classification class of this architecture, or None."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(model.config), None)


def saved_form(model: Any, weights: Mapping[str, Tensor] | None = None) -> Any:
    """Return the model to save: ``model``, or the classifier if it has a score head.

    The tensors of the classifier share the model's memory.

    Args:
        model: the trained model, with or without a score head.
        weights: tensors to use instead of the model's own, by the names of ``model.state_dict()``.
    """
    score = score_of(model)
    if score is None:
        return model
    form = _without_weights(*classifier_of(model))
    values = model.state_dict() if weights is None else weights
    form.load_state_dict({name: values[name].detach() for name in form.state_dict()}, assign=True)
    return form


def form_without_weights(model: Any) -> Any:
    """Return the model to save as ``saved_form`` does, but a classifier on the meta device."""
    return model if score_of(model) is None else _without_weights(*classifier_of(model))


def classifier_of(model: Any) -> tuple[Any, Any]:
    """Return the class and the configuration that a model with a score head is saved as."""
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
    """Load a language model with a score head from a saved classifier, in evaluation mode.

    It cannot predict tokens: no file holds that head, so it is zero unless it is tied to the
    embedding.

    Raises:
        ValueError: it cannot be loaded; the message says why.
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
    # The saved classifier has no weights for this head.
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
