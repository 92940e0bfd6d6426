"""Every planted fault of ``tests/mutations`` fits the source: its text occurs once, the new text
is Python, its tests exist.
"""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FAULTS = [
    fault
    for path in sorted(ROOT.glob("tests/mutations/*.toml"))
    for fault in tomllib.loads(path.read_text())["mutant"]
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["name"])
def test_a_planted_fault_fits_the_source(fault):
    source = (ROOT / "src" / "chronicals" / fault["file"]).read_text()
    assert source.count(fault["old"]) == 1
    ast.parse(source.replace(fault["old"], fault["new"]))
    for test in fault["tests"]:
        file, *names = test.partition("[")[0].split("::")
        text = (ROOT / file).read_text()
        assert all(re.search(rf"^\s*(def|class) {name}\b", text, re.MULTILINE) for name in names), (
            test
        )
