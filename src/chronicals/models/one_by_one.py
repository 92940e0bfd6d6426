"""Runs attention on one document of a pack after the other.

It is for classes whose attention takes no document bounds; all other layers run on the whole pack.
Some classes choose the keys of a query over a whole row and its mask (DeepSeek V3.2's indexer), or
attend to keys made of several tokens (DeepSeek V4's compressors). Their attention modules get a
forward that splits its inputs into documents, makes a mask for each, and concatenates the outputs.
Nothing is computed for padding, and no mask is larger than a document. The bounds are Python
numbers on the host, so such a step cannot be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.models import attention_seam
from chronicals.models.attention_seam import Seam
from chronicals.models.rebinding import REPLACEMENT

DOCUMENTS = "documents_of_pack"
"""Argument that passes the (start, end) of each non-empty document to attention modules."""

BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "flash")
"""Arguments that describe a whole pack; attention on a single document does not get them."""

WITH_MASKS = ("eager", "sdpa")
"""Attention implementations of transformers that take an additive mask."""

CHOOSERS = {
    "indexer": "chooses the keys that a query attends to",
    "compressor": "attends to keys that it makes of several tokens",
}
"""Submodules of an attention that need a whole row of tokens and its mask, and their purpose."""


INSTALLED = "_chronicals_one_by_one"
"""Attribute of an attention module that runs on documents: its ``ReplacedForward`` record."""


@dataclass
class ReplacedForward:
    """The state of an attention module that runs on documents.

    Attributes:
        before: the forward that the instance had, or None if it used that of its class.
        times: number of ``attend_one_by_one`` calls that are not undone.
    """

    before: Any
    times: int = 1


class WithoutMasks(Seam):
    """A seam that keeps the class's own attention, while the model makes no mask for the pack."""

    def name(self, name: str) -> str:
        """Return a name by which transformers makes no mask."""
        return "none"


WITHOUT_MASKS = WithoutMasks("one_by_one")


@dataclass(frozen=True)
class PerDocument:
    """The additional outputs of a layer's attention for each document, for a later layer.

    Attributes:
        values: one a document, in their order.
    """

    values: tuple[Any, ...]


def own_choice(model: Any) -> str:
    """Describe an attention module that chooses or compresses its keys; empty if there is none."""
    for module in attention_modules(model):
        for name, does in CHOOSERS.items():
            part = getattr(module, name, None)
            if isinstance(part, nn.Module):
                return f"{type(module).__name__} {does} ({type(part).__name__})"
    return ""


def why_not_one_by_one(model: Any) -> str:
    """Explain why attention modules cannot get a mask for each document; empty if they can."""
    name = model.config.get_text_config()._attn_implementation
    if name in (None, *WITH_MASKS):
        return ""
    return (
        f"it attends by attn_implementation={name}; with eager or sdpa it takes packs, one "
        "document after the other"
    )


def attention_modules(model: Any) -> list[nn.Module]:
    """Return the attention modules that are direct children of decoder layers."""
    layers = getattr(model.get_decoder(), "layers", ())
    return [
        child
        for layer in layers
        for child in layer.children()
        if "Attention" in type(child).__name__
    ]


def attend_one_by_one(model: Any) -> None:
    """Run attention modules document by document when they get ``DOCUMENTS``; calls may be nested.

    Raises:
        RuntimeError: other code replaced the forward of an attention module.
    """
    modules = attention_modules(model)
    if any(INSTALLED in vars(module) for module in modules):
        for module in modules:
            vars(module)[INSTALLED].times += 1
        return
    for module in modules:
        own = vars(module).get("forward")
        if own is not None and not hasattr(getattr(own, "__func__", None), REPLACEMENT):
            name = type(module).__name__
            raise RuntimeError(
                f"the forward of {name} was replaced (hooks, offload), so documents would see "
                "each other"
            )
    attention_seam.install_seam(model, WITHOUT_MASKS)
    for module in modules:
        vars(module)[INSTALLED] = ReplacedForward(vars(module).get("forward"))
        by_documents = partial(_one_by_one, module.forward)
        module.forward = MethodType(by_documents, module)


def attend_whole(model: Any) -> None:
    """Undo one call of ``attend_one_by_one``."""
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
    attention_seam.remove_seam(model, WITHOUT_MASKS)


def _one_by_one(own: Callable[..., tuple], module: nn.Module, *args: Any, **options: Any) -> tuple:
    """Call ``own``, the forward of an attention module, for each document."""
    documents = options.pop(DOCUMENTS, None)
    if documents is None:
        return own(*args, **options)
    options = {name: value for name, value in options.items() if name not in BOUNDS}
    tokens = documents[-1][1]
    window = getattr(module, "sliding_window", None)
    found = []
    for number, (start, end) in enumerate(documents):
        given = [_of_document(value, number, start, end, tokens) for value in args]
        named = {
            name: _of_document(value, number, start, end, tokens) for name, value in options.items()
        }
        states = named["hidden_states"] if "hidden_states" in named else given[0]
        place = torch.arange(states.shape[1], device=states.device)
        distance = place[:, None] - place[None, :]
        # later than its query, or at least ``window`` tokens earlier
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        zeros = torch.zeros(hidden.shape, dtype=states.dtype, device=states.device)
        mask = zeros.masked_fill(hidden, torch.finfo(states.dtype).min)
        named["attention_mask"] = mask[None, None]
        found.append(own(*given, **named))
    output, *rest = zip(*found)
    return torch.cat(output, 1), *map(PerDocument, rest)


def _of_document(value: Any, number: int, start: int, end: int, tokens: int) -> Any:
    """Return a document's part of an argument: of a tensor ``[1, T, …]``, the document's tokens."""
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
