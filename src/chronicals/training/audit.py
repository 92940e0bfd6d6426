"""The first-step audit: of what was asked to train, how much is attached, got a gradient, and
moved, by tensors and, of stacked experts, by experts."""

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
"""Tensors up to this many elements are compared whole, larger ones by the sums of their bit
patterns.
"""

WAITS_FOR = {"lora_A": "lora_B", "lora_embedding_B": "lora_embedding_A", "down": "up"}
"""Matrices of adapters and of heads, and those that begin at zero, without which they have no
gradient.
"""

SOME = 5
"""Names or numbers that a line tells."""

AT_A_TIME = 1 << 22
"""Elements that are summed at a time: torch makes 8 bytes of each."""


@dataclass(frozen=True)
class ExpertsWithout:
    """Experts without a gradient.

    Attributes:
        name: of the trained tensor: a stacked weight, or a matrix of its adapter.
        numbers: of these experts.
        count: of all in the tensor.
        partly: those of them that have a gradient in another weight of the same layer, so that
            tokens were sent to them.
    """

    name: str
    numbers: tuple[int, ...]
    count: int
    partly: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}: {len(self.numbers)} of {self.count} ({_some(self.numbers)})"


def _some(names: Sequence[object]) -> str:
    return ", ".join(map(str, names[:SOME])) + (" …" if len(names) > SOME else "")


@dataclass(frozen=True)
class Coverage:
    """Numbers of parameters.

    Attributes:
        total: in the model.
        asked: to be trained.
        attached: of those, held by the optimizer.
        with_gradient: of those, in tensors with a gradient that is not zero.
        moved: of those, in tensors that the first step changed.
        waiting: of those attached, matrices of adapters, ours or PEFT's, and of heads, whose other
            one was zero and has a gradient: they learn from the second step on.
        idle: names of the other asked-for tensors without a gradient.
        experts: of tensors that hold something of each expert and have a gradient, the numbers of
            those experts that have none.
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
        """Trainable share of all parameters."""
        return self.asked / self.total

    def __str__(self) -> str:
        return (
            f"trainable {self.asked:,} of {self.total:,} parameters ({self.share:.2%}); after "
            "step 1: in the optimizer "
            f"{self.attached:,}, with a gradient {self.with_gradient:,}, changed {self.moved:,}"
            + (
                f"; {self.waiting:,} follow in step 2, because the other factor began at zero"
                if self.waiting
                else ""
            )
        )

    def check(self) -> None:
        """Raise if any of the shares is zero; name what got no gradient.

        Raises:
            TrainingError: nothing is asked for, attached, has a gradient, or moved.
        """
        for name, remedy in {
            "asked": "no parameter requires a gradient; unfreeze some or use LoRA",
            "attached": "the optimizer holds none of the trainable parameters",
            "with_gradient": "every gradient is zero; the loss does not depend on what is trained",
            "moved": "the first step changed nothing; learning_rate may be too small for the "
            "weights",
        }.items():
            if not getattr(self, name):
                raise TrainingError(f"nothing is trained: {self}. {remedy[0].upper()}{remedy[1:]}")
        if self.idle:
            logger.warning(
                "%d trainable tensors got no gradient in the first step: %s",
                len(self.idle),
                _some(self.idle),
            )
        alike = defaultdict[str, list[str]](list)
        for found in self.experts:
            alike[re.sub(r"\.\d+\.", ".*.", found.name, count=1)].append(str(found))
            if found.partly:
                logger.warning(PARTLY, found.name, _some(found.partly))
        for each in alike.values():
            logger.info("%s %s", WITHOUT, "; ".join(each))


WITHOUT = (
    "experts without a gradient in the first step, as is right for those that no token of "
    "it was sent to:"
)
PARTLY = (
    "%s: of experts %s got no gradient in the first step, though tokens were sent to them: "
    "another weight has one"
)


class FirstStepAudit:
    """Watches one step: ``see_gradients`` between backward and update, ``coverage`` after it.

    The step may wait for the device: it is the first.
    """

    def __init__(self, model: nn.Module, optimizer: FusedAdamW):
        self.model = model
        self.optimizer = optimizer
        held = {id(parameter) for parameter in optimizer.weights}
        self.asked = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.attached = {name: p for name, p in self.asked.items() if id(p) in held}
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
        """Those that are there now; may be called for each."""
        for name, p in self.attached.items():
            self.reached |= p.grad is not None
            if p.grad is not None and any(counts := self._nonzero(name, local(p.grad))):
                self.with_gradient[name] = p
                if len(counts) > 1:
                    self.learning[name] = counts

    def _nonzero(self, name: str, gradient: Tensor) -> list[int]:
        """How many elements are not zero; of each expert, where the whole tensor is here and has
        something of each.
        """
        weight, side = self.stacks.get(name, (None, ""))
        if weight is None or gradient.shape != self.attached[name].shape:
            return [int(gradient.count_nonzero())]
        if side == "B":  # [N, R, E]
            counts = gradient.unflatten(1, (-1, weight.experts)).count_nonzero((0, 1))
        else:  # [E, ·]
            counts = gradient.reshape(weight.experts, -1).count_nonzero(1)
        found: list[int] = counts.tolist()
        return found

    def _experts(self) -> tuple[ExpertsWithout, ...]:
        """Whether an expert's A has a gradient depends on its B, so A tells nothing of where
        tokens went.
        """
        sent = defaultdict[str, set[int]](set)
        for name, counts in self.learning.items():
            weight, side = self.stacks[name]
            if side != "A":
                sent[weight.path.rpartition(".")[0]] |= {
                    number for number, count in enumerate(counts) if count
                }
        found = []
        for name, counts in self.learning.items():
            weight, side = self.stacks[name]
            numbers = tuple(number for number, count in enumerate(counts) if not count)
            if numbers:
                with_tokens = sent[weight.path.rpartition(".")[0]] if side != "A" else set()
                found.append(
                    ExpertsWithout(
                        name, numbers, len(counts), tuple(sorted(with_tokens.intersection(numbers)))
                    )
                )
        return tuple(found)

    def close(self, applied: bool, flat: bool = False) -> Coverage | None:
        """The coverage, logged and checked; None where the step was not applied, or tells nothing.

        Args:
            flat: whether the loss has no gradient at the values of this step, so that none says
                what is trained. That the backward pass reached a trained weight is checked all the
                same.

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
        return Coverage(
            total=count_values(self.model),
            asked=_count(self.asked.values()),
            attached=_count(self.attached.values()),
            with_gradient=_count(self.with_gradient.values()),
            moved=_count(moved),
            waiting=_count(self.asked[name] for name in waiting),
            idle=tuple(sorted(idle - waiting)),
            experts=self._experts(),
        )

    def _mark(self, parameter: Tensor) -> Tensor:
        """What changes when the weight, or the lower half of its master, does."""
        states = self.optimizer.state_of(parameter)
        parts = [
            local(parameter.detach()),
            *([states["low"].to(parameter.device)] if "low" in states else []),
        ]
        patterns = [part.reshape(-1).view(torch.int16) for part in parts]
        if parts[0].numel() <= SMALL:
            return torch.cat(patterns)
        sums = [
            piece.sum(dtype=torch.int64)
            for pattern in patterns
            for piece in pattern.split(AT_A_TIME)
        ]
        return torch.stack(sums)


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() for p in parameters)
