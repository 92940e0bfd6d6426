"""Tests that packed documents of a model class do not affect each other, on a small random twin.

A twin has the same class and configuration with smaller sizes, in fp32 on the CPU, with random
parameters. The hidden states of each packed document, and the gradient of its embeddings, must
equal those of the document in a row of its own, in any order of the documents. A model with
recurrence, convolutions or ALiBi fails this test. So does one whose attention does not get the
document bounds.

The same twin shows two more properties: ``read_head`` reads the head correctly, and answers attend
to a prompt that they share. The second fails for classes that make masks from positions.
Results are cached by class and configuration.

How long documents may be is found here, too. A table of learned positions ends; rotary embeddings
continue, beyond the length of training.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chronicals.batch import IGNORED, Batch, SharedKeys
from chronicals.models.linear import UnknownHead, read_head
from chronicals.models.one_by_one import own_choice
from chronicals.models.peft_kinds import within_adapters
from chronicals.models.presentation import PresentedModel
from chronicals.models.twin import FIRST_TOKEN, build_twin, plain_surroundings, twin_config

logger = logging.getLogger(__name__)

DOCUMENT_LENGTHS = (7, 1, 12, 5)
PROMPT = 3
ANSWERS = (0, 1)
"""Indices into ``DOCUMENT_LENGTHS``; prompt and answers together are no longer than the longest."""

POSITIONS = 16
"""Positions of the twin that shows whether its class has more."""

_TOLERANCE = 1e-4
"""Allowed error relative to the largest value; fp32 rounding gives 1e-6, a leak 1e-1."""


@dataclass(frozen=True)
class Packability:
    """The properties that a twin showed.

    Attributes:
        packed: packed documents do not affect each other.
        head_proved: ``read_head`` reproduces the model's own logits.
        reason: why ``packed`` is False, or empty.
        causal: no hidden state depends on later tokens.
        sees_prompts: packed answers attend to a prompt that they share.
        has_twin: a twin could be run; if not, nothing is known of the class.
        one_by_one: packed documents do not affect each other if attention runs on one after the
            other.
    """

    packed: bool
    head_proved: bool
    reason: str = ""
    causal: bool = True
    sees_prompts: bool = False
    has_twin: bool = True
    one_by_one: bool = False


_PROVED: dict[tuple[type, str], Packability] = {}


def prove_packability(model: Any) -> Packability:
    """Compare packed and single documents on the twin of ``model``; the result is cached.

    The tensors of ``model`` itself are not used.
    """
    try:
        config = twin_config(model.config)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        return Packability(
            False, False, f"its configuration cannot be made small ({error})", has_twin=False
        )
    key = (type(model), config.to_json_string(use_diff=False))
    if key not in _PROVED:
        with plain_surroundings():
            _PROVED[key] = _prove(type(model), config)
    return _PROVED[key]


def why_neighbours_matter(config: Any, width: int) -> str:
    """Explain how the longest document of a batch changes the others; empty if it does not.

    Some rotary embeddings change their frequencies for the whole batch if its longest document
    exceeds a limit. The documents of a twin are too short to show it.

    Args:
        config: the model's configuration.
        width: most tokens of a document.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    parts = [part for part in rope.values() if isinstance(part, dict)]
    for part in parts or [rope]:
        rope_type = part.get("rope_type")
        limit = None
        if rope_type == "longrope":
            limit = part.get("original_max_position_embeddings")
        elif rope_type == "dynamic":
            limit = text.max_position_embeddings
        if limit is not None and width > limit:
            return (
                f"rope_type {rope_type}: the class gives all documents of a batch other "
                f"frequencies where one is longer than {limit:,} tokens; with max_seq_length={limit} none is"
            )
    return ""


def check_positions(model: Any, longest: int) -> None:
    """Check that ``model`` has positions for a document of ``longest`` tokens.

    Logs a warning if the model has them but was not trained with so many.

    Raises:
        ValueError: it has fewer.
    """
    model = within_adapters(model)
    stated = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    last = last_position(model, longest)
    if last:
        found = _too_long(model, longest, last)
        raise ValueError(f"{found}: set max_seq_length to at most {last}")
    found = positions_missing(model, longest)
    if found:
        logger.warning(
            "%s: max_seq_length=%d keeps to them, or give its configuration a RoPE that reaches "
            "further",
            found,
            stated,
        )


def positions_missing(model: Any, longest: int) -> str:
    """Return in words that documents are longer than ``model`` was made for; empty if not."""
    stated = positions_below(model, longest)
    return "" if stated is None else _too_long(model, longest, stated)


def positions_below(model: Any, longest: int) -> int | None:
    """Return the positions that ``model`` was made for if they are fewer than ``longest``, else None.

    Configurations differ in whether ``max_position_embeddings`` includes the scaling of rotary
    positions; nothing is said of lengths that only one of the two readings covers. That of
    ``llama3`` always does: 131,072 of Llama 3.1, whose factor of 8 is one of 8,192 positions.
    """
    model = within_adapters(model)
    text = model.config.get_text_config()
    stated = getattr(text, "max_position_embeddings", None)
    if not isinstance(stated, int) or not 0 < stated < longest:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    parts = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    factors = [
        1.0 if part.get("rope_type") == "llama3" else float(part.get("factor") or 1.0)
        for part in parts
    ]
    return None if longest <= stated * max(factors) else stated


def _too_long(model: Any, longest: int, stated: int) -> str:
    model = within_adapters(model)
    return (
        f"{type(model).__name__} is made for {stated:,} positions (max_position_embeddings), "
        f"documents have up to {longest:,}"
    )


def last_position(model: Any, longest: int) -> int | None:
    """Return the number of positions of ``model`` if it is a limit below ``longest``, else None.

    It is a limit if a small random twin fails beyond its last position. It counts as none if no
    twin can be built.
    """
    model = within_adapters(model)
    stated = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(stated, int) or not 0 < stated < longest:
        return None
    try:
        config = twin_config(model.config)
        config.get_text_config().max_position_embeddings = POSITIONS
        with plain_surroundings():
            decoder = build_twin(type(model), config).get_decoder()
            decoder(input_ids=torch.full((1, POSITIONS), FIRST_TOKEN), use_cache=False)
    except Exception:  # a class may reject the small sizes with any error
        return None
    try:
        with plain_surroundings():
            decoder(input_ids=torch.full((1, 2 * POSITIONS), FIRST_TOKEN), use_cache=False)
    except (IndexError, RuntimeError, ValueError):
        return stated
    return None


def _prove(cls: Any, config: Any) -> Packability:
    try:
        twin = build_twin(cls, config)
        states = [
            twin.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            for ids in _documents(twin)
        ]
        gradient = _embedding_gradient(twin, torch.cat(states))
        alone = [state.detach() for state in states], [gradient]
    except Exception as error:  # a class may reject the small sizes with any error
        return Packability(
            False,
            False,
            f"a small twin could not be run ({type(error).__name__}: {error})",
            has_twin=False,
        )
    head_proved = _head_is_understood(twin)
    # The model is causal if another last token leaves all earlier hidden states unchanged.
    ids = _documents(twin)[2][None]
    other = ids.clone()
    other[0, -1] = FIRST_TOKEN + (ids[0, -1] == FIRST_TOKEN)
    with torch.no_grad():
        before, after = (
            twin.get_decoder()(input_ids=x, use_cache=False).last_hidden_state[0, :-1]
            for x in (ids, other)
        )
    if not _distance(before, after) <= _TOLERANCE:
        return Packability(
            False, head_proved, "its hidden states depend on later tokens", causal=False
        )
    try:
        leak = _leak(twin, alone)
        return Packability(
            not leak, head_proved, leak, sees_prompts=not leak and _answers_see_prompts(twin)
        )
    except Exception as error:  # a class without document bounds may raise any error
        why_not = f"({type(error).__name__}: {error})"
    choice = own_choice(twin)
    if not choice:
        return Packability(False, head_proved, f"it does not take document bounds {why_not}")
    reason = f"{choice} over a whole row and its mask, without document bounds"
    try:
        leak = _leak(twin, alone, one_by_one=True)
    except Exception as error:  # its attention may have another interface
        return Packability(
            False, head_proved, f"{reason} {why_not}, nor on one document after the other ({error})"
        )
    return Packability(not leak, head_proved, leak and f"{reason}; {leak}", one_by_one=not leak)


def _leak(twin: Any, alone: tuple[list[Tensor], list[Tensor]], one_by_one: bool = False) -> str:
    """Describe how packed documents change each other in two orders; empty if they do not."""
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        documents = [_documents(twin)[n] for n in order]
        ids = torch.cat(documents)
        lengths = [len(document) for document in documents]
        bounds = torch.tensor([0, *lengths, 0]).cumsum(0).to(torch.int32)
        positions = torch.cat([torch.arange(length) for length in lengths])
        batch = Batch(ids, torch.full_like(ids, IGNORED), positions, bounds, max(lengths))
        given = PresentedModel(twin, packed=True, head_is_read=False, one_by_one=one_by_one)
        with given.attending_documents() as presented:
            flat = presented.hidden_states(batch)
        pieces = dict(zip(order, flat.split(lengths)))
        states = [pieces[n] for n in range(len(order))]
        gradient = _embedding_gradient(twin, torch.cat(states))
        packed = [state.detach() for state in states], [gradient]
        for name, expected, got in zip(("hidden states", "gradients"), alone, packed):
            worst = max(_distance(a, b) for a, b in zip(expected, got))
            if not worst <= _TOLERANCE:
                return f"packed documents change each other's {name} ({worst:.1e})"
    return ""


def _answers_see_prompts(twin: Any) -> bool:
    """Return True if answers with one shared prompt match answers with a copy of it each.

    Their hidden states and the gradient of the embeddings are compared.
    """
    documents = _documents(twin)
    prompt = documents[PROMPT]
    answers = [documents[n] for n in ANSWERS]
    decoder = twin.get_decoder()
    whole = [
        decoder(input_ids=torch.cat([prompt, x])[None], use_cache=False).last_hidden_state[0]
        for x in answers
    ]
    alone = torch.cat([*(states[len(prompt) :] for states in whole), whole[0][: len(prompt)]])
    with PresentedModel(twin, packed=True, head_is_read=False).attending_documents() as presented:
        shared = presented.hidden_states(_sharing_batch(prompt, answers))
    gradients = [_embedding_gradient(twin, states) for states in (alone, shared)]
    return _distance(alone, shared) <= _TOLERANCE and _distance(*gradients) <= _TOLERANCE


def _sharing_batch(prompt: Tensor, answers: Sequence[Tensor]) -> Batch:
    """Return a Batch of answers, followed by the prompt that they share."""
    ids = torch.cat([*answers, prompt])
    lengths = [*map(len, answers), len(prompt)]
    *of_answers, of_prompt = torch.arange(len(ids)).split(lengths)
    # An answer sees the prompt and itself, the prompt itself alone.
    seen = [*(torch.cat([of_prompt, tokens]) for tokens in of_answers), of_prompt]
    bounds = torch.tensor([0, *map(len, seen)]).cumsum(0)
    places = torch.full((len(answers) + 1, len(ids)), -1)
    for number, tokens in enumerate(of_answers):
        places[number + 1, of_prompt] = bounds[number] + torch.arange(len(prompt))
        places[0, tokens] = bounds[number] + len(prompt) + torch.arange(len(tokens))
    places[0, of_prompt] = bounds[-2] + torch.arange(len(prompt))
    keys = SharedKeys(
        torch.cat(seen), bounds.to(torch.int32), places, max_seqlen=int(bounds.diff().max())
    )
    positions = torch.cat(
        [
            *(len(prompt) + torch.arange(len(answer)) for answer in answers),
            torch.arange(len(prompt)),
        ]
    )
    return Batch(
        ids,
        torch.full_like(ids, IGNORED),
        positions,
        torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        max(lengths),
        keys=keys,
    )


def _documents(twin: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    size = twin.get_input_embeddings().weight.shape[0]
    return [
        torch.randint(FIRST_TOKEN, size, (length,), generator=generator)
        for length in DOCUMENT_LENGTHS
    ]


def _embedding_gradient(twin: Any, states: Tensor) -> Tensor:
    upstream = torch.randn(states.shape, generator=torch.Generator().manual_seed(2))
    return torch.autograd.grad((states * upstream).sum(), twin.get_input_embeddings().weight)[0]


def _head_is_understood(twin: Any) -> bool:
    ids = _documents(twin)[2][None]
    try:
        head = read_head(twin)
        hidden = twin.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        return bool(
            _distance(twin(input_ids=ids, use_cache=False).logits, head.logits(hidden))
            <= _TOLERANCE
        )
    except (
        UnknownHead,
        AttributeError,
        TypeError,
        RuntimeError,
    ):  # a class may project hidden states before its head
        return False


def _distance(expected: Tensor, got: Tensor) -> float:
    expected = expected.detach()
    got = got.detach()
    return float((expected - got).abs().max() / expected.abs().max().clamp(min=1e-12))
