"""The ranks of a run and their collectives, on two axes: data and context.

Ranks that are neighbours on the context axis hold parts of the same packs. Ranks on the data axis
have different packs. Gradients are summed over all ranks once a step.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from chronicals.batch import Context
from chronicals.config import LONGEST_TIMEOUT, ConfigurationError
from chronicals.distributed.launch import Launch
from chronicals.distributed.presence import WAITING, Presence
from chronicals.kernels.gradient_norm import gradient_norm

logger = logging.getLogger(__name__)

WriterResult = TypeVar("WriterResult")

STORE_PART = 1 << 22
"""Maximum characters of one value in the store; JSON is ASCII, so this is bytes too."""

MEETING_TIMEOUT = timedelta(minutes=30)
"""Time that processes wait until all that were launched have arrived."""

COLLECTIVE_TIMEOUT = timedelta(seconds=LONGEST_TIMEOUT)
"""Timeout of torch's collectives.

It is longer than ``rank_timeout``, after which ``RankWatch`` ends all processes and names the one
that hangs.
"""

CACHED_PATTERNS = 8
"""Number of patterns of parameters with a gradient that are cached on the device."""

BUCKET = 1 << 26
"""Maximum bytes of a bucket."""

IN_FLIGHT = 3
"""Maximum number of buckets in memory at a time."""

_announcements = itertools.count()
"""Counter for the keys of ``writer_does``; equal on all ranks, which call it in the same order."""


@dataclass(frozen=True)
class Mesh:
    """This rank among all ranks of the run.

    Attributes:
        rank, count: global rank and world size.
        local_rank: rank on this machine, which selects the GPU.
        context: the ranks that share this rank's packs; None if it shares them with nobody.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    context: Context | None = None
    _patterns: dict[tuple[bool, ...], Tensor] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def current(cls) -> Mesh:
        """Join the processes that were launched together (nccl with GPUs, else gloo).

        A process that was launched by itself gets a mesh of one rank.

        Raises:
            ConfigurationError: several processes were launched but cannot find each other; the
                message names the variable.
        """
        launch = Launch.found()
        if launch is None and not dist.is_initialized():
            return cls()
        os.environ.setdefault(
            "NCCL_GRAPH_REGISTER", "0"
        )  # registration synchronises ranks in each graph capture, which may fail on one rank only
        local_rank = launch.local_rank if launch else None
        if local_rank is None:
            local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if torch.cuda.is_available():
            # A process may see only its own GPU, which then has index 0.
            torch.cuda.set_device(local_rank % torch.cuda.device_count())
        if launch is not None and not dist.is_initialized():
            launch.require_meeting_point()
            logger.info(
                "%s: waiting at %s:%s for the %d processes that train together",
                launch.told_by,
                os.environ["MASTER_ADDR"],
                os.environ["MASTER_PORT"],
                launch.count,
            )
            _join(launch)
        Presence.begin(dist.get_rank(), dist.get_world_size())
        return cls(dist.get_rank(), dist.get_world_size(), local_rank)

    def sharing_packs(self, number: int, inner: int | None = None) -> Mesh:
        """Return this mesh with neighbouring ranks that share each pack; all ranks must call it.

        Args:
            number: number of ranks that share a pack.
            inner: number of these ranks, a divisor of ``number``, that exchange heads; by default
                all.

        Raises:
            ConfigurationError: the world size or ``number`` is not divisible so.
        """
        inner = inner or number
        if (number, inner) == (
            (self.context.count, self.context.inner) if self.context else (1, 1)
        ):
            return self
        if number == 1:
            return replace(self, context=None)
        if self.count % number:
            raise ConfigurationError(
                f"context_parallel={number}: {self.count} processes cannot share packs {number} "
                f"by {number}; start "
                f"a multiple of {number} (--nproc {number}), or take a divisor"
            )
        if number % inner:
            raise ConfigurationError(
                f"context_heads={inner}: {number} processes that share packs cannot exchange "
                f"heads {inner} by {inner}; take a "
                f"divisor of {number}"
            )
        # Every rank takes part in making every group.
        inner_group = None
        outer_group = None
        for first in range(0, self.count, number):
            for begin in range(first, first + number, inner) if inner > 1 else ():
                ranks = range(begin, begin + inner)
                group = group_of(ranks)
                inner_group = group if self.rank in ranks else inner_group
            for begin in range(first, first + inner) if inner < number else ():
                ranks = range(begin, first + number, inner)
                group = group_of(ranks)
                outer_group = group if self.rank in ranks else outer_group
        return replace(
            self, context=Context(self.rank % number, number, inner, inner_group, outer_group)
        )

    @property
    def data_rank(self) -> int:
        """The coordinate on the data axis; ranks with the same coordinate have the same packs."""
        return self.rank // (self.context.count if self.context else 1)

    @property
    def data_count(self) -> int:
        """The size of the data axis: the number of ranks that have different packs."""
        return self.count // (self.context.count if self.context else 1)

    @property
    def writer(self) -> bool:
        """True on rank 0, which writes files, shows progress and decides for all ranks."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """The device of this rank: its GPU, the current GPU if it is the only rank, or the CPU."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        if self.count == 1:
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())

    @torch.no_grad()
    def same_weights(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors of every rank by those of rank 0."""
        if self.count > 1:
            for tensor in tensors:
                sent = tensor.data.contiguous()
                with WAITING.within():
                    dist.broadcast(
                        sent.reshape(-1).view(torch.uint8), src=0
                    )  # as bytes, since the backends do not support every dtype
                if sent.data_ptr() != tensor.data_ptr():
                    tensor.data.copy_(sent)
            with WAITING.within():
                # Collectives of nccl may still run; those of gloo end before the call returns.
                if dist.get_backend() == "nccl":
                    torch.cuda.current_stream().synchronize()

    @torch.no_grad()
    def reduce(self, parameters: Sequence[Tensor], scalars: Sequence[Tensor]) -> Tensor | None:
        """Replace every gradient and every scalar by its sum over the ranks, in place.

        A rank without a gradient adds zeros.

        Returns:
            fp32 ``[len(parameters)]`` on the device: the number of ranks that had a gradient of
                each parameter. None for one rank.
        """
        if self.count == 1:
            return None
        numbers = torch.stack([scalar.float() for scalar in scalars])
        held = tuple(parameter.grad is not None for parameter in parameters)
        beside = torch.cat([numbers, self.held_by(held, numbers.device)])
        known = dist.all_reduce(beside, async_op=True)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        sum_over_ranks([parameter.grad for parameter in parameters if parameter.grad is not None])
        known.wait()
        for scalar, total in zip(scalars, beside):
            scalar.copy_(total)
        return beside[len(scalars) :]

    def held_by(self, pattern: tuple[bool, ...], device: torch.device) -> Tensor:
        """Return 1 for each parameter that has a gradient here, fp32 ``[len(pattern)]``, on the device.

        The last ``CACHED_PATTERNS`` results are cached, since steps alternate between few patterns.
        """
        found = self._patterns.pop(pattern, None)
        if found is None:
            on_card = device.type == "cuda"  # from pinned memory, so that the host does not wait
            found = torch.tensor(pattern, dtype=torch.float32, pin_memory=on_card).to(
                device, non_blocking=on_card
            )
        self._patterns[pattern] = found
        if len(self._patterns) > CACHED_PATTERNS:
            del self._patterns[next(iter(self._patterns))]
        return found

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of all gradients together, an fp32 scalar on their device.

        The host does not wait for it. After ``reduce`` all ranks have the same sums, so each
        computes the same norm without communication.
        """
        return gradient_norm(gradients)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place, and return it."""
        if self.count > 1:
            with WAITING.within():
                dist.all_reduce(tensor)
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, by rank, on the device of ``tensor``.

        Shape and dtype must be the same on all ranks.
        """
        if self.count == 1:
            return [tensor]
        # gloo takes tensors of the CPU, even where there are GPUs.
        sent = tensor.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        found = [torch.empty_like(sent) for _ in range(self.count)]
        with WAITING.within():
            dist.all_gather(found, sent)
            return [other.to(tensor.device) for other in found]

    def gather_values(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank; a value is plain JSON."""
        if self.count == 1:
            return [value]
        content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [int(length) for length in self.gather(torch.tensor(len(content)))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(content)] = content
        return [
            json.loads(other[:length].numpy().tobytes())
            for other, length in zip(self.gather(padded), lengths)
        ]

    def writer_does(self, work: Callable[[], WriterResult], error: type[Exception]) -> WriterResult:
        """Run ``work`` on rank 0 and return its result (plain JSON) on all ranks.

        The other ranks wait for as long as it takes.

        Raises:
            Exception: on rank 0 what ``work`` raised; on the others ``error`` with its message.
        """
        if self.count == 1:
            return work()
        key = f"chronicals/{next(_announcements)}"
        # The store instead of a collective: nothing times out, and signals are still handled.
        store = dist.distributed_c10d._get_default_store()
        if not self.writer:
            with WAITING.within():
                count = int(awaited(store, key))
                texts = [store.get(f"{key}/{number}").decode() for number in range(count)]
            result, words = json.loads("".join(texts))
            if words is not None:
                raise error(f"rank 0 stopped: {words}")
            return result
        words = None
        result = None
        try:
            result = work()
            return result
        except BaseException as failure:
            words = f"{type(failure).__name__}: {failure}"
            raise
        finally:
            # In parts, and last their number: the store refuses values above 8 MiB.
            text = json.dumps([result, words])
            parts = [text[begin : begin + STORE_PART] for begin in range(0, len(text), STORE_PART)]
            for number, part in enumerate(parts):
                store.set(f"{key}/{number}", part)
            store.set(key, str(len(parts)))


def _join(launch: Launch) -> None:
    """Create the process group of all processes that were launched (nccl with GPUs, else gloo).

    Raises:
        ConfigurationError: not all of them arrive within ``MEETING_TIMEOUT``.
    """
    keys = [f"chronicals/here/{rank}" for rank in range(launch.count)]
    try:
        store, *_ = next(
            dist.rendezvous("env://", launch.rank, launch.count, timeout=MEETING_TIMEOUT)
        )
        store.set(keys[launch.rank], "")
        store.wait(keys, MEETING_TIMEOUT)
    except dist.DistError as error:
        raise ConfigurationError(
            f"{launch.told_by}: not all of the {launch.count} processes that train together came "
            "to "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within "
            f"{MEETING_TIMEOUT.total_seconds():g} seconds ({error}); "
            "look at what each of them wrote"
        ) from error
    store.set_timeout(COLLECTIVE_TIMEOUT)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend, store=store, rank=launch.rank, world_size=launch.count, timeout=COLLECTIVE_TIMEOUT
    )


def group_of(ranks: Sequence[int], backend: str | None = None) -> Any:
    """Return a process group of some ranks; all ranks must create every group, in the same order.

    Args:
        ranks: ranks of the group.
        backend: the default group's backend if None.
    """
    with WAITING.within():
        return dist.new_group(list(ranks), timeout=COLLECTIVE_TIMEOUT, backend=backend)


def on_each_machine(ranks: Mesh) -> int:
    """Return the number of ranks on each machine; all ranks must call it and get the same result.

    This is LOCAL_WORLD_SIZE if it is set and equal on all ranks (torchrun sets it; srun and mpirun
    do not), else it follows from the host names. If machines have different numbers of ranks, or
    the ranks of a machine are not consecutive, all ranks count as one machine.
    """
    told = ranks.gather_values([os.environ.get("LOCAL_WORLD_SIZE"), socket.gethostname()])
    size = told[0][0]
    names = [name for _, name in told]
    if size is not None and all(other == size for other, _ in told):
        return int(size)
    sizes = [len(list(neighbours)) for _, neighbours in itertools.groupby(names)]
    if len(set(sizes)) == 1 and len(sizes) == len(set(names)):
        return sizes[0]
    if ranks.writer:
        logger.info(
            "%d machines have %s processes in turn: all are taken for neighbours",
            len(set(names)),
            sizes,
        )
    return ranks.count


class HostExchange:
    """All-gather of a few integers over gloo, from host memory.

    All ranks must create it and call it in the same order. A call takes 0.24 ms for 2 ranks on a
    machine of 2 cores.
    """

    def __init__(self, ranks: Mesh):
        self.count = ranks.count
        self._group = group_of(range(ranks.count), "gloo")

    def __call__(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all ranks, by rank; every rank gives equally many."""
        own = torch.tensor(numbers, dtype=torch.int64)
        gathered = [torch.empty_like(own) for _ in range(self.count)]
        with WAITING.within():
            dist.all_gather(gathered, own, group=self._group)
        return [other.tolist() for other in gathered]

    def close(self) -> None:
        """Destroy the process group; all ranks must call it."""
        dist.destroy_process_group(self._group)


def buckets(
    tensors: Sequence[Tensor], needed: Sequence[int], size: int = BUCKET
) -> list[list[Tensor]]:
    """Group tensors into buckets, in order: neighbours of one dtype, at most ``size`` bytes each.

    A tensor that needs more than ``size`` has a bucket of its own.

    Args:
        tensors: gradients, or weights whose gradients travel together.
        needed: bytes of each in a bucket.
        size: maximum bytes of a bucket.
    """
    found = list[list[Tensor]]()
    room = 0
    for tensor, own in zip(tensors, needed):
        if not found or own > room or tensor.dtype != found[-1][0].dtype:
            found.append([])
            room = size
        found[-1].append(tensor)
        room -= own
    return found


@torch.no_grad()
def sum_over_ranks(gradients: Sequence[Tensor], size: int = BUCKET) -> None:
    """Replace every gradient by its sum over the ranks, in stream order and in few collectives.

    Every collective costs a launch, and a model with adapters has hundreds of small gradients.

    Args:
        gradients: the same number, order, shapes and dtypes on all ranks.
        size: maximum bytes of a bucket.
    """
    waiting = deque(buckets(gradients, [gradient.nbytes for gradient in gradients], size))
    flying: deque[tuple[list[Tensor], Tensor, dist.Work]] = deque()
    while waiting or flying:
        if waiting and len(flying) < IN_FLIGHT:
            bucket = waiting.popleft()
            # A bucket costs one copy in and one copy out at memory bandwidth, which is many times
            # the bandwidth between GPUs. A gradient by itself is summed in place.
            alone = len(bucket) == 1 and bucket[0].is_contiguous()
            flat = bucket[0] if alone else torch.cat([gradient.reshape(-1) for gradient in bucket])
            flying.append(([] if alone else bucket, flat, dist.all_reduce(flat, async_op=True)))
            continue
        bucket, flat, work = flying.popleft()
        work.wait()
        if bucket:
            sums = flat.split([gradient.numel() for gradient in bucket])
            torch._foreach_copy_(
                bucket, [part.view(gradient.shape) for part, gradient in zip(sums, bucket)]
            )


def awaited(store: dist.Store, key: str) -> bytes:
    """Wait until another rank sets a key of the store, and return its value.

    Polls with growing pauses of up to 0.25 s, so that other threads can use the store meanwhile.
    """
    pause = 0.001
    while not store.check([key]):
        time.sleep(pause)
        pause = min(1.5 * pause, 0.25)
    return store.get(key)
