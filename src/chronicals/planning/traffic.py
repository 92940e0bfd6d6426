"""Bytes that a rank sends in an optimizer step, counted by running the trainer's collectives.

torch's ``fake`` process group returns from every collective at once, and fake tensors have shapes
but no memory, so one process can act as one rank of a thousand. A ring collective over W ranks
sends (Thakur et al., 2005, section 4):

    reduce-scatter of n bytes   n (W − 1) / W           all-gather to n bytes   n (W − 1) / W
    all-reduce of n bytes       2 n (W − 1) / W         all-to-all of n bytes   n (W − 1) / W
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from chronicals.attention import attend_split
from chronicals.batch import Context
from chronicals.config import ChronicalsConfig
from chronicals.data.packs.dealing import rank_share
from chronicals.data.packs.strategies import SPLIT
from chronicals.distributed import (
    EmbeddingInShards,
    Gathers,
    Mesh,
    Shards,
    Unit,
    can_be_cut,
    frozen_linears,
    why_embedding_stays_whole,
)
from chronicals.memory import decoder_layers
from chronicals.model_shape import ModelShape
from chronicals.models import embedding_table
from chronicals.policies.context_parallel import exchanging
from chronicals.policies.divided_weights import frozen_bytes
from chronicals.policies.facts import DIVIDE_WEIGHTS, GATHERED_TYPES, PRODUCT_TYPES, trains_layers

_NAMES = {
    "_reduce_scatter_base_": "reduce_scatter",
    "_allgather_base_": "all_gather",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
}
"""Names of collectives here, by torch's operator."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends in a step.

    Attributes:
        reduce_scatter: gradients, to the ranks that update them.
        all_gather: updated weights.
        all_reduce: scalars, and gradients if every rank updates all weights.
        attention: heads, or keys and their gradients, among ranks that share packs, as if every
            document were split.
        embedding: ids and rows of a frozen embedding that is divided.
    """

    reduce_scatter: float = 0.0
    all_gather: float = 0.0
    all_reduce: float = 0.0
    attention: float = 0.0
    embedding: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of all collectives."""
        return (
            self.reduce_scatter
            + self.all_gather
            + self.all_reduce
            + self.attention
            + self.embedding
        )


def traffic(
    model: Any,
    config: ChronicalsConfig,
    ranks: int,
    in_backward: bool,
    recomputed: int = 0,
    cards: int | None = None,
    stay: int = 0,
) -> Traffic:
    """Return the bytes sent by rank 0, whose shares are the largest.

    Args:
        model: model with its adapters; only its shapes are read, so it may be on the meta device.
        config: the run's configuration.
        ranks: number of processes.
        in_backward: gradients are summed in the backward pass of each micro-batch.
        recomputed: number of layers that are computed twice.
        cards: GPUs of a machine; by default all are in one.
        stay: number of layers that stay gathered between their passes.
    """
    if ranks == 1:
        return Traffic()
    weights = [p for p in model.parameters() if p.requires_grad]
    micro_batches = config.gradient_accumulation_steps
    context = config.context_parallel
    found = dict.fromkeys(("reduce_scatter", "all_gather", "all_reduce"), 0.0)
    if config.sharding == DIVIDE_WEIGHTS:
        among = config.sharding_ranks or ranks
        sent = _of_passes(model, config, among, stay)
        found = {name: sent[name] for name in found}
        found["reduce_scatter"] += sent["all_to_all"]
        if not trains_layers(model) and not why_embedding_stays_whole(model, among):
            tokens = config.batch_size * config.max_seq_length // context
            with counted_among(among) as sent:
                rows, width = embedding_table(model).shape
                table = nn.Embedding(rows, width, dtype=PRODUCT_TYPES[config.mixed_precision])
                divided = EmbeddingInShards(table, 0, among, torch.device("cpu"))
                divided.equal_lengths = True
                divided(torch.zeros(tokens, dtype=torch.int64))
            found["embedding"] = micro_batches * sum(sent.values())
    if config.sharding != DIVIDE_WEIGHTS or not trains_layers(model):
        with counted_among(ranks) as sent:
            _sum_and_update(weights, config, ranks, micro_batches if in_backward else 1)
        found |= {
            name: found[name] + sent[name]
            for name in ("reduce_scatter", "all_gather", "all_reduce")
        }
    elif among < ranks:
        with counted_among(ranks // among) as sent:
            dist.all_reduce(torch.empty(-(-sum(p.numel() for p in weights) // among)))
        found["all_reduce"] += sent["all_reduce"]
    if context > 1:
        forward, backward = _of_attention(model, config, context, cards or context)
        layers = ModelShape.of(model.config).layers
        found["attention"] = micro_batches * (forward * (layers + recomputed) + backward * layers)
    return Traffic(**found)


def gathered_in_passes(
    model: Any, config: ChronicalsConfig, ranks: int, stay: int = 0
) -> tuple[float, float]:
    """Return bytes of divided weights that a rank gathers in forward and in backward passes.

    They are those of a step. Adapters are whole on every rank and gathered after their update, so they count as
    ``all_gather``.

    Args:
        model: as for ``traffic``.
        config: as for ``traffic``.
        ranks: as for ``traffic``.
        stay: as for ``traffic``.
    """
    among = config.sharding_ranks or ranks
    forward = _of_passes(model, config, among, len(decoder_layers(model)))["all_gather"]
    return forward, _of_passes(model, config, among, stay)["all_gather"] - forward


def _of_passes(model: Any, config: ChronicalsConfig, among: int, stay: int) -> dict[str, float]:
    """Return the bytes of each collective of a step with weights divided among ``among`` ranks.

    In every micro-batch, layers are gathered for both passes, but only once if they stay gathered,
    like all weights outside of layers; gradients of trained weights are summed.
    """
    micro_batches = config.gradient_accumulation_steps
    with counted_among(among) as sent:
        if not trains_layers(model):
            _gather_frozen(model, config, among, micro_batches, stay)
            return sent
        dtype = GATHERED_TYPES[config.mixed_precision]
        units = [list(layer.parameters()) for layer in decoder_layers(model)]
        inside = {id(p) for unit in units for p in unit}
        rest = [p for p in model.parameters() if id(p) not in inside]
        gathers = [1 if i >= len(units) - stay else 2 for i in range(len(units))]
        for unit, times in zip([*units, rest], [*gathers, 1]):
            held = sum(-(-len(p) // among) * (p.numel() // len(p)) for p in unit)
            trained = sum(
                -(-len(p) // among) * (p.numel() // len(p)) for p in unit if p.requires_grad
            )
            for _ in range(times * micro_batches):
                dist.all_gather_into_tensor(
                    torch.empty(held * among, dtype=dtype), torch.empty(held, dtype=dtype)
                )
            for _ in range(micro_batches):
                if dtype == torch.float32:
                    dist.reduce_scatter_tensor(torch.empty(trained), torch.empty(trained * among))
                else:
                    dist.all_to_all_single(
                        torch.empty(trained * among, dtype=dtype),
                        torch.empty(trained * among, dtype=dtype),
                    )
    return sent


def _sum_and_update(
    weights: Sequence[Tensor], config: ChronicalsConfig, ranks: int, times: int
) -> None:
    """Sum gradients ``times`` times, and send the updated weights to all ranks."""
    dtype = (
        torch.bfloat16
        if config.mixed_precision == "bf16" and not config.use_lora
        else torch.float32
    )
    mesh = Mesh(0, ranks)
    own = [torch.nn.Parameter(torch.empty(weight.shape, dtype=dtype)) for weight in weights]
    for weight in own:
        weight.grad_dtype = torch.float32
        weight.grad = torch.empty(weight.shape, dtype=torch.float32)
    if config.sharding == "none":
        mesh.reduce(own, [torch.ones(())])
        return
    shards = Shards(mesh, own)
    shards.lay()
    for time in range(times):
        for bucket in shards.buckets:
            shards.scatter(bucket, add=time > 0)
    shards.finish(own, [torch.ones(())], set(own))
    shards.publish()


def _gather_frozen(
    model: Any, config: ChronicalsConfig, among: int, micro_batches: int, stay: int
) -> None:
    """Gather the frozen weights of decoder layers for both passes of every micro-batch.

    The backward pass does not gather layers that stay, nor the last two, which are still in the
    buffers.
    """
    itemsize = PRODUCT_TYPES[config.mixed_precision].itemsize
    gathers = Gathers(0, among)
    for layer in decoder_layers(model):
        cut = [linear for _, linear in frozen_linears([layer]) if can_be_cut(linear, among)]
        if cut:
            size = sum(frozen_bytes(linear, itemsize) for linear in cut) // among
            unit = Unit(len(gathers.units), gathers)
            unit.own = torch.empty(size, dtype=torch.uint8)
            gathers.units.append(unit)
    for _ in range(micro_batches):
        with gathers.passing():
            x = torch.zeros((), requires_grad=True)
            for index, unit in enumerate(gathers.units):
                x = _Asking.apply(x, unit, index < len(gathers.units) - stay)
            x.backward()


class _Asking(torch.autograd.Function):
    """Product that gathers a layer's weights in the forward pass.

    It may gather them again in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: Unit, again: bool) -> Tensor:
        ctx.unit = unit
        ctx.again = again
        unit.gathers.of(unit)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        if ctx.again:
            ctx.unit.gathers.of(ctx.unit)
        return dy, None, None


def _of_attention(
    model: Any, config: ChronicalsConfig, context: int, cards: int
) -> tuple[float, float]:
    """Return the bytes of one layer for a micro-batch of one document: forward and backward.

    Within a machine heads are exchanged if they can be divided.
    """
    shape = ModelShape.of(model.config)
    tokens = config.batch_size * config.max_seq_length
    machines = [str(rank // cards) for rank in range(context)]
    inner = config.context_heads or exchanging(machines, context, shape.heads, shape.kv_heads)
    dtype = torch.float32 if config.mixed_precision == "fp32" else torch.bfloat16
    with counted_among(context) as sent:
        groups = (
            dist.new_group(list(range(0, end, by))) for end, by in ((inner, 1), (context, inner))
        )
        share = rank_share(
            np.array([0, tokens]), np.array([SPLIT]), Context(0, context, inner, *groups)
        )
        q, k, v = (
            torch.empty(len(share.rows), n, shape.head_dim, dtype=dtype, requires_grad=True)
            for n in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        assert share.split is not None
        out = attend_split(lambda q, k, v, *_: q + (k.sum() + v.sum()), q, k, v, share.split)
        forward = sum(sent.values())
        out.sum().backward()
    return forward, sum(sent.values()) - forward


@contextmanager
def counted_among(ranks: int) -> Iterator[dict[str, float]]:
    """Context manager in which this process acts as rank 0 of ``ranks`` and sent bytes are summed.

    Tensors are fake: they have no memory.

    Raises:
        RuntimeError: this process belongs to a process group already.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("this process trains with others; plan in a process of its own")
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with warnings.catch_warnings(), FakeTensorMode(), _Counted() as counting:
            warnings.filterwarnings(
                "ignore", "`torch.distributed", FutureWarning
            )  # two collectives have new names
            warnings.filterwarnings(
                "ignore", "Accessing the data pointer of FakeTensor"
            )  # `Shards` compares pointers to notice writes by other code
            yield counting.sent
    finally:
        dist.destroy_process_group()


class _Counted(TorchDispatchMode):
    """Dispatch mode that counts sent bytes.

    Attributes:
        sent: bytes by collective.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent = dict.fromkeys(_NAMES.values(), 0.0)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function.namespace == "c10d":
            name = _NAMES[function.overloadpacket.__name__]
            leaves = torch.utils._pytree.tree_leaves(args)
            sizes = [x.nbytes for x in leaves if isinstance(x, Tensor)]
            groups = [
                dist.ProcessGroup.unbox(x)
                for x in leaves
                if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())
            ]
            ranks = len(dist.get_process_group_ranks(groups[0]))
            self.sent[name] += SENT_BYTES[name](sizes) * (ranks - 1) / ranks
        return function(*args, **(kwargs or {}))


SENT_BYTES: dict[str, Callable[[list[int]], int]] = {
    "reduce_scatter": max,
    "all_gather": max,
    "all_to_all": max,
    "all_reduce": lambda sizes: 2 * sum(sizes),
}
"""Sent bytes before the factor (W - 1) / W, from the sizes of a collective's tensors.

That is its input or its output, the larger one; for an all-reduce both directions count.
"""
