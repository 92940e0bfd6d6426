"""Packed documents for attention that takes no bounds: it runs on one document after the other, all
else on the pack.

Some classes choose the keys of a query by a part of their own, over a whole row and its mask
(DeepSeek V3.2's indexer), or attend to keys that they make of several tokens (DeepSeek V4's
compressors). Their attention modules get a forward that cuts what they are given into documents,
makes each document's mask, and puts the outputs end to end. Nothing is computed for padding, and no
mask is larger than a document. The bounds are numbers on the host, so that steps are no CUDA
graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.models import attention_seam
from chronicals.models.attention_seam import Seam
from chronicals.models.rebinding import OURS

DOCUMENTS = "documents_of_pack"
"""Argument by which the bounds of documents reach attention modules: start and end of each that
has tokens.
"""

BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "flash")
"""Arguments with the bounds of a whole pack, which a document by itself has not."""

WITH_MASKS = ("eager", "sdpa")
"""Implementations of attention of transformers that take a mask with a value a key."""

CHOOSERS = {
    "indexer": "chooses the keys that a query attends to",
    "compressor": "attends to keys that it makes of several tokens",
}
"""Parts of an attention beside its projections, and what they do over a whole row of tokens and
its mask.
"""


INSTALLED = "_chronicals_one_by_one"


@dataclass
class Installed:
    """Of an attention module that runs on documents.

    Attributes:
        before: the forward that the instance had, or None where it had that of its class.
        times: how often it was asked for.
    """

    before: Any
    times: int = 1


class WithoutMasks(Seam):
    """The class's own attention; the model makes no mask for the whole pack."""

    def name(self, name: str) -> str:
        return "none"


SEAM = WithoutMasks("one_by_one")


@dataclass(frozen=True)
class PerDocument:
    """What a layer's attention returned for each document beside its output, as a later layer's
    takes it.

    Attributes:
        values: in the order of the documents.
    """

    values: tuple[Any, ...]


def own_choice(model: Any) -> str:
    """That and where attention has other keys than one a token; empty if there is none."""
    for module in attention_modules(model):
        for name, does in CHOOSERS.items():
            part = getattr(module, name, None)
            if isinstance(part, nn.Module):
                return f"{type(module).__name__} {does} ({type(part).__name__})"
    return ""


def why_not_one_by_one(model: Any) -> str:
    """Why attention modules cannot be given a mask for each document; empty if they can."""
    name = model.config.get_text_config()._attn_implementation
    if name in (None, *WITH_MASKS):
        return ""
    return (
        f"it attends by attn_implementation={name}; with eager or sdpa it takes packs, one "
        "document after the other"
    )


def attention_modules(model: Any) -> list[nn.Module]:
    layers = getattr(model.get_decoder(), "layers", ())
    return [
        child
        for layer in layers
        for child in layer.children()
        if "Attention" in type(child).__name__
    ]


def install(model: Any) -> None:
    """Let attention modules that are given ``DOCUMENTS`` run on one document after the other. May
    be called several times.

    Raises:
        RuntimeError: the forward of an attention module was replaced by something else.
    """
    modules = attention_modules(model)
    if any(INSTALLED in vars(module) for module in modules):
        for module in modules:
            vars(module)[INSTALLED].times += 1
        return
    for module in modules:
        own = vars(module).get("forward")
        if own is not None and not hasattr(getattr(own, "__func__", None), OURS):
            name = type(module).__name__
            raise RuntimeError(
                f"the forward of {name} was replaced (hooks, offload), so documents would see "
                "each other"
            )
    attention_seam.install(model, SEAM)
    for module in modules:
        vars(module)[INSTALLED] = Installed(vars(module).get("forward"))
        module.forward = MethodType(_one_by_one(module.forward), module)


def remove(model: Any) -> None:
    """Undo one call of ``install``."""
    modules = [module for module in attention_modules(model) if INSTALLED in vars(module)]
    for module in modules:
        vars(module)[INSTALLED].times -= 1
    if any(vars(module)[INSTALLED].times for module in modules):
        return
    for module in modules:
        before = vars(module).pop(INSTALLED).before
        del module.forward
        if before is not None:
            module.forward = before
    attention_seam.remove(model, SEAM)


def _one_by_one(own: Callable[..., tuple]) -> Callable[..., tuple]:
    """``own``, the forward of an attention module, called for each document."""

    def forward(self: nn.Module, *args: Any, **options: Any) -> tuple:
        documents = options.pop(DOCUMENTS, None)
        if documents is None:
            return own(*args, **options)
        options = {name: value for name, value in options.items() if name not in BOUNDS}
        tokens = documents[-1][1]
        window = getattr(self, "sliding_window", None)
        found = []
        for number, (start, end) in enumerate(documents):
            given = [_of_document(value, number, start, end, tokens) for value in args]
            named = {
                name: _of_document(value, number, start, end, tokens)
                for name, value in options.items()
            }
            states = named["hidden_states"] if "hidden_states" in named else given[0]
            named["attention_mask"] = causal_mask(states, window)
            found.append(own(*given, **named))
        output, *rest = zip(*found)
        return torch.cat(output, 1), *map(PerDocument, rest)

    return forward


def _of_document(value: Any, number: int, start: int, end: int, tokens: int) -> Any:
    """What of an argument belongs to a document: of tensors ``[1, T, …]`` its tokens."""
    if isinstance(value, PerDocument):
        return value.values[number]
    if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == tokens:
        return value[:, start:end]
    if isinstance(value, tuple):
        return tuple(_of_document(part, number, start, end, tokens) for part in value)
    if isinstance(value, dict):
        return {
            name: _of_document(part, number, start, end, tokens) for name, part in value.items()
        }
    return value


def causal_mask(states: Tensor, window: int | None) -> Tensor:
    """What is added to the scores of a document's states ``[1, L, D]``: ``[1, 1, L, L]``, the
    lowest number where a key is later than its query, or ``window`` tokens or more before it."""
    place = torch.arange(states.shape[1], device=states.device)
    distance = place[:, None] - place[None, :]
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    lowest = torch.finfo(states.dtype).min
    return torch.zeros(hidden.shape, dtype=states.dtype, device=states.device).masked_fill(
        hidden, lowest
    )[None, None]
