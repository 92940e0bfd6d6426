"""What is used of torch's FSDP beyond its interface, pinned; and a product over weights that lie
side by side.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from chronicals.distributed import fsdp_extensions
from chronicals.patching.fused_weights import are_side_by_side


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
