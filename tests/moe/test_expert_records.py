"""Records in host memory: what is damaged is said, processes share them, and they are given back."""

import copy
import json
import multiprocessing
import os
import threading
import weakref

import pytest
import torch

import chronicals
import families
from chronicals.models.four_bits import quantise_experts
from chronicals.moe.offload import copies, engine, layers, slab
from chronicals.moe.offload.cpu_share import CpuShare, HostShare
from chronicals.moe.offload.errors import ExpertRecordError
from chronicals.moe.offload.events import EventLog, LayerCounts
from chronicals.moe.offload.eviction import ByTrace, LeastFrequentlyUsed, LeastRecentlyUsed
from chronicals.moe.offload.layers import LayerRecords, slot_bytes_of
from chronicals.moe.offload.slab import HostSlab, filling
from chronicals.patching.patch import patch_parts
from chronicals.quantization.expert_records import PlainRecords, RecordLayout
from chronicals.ui.expert_io import ExpertIO
from mutants import mutant

IDS = torch.arange(1, 24)[None]


def offloaded(slots=4, **options):
    torch.manual_seed(7)
    model = families.routed("Qwen3Moe", num_experts=8)
    size = 6144 * slots
    return chronicals.offload(model, vram=size, ram="1GiB", device="cpu", **options)


def run(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("layer", [0, 1])
def test_a_corrupted_record_names_layer_and_expert(layer):
    model = offloaded()
    number = 8 * layer + 5
    model.offload.engine.slab.record(number)[77] ^= 4
    words = rf"model\.layers\.{layer}\.mlp\.experts, expert 5: .*not what was loaded"
    with pytest.raises(ExpertRecordError, match=words):
        model.offload.verify()
    with pytest.raises(ExpertRecordError, match=words):
        for expert in range(8):  # whatever the router chooses
            router = model.model.layers[layer].mlp.gate
            router.weight.data.zero_()
            router.weight.data[expert] = 1.0
            run(model)
    model.offload.close()


@pytest.mark.parametrize("form", ["fp32", "nf4"])
@pytest.mark.parametrize("place", [0, 0.5, 1], ids=["first", "middle", "last"])
def test_no_text_comes_of_a_changed_byte(form, place):
    """Wherever it is, of values, codes or scales."""
    model = families.routed("Qwen3Moe", num_experts=8)
    if form == "nf4":
        quantise_experts(model)
    streamed = chronicals.offload(model, vram="1MiB", ram="1GiB", device="cpu")
    engine = streamed.offload.engine
    for records in engine.layers:
        for expert in range(records.count):
            record = engine.slab.record(records.first + expert)
            record[int(place * (records.layout.bytes - 1))] ^= 1
    words = r"layers\.0\.mlp\.experts, expert \d: .*not what was loaded"
    with pytest.raises(ExpertRecordError, match=words):
        streamed.generate(IDS, max_new_tokens=3, pad_token_id=0, eos_token_id=None)
    streamed.offload.close()


def test_a_record_that_was_never_written():
    model = offloaded()
    model.offload.engine.slab.checksums[3] = None
    with pytest.raises(
        ExpertRecordError, match=r"layers\.0\.mlp\.experts, expert 3: .*never written"
    ):
        model.offload.verify()
    model.offload.close()


def test_a_closed_model_says_so():
    model = offloaded()
    run(model)
    model.offload.close()
    model.offload.close()
    with pytest.raises(RuntimeError, match=r"model\.offload was closed; load the model again"):
        run(model)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"disk": "cache"}, r"disk='cache': experts are read from host memory alone"),
        ({"mode": "fast"}, r"mode='fast': expected one of exact, numerical"),
        ({"policy": "fifo"}, r"policy='fifo': expected one of lru, lfu, static"),
        ({"policy": "static"}, r"policy='static': give trace="),
        ({"predictor": "oracle"}, r"predictor='oracle': expected"),
        ({"vram": "16 apples"}, r"vram='16 apples': is no size"),
        ({"vram": "20KiB"}, r"vram='20KiB': holds 3 experts .* the least that works is 24.00KiB"),
        ({"ram": "100KiB"}, r"ram='100KiB': all experts take .* the least that works is 128.00KiB"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_refused(options, words):
    model = families.routed("Qwen3Moe", num_experts=8)
    given = {"vram": 6 * 6144, "ram": "1GiB", "device": "cpu", **options}
    with pytest.raises(ValueError, match=words):
        chronicals.offload(model, **given)
    run(model)  # it is as it was


def test_models_that_cannot_be_offloaded():
    with pytest.raises(ValueError, match="LlamaForCausalLM has no routed experts"):
        chronicals.offload(families.build("llama"), vram="1MiB", device="cpu")
    model = offloaded()
    with pytest.raises(ValueError, match="its experts are offloaded already"):
        chronicals.offload(model, vram="1MiB", device="cpu")
    with pytest.raises(ValueError, match="would be missing in the files; save its adapters"):
        model.save_pretrained("nowhere")
    state = families.routed("Qwen3Moe", num_experts=8).state_dict()
    with pytest.raises(RuntimeError, match="records in host memory, which do not change"):
        model.load_state_dict(state)
    with pytest.raises(ValueError, match="cannot be cast to torch.bfloat16"):
        model.bfloat16()
    model.offload.close()


def test_lines_of_events(tmp_path):
    model = offloaded(io=tmp_path / "io.jsonl")
    for _ in range(3):
        run(model)
    report = model.offload.report()
    model.offload.close()
    lines = [json.loads(line) for line in (tmp_path / "io.jsonl").read_text().splitlines()]
    assert {line["kind"] for line in lines} >= {"hit", "miss", "load", "evict", "stall", "step"}
    loads = [line for line in lines if line["kind"] == "load"]
    assert sum(line["bytes"] for line in loads) == report.bytes
    assert len(loads) == sum(layer.loads for layer in report.layers)
    assert sum(line["kind"] == "step" for line in lines) == report.steps == 3
    io = ExpertIO(tmp_path / "io.jsonl")
    assert io.read_on() and io.tiers["vram"].misses == report.misses and io.steps == 3
    assert json.loads(json.dumps(report.to_json()))["hits"] == report.hits and str(report)


def test_packed_weights_are_released():
    """Records are all that is left of the codes that they were made from."""
    model = families.routed("Qwen3Moe", num_experts=8)
    quantise_experts(model)
    streamed = chronicals.offload(model, vram="1MiB", ram="1GiB", device="cpu")
    for layer in streamed.offload.engine.layers:
        for form in layer.formats.values():
            own = [form.one.tensors[name] for name in form.parts]
            assert own and all(tensor.device.type == "meta" for tensor in own)
    streamed.offload.close()


def test_policies_evict_by_their_rank():
    def order(policy, uses):
        for expert in uses:
            policy.use((0, expert))
        return [expert for _, expert in policy.evict(9, set())]

    uses = [1, 2, 3, 1, 1, 2]
    assert order(LeastRecentlyUsed(), uses) == [3, 1, 2]
    assert order(LeastFrequentlyUsed(), uses) == [3, 2, 1]
    assert order(ByTrace({(0, 1): 5, (0, 2): 1, (0, 3): 9}), uses) == [2, 1, 3]


@pytest.mark.parametrize("policy", [LeastRecentlyUsed(), LeastFrequentlyUsed(), ByTrace({})])
def test_policies_evict_what_passes_and_nothing_that_is_kept(policy):
    policy.use((0, 1))
    policy.use((0, 2))
    policy.use((0, 3), (0, 4), passing=True)
    assert policy.evict(1, {(0, 4)}) == [(0, 3)]
    assert len(policy.evict(1, {(0, 1), (0, 4)})) == 1
    assert policy.evict(1, {(0, 1), (0, 4)}) == []
    assert policy.evict(3, set()) == [(0, 4), (0, 1)]
    assert policy.evict(3, set()) == []


def test_experts_of_a_long_pass_leave_before_the_others(monkeypatch):
    """A pass over all experts of a layer must not push out all that others have."""
    monkeypatch.setattr(layers, "WAVE_BYTES", 1)

    class Scanned(LeastRecentlyUsed):
        def use(self, *experts, passing=False):
            super().use(*experts)

    def hits(policy):
        model = offloaded(slots=10, predictor=None, policy=policy)
        with torch.no_grad():
            for _ in range(3):
                model(torch.randint(1, 61, (4, 40)))
        report = model.offload.report()
        model.offload.close()
        return report.hits

    assert hits("lru") >= hits(Scanned()) + 4


def read_shared(name, count, size, results):
    other = HostSlab(count, size, name)
    results.put((other.is_owner, other.check_all(), other.record(2)[:4].tolist()))
    other.close()


@pytest.mark.slow
def test_processes_share_one_slab():
    name = f"test-{os.getpid()}"
    owner = HostSlab(5, 1000, name)
    assert owner.is_owner
    for number in range(5):
        owner.record(number).fill_(number + 1)
        owner.written(number)
    owner.finish()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=read_shared, args=(name, 5, 1000, results))
    process.start()
    assert results.get(timeout=60) == (False, {}, [3, 3, 3, 3])
    process.join(60)
    with pytest.raises(ValueError, match="holds 5 records of 1000 bytes, not 6 of 1000"):
        HostSlab(6, 1000, name)
    path = owner.path
    assert path.exists()
    owner.close()
    assert not path.exists()


def test_a_shared_slab_that_was_cut():
    name = f"test-cut-{os.getpid()}"
    owner = HostSlab(3, 5000, name)
    for number in range(3):
        owner.written(number)
    owner.finish()
    os.truncate(owner.path, 4096)
    with pytest.raises(ValueError, match="was cut, so records at its end are missing"):
        HostSlab(3, 5000, name)
    owner.close()


def complete(name, value):
    """A shared slab of one record of these bytes."""
    made = HostSlab(1, 1000, name)
    made.record(0).fill_(value)
    made.written(0)
    made.finish()
    return made


def test_memory_is_freed_when_a_slab_is_closed():
    made = HostSlab(1, 1000)
    mapped = weakref.ref(made._map)
    made.close()
    assert mapped() is None


def test_a_slab_whose_filling_fails_is_given_back():
    name = f"test-failed-{os.getpid()}"
    made = HostSlab(2, 1000, name)
    with pytest.raises(ExpertRecordError, match="cut"), filling(made):
        raise ExpertRecordError("cut")
    assert not made.path.exists() and made._lock is None
    other = complete(name, 3)
    assert other.is_owner
    other.close()


def test_what_a_killed_process_left_is_filled_anew():
    """Its records may be those of another model."""
    name = f"test-left-{os.getpid()}"
    complete(name, 1)._let_go()
    found = complete(name, 2)
    assert found.is_owner and found.check_all() == {} and found.record(0)[0] == 2
    found.close()


def test_processes_that_wait_for_one_that_is_killed_go_on():
    name = f"test-killed-{os.getpid()}"
    killed = HostSlab(1, 1000, name)
    made = []
    waiting = [
        threading.Thread(target=lambda: made.append(complete(name, 5)), daemon=True)
        for _ in range(3)
    ]
    for thread in waiting:
        thread.start()
        thread.join(0.1)
    killed._let_go()
    for thread in waiting:
        thread.join(20)
    assert sorted(one.is_owner for one in made) == [False, False, True]
    for one in made:
        assert one.check_all() == {} and one.record(0)[0] == 5
    for one in made:
        one.close()
    assert not killed.path.exists()


class Runtime:
    """A driver that pins so many chunks."""

    def __init__(self, most):
        self.left = most

    def cudaHostRegister(self, *_):
        self.left -= 1
        return int(self.left < 0)

    def cudaHostUnregister(self, _):
        return 0


@pytest.mark.parametrize("most", [0, 2, 9])
def test_memory_that_cannot_all_be_pinned(most, monkeypatch, caplog):
    monkeypatch.setattr(slab, "PIN_CALL_BYTES", 3 * slab.RECORD_ALIGNMENT)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(most))
    memory = HostSlab(10, 4000)
    if not most:
        with pytest.raises(ValueError, match="not even .* can be pinned; raise the limit"):
            memory.pin()
        return
    memory.pin()
    pinned = min(memory.bytes, most * memory.chunk_bytes)
    assert memory.pinned == pinned and memory.is_pinned(0)
    assert memory.is_pinned(9) == (most == 9)
    assert ("are pinned; the records behind them" in caplog.text) == (most == 2)
    memory.close()


@pytest.mark.parametrize("prefetch", [True, False])
def test_copies_go_to_their_slot(monkeypatch, prefetch):
    """Whole and in pieces, records of a slot's size and smaller ones."""
    wrong = mutant(copies, "self._pieces[row] if in_pieces else self._whole[row]", "self._whole[0]")
    for of, right in ((copies, True), (wrong, False)):
        monkeypatch.setattr(of, "PREFETCH_PIECE_BYTES", 3)
        monkeypatch.setattr(of, "PREFETCH_GROUP_BYTES", 16)
        slots = torch.zeros(3, 8, dtype=torch.uint8)
        records = torch.arange(1, 17, dtype=torch.uint8).view(2, 8)
        whole, small = of.Rows(records), of.Rows(records[:, :6])
        copy_engine = of.CopyEngine(torch.device("cpu"), slots)
        copy = copy_engine.prefetch if prefetch else copy_engine.demand
        copy([of.Load(whole, 1, 2)], copy_engine.current())
        copy([of.Load(small, 0, 1), of.Load(small, 1, 0)], copy_engine.current())
        assert torch.equal(slots[2], records[1]) == right
        assert torch.equal(slots[1, :6], records[0, :6]) == right
        assert torch.equal(slots[0, :6], records[1, :6]) == right
        assert not slots[:2, 6:].any() or not right


class NotedStream(copies.HostStream):
    """Keeps the events that it waits for."""

    def __init__(self):
        self.waited = []

    def wait_event(self, event):
        self.waited.append(event)


def test_a_copy_waits_for_what_its_slot_was_used_by(monkeypatch):
    """By the products that read the slot, and by a copy that no product waited for; once each."""
    monkeypatch.setattr(copies, "HostStream", NotedStream)
    slots = torch.zeros(4, 8, dtype=torch.uint8)
    records = copies.Rows(torch.zeros(4, 8, dtype=torch.uint8))
    copy_engine = copies.CopyEngine(torch.device("cpu"), slots)

    products = NotedStream()

    def copy(by, *into):
        by([copies.Load(records, 0, slot) for slot in into], products)

    copy(copy_engine.demand, 0, 1)
    copy(copy_engine.prefetch, 2)
    demanded, prefetched = (copy_engine._awaited[slot] for slot in (0, 2))
    copy_engine.wait_for([0, 1], products)
    assert products.waited == [demanded]
    copy_engine.were_read([0, 1], products)
    read = copy_engine._read[0]
    copy(copy_engine.demand, 0, 1, 2, 3)
    assert copy_engine._demand.waited == [read, prefetched]
    copy_engine.wait_for([0, 1, 2, 3], products)
    assert len(products.waited) == 2
    copy_engine.were_read([3], products)
    last = copy_engine._read[3]
    copy_engine.copy_before_products([copies.Load(records, 0, 3)], products)
    copy_engine.wait_for([3], products)
    assert products.waited[2:] == [last]


class CountedRows(copies.Rows):
    """Notes the rows of each copy."""

    copied: list

    def parts(self, row, in_pieces):
        self.copied.append([row])
        return super().parts(row, in_pieces)

    def run(self, first, count):
        self.copied.append(list(range(first, first + count)))
        return super().run(first, count)


@pytest.mark.parametrize("gap", [0, 3])
def test_records_and_slots_that_follow_one_another_are_one_copy(gap, monkeypatch):
    """Not over a slot whose products have to end first, nor where rows lie otherwise."""
    monkeypatch.setattr(CountedRows, "copied", [], raising=False)
    memory = torch.arange(1, 1 + 8 * (8 + gap), dtype=torch.uint8).view(8, 8 + gap)
    records = CountedRows(memory[:, :8])
    wide = torch.zeros(8, 8 + gap, dtype=torch.uint8)
    copy_engine = copies.CopyEngine(torch.device("cpu"), wide, times=True)
    stream = copy_engine.current()

    def copied(*pairs, rows=records, by=copy_engine):
        CountedRows.copied.clear()
        by.demand([copies.Load(rows, record, slot) for record, slot in pairs], stream)
        for record, slot in pairs:
            assert torch.equal(by._slots[slot, :8], memory[record, :8])
        return [*CountedRows.copied]

    assert copied((0, 2), (1, 3), (2, 4), (4, 5), (5, 7)) == [[0, 1, 2], [4], [5]]
    times = [copy_engine.timing(slot)() for slot in (2, 3, 4)]
    assert times[0] == times[1] == times[2] >= 0
    whole = copy_engine._timed[2]
    assert times[0] * 3 == pytest.approx(whole.began.elapsed_time(whole.filled) * 1e3)
    whole.filled.record(stream)
    assert copy_engine.timing(2)() == times[0]  # asked once of the device
    copy_engine.wait_for([2, 3, 4, 5, 7], stream)
    copy_engine.were_read([3], stream)
    assert copied((0, 2), (1, 3), (2, 4)) == [[0], [1, 2]]
    other = CountedRows(memory[:, :8].clone())
    assert copied((3, 0), (4, 1), rows=other) == ([[3, 4]] if gap == 0 else [[3], [4]])
    chunks = CountedRows(memory[:, :8], ends={1, 5})
    assert copied((0, 2), (1, 3), (2, 4), (3, 5), rows=chunks) == [[0, 1], [2, 3]]
    dense = copies.CopyEngine(torch.device("cpu"), torch.zeros(8, 9 + gap, dtype=torch.uint8))
    assert copied((3, 0), (4, 1), by=dense) == [[3], [4]]


def test_copies_end_with_their_chunk(monkeypatch):
    monkeypatch.setattr(slab, "PIN_CALL_BYTES", 3 * 4096 + 1)
    memory = HostSlab(9, 4000)
    assert [memory.chunk_ends(first, 4) for first in (0, 1, 2)] == [{2}, {1}, {0, 3}]
    memory.close()
    streamed = offloaded(slots=8)
    ends = [rows.ends for rows in streamed.offload.engine.residents._records]
    assert (
        ends
        == [streamed.offload.engine.slab.chunk_ends(first, 8) for first in (0, 8)]
        != [set()] * 2
    )
    streamed.offload.close()


def test_slots_lie_as_records_where_that_takes_little_memory():
    def slot(width):
        layout = RecordLayout.of({"down_proj": PlainRecords((2, 1, width), torch.uint8)})
        return slot_bytes_of([LayerRecords("", {}, layout, 0, 1)])

    assert slot(2_653_184) == 648 * 4096 and slot(9 << 20) == 9 << 20
    assert slot(6144) == 6144 and slot(300_000) == 300_032  # a part begins at multiples of 256


def test_prefetched_records_are_waited_for_in_groups_of_their_bytes(monkeypatch):
    monkeypatch.setattr(copies, "PREFETCH_GROUP_BYTES", 20)
    records = copies.Rows(torch.zeros(5, 8, dtype=torch.uint8))
    loads = [copies.Load(records, number, number) for number in range(5)]
    copy_engine = copies.CopyEngine(torch.device("cpu"), torch.zeros(5, 8, dtype=torch.uint8))
    for by, same in (
        (copy_engine.prefetch, [0, 0, 1, 1, 2]),
        (copy_engine.demand, [0, 0, 0, 0, 0]),
    ):
        by(loads, copy_engine.current())
        events = [copy_engine._awaited[slot] for slot in range(5)]
        assert [list(dict.fromkeys(events)).index(event) for event in events] == same
        copy_engine.wait_for([1, 4], copies.HostStream())
        assert sorted(copy_engine._awaited) == [0, 2, 3]


def test_planted_faults_of_the_engine_are_found(monkeypatch):
    model = offloaded(slots=4)
    torch.manual_seed(7)
    resident = families.routed("Qwen3Moe", num_experts=8)
    patch_parts(resident)
    expected = run(resident)
    patch_parts(model)
    assert torch.equal(run(model), expected)
    wrong = mutant(engine, "numbers[expert - first] = slot\n", "numbers[expert - first] = 0\n")
    monkeypatch.setattr(engine.ExpertEngine, "waves", wrong.ExpertEngine.waves)
    assert not torch.equal(run(model), expected)
    model.offload.close()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fp32", "nf4"])
@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_the_share_of_the_cpu(name, form):
    """It computes some of the missing experts of few tokens; with gradients, and of many, none."""
    count = {"GptOss": "num_local_experts"}.get(name, "num_experts")
    model = families.routed(name, **{count: 8})
    if form == "nf4":
        quantise_experts(model)
    expected = copy.deepcopy(model)
    patch_parts(expected)
    streamed = chronicals.offload(
        model, vram=6 * 19200, ram="1GiB", device="cpu", mode="numerical", predictor=None
    )
    patch_parts(streamed)
    streamed.offload.engine.cpu.cpu_seconds = streamed.offload.engine.cpu.bus_seconds
    with torch.no_grad():
        for tokens in (1, 5, 1, 30):
            ids = torch.randint(1, 61, (1, tokens))
            torch.testing.assert_close(
                streamed(ids).logits, expected(ids).logits, rtol=1e-5, atol=1e-5
            )
    report = streamed.offload.report()
    by_cpu = sum(layer.by_cpu for layer in report.layers)
    assert report.mode == "numerical" and 0 < by_cpu < report.misses
    assert report.misses == by_cpu + sum(layer.loads for layer in report.layers)
    long = torch.randint(1, 61, (1, 65))
    with torch.no_grad():
        assert torch.equal(streamed(long).logits, expected(long).logits)
    assert torch.equal(streamed(IDS).logits, expected(IDS).logits)
    assert by_cpu == sum(layer.by_cpu for layer in streamed.offload.report().layers)
    streamed.offload.close()


def test_the_cpu_computes_beside_the_device(monkeypatch):
    """Its rows are copied to it before products are launched, behind which a copy would wait."""
    seen = []

    def noting(of, name, word):
        own = getattr(of, name)

        def noted(*given, **named):
            seen.append(word)
            return own(*given, **named)

        monkeypatch.setattr(of, name, noted)

    noting(torch.Tensor, "cpu", "rows")
    noting(engine.ExpertEngine, "memory_of", "products")
    noting(HostShare, "outputs", "cpu")
    model = offloaded(slots=6, mode="numerical", predictor=None)
    patch_parts(model)
    model.offload.engine.cpu.cpu_seconds = model.offload.engine.cpu.bus_seconds
    with torch.no_grad():
        model(IDS[:, :1])
    assert seen[:3] == ["rows", "products", "cpu"]
    model.offload.close()


def test_each_copy_is_timed_once():
    log = EventLog([LayerCounts()])
    assert log.read_timings() is None
    for microseconds in (2e6, 4e6):
        log.load(0, 0, 1, lambda microseconds=microseconds: microseconds)
    assert log.read_timings() == 3.0 and log.read_timings() is None
    log.load(0, 0, 1, lambda: 5e6)
    log.load(0, 0, 1, lambda: None)
    assert log.read_timings() == 5.0 and log.copied == 3


def test_bus_and_cpu_end_together():
    share = CpuShare(1 << 20)
    share.bus_seconds, share.cpu_seconds = 2.0, 6.0
    assert share.of_missing(0, [3, 4, 9, 11]) == [11] and share.of_missing(0, []) == []
    share.bus_seconds = 6.0
    assert share.of_missing(1, [3, 4, 9, 11]) == [9, 11]
    share.copy_took(11.0)
    assert share.bus_seconds == 7.0
