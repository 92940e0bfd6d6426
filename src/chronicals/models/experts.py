"""Experts of a loaded model: a watch over what their stacked matrices are multiplied with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

PRODUCTS = ("linear", "matmul", "__matmul__")
"""Names of torch's functions that multiply something with an expert's matrix, which is their
second argument.
"""

Through = Callable[[str, int, Tensor], Tensor]
"""Called with the path of a stacked parameter, the number of an expert and what is multiplied
with its matrix, ``[n, in]``; gives what is multiplied in its place."""


def speaks_of_experts(config: Any) -> bool:
    """Whether a configuration has a field about experts; recurrent layers have stacked weights
    without.
    """
    return any("expert" in name for name in config.get_text_config().to_dict())


def watch_experts(model: nn.Module, through: Through) -> Callable[[], None]:
    """Let what each expert's matrices are multiplied with pass through a function, until what is
    returned is called.

    Experts are computed one after the other meanwhile, as transformers defines them (its
    implementation ``eager``).
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
    """Within: products with a matrix of stacked parameters are told by where in memory it lies.

    Args:
        stacks: by their paths.
    """

    def __init__(self, stacks: dict[str, nn.Parameter], through: Through):
        super().__init__()
        self.stacks = stacks
        self.through = through

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in PRODUCTS and len(args) > 1:
            for path, stack in self.stacks.items():
                offset = args[1].data_ptr() - stack.data_ptr()
                if 0 <= offset < stack.nbytes:
                    expert = offset // (stack.stride(0) * stack.element_size())
                    args = (self.through(path, expert, args[0]), *args[1:])
        return func(*args, **(kwargs or {}))
