"""Audit of the first step: how many parameters are trained as they should be.

Those that should be trained must be in the optimizer, get a gradient, and change. They are counted
by tensors and, for stacked experts, by experts.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from chronicals.distributed import local
from chronicals.lora import stacked_weights
from chronicals.models import count_values
from chronicals.optimizers import FusedAdamW
from chronicals.training.errors import TrainingError

logger = logging.getLogger(__name__)

SMALL = 1 << 16
"""Elements of the largest tensor that is compared whole.

Larger ones are compared by the sums of their bit patterns.
"""

WAITS_FOR = {"lora_A": "lora_B", "lora_embedding_B": "lora_embedding_A", "down": "up"}
"""Factors of adapters and heads that have no gradient at first, each with its other factor.

The other factor begins at zero, and the gradient is zero as long as it is.
"""

_LISTED_NAMES = 5
"""Names or numbers that a log line lists."""

_SUMMED_ELEMENTS = 1 << 22
"""Elements that are summed at a time: torch makes 8 bytes of each."""


@dataclass(frozen=True)
class ExpertsWithout:
    """Experts without a gradient in a trained tensor.

    Attributes:
        name: name of the tensor: a stacked weight, or a matrix of its adapter.
        numbers: the experts without a gradient.
        count: number of all experts in the tensor.
        partly: those of ``numbers`` that have a gradient in another weight of the same layer, so
            that tokens were sent to them.
    """

    name: str
    numbers: tuple[int, ...]
    count: int
    partly: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}: {len(self.numbers)} of {self.count} ({_some(self.numbers)})"


def _some(names: Sequence[object]) -> str:
    shown = ", ".join(map(str, names[:_LISTED_NAMES]))
    return f"{shown} …" if len(names) > _LISTED_NAMES else shown


@dataclass(frozen=True)
class Coverage:
    """Numbers of parameters that take part in training.

    Attributes:
        total: all parameters of the model.
        asked: parameters that should be trained.
        attached: those of ``asked`` that the optimizer holds.
        with_gradient: those of ``attached`` in tensors with a gradient that is not zero.
        moved: those of ``attached`` in tensors that the first step changed.
        waiting: those of ``attached`` in matrices of adapters or heads whose other factor was zero
            and has a gradient: they learn from the second step on.
        idle: names of the other tensors of ``asked`` without a gradient.
        experts: experts without a gradient, in tensors that have a gradient for other experts.
    """

    total: int
    asked: int
    attached: int
    with_gradient: int
    moved: int
    waiting: int
    idle: tuple[str, ...]
    experts: tuple[ExpertsWithout, ...] = ()

    @property
    def share(self) -> float:
        """Share of the parameters that should be trained."""
        return self.asked / self.total

    def __str__(self) -> str:
        text = (
            f"trainable {self.asked:,} of {self.total:,} parameters ({self.share:.2%}); after "
            "step 1: in the optimizer "
            f"{self.attached:,}, with a gradient {self.with_gradient:,}, changed {self.moved:,}"
        )
        if self.waiting:
            text += f"; {self.waiting:,} follow in step 2, because the other factor began at zero"
        return text

    def check(self) -> None:
        """Raise if any of the numbers is zero; log the tensors and experts without a gradient.

        Raises:
            TrainingError: nothing should be trained, is attached, has a gradient, or moved.
        """
        remedies = {
            "asked": "no parameter requires a gradient; unfreeze some or use LoRA",
            "attached": "the optimizer holds none of the trainable parameters",
            "with_gradient": "every gradient is zero; the loss does not depend on what is trained",
            "moved": "the first step changed nothing; learning_rate may be too small for the "
            "weights",
        }
        for name, remedy in remedies.items():
            if not getattr(self, name):
                raise TrainingError(f"nothing is trained: {self}. {remedy[0].upper()}{remedy[1:]}")
        if self.idle:
            logger.warning(
                "%d trainable tensors got no gradient in the first step: %s",
                len(self.idle),
                _some(self.idle),
            )
        same_in_all_layers = defaultdict[str, list[str]](list)
        for experts in self.experts:
            pattern = re.sub(r"\.\d+\.", ".*.", experts.name, count=1)
            same_in_all_layers[pattern].append(str(experts))
            if experts.partly:
                logger.warning(PARTLY, experts.name, _some(experts.partly))
        for lines in same_in_all_layers.values():
            logger.info("%s %s", WITHOUT, "; ".join(lines))


WITHOUT = (
    "experts without a gradient in the first step, as is right for those that no token of "
    "it was sent to:"
)
PARTLY = (
    "%s: of experts %s got no gradient in the first step, though tokens were sent to them: "
    "another weight has one"
)


class FirstStepAudit:
    """Observer of one step: call ``see_gradients`` between backward and update, ``close`` after it.

    The step may wait for the device, since it is the first.
    """

    def __init__(self, model: nn.Module, optimizer: FusedAdamW):
        self.model = model
        self.optimizer = optimizer
        optimized = {id(parameter) for parameter in optimizer.weights}
        self.asked = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.attached = {name: p for name, p in self.asked.items() if id(p) in optimized}
        self.before = {name: self._mark(p) for name, p in self.attached.items()}
        begins_at_zero = [
            name
            for name in self.attached
            if not set(WAITS_FOR.values()).isdisjoint(name.split("."))
        ]
        self.zero = {
            name for name in begins_at_zero if not bool(local(self.attached[name]).count_nonzero())
        }
        self.with_gradient: dict[str, Tensor] = {}
        names = {id(p): name for name, p in self.attached.items()}
        self.stacks = {
            names[id(p)]: (weight, side)
            for weight in stacked_weights(model)
            for p, side in weight.trained
            if id(p) in names
        }
        self.learning: dict[str, list[int]] = {}
        self.reached = False

    def see_gradients(self) -> None:
        """Record the gradients that exist now; call it whenever some of them do."""
        for name, p in self.attached.items():
            if p.grad is None:
                continue
            self.reached = True
            gradient = local(p.grad)
            weight, side = self.stacks.get(name, (None, ""))
            # Nonzero elements: of each expert if the tensor is a whole stack.
            if weight is None or gradient.shape != p.shape:
                counts = [int(gradient.count_nonzero())]
            elif side == "B":  # [N, R, E]
                by_expert = gradient.unflatten(1, (-1, weight.experts))
                counts = by_expert.count_nonzero((0, 1)).tolist()
            else:  # [E, ·]
                counts = gradient.reshape(weight.experts, -1).count_nonzero(1).tolist()
            if any(counts):
                self.with_gradient[name] = p
                if len(counts) > 1:
                    self.learning[name] = counts

    def close(self, applied: bool, flat: bool = False) -> Coverage | None:
        """Log, check and return the coverage; None if the step was not applied, or shows nothing.

        Args:
            applied: whether the step changed weights.
            flat: whether the loss has no gradient at the values of this step, so that gradients do
                not show what is trained. The backward pass must have reached a trained weight all
                the same.

        Raises:
            TrainingError: nothing is trained.
        """
        if not applied or (flat and self.reached):
            return None
        coverage = self.coverage()
        logger.info("%s", coverage)
        coverage.check()
        return coverage

    def coverage(self) -> Coverage:
        """Count the parameters that take part in training, after the step."""
        moved = [
            p
            for name, p in self.attached.items()
            if not torch.equal(self.before[name], self._mark(p))
        ]
        idle = set(self.asked) - set(self.with_gradient)
        learning = self.zero & set(self.with_gradient)
        waiting = {
            name
            for name in idle
            if ".".join(WAITS_FOR.get(part, part) for part in name.split(".")) in learning
        }
        # The experts without a gradient, by tensors. The gradient of an expert's A depends on its B,
        # so A does not show where tokens went.
        sent = defaultdict[str, set[int]](set)
        for name, counts in self.learning.items():
            weight, side = self.stacks[name]
            if side != "A":
                layer = weight.path.rpartition(".")[0]
                sent[layer] |= {number for number, count in enumerate(counts) if count}
        without = []
        for name, counts in self.learning.items():
            weight, side = self.stacks[name]
            numbers = tuple(number for number, count in enumerate(counts) if not count)
            if numbers:
                with_tokens = sent[weight.path.rpartition(".")[0]] if side != "A" else set()
                partly = tuple(sorted(with_tokens.intersection(numbers)))
                without.append(ExpertsWithout(name, numbers, len(counts), partly))
        return Coverage(
            total=count_values(self.model),
            asked=_count(self.asked.values()),
            attached=_count(self.attached.values()),
            with_gradient=_count(self.with_gradient.values()),
            moved=_count(moved),
            waiting=_count(self.asked[name] for name in waiting),
            idle=tuple(sorted(idle - waiting)),
            experts=tuple(without),
        )

    def _mark(self, parameter: Tensor) -> Tensor:
        """Return a tensor that changes if the weight, or the lower half of its master, does."""
        states = self.optimizer.state_of(parameter)
        parts = [local(parameter.detach())]
        if "low" in states:
            parts.append(states["low"].to(parameter.device))
        patterns = [part.reshape(-1).view(torch.int16) for part in parts]
        if parts[0].numel() <= SMALL:
            return torch.cat(patterns)
        sums = [
            piece.sum(dtype=torch.int64)
            for pattern in patterns
            for piece in pattern.split(_SUMMED_ELEMENTS)
        ]
        return torch.stack(sums)


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() for p in parameters)
