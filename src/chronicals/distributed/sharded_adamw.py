"""AdamW over the shares of this rank: others name weights, what is updated and has states is the
share (``Shards``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from chronicals.distributed.shards import Shards
from chronicals.distributed.weight_shards import WeightShards
from chronicals.kernels.adamw_8bit import MOMENT_BLOCK
from chronicals.kernels.master import split_master
from chronicals.optimizers import Adam8bit, FusedAdamW
from chronicals.saving import Piece


class ShardedAdamW(FusedAdamW):
    """``FusedAdamW`` whose groups hold shares.

    Its methods take weights. A step updates the shares from their own gradients and gives them to
    all ranks.

    Args:
        groups: of weights, as ``FusedAdamW`` takes them.
        options: further arguments of it.
    """

    def __init__(self, groups: list[dict[str, Any]], shards: Shards | WeightShards, **options: Any):
        self.shards = shards
        super().__init__(
            [{**group, "params": [shards.shares[p] for p in group["params"]]} for group in groups],
            **options,
        )

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        factor: Tensor | None = None,
        apply: Tensor | None = None,
        used: Mapping[Tensor, Tensor] | None = None,
    ) -> float | None:
        self.shards.adopt()
        of_shares = (
            None
            if used is None
            else {self.shards.shares[weight]: flag for weight, flag in used.items()}
        )
        loss = super().step(closure, factor=factor, apply=apply, used=of_shares)
        self.shards.publish()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.shards.drop_gradients()

    def weights_moved(self) -> None:
        self.shards.settle()
        super().weights_moved()

    @torch.no_grad()
    def set_master(self, parameter: Tensor, value: Tensor) -> None:
        share = self.shards.shares[parameter]
        if share.dtype != parameter.dtype:
            share.data = share.data.to(parameter.dtype)
        super().set_master(share, self.shards.own_part(parameter, value).view(share.shape))
        parameter.copy_(split_master(value)[0] if "low" in self.state_of(parameter) else value)

    @property
    def weights(self) -> list[Tensor]:
        return self.shards.weights

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Of this rank's share."""
        return super().state_of(self.shards.shares.get(parameter, parameter))

    def pieces(self, parameter: Tensor) -> dict[str, Piece]:
        """This rank's states of a weight, as parts of whole ones; how often it was updated is
        the first rank's to say.
        """
        own = self.state_of(parameter)
        begin = self.shards.begin(parameter)
        if not self.shards.keeps:
            return {}
        found = {
            name: Piece(
                state.reshape(-1),
                begin // _unit(name),
                self.shards.shape_of(parameter, _unit(name)),
            )
            for name, state in own.items()
            if name != "step"
        }
        if self.shards.ranks.writer:
            found["step"] = Piece(own["step"].reshape(-1), 0, own["step"].shape)
        return found

    def empty_states(self, parameter: Tensor) -> dict[str, Tensor]:
        found = {}
        for name, own in self.state_of(parameter).items():
            shape = own.shape if name == "step" else self.shards.shape_of(parameter, _unit(name))
            found[name] = torch.empty(shape, dtype=own.dtype, device=parameter.device)
        return found

    @torch.no_grad()
    def load_state(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """From whole states, of a weight; from its own, of a share."""
        share = self.shards.shares.get(parameter)
        if share is None:
            super().load_state(parameter, state)
            return
        self.shards.take_over(parameter)
        own = {}
        for name, value in state.items():
            expected = (
                value.shape if name == "step" else self.shards.shape_of(parameter, _unit(name))
            )
            if value.shape != expected:
                raise ValueError(
                    f"optimizer state {name!r} of a weight {tuple(parameter.shape)} is misshapen"
                )
            own[name] = (
                value if name == "step" else self.shards.own_part(parameter, value, _unit(name))
            )
        mine = self.state_of(parameter)
        super().load_state(
            share, {name: part.view(mine[name].shape) for name, part in own.items() if name in mine}
        )


class ShardedAdam8bit(ShardedAdamW, Adam8bit):
    """The same with moments in 8 bits."""


def _unit(state: str) -> int:
    """Elements of a weight that one of a state goes with."""
    return MOMENT_BLOCK if state.endswith("_amax") else 1
