"""States in host memory: the bits of an optimizer whose states are beside its weights, in parts
of every size.
"""

import copy
import io
import random
import weakref

import pytest
import torch
from torch import nn

from chronicals.kernels import host_memory
from chronicals.kernels.adamw import Tensors, fused_adamw_
from chronicals.kernels.adamw_8bit import CHUNK_8BIT as CHUNK_IN_8_BITS
from chronicals.kernels.adamw_8bit import MOMENT_BLOCK, QuantizedTensors, adamw_8bit_
from chronicals.kernels.host_memory import PinnedTensors
from chronicals.kernels.tensor_lists import LIST_CHUNK
from chronicals.optimizers import Adam8bit, FusedAdamW, HostStates, buffer_bytes, host_states
from chronicals.optimizers.host_states import MIN_BUFFER_BYTES, _cut
from interpreted import kernels_run
from mutants import mutant

SHAPES = [
    (7, 11),
    (3 * LIST_CHUNK + 5,),
    (65, 130),
    (),
    (LIST_CHUNK, 4),
    (2 * LIST_CHUNK,),
    (31,),
    (0, 3),
    (301, 70),
]
"""Smaller than a part and several parts large, no multiples of anything and multiples of all."""

KINDS = {
    "fp32": (FusedAdamW, torch.float32, {}),
    "bf16 weights, fp32 states": (FusedAdamW, torch.bfloat16, {}),
    "bf16 states": (FusedAdamW, torch.bfloat16, {"state_dtype": torch.bfloat16}),
    "bf16 states, no masters": (
        FusedAdamW,
        torch.bfloat16,
        {"state_dtype": torch.bfloat16, "master": False},
    ),
    "8 bits": (Adam8bit, torch.bfloat16, {}),
    "8 bits, no masters": (Adam8bit, torch.bfloat16, {"master": False}),
    "8 bits, fp32 weights": (Adam8bit, torch.float32, {}),
}
PARTS = [MIN_BUFFER_BYTES, 3 * MIN_BUFFER_BYTES + 17, 1 << 26]


def weights(dtype, device, shapes=SHAPES):
    return [nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes]


def optimizer_of(kind, parameters, **options):
    """Groups as of LoRA+ and of weight decay: three, with rates and decays of their own."""
    make, _, given = KINDS[kind]
    groups = [
        {"params": parameters[::3], "lr": 1e-2, "weight_decay": 0.1},
        {"params": parameters[1::3], "lr": 3e-3},
        {"params": parameters[2::3], "lr": 1e-3, "weight_decay": 0.01, "full_moments": True},
    ]
    return make(groups, **given, **options)


def give_gradients(*lists):
    for together in zip(*lists, strict=True):
        gradient = (
            torch.randn_like(together[0], dtype=torch.float32)
            * 10 ** torch.empty(()).uniform_(-4, 2).item()
        )
        for parameter in together:
            parameter.grad = gradient.to(parameter.dtype, copy=True)


def everything(parameters, optimizer):
    """Copies of weights and states, on the CPU, by name."""
    found = {f"{n}": p.detach() for n, p in enumerate(parameters)}
    states = {
        f"{n}:{name}": x
        for n, p in enumerate(parameters)
        for name, x in optimizer.state_of(p).items()
    }
    return {name: x.to("cpu", copy=True) for name, x in (found | states).items()}


def same(left, right):
    assert left.keys() == right.keys()
    differ = [
        name
        for name in left
        if left[name].dtype != right[name].dtype or not torch.equal(left[name], right[name])
    ]
    assert not differ, differ


def pair(kind, device, buffer, smallest=100, shapes=SHAPES):
    """The same weights twice, and the optimizers of both: the second one's states are in host
    memory.
    """
    dtype = KINDS[kind][1]
    plain = weights(dtype, device, shapes)
    moved = [nn.Parameter(p.detach().clone()) for p in plain]
    host = HostStates(smallest, buffer)
    return plain, optimizer_of(kind, plain), moved, optimizer_of(kind, moved, host=host)


def update_both(plain, optimizer, moved, other, count=3, **options):
    for _ in range(count):
        give_gradients(plain, moved)
        for each in (optimizer, other):
            each.step(**options)


@pytest.mark.sample(9)
@pytest.mark.parametrize("smallest", [0, 100, 10**6])
@pytest.mark.parametrize("buffer", PARTS)
@pytest.mark.parametrize("kind", KINDS)
def test_updates_are_bit_equal(kind, buffer, smallest, device):
    """Where some states are here and some are not, too."""
    made = pair(kind, device, buffer, smallest)
    factor = torch.tensor(0.37, device=device)
    update_both(*made, factor=factor, apply=torch.tensor(True, device=device))
    before = everything(*made[2:])
    update_both(*made, count=1, apply=torch.tensor(False, device=device))
    same(everything(*made[2:]), before)
    same(everything(*made[:2]), everything(*made[2:]))
    assert made[3].state_of(made[2][1])["step"] == 3


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("buffer", PARTS[:2])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_give_a_part_the_bits_of_the_whole(kind, buffer, device):
    """The random numbers of bf16 among them, which depend on the place in the launch."""
    made = pair(
        kind,
        device,
        buffer,
        shapes=[(3 * CHUNK_IN_8_BITS + 5,), (7,), (65, 130), (LIST_CHUNK, 3), (40, 50)],
    )
    with kernels_run():
        update_both(*made, count=2)
    same(everything(*made[:2]), everything(*made[2:]))


@pytest.mark.parametrize("kind", ["fp32", "bf16 states", "8 bits"])
def test_weights_that_not_every_rank_used_stay(kind, device):
    made = pair(kind, device, MIN_BUFFER_BYTES)
    used = [torch.tensor(n % 2 == 0, device=device) for n in range(len(SHAPES))]
    give_gradients(made[0], made[2])
    before = made[2][5].detach().clone()
    for parameters, optimizer in (made[:2], made[2:]):
        optimizer.step(used=dict(zip(parameters, used)))
    same(everything(*made[:2]), everything(*made[2:]))
    assert torch.equal(made[2][5], before) and made[3].state_of(made[2][5])["step"] == 0


def test_weights_without_a_gradient_and_updates_of_some(device):
    plain, optimizer, moved, other = made = pair(
        "bf16 weights, fp32 states", device, 2 * MIN_BUFFER_BYTES
    )
    give_gradients(plain, moved)
    plain[4].grad = moved[4].grad = None
    for each in (optimizer, other):
        each.step()
    give_gradients(plain, moved)
    for parameters, each in ((plain, optimizer), (moved, other)):
        each.refresh_rates()
        each.step_of(parameters[:5])
        each.step_of(parameters[5:])
    same(everything(*made[:2]), everything(*made[2:]))


def test_weights_that_are_not_dense():
    """Without a card: on one the kernel takes them here, since they are made dense, where plain
    torch does elsewhere.
    """
    made = pair(
        "bf16 weights, fp32 states",
        torch.device("cpu"),
        MIN_BUFFER_BYTES,
        shapes=[(64, 100), (90, 70)],
    )
    for p in (made[0][0], made[2][0]):
        p.data = p.data.t()
    for p in (made[0][1], made[2][1]):
        assert p.is_contiguous()
    update_both(*made)
    for _ in range(2):
        give_gradients(made[0], made[2])
        for parameters, optimizer in (made[:2], made[2:]):
            parameters[1].grad = parameters[1].grad.t().contiguous().t()
            optimizer.step()
    same(everything(*made[:2]), everything(*made[2:]))


@pytest.mark.parametrize("kind", KINDS)
def test_states_go_on_in_either_place(kind, device):
    """Saved in one, loaded in the other, by torch's own names and by ours."""
    plain, optimizer, moved, other = made = pair(kind, device, 2 * MIN_BUFFER_BYTES)
    update_both(*made)
    host = HostStates(100, MIN_BUFFER_BYTES)
    for begun, had, options in (
        (plain, optimizer, {"host": host}),
        (moved, other, {}),
        (moved, other, {"host": host}),
    ):
        loaded = [nn.Parameter(p.detach().clone()) for p in begun]
        third = optimizer_of(kind, loaded, **options)
        buffer = io.BytesIO()
        torch.save(had.state_dict(), buffer)
        buffer.seek(0)
        third.load_state_dict(torch.load(buffer, weights_only=True))
        by_weight = [nn.Parameter(p.detach().clone()) for p in begun]
        fourth = optimizer_of(kind, by_weight, **options)
        for p, q in zip(begun, by_weight):
            fourth.load_state(q, had.state_of(p))
        twin = [nn.Parameter(p.detach().clone()) for p in begun]
        fifth = optimizer_of(kind, twin)
        fifth.load_state_dict(had.state_dict())
        give_gradients(loaded, by_weight, twin)
        for each in (third, fourth, fifth):
            each.step()
        same(everything(loaded, third), everything(twin, fifth))
        same(everything(by_weight, fourth), everything(twin, fifth))


def test_states_are_loaded_into_the_memory_that_is_there(device):
    made = pair("8 bits", device, MIN_BUFFER_BYTES)
    update_both(*made)
    parameters, optimizer = made[2:]
    places = {
        name: x.data_ptr()
        for name, x in optimizer.state_of(parameters[2]).items()
        if name != "step"
    }
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {
        name: x.data_ptr()
        for name, x in optimizer.state_of(parameters[2]).items()
        if name != "step"
    } == places
    update_both(*made)
    same(everything(*made[:2]), everything(*made[2:]))


def test_a_copy_has_memory_of_its_own(device):
    made = pair("bf16 states", device, MIN_BUFFER_BYTES)
    update_both(*made)
    other = copy.deepcopy(made[3])
    assert other.host is not made[3].host and other.host.smallest == 100
    twins = [p for n in range(3) for p in other.param_groups[n]["params"]]
    order = [p for n in range(3) for p in made[3].param_groups[n]["params"]]
    for p, twin in zip(order, twins, strict=True):
        p.grad = torch.ones_like(p)
        twin.grad = p.grad.clone()
    for each in (made[3], other):
        each.step()
    same(everything(order, made[3]), everything(twins, other))


def test_a_weight_that_was_written_begins_anew(device):
    made = pair("bf16 weights, fp32 states", device, MIN_BUFFER_BYTES)
    update_both(*made)
    for parameters, _ in (made[:2], made[2:]):
        with torch.no_grad():
            parameters[2].add_(1)
    made[3].settle()
    assert (
        not made[3].state_of(made[2][2])["low"].any() and made[3].state_of(made[2][4])["low"].any()
    )
    update_both(*made)
    value = torch.randn(65, 130, device=device)
    for parameters, optimizer in (made[:2], made[2:]):
        optimizer.set_master(parameters[2], value)
    same(everything(*made[:2]), everything(*made[2:]))


def test_who_reads_states_waits_for_them_and_an_update_does_not(record_calls):
    _, _, parameters, optimizer = pair(
        "bf16 weights, fp32 states", torch.device("cpu"), MIN_BUFFER_BYTES
    )
    give_gradients(parameters)
    optimizer.step()
    waits = record_calls(HostStates, "wait")
    optimizer.refresh_rates()
    optimizer.settle()
    optimizer.step()
    optimizer.looked_up(parameters)
    assert not waits
    state = optimizer.state_of(parameters[2])
    readers = (
        lambda: optimizer.state_of(parameters[2]),
        optimizer.state_dict,
        lambda: copy.deepcopy(optimizer),
        lambda: optimizer.set_master(parameters[2], parameters[2].detach().float()),
        lambda: optimizer.load_state(parameters[2], copy.deepcopy(state)),
        lambda: (parameters[2].data.add_(0), parameters[2].detach().add_(1), optimizer.settle()),
    )
    for reads in readers:
        waits.clear()
        reads()
        assert waits


@pytest.mark.parametrize("room", [MIN_BUFFER_BYTES, MIN_BUFFER_BYTES + 12345, 1 << 20])
def test_parts_are_cut_between_chunks_and_fit(room):
    sizes = [
        (n, bool(k % 3))
        for k, n in enumerate(
            [0, 5, LIST_CHUNK, 9 * LIST_CHUNK + 1, 3, 70 * LIST_CHUNK, 0, 2 * LIST_CHUNK - 1]
        )
    ]
    chunk = 10 * LIST_CHUNK
    seen = [0] * len(sizes)
    for part in _cut(sizes, LIST_CHUNK, chunk, room):
        numbers = [cut.number for cut in part]
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert (
            sum(
                cut.chunks * chunk + host_states.SLICE_SLACK for cut in part if sizes[cut.number][1]
            )
            <= room
        )
        for cut in part:
            assert cut.begin == seen[cut.number] and cut.begin % LIST_CHUNK == 0
            seen[cut.number] = cut.end
        assert all(seen[n] == sizes[n][0] for n in numbers[:-1]) and all(
            cut.begin == 0 for cut in part[1:]
        )
    assert seen == [size for size, _ in sizes]


def test_buffers_hold_no_more_than_they_must(device):
    for buffer, shapes in ((1 << 20, [(1 << 20,)]), (1 << 26, [(300, 400), (500, 60)])):
        made = pair("fp32", device, buffer, shapes=shapes)
        update_both(*made, count=2)
        (lane,) = made[3].host._lanes.values()
        held = sum(
            x.nbytes for p in made[2] for name, x in made[3].state_of(p).items() if name != "step"
        )
        assert lane.held == held and len(lane.buffers) == host_states.BUFFER_COUNT
        assert sum(x.nbytes for x in lane.buffers) <= min(3 * buffer, held + 3)
        if buffer == host_states.MAX_BUFFER_BYTES:
            assert buffer_bytes(held) == sum(x.nbytes for x in lane.buffers)
    assert buffer_bytes(0) == 0 and buffer_bytes(10**12) == 3 * host_states.MAX_BUFFER_BYTES


def test_a_launch_that_fails_leaves_the_next_one_as_it_was(device, monkeypatch):
    made = pair("fp32", device, MIN_BUFFER_BYTES)
    update_both(*made)
    usual = host_states.fused_adamw_
    calls = []

    def fails(*given):
        calls.append(given)
        if len(calls) == 3:
            raise RuntimeError("planted")
        usual(*given)

    before = everything(*made[2:])
    monkeypatch.setattr(host_states, "fused_adamw_", fails)
    with pytest.raises(RuntimeError, match="planted"):
        made[3].step(apply=torch.tensor(False, device=device))
    monkeypatch.undo()
    same(everything(*made[2:]), before)
    update_both(*made)
    same(everything(*made[:2]), everything(*made[2:]))


class Driver:
    """In place of CUDA's, on a machine without a card."""

    def __init__(self):
        self.registered = {}

    def cudaHostRegister(self, address, size, flags):
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address):
        del self.registered[address]


def test_pinned_tensors_lie_apart_in_memory_that_one_call_pins(
    monkeypatch, let_return, set_constants
):
    driver = Driver()
    let_return(torch.cuda, cudart=driver)
    capturing = []
    waited = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    card = torch.device("cuda", 1)
    set_constants(host_memory, SMALL_TENSOR_POOL_BYTES=10000)
    pinned = PinnedTensors()
    shapes = [(10, 100), (7,), (200, 100), (20, 100), (), (0,), (30, 30)]
    made = [pinned.empty(shape, torch.float32, card).fill_(n) for n, shape in enumerate(shapes)]
    for n, (tensor, shape) in enumerate(zip(made, shapes)):
        assert (
            tensor.shape == shape
            and (tensor == n).all()
            and tensor.untyped_storage().nbytes() == tensor.nbytes
        )
        begin = tensor.data_ptr()
        end = tensor.data_ptr() + tensor.nbytes
        assert not tensor.numel() or any(
            at <= begin and end <= at + size for at, size in driver.registered.items()
        )
    assert sorted(driver.registered.values()) == [10000, 10000, 10000, 80000]
    gone = weakref.ref(pinned)
    capturing.append(True)
    del pinned
    assert gone() is None and len(driver.registered) == 4 and not waited, (
        "a graph is being captured"
    )
    capturing.clear()
    PinnedTensors()
    assert not driver.registered and waited == [card] and (made[2] == 2).all()


def launched(kind, device, count=2, steps=2):
    """Weights and states of a launch, in one list of numbers; as large as torch must hold them
    beside.
    """
    tensors = QuantizedTensors() if kind == "8 bits" else Tensors()
    for n in range(count):
        size = 5 * MOMENT_BLOCK + n
        tensors.weights.append(torch.randn(size, device=device))
        tensors.gradients.append(torch.randn(size, device=device))
        wide = kind != "8 bits"
        for row in (tensors.means, tensors.squares):
            row.append(
                torch.zeros(size, dtype=torch.float32 if wide else torch.uint8, device=device)
            )
        if not wide:
            tensors.mean_scales.append(torch.zeros(-(-size // MOMENT_BLOCK), device=device))
            tensors.square_scales.append(torch.zeros(-(-size // MOMENT_BLOCK), device=device))
        tensors.steps.append(torch.tensor(float(steps), device=device))
    return tensors


@pytest.mark.parametrize("kind", ["fp32", "8 bits"])
def test_steps_are_counted_once_a_launch(kind, device):
    tensors, twin = (copy.deepcopy(x) for x in [launched(kind, device)] * 2)
    host = HostStates(10**9)
    with host.updating():
        host.update(tensors, 1e-3, (0.9, 0.99), 1e-8, 0.0)
    (adamw_8bit_ if kind == "8 bits" else fused_adamw_)(twin, 1e-3, (0.9, 0.99), 1e-8, 0.0)
    assert [step.item() for step in tensors.steps] == [3.0, 3.0]
    assert all(torch.equal(a, b) for a, b in zip(tensors.weights, twin.weights))


class Stream:
    """As CUDA's: what is put on it waits, until ``run`` lets streams go on in any order that
    their events allow.
    """

    current: "Stream"
    every: list["Stream"]

    def __init__(self):
        self.tasks = []
        self.running = False
        Stream.every.append(self)

    def __enter__(self):
        self.before = Stream.current
        Stream.current = self

    def __exit__(self, *_):
        Stream.current = self.before

    def record_event(self):
        event = []
        self.tasks.append(lambda: event.append(True))
        return event

    def wait_event(self, event):
        self.tasks.append(event)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    @staticmethod
    def run():
        while waiting := [stream for stream in Stream.every if stream.tasks]:
            ready = [stream for stream in waiting if stream.tasks[0] != []]
            assert ready, "each waits for another"
            task = random.choice(ready).tasks.pop(0)
            if callable(task):
                task()


class Cell:
    """In place of a tensor: a number, and what is done to it on the current stream."""

    def __init__(self, value):
        self.value = value

    def copy_(self, other, non_blocking):
        assert non_blocking
        Stream.current.tasks.append(lambda: setattr(self, "value", other.value))

    def update(self):
        Stream.current.tasks.append(lambda: setattr(self, "value", 3 * self.value + 1))


def after_updates(monkeypatch, parts, updates):
    """What states of some parts are after updates whose copies and kernels run in a random
    order, and what they should be.
    """
    Stream.every = []
    Stream.current = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream.current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(host_states, "_streams", lambda device: (Stream(), Stream()))
    lane = host_states._Lane(torch.device("cuda"))
    lane.buffers = [Cell(-1) for _ in range(host_states.BUFFER_COUNT)]
    states = [Cell(n) for n in range(parts)]
    expected = list(range(parts))
    for _ in range(updates):
        for state in states:
            buffer = lane.next()
            lane.run([(buffer, state)], buffer.update)
        lane.join()
        expected = [3 * value + 1 for value in expected]
    Stream.run()
    return [state.value for state in states], expected


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7, 20])
def test_copies_and_kernels_in_any_order_that_events_allow(parts, monkeypatch):
    for _ in range(30):
        found, expected = after_updates(monkeypatch, parts, 3)
        assert found == expected


@pytest.mark.parametrize(
    "wait",
    [
        "coming.wait_event(emptied)",
        "coming.wait_stream(current)",
        "current.wait_event(coming.record_event())",
        "going.wait_event(current.record_event())",
        "current.wait_stream(stream)",
    ],
)
def test_every_wait_is_needed(wait, monkeypatch):
    """With one left out, some order loses an update."""
    monkeypatch.setitem(globals(), "host_states", mutant(host_states, wait, "pass"))
    results = (after_updates(monkeypatch, 7, 3) for _ in range(200))
    assert any(found != expected for found, expected in results)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16 weights, fp32 states", "bf16 states", "8 bits"])
def test_on_a_card_states_are_pinned_bit_equal_and_take_no_more_than_the_buffers(kind):
    """Of 60 parts an update; and between updates, with no wait of the host, that of the next one
    begins.
    """
    device = torch.device("cuda")
    shapes = [(4096, 4096), (1000, 4097), (333,), (8192, 1024)]
    buffer = 8 << 20 if kind != "8 bits" else 4 << 20
    plain, optimizer, moved, other = made = pair(
        kind, device, buffer, smallest=1 << 16, shapes=shapes
    )
    give_gradients(plain, moved)
    for p in moved:
        other.state_of(p)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    other.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    states = [
        x
        for p in moved
        for name, x in other.state_of(p).items()
        if p.numel() >= 1 << 16 and name != "step"
    ]
    assert all(x.is_pinned() and not x.is_cuda for x in states)
    assert peak <= 3 * buffer + (4 << 20) < sum(x.nbytes for x in states)
    optimizer.step()
    update_both(*made, count=5)
    same(everything(*made[:2]), everything(*made[2:]))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16 weights, fp32 states", "8 bits"])
def test_on_a_card_an_update_is_captured_and_replayed(kind):
    device = torch.device("cuda")
    shapes = [(2048, 2048), (1000, 4097), (333,)]
    plain, optimizer, moved, other = made = pair(
        kind, device, 4 << 20, smallest=1 << 16, shapes=shapes
    )
    update_both(*made, count=2)
    held = other.looked_up(moved)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        other.step()
    for _ in range(4):
        for p, q in zip(plain, moved):
            p.grad.copy_(torch.randn_like(p))
            q.grad.copy_(p.grad)
        optimizer.step()
        other.refresh_rates()
        graph.replay()
    same(everything(*made[:2]), everything(*made[2:]))
    assert held
