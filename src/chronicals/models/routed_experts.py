"""The routed experts of a mixture-of-experts model: their modules, and the experts each token gets.

An experts module holds stacked weights (``down_proj`` ``[E, ., .]``, possibly packed) and is called
with the ids of the chosen experts. The ids are read from that call, not from the router: they are
among its arguments, or, if our products compute the experts, in the dispatch of rows to experts.

Shapes: T tokens, k experts of a token, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from chronicals.kernels.expert_dispatch import Dispatch, watching_dispatches
from chronicals.quantization import packed_shapes

_WRAPPED = ".base_layer"
"""Part of the path of a module inside an adapter."""


def is_experts(module: nn.Module) -> bool:
    """Return True if the module holds stacked experts and is called with the chosen ones."""
    shapes = _shapes(module)
    return len(shapes.get("down_proj", ())) == 3 and bool(
        shapes.keys() & {"gate_up_proj", "up_proj"}
    )


def count_of(experts: nn.Module) -> int:
    """Return E, the number of experts in an experts module."""
    return _shapes(experts)["down_proj"][0]


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the module's own parameters; packed weights have their dense shapes."""
    shapes = {name: tuple(weight.shape) for name, weight in module.named_parameters(recurse=False)}
    return {**shapes, **packed_shapes(module)}


def routed_experts(model: Any) -> dict[str, nn.Module]:
    """Return the experts modules of the decoder in the order of layers, by their path in it."""
    return {
        path: module for path, module in model.get_decoder().named_modules() if is_experts(module)
    }


def without_adapters(path: str) -> str:
    """Return the path of the adapter around a module, or of the module itself."""
    return path.partition(_WRAPPED)[0]


def router_within(block: nn.Module, experts: int, width: int) -> tuple[str, nn.Module] | None:
    """Return path and module of a block's router, the first weight ``[E, D]``; None if none."""
    for path, module in block.named_modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is not None and weight.shape == (experts, width):
            return path, module
    return None


def called_for_experts(model: Any) -> tuple[nn.Module, ...]:
    """Return the modules that layers call for their experts, in the order of layers.

    These are the experts modules or the adapters around them. An adapter does not use our products
    if the module that it wraps has hooks.
    """
    decoder = model.get_decoder()
    return tuple(decoder.get_submodule(without_adapters(path)) for path in routed_experts(model))


def chosen_experts(args: tuple, named: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return ids (int64) and weights of the chosen experts, both ``[T, k]``.

    They are among the arguments of an experts module: the integer tensor, and the last
    floating-point one.
    """
    tensors = [x for x in (*args, *named.values()) if isinstance(x, Tensor)]
    ids = next(x for x in tensors if not x.is_floating_point())
    ids = ids.reshape(-1, ids.shape[-1])
    return ids, [x for x in tensors if x.is_floating_point()][-1].reshape(len(ids), -1)


@contextmanager
def receiving(called: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """A context that yields a list; each call of these modules appends the expert ids of its
    tokens.

    The ids are int64 ``[T, k]``; one outside 0 … E - 1 means no expert. The hooks exist only within
    the context, since other code checks modules for hooks.
    """
    found: list[Tensor] = []

    def given(_: nn.Module, args: tuple, named: dict[str, Any]) -> None:
        found.append(chosen_experts(args, named)[0])

    def dispatched(to: Dispatch) -> None:
        found[-1] = to.received()

    with ExitStack() as within:
        for module in called:
            within.callback(module.register_forward_pre_hook(given, with_kwargs=True).remove)
        if called:
            within.enter_context(watching_dispatches(dispatched))
        yield found
