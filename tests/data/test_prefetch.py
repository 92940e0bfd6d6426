"""Results come in order, are computed before they are asked for, and no more of them than was
said.
"""

import functools
import threading

import pytest

from chronicals.data.packs.loader import prefetch


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_results_come_in_order_and_so_many_are_asked_for_before():
    taken = []

    def tasks():
        for number in range(9):
            taken.append(number)
            yield functools.partial(int, number)

    results = prefetch(tasks(), 3)
    assert next(results) == 0
    assert taken == [0, 1, 2, 3]
    assert list(results) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert not threads()


def test_an_error_comes_in_the_place_of_its_result():
    results = prefetch([lambda: 1, lambda: 1 // 0, lambda: 2], 2)
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert not threads()


def test_closing_waits_for_the_task_that_runs_and_drops_the_others():
    began = threading.Event()
    go_on = threading.Event()
    done = []

    def slow():
        began.set()
        go_on.wait(10)
        done.append("slow")

    results = prefetch([int, slow, lambda: done.append("dropped")], 2)
    next(results)
    began.wait(10)
    threading.Timer(0.05, go_on.set).start()
    results.close()
    assert done == ["slow"]
    assert not threads()
