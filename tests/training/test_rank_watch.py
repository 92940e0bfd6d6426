"""Of processes that train together none waits for ever: all end within seconds and say which was
the first, and why.
"""

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import two_processes
from chronicals.distributed import RankWatch, presence, watch
from chronicals.training import TrainingError
from chronicals.training.run.callbacks import read_metrics
from chronicals.training.run.checkpoint import check_checkpoint, checkpoints
from chronicals.training.step.metrics import DeviceMoment, PendingMetrics

pytestmark = [pytest.mark.of_file(4), pytest.mark.slow]

HERE = Path(__file__).parent

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="both would compute on one card")


SOON = 60.0
"""Seconds in which both have ended; on a loaded machine, where the first alone takes a few to
write what it ends with.
"""


def ended(folder, how):
    """Exit codes and last words of two processes, which end soon after what happened."""
    codes, words = two_processes.run(str(HERE / "stopping_ranks.py"), folder, how, seconds=200)
    assert time.time() - float((folder / "happened").read_text()) < SOON
    return codes, words


def steps_of(folder):
    return [
        line["step"] for line in read_metrics(folder / "run" / "metrics.jsonl") if "loss" in line
    ]


@on_cpu
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("raises", 1, "rank 1 stopped: ValueError: boom"),
        ("hangs", 1, "rank 1 has been in step 2 for "),
        ("killed", -9, "another process is gone: "),
        ("raises while evaluating", 1, "rank 1 stopped: ValueError: boom"),
        ("hangs while evaluating", 1, "rank 1 has been evaluating after step 1 for "),
    ],
)
def test_all_end_with_the_first(how, code, said, tmp_path):
    codes, words = ended(tmp_path, how)
    assert codes == [1, code]
    assert said in words[0], words[0][-2000:]
    if how.startswith("hangs"):
        late = "evaluating after step 1" if how.endswith("evaluating") else "a step"
        assert all(f"rank_timeout=4: {late} took longer" in said for said in words), words
    assert steps_of(tmp_path / "machine0") in ([], [1])


@on_cpu
@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["has a full disk"])
def test_a_full_disk_of_one_ends_all(how, tmp_path):
    """The checkpoint before stays as it was, and nothing is left of the one that did not fit."""
    codes, words = ended(tmp_path, how)
    assert codes == [1, 1], words
    assert "No space left on device" in words[1], words[1][-2000:]
    assert (
        "rank 1 could not write its part: OSError: [Errno 28] No space left on device" in words[0]
    ), words[0][-2000:]
    (left,) = checkpoints(tmp_path / "one" / "run")
    assert left.name == "step-00000001" and check_checkpoint(left) is None
    assert [path.name for path in left.parent.iterdir()] == [left.name]
    assert not (tmp_path / "one" / "run" / "model").exists()


@on_cpu
def test_a_checkpoint_that_was_begun_is_finished_before_all_end(tmp_path):
    """Though it takes the first rank longer than it would wait for one that has raised an error."""
    codes, words = ended(tmp_path, "raises beside a checkpoint")
    assert codes == [1, 1], words
    assert "rank 1 stopped: ValueError: boom" in words[0], words[0][-2000:]
    (left,) = checkpoints(tmp_path / "one" / "run")
    assert left.name == "step-00000001" and check_checkpoint(left) is None


@on_cpu
@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["is told for long", "is told for long, of shared packs"])
def test_a_callback_may_take_longer_than_a_step(how, tmp_path):
    """And call the model, of which this rank has all weights; it attends to no parts of
    documents then.
    """
    codes, words = two_processes.run(str(HERE / "stopping_ranks.py"), tmp_path, how, seconds=200)
    assert codes == [0, 0], words
    assert "rank_timeout=4: waiting on: rank 0 has been after step 2 for" in words[1], words[1][
        -2000:
    ]
    assert steps_of(tmp_path / "machine0") == [1, 2, 3]


@on_cpu
@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["raises while loading", "exits while loading"])
def test_one_that_fails_while_it_loads_ends_the_others(how, tmp_path):
    """In a collective of those that load, before any of them trains."""
    codes, words = ended(tmp_path, how)
    assert codes == [1, 1], words
    assert (
        "rank 1 ended" + (": ValueError: boom" if how.startswith("raises") else "; look at")
        in words[0]
    ), words[0][-2000:]


@on_cpu
def test_one_that_loads_for_longer_than_a_step_is_waited_for(tmp_path):
    codes, words = two_processes.run(
        str(HERE / "stopping_ranks.py"), tmp_path, "loads for long", seconds=200
    )
    assert codes == [0, 0], words
    assert "rank_timeout=4: waiting on: rank 1 has been outside of train() for" in words[0], words[
        0
    ][-2000:]


@on_cpu
def test_all_that_wait_before_the_first_step_are_limited(tmp_path):
    codes, words = ended(tmp_path, "hangs before the first step, of shared packs")
    assert codes == [1, 1] and all(
        "rank_timeout=4: waiting for each other took longer" in said for said in words
    ), words


@on_cpu
def test_a_step_of_many_micro_batches_may_take_long(tmp_path):
    """Longer than ``rank_timeout``, within which each of its micro-batches is done."""
    codes, words = two_processes.run(
        str(HERE / "stopping_ranks.py"), tmp_path, "has long steps", seconds=200
    )
    assert codes == [0, 0], words
    assert steps_of(tmp_path / "machine0") == [1, 2]


@on_cpu
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("calls a divided model", "called LlamaForCausalLM"),
        ("reads a divided weight", "asked all processes for something (all_gather_into_tensor)"),
    ],
)
def test_a_callback_that_needs_all_ranks_is_refused(how, said, tmp_path):
    """They do not take part, and their next collective would be taken for its own."""
    codes, words = ended(tmp_path, how)
    assert codes == [1, 1]
    refusal = f"sharding='weights': a callback {said}, which needs every process"
    assert refusal in words[0] and f"rank 0 stopped: ConfigurationError: {refusal}" in words[1], (
        words
    )


@pytest.fixture
def watched(monkeypatch, set_constants):
    """Makes the watch of the first of two processes over a store in memory, and a list of what
    it leaves with.
    """
    store = dist.HashStore()
    left = []
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    set_constants(watch, PAUSE=0.02)

    def leave(self, reason):
        left.append(reason)
        self._over.set()

    monkeypatch.setattr(RankWatch, "_leave", leave)

    def make(rank=0, patience=60.0):
        made = RankWatch(SimpleNamespace(rank=rank, count=2), patience, TrainingError)
        monkeypatch.setattr(watch, "_runs", iter([0, 0]))
        return made

    return make, store, left


def until(condition):
    ends = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_a_main_thread_in_a_collective_is_not_waited_for(watched, set_constants):
    """As on a card, where waiting for another process never ends: the thread ends this one, with
    the other's words.
    """
    make, store, left = watched
    set_constants(watch, GRACE=0.2)
    with make():
        store.set("chronicals/watch/0/error", '[1, "ValueError: boom"]')
        until(lambda: left)
    assert left == ["rank 1 stopped: ValueError: boom"]


def test_a_process_that_is_not_heard_of_is_gone(watched, set_constants):
    make, store, left = watched
    set_constants(watch, GRACE=0.1)
    set_constants(watch, LOST=0.5)
    post = '{"beat": %d, "place": "in step 7", "for": 3.0, "host": "b", "pid": 12}'
    with make():
        for beat in range(20):
            store.set("chronicals/watch/0/1", post % beat)
            time.sleep(0.05)
        assert not left, "it posts"
        until(lambda: left)
    assert left == [
        "rank 1 is gone: it has been in step 7 for 3 s (b, process 12), and was not heard of for "
        "0.5 seconds"
    ]
    assert store.get("chronicals/watch/0/error") == json.dumps([0, left[0]]).encode()


def test_only_a_step_is_limited(watched, set_constants):
    """Loading, evaluating and writing may take as long as they take, also where the others wait
    in a step or never began.
    """
    make, store, left = watched
    set_constants(watch, GRACE=0.2)
    with make(patience=0.3) as made:
        time.sleep(0.6)
        with made.step(1):
            pass
        post(store, place="in step 2", waits=9.0)
        time.sleep(0.6)
        assert not left
        store.delete_key("chronicals/watch/0/1")
        time.sleep(0.6)
        assert not left
        with made.step(2):
            until(lambda: left)
    assert "rank_timeout=0.3: a step took longer: rank 0 has been in step 2 for" in left[0]
    assert "rank 1 has not begun" in left[0]


def post(store, rank=1, place="after step 6", waits=None, beat=0):
    about = {"beat": beat, "place": place, "for": 500.0, "waits": waits, "host": "b", "pid": 12}
    store.set(f"chronicals/watch/0/{rank}", json.dumps(about))


def test_one_that_is_alive_outside_a_step_is_waited_for(watched):
    """A callback may generate for longer than a step may take; what counts is how long all have
    waited for each other.
    """
    make, store, left = watched
    with make(patience=0.3) as made:
        post(store, place="after step 6")
        with made.step(7):
            time.sleep(1.0)
            assert not left, left
            post(store, place="in step 7", waits=0.1)
            time.sleep(0.8)
            assert not left, "it has just begun"
            post(store, place="in step 7", waits=0.4)
            until(lambda: left)
    assert "rank_timeout=0.3: a step took longer: rank 0 has been in step 7 for" in left[0]
    assert "rank 1 has been in step 7 for 500 s (b, process 12)" in left[0]


def test_a_step_may_take_long_while_its_micro_batches_are_done(watched):
    """What counts is how long nobody got on: the other is in its step for long, this one is done
    with one after another.
    """
    make, store, left = watched
    with make(patience=0.5) as made:
        post(store, place="in step 7", waits=9.0)
        with made.step(7):
            for _ in range(15):
                time.sleep(0.1)
                made.passed()
            assert not left, left
            until(lambda: left)
    assert "rank_timeout=0.5: a step took longer: rank 0 has been in step 7 for 2 s" in left[0]
    assert (
        "rank 1 has been in step 7 for 500 s (b, process 12), the last 9 s without getting on"
        in left[0]
    )


def test_who_compiles_within_a_step_is_waited_for(watched):
    make, store, left = watched
    with make(patience=0.3) as made:
        post(store, place="in step 1", waits=9.0)
        with made.step(1):
            with made.alone("compiling"):
                time.sleep(1.0)
            assert not left and made._place[0] == "in step 1"
            until(lambda: left)


def test_each_micro_batch_that_the_card_is_done_with_counts():
    """The host launches many ahead of the card, and waits for one after the other."""
    seen = []
    passes = [
        SimpleNamespace(wait=lambda number=number: seen.append(number)) for number in range(3)
    ]
    began = DeviceMoment(torch.device("cpu"))
    scalars = {name: torch.ones(()) for name in ("loss", "grad_norm", "applied")}
    known = {"step": 1, "learning_rate": 0.1, "tokens": 9, "targets": 9, "fill": 1.0, "epoch": 0.5}
    metrics = PendingMetrics(scalars, began, passes, **known).arrive(lambda: seen.append("passed"))
    assert seen == [0, "passed", 1, "passed", 2, "passed"] and metrics.loss == 1.0


def test_who_evaluates_is_limited_by_that_name(watched):
    make, store, left = watched
    with make(patience=0.3) as made:
        post(store, place="evaluating after step 6", waits=5.0)
        with made.step(6):
            pass
        with made.limited("evaluating after step 6"):
            until(lambda: left)
        assert made._place[0] == "after step 6"
    assert (
        "rank_timeout=0.3: evaluating after step 6 took longer: rank 0 has been evaluating after "
        "step 6 for" in left[0]
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "waits", [None, 5.0], ids=["for one that works", "for one that waits, too"]
)
def test_all_that_wait_outside_a_step_are_limited(watched, waits):
    """In a call of the mesh, for one that waits elsewhere; one that loads or writes is waited
    for.
    """
    make, store, left = watched
    with make(patience=0.3):
        post(store, place="before the first step", waits=waits)
        with presence.WAITING.within():
            if waits is None:
                time.sleep(1.0)
            else:
                until(lambda: left)
    assert [said.partition(": rank 0")[0] for said in left] == (
        [] if waits is None else ["rank_timeout=0.3: waiting for each other took longer"]
    )


def test_one_that_ends_before_it_trains_is_told(watched, set_constants):
    """While the model is loaded, for example; it never posts."""
    make, store, left = watched
    set_constants(watch, GRACE=0.1)
    with make():
        time.sleep(0.3)
        assert not left, "it may still load"
        presence.Gone(1, "ended", "").tell(store)
        until(lambda: left)
    assert left == ["rank 1 ended before it began to train; look at what it wrote"]


def test_one_that_was_never_heard_of_is_waited_for(watched):
    """It loads before it joins a process group of its script's own."""
    make, _, left = watched
    with make(patience=0.3), presence.WAITING.within():
        time.sleep(1.0)
        assert not left, left


def outside(store, beat, rank=1):
    about = {
        "beat": beat,
        "place": "outside of train()",
        "for": 9.0,
        "waits": None,
        "host": "b",
        "pid": 12,
    }
    store.set(f"chronicals/present/{rank}", json.dumps(about))


def test_one_that_loads_is_waited_for_until_it_is_not_heard_of(watched, set_constants):
    make, store, left = watched
    set_constants(watch, GRACE=0.1)
    set_constants(watch, LOST=0.5)
    with make(patience=0.3), presence.WAITING.within():
        for beat in range(20):
            outside(store, beat)
            time.sleep(0.05)
        assert not left, left
        until(lambda: left)
    gone = (
        "rank 1 is gone: it has been outside of train() for 9 s (b, process 12), and was not "
        "heard of for 0.5 seconds"
    )
    assert left == [gone]


@pytest.mark.sample(1)
@pytest.mark.parametrize("killed", [False, True], ids=["with an error", "killed"])
def test_who_waits_outside_of_a_run_ends_with_one_that_is_gone(killed, monkeypatch, set_constants):
    """Of those that load together the others would wait in a collective for as long as it may
    take.
    """
    store = dist.HashStore()
    left = []
    set_constants(presence, PAUSE=0.02, GRACE=0.2, LOST=0.5)

    def leave(self, reason):
        left.append(reason)
        self._over.set()

    monkeypatch.setattr(presence.Presence, "_leave", leave)
    made = presence.Presence(0, 2, store)
    made._thread.start()
    outside(store, 0)
    if not killed:
        presence.Gone(1, "ended", "ValueError: boom").tell(store)
    time.sleep(1.0)
    assert not left, "it works"
    with presence.WAITING.within():
        until(lambda: left)
    lost = "is gone: it was not heard of for 0.5 seconds (b, process 12)"
    assert left == ["rank 1 " + (lost if killed else "ended: ValueError: boom")]
    assert json.loads(store.get("chronicals/present/0"))["place"] == "outside of train()"


def test_the_first_error_is_the_one_that_is_told(watched):
    make, store, left = watched
    with pytest.raises(ValueError, match="mine"), make():
        raise ValueError("mine")
    assert store.get("chronicals/watch/0/error") == b'[0, "ValueError: mine"]'
    with pytest.raises(TrainingError, match="rank 0 stopped: ValueError: mine"), make(rank=1):
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    with pytest.raises(KeyError), make(rank=1):
        raise KeyError("an error of its own stays")
    assert store.get("chronicals/watch/0/error") == b'[0, "ValueError: mine"]' and not left


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(3)], ids=["by the keyboard", "by itself"]
)
def test_one_that_is_interrupted_is_told(error, watched):
    make, store, _ = watched
    with pytest.raises(type(error)), make():
        raise error
    assert store.check(["chronicals/watch/0/error"])
    assert json.loads(store.get("chronicals/watch/0/error")) == [
        0,
        f"{type(error).__name__}: {error}",
    ]


def test_the_first_leaves_last(watched):
    """Its store ends with it, of which the others may still ask something."""
    make, _, _ = watched
    parted = []

    def second(own):
        with own:
            time.sleep(0.5)
            parted.append("second")

    first = make()
    with first:
        thread = threading.Thread(target=second, args=(make(rank=1),))
        thread.start()
    parted.append("first")
    thread.join()
    assert parted == ["second", "first"]


def test_one_process_is_not_watched():
    before = threading.active_count()
    with RankWatch(SimpleNamespace(rank=0, count=1), 1.0, TrainingError) as made, made.step(1):
        assert threading.active_count() == before
