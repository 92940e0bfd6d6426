"""The routed experts of a mixture-of-experts model, and how to observe them and their routers.

An experts module holds stacked weights (``down_proj`` ``[E, ., .]``, possibly packed) and is called
with the ids of the chosen experts. The ids are read from that call, not from the router: they are
among its arguments, or, if our products compute the experts, in the dispatch of rows to experts.
Router logits are read by hooks for transformers classes that do not record them. The inputs of an
expert's matrices are read from its products.

Shapes: T tokens, k experts of a token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from chronicals.kernels.expert_dispatch import Dispatch, watching_dispatches
from chronicals.quantization import packed_shapes
from chronicals.versions import ROUTERS_RECORDED, transformers_before

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


def outermost_path(path: str) -> str:
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
    return tuple(decoder.get_submodule(outermost_path(path)) for path in routed_experts(model))


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
    """A context that yields a list; each call of these modules appends its tokens' expert ids.

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


ROUTER_LOGITS = "router_logits"
"""Name of router logits among the outputs of transformers."""


def unrecorded_routers(model: Any) -> tuple[nn.Module, ...]:
    """Return the routers whose logits the decoder's class does not record, in the order of layers.

    Empty if the class records them, or if a layer has no recognisable router.
    """
    if not transformers_before(ROUTERS_RECORDED):
        return ()
    decoder = model.get_decoder()
    if ROUTER_LOGITS in (getattr(decoder, "_can_record_outputs", None) or {}):
        return ()
    width = model.get_input_embeddings().weight.shape[1]
    routers = []
    for path, experts in routed_experts(model).items():
        block = decoder.get_submodule(outermost_path(path).rpartition(".")[0])
        router = router_within(block, count_of(experts), width)
        if router is None:
            return ()
        routers.append(block.get_submodule(outermost_path(router[0])))
    return tuple(routers)


@contextmanager
def reading_logits(routers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """A context that yields a list; each call of these routers appends its logits ``[T, E]``."""
    logits: list[Tensor] = []

    def read(_: nn.Module, args: tuple, output: Any) -> None:
        # A router that returns several tensors returns the logits first.
        first = output if isinstance(output, Tensor) else output[0]
        logits.append(first.reshape(-1, first.shape[-1]))

    with ExitStack() as hooks:
        for router in routers:
            hooks.callback(router.register_forward_hook(read).remove)
        yield logits


HEADS = ("layer_ahead", "token_ahead")
"""Attributes of a decoder with heads that predict its expert choices (``moe/lookahead/heads.py``).

A path with one of these parts belongs to a head. Logits do not depend on the heads. With adapters,
the heads are trained in full and saved together with the adapters.
"""


def lookahead_heads(model: Any) -> dict[str, nn.Module]:
    """Return the heads of the native mixture-of-experts model by name; empty for other models."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    there = {name: getattr(decoder, name, None) for name in HEADS}
    return {name: module for name, module in there.items() if isinstance(module, nn.Module)}


def is_of_head(name: str) -> bool:
    """Return True if ``name`` is the path of a head, or of a weight in one."""
    return any(part in HEADS for part in name.split("."))


_PRODUCTS = ("linear", "matmul", "__matmul__")
"""Names of torch functions that multiply by an expert's matrix, their second argument."""

Through = Callable[[str, int, Tensor], Tensor]
"""A function that replaces the input of an expert's matrix.

Its arguments are the path of the stacked parameter, the index of the expert, and the input
``[n, in]``. It returns the new input.
"""


def speaks_of_experts(config: Any) -> bool:
    """Return True if a configuration has a field about experts.

    Stacked weights are no proof of experts: recurrent layers have them, too.
    """
    return any("expert" in name for name in config.get_text_config().to_dict())


def watch_experts(model: nn.Module, through: Through) -> Callable[[], None]:
    """Pass the input of each expert's matrices through a function; return a function that stops it.

    Until then experts are computed one after the other, by transformers' ``eager`` implementation.
    """
    watched = []
    for path, module in model.named_modules():
        names = [
            name
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.ndim == 3
        ]
        if "down_proj" in names and "forward" not in vars(module):
            module.forward = partial(_watched, module, path, names, through)  # type: ignore[method-assign]
            watched.append(module)

    def undo() -> None:
        for module in watched:
            vars(module).pop("forward")

    return undo


def _watched(
    module: nn.Module, path: str, names: list[str], through: Through, *given: Any, **named: Any
) -> Any:
    eager = getattr(type(module).forward, "__wrapped__", type(module).forward)
    with _Products({f"{path}.{name}": module.get_parameter(name) for name in names}, through):
        return eager(module, *given, **named)


class _Products(TorchFunctionMode):
    """A context that intercepts products with the matrices of stacked parameters.

    It recognises an expert's matrix by its address in memory.

    Args:
        stacks: stacked parameters by path.
        through: called with the input of each product.
    """

    def __init__(self, stacks: dict[str, nn.Parameter], through: Through):
        super().__init__()
        self.stacks = stacks
        self.through = through

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _PRODUCTS and len(args) > 1:
            for path, stack in self.stacks.items():
                offset = args[1].data_ptr() - stack.data_ptr()
                if 0 <= offset < stack.nbytes:
                    expert = offset // (stack.stride(0) * stack.element_size())
                    args = (self.through(path, expert, args[0]), *args[1:])
        return func(*args, **(kwargs or {}))
