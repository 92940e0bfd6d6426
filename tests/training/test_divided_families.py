"""Models of many families, experts and recurrent ones among them, train with divided weights as
with whole ones.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

import families
import two_processes

sys.path.insert(0, str(Path(__file__).parent))
import divided_families

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="one process would compute on the card, two on the CPU"
)

UNADAPTED = ("gpt2", "mamba", "jamba")
"""Without linear layers that can be divided, or whose weights their class reads past adapters."""


@pytest.mark.slow
@pytest.mark.parametrize("adapters", ["", pytest.param("+LoRA", marks=pytest.mark.long)])
def test_families(tmp_path, adapters):
    names = [
        f"{name}{adapters}" for name in families.FAMILIES if not (adapters and name in UNADAPTED)
    ]
    codes, words = two_processes.run(divided_families.__file__, tmp_path, *names, seconds=500)
    assert codes == [0, 0], [said[-2500:] for said in words]
    for name in names:
        found = json.loads((tmp_path / f"{name}.json").read_text())
        assert found["together"] == [pytest.approx(step, rel=1e-5) for step in found["alone"]], name
