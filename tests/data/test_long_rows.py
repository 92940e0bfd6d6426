"""Documents of a million tokens in the store and its gate: linear time, bounded memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
MILLION = 1 << 20

BYTES_A_TOKEN = 1500
"""Most bytes of the resident set for a token of the longest document: its text, and what the tokenizer
makes of it. 660 to 800 were seen."""


def run_of(folder, tokens, count):
    folder.mkdir()
    script = Path(__file__).with_name("long_rows_run.py")
    command = [sys.executable, str(script), str(folder), str(tokens), str(count)]
    path = {"PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS}"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **path}
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_time_is_linear_and_memory_that_of_one_document(tmp_path):
    """Of rows of a million tokens: a token takes no longer than in rows of a quarter, and more rows
    take no more memory than one and a half times that of two."""
    short = run_of(tmp_path / "short", MILLION // 4, 8)
    long = run_of(tmp_path / "long", MILLION, 2)
    several = run_of(tmp_path / "several", MILLION, 5)
    assert len(several["lengths"]) == 5 and min(several["lengths"]) > 0.99 * MILLION
    assert long["seconds"] < 2 * short["seconds"]
    assert several["grown"] < 1.5 * long["grown"]
    assert several["grown"] < BYTES_A_TOKEN * MILLION
