"""Every Triton kernel compiles for the cards that people have, within their shared memory; no
card is needed.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chronicals.kernels.launch import HAS_TRITON

SCRIPT = Path(__file__).with_name("compile_for_card.py")
SHARED_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""A program's, by compute capability: T4, A100, 3090, 4090, H100, B200, 5090 (CUDA programming
guide, appendix).
"""

pytestmark = pytest.mark.skipif(
    not HAS_TRITON or importlib.util.find_spec("triton.runtime._async_compile") is None,
    reason="needs Triton 3.4 or later",
)


def compiled(capability, *sample):
    """The lines that the script prints for a card."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        str(SCRIPT),
        *map(str, (capability, SHARED_KIB[capability], *sample)),
    ]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 0, [line for line in lines if "error" in line] or run.stderr[-2000:]
    return lines


def fits(lines, capability):
    assert all(line["shared"] <= SHARED_KIB[capability] << 10 for line in lines), lines
    return {line["kernel"].rpartition(".")[2] for line in lines}


@pytest.mark.slow
def test_some_kernels_compile_for_some_card(seed):
    capability = sorted(SHARED_KIB)[seed % len(SHARED_KIB)]
    assert fits(compiled(capability, 0.1, seed), capability)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [129, 257, 300])
@pytest.mark.parametrize("capability", [75, 80, 86, 90])
def test_adapters_of_experts_fit_whatever_their_rank(capability, rank):
    """A product holds the next power of 2 of columns."""
    assert "_product_kernel" in fits(compiled(capability, f"wide adapters {rank}"), capability)


@pytest.mark.long
@pytest.mark.parametrize("capability", sorted(SHARED_KIB))
def test_every_kernel_compiles(capability):
    found = fits(compiled(capability), capability)
    assert {"_rmsnorm_backward_kernel", "_adamw_8bit_kernel", "_of_x_kernel"} <= found
    assert {"_dequantize_kernel", "_dequantize_gguf_kernel"} <= found
    assert len(found) >= 20


@pytest.mark.slow
def test_kernels_that_are_launched_early_touch_nothing_before_they_wait():
    """What the kernel before writes may not be there yet."""
    lines = compiled(90, "decode_attention,paged_attention,qk_rope 64")
    waiting = {line["kernel"].rpartition(".")[2]: line.get("waits first") for line in lines}
    assert all(line.get("waits first", True) for line in lines), lines
    early = {
        "decode_attention",
        "paged_attention",
        "shared_keys",
        "merge_splits",
        "write_pages",
    }
    assert {f"_{name}_kernel" for name in early} <= {name for name in waiting if waiting[name]}
    others = compiled(80, "decode_attention")
    assert not any("waits first" in line for line in others)


def test_what_takes_too_much_is_found():
    with pytest.raises(AssertionError):
        fits([{"kernel": "a.kernel", "shared": 100 << 10}], 86)
