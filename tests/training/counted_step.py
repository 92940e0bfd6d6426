"""What a rank asks of the others and reads from the device in the steps of a real run."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import chronicals
from chronicals.training.session import Session

COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "barrier",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "monitored_barrier",
    "all_gather_single",
    "reduce_scatter_single",
)
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")
"""Methods of a tensor for which a host waits for its card."""

ROOT = Path(chronicals.__file__).parent


class Counted:
    """Of the steps of one run.

    Attributes:
        collectives: of each step, from where it begins to where the next does: names, and how many
            values each sends.
        reads: where in the package tensors were read within steps, each as "package/file method".
    """

    def __init__(self) -> None:
        self.collectives: list[list[tuple[str, int]]] = []
        self.reads = Counter[str]()
        self.buckets = 0
        self._within = False

    @contextmanager
    def counting(self) -> Iterator[Counted]:
        train_once = Session.train_once

        def counted(session: Session, *arguments: Any, **named: Any) -> Any:
            self.buckets = len(getattr(getattr(session.optimizer, "shards", None), "buckets", ()))
            self.collectives.append([])
            self._within = len(self.collectives) > 1  # the first step is looked into by the audit
            try:
                return train_once(session, *arguments, **named)
            finally:
                self._within = False

        with ExitStack() as stack:
            stack.enter_context(patch.object(Session, "train_once", counted))
            for name in filter(
                partial(hasattr, dist), COLLECTIVES
            ):  # some are of later versions of torch
                stack.enter_context(patch.object(dist, name, self._told(name, getattr(dist, name))))
            for name in READS:
                stack.enter_context(
                    patch.object(torch.Tensor, name, self._read(name, getattr(torch.Tensor, name)))
                )
            yield self

    def _told(self, name: str, function: Any) -> Any:
        def told(*arguments: Any, **named: Any) -> Any:
            if self.collectives:
                sizes = [value.numel() for value in arguments if isinstance(value, torch.Tensor)]
                self.collectives[-1].append((name, max(sizes, default=0)))
            return function(*arguments, **named)

        return told

    def _read(self, name: str, function: Any) -> Any:
        def read(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            if self._within:
                self.reads[f"{_caller()} {name}"] += 1
            return function(tensor, *arguments, **named)

        return read


def _caller() -> str:
    """The innermost file of the package that is at work."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if ROOT in path.parents:
            return str(path.relative_to(ROOT))
        frame = frame.f_back
    return "elsewhere"
