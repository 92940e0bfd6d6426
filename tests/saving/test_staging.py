"""Copies of a state: what they hold, where they begin, when the update may go on; work in a thread."""

import mmap
import threading

import pytest
import torch

from chronicals.kernels import host_memory
from chronicals.kernels.host_memory import PinnedMemory, available_memory
from chronicals.saving import Background, Staging, staging
from comparison import equal

CPU = torch.device("cpu")


class Unpinned:
    """In place of the driver, that refuses to pin from the ``refused``-th chunk on."""

    def __init__(self, refused=100):
        self.refused = refused
        self.registered = {}

    def cudaHostRegister(self, address, size, flags):
        if len(self.registered) >= self.refused:
            return 1
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address):
        del self.registered[address]
        return 0


@pytest.fixture
def driver(monkeypatch, set_constants):
    found = Unpinned()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    set_constants(host_memory, PIN_CALL_BYTES=mmap.PAGESIZE)
    return found


def states():
    tied = torch.randn(50)
    return {
        "a": torch.randn(37),
        "transposed": torch.randn(5, 7).T,
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "bf16": torch.randn(3, 11).bfloat16(),
        "low": torch.arange(33, dtype=torch.int16),
        "tied": tied,
        "head": tied,
    }


def test_copies_are_dense_and_do_not_change_afterwards():
    given = states()
    before = {name: tensor.clone() for name, tensor in given.items()}
    copies = Staging(CPU).copy(given)
    for tensor in given.values():
        tensor.zero_()
    for name, tensor in copies.items():
        assert (
            equal(tensor, before[name])
            and tensor.is_contiguous()
            and tensor.dtype == before[name].dtype
        )
    assert copies["tied"] is copies["head"]


@pytest.mark.parametrize("piece", [64, 192, 1 << 26])
def test_pinned_copies_lie_apart_and_are_made_in_pieces(driver, set_constants, piece):
    """As on a card, but for the stream. Each has a storage of its own, or safetensors would take
    all for one tensor.
    """
    set_constants(staging, COPY_PIECE_BYTES=piece)
    given = states()
    memory = PinnedMemory()
    memory.allocate(staging._size(given.values()))
    copies = {}
    for offset, tensor in staging._places(given.values()):
        assert offset % 64 == 0
        copies[id(tensor)] = memory.tensor(offset, tensor)
        staging._copy_in_pieces(tensor, copies[id(tensor)], offset)
    assert all(equal(copies[id(tensor)], tensor) for tensor in given.values())
    assert all(copy.untyped_storage().nbytes() == copy.nbytes for copy in copies.values())
    assert len(copies) == len(given) - 1


def test_memory_is_kept_and_grows(driver):
    memory = PinnedMemory()
    memory.allocate(3 * mmap.PAGESIZE)
    held = dict(driver.registered)
    assert list(held.values()) == [mmap.PAGESIZE] * 3
    memory.allocate(2 * mmap.PAGESIZE)
    assert driver.registered == held
    memory.allocate(5 * mmap.PAGESIZE)
    assert len(driver.registered) == 5
    memory.release()
    assert not driver.registered and memory.size == 0


def test_memory_that_cannot_be_pinned_is_used_as_it_is(driver, caplog):
    driver.refused = 1
    memory = PinnedMemory()
    memory.allocate(3 * mmap.PAGESIZE)
    memory.tensor(2 * mmap.PAGESIZE, torch.empty(8)).fill_(1.0)
    assert memory.size == 3 * mmap.PAGESIZE and "cannot be pinned" in caplog.text
    memory.release()
    assert not driver.registered


def test_copies_take_half_of_what_is_available_at_most(monkeypatch):
    tensors = [torch.empty(100, dtype=torch.uint8)]
    for available, fits in ((200, True), (199, False), (None, True)):
        monkeypatch.setattr(staging, "available_memory", lambda available=available: available)
        assert Staging(CPU).fits(tensors) is fits
        assert Staging(CPU).fits(tensors, 1 << 60) is (available is None)


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 8192 * 1024), ("5000", 5000 - 3000 + 1000), (None, 8192 * 1024)]
)
def test_available_memory_of_machine_and_container(tmp_path, limit, expected):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8192 kB\n")
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    if limit:
        (group / "memory.max").write_text(limit)
        (group / "memory.current").write_text("3000")
        (group / "memory.stat").write_text("anon 2000\ninactive_file 1000\n")
    assert available_memory(tmp_path) == expected
    assert available_memory(tmp_path / "elsewhere") is None


def test_one_piece_of_work_at_a_time_and_its_error_once():
    background = Background()
    go = threading.Event()
    background.start(go.wait)
    assert background.busy and background.error is None
    with pytest.raises(AssertionError):
        background.start(go.wait)
    go.set()
    background.wait()

    def fail():
        raise OSError("no room")

    background.start(fail)
    with pytest.raises(OSError, match="no room"):
        background.wait()
    background.wait()
    assert not background.busy and background.error is None
