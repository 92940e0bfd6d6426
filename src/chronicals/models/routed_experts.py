"""The routed experts of a Hugging Face mixture: which modules hold them, and which experts a token
really gets.

Experts are the module that holds stacked weights (``down_proj`` ``[E, ., .]``), in 4 bits too, and
is called with the chosen ones. What they receive is read there, not from the router: the ids among
the arguments, or, where our products compute them, the rows that their dispatch hands to each
expert.

Shapes: T tokens, k experts of a token, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from chronicals.kernels.expert_dispatch import Dispatch, watching_dispatches
from chronicals.quantization import packed_shapes

WRAPPED = ".base_layer"
"""Within the path of what is inside an adapter."""


def is_experts(module: nn.Module) -> bool:
    """Whether it holds stacked experts, and is called with the chosen ones."""
    shapes = _shapes(module)
    return len(shapes.get("down_proj", ())) == 3 and bool(
        shapes.keys() & {"gate_up_proj", "up_proj"}
    )


def count_of(experts: nn.Module) -> int:
    """E of a module that holds experts."""
    return _shapes(experts)["down_proj"][0]


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of its parameters; of packed stacked weights those that they have in the class."""
    shapes = {name: tuple(weight.shape) for name, weight in module.named_parameters(recurse=False)}
    return {**shapes, **packed_shapes(module)}


def routed_experts(model: Any) -> dict[str, nn.Module]:
    """The modules of the decoder that hold experts, by their paths in it, in the order of its
    layers.
    """
    return {
        path: module for path, module in model.get_decoder().named_modules() if is_experts(module)
    }


def without_adapters(path: str) -> str:
    """The path of the adapter around a module, or its own."""
    return path.partition(WRAPPED)[0]


def router_within(block: nn.Module, experts: int, width: int) -> tuple[str, nn.Module] | None:
    """The router of a block: the path and the module of the first weight ``[E, D]``; None where
    there is none.
    """
    for path, module in block.named_modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is not None and weight.shape == (experts, width):
            return path, module
    return None


def called_for_experts(model: Any) -> tuple[nn.Module, ...]:
    """What the layers call for their experts: the modules that hold them, or the adapters around
    these, which look for hooks on what they wrap."""
    decoder = model.get_decoder()
    return tuple(decoder.get_submodule(without_adapters(path)) for path in routed_experts(model))


def chosen_experts(args: tuple, named: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """int64 ids and weights, ``[T, k]`` both, among the arguments of an experts module: the
    tensor of integers, and the last of the others."""
    tensors = [x for x in (*args, *named.values()) if isinstance(x, Tensor)]
    ids = next(x for x in tensors if not x.is_floating_point())
    ids = ids.reshape(-1, ids.shape[-1])
    return ids, [x for x in tensors if x.is_floating_point()][-1].reshape(len(ids), -1)


@contextmanager
def receiving(called: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Within: each call of these modules appends the experts that tokens really get, ``[T, k]``;
    one that there is not, below 0 or E and above, is none.

    The hooks are there for as long, so that nothing takes the modules for others than they are.
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
