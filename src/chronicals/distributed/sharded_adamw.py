"""AdamW with ZeRO sharding.

Methods take whole weights; updates and states are of this rank's shares (``Shards``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from chronicals.distributed.shards import Shards
from chronicals.distributed.weight_shards import WeightShards
from chronicals.kernels.adamw import split_master
from chronicals.kernels.adamw_8bit import MOMENT_BLOCK
from chronicals.optimizers import Adam8bit, FusedAdamW
from chronicals.saving import Piece


class ShardedAdamW(FusedAdamW):
    """``FusedAdamW`` that updates this rank's shares of the weights.

    Its methods take weights, its groups hold shares. A step updates the shares from their gradients
    and sends them to all ranks.

    Args:
        groups: parameter groups of weights, as for ``FusedAdamW``.
        shards: the shares of these weights.
        options: further arguments of ``FusedAdamW``.
    """

    def __init__(self, groups: list[dict[str, Any]], shards: Shards | WeightShards, **options: Any):
        self.shards = shards
        of_shares = []
        for group in groups:
            shares = [shards.shares[p] for p in group["params"]]
            of_shares.append({**group, "params": shares})
        super().__init__(of_shares, **options)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        factor: Tensor | None = None,
        apply: Tensor | None = None,
        used: Mapping[Tensor, Tensor] | None = None,
    ) -> float | None:
        """Update this rank's shares from their gradients, and send them to all ranks.

        Args:
            closure: computes the loss, as in torch.
            factor: scalar tensor by which every gradient is multiplied.
            apply: scalar bool tensor; if False, no share and no state changes.
            used: scalar bool tensor for each weight; if False, its share does not change.

        Returns:
            The loss of ``closure``, or None.
        """
        self.shards.adopt()
        of_shares = None
        if used is not None:
            of_shares = {self.shards.shares[weight]: flag for weight, flag in used.items()}
        loss = super().step(closure, factor=factor, apply=apply, used=of_shares)
        self.shards.publish()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients of the weights to None, whatever ``set_to_none`` says."""
        self.shards.drop_gradients()

    def weights_moved(self) -> None:
        """Note that the weights were moved; the first call makes the buckets."""
        self.shards.settle()
        super().weights_moved()

    @torch.no_grad()
    def set_master(self, parameter: Tensor, value: Tensor) -> None:
        """Set a weight and this rank's share of it to a whole fp32 value."""
        share = self.shards.shares[parameter]
        if share.dtype != parameter.dtype:
            share.data = share.data.to(parameter.dtype)
        super().set_master(share, self.shards.own_part(parameter, value).view(share.shape))
        parameter.copy_(split_master(value)[0] if "low" in self.state_of(parameter) else value)

    @property
    def weights(self) -> list[Tensor]:
        """The whole weights, not the shares that the groups hold."""
        return self.shards.weights

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the states of this rank's share of a weight."""
        return super().state_of(self.shards.shares.get(parameter, parameter))

    def pieces(self, parameter: Tensor) -> dict[str, Piece]:
        """Return this rank's states of a weight as pieces of the whole states, by name.

        Only rank 0 adds ``step``, which is the same on all ranks.
        """
        own = self.state_of(parameter)
        begin = self.shards.begin(parameter)
        if not self.shards.keeps:
            return {}
        found = {}
        for name, state in own.items():
            unit = _unit(name)
            if name != "step":
                shape = self.shards.shape_of(parameter, unit)
                found[name] = Piece(state.reshape(-1), begin // unit, shape)
        if self.shards.ranks.writer:
            found["step"] = Piece(own["step"].reshape(-1), 0, own["step"].shape)
        return found

    def empty_states(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return empty tensors like the whole states of a weight, to be filled and loaded."""
        found = {}
        for name, own in self.state_of(parameter).items():
            shape = own.shape if name == "step" else self.shards.shape_of(parameter, _unit(name))
            found[name] = torch.empty(shape, dtype=own.dtype, device=parameter.device)
        return found

    @torch.no_grad()
    def load_state(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """Load whole states of a weight, or a share's own states if ``parameter`` is a share.

        Raises:
            ValueError: a state has the wrong shape.
        """
        share = self.shards.shares.get(parameter)
        if share is None:
            super().load_state(parameter, state)
            return
        self.shards.take_over(parameter)
        mine = self.state_of(parameter)
        own = {}
        for name, value in state.items():
            part = value
            if name != "step":
                unit = _unit(name)
                if value.shape != self.shards.shape_of(parameter, unit):
                    raise ValueError(
                        f"optimizer state {name!r} of a weight {tuple(parameter.shape)} is "
                        "misshapen"
                    )
                part = self.shards.own_part(parameter, value, unit)
            if name in mine:
                own[name] = part.view(mine[name].shape)
        super().load_state(share, own)


class ShardedAdam8bit(ShardedAdamW, Adam8bit):
    """``ShardedAdamW`` with moments in 8 bits."""


def _unit(state: str) -> int:
    """Return the number of weight elements for each element of a state."""
    return MOMENT_BLOCK if state.endswith("_amax") else 1
