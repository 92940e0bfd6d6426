"""Trained weights divided among ranks by rows (FSDP2, ``fully_shard``).

FSDP (Zhao et al., 2023), ZeRO stage 3. A decoder layer is a unit. One collective gathers its
weights before its forward pass and again before its backward pass; its gradients are exchanged
after that and summed in fp32 (``ExchangedSums``). Shards are fp32, 4 bytes a weight, as many as a
bf16 weight with the lower 16 bits of its master. Layers compute with weights cast to bf16. The
embedding, the head and the layers chosen by ``stay_gathered`` are gathered once. Bytes a
micro-batch and rank, for N bf16 weights on W ranks, S of them gathered once: (4 N − 2 S) (W − 1) /
W for weights and 2 N (W − 1) / W for gradients.

With several machines (HSDP) each machine may hold a copy, whose rows its ranks share. Gradient sums
are all-reduced among the copies after the last micro-batch of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from chronicals.distributed.fsdp_extensions import (
    USED,
    ExchangedSums,
    lay_side_by_side,
    sum_evenly,
)
from chronicals.distributed.mesh import Mesh, group_of
from chronicals.distributed.presence import WAITING
from chronicals.distributed.shards import RankShares
from chronicals.kernels.gradient_norm import gradient_norm
from chronicals.models.presentation import AS_FORWARD
from chronicals.models.rows import SHARING_RANKS
from chronicals.saving import Piece

STAYS = "_chronicals_stays"
"""Attribute of a unit: whether it stays gathered from its forward to its backward pass."""

ProductGroups = Sequence[tuple[nn.Module, tuple[str, ...]]]
Read = Callable[[str, Tensor, range], Tensor]
"""Function of a weight's name, the weight (perhaps on the meta device) and a range of rows.

It returns a tensor of the weight's shape of which these rows are filled.
"""


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor; any other tensor is returned as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_divided(weight: Tensor) -> bool:
    """Return whether FSDP has divided the weight among the ranks."""
    return isinstance(weight, DTensor)


def rows_of_rank(rows: int, rank: int, count: int) -> range:
    """Return the rows of a weight that a rank holds, as ``torch.chunk`` cuts them.

    All ranks have the same number of rows, except the last ones, which have fewer or none.
    """
    each = -(-rows // count)
    return range(min(rank * each, rows), min((rank + 1) * each, rows))


def weight_mesh(ranks: Mesh, sharing: int) -> DeviceMesh:
    """Return the device mesh of neighbours that share a copy, ``sharing`` ranks, and of the copies.

    All ranks must call it.
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
    products: ProductGroups,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    read: Read,
) -> int:
    """Divide all weights of a model among the ranks, with only one layer whole at a time.

    Args:
        model: a Hugging Face model, perhaps on the meta device.
        layers: units. All parameters outside of them, embedding and head, are one more unit, which
            stays gathered.
        products: groups of linear layers that are computed as one product.
        mesh: result of ``weight_mesh``.
        dtype: dtype of the gathered weights.
        read: returns the rows of a weight.

    Returns:
        The number of products whose weights are gathered adjacently (``lay_side_by_side``).
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
        # Gradients are summed, not averaged: the loss is divided by the counts of all ranks.
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
    # FSDP's hooks on this method gather weights; the outer method divides them again after a
    # pass without gradients.
    setattr(model, AS_FORWARD, MethodType(lambda _, compute: compute(), model))
    register_fsdp_forward_method(model, AS_FORWARD)
    gathered = getattr(model, AS_FORWARD)

    def as_forward(model: Any, compute: Callable[[], Any]) -> Any:
        result = gathered(compute)
        if not torch.is_grad_enabled():  # no backward pass follows
            divide_again(model)
        return result

    setattr(model, AS_FORWARD, MethodType(as_forward, model))
    return laid


def divide_again(model: nn.Module) -> None:
    """Free all gathered weights, after a forward pass without backward or after an exception.

    After it, weights may be written into the shards.
    """
    for module in model.modules():
        stays = vars(module).get(STAYS)
        if isinstance(module, FSDPModule) and stays is not None:
            _let_stay(module, False)  # in a broken forward pass reshard() skips units that stay
            module.reshard()
            _let_stay(module, stays)


def stay_gathered(layers: Sequence[nn.Module], count: int) -> None:
    """Let the last ``count`` layers stay gathered from forward to backward, and divide the others.

    Call it after ``shard_weights``.
    """
    for index, layer in enumerate(layers):
        _let_stay(layer, index >= len(layers) - count)


def _let_stay(unit: nn.Module, stays: bool) -> None:
    """Set whether a unit stays gathered from its forward to its backward pass."""
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
    """Replace the parameters of a unit by this rank's rows, in tensors of full shape on the device.

    Trained weights are fp32, frozen ones ``dtype``.

    Raises:
        ValueError: a parameter is a scalar.
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
                value = read(
                    names[id(parameter)], parameter, rows_of_rank(len(parameter), place, count)
                )
                kept = torch.float32 if parameter.requires_grad else dtype
                made[id(parameter)] = nn.Parameter(value.to(device, kept), parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]


VALUE = "weight"
"""Name in checkpoints, next to the states, of a weight's values; fp32 if it is trained."""


class WeightShards(RankShares):
    """This rank's rows of trained weights and their summed gradients, used like ``Shards``.

    Args:
        ranks: the ranks of the run.
        weights: the trained weights after ``shard_weights``.

    Attributes:
        shares: weight → this rank's rows, ``[n, ...]``; n may be 0.
    """

    def __init__(self, ranks: Mesh, weights: Sequence[Tensor]):
        super().__init__(ranks, weights)
        self.mesh: DeviceMesh = weights[0].device_mesh  # type: ignore[attr-defined]
        self.place = self.mesh["shard"].get_local_rank()
        self.count = self.mesh["shard"].size()
        self.copies = ranks.count // self.count
        self.keeps = ranks.rank < self.count  # only the first copy's rows are written
        self.shares = {weight: local(weight.detach()) for weight in self.weights}

    def values(self, names: Mapping[str, Tensor]) -> dict[str, Piece]:
        """Return this rank's rows of weights, trained or frozen, as pieces of the whole by name."""
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
        """Copy this rank's rows of a whole tensor into the weight."""
        rows = rows_of_rank(len(weight), self.place, self.count)
        local(weight.detach()).copy_(value[rows.start : rows.stop])

    def begin(self, weight: Tensor) -> int:
        """Return the index of this rank's first element in the flattened weight."""
        return rows_of_rank(len(weight), self.place, self.count).start * (
            weight.numel() // len(weight)
        )

    def own_part(self, weight: Tensor, value: Tensor, unit: int = 1) -> Tensor:
        """Return this rank's elements of a whole tensor, ``[n]``.

        Args:
            weight: a trained weight.
            value: a whole tensor of the weight, or of a state of it.
            unit: number of weight elements for each element of ``value``.
        """
        begin = self.begin(weight)
        end = begin + local(weight.detach()).numel()
        return value.detach().reshape(-1)[-(-begin // unit) : -(-end // unit)]

    @torch.no_grad()
    def reduce(self, parameters: Sequence[Tensor], scalars: Sequence[Tensor]) -> Tensor:
        """Sum scalars over the ranks like ``Mesh.reduce``; FSDP has summed the gradients already.

        The gradients of this rank's rows become the ``grad`` of the shares.
        """
        held = tuple(
            parameter.grad is not None and vars(parameter).pop(USED, False)
            for parameter in parameters
        )
        for weight, share in self.shares.items():
            share.grad = None if weight.grad is None or not share.numel() else local(weight.grad)
        # Every copy has the same sums, and ``add_up`` adds up all copies.
        square = (
            gradient_norm([x.grad for x in self.shares.values() if x.grad is not None]).square()
            / self.copies
        )
        return self.add_up(square, scalars, held)

    def bring_gradients(self) -> Iterator[None]:
        """Yield once: each weight's ``grad`` is there already, sharded like the weight."""
        yield

    def drop_gradients(self) -> None:
        """Set the gradients of weights and shares to None."""
        for weight, share in self.shares.items():
            weight.grad = share.grad = None
            vars(weight).pop(USED, None)

    def settle(self) -> None:
        """Do nothing: weights are gathered from the memory in which they are updated."""

    def adopt(self) -> None:
        """Do nothing: to write a weight is to write its share."""

    def publish(self) -> None:
        """Do nothing: the next pass gathers the updated rows."""

    def take_over(self, weight: Tensor) -> None:
        """Do nothing: the share is the weight's own memory."""


def whole_parts(weights: Iterable[Tensor]) -> Iterator[Tensor]:
    """Return an iterator over the weights that are whole on every rank."""
    return (
        weight
        for weight in weights
        if not isinstance(weight, DTensor) and not getattr(weight, SHARING_RANKS, 0)
    )


CODES = "_chronicals_codes"
"""Attribute of a packed parameter in which scales follow the codes: number of bytes of the codes.
"""


def divided_among(module: Any) -> int:
    """Return the number of ranks that share a layer's frozen weight; 1 if it is not divided."""
    among: int = getattr(getattr(module, "weight", None), SHARING_RANKS, 1)
    return among


def copies_of(weight: Tensor, ranks: int) -> int:
    """Return the number of copies of a divided weight among ``ranks`` ranks; 0 if it is whole."""
    if isinstance(weight, DTensor):
        return ranks // weight.device_mesh["shard"].size()
    among: int = getattr(weight, SHARING_RANKS, 0)
    return ranks // among if among else 0
