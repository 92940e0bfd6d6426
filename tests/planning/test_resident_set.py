"""The resident set of a run on the CPU is what the plan of it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import runs
import tiny
from chronicals.config import Recipe
from chronicals.distributed import Mesh
from chronicals.planning import planned_space

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status"),
]

RUN = Path(__file__).with_name("resident_run.py")

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "vocab_size": 8000,
}
"""91 MiB of weights in fp32."""

FIELDS = {"max_seq_length": 256, "max_steps": 2}

LARGEST = 0.1
"""Error that a plan may have beside the measured growth."""

BLOCKS_OF_THEIR_OWN = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Without it glibc keeps freed tensors of up to 32 MiB, as tensors of small models all are."""

WAYS = {
    "full": {"use_lora": False},
    "full, one micro-batch": {"use_lora": False, "gradient_accumulation_steps": 1},
    "LoRA": {"use_lora": True, "lora_rank": 16},
    "8-bit states": {"use_lora": False, "use_8bit_optimizer": True},
}


def planned(folder, fields):
    """The space of the run, by the plan that ``train --check`` prints."""
    tiny.llama(**SIZES).config.save_pretrained(folder)
    recipe = Recipe(model=str(folder), data=["rows.jsonl"])
    return planned_space(recipe, runs.config(folder, **fields), Mesh())


@pytest.mark.parametrize("way", WAYS)
def test_the_resident_set_grows_as_planned(tmp_path, way):
    fields = {**FIELDS, **WAYS[way]}
    space = planned(tmp_path, fields)
    command = [sys.executable, str(RUN), str(tmp_path), str(tmp_path), json.dumps(fields)]
    tests = os.pathsep.join([str(RUN.parents[1]), *sys.path])
    environment = {**os.environ, **BLOCKS_OF_THEIR_OWN, "PYTHONPATH": tests}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout.splitlines()[-1])
    expected = sum(space.host.values())
    assert abs(expected / grown - 1) < LARGEST, f"{grown:,} of {expected:,}: {space.peak.words()}"
