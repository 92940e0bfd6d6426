"""The first rank does something while the others wait at the store, not in a collective; what a
process keeps between steps; gradients in buckets, whose sums are those of each by itself.
"""

import itertools
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from chronicals.config import LONGEST_TIMEOUT, ChronicalsConfig, ConfigurationError
from chronicals.distributed import WAITING, Mesh, mesh
from chronicals.distributed.mesh import IN_FLIGHT, buckets, sum_over_ranks
from mutants import mutant


@pytest.fixture
def store(monkeypatch, let_return):
    made = dist.HashStore()
    let_return(dist.distributed_c10d, _get_default_store=made)
    monkeypatch.setattr(mesh, "_announcements", itertools.repeat(1))
    return made


def waiting():
    """The second rank's part, in a thread, and what came of it."""
    seen = []

    def wait():
        try:
            seen.append(
                Mesh(1, 2).writer_does(lambda: pytest.fail("the second rank did it"), OSError)
            )
        except OSError as error:
            seen.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread, seen


def test_the_others_have_its_result(store):
    thread, seen = waiting()
    assert Mesh(0, 2).writer_does(lambda: {"a": [1, None]}, OSError) == {"a": [1, None]}
    thread.join(20)
    assert seen == [{"a": [1, None]}]


def test_the_others_stop_with_its_error(store):
    thread, seen = waiting()
    with pytest.raises(KeyError, match="b"):
        Mesh(0, 2).writer_does(lambda: {}["b"], OSError)
    thread.join(20)
    assert seen == ["rank 0 stopped: KeyError: 'b'"]


def test_the_others_stop_where_it_is_interrupted(store):
    def interrupted():
        raise KeyboardInterrupt

    thread, seen = waiting()
    with pytest.raises(KeyboardInterrupt):
        Mesh(0, 2).writer_does(interrupted, OSError)
    thread.join(20)
    assert seen == ["rank 0 stopped: KeyboardInterrupt: "]


@pytest.mark.parametrize("text", ["0123456789" * 1_000_000, ""], ids=["long", "empty"])
def test_long_texts_pass_through_torchs_own_store(text, store, let_return):
    """Which refuses values of more than 8 MiB."""
    own = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    let_return(dist.distributed_c10d, _get_default_store=own)
    thread, seen = waiting()
    assert Mesh(0, 2).writer_does(lambda: text, OSError) == text
    thread.join(20)
    assert seen == [text]


JOINING = """
import os, socket, torch
from chronicals.distributed import mesh
from chronicals.distributed.launch import Launch
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
mesh.MEETING_TIMEOUT = mesh.timedelta(seconds=2)
mesh._join(Launch(0, COUNT, 0, "WORLD_SIZE=COUNT"))
for group in (mesh.dist.group.WORLD, mesh.group_of([0])):
    print(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
print(mesh.dist.distributed_c10d._get_default_store().timeout.total_seconds())
"""


def joining(count):
    program = JOINING.replace("COUNT", str(count))
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200
    )


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="nccl is asked otherwise for its timeout")
def test_torch_waits_longer_than_any_rank_timeout():
    """Who hangs is found by the watch, which names it; torch would end the processes after
    minutes, whatever was set.
    """
    done = joining(1)
    assert done.stdout.split() == 3 * [str(LONGEST_TIMEOUT)], done.stderr[-2000:]
    with pytest.raises(ConfigurationError, match="rank_timeout"):
        ChronicalsConfig(rank_timeout=LONGEST_TIMEOUT + 1)


def test_every_group_waits_as_long():
    """Groups that are made without a timeout have torch's."""
    makers = [
        path.name
        for path in Path(mesh.__file__).parents[1].rglob("*.py")
        if "dist.new_group(" in path.read_text() and path.parent.name != "planning"
    ]
    assert makers == ["mesh.py"] and Path(mesh.__file__).read_text().count("dist.new_group(") == 1


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="as on the CPU")
def test_processes_that_do_not_come_are_named():
    done = joining(2)
    assert (
        done.returncode
        and "WORLD_SIZE=2: not all of the 2 processes that train together came" in done.stderr
    )
    assert "within 2 seconds" in done.stderr and "1/2 clients joined" in done.stderr


def test_weights_that_are_sent_by_a_card_are_waited_for(let_return):
    """nccl returns at once, and the host would wait elsewhere, where nobody looks."""
    waited = []
    stream = SimpleNamespace(synchronize=lambda: waited.append(WAITING.since))
    let_return(torch.cuda, current_stream=stream)
    let_return(dist, broadcast=None, get_backend="nccl")
    Mesh(0, 2).same_weights([torch.ones(3)])
    assert len(waited) == 1 and waited[0] is not None and WAITING.since is None


def test_who_makes_a_group_waits_for_the_others(monkeypatch):
    monkeypatch.setattr(dist, "new_group", lambda ranks, **_: WAITING.since)
    assert mesh.group_of([0, 1]) is not None and WAITING.since is None


def test_few_patterns_of_gradients_are_kept():
    """Steps that take turns with a few copy nothing to the card, and new ones do not fill it."""
    ranks = Mesh(0, 2)
    device = torch.device("cpu")
    patterns = [
        tuple(map(bool, map(int, f"{number:06b}"))) for number in range(3 * mesh.CACHED_PATTERNS)
    ]
    first = [ranks.held_by(pattern, device) for pattern in patterns[:3]]
    assert [found.tolist() for found in first] == [
        list(map(float, pattern)) for pattern in patterns[:3]
    ]
    for _ in range(2):
        assert all(
            ranks.held_by(pattern, device) is found for pattern, found in zip(patterns, first)
        )
    for pattern in patterns[3:]:
        ranks.held_by(pattern, device)
        ranks.held_by(patterns[0], device)
    assert (
        len(ranks._patterns) == mesh.CACHED_PATTERNS
        and ranks.held_by(patterns[0], device) is first[0]
    )


SHAPES = [(3, 5), (7,), (100, 30), (1,), (), (0, 4), (60,), (50, 50), (2, 2)]


def drawn():
    kinds = [
        torch.float32,
        torch.float32,
        torch.float32,
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
        torch.float32,
    ]
    kinds += [torch.bfloat16, torch.float32]
    found = [torch.randn(shape).to(kind) for shape, kind in zip(SHAPES, kinds, strict=True)]
    return [*found, torch.randn(8, 6).t()]


class Doubling:
    """Two ranks with the same gradients; what they have is doubled when it is waited for."""

    def __init__(self):
        self.flying = 0
        self.most = 0
        self.calls = []

    def all_reduce(self, tensor, async_op):
        assert async_op and tensor.is_contiguous()
        self.flying += 1
        self.most = max(self.most, self.flying)
        self.calls.append(tensor.nbytes)
        outer = self

        class Work:
            def wait(self):
                tensor.mul_(2)
                outer.flying -= 1

        return Work()


@pytest.fixture
def ranks(monkeypatch):
    found = Doubling()
    monkeypatch.setattr(dist, "all_reduce", found.all_reduce)
    return found


@pytest.mark.parametrize("size", [1, 60, 300, 1 << 20])
def test_sums_are_those_of_each_by_itself(size, ranks):
    gradients = drawn()
    expected = [2 * gradient for gradient in gradients]
    places = [gradient.data_ptr() for gradient in gradients]
    sum_over_ranks(gradients, size)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, expected, strict=True))
    assert (
        [gradient.data_ptr() for gradient in gradients] == places
        and not ranks.flying
        and ranks.most <= IN_FLIGHT
    )
    largest = max(gradient.nbytes for gradient in gradients)
    assert all(size_of <= max(size, largest) for size_of in ranks.calls) and (
        size < 1000 or len(ranks.calls) < len(gradients)
    )


def is_right(found, gradients, size):
    in_order = [id(gradient) for bucket in found for gradient in bucket] == [
        id(gradient) for gradient in gradients
    ]
    alike = all(len({gradient.dtype for gradient in bucket}) == 1 for bucket in found)
    return (
        in_order
        and alike
        and all(len(bucket) == 1 or sum(g.nbytes for g in bucket) <= size for bucket in found)
    )


@pytest.mark.parametrize("size", [1, 60, 300, 1 << 20])
def test_each_is_in_one_bucket_in_order(size):
    gradients = drawn()
    found = buckets(gradients, [gradient.nbytes for gradient in gradients], size)
    assert is_right(found, gradients, size) and buckets([], []) == []


def test_a_large_one_is_summed_where_it_is(ranks):
    large = torch.randn(1000)
    sum_over_ranks([torch.randn(4), large, torch.randn(4)], 64)
    assert ranks.calls == [16, 4000, 16]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("room -= own", "room -= 0"),
        (
            "not found or own > room or tensor.dtype != found[-1][0].dtype",
            "not found or own > room",
        ),
        ("work.wait()", "pass"),
        ("while waiting or flying:\n    ...", "while waiting:\n    ..."),
        ("[] if alone else bucket", "[]"),
    ],
)
def test_a_planted_fault_is_found(old, new, ranks):
    wrong = mutant(mesh, old, new)
    gradients = drawn()
    expected = [2 * gradient for gradient in gradients]
    wrong.sum_over_ranks(gradients, 80)
    summed = all(
        torch.equal(ours, theirs) for ours, theirs in zip(gradients, expected, strict=True)
    )
    found = wrong.buckets(gradients, [gradient.nbytes for gradient in gradients], 80)
    assert not summed or ranks.flying or not is_right(found, gradients, 80)
