"""Does a model class respect documents that lie end to end? Proved on a small random twin, once per configuration.

A twin is a model of the same class and configuration but for its sizes, in fp32 on the CPU, all parameters random. Its
hidden states of each document packed among others must be what the document gives alone, and so must the gradient of
its embeddings; in another order of documents nothing may change. A model with recurrence, convolutions or ALiBi fails
this, and so does one whose attention never hears of the bounds. The same twin shows whether the head is understood.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chronicals.batch import IGNORED, Batch
from chronicals.models.head import UnknownHead, read_head
from chronicals.models.presentation import PresentedModel

logger = logging.getLogger(__name__)

DOCUMENT_LENGTHS = (7, 1, 12, 5)
TOLERANCE = 1e-4
"""Relative to the largest value; fp32 rounding gives 1e-6, a leak from a neighbour 1e-1."""

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "n_inner": 96,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_heads": 4,
    "head_dim": 16,
    "sliding_window": 5,
    "attention_chunk_size": 5,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 16,
    "max_position_embeddings": 128,
}
"""Sizes of the twin, for the fields that a configuration has."""

IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
MAX_LAYERS = 8
"""Enough for one period of the hybrids whose layer types follow from the layer's number."""


@dataclass(frozen=True)
class Packability:
    """What the twin showed; ``reason`` says why where ``packed`` is False."""

    packed: bool
    head_proved: bool
    reason: str = ""


_PROVED: dict[tuple[type, str], Packability] = {}


def prove_packability(model: Any) -> Packability:
    """Build the twin of ``model`` (whose own tensors are not touched) and compare; cached."""
    try:
        config = twin_config(model.config)
    except (AttributeError, TypeError, ValueError) as error:
        return Packability(False, False, f"its configuration cannot be made small ({error})")
    key = (type(model), config.to_json_string(use_diff=False))
    if key not in _PROVED:
        with _plain_surroundings():
            torch.manual_seed(0)
            _PROVED[key] = _prove(type(model), config)
    return _PROVED[key]


@contextmanager
def _plain_surroundings() -> Iterator[None]:
    """Whatever the caller is in (an evaluation without gradients, autocast, another default device or type)."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
        ):  # fmt: skip
            yield
    finally:
        torch.set_default_dtype(usual)


def twin_config(config: Any) -> Any:
    """The configuration with few layers (of every type it has) and small sizes."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    grouped = getattr(text, "num_key_value_heads", None) not in (None, getattr(text, "num_attention_heads", None))
    for name, value in SMALL.items():
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, value)
    if isinstance(getattr(text, "num_key_value_heads", None), int):
        text.num_key_value_heads = 2 if grouped else 4
    for name in IDS:
        setattr(text, name, None)
    _fewer_layers(text)
    for name in ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout", "dropout"):
        if isinstance(getattr(text, name, None), float):
            setattr(text, name, 0.0)
    return config


def _fewer_layers(text: Any) -> None:
    types = getattr(text, "layer_types", None)
    name = next((name for name in ("num_hidden_layers", "n_layer", "num_layers") if hasattr(text, name)), None)
    if name is None:
        return
    count = getattr(text, name)
    if types and isinstance(types, list) and not isinstance(getattr(type(text), "layer_types", None), property):
        kept = [next(i for i, t in enumerate(types) if t == kind) for kind in dict.fromkeys(types)]
        kept = sorted(kept + [i for i in range(len(types)) if i not in kept][: max(0, 2 - len(kept))])
        setattr(text, name, len(kept))
        text.layer_types = [types[i] for i in kept]
    else:
        setattr(text, name, min(count, MAX_LAYERS))


def _prove(cls: Any, config: Any) -> Packability:
    try:
        config._attn_implementation = "eager"  # the definition: SDPA may leave out what it cannot do
        twin = cls(config).float().eval()
        _randomise(twin)
        alone = _documents_alone(twin)
    except Exception as error:  # any class of transformers may object to its sizes in its own way
        return Packability(False, False, f"a small twin could not be run ({type(error).__name__}: {error})")
    head_proved = _head_is_understood(twin)
    try:
        for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
            for name, expected, got in zip(("hidden states", "gradients"), alone, _documents_packed(twin, order)):
                worst = max(_distance(a, b) for a, b in zip(expected, got))
                if not worst <= TOLERANCE:
                    return Packability(False, head_proved, f"packed documents change each other's {name} ({worst:.1e})")
    except Exception as error:  # likewise: a class that knows no bounds fails in its own way
        return Packability(False, head_proved, f"it does not take document bounds ({type(error).__name__}: {error})")
    return Packability(True, head_proved)


def _randomise(twin: torch.nn.Module) -> None:
    """No norm weight of one, no bias of zero: what is one or zero hides what is left out."""
    for parameter in twin.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)


def _documents(twin: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    size = twin.get_input_embeddings().weight.shape[0]
    return [torch.randint(0, size, (length,), generator=generator) for length in DOCUMENT_LENGTHS]


def _documents_alone(twin: Any) -> tuple[list[Tensor], list[Tensor]]:
    states = [twin.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0] for ids in _documents(twin)]
    return [state.detach() for state in states], [_embedding_gradient(twin, torch.cat(states))]


def _documents_packed(twin: Any, order: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    documents = [_documents(twin)[n] for n in order]
    ids = torch.cat(documents)
    lengths = [len(document) for document in documents]
    bounds = torch.tensor([0, *lengths, 0]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    batch = Batch(ids, torch.full_like(ids, IGNORED), positions, bounds, max(lengths))
    with PresentedModel(twin, packed=True, head=None).attending_documents() as presented:
        flat = presented.hidden_states(batch)
    pieces = dict(zip(order, flat.split(lengths)))
    states = [pieces[n] for n in range(len(order))]
    return [state.detach() for state in states], [_embedding_gradient(twin, torch.cat(states))]


def _embedding_gradient(twin: Any, states: Tensor) -> Tensor:
    upstream = torch.randn(states.shape, generator=torch.Generator().manual_seed(2))
    return torch.autograd.grad((states * upstream).sum(), twin.get_input_embeddings().weight)[0]


def _head_is_understood(twin: Any) -> bool:
    ids = _documents(twin)[2][None]
    try:
        head = read_head(twin)
        hidden = twin.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    except (UnknownHead, AttributeError, TypeError):
        return False
    logits = torch.nn.functional.linear(hidden, head.weight, head.bias) * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return bool(_distance(twin(input_ids=ids, use_cache=False).logits, logits) <= TOLERANCE)


def _distance(expected: Tensor, got: Tensor) -> float:
    expected, got = expected.detach(), got.detach()
    return float((expected - got).abs().max() / expected.abs().max().clamp(min=1e-12))
