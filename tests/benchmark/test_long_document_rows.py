"""Rows of long documents: what is left of one that is ended, and the profile of a step."""

import json
import time
from dataclasses import replace

import pytest
import torch
from scripts import script

from chronicals.attention import backends, document_attention

profiles = script("step_profile")
steps = script("document_steps")
capped = script("capped_documents")

ROW = capped.Row(1.0, "ours", "tiny", 4, 512, 150.0, 100.0)


def event(name, begin, duration, cat="kernel"):
    return {"name": name, "cat": cat, "ts": begin, "dur": duration}


TRACE = [
    event("ampere_bf16_gemm", 1e6, 2e6),
    event("void pytorch_flash::flash_fwd_kernel<...>", 3e6, 1e6),
    event("Memcpy DtoH (Device -> Pinned)", 3.5e6, 1.5e6, "gpu_memcpy"),
    event("Memcpy HtoD (Pinned -> Device)", 7e6, 1e6, "gpu_memcpy"),
    event("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", 7.5e6, 2.5e6),
    event("Memcpy DtoD (Device -> Device)", 10e6, 1e6, "gpu_memcpy"),
    event("aten::mm", 0.0, 50e6, "cpu_op"),
]


def test_a_steps_seconds_are_told_by_part():
    """Of copies that run beside kernels, what no kernel hides; what the host does is not there."""
    found = profiles.profile_of(TRACE)
    assert found["seconds"] == pytest.approx(10)
    assert found["parts"] == {
        "attention, backward": 2.5,
        "products": 2.0,
        "copies to the host": 1.5,
        "attention, forward": 1.0,
        "copies from the host": 1.0,
        "copies": 1.0,
    }
    assert found["waiting_for_copies"] == pytest.approx(1.0 + 0.5)
    assert found["idle"] == pytest.approx(2.0)
    assert found["kernels"][0]["calls"] == 1 and len(found["kernels"]) == 6
    assert "nothing runs 2.00" in profiles.words_of_profile(found)
    assert profiles.profile_of(TRACE[-1:]) == {}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("flash_bwd_dot_do_o_kernel", "attention, backward"),
        ("flash_bwd_convert_dq_kernel", "attention, backward"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma", "attention, backward"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "attention, forward"),
        ("kernel_cutlass_flash_attn_cute_flash_fwd_sm90", "attention, forward"),
        ("kernel_cutlass_flash_attn_cute_flash_bwd_sm90", "attention, backward"),
        ("Memset (Device)", "copies"),
    ],
)
def test_kernels_of_attention_are_told_apart(name, part):
    assert profiles.part_of(name) == part


CHILD = """
import json, pathlib, subprocess, sys, time
own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
out = pathlib.Path(sys.argv[2])
out.write_text(json.dumps({"seconds": 4.0, "floor_seconds": 3.0, "loss": 1.0, "child": own.pid}))
print("the last words", flush=True)
time.sleep(60)
"""


def test_a_row_never_outlives_its_time(tmp_path, monkeypatch):
    """It is killed with what it started; what it had found and said is kept."""
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    monkeypatch.setattr(capped, "__file__", str(child))
    began = time.monotonic()
    found = capped.in_a_process(replace(ROW, budget=0.9), tmp_path / "out-row-0")
    assert time.monotonic() - began < 10
    assert (found["seconds"], found["share_of_floor"]) == (4.0, 0.75)
    assert "over its 1 s" in found["late"] and "the last words" in found["late"]
    kept = json.loads((tmp_path / "out-row-0.json").read_text())
    assert kept["loss"] == 1.0 and "last words" in (tmp_path / "out-row-0.log").read_text()
    for _ in range(100):
        if not running(kept["child"]):
            return
        time.sleep(0.05)
    raise AssertionError("what the row had started still runs")


def running(pid):
    """Whether a process exists that is not waiting to be collected."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_row_that_fails_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(capped.sys, "argv", ["", json.dumps(vars(ROW)), str(tmp_path / "o.json")])

    def run(row, note):
        note({"length": 7})
        raise ValueError("no room")

    monkeypatch.setattr(capped, "run_ours", run)
    with pytest.raises(ValueError, match="no room"):
        capped.main()
    assert json.loads((tmp_path / "o.json").read_text()) == {
        "length": 7,
        "error": "ValueError: no room",
    }


def attend():
    q = torch.randn(16, 2, 16, dtype=torch.bfloat16)
    document_attention(q, q, q, torch.tensor([0, 16], dtype=torch.int32), 16)


def test_the_backend_that_is_asked_for_must_run():
    usual = backends.order
    with capped.attending_by("per-document"):
        attend()
    with (
        pytest.raises(RuntimeError, match="--attention flash: attention ran by per-document"),
        capped.attending_by("flash"),
    ):
        attend()
    with (
        pytest.raises(RuntimeError, match="ran by none in 16 bits"),
        capped.attending_by("per-document"),
    ):
        pass
    assert backends.order is usual
    with capped.attending_by(""):
        pass


def test_counts_of_the_allocator_are_those_that_this_torch_has(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = {"num_alloc_retries": 3, "num_device_free": 5, "allocated_bytes.all.peak": 7}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: found)
    assert steps.allocator_counts() == {"num_alloc_retries": 3, "num_device_free": 5}


@pytest.mark.slow
def test_a_row_notes_its_figures_after_each_step(tmp_path):
    """On the CPU, where a trace has no events of a card."""
    noted = []
    found = {}

    def note(figures):
        found.update(figures)
        noted.append(sorted(figures))

    capped.run_ours(replace(ROW, length=256, profiles=True), note)
    noted_steps = [figures for figures in noted if "loss" in figures]
    assert len(noted_steps) == found["steps"] == len(found["all_seconds"]) == 3
    assert found["seconds"] == min(found["all_seconds"][1:])
    assert len(found["allocator"]) == 3
    assert noted[-1] == ["profile", "traced_seconds"] and found["profile"] == {}
    assert noted.index(["floor", "floor_seconds"]) < noted.index(noted_steps[0])
