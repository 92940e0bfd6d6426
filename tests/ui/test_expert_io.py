"""Experts' I/O, from recorded lines."""

import json

import pytest

from chronicals.ui.expert_io import ExpertIO
from chronicals.ui.pages.experts import points_of


def line(kind, t=0.0, tier="vram", size=0, us=0):
    fields = {"t": t, "kind": kind, "tier": tier, "layer": 1, "expert": 2, "bytes": size, "us": us}
    return json.dumps(fields) + "\n"


RECORDED = [
    line("hit", 10.0),
    line("hit", 10.1),
    line("miss", 10.2),
    line("prefetch", 10.3, "disk", 1000),
    line("load", 11.0, "ram", 2_000_000, 100),
    line("evict", 11.0),
    line("stall", 11.2, us=250),
    line("load", 12.0, "disk", 1_000_000, 200),
    line("step", 12.1, None),
    line("stall", 12.2, us=750),
    line("step", 12.3, None),
]


def test_hits_rates_queue_and_stalls(tmp_path):
    path = tmp_path / "io.jsonl"
    read = ExpertIO(path)
    assert not read.read_on()
    path.write_text("".join(RECORDED))
    assert read.read_on() and not read.read_on()
    vram, ram, disk = (read.tiers[name] for name in ("vram", "ram", "disk"))
    assert vram.hit_rate == pytest.approx(2 / 3) and vram.evicted == 1 and vram.rate is None
    assert ram.rate == pytest.approx(20.0) and ram.hit_rate is None
    assert disk.rate == pytest.approx(5.0) and disk.moved == 1_000_000
    assert read.queue == {10: 2, 11: 1, 12: 0}
    assert read.stalled == {11: 0.25, 12: 0.75} and read.stall_milliseconds == pytest.approx(0.5)
    assert points_of(read.moved["disk"], 1e-6) == [(0, 1.0)]
    assert points_of(read.queue, 1) == [(0, 2), (1, 1), (2, 0)] and points_of({}, 1) == []


def test_lines_of_a_kind_that_is_not_known_are_counted_by_its_name(tmp_path):
    path = tmp_path / "io.jsonl"
    path.write_text("".join(RECORDED) + line("write", 13.0) + line("by_cpu", 13.0) * 2)
    read = ExpertIO(path)
    read.read_on()
    assert read.others == {"by_cpu": 2, "write": 1} and read.steps == 2
    assert read.queue[13] == 0  # no transfer
    path.write_text("".join(RECORDED))
    read.read_on()
    assert not read.others


def test_a_ring_that_began_anew_is_read_anew(tmp_path):
    path = tmp_path / "io.jsonl"
    path.write_text("".join(RECORDED))
    read = ExpertIO(path)
    read.read_on()
    path.write_text(line("hit") + "torn")
    assert read.read_on()
    assert read.tiers["vram"].hits == 1 and read.steps == 0 and read.queue == {0: 0}
    with path.open("a") as file:
        file.write(" line\n" + line("miss"))
    read.read_on()
    assert read.tiers["vram"].misses == 1
