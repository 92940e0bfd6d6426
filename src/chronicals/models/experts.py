"""Observes the inputs of each expert's matrices in a model with stacked experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

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
