"""Plain data parallelism: every rank holds the model, gradients are summed once a step."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """This process among those that ``torchrun`` started.

    Attributes:
        rank, count: this process and how many there are.
        local_rank: this process on its machine, and so its card.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    @classmethod
    def current(cls) -> Ranks:
        """Join the process group that ``torchrun`` describes (nccl with cards, else gloo); alone without it."""
        if "TORCHELASTIC_RUN_ID" not in os.environ and not dist.is_initialized():
            return cls()
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if torch.cuda.is_available():
            torch.cuda.set_device(local_rank)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        return cls(dist.get_rank(), dist.get_world_size(), local_rank)

    @property
    def first(self) -> bool:
        return self.rank == 0

    @torch.no_grad()
    def same_weights(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the tensors of the first."""
        if self.count > 1:
            for tensor in tensors:
                dist.broadcast(tensor.data, src=0)

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace every gradient by its sum over the ranks; a rank without one gives zeros."""
        if self.count > 1:
            pending = []
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
                pending.append(dist.all_reduce(parameter.grad, async_op=True))
            for work in pending:
                work.wait()

    def sum(self, tensor: Tensor) -> Tensor:
        """The tensor summed over the ranks, in place."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, alike in shape and type, in the order of the ranks, where this one is."""
        if self.count == 1:
            return [tensor]
        sent = tensor.cuda() if dist.get_backend() == "nccl" else tensor
        found = [torch.empty_like(sent) for _ in range(self.count)]
        dist.all_gather(found, sent)
        return [other.to(tensor.device) for other in found]

    def wait_for_all(self) -> None:
        if self.count > 1:
            dist.barrier()
