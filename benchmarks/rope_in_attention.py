"""Rotary embedding in attention's load of queries and keys, against the kernel that rotates them in
place beforehand.

    python benchmarks/rope_in_attention.py OUTPUT.json [--commit HASH]

The same causal attention forward with and without the rotation in its loads; what that adds stands
beside the time of ``fused_qk_rope(in_place=True)``. Queries are rotated once a program, but a block
of keys in each of the programs whose queries see it, and the backward pass would have to do so
again, twice.
"""

import argparse
import json
import platform
import statistics
from pathlib import Path

import torch
import triton
import triton.language as tl
from kernel_rates import sample
from torch import Tensor

from chronicals.kernels import fused_qk_rope
from chronicals.kernels.qk_rope import qk_rope_reference

SAMPLES = 15
WARM_UP = 3


@triton.jit
def _load(at, table, cos_ptr, sin_ptr, HALF: tl.constexpr, ROTATED: tl.constexpr):
    """Both halves of the channels ``[rows, HALF]``, rotated where that is asked for."""
    i = tl.arange(0, HALF)[None, :]
    a = tl.load(at + i)
    b = tl.load(at + HALF + i)
    if ROTATED:
        cos = tl.load(cos_ptr + table + i).to(tl.float32)
        sin = tl.load(sin_ptr + table + i).to(tl.float32)
        x = a.to(tl.float32)
        y = b.to(tl.float32)
        a = (x * cos - y * sin).to(at.dtype.element_ty)
        b = (y * cos + x * sin).to(at.dtype.element_ty)
    return a, b


@triton.jit
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    length,
    scale,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    ROTATED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """Documents of ``length`` tokens laid end to end: q ``[T, H, D]``, k and v ``[T, K, D]``,
    tables ``[T, D]``.
    """
    WIDTH: tl.constexpr = 2 * HALF
    head = tl.program_id(1)
    group = head // (HEADS // GROUPS)
    first = tl.program_id(2) * length
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    rows = block * M + tl.arange(0, M)
    token = (first + rows).to(tl.int64)[:, None]
    q_a, q_b = _load(
        q_ptr + (token * HEADS + head) * WIDTH, token * WIDTH, cos_ptr, sin_ptr, HALF, ROTATED
    )
    largest = tl.full((M,), -float("inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    out = tl.zeros((M, WIDTH), tl.float32)
    for start in range(0, (block + 1) * M, N):
        columns = start + tl.arange(0, N)
        key = (first + columns).to(tl.int64)[:, None]
        k_a, k_b = _load(
            k_ptr + (key * GROUPS + group) * WIDTH, key * WIDTH, cos_ptr, sin_ptr, HALF, ROTATED
        )
        z = (tl.dot(q_a, tl.trans(k_a)) + tl.dot(q_b, tl.trans(k_b))) * (scale * 1.44269504)
        if start + N > block * M:
            z = tl.where(columns[None, :] <= rows[:, None], z, -float("inf"))
        new = tl.maximum(largest, tl.max(z, axis=1))
        shrink = tl.exp2(largest - new)
        share = tl.exp2(z - new[:, None])
        total = total * shrink + tl.sum(share, axis=1)
        v = tl.load(v_ptr + (key * GROUPS + group) * WIDTH + tl.arange(0, WIDTH)[None, :])
        out = tl.dot(share.to(v.dtype), v, out * shrink[:, None])
        largest = new
    at = out_ptr + (token * HEADS + head) * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(at, (out / total[:, None]).to(out_ptr.dtype.element_ty))


def attention(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, length: int, rotated: bool
) -> Tensor:
    out = torch.empty_like(q)
    (tokens, heads, width) = q.shape
    _attention_kernel[(length // 128, heads, tokens // length)](
        q,
        k,
        v,
        out,
        cos,
        sin,
        length,
        width**-0.5,
        heads,
        k.shape[1],
        width // 2,
        rotated,
        128,
        64,
        num_warps=4 if width == 64 else 8,
        num_stages=3,
    )
    return out


def reference(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    heads = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def measure(heads: int, groups: int, width: int, tokens: int = 16384, length: int = 2048) -> dict:
    q, k, v = (
        torch.randn(tokens, n, width, device="cuda").bfloat16() for n in (heads, groups, groups)
    )
    angles = torch.rand(tokens, width // 2, device="cuda").repeat(1, 2) * 6
    cos = angles.cos().bfloat16()
    sin = angles.sin().bfloat16()
    expected = reference(*qk_rope_reference(q, k, cos, sin), v, length).float()
    got = attention(q, k, v, cos, sin, length, True).float()
    error = ((got - expected).norm() / expected.norm()).item()
    if not error < 1e-2:
        raise SystemExit(f"{heads}/{groups} heads of {width}: error {error:.1e}")
    arms = {
        "attention": lambda: attention(q, k, v, cos, sin, length, False),
        "attention that rotates": lambda: attention(q, k, v, cos, sin, length, True),
        "rotation in place": lambda: fused_qk_rope(q, k, cos, sin, in_place=True),
    }
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(WARM_UP + SAMPLES):
        for name, call in arms.items():
            time = sample(call)
            if turn >= WARM_UP:
                samples[name].append(time)
    return {"error": error, "milliseconds": samples}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--commit", default="unknown")
    given = parser.parse_args()
    torch.manual_seed(0)
    results: dict = {
        "card": torch.cuda.get_device_name(0),
        "commit": given.commit,
        "rows": {},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
    }
    for heads, groups, width in ((14, 2, 64), (32, 8, 128)):
        row = measure(heads, groups, width)
        results["rows"][f"{heads}/{groups} heads of {width}"] = row
        times = {name: statistics.median(samples) for name, samples in row["milliseconds"].items()}
        adds = times["attention that rotates"] - times["attention"]
        print(
            f"{heads}/{groups}x{width}: ",
            {n: round(t, 3) for n, t in times.items()},
            f"rotation in the load adds {adds:.3f} ms",
        )
    given.output.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
