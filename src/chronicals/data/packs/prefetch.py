"""Prefetching: a thread computes results before they are asked for."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def prefetch(tasks: Iterable[Callable[[], Result]], depth: int) -> Generator[Result, None, None]:
    """Yield the results of ``tasks`` in their order.

    One thread calls the tasks; they are taken from their iterable in the consumer's thread. Closing
    the iterator waits for the task that runs and drops the others.

    Args:
        depth: results that are computed, or being computed, before they are asked for.

    Raises:
        Exception: what a task raised, in the place of its result.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
    waiting: deque[Future[Result]] = deque()
    try:
        for task in tasks:
            waiting.append(thread.submit(task))
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        # An interpreter that ends has already joined the thread, and its modules may be gone.
        if not sys.is_finalizing():
            thread.shutdown(cancel_futures=True)
