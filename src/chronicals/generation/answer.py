"""Asking a trained model exactly as it was taught: the same tokenisation, and the stop token that was trained."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from chronicals.data import Tokenizer, stop_token_ids
from chronicals.data.rows import CHATS
from chronicals.data.template import Message
from chronicals.lora import SavedModel
from chronicals.models import in_evaluation, input_device, last_position

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """A model that can be asked.

    Attributes:
        model, tokenizer: of transformers.
        kinds: the kinds of row it was trained on; empty for a model from elsewhere.
        taught: fields of the run's configuration that decide what of a row is trained; empty likewise.
    """

    model: Any
    tokenizer: Any
    kinds: tuple[str, ...] = ()
    taught: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chats(self) -> bool:
        """Whether to ask through the chat template: it was trained on chats, or has a template and another origin."""
        return any(kind in CHATS for kind in self.kinds) or (not self.kinds and self.tokenizer.chat_template is not None)

    @property
    def stops(self) -> list[int]:
        """Token ids that end an answer: those that were trained; of a model from elsewhere, those it names itself."""
        if self.kinds:
            return stop_token_ids(self.tokenizer, self.chats)
        named = self.model.generation_config.eos_token_id
        named = named if isinstance(named, list) else [named]
        return [stop for stop in dict.fromkeys([*named, self.tokenizer.eos_token_id]) if stop is not None]


def load_trained(folder: str | Path, base_model: str | None = None, trust_remote_code: bool = False) -> Trained:
    """Load a model, an adapter, a checkpoint, or the folder of a whole run; with an adapter's own tokenizer or its model's.

    Args:
        folder: any of them, or a hub name.
        base_model: the model of an adapter, where the adapter does not say.

    Raises:
        ValueError: it cannot be loaded, with what to do.
    """
    dtype = torch.bfloat16 if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else torch.float32
    saved = SavedModel.find(folder, base_model)
    model, tokenizer = saved.model(dtype, trust_remote_code), saved.tokenizer(trust_remote_code)
    model = model.to("cuda") if torch.cuda.is_available() else model
    return Trained(model, tokenizer, tuple(saved.about.get("kinds", ())), saved.about.get("taught", {}))


def answer(
    trained: Trained, question: str | list[Message], max_new_tokens: int = 256, temperature: float = 0.0, seed: int = 0
) -> str:
    """The model's answer, without its stop token.

    Args:
        question: a text, or the messages of a conversation so far.
        temperature: 0 always takes the likeliest token.
    """
    tokenizer = Tokenizer(trained.tokenizer)
    if trained.chats:
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
        ids = tokenizer.render(messages, generation=True)
    else:
        text = question if isinstance(question, str) else "\n".join(m["content"] for m in question)
        ids = tokenizer.prompt(text)
    produced = generate(trained, ids, max_new_tokens, temperature, seed)
    if produced and produced[-1] in trained.stops:  # which need not be a special token
        produced.pop()
    return trained.tokenizer.decode(produced, skip_special_tokens=True).strip()


@torch.no_grad()
def generate(trained: Trained, ids: list[int], max_new_tokens: int = 256, temperature: float = 0.0, seed: int = 0) -> list[int]:
    """Token ids that follow ``ids``, the stop token included where one was reached before the model's last position.

    Raises:
        ValueError: there is nothing to follow, no room for a token, a temperature below zero, or what the model predicts is
            not finite.
    """
    if not ids:
        raise ValueError("ids is empty: a model goes on from at least one token; ask something")
    if max_new_tokens < 1 or not 0 <= temperature < math.inf:
        raise ValueError(
            f"max_new_tokens={max_new_tokens}, temperature={temperature}: give a token at least, and a number from 0"
        )
    model, tokenizer, stops = trained.model, trained.tokenizer, trained.stops
    last = last_position(model, len(ids) + max_new_tokens)
    room = max_new_tokens if last is None else last - len(ids)
    if room < 1:
        raise ValueError(f"ids has {len(ids):,} tokens, {type(model).__name__} {last:,} positions: ask something shorter")
    inputs = torch.tensor([ids], device=input_device(model))
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    devices = [inputs.device] if inputs.device.type == "cuda" else []
    with in_evaluation(model), _settings(model, likeliest=temperature == 0), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        out = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=room,
            num_return_sequences=1,
            return_dict_in_generate=False,
            eos_token_id=stops or None,
            num_beams=1,
            logits_processor=[_refuse_what_is_not_finite],
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (stops or [0])[0],
            **sampling,
        )
    produced = out[0, len(ids) :].tolist()
    if len(produced) == room < max_new_tokens and produced[-1] not in stops:
        logger.warning("the answer ends where %s does, at position %d", type(model).__name__, last)
    return produced


def _refuse_what_is_not_finite(_: Tensor, scores: Tensor) -> Tensor:
    """One of the processors of transformers' ``generate``; others may have set tokens that are not wanted to minus infinity."""
    if not scores.amax().isfinite():
        raise ValueError(
            "the model's predictions are not finite; its weights are damaged or overflow: take an earlier checkpoint, or "
            "download it again"
        )
    return scores


@contextmanager
def _settings(model: Any, likeliest: bool) -> Iterator[None]:
    """Within, to take the likeliest token: without the beams and penalties that the model comes with."""
    own = model.generation_config
    if likeliest:
        model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
