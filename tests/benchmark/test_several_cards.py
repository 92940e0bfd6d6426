"""Rows of ``several_cards.py``: every way of each can be asked for, and processes of a tiny one
train alike.
"""

import json
import subprocess
import sys

import pytest
import scripts
import torch
import transformers
from torch import nn

from chronicals.models import quantise_layers
from chronicals.policies import Facts
from chronicals.policies.needed_memory import expected_memory
from chronicals.training.adapters import attach_adapters
from comparison import equal

rows, ways, models = (scripts.script(name) for name in ("cards_rows", "cards_ways", "cards_models"))
peers, cards, table = (
    scripts.script(name) for name in ("fsdp2_peers", "several_cards", "cards_table")
)
WAYS = [(name, way) for name, row in rows.ROWS.items() for way in row.ways]


@pytest.mark.parametrize(("name", "way"), WAYS, ids=lambda part: part)
def test_every_way_is_known(name, way, tmp_path):
    row = rows.ROWS[name]
    if peers.is_peer(way):
        assert set(peers.parts_of(way)) <= set(peers.PARTS)
        return
    config = ways.config_of(row, way, 1, *row.sizes_of_batch(False), False, tmp_path, 2)
    assert (config.sharding == "weights") == (way == "weights")
    assert (config.context_parallel, config.context_heads) == {
        "context": (2, 2),
        "context-keys": (2, 1),
    }.get(way, (1, None))


def test_a_peer_of_unknown_parts_is_refused():
    with pytest.raises(
        ValueError, match="fsdp2-eager: no part eager; there are compile, liger, recompute"
    ):
        peers.parts_of("fsdp2-eager")


@pytest.mark.parametrize("count", [1, 2])
def test_codes_are_the_same_whoever_has_them(count):
    layer = nn.Linear(64, 1024, bias=False, device="meta")
    device = torch.device("cpu")
    parts = [
        models.drawn(layer, 3, rank, count, torch.float32, device).dense() for rank in range(count)
    ]
    whole = models.drawn(layer, 3, 0, 1, torch.float32, device).dense()
    assert equal(torch.cat(parts), whole) and whole.std() == pytest.approx(0.02, rel=0.3)


def test_lines_of_the_table():
    one = {"tokens_per_second": 100.0, "peaks_gib": [1.0], "losses": [1.0], "grad_norms": [2.0]}
    two = {**one, "tokens_per_second": 190.0, "peaks_gib": [2.0, 3.0]}
    saved = {
        "seconds_a_step": 0.2,
        "stalls": [0.1, 0.3],
        "checkpoint_gb": 4.0,
        "steps_slower": [0.01, 0.02],
    }
    failed = {"failed": "first\nOutOfMemoryError: no"}
    lines = cards.shown("row", {"1x": one, "weights": two, "fsdp2": failed, "optimizer": saved}, 2)
    assert "0.950" in lines[1] and "3.0" in lines[1] and "OutOfMemoryError: no" in lines[2]
    assert "stalls 0.10, 0.30 s" in lines[3] and "+2.0%" in lines[3]


def test_a_save_holds_up_what_steps_take_longer_but_for_the_one_that_ends_off_the_clock():
    every = 10
    usual = 0.2
    durations = [usual] * 29
    durations[9] += 0.3
    durations[10] += 0.02
    durations[19] += 0.1
    durations[18] = durations[28] = (
        0.004  # while the run waited for the first checkpoint, the card ended a step
    )
    found = ways.held_up(durations, every)
    assert found["seconds_a_step"] == usual and found["stalls"] == pytest.approx([0.32, 0.1])
    assert found["steps_slower"] == pytest.approx([0, 0])


MEASURED = json.loads((scripts.ROOT / "benchmarks/results/several-cards-h100.json").read_text())[
    "rows"
]
BOTH = [
    (name, way)
    for name, row in rows.ROWS.items()
    for way in row.ways
    if row.base != "codes" and not row.saves
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"), [(n, w) for n, w in BOTH if "peaks_gib" in MEASURED.get(n, {}).get(w, {})]
)
def test_memory_is_expected_as_it_was_measured(name, way, tmp_path):
    """Within a tenth, which is what estimates leave free. Where CUDA graphs run, gradients are
    expected beside activations: these documents have one length, and one graph, in which they
    take turns."""
    row = rows.ROWS[name]
    config = ways.config_of(row, way, 1, row.packs, row.width, False, tmp_path, 2)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, row.config_class)(**row.sizes), dtype=torch.bfloat16
        )
    if row.base == "nf4":
        quantise_layers(model)
    attach_adapters(model, config, None)
    ranks = 1 if way == "1x" else 2
    _, expected = expected_memory(Facts(config, model, ranks, total=80 * 10**9))
    measured = max(MEASURED[name][way]["peaks_gib"])
    most = 1.3 if way != "weights" and "use_lora" not in row.fields else 1.1
    assert 0.9 < expected.needed("nothing") / 2**30 / measured < most


def test_lines_of_the_page(tmp_path, set_constants):
    one = {"tokens_per_second": 100.0, "peaks_gib": [1.0], "losses": [1.0]}
    two = {**one, "tokens_per_second": 190.0, "peaks_gib": [2.0, 3.0], "losses": [1.001]}
    saved = {
        "seconds_a_step": 0.2,
        "stalls": [0.1, 0.3],
        "checkpoint_gb": 4.0,
        "steps_slower": [0.01, 0.02],
    }
    measured = {
        "8b-qlora": {"1x": one, "weights": two},
        "8b-full": {"weights": two, "fsdp2-liger": {"failed": "no"}},
        "save": {"optimizer": saved, "weights": {"failed": "no"}},
    }
    about = {"card": "NVIDIA H100", "cards": 2, "versions": {"torch": "2.13"}, "commit": "abc"}
    (tmp_path / "several-cards-h100.json").write_text(json.dumps({"rows": measured, **about}))
    set_constants(table, RESULTS=tmp_path)
    lines = table.several_cards()
    assert "| 8B QLoRA | weights too | 100 | 190 | 0.950 | 3.0 | 1e-03 |" in lines
    assert "| 8B full, states in bf16 | FSDP2, Liger | - | failed | - | - | - |" in lines
    assert (
        "shared optimizer states, 0.200 s a step: a checkpoint of 4.0 GB holds steps for 0.10, "
        "0.30 s" in lines[-1]
    )
    assert set(rows.PEERS) <= set(table.WAYS) and {way for _, way in WAYS} - set(table.WAYS) == {
        "1x"
    }


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="a dry run on the CPU")
def test_two_processes_run_a_row(tmp_path):
    output = tmp_path / "found.json"
    command = [
        sys.executable,
        cards.__file__,
        "--rows",
        "8b-qlora,8b-full",
        "--ways",
        "1x,weights,fsdp2-recompute",
        "--tiny",
    ]
    subprocess.run([*command, "--steps", "2", "--output", str(output)], check=True, timeout=400)
    found = json.loads(output.read_text())["rows"]
    ours = found["8b-full"]["weights"]
    theirs = found["8b-full"]["fsdp2-recompute"]
    for got, expected, within in (
        (found["8b-qlora"]["weights"], found["8b-qlora"]["1x"], 1e-3),
        (theirs, ours, 1e-2),
    ):
        assert got["losses"] == pytest.approx(expected["losses"], rel=within)
        assert (
            got["grad_norms"] == pytest.approx(expected["grad_norms"], rel=within)
            and len(got["seconds"]) == 2
        )
