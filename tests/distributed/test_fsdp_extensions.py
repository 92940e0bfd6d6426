"""Extensions of torch's FSDP: what is used beyond its interface, pinned; products over weights that
lie side by side; gradients that are exchanged in 16 bits and summed in fp32; and those of weights
of which each rank's micro-batches use others.
"""

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

import two_processes
from chronicals.distributed import fsdp_extensions
from chronicals.distributed.fsdp_extensions import ExchangedSums
from chronicals.patching.fused_weights import are_side_by_side

sys.path.insert(0, str(Path(__file__).parent))
import exchanged_ranks
import uneven_ranks


def test_names_of_fsdp_that_are_not_public():
    """A new torch in which one of them is called otherwise must be looked at before it is
    admitted.
    """
    methods = {
        "alloc_all_gather_outputs",
        "free_unsharded_param",
        "init_all_gather_outputs",
        "init_unsharded_param",
    }
    assert all(callable(getattr(FSDPParam, name)) for name in methods)
    annotated = set(FSDPParam.__annotations__)
    assert {"_unsharded_param", "all_gather_outputs", "sharded_param", "_orig_size"} <= annotated
    assert set(fsdp_extensions.PRIVATE) == methods | {
        "_unsharded_param",
        "all_gather_outputs",
        "sharded_param",
        "_orig_size",
        "_module_info",
    }
    assert hasattr(FSDPParamGroup, "unshard") and callable(FSDPParamGroup.post_backward)
    assert "unsharded_accumulated_grad" in annotated and isinstance(
        FSDPParam.unsharded_param, property
    )


class Part:
    """What is read of an ``FSDPParam``."""

    def __init__(self, rows: int, width: int):
        self._orig_size = torch.Size((rows, width))
        self.sharded_param = nn.Parameter(torch.empty(rows, width))


def test_storage_is_one_and_comes_and_goes():
    parts = [Part(rows, 8) for rows in (6, 2, 4)]
    laid = fsdp_extensions.SideBySide(parts, torch.float32, torch.device("cpu"))
    assert laid.flat.untyped_storage().size() == 0
    for _ in range(2):
        for part in parts:
            part.alloc_all_gather_outputs()
        values = [torch.randn(part._orig_size) for part in parts]
        for part, value in zip(parts, values):
            part.all_gather_outputs[0].copy_(value.flatten())  # as FSDP copies what it gathered
        weights = [part._unsharded_param for part in parts]
        assert are_side_by_side(weights)
        assert torch.equal(weights[0].detach().as_strided((12, 8), (8, 1)), torch.cat(values))
        for part in parts:
            part.free_unsharded_param()
        assert laid.flat.untyped_storage().size() == 0


def test_what_is_side_by_side():
    flat = torch.randn(12, 8)
    first = flat[:4]
    second = flat[4:]
    assert are_side_by_side([first, second])
    assert not are_side_by_side([second, first])
    assert not are_side_by_side([first, flat[5:]])
    assert not are_side_by_side([first, second.clone()])
    assert not are_side_by_side([first, None])
    assert not are_side_by_side([first[:, :4], second[:, :4]])


def test_another_fsdp_is_refused_by_name():
    owner = SimpleNamespace(q=nn.Linear(2, 2))

    class Other(Part):
        _module_info = SimpleNamespace(module=owner.q, param_name="weight")
        all_gather_outputs = alloc_all_gather_outputs = free_unsharded_param = None

    group = SimpleNamespace(fsdp_params=[Other(2, 2)], device=torch.device("cpu"))
    state = SimpleNamespace(_fsdp_param_group=group)
    unit = SimpleNamespace(_get_fsdp_state=lambda: state)
    with pytest.raises(
        RuntimeError, match=r"sharding='weights': torch .*init_unsharded_param missing"
    ):
        fsdp_extensions.lay_side_by_side(unit, [(owner, ("q",))], torch.float32, 2)


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


CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    """The seed, and what each rank wrote."""
    if torch.cuda.is_available():
        pytest.skip("the processes would each take a card")
    seed = random.randrange(2**31)
    return seed, two_processes.saved(
        uneven_ranks.__file__, tmp_path_factory.mktemp("ranks"), str(seed), count=2
    )


def test_a_step_after_a_broken_one_has_its_own_sums(of_ranks):
    for _, (after_another, alone) in of_ranks[1]:
        for got, expected in zip(after_another, alone, strict=True):
            assert torch.equal(got, expected)


def test_each_weight_has_its_own_sums(of_ranks):
    """Those of one process that takes both ranks' inputs; a weight that no rank uses has no
    gradient.
    """
    seed = of_ranks[0]
    found = [sums for sums, _ in of_ranks[1]]
    for dtype in found[0]:
        model = uneven_ranks.built(seed)
        for rank, used in enumerate(uneven_ranks.USED):
            for x in uneven_ranks.inputs(seed, rank, dtype):
                model(x.float(), used).backward()
        named = dict(model.named_parameters())
        holders = [
            sum(name.startswith(("scale", *of_rank(rank))) for rank in (0, 1)) for name in named
        ]
        assert [ranks[dtype][0] for ranks in found] == [holders, holders]
        for number, weight in enumerate(named.values()):
            sums = torch.cat([ranks[dtype][1][number] for ranks in found])
            expected = torch.zeros_like(weight) if weight.grad is None else weight.grad
            assert (sums - expected).norm() <= CLOSE[dtype] * expected.norm()


def of_rank(rank):
    return tuple(f"layer.experts.{number}." for number in uneven_ranks.USED[rank])
