"""Gradients that are exchanged in 16 bits and summed in fp32: the sums of a reduce-scatter in
fp32.
"""

import random
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import two_processes
from chronicals.distributed.fsdp_extensions import ExchangedSums

sys.path.insert(0, str(Path(__file__).parent))
import exchanged_ranks


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the processes would each take a card")
@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [2, 4])
def test_sums_are_those_of_a_reduce_scatter_in_fp32(tmp_path, count):
    """To the bit where two ranks share the rows, or else but for the order of the sum; also
    among copies of the rows.
    """
    seed = random.randrange(2**31)
    for found in two_processes.saved(exchanged_ranks.__file__, tmp_path, str(seed), count=count):
        for case, (exchanged, expected) in found.items():
            for got, right in zip(exchanged, expected, strict=True):
                assert got.dtype == right.dtype == torch.float32 and got.shape == right.shape
                bound = (
                    0.0
                    if case.startswith("2 of 2") or not right.numel()
                    else 1e-5 * float(right.abs().max())
                )
                torch.testing.assert_close(got, right, rtol=0.0, atol=bound)


def test_sums_are_fp32_and_what_is_exchanged_is_not():
    """Also after a pass that ended between both."""
    exchange = ExchangedSums(4)
    device = torch.device("cpu")
    exchange.allocate((40,), dtype=torch.bfloat16, device=device)
    for _ in range(2):
        sent = exchange.allocate((40,), dtype=torch.bfloat16, device=device)
        sums = exchange.allocate((10,), dtype=torch.bfloat16, device=device)
        assert (sent.dtype, sums.dtype) == (torch.bfloat16, torch.float32)


def test_a_mean_is_refused():
    sums = torch.empty(2)
    sent = torch.empty(4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="gradients are summed"):
        ExchangedSums(2)(sums, sent, None, dist.ReduceOp.AVG)
