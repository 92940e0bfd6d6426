"""Answers of a trained model, and conversations with it, in the prompt format of its training.

The tokenisation is the same, and an answer ends with the stop token that was trained.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from chronicals.data import Tokenizer, stop_token_ids
from chronicals.data.kinds.messages import Message
from chronicals.data.kinds.rows import CHAT_KINDS
from chronicals.generation.ending import Ending, Stream
from chronicals.generation.sampling import Sampling
from chronicals.models import in_evaluation, input_device, last_position
from chronicals.saving import SavedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """A model and the facts about its training that generation needs.

    Attributes:
        model, tokenizer: model and tokenizer of transformers.
        kinds: kinds of row that it was trained on; empty for a model that chronicals did not train.
        data_config: fields of the run's configuration that decide which tokens of a row are
            trained; empty for a model that chronicals did not train.
    """

    model: Any
    tokenizer: Any
    kinds: tuple[str, ...] = ()
    data_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chats(self) -> bool:
        """True if the chat template is used.

        The model was trained on chats, or it has a template and chronicals did not train it.
        """
        if not self.kinds:
            return self.tokenizer.chat_template is not None
        return any(kind in CHAT_KINDS for kind in self.kinds)

    @property
    def stops(self) -> list[int]:
        """Token ids that end an answer.

        They are those that were trained, or else the EOS tokens of the generation config and the
        tokenizer.
        """
        if self.kinds:
            return stop_token_ids(self.tokenizer, self.chats)
        configured = self.model.generation_config.eos_token_id
        ids = [*configured] if isinstance(configured, list) else [configured]
        ids.append(self.tokenizer.eos_token_id)
        return [stop for stop in dict.fromkeys(ids) if stop is not None]

    @property
    def ending(self) -> Ending:
        """Stop tokens and stop strings.

        A model that chronicals did not train has the stop strings of its generation config.
        """
        configured = None
        if not self.kinds:
            configured = getattr(self.model.generation_config, "stop_strings", None)
        strings = [configured] if isinstance(configured, str) else configured or []
        return Ending(self.tokenizer, self.stops, [string for string in strings if string])


def load_trained(
    folder: str | Path,
    base_model: str | None = None,
    trust_remote_code: bool = False,
    load: Callable[[SavedModel, torch.dtype, bool], Any] = SavedModel.model,
) -> Trained:
    """Load a model, an adapter, a checkpoint, or the folder of a whole run.

    The tokenizer is the adapter's own if it has one, else that of its base model.

    Args:
        folder: the folder, or a hub name.
        base_model: base model of an adapter that does not name it.
        trust_remote_code: whether to run the code of a model's repository.
        load: makes the model from the saved model, the dtype and ``trust_remote_code``.

    Raises:
        ValueError: it cannot be loaded; the message says what to do.
    """
    saved = SavedModel.find(folder, base_model)
    has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    dtype = computing_dtype(saved.about, has_bf16)
    model = load(saved, dtype, trust_remote_code)
    tokenizer = saved.tokenizer(trust_remote_code)
    model = model.to("cuda") if torch.cuda.is_available() else model
    data_config = saved.about.get("taught", {})  # name of the field in the file
    return Trained(model, tokenizer, tuple(saved.about.get("kinds", ())), data_config)


def computing_dtype(about: Mapping[str, Any], has_bf16: bool) -> torch.dtype:
    """Return the dtype in which a saved model computes.

    It is bf16, or fp32 if the model was trained in fp32 or no card has bf16.

    Args:
        about: fields of ``chronicals.json``; older runs, which do not name the dtype, were in 16
            bits.
        has_bf16: whether there is a card that computes in bf16.
    """
    return torch.bfloat16 if has_bf16 and about.get("mixed_precision") != "fp32" else torch.float32


def generate_answer(
    trained: Trained,
    question: str | list[Message],
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    say: Callable[[str], None] | None = None,
    **sampling: Any,
) -> str:
    """Return the model's answer, without the stop token or stop string that ended it.

    Args:
        trained: the model.
        question: a text, or the messages of a conversation so far.
        max_new_tokens: largest number of generated tokens.
        temperature: 0 always takes the likeliest token.
        seed: seed of the random numbers.
        say: called with each new part of the text; the parts, joined, are the answer.
        sampling: ``top_p``, ``top_k`` and ``repetition_penalty`` of ``Sampling``.
    """
    tokenizer = Tokenizer(trained.tokenizer)
    if trained.chats:
        is_text = isinstance(question, str)
        messages: Any = [{"role": "user", "content": question}] if is_text else question
        ids = tokenizer.render(messages, generation=True)
    else:
        text = question if isinstance(question, str) else "\n".join(m["content"] for m in question)
        ids = tokenizer.prompt(text)
    ending = trained.ending
    if say is None:
        return ending.text(generate(trained, ids, max_new_tokens, temperature, seed, **sampling))
    stream = Stream(say, ending.strings)
    produced = generate(
        trained,
        ids,
        max_new_tokens,
        temperature,
        seed,
        each=lambda so_far: stream(ending.text(so_far)),
        **sampling,
    )
    stream.end(ending.text(produced))
    return ending.text(produced)


@torch.no_grad()
def generate(
    trained: Trained,
    ids: list[int],
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    each: Callable[[list[int]], None] | None = None,
    seconds: float | None = None,
    **sampling: Any,
) -> list[int]:
    """Return the token ids that follow ``ids``, with the stop token if one was generated.

    Args:
        trained: the model.
        ids: token ids of the prompt.
        max_new_tokens: largest number of tokens. There are fewer if the model has no further
            positions, with a warning.
        temperature: 0 always takes the likeliest token.
        seed: seed of the random numbers.
        each: called with all new token ids after each token.
        seconds: time limit, after which no further token is begun; at least one is generated.
        sampling: ``top_p``, ``top_k`` and ``repetition_penalty`` of ``Sampling``.

    Raises:
        ValueError: ``ids`` is empty or as long as the model's positions, a setting is out of its
            range, or the logits are not finite.
    """
    choice = Sampling(temperature, seed, **sampling)
    if not ids:
        raise ValueError("ids is empty: a model goes on from at least one token; ask something")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: must be at least 1")
    model = trained.model
    ending = trained.ending
    stops = ending.tokens
    last = last_position(model, len(ids) + max_new_tokens)
    limit = max_new_tokens if last is None else last - len(ids)
    if limit < 1:
        raise ValueError(
            f"ids has {len(ids):,} tokens, {type(model).__name__} {last:,} positions: ask "
            "something shorter"
        )
    padding = trained.tokenizer.pad_token_id
    config = choice.config(
        model.generation_config,
        max_new_tokens=limit,
        eos_token_id=stops or None,
        pad_token_id=padding if padding is not None else (stops or [0])[0],
        max_time=seconds,
    )
    inputs = torch.tensor([ids], device=input_device(model))
    devices = [inputs.device] if inputs.device.type == "cuda" else []
    with (
        in_evaluation(model),
        _empty_generation_config(model),
        torch.random.fork_rng(devices=devices),
    ):
        torch.manual_seed(seed)
        out = model.generate(
            inputs,
            generation_config=config,
            attention_mask=torch.ones_like(inputs),
            logits_processor=[_refuse_non_finite],
            stopping_criteria=_after_each(ending, len(ids), each),
        )
    produced = out[0, len(ids) :].tolist()
    if len(produced) == limit < max_new_tokens and produced[-1] not in stops:
        logger.warning("the answer ends where %s does, at position %d", type(model).__name__, last)
    return produced


def _after_each(
    ending: Ending, begin: int, each: Callable[[list[int]], None] | None
) -> list[Callable[..., Tensor]]:
    """Return stopping criteria for transformers' ``generate``.

    They call ``each`` and stop after a complete stop string.

    Args:
        ending: stop strings of the answer.
        begin: number of tokens of the prompt.
        each: called with all new token ids; None for none.
    """

    def ends(ids: Tensor, _: Any, **kwargs: Any) -> Tensor:
        produced = ids[0, begin:].tolist()
        if each is not None:
            each(produced)
        return torch.tensor([ending.has_string(produced)], device=ids.device)

    return [ends] if ending.strings or each is not None else []


def _refuse_non_finite(_: Tensor, scores: Tensor) -> Tensor:
    """Raise ValueError if the logits are not finite, as a logits processor of transformers."""
    # other processors set single tokens to minus infinity, so only the largest logit is tested
    if not scores.amax().isfinite():
        raise ValueError(
            "the model's predictions are not finite; its weights are damaged or overflow: take an "
            "earlier checkpoint, or download it again"
        )
    return scores


@contextmanager
def _empty_generation_config(model: Any) -> Iterator[None]:
    """Context manager in which the model has an empty generation config.

    transformers' ``generate`` would fill unset settings from the model's own.
    """
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


class Chat:
    """A conversation.

    A model that was trained on plain text has no turns: it continues each question as a separate
    text.

    Args:
        trained: the model.
        system: system message before the first question; none by default.
        settings: keyword arguments of ``generate_answer``.

    Attributes:
        messages: the conversation so far.

    Raises:
        ValueError: there is a system message, but the model was not trained on chats.
    """

    def __init__(self, trained: Trained, system: str | None = None, **settings: Any):
        if system is not None and not trained.chats:
            raise ValueError(
                f"system={system!r}: this model continues plain text and has no system prompt; "
                "leave it out"
            )
        self.trained = trained
        self.settings = settings
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        """Delete all messages but the system message."""
        self.messages = [*self._opening]

    def ask(self, question: str, say: Callable[[str], None] | None = None) -> str:
        """Return the answer to the next question, and append both to the conversation.

        Args:
            question: the question.
            say: called with each new part of the answer.
        """
        asked = [*self.messages, {"role": "user", "content": question}]
        prompt = asked if self.trained.chats else question
        reply = generate_answer(self.trained, prompt, say=say, **self.settings)
        if self.trained.chats:
            self.messages = [*asked, {"role": "assistant", "content": reply}]
        return reply
