"""Weights of which every rank holds some rows (FSDP2, ``fully_shard``): gathered for each layer's
pass, updated where they are.

Zhao et al., 2023 (FSDP); ZeRO stage 3. A decoder layer is a unit: its weights are gathered by one
collective before its forward pass and again before its backward pass, its gradients exchanged after
it and summed in fp32 (``ExchangedSums``). Shards are fp32, 4 bytes a weight, as many as the 16 + 16
bits of a bf16 weight with its master; layers compute with weights cast to bf16. The embedding, the
head and the layers that ``stay_gathered`` names are gathered once. Bytes of a micro-batch and rank,
of N weights in bf16 over W ranks of which S are gathered once: (4 N − 2 S) (W − 1) / W gathered,
and 2 N (W − 1) / W of gradients.

With copies on several machines (HSDP) a machine's ranks share the rows, and sums are all-reduced
among the copies after the last micro-batch of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from chronicals.distributed.even_gradients import sum_evenly, take_used
from chronicals.distributed.exchanged_sums import ExchangedSums
from chronicals.distributed.mesh import Mesh, group_of
from chronicals.distributed.presence import WAITING
from chronicals.distributed.side_by_side import lay_side_by_side
from chronicals.kernels.gradient_norm import gradient_norm
from chronicals.models.presentation import AS_FORWARD
from chronicals.models.rows import PART
from chronicals.saving import Piece

STAYS = "_chronicals_stays"
"""Attribute of a unit: whether it stays gathered from its forward to its backward pass."""

Products = Sequence[tuple[nn.Module, tuple[str, ...]]]
Read = Callable[[str, Tensor, range], Tensor]
"""Of a weight's name, the weight (perhaps on the meta device) and the rows wanted: a tensor of
the weight's shape, in which these rows are filled."""


def local(tensor: Tensor) -> Tensor:
    """What this rank has of it: its rows where it is in shards, itself where it is not."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_divided(weight: Tensor) -> bool:
    """Whether every rank has some rows of it, as FSDP divides weights."""
    return isinstance(weight, DTensor)


def rows_of(rows: int, rank: int, count: int) -> range:
    """Those of a weight that a rank has, as torch's chunks are cut: all ranks but the last have
    as many.
    """
    each = -(-rows // count)
    return range(min(rank * each, rows), min((rank + 1) * each, rows))


def weight_mesh(ranks: Mesh, sharing: int) -> DeviceMesh:
    """Neighbours that share a copy of the weights, ``sharing`` of them, and the copies. All
    ranks call it alike.
    """
    kind = ranks.device.type
    if sharing == ranks.count:
        with WAITING.within():
            return init_device_mesh(kind, (ranks.count,), mesh_dim_names=("shard",))
    places = torch.arange(ranks.count).view(-1, sharing)
    copies = [group_of(column) for column in places.T.tolist()]
    sharers = [group_of(row) for row in places.tolist()]
    own = [copies[ranks.rank % sharing], sharers[ranks.rank // sharing]]
    return DeviceMesh.from_group(own, kind, places, mesh_dim_names=("replicate", "shard"))


def shard_weights(
    model: Any,
    layers: Sequence[nn.Module],
    products: Products,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    read: Read,
) -> int:
    """Divide all weights of a model among the ranks, a layer after the other, so that no more than
    one is whole at a time; how many products find their weights side by side.

    Args:
        layers: units; what belongs to none of them, embedding and head, is one more, which stays
            gathered.
        products: of several linear layers each.
        dtype: that weights are gathered in.
        read: gives the rows of a weight.
    """
    device = (
        torch.device(mesh.device_type, torch.cuda.current_device())
        if mesh.device_type == "cuda"
        else torch.device("cpu")
    )
    shard = mesh["shard"]
    place = shard.get_local_rank()
    count = shard.size()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, cast_forward_inputs=False)
    names = {id(p): name for name, p in model.named_parameters()}
    laid = 0
    for unit in (*layers, model):
        _fill(unit, names, place, count, device, dtype, read)
        fully_shard(unit, mesh=mesh, mp_policy=policy)
        _let_stay(unit, unit is model)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        sum_evenly(unit)
        if dtype != torch.float32:
            unit.set_custom_reduce_scatter(ExchangedSums(count))
        inside = {id(module) for module in unit.modules()}
        laid += lay_side_by_side(
            unit, [pair for pair in products if id(pair[0]) in inside], dtype, count
        )
        products = [pair for pair in products if id(pair[0]) not in inside]
    setattr(model, AS_FORWARD, MethodType(lambda _, compute: compute(), model))
    register_fsdp_forward_method(model, AS_FORWARD)
    gathered = getattr(model, AS_FORWARD)
    setattr(
        model,
        AS_FORWARD,
        MethodType(lambda model, compute: _released(model, gathered(compute)), model),
    )
    return laid


def _released(model: Any, result: Any) -> Any:
    """What a pass returned; where no backward pass follows, units that stayed gathered are
    divided again.
    """
    if not torch.is_grad_enabled():
        divide_again(model)
    return result


def divide_again(model: nn.Module) -> None:
    """Free what is gathered still, after a pass that no backward pass followed, or that an
    exception ended: weights may be written into the shares next."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and (stays := vars(module).get(STAYS)) is not None:
            _let_stay(module, False)  # one that stays is not divided in the midst of a forward pass
            module.reshard()
            _let_stay(module, stays)


def stay_gathered(layers: Sequence[nn.Module], count: int) -> None:
    """Let the last ``count`` layers, after ``shard_weights``, stay gathered from their forward
    to their backward pass, and the others be divided between both."""
    for index, layer in enumerate(layers):
        _let_stay(layer, index >= len(layers) - count)


def _let_stay(unit: nn.Module, stays: bool) -> None:
    """Whether a unit stays gathered from its forward to its backward pass."""
    assert isinstance(unit, FSDPModule)
    unit.set_reshard_after_forward(not stays, recurse=False)
    vars(unit)[STAYS] = stays


@torch.no_grad()
def _fill(
    unit: nn.Module,
    names: dict[int, str],
    place: int,
    count: int,
    device: torch.device,
    dtype: torch.dtype,
    read: Read,
) -> None:
    """Put this rank's rows where whole weights are expected, on the device: fp32 where they are
    trained, else ``dtype``.
    """
    made: dict[int, nn.Parameter] = {}
    for module in unit.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if id(parameter) not in made:
                if not parameter.ndim:
                    raise ValueError(
                        f"sharding='weights': {names[id(parameter)]} has no rows; set "
                        "sharding='optimizer'"
                    )
                value = read(names[id(parameter)], parameter, rows_of(len(parameter), place, count))
                kept = torch.float32 if parameter.requires_grad else dtype
                made[id(parameter)] = nn.Parameter(value.to(device, kept), parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]


VALUE = "weight"
"""In checkpoints, beside the states of a weight: itself, fp32 where it is trained."""


class WeightShards:
    """The rows of this rank and the sums of their gradients; ``Shards`` has the same methods.

    Args:
        weights: those that are trained, after ``shard_weights``.

    Attributes:
        shares: by weight, what this rank has of it; n of its rows, n may be 0.
    """

    def __init__(self, ranks: Mesh, weights: Sequence[Tensor]):
        self.ranks = ranks
        self.weights = list(weights)
        self.mesh: DeviceMesh = weights[0].device_mesh  # type: ignore[attr-defined]
        self.place = self.mesh["shard"].get_local_rank()
        self.count = self.mesh["shard"].size()
        self.copies = ranks.count // self.count
        self.shares = {weight: local(weight.detach()) for weight in self.weights}
        self._norm: Tensor | None = None

    def values(self, names: Mapping[str, Tensor]) -> dict[str, Piece]:
        """This rank's rows of weights, trained or frozen, as parts of whole ones."""
        if not self.keeps:
            return {}
        return {
            f"{name}:{VALUE}": Piece(
                local(weight.detach()).reshape(-1), self.begin(weight), weight.shape
            )
            for name, weight in names.items()
        }

    @torch.no_grad()
    def set_value(self, weight: Tensor, value: Tensor) -> None:
        """Make this rank's rows those of a whole tensor."""
        rows = rows_of(len(weight), self.place, self.count)
        local(weight.detach()).copy_(value[rows.start : rows.stop])

    @property
    def keeps(self) -> bool:
        """Whether this rank's rows go into checkpoints: those of the first copy do."""
        return self.ranks.rank < self.count

    def begin(self, weight: Tensor) -> int:
        """The first of this rank's elements among those of the weight."""
        return rows_of(len(weight), self.place, self.count).start * (weight.numel() // len(weight))

    def own_part(self, weight: Tensor, value: Tensor, unit: int = 1) -> Tensor:
        """``[n]``, this rank's elements of a whole tensor, of which an element goes with
        ``unit`` of the weight's.
        """
        begin = self.begin(weight)
        end = begin + local(weight.detach()).numel()
        return value.detach().reshape(-1)[-(-begin // unit) : -(-end // unit)]

    def shape_of(self, weight: Tensor, unit: int = 1) -> torch.Size:
        """Of a whole tensor that goes with a weight, an element with ``unit`` of its own: the
        weight's, or ``[n]``.
        """
        return weight.shape if unit == 1 else torch.Size([-(-weight.numel() // unit)])

    @torch.no_grad()
    def reduce(self, parameters: Sequence[Tensor], scalars: Sequence[Tensor]) -> Tensor:
        """As ``Mesh.reduce``, of gradients that FSDP has summed: those of this rank's rows
        become their ``grad``.
        """
        held = tuple(
            parameter.grad is not None and take_used(parameter) for parameter in parameters
        )
        for weight, share in self.shares.items():
            share.grad = None if weight.grad is None or not share.numel() else local(weight.grad)
        square = (
            gradient_norm([x.grad for x in self.shares.values() if x.grad is not None]).square()
            / self.copies
        )
        numbers = torch.stack(
            [*(scalar.float() for scalar in scalars), square.to(scalars[0].device)]
        )
        beside = torch.cat([numbers, self.ranks.held_by(held, numbers.device)])
        dist.all_reduce(beside)
        for scalar, total in zip(scalars, beside):
            scalar.copy_(total)
        self._norm = beside[len(scalars)].sqrt()
        return beside[len(scalars) + 1 :]

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """As ``Mesh.norm``, of the gradients that ``reduce`` was called for last."""
        assert self._norm is not None, "reduce comes first"
        return self._norm

    def bring_gradients(self) -> Iterator[None]:
        """For whoever inspects gradients: each weight's ``grad`` is in shards, as the weight is."""
        yield

    def drop_gradients(self) -> None:
        for weight, share in self.shares.items():
            weight.grad = share.grad = None
            take_used(weight)

    def settle(self) -> None:
        """Weights are gathered from where they are updated: there is nothing to lay or to
        compare.
        """

    def adopt(self) -> None:
        """Whoever writes a weight writes the share."""

    def publish(self) -> None:
        """The next pass gathers what was updated."""

    def take_over(self, weight: Tensor) -> None:
        """The share is the weight."""


def whole_parts(weights: Iterable[Tensor]) -> Iterator[Tensor]:
    """Those of which every rank holds all."""
    return (
        weight
        for weight in weights
        if not isinstance(weight, DTensor) and not getattr(weight, PART, 0)
    )


CODES = "_chronicals_codes"
"""Attribute of such parameters in which scales follow the codes: how many bytes these take."""


def codes_here(weight: Tensor) -> Tensor:
    """What this rank has of a weight, as whole weights hold it: of packed ones the codes,
    without their scales.
    """
    here = local(weight.detach())
    return here if (codes := getattr(weight, CODES, None)) is None else here[:codes]


def divided_among(module: Any) -> int:
    """How many ranks have a part of the frozen weight of a layer; 1 where each has all."""
    among: int = getattr(getattr(module, "weight", None), PART, 1)
    return among


def copies_of(weight: Tensor, ranks: int) -> int:
    """How many copies so many ranks have of a weight that is divided; 0 where it is not, and
    each has all.
    """
    if isinstance(weight, DTensor):
        return ranks // weight.device_mesh["shard"].size()
    among: int = getattr(weight, PART, 0)
    return ranks // among if among else 0


def last_micro_batch(model: Any, last: bool) -> None:
    """Say whether the next backward pass is the last of a step, after which copies of the
    weights add up their sums.
    """
    model.set_requires_all_reduce(last)
