"""Models that are loaded in host memory, then divided among cards: all that products read must
come there with the weights.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

import two_processes

sys.path.insert(0, str(Path(__file__).parent))
import divided_from_host

LOSSES = 2e-2
NORMS = 5e-2
"""Relative deviations in bf16: whole weights are multiplied merged, and divided ones dequantised
by rows.
"""


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two cards; on the CPU nothing is elsewhere"
)
def test_divided_weights_train_what_whole_ones_do(tmp_path):
    cases = list(divided_from_host.CASES)
    codes, words = two_processes.run(divided_from_host.__file__, tmp_path, *cases, seconds=560)
    assert codes == [0, 0], [said[-2500:] for said in words]
    for case in cases:
        found = json.loads((tmp_path / f"{case}.json").read_text())
        divided, whole = (
            torch.tensor(found[way], dtype=torch.float64) for way in ("weights", "optimizer")
        )
        assert torch.isfinite(divided).all() and len(divided) == 4
        error = (
            ((divided - whole) / whole).abs().amax(0)
        )  # of the numbers of steps, losses and norms
        assert error[0] == 0 and error[1] < LOSSES and error[2] < NORMS, f"{case}: {error.tolist()}"
