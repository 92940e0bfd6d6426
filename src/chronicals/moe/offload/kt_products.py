"""Products of experts on the CPU by kt-kernel (KTransformers), where it is installed.

Its kernels take experts in bf16 with SwiGLU, without biases, on a CPU with AVX-512 for bf16, or with
AMX. They read experts in an order of their own, so all records are there a second time: kt-kernel
copies them when the engine opens. Results are rounded to bf16 between both products.

Importing it, or its first product, ends the process on a CPU that lacks an instruction of its
wheel; so a product is tried in another process before.
"""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from chronicals.kernels.expert_glu import Gate
from chronicals.moe.offload.cpu_products import CpuProducts, TorchProducts
from chronicals.moe.offload.cpu_share import MOST_TOKENS
from chronicals.moe.offload.layers import LayerRecords
from chronicals.quantization.expert_records import PlainRecords

if TYPE_CHECKING:
    from chronicals.moe.offload.engine import ExpertEngine
    from chronicals.moe.offload.module import LayerSource

logger = logging.getLogger(__name__)

PACKAGE = "kt_kernel"

NEEDED = ("avx512f", "avx512bw", "avx512_bf16")
"""Flags of a CPU on which its products are faster than torch's."""

CLASSES = ("AMXBF16_MOE", "AVX2BF16_MOE")
"""Its classes for experts in bf16; a wheel has the first one for CPUs with AVX-512."""

BLOCK = 128
"""Widths of experts are multiples of this."""

PROBE_SECONDS = 120
"""Time for the process that tries a product."""

NAMES = ("gate_up_proj", "down_proj")


class KtProducts(CpuProducts):
    """kt-kernel's products over its own copy of all records.

    Args:
        engine: the engine, whose records are written.
    """

    def __init__(self, engine: ExpertEngine):
        self._others = TorchProducts()
        with _stdout_on_stderr():
            self._layers = [_loaded(engine, number) for number in range(len(engine.layers))]

    def outputs(
        self,
        source: LayerSource,
        experts: Sequence[int],
        x: Tensor,
        counts: Sequence[int],
        gate: Gate,
    ) -> Tensor:
        """Return the outputs of experts.

        Other gated units than SwiGLU are torch's to compute, and rows of another dtype than bf16 its
        to refuse.
        """
        if gate != Gate() or x.dtype != torch.bfloat16:
            return self._others.outputs(source, experts, x, counts, gate)
        ids = torch.tensor(experts).repeat_interleave(torch.tensor(counts))
        rows = torch.tensor([len(x)], dtype=torch.int32)
        shares = torch.ones(len(x))
        x = x.contiguous()
        y = torch.empty_like(x)
        given = (ids, shares, x, y)
        pointers = (tensor.data_ptr() for tensor in given)
        task = self._layers[source.layer].forward_task(rows.data_ptr(), 1, *pointers, False)
        pool = _pool()
        pool.submit(task)
        pool.sync()
        return y

    def close(self) -> None:
        """Free its copy of the records."""
        with _stdout_on_stderr():
            self._layers.clear()


def cpu_products_for(engine: ExpertEngine, host: int | None) -> CpuProducts:
    """Return the products of the CPU's share: kt-kernel's where they can be had, else torch's.

    Args:
        engine: the engine, whose records are written.
        host: bytes of host memory that experts may take; None if unknown.
    """
    if find_spec(PACKAGE) is None:
        return TorchProducts()
    reason = why_not(engine.layers) or _why_no_room(engine, host) or why_it_does_not_run()
    if reason is not None:
        logger.info("experts: the CPU computes by torch's products, not kt-kernel's: %s", reason)
        return TorchProducts()
    logger.info("experts: the CPU computes by kt-kernel's products, over a copy of all experts")
    return KtProducts(engine)


def why_not(layers: Sequence[LayerRecords]) -> str | None:
    """Return why its products do not take the experts of layers, or None."""
    for layer in layers:
        forms = layer.formats
        if set(forms) != set(NAMES):
            return "it takes no biases"
        for form in forms.values():
            plain = isinstance(form, PlainRecords) and not form.transposed
            if not plain or form.dtype != torch.bfloat16:
                return f"experts are in {form.label}, and it takes bf16"
        _, width, inner = forms["down_proj"].shape
        if width % BLOCK or inner % BLOCK:
            return f"experts are {width} x {inner}, and it takes multiples of {BLOCK}"
    return None


def _why_no_room(engine: ExpertEngine, host: int | None) -> str | None:
    """Return that host memory has no room for its copy, if so."""
    both = 2 * engine.slab.bytes
    if host is None or both <= host:
        return None
    return (
        f"its copy of all experts and their records take {both / 2**30:.1f} GiB of host memory, and "
        f"{host / 2**30:.1f} are there for them"
    )


def why_it_does_not_run() -> str | None:
    """Return why this CPU computes nothing by it, or None."""
    lacking = [flag for flag in NEEDED if flag not in _flags()]
    if lacking:
        return f"this CPU has no {lacking[0]}"
    return why_the_probe_failed()


@cache
def _flags() -> frozenset[str]:
    """Return the flags of this CPU; none where Linux does not tell them."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    found = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(found.partition(":")[2].split())


@cache
def why_the_probe_failed() -> str | None:
    """Try a product in another process; return why it failed, or None."""
    code = f"from {__name__} import probe; probe()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"a product took over {PROBE_SECONDS} s"
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return f"a product failed ({done.returncode}: {last})"


def probe() -> None:
    """Compute a product of each of two experts, and compare it with torch's.

    Raises:
        ValueError: it is another one.
    """
    generator = torch.Generator().manual_seed(0)
    gate_up, down, x = (
        torch.randn(*shape, generator=generator).mul(0.1).bfloat16()
        for shape in ((2, 2 * BLOCK, 2 * BLOCK), (2, 2 * BLOCK, BLOCK), (2, 2 * BLOCK))
    )
    layer = _layer_of(gate_up, down, 2)
    y = torch.zeros_like(x)
    ids, rows, shares = torch.arange(2), torch.tensor([2], dtype=torch.int32), torch.ones(2)
    given = (tensor.data_ptr() for tensor in (ids, shares, x, y))
    _pool().submit(layer.forward_task(rows.data_ptr(), 1, *given, False))
    _pool().sync()
    gate, up = torch.einsum("eki,ei->ek", gate_up.float(), x.float()).chunk(2, -1)
    unit = torch.nn.functional.silu(gate) * up
    expected = torch.einsum("edi,ei->ed", down.float(), unit)
    error = float((y.float() - expected).norm() / expected.norm())
    if not error < 2e-2:
        raise ValueError(f"a product is off by {error:.2e}")


@cache
def _pool() -> Any:
    """Return its pool of threads, which lives as long as the process."""
    from kt_kernel import kt_kernel_ext

    config = kt_kernel_ext.WorkerPoolConfig()
    config.subpool_count = 1
    config.subpool_numa_map = [0]
    config.subpool_thread_count = [torch.get_num_threads()]
    with _stdout_on_stderr():
        pool = kt_kernel_ext.CPUInfer(config)
    # Its destructor writes to standard output, where answers are.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
    return pool


def _loaded(engine: ExpertEngine, number: int) -> Any:
    """Return its object of a layer, which has copied the records."""
    layer = engine.layers[number]
    records = engine.slab.records(layer.first, layer.count, layer.layout.bytes)
    views = layer.layout.views(records)
    gate_up, down = (views[name]["values"] for name in NAMES)
    return _layer_of(gate_up, down, MOST_TOKENS * layer.each)


def _layer_of(gate_up: Tensor, down: Tensor, most_rows: int) -> Any:
    """Return its object of a layer.

    Args:
        gate_up: ``[E, 2F, D]`` in bf16, of which each expert's matrix is contiguous.
        down: ``[E, D, F]``, likewise.
        most_rows: rows of a call, at most; each goes to one expert.
    """
    from kt_kernel import kt_kernel_ext

    count, width, inner = down.shape
    on_card = torch.zeros(count, dtype=torch.bool)
    config = kt_kernel_ext.moe.MOEConfig(count, 1, width, inner, on_card.data_ptr())
    config.pool = _pool().backend_
    config.max_len = most_rows
    config.gate_projs = [[matrix[:inner].data_ptr() for matrix in gate_up]]
    config.up_projs = [[matrix[inner:].data_ptr() for matrix in gate_up]]
    config.down_projs = [[matrix.data_ptr() for matrix in down]]
    for name in ("gate_scales", "up_scales", "down_scales"):
        setattr(config, name, [[0] * count])
    kinds = (getattr(kt_kernel_ext.moe, name, None) for name in CLASSES)
    layer = next(kind for kind in kinds if kind is not None)(config)
    order = torch.arange(count)
    _pool().submit(layer.load_weights_task(order.data_ptr()))
    _pool().sync()
    return _Layer(layer, on_card)


class _Layer:
    """Its object of a layer, and the mask that this reads at each call."""

    def __init__(self, layer: Any, on_card: Tensor):
        self.forward_task = layer.forward_task
        self._on_card = on_card


@contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """A context in which what its C++ writes to standard output goes to standard error."""
    # C keeps what it writes to a pipe or a file until it is flushed, which may be after the context.
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(own, 1)
        os.close(own)
