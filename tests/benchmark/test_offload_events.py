"""The measurement of copies of experts: its sums by hand, a tiny run, and the limits on a card."""

import json
import sys

import pytest
import scripts
import torch

offload_events = scripts.script("offload_events")


def copy(ts, dur, to="Memcpy HtoD (Pinned -> Device)", size=0):
    return {"name": to, "cat": "gpu_memcpy", "ts": ts, "dur": dur, "args": {"bytes": size}}


def kernel(ts, dur):
    return {"name": "k", "cat": "kernel", "ts": ts, "dur": dur}


@pytest.mark.parametrize(
    ("events", "share"),
    [
        ([copy(0, 100), kernel(50, 100)], 0.5),
        ([copy(0, 100), kernel(0, 20), kernel(10, 30)], 0.4),
        ([copy(0, 100), copy(80, 100)], 20 / 180),
        ([copy(0, 100), copy(0, 50, "Memcpy DtoH (Device -> Pinned)")], 0.0),
        ([copy(10, 10), {"name": "aten::mm", "cat": "cpu_op", "ts": 0, "dur": 99}], 0.0),
        ([kernel(0, 5)], None),
    ],
)
def test_share_of_copies_that_others_cover(events, share):
    found = offload_events.covered(events)
    assert found is share if share is None else found == pytest.approx(share)


def test_bytes_to_the_host():
    events = [copy(0, 1, "Memcpy DtoH (Device -> Pageable)", 12), copy(0, 1, size=7), kernel(0, 1)]
    assert offload_events.bytes_to_host(events) == 12


def run(out, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["offload_events.py", str(out), "--tiny"])
    with pytest.raises(SystemExit) as ended:
        offload_events.main()
    return ended.value.code, json.loads(out.read_text())


@pytest.mark.slow
def test_a_tiny_run(tmp_path, monkeypatch):
    code, found = run(tmp_path / "out.json", monkeypatch)
    assert 0.98 <= found["budget"] <= 1 and 0 < found["hit_rate"] < 1
    assert found["passes"]["many"]["allocations"] == 0
    if not torch.cuda.is_available():
        assert code == 0 and found["passes"]["one"]["covered"] is None


def test_what_is_wrong_is_said():
    fine = {"allocations": 0, "looks": 1.0, "down": 9, "covered": 0.8}
    found = {"budget": 0.99, "record": 100, "passes": {"one": fine, "many": fine}}
    assert offload_events.failures(found) == []
    bad = {"allocations": 2, "looks": 1.5, "down": 100, "covered": 0.6}
    worse = {**found, "budget": 1.01, "passes": {"one": fine, "many": bad}}
    assert len(offload_events.failures(worse)) == 5


@pytest.mark.gpu
def test_on_a_card_slots_fill_their_budget_and_the_host_looks_once(tmp_path, monkeypatch):
    """Tiny products hide no copies; what they cover, the script measures at full size."""
    _, found = run(tmp_path / "out.json", monkeypatch)
    assert 0.98 <= found["budget"] <= 1
    for figures in found["passes"].values():
        assert figures["allocations"] == 0 and figures["looks"] <= 1
        assert figures["down"] < found["record"]
