"""Kernels on the road of long documents where offsets pass 2³¹ elements: rows that lie far apart.

Only the pages of memory that rows lie in are ever touched. As much memory lies before the rows, so
that an offset of 32 bits, which becomes negative, reads zeros there.
"""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from chronicals.kernels import (
    fp8_quantize,
    fused_add_rmsnorm,
    fused_layernorm,
    fused_qk_norm_rope,
    fused_qk_rope,
    fused_rmsnorm,
    fused_softmax,
    qk_rope,
    rmsnorm,
)
from chronicals.kernels.adapter_gradients import adapter_gradients
from chronicals.kernels.column_scaling import scale_columns, scaled_columns_gradient
from chronicals.kernels.dropped_products import (
    add_dropped_product_,
    dropped_down,
    dropped_gradient_of_down,
)
from chronicals.kernels.glu import glu_of_both
from chronicals.kernels.host_rows import host_rows
from chronicals.kernels.logit_rows import (
    LossOptions,
    log_probability_gradient_,
    loss_and_gradient_,
    target_log_probabilities,
)
from interpreted import kernels_run
from mutants import mutant

STRIDE = 1 << 24
"""Elements between two rows."""

ROWS = 2**31 // STRIDE + 3
WIDTH = 16


def far(values: Tensor) -> Tensor:
    """A copy of ``[ROWS, WIDTH]`` in 16 bits over the second half of 8 GiB of addresses."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    pages = mmap.mmap(-1, 2 * ROWS * STRIDE * values.element_size(), flags=flags)
    memory = torch.frombuffer(pages, dtype=values.dtype)
    return memory.as_strided((ROWS, WIDTH), (STRIDE, 1), ROWS * STRIDE).copy_(values)


def ramp(x: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, WIDTH).to(x)


def heads(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys ``[T, 1, D]``, and tables."""
    angles = torch.linspace(0, 3, ROWS * WIDTH // 2).view(ROWS, -1).repeat(1, 2)
    return x[:, None], x[:, None], angles.cos().to(x), angles.sin().to(x)


def gradient(function, x: Tensor) -> Tensor:
    """Of an input that is far, at a gradient of the output that is far, too."""
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(function(leaf), leaf, x)[0]


def in_place(function):
    """What a kernel leaves in the rows themselves, and what it returns."""

    def run(x: Tensor) -> list[Tensor]:
        found = function(x)
        return [x, *(one for one in found or () if one is not None)]

    return run


def rotated_in_place(x, module=qk_rope):
    q, k, cos, sin = heads(x)
    module.fused_qk_rope(q, k.clone(), cos, sin, in_place=True)
    return ()


def fused_norm(x, module):
    return (module.fused_rmsnorm(x, ramp(x), 1e-6),)


def dropped(x: Tensor) -> list[Tensor]:
    a = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).to(x)
    seed = torch.tensor([5])
    out = x.new_empty(ROWS, 16)
    dropped_down(x, a, seed, 0.3, out)
    return [out, dropped_gradient_of_down(x, x, seed, 0.3)]


def of_adapters(x: Tensor) -> list[Tensor]:
    up = torch.linspace(-1, 1, WIDTH * 4).view(WIDTH, 4).to(x)
    g = x.new_empty(ROWS, 4)
    return [g, *adapter_gradients(x, up, x, g, [WIDTH], [4], [1.0], torch.float32)]


def logits(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.arange(ROWS) % WIDTH


def of_log_probabilities(x: Tensor):
    given, targets = logits(x)
    found = target_log_probabilities(given, targets, LossOptions(), True)
    _, lse, entropy = found
    ones = torch.ones(ROWS)
    log_probability_gradient_(given, targets, ones, ones, lse, entropy, LossOptions())
    return found


KERNELS = {
    "rmsnorm": lambda x: fused_rmsnorm(x, ramp(x), 1e-6),
    "rmsnorm backward": lambda x: gradient(lambda y: fused_rmsnorm(y, ramp(x), 1e-6), x),
    "add_rmsnorm": lambda x: fused_add_rmsnorm(x, x, ramp(x), 1e-6, 0.0),
    "layernorm": lambda x: fused_layernorm(x, ramp(x), ramp(x), 1e-6),
    "layernorm backward": lambda x: gradient(lambda y: fused_layernorm(y, ramp(x), None, 1e-6), x),
    "softmax": fused_softmax,
    "swiglu": lambda x: glu_of_both(x, "silu"),
    "rope": lambda x: fused_qk_rope(*heads(x)),
    "rope in place": in_place(rotated_in_place),
    "norm and rope": lambda x: fused_qk_norm_rope(*heads(x)[:2], ramp(x), ramp(x), *heads(x)[2:]),
    "column scaling": lambda x: scale_columns(x, ramp(x).float()),
    "column scaling backward": in_place(
        lambda x: (scaled_columns_gradient(x, ramp(x).float(), x, x.clone()),)
    ),
    "dropped products": dropped,
    "dropped products, added": in_place(
        lambda x: (
            add_dropped_product_(x, x.clone()[:, :4], ramp(x).repeat(4, 1), torch.tensor([5]), 0.3),
        )
    ),
    "adapter gradients": of_adapters,
    "cross-entropy": in_place(lambda x: loss_and_gradient_(*logits(x), None, LossOptions(), True)),
    "smoothed cross-entropy": in_place(
        lambda x: loss_and_gradient_(*logits(x), None, LossOptions(label_smoothing=0.1), True)
    ),
    "log-probabilities": in_place(of_log_probabilities),
    "fp8": lambda x: [
        part
        for scaling in ("row", "tensor")
        for scaled in fp8_quantize(x, scaling, layout="both")
        for part in (scaled.values.view(torch.uint8), scaled.scale)
    ],
}


@contextmanager
def integers_of_launches() -> Iterator[set[int]]:
    """Within: integers that interpreted kernels are given, such as strides."""
    found = set[int]()
    with pytest.MonkeyPatch.context() as patch:
        usual = GridExecutor.__call__

        def noted(self, *args, **named):
            found.update(arg for arg in args if isinstance(arg, int))
            return usual(self, *args, **named)

        patch.setattr(GridExecutor, "__call__", noted)
        yield found


def as_list(found) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


def compare(run):
    torch.manual_seed(4)
    near = torch.randn(ROWS, WIDTH).bfloat16()
    rows = far(near)
    assert rows[-1].data_ptr() - rows.data_ptr() > rows.element_size() * 2**31
    with kernels_run():
        expected = as_list(run(near.clone()))
        with integers_of_launches() as given:
            got = as_list(run(rows))
    assert STRIDE in given, "no kernel was given rows that lie apart"
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@pytest.fixture(autouse=True)
def on_the_cpu(device):
    if device.type != "cpu":
        pytest.skip("the card's test of the whole length is benchmarks/long_documents.py")


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_beyond_two_to_the_31_are_read_and_written_where_they_lie(kernel):
    compare(KERNELS[kernel])


@pytest.mark.interpreted
def test_the_last_row_of_a_table_of_four_billion_values():
    table = torch.empty(2**18 + 1, 2**14, dtype=torch.bfloat16)
    last = torch.tensor([len(table) - 1])
    table[-1] = torch.randn(2**14)
    with kernels_run():
        assert torch.equal(host_rows(last, table)[0], table[-1])


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("module", "within", "old", "run"),
    [
        (qk_rope, "heads_after", "token.to(tl.int64)", rotated_in_place),
        (
            rmsnorm,
            "_rmsnorm_forward_kernel",
            "tl.program_id(0).to(tl.int64)",
            fused_norm,
        ),
    ],
    ids=["rope", "rmsnorm"],
)
def test_an_offset_in_32_bits_is_found(module, within, old, run):
    broken = mutant(module, old, old.removesuffix(".to(tl.int64)"), within)
    with pytest.raises(AssertionError):
        compare(in_place(lambda x: run(x, broken)))
