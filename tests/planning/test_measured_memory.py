"""Every recorded row holds what a plan of it predicts."""

import importlib.util
import sys
from functools import cache
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

LARGEST = 0.05
"""Error that a plan may have beside a measured peak."""

ROWS = (
    "row-0.5b-full-fixed-h100",
    "row-0.5b-full-2k-h200",
    "row-0.5b-lora-fixed-h100",
    "row-0.5b-full-distill-fixed-h200",
    "row-0.5b-full-dpo-70-h200",
    "row-8b-full-8bit-fixed-h200",
    "row-8b-lora-dora-fixed-h200",
    "row-8b-qlora-fixed-h200",
    "row-8b-full-fp8-fixed-h200",
    "row-30b-a3b-qlora-fixed-h100",
    "row-olmoe-1b-7b-full-fixed-h100",
)
"""A row of each kind; `benchmarks/plan_table.py --measured` compares all."""


@cache
def memory_table():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        name = "memory_table"
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_memory_is_planned_as_it_was_measured(row, tmp_path):
    (tmp_path / f"{row}.json").write_bytes((BENCHMARKS / "results" / f"{row}.json").read_bytes())
    found = list(memory_table().compared(tmp_path))
    assert found
    for one in found:
        assert abs(one.error) < LARGEST, f"{one.changes}: {one.planned.words()}"
