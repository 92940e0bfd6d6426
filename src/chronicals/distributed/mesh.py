"""The processes that train together, by what each has of the work.

Every rank holds the model, and gradients are summed over all once a step. There are two axes: ranks
that are next to each other on the context axis have parts of the same packs; along the data axis
packs differ.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from chronicals.batch import Context
from chronicals.config import LONGEST_TIMEOUT, ConfigurationError
from chronicals.distributed.buckets import sum_over_ranks
from chronicals.distributed.launch import Launch
from chronicals.distributed.presence import WAITING, Presence
from chronicals.kernels.gradient_norm import gradient_norm

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

PART = 1 << 22
"""Characters, of one byte each in JSON, that are sent at a time."""

MEETING = timedelta(minutes=30)
"""How long processes wait until all that were started are there."""

PATIENCE = timedelta(seconds=LONGEST_TIMEOUT)
"""What torch waits for a collective: longer than ``rank_timeout``, after which ``RankWatch``
ends all and names them.
"""

PATTERNS = 8
"""Of parameters with a gradient: how many are kept on the device."""

_announcements = itertools.count()
"""Numbers of what the first rank has done, the same on all ranks, which take part in the same
order.
"""


@dataclass(frozen=True)
class Mesh:
    """This process among those that train together.

    Attributes:
        rank, count: the place of this process among all, and their number.
        local_rank: this process on its machine, and so its card.
        context: of those that share its packs; None where it has packs of its own.
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
        """Join the processes that were started with this one (nccl with cards, else gloo); alone
        without any.

        Raises:
            ConfigurationError: several were started and cannot find each other; the message names
                the variable.
        """
        launch = Launch.found()
        if launch is None and not dist.is_initialized():
            return cls()
        os.environ.setdefault(
            "NCCL_GRAPH_REGISTER", "0"
        )  # ranks would meet in each capture, where one may fail alone
        local_rank = launch.local_rank if launch else None
        if local_rank is None:
            local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if torch.cuda.is_available():
            torch.cuda.set_device(card_of(local_rank))
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
        """The same, of which so many neighbours share each pack. All ranks call it alike.

        Args:
            inner: how many of these, a divisor, exchange heads; all by default.

        Raises:
            ConfigurationError: they cannot be divided so.
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
        inner_group = outer_group = None  # every rank takes part in making every group
        for first in range(0, self.count, number):
            for begin in range(first, first + number, inner) if inner > 1 else ():
                group = group_of(ranks := list(range(begin, begin + inner)))
                inner_group = group if self.rank in ranks else inner_group
            for begin in range(first, first + inner) if inner < number else ():
                group = group_of(ranks := list(range(begin, first + number, inner)))
                outer_group = group if self.rank in ranks else outer_group
        return replace(
            self, context=Context(self.rank % number, number, inner, inner_group, outer_group)
        )

    @property
    def data_rank(self) -> int:
        """The place on the data axis: ranks with the same have the same packs."""
        return self.rank // (self.context.count if self.context else 1)

    @property
    def data_count(self) -> int:
        """How many take different packs."""
        return self.count // (self.context.count if self.context else 1)

    @property
    def writer(self) -> bool:
        """Whether this process writes files, shows progress and decides for all."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Where this process computes: on its own card, the current one if it is alone; on the
        CPU without cards.
        """
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device(
            "cuda", card_of(self.local_rank) if self.count > 1 else torch.cuda.current_device()
        )

    @torch.no_grad()
    def same_weights(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the tensors of the first."""
        if self.count > 1:
            for tensor in tensors:
                sent = tensor.data.contiguous()
                with WAITING.within():
                    dist.broadcast(
                        sent.reshape(-1).view(torch.uint8), src=0
                    )  # not every type can be sent as it is
                if sent.data_ptr() != tensor.data_ptr():
                    tensor.data.copy_(sent)
            with WAITING.within():
                self._arrive()

    @torch.no_grad()
    def reduce(self, parameters: Sequence[Tensor], scalars: Sequence[Tensor]) -> Tensor | None:
        """Replace every gradient, and every scalar, by the sum over the ranks; a rank without a
        gradient adds zeros.

        Returns:
            fp32 ``[len(parameters)]`` on the device: how many ranks had a gradient of each; None
            where this one is alone.
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
        """fp32, 1 for each parameter that has a gradient here; the last few are kept, since
        steps take turns with few.
        """
        found = self._patterns.pop(pattern, None)
        if found is None:
            on_card = device.type == "cuda"  # from pinned memory, which the host does not wait for
            found = torch.tensor(pattern, dtype=torch.float32, pin_memory=on_card).to(
                device, non_blocking=on_card
            )
        self._patterns[pattern] = found
        if len(self._patterns) > PATTERNS:
            del self._patterns[next(iter(self._patterns))]
        return found

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm of all gradients together, an fp32 scalar on their device, without waiting for
        it.

        ``reduce`` has given every rank all of the sums, so each finds the same norm by itself.
        """
        return gradient_norm(gradients)

    def sum(self, tensor: Tensor) -> Tensor:
        """The tensor summed over the ranks, in place."""
        if self.count > 1:
            with WAITING.within():
                dist.all_reduce(tensor)
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, alike in shape and type, in the order of the ranks, where
        this one is.
        """
        if self.count == 1:
            return [tensor]
        sent = tensor.to(self._device_sent_from)
        found = [torch.empty_like(sent) for _ in range(self.count)]
        with WAITING.within():
            dist.all_gather(found, sent)
            return [other.to(tensor.device) for other in found]

    def gather_values(self, value: Any) -> list[Any]:
        """The values (plain JSON) of all ranks, in their order."""
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

    def writer_does(self, work: Callable[[], Result], error: type[Exception]) -> Result:
        """Let the first rank do something while the others wait, however long; its result (plain
        JSON) on all of them.

        They wait at the store over which the processes found each other, so no collective of the
        device times out and signals are heard.

        Raises:
            Exception: what ``work`` raised, on the first rank; ``error`` with its words on the
                others, which do not wait on.
        """
        if self.count == 1:
            return work()
        key = f"chronicals/{next(_announcements)}"
        store = dist.distributed_c10d._get_default_store()
        if not self.writer:
            with WAITING.within():
                result, words = json.loads(_heard(store, key))
            if words is not None:
                raise error(f"rank 0 stopped: {words}")
            return result
        try:
            result = work()
        except BaseException as failure:
            _say(store, key, json.dumps([None, f"{type(failure).__name__}: {failure}"]))
            raise
        _say(store, key, json.dumps([result, None]))
        return result

    def _arrive(self) -> None:
        """Wait for what nccl was asked for; gloo is done when it returns."""
        if self._device_sent_from.type == "cuda":
            torch.cuda.current_stream().synchronize()

    @property
    def _device_sent_from(self) -> torch.device:
        """Where tensors must be to be sent; gloo sends from host memory, also where there are
        cards.
        """
        return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _join(launch: Launch) -> None:
    """Make the process group of all that were started (nccl with cards, else gloo).

    Raises:
        ConfigurationError: not all come.
    """
    keys = [f"chronicals/here/{rank}" for rank in range(launch.count)]
    try:
        store, *_ = next(dist.rendezvous("env://", launch.rank, launch.count, timeout=MEETING))
        store.set(keys[launch.rank], "")
        store.wait(keys, MEETING)
    except dist.DistError as error:
        raise ConfigurationError(
            f"{launch.told_by}: not all of the {launch.count} processes that train together came "
            "to "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within "
            f"{MEETING.total_seconds():g} seconds ({error}); "
            "look at what each of them wrote"
        ) from error
    store.set_timeout(PATIENCE)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend, store=store, rank=launch.rank, world_size=launch.count, timeout=PATIENCE
    )


def group_of(ranks: Sequence[int], backend: str | None = None) -> Any:
    """A process group of some ranks, of the default backend unless named; all ranks make every
    group, in the same order.
    """
    with WAITING.within():
        return dist.new_group(list(ranks), timeout=PATIENCE, backend=backend)


def _say(store: dist.Store, key: str, text: str) -> None:
    """Set a text for whoever asks by ``_heard``; a long one in parts, for the store refuses
    values of more than 8 MiB.
    """
    parts = [text[begin : begin + PART] for begin in range(0, len(text), PART)]
    for number, part in enumerate(parts):
        store.set(f"{key}/{number}", part)
    store.set(key, str(len(parts)))


def _heard(store: dist.Store, key: str) -> str:
    return "".join(
        store.get(f"{key}/{number}").decode() for number in range(int(awaited(store, key)))
    )


def awaited(store: dist.Store, key: str) -> bytes:
    """What another rank sets, asked for more and more rarely; other threads may use the store
    meanwhile.
    """
    pause = 0.001
    while not store.check([key]):
        time.sleep(pause)
        pause = min(1.5 * pause, 0.25)
    return store.get(key)


def card_of(local_rank: int) -> int:
    """The card of a process: its own, or the only one that it is shown."""
    return local_rank % torch.cuda.device_count()
