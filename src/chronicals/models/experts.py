"""Experts of a model: what their weights are called in its files, and where transformers 5 puts
them.

Files hold a matrix an expert, ``layers.3.mlp.experts.7.up_proj.weight`` (Mixtral's
``block_sparse_moe.experts.7.w3``). A loaded model has two parameters a layer,
``experts.gate_up_proj`` ``[E, 2 I, D]``, whose upper half is the gate, and ``experts.down_proj``
``[E, D, I]``. Some families are stored so, too, and some of those with transposed experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ONE = re.compile(r"(?:model\.)?layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
STACKED = re.compile(r"(?:model\.)?layers\.(\d+)\.\w+\.experts\.(gate_up_proj|down_proj)(_bias)?")

GATE = "gate_proj"
UP = "up_proj"
DOWN = "down_proj"
ROLES = {GATE: GATE, "w1": GATE, UP: UP, "w3": UP, DOWN: DOWN, "w2": DOWN}
"""What a matrix of an expert is, by its name in files."""

PRODUCTS = ("linear", "matmul", "__matmul__")
"""Names of torch's functions that multiply something with an expert's matrix, which is their
second argument.
"""

Through = Callable[[str, int, Tensor], Tensor]
"""Called with the path of a stacked parameter, the number of an expert and what is multiplied
with its matrix, ``[n, in]``; gives what is multiplied in its place."""


@dataclass(frozen=True)
class Expert:
    """A matrix of an expert.

    Attributes:
        layer, number: of the decoder layer, and of the expert in it.
        role: ``GATE``, ``UP`` or ``DOWN``.
    """

    layer: int
    number: int
    role: str

    @classmethod
    def named(cls, name: str) -> Expert | None:
        """By the name of a tensor in a file; None for what is no expert's matrix."""
        found = ONE.fullmatch(name)
        return (
            cls(int(found[1]), int(found[2]), ROLES[found[3]])
            if found and found[3] in ROLES
            else None
        )

    @property
    def stack(self) -> tuple[int, str]:
        """The layer and the name of the parameter that it is a part of."""
        return self.layer, "down_proj" if self.role == DOWN else "gate_up_proj"

    def within(self, stack: Tensor) -> Tensor:
        """The part of that parameter, not transposed, that it is."""
        whole = stack[self.number]
        return whole if self.role == DOWN else whole.chunk(2)[self.role == UP]


def stack_named(name: str) -> tuple[int, str] | None:
    """The layer and the name of a parameter of stacked experts; None for any other."""
    found = STACKED.fullmatch(name)
    return (int(found[1]), found[2]) if found and not found[3] else None


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
