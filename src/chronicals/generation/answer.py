"""Answers of a trained model, and conversations with it, in the prompt format of its training.

The tokenisation is the same, and an answer ends with the stop token that was trained.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from chronicals.data import Tokenizer, stop_token_ids
from chronicals.data.kinds.messages import Message
from chronicals.data.kinds.rows import CHAT_KINDS
from chronicals.generation.engine import Engine, answer_keys, why_not_served
from chronicals.generation.exact_operations import NotExact
from chronicals.generation.requests import Answer, Ending, Request, new_tokens_within
from chronicals.generation.sampling import Sampling
from chronicals.generation.schedule import EngineSettings
from chronicals.models import in_evaluation, input_device, last_position
from chronicals.saving import SavedModel

logger = logging.getLogger(__name__)

REPLACEMENT_CHARACTER = "\ufffd"
"""Output of a decoder for an incomplete character, whose last bytes are in the next token."""


class Stream:
    """Pass on the new part of a growing text at each call; the parts, joined, are the text.

    Args:
        say: called with each part.
        stop_strings: strings that end the text and are not part of it. An end of the text that may
            begin one is held back.
    """

    def __init__(self, say: Callable[[str], None], stop_strings: Sequence[str] = ()):
        self.say = say
        self.stop_strings = stop_strings
        self.said = 0

    def __call__(self, text: str) -> None:
        """Pass on the new part of ``text``, the text so far without white space at its ends."""
        held = 0  # characters at the end of the text that are the beginning of a stop string
        for stop in self.stop_strings:
            for length in range(held + 1, min(len(stop), len(text)) + 1):
                if text.endswith(stop[:length]):
                    held = length
        self.end(text[: len(text) - held].rstrip().rstrip(REPLACEMENT_CHARACTER).rstrip())

    def end(self, text: str) -> None:
        """Pass on all of ``text`` that was not passed on yet, if there is any."""
        if len(text) > self.said:
            self.say(text[self.said :])
            self.said = len(text)


@dataclass(frozen=True)
class Trained:
    """A model and the facts about its training that generation needs.

    Attributes:
        model, tokenizer: model and tokenizer of transformers.
        kinds: kinds of row that it was trained on; empty for a model that chronicals did not train.
        data_config: fields of the run's configuration that decide which tokens of a row are
            trained; empty for a model that chronicals did not train.
        engine_settings: sizes of the engine that generates.
    """

    model: Any
    tokenizer: Any
    kinds: tuple[str, ...] = ()
    data_config: Mapping[str, Any] = field(default_factory=dict)
    engine_settings: EngineSettings = field(default_factory=EngineSettings)

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

    @cached_property
    def engine(self) -> Engine:
        """The engine, whose pages of keys and values stay for the next answers."""
        return Engine(self.model, self.engine_settings)


def on_card(model: Any) -> Any:
    """Return the model on a card, if there is one."""
    return model.to("cuda") if torch.cuda.is_available() else model


def load_trained(
    folder: str | Path,
    base_model: str | None = None,
    trust_remote_code: bool = False,
    load: Callable[[SavedModel, torch.dtype, bool], Any] = SavedModel.model,
    place: Callable[[Any], Any] = on_card,
) -> Trained:
    """Load a model, an adapter, a checkpoint, or the folder of a whole run.

    The tokenizer is the adapter's own if it has one, else that of its base model.

    Args:
        folder: the folder, or a hub name.
        base_model: base model of an adapter that does not name it.
        trust_remote_code: whether to run the code of a model's repository.
        load: makes the model from the saved model, the dtype and ``trust_remote_code``.
        place: brings the model to where it runs; by default to a card, if there is one.

    Raises:
        ValueError: it cannot be loaded; the message says what to do.
    """
    saved = SavedModel.find(folder, base_model)
    has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    dtype = computing_dtype(saved.about, has_bf16)
    model = load(saved, dtype, trust_remote_code)
    tokenizer = saved.tokenizer(trust_remote_code)
    model = place(model)
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


def prompt_ids(trained: Trained, question: str | list[Message]) -> list[int]:
    """Return the token ids of a question as the model was trained to be asked.

    Args:
        trained: the model.
        question: a text, or the messages of a conversation so far.
    """
    tokenizer = Tokenizer(trained.tokenizer)
    if not trained.chats:
        is_text = isinstance(question, str)
        return tokenizer.prompt(question if is_text else "\n".join(m["content"] for m in question))  # type: ignore[arg-type, index]
    messages: Any = (
        [{"role": "user", "content": question}] if isinstance(question, str) else question
    )
    return tokenizer.render(messages, generation=True)


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
        sampling: ``top_p``, ``top_k``, ``min_p`` and ``repetition_penalty`` of ``Sampling``.
    """
    ids = prompt_ids(trained, question)
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
        sampling: ``top_p``, ``top_k``, ``min_p`` and ``repetition_penalty`` of ``Sampling``.

    Raises:
        ValueError: ``ids`` is empty or as long as the model's positions, a setting is out of its
            range, or the logits are not finite.
    """
    ((answer,),) = generate_many(
        trained,
        [ids],
        max_new_tokens,
        temperature,
        seed,
        each=None if each is None else lambda _request, _answer, tokens: each([*tokens]),
        seconds=seconds,
        **sampling,
    )
    return answer.tokens


@torch.no_grad()
def generate_many(
    trained: Trained,
    prompts: Sequence[list[int]],
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    answers: int = 1,
    each: Callable[[int, int, list[int]], None] | None = None,
    seconds: float | None = None,
    **sampling: Any,
) -> list[list[Answer]]:
    """Return the answers to several prompts, which are generated together.

    Args:
        trained: the model.
        prompts: token ids of each prompt; its number identifies its random numbers.
        max_new_tokens: largest number of tokens of an answer. There are fewer if the model has no
            further positions, with a warning.
        temperature: 0 always takes the likeliest token.
        seed: seed of the random numbers.
        answers: number of answers to each prompt.
        each: called with the number of a prompt, that of an answer, and its tokens so far.
        seconds: time limit, after which no further token is begun. Every answer gets one, unless
            the model generates by transformers, an answer at a time.
        sampling: ``top_p``, ``top_k``, ``min_p`` and ``repetition_penalty`` of ``Sampling``.

    Raises:
        ValueError: a prompt is empty or as long as the model's positions, a setting is out of its
            range, or the logits are not finite.
    """
    choice = Sampling(temperature, seed, **sampling)
    if not prompts:
        return []
    model = trained.model
    own = choice.with_own(model.generation_config)
    requests = [
        Request(ids, max_new_tokens, own, answers, number, trained.ending)
        for number, ids in enumerate(prompts)
    ]
    longest = max(map(len, prompts)) + max_new_tokens
    if served_by_engine(model, choice, longest):
        found = trained.engine.generate(requests, each, seconds)
    elif trained.engine_settings.generation_exact:
        raise NotExact(
            f"generation_exact=True: {type(model).__name__} generates by transformers; generate "
            "without it"
        )
    else:
        found = _one_at_a_time(trained, requests, choice, each, seconds)
    if any(answer.ended == "positions" for of_prompt in found for answer in of_prompt):
        last = last_position(model, longest)
        logger.warning("the answer ends where %s does, at position %d", type(model).__name__, last)
    return found


said = set[str]()
"""Classes and reasons for which it was said that transformers generates."""


def served_by_engine(model: Any, choice: Sampling, longest: int) -> bool:
    """Return whether the engine generates; if not, the reason is logged once a class.

    Args:
        model: a causal language model.
        choice: how tokens are chosen.
        longest: tokens of the longest sequence.
    """
    reason = choice.only_in_transformers(model.generation_config)
    reason = f"the engine does not know {reason}" if reason else why_not_served(model, longest)
    words = f"{type(model).__name__} generates by transformers, an answer at a time: {reason}"
    if reason and words not in said:
        said.add(words)
        logger.info("%s", words)
    return not reason


def _one_at_a_time(
    trained: Trained,
    requests: Sequence[Request],
    choice: Sampling,
    each: Callable[[int, int, list[int]], None] | None,
    seconds: float | None,
) -> list[list[Answer]]:
    """Return the answers by transformers' ``generate``, without log-probabilities and entropies.

    Answers that are left when the time is over have no token.
    """
    end = None if seconds is None else time.monotonic() + seconds
    left = sum(request.answers for request in requests)
    found = list[list[Answer]]()
    for number, request in enumerate(requests):
        limit = new_tokens_within(
            trained.model, len(request.prompt), request.max_new_tokens, str(request)
        )
        answers = list[Answer]()
        for place, seed in enumerate(answer_keys(request)):
            remaining = None if end is None else max(end - time.monotonic(), 0.0)
            if remaining == 0 and (found or answers):
                answers.append(Answer(ended="time"))
                continue
            share = None if remaining is None else remaining / left
            left -= 1
            on_tokens = None if each is None else partial(each, number, place)
            seeded = replace(choice, seed=seed % 2**63)
            ids = [*request.prompt]
            tokens = _by_transformers(trained, ids, limit, seeded, on_tokens, share)
            answers.append(Answer(tokens, ended=_ended(request, tokens, limit)))
        found.append(answers)
    return found


def _ended(request: Request, tokens: list[int], limit: int) -> Any:
    """Return why an answer of transformers ended."""
    if request.ending.is_reached(tokens):
        return "stop"
    if len(tokens) < limit:
        return "time"
    return "length" if limit == request.max_new_tokens else "positions"


def _by_transformers(
    trained: Trained,
    ids: list[int],
    limit: int,
    choice: Sampling,
    each: Callable[[list[int]], None] | None,
    seconds: float | None,
) -> list[int]:
    """Return the token ids that follow ``ids`` by transformers' ``generate``."""
    model = trained.model
    ending = trained.ending
    stops = ending.tokens
    padding = trained.tokenizer.pad_token_id
    config = choice.config(
        model.generation_config,
        max_new_tokens=limit,
        eos_token_id=stops or None,
        pad_token_id=padding if padding is not None else (stops or [0])[0],
        max_time=seconds,
    )

    def ends(ids_so_far: Tensor, _: Any, **kwargs: Any) -> Tensor:
        """Call ``each``, and stop after a complete stop string."""
        produced = ids_so_far[0, len(ids) :].tolist()
        if each is not None:
            each(produced)
        return torch.tensor([ending.has_string(produced)], device=ids_so_far.device)

    inputs = torch.tensor([ids], device=input_device(model))
    devices = [inputs.device] if inputs.device.type == "cuda" else []
    with (
        in_evaluation(model),
        _empty_generation_config(model),
        torch.random.fork_rng(devices=devices),
    ):
        torch.manual_seed(choice.seed)
        out = model.generate(
            inputs,
            generation_config=config,
            attention_mask=torch.ones_like(inputs),
            logits_processor=[_refuse_non_finite],
            stopping_criteria=[ends] if ending.strings or each is not None else [],
        )
    found: list[int] = out[0, len(ids) :].tolist()
    return found


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
