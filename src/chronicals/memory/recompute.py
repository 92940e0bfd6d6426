"""Recomputation of activations in the backward pass (Chen et al., 2016, section 4).

Decoder layers are recomputed whole. ``tiled`` computes a row-wise function in tiles, each of which
is recomputed: sequence tiling (Bekman et al., 2025). The inner activations of an MLP are several
times as wide as the model; with tiles they exist for one tile at a time.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


def enable_gradient_checkpointing(
    model: Any, whole_layers: bool = False, first: int | None = None
) -> None:
    """Recompute decoder layers of a Hugging Face model in the backward pass.

    Args:
        model: the model, with or without adapters.
        whole_layers: the layers run fused, and their recomputation skips what the backward pass
            does not read.
        first: number of first layers to recompute; all by default, or if the decoder has no list of
            layers.

    Raises:
        ValueError: the class does not support it.
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        field = "use_gradient_checkpointing=True, or memory=['recompute_layers']"
        name = type(model).__name__
        raise ValueError(f"{field}: {name} cannot recompute its layers; leave it out")
    # Reading the state of the random number generators takes time, so it is saved only if needed.
    options: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": draws_numbers(model),
    }
    if whole_layers:
        options["context_fn"] = first_and_again
    if hasattr(model, "activation_checkpointing_enable"):  # the name from transformers 5.24 on
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    if getattr(model, "_require_grads_hook", None) is not None:
        # Only re-entrant checkpointing needs a gradient for the output of a frozen embedding.
        model.disable_input_require_grads()
    for layer in decoder_layers(model)[first:] if first is not None else ():
        for module in layer.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = False  # type: ignore[assignment]


def disable_gradient_checkpointing(model: Any) -> None:
    """Keep the activations of all layers again."""
    getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """Return the decoder layers that can be recomputed one by one.

    Empty if the decoder has no list of such layers, or several.
    """
    lists = [
        child
        for child in model.get_decoder().children()
        if isinstance(child, torch.nn.ModuleList) and len(child)
    ]
    found = [
        list(layers)
        for layers in lists
        if all(isinstance(layer, GradientCheckpointingLayer) for layer in layers)
    ]
    return found[0] if len(found) == 1 else []


def recomputes(model: Any) -> bool:
    """Return True if some of the model's layers are already recomputed."""
    return any(
        getattr(module, "gradient_checkpointing", False) is True for module in model.modules()
    )


def enters_again(model: Any) -> bool:
    """Return True if layers are recomputed by re-entrant checkpointing.

    Tensors captured inside such a layer get no gradient.
    """
    settings = [
        getattr(getattr(m, "_gradient_checkpointing_func", None), "keywords", {})
        for m in model.modules()
    ]
    return recomputes(model) and any(given.get("use_reentrant") for given in settings)


_now = threading.local()


def runs_again() -> bool:
    """Return True while a recomputation in the backward pass runs.

    It must save tensors for backward, but its final result is not used.
    """
    return getattr(_now, "again", False)


def first_and_again() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the contexts of forward pass and recomputation, a ``context_fn`` for ``checkpoint``.

    They make ``runs_again`` True in the recomputation.
    """
    return _Running(False), _Running(True)


def recomputation() -> AbstractContextManager:
    """Return the context of a recomputation, in which ``runs_again`` is True."""
    return _Running(True)


@dataclass
class _Running:
    """A context that sets ``runs_again``.

    torch enters the one for the recomputation again in every backward pass.
    """

    again: bool
    before: list[bool] = field(default_factory=list)

    def __enter__(self) -> None:
        self.before.append(runs_again())
        _now.again = self.again

    def __exit__(self, *_: object) -> None:
        _now.again = self.before.pop()


_CHANCE = re.compile(r"drop|jitter|noise|^p$")
"""Names of attributes with the probability or scale of something random."""

DRAWS = re.compile(
    r"torch\.(rand|randn|bernoulli|multinomial)(_like)?\(|\.(exponential_|bernoulli_)\(|gumbel"
)
"""Source text that draws random numbers whatever the attributes are.

Uniform noise has an attribute that ``_CHANCE`` finds.
"""


def draws_numbers(module: torch.nn.Module) -> bool:
    """Return True if a forward pass in training may draw random numbers.

    An attribute or the source code of a submodule shows it.
    """
    for part in module.modules():
        settings = [
            *vars(part).items(),
            *getattr(getattr(part, "config", None), "__dict__", {}).items(),
        ]
        if any(
            isinstance(value, float) and value > 0 and _CHANCE.search(name)
            for name, value in settings
        ):
            return True
    sources = {type(part).__module__ for part in module.modules()}
    return any(
        _source_draws(name) for name in sources if not name.startswith(("torch.", "chronicals."))
    )


@functools.cache
def _source_draws(name: str) -> bool:
    """Return True if a Python module's source draws random numbers, or cannot be read."""
    try:
        return bool(DRAWS.search(inspect.getsource(sys.modules[name])))
    except (OSError, TypeError):
        return True


@contextmanager
def checkpoints_end_with_errors() -> Iterator[None]:
    """Context manager under which a failed forward leaves nothing of torch's checkpoints behind.

    torch 2.11 takes back the hooks of a checkpoint on saved tensors only when its frame is
    collected. Whoever keeps the error, as a notebook does, keeps the frame, and every graph that is
    made afterwards would save its tensors through the failed layer.
    """
    try:
        yield
    except BaseException as error:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
                frame.clear()
        raise


TILE = 4096
"""Rows of a tile: enough for matrix products to run at full speed."""


TILE_WIDTH = 20480
"""Widest gated unit of which a tile has ``TILE`` rows."""

LEAST_TILE = 1024
"""Fewest rows of a tile, however wide a layer is."""

GROUP_ROWS = 1 << 18
"""Rows of queries, of all heads together, in one call of attention over some heads.

A call has a block for each 128 of them, so this many keep a card busy for many times its number of
multiprocessors.
"""


def heads_at_a_time(tokens: int, heads: int, key_heads: int, together: int = 1) -> int:
    """Return the number of key heads that attend in one call of a tiled layer.

    Args:
        tokens: tokens of a pack.
        heads: number of query heads.
        key_heads: number of key heads.
        together: the result is a multiple of this number, or all key heads.
    """
    rows = tokens * heads // key_heads
    least = max(1, -(-GROUP_ROWS // max(rows, 1)))
    least = -(-least // together) * together
    return min(least, key_heads)


def rows_of_tile(inner: int) -> int:
    """Return the rows of a tile of a layer that runs in tiles as a whole.

    A product does as much work for each row as it is wide, so wide layers need fewer rows to run at
    full speed: those of a 70B 2048. Half of the rows are taken until a gated unit of them has as many
    elements as ``TILE`` rows of ``TILE_WIDTH``.

    Args:
        inner: width of the gated unit.
    """
    rows = TILE
    while rows * inner > TILE * TILE_WIDTH and rows > LEAST_TILE:
        rows //= 2
    return rows


def tiles_of(rows: int, tile: int | None = None) -> list[slice]:
    """Return the tiles of ``rows`` rows, in order; the last one may be shorter.

    Args:
        rows: their number.
        tile: rows of a tile; ``TILE`` by default.
    """
    step = tile or TILE
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def makes_tiles(rows: int, tile: int | None = None) -> bool:
    """Return True if ``rows`` rows are more than one tile, of ``TILE`` rows by default."""
    return rows > (tile or TILE)


def tiled(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    draws: bool = False,
    tells: bool = False,
    tile: int | None = None,
) -> Tensor:
    """Compute ``function(x)``, ``[T, ...]``, in tiles of rows.

    Args:
        function: maps ``[n, D]`` to ``[n, ...]``; each output row depends on its input row only.
        x: ``[T, D]``.
        draws: the function draws random numbers, and its recomputation must draw the same ones.
        tells: ``runs_again`` is set inside the function while it is recomputed; torch.compile
            cannot trace that.
        tile: most rows at a time; ``TILE`` by default.
    """
    tile = tile or TILE
    if len(x) <= tile:
        with _Running(False) if tells else nullcontext():
            return function(x)
    parts = x.split(tile)
    if not torch.is_grad_enabled():
        return torch.cat([function(part) for part in parts])
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws}
    if tells:
        options["context_fn"] = first_and_again
    return torch.cat([checkpoint(function, part, **options) for part in parts])
