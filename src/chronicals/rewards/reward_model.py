"""A reward model as a reward: ours, or a sequence classifier of transformers with one label.

An answer is scored with all the tokens that training such a model sees: what the chat template gives
for prompt and answer, or their text and the stop token. The model runs in the trainer's process, on
its device; its weights are read when it is called first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from chronicals.data.tokens.template import Tokenizer
from chronicals.models import load_whole, score_of
from chronicals.models.loading import without_field
from chronicals.rewards.calling import Values
from chronicals.rewards.kinds import Reward
from chronicals.saving import SavedModel

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Type of the weights by ``mixed_precision``."""

TOKENS_AT_ONCE = 16384
"""Tokens in a forward pass, padding included: far more than the few hundred from which on products
are limited by arithmetic, and at 4,096 hidden values in 16 bits 128 MiB for each activation."""


class RewardModel(Reward):
    """A reward model, loaded when it is called first.

    Args:
        place: its folder or hub name; of a run of ours, or an adapter with its base.
        precision: of its weights, as ``mixed_precision``.

    Raises:
        ValueError: there is no such model, or it is no reward model; the message says why.
    """

    def __init__(self, place: str, precision: str):
        try:
            self._saved = SavedModel.find(place)
            if not self._saved.is_scored():
                raise ValueError(
                    "is no reward model, that is, no sequence classifier with one label; train one "
                    "by objective='reward'"
                )
            self._tokenizer = Tokenizer(self._saved.tokenizer(), train_on="all")
        except (OSError, ValueError) as error:
            raise ValueError(without_field(error)) from error
        self._dtype = DTYPES[precision]
        self._model: Any = None

    def __call__(self, rows: Mapping[str, Sequence[Any]]) -> Values:
        """Return the scores of rows; one that the template refuses, or that is too long, has none.

        Rows of similar length share a forward pass.
        """
        if self._model is None:
            self._model = self._loaded()
        longest = self._tokenizer.tokenizer.model_max_length
        faults = dict[int, str]()
        ids = dict[int, list[int]]()
        pairs = zip(rows["prompts"], rows["completions"])
        for row, (prompt, completion) in enumerate(pairs):
            try:
                ids[row] = self._ids(prompt, completion)
            except ValueError as error:
                faults[row] = str(error)
                continue
            if len(ids[row]) > longest:
                faults[row] = f"it has {len(ids.pop(row))} tokens, and the model reads {longest}"
        values: list[float | None] = [None] * len(rows["completions"])
        for together in _of_similar_length(ids):
            for row, score in zip(together, self._scores([ids[row] for row in together])):
                values[row] = score
        return Values(values, faults)

    def _loaded(self) -> Any:
        if self._saved.adapted:
            model = self._saved.scored_model(self._dtype)
        else:
            from transformers import AutoModelForSequenceClassification

            model = load_whole(
                AutoModelForSequenceClassification,
                self._saved.place,
                dtype=self._dtype,
                use_safetensors=True,
            )
        # transformers scores the last token of a row that is not this one.
        tokenizer = self._tokenizer.tokenizer
        padding = tokenizer.pad_token_id
        padding = tokenizer.eos_token_id if padding is None else padding
        model.config.get_text_config().pad_token_id = padding
        device = "cpu"
        if torch.cuda.is_available():
            device = f"cuda:{torch.cuda.current_device()}"
        return model.to(device).eval().requires_grad_(False)

    def _ids(self, prompt: Any, completion: Any) -> list[int]:
        if isinstance(prompt, str):
            record = {"prompt": prompt, "completion": completion}
        else:
            record = {"messages": [*prompt, *completion]}
        return list(self._tokenizer.encode(record, "it")[0])

    @torch.no_grad()
    def _scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the scores of rows of tokens, padded at their ends."""
        padding = self._model.config.get_text_config().pad_token_id
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), padding)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        device = self._model.device
        given = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        head = score_of(self._model)
        if head is None:
            return self._model(**given).logits[:, 0].double().tolist()
        states: Tensor = self._model.base_model(**given).last_hidden_state
        last = torch.tensor([len(tokens) - 1 for tokens in rows], device=device)
        return head.of(states[torch.arange(len(rows), device=device), last]).double().tolist()

    def close(self) -> None:
        """Give its memory back."""
        self._model = None


def _of_similar_length(ids: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """Return rows in groups of at most ``TOKENS_AT_ONCE`` padded tokens, from the longest on."""
    groups = list[list[int]]()
    for row in sorted(ids, key=lambda row: -len(ids[row])):
        if groups and (len(groups[-1]) + 1) * len(ids[groups[-1][0]]) <= TOKENS_AT_ONCE:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups
