"""Products of experts on a card: errors, TFLOP/s of every launch, and a whole layer, beside
transformers' ways.

    python benchmarks/grouped_products.py OUTPUT.json [--commit HASH] [--shapes NAME ...] [--samples
    N]
    TRITON_INTERPRET=1 python benchmarks/grouped_products.py OUTPUT.json --shapes smoke --samples 1      (without a card)

First the errors against fp64, expert by expert, of ours and of transformers' grouped_mm, on few
tokens of each shape. Then for each of the six products of a layer the median of several calls, by
launch and ``as trained``, as the function chooses, beside torch's grouped product; then the kernels
between them as shares of the copy rate; then the whole layer, forward and backward, beside
grouped_mm and the loop over experts. Routing is random and uneven. All samples in the file; tables
last. A launch that does not run is a line of the table.

On a card with FP8 the products with a weight, and the layer, also in FP8: by launch with both kinds
of sums, as trained, and torch's scaled grouped product with scales of rows and of columns, of
operands that were quantised beforehand; the layer with its quantising, weights trained, and frozen.
"""

import argparse
import contextlib
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import product as every
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from chronicals.kernels.expert_combine import expert_combine
from chronicals.kernels.expert_dispatch import Dispatch, dispatch_to_experts
from chronicals.kernels.expert_glu import (
    Gate,
    expert_glu,
    expert_glu_gradient,
)
from chronicals.kernels.fp8 import Scaled, fp8_quantize, lacks_fp8
from chronicals.kernels.fp8_experts import fp8_experts_transposed, fp8_quantize_experts
from chronicals.kernels.fp8_grouped_product import fp8_grouped_product, fp8_product_launch
from chronicals.kernels.fused_experts import ExpertWeights, fused_experts
from chronicals.kernels.grouped_launch import ProductLaunch
from chronicals.kernels.grouped_product import grouped_product, launch_product, product_launch
from chronicals.kernels.grouped_weight_gradient import (
    GATHER_FIRST,
    GATHER_NONE,
    GATHER_SECOND,
    grouped_weight_gradient,
    launch_weight_gradient,
    weight_gradient_launch,
)
from chronicals.kernels.launch import can_compile_only, compiling_only, interpreting
from chronicals.quantization import FP8Experts

SHAPES = {
    "qwen3-30b-a3b": (32768, 128, 8, 2048, 768),
    "olmoe-1b-7b": (8192, 64, 8, 2048, 1024),
    "mixtral-8x7b": (8192, 8, 2, 4096, 14336),
    "gpt-oss-20b": (16384, 32, 4, 2880, 2880),
    "smoke": (24, 3, 2, 32, 16),
}
"""Tokens, experts, experts of a token, model width, inner width."""

FEW = 2048
"""Tokens on which errors are found: enough for tiles of the height that many tokens have."""

KIND = torch.bfloat16

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_CARD = DEVICE.type == "cuda"

OFF_IN_FP8 = 0.08
"""Of a tensor of the layer, relative to fp64: two operands a product, each off by 2.6 % in the
root mean square.
"""


def products() -> dict[str, ProductLaunch]:
    """Launches of a product that are tried: columns, depth, warps, stages, group, persistent,
    boxes.
    """
    tried = [
        (256, 64, 8, 3, 8, False, True),
        (256, 64, 8, 3, 16, False, True),
        (256, 64, 8, 3, 8, True, True),
        (256, 64, 8, 4, 16, False, True),
        (256, 64, 8, 4, 8, True, True),
        (256, 64, 8, 4, 8, False, False),
    ]
    return {name(launch): launch for launch in (ProductLaunch(*given) for given in tried)}


def gradients() -> dict[str, ProductLaunch]:
    """Of a weight gradient: rows too."""
    tried = [
        (256, 64, 8, 3, 8, False, True, 128),
        (256, 64, 8, 4, 8, False, True, 128),
        (256, 64, 8, 5, 8, False, True, 128),
        (256, 64, 8, 5, 4, False, True, 128),
        (256, 64, 8, 5, 16, False, True, 128),
        (256, 64, 8, 7, 8, False, True, 128),
        (256, 64, 8, 5, 8, False, False, 128),
        (256, 32, 8, 7, 8, False, True, 128),
        (128, 64, 8, 5, 8, False, True, 128),
    ]
    return {name(launch): launch for launch in (ProductLaunch(*given) for given in tried)}


def products_in_fp8() -> dict[str, tuple[ProductLaunch, bool]]:
    """And whether sums stay in the tensor cores' registers."""
    tried = [
        (256, 128, 8, 3, 8, False, True),
        (256, 128, 8, 3, 16, False, True),
        (256, 128, 8, 3, 8, True, True),
        (128, 128, 4, 4, 8, False, True),
        (128, 128, 8, 3, 8, False, True),
        (128, 128, 8, 4, 8, False, True),
        (128, 128, 8, 4, 8, False, False),
    ]
    found = {}
    for given, fast in every(tried, (True, False)):
        launch = ProductLaunch(*given)
        found[f"{name(launch)}{'' if fast else ' fp32 sums'}"] = launch, fast
    return found


def name(of: ProductLaunch) -> str:
    words = [f"{of.rows}x{of.columns}x{of.depth}", f"w{of.warps}", f"s{of.stages}", f"g{of.group}"]
    return " ".join(words + ["persistent"] * of.persistent + ["boxes"] * of.boxes)


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE, dtype=KIND) * scale).requires_grad_()


def routed(tokens: int, experts: int, each: int) -> tuple[Tensor, Tensor]:
    """Experts and shares ``[T, k]``; some experts are chosen three times as often as others."""
    scores = torch.randn(tokens, experts, device=DEVICE) + 0.5 * torch.randn(experts, device=DEVICE)
    shares, chosen = scores.softmax(1).topk(each, 1)
    return chosen, (shares / shares.sum(1, keepdim=True)).to(KIND)


def median(call: Callable[[], object], samples: int) -> list[float]:
    """Milliseconds of each call; the device is busy before it."""
    for _ in range(2 * ON_CARD):
        call()
    found = []
    for _ in range(samples):
        if not ON_CARD:
            began = time.perf_counter()
            call()
            found.append(1e3 * (time.perf_counter() - began))
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)
        start.record()
        call()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return found


def layer_of(shape: tuple[int, ...]) -> Qwen3MoeExperts:
    _, experts, each, width, inner = shape
    config = Qwen3MoeConfig(
        hidden_size=width,
        moe_intermediate_size=inner,
        num_experts=experts,
        num_experts_per_tok=each,
    )
    config._experts_implementation = "grouped_mm"
    with DEVICE:
        layer = Qwen3MoeExperts(config).to(KIND)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[2] ** -0.5)
    return layer


def ways(layer: Qwen3MoeExperts) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """The layer as ours, also in FP8, as transformers' grouped_mm and as its loop over experts."""
    first = ExpertWeights(layer.gate_up_proj)
    second = ExpertWeights(layer.down_proj)
    in_fp8 = [of._replace(in_fp8=FP8Experts(of.weight, False, DEVICE)) for of in (first, second)]
    eight = (
        {}
        if lacks_fp8(DEVICE)
        else {"fp8": lambda x, chosen, shares: fused_experts(x, chosen, shares, *in_fp8)}
    )
    return eight | {
        "ours": lambda x, chosen, shares: fused_experts(x, chosen, shares, first, second),
        "grouped_mm": lambda x, chosen, shares: ALL_EXPERTS_FUNCTIONS["grouped_mm"](
            layer, x, chosen, shares
        ),
        "loop": lambda x, chosen, shares: type(layer).forward.__wrapped__(layer, x, chosen, shares),
    }


def both_ways(
    way: Callable, layer: Qwen3MoeExperts, x: Tensor, chosen: Tensor, shares: Tensor, dy: Tensor
) -> list[Tensor]:
    out = way(x, chosen, shares)
    return [out, *torch.autograd.grad(out, [x, shares, *layer.parameters()], dy)]


def errors(shape: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """Relative to fp64 on the card, by way and tensor."""
    tokens = min(FEW, shape[0])
    layer = layer_of(shape)
    x = random(tokens, shape[3])
    chosen, shares = routed(tokens, shape[1], shape[2])
    shares.requires_grad_()
    dy = torch.randn_like(x)
    exact = exactly(layer, x, chosen, shares, dy)
    found = {}
    for arm, way in ways(layer).items():
        got = both_ways(way, layer, x, chosen, shares, dy)
        named = zip(("y", "dx", "dp", "dW1", "dW2"), got, exact, strict=True)
        found[arm] = {what: ((g.double() - e).norm() / e.norm()).item() for what, g, e in named}
    return found


def exactly(
    layer: Qwen3MoeExperts, x: Tensor, chosen: Tensor, shares: Tensor, dy: Tensor
) -> list[Tensor]:
    """In fp64, an expert's weights at a time."""
    wide = torch.float64
    x, shares, dy = (tensor.detach().to(wide) for tensor in (x, shares, dy))
    y = torch.zeros_like(x)
    d_x = torch.zeros_like(x)
    d_shares = torch.zeros_like(shares)
    grads: list[list[Tensor]] = [[], []]
    for expert in range(layer.num_experts):
        leaves = [
            weight[expert].detach().to(wide).requires_grad_()
            for weight in (layer.gate_up_proj, layer.down_proj)
        ]
        token, rank = torch.where(chosen == expert)
        rows = x[token].requires_grad_()
        share = shares[token, rank].requires_grad_()
        gate, up = (rows @ leaves[0].t()).chunk(2, 1)
        out = (F.silu(gate) * up) @ leaves[1].t() * share[:, None]
        of_rows, of_share, *of_weights = torch.autograd.grad(out, [rows, share, *leaves], dy[token])
        y.index_add_(0, token, out.detach())
        d_x.index_add_(0, token, of_rows)
        d_shares[token, rank] = of_share
        for kept, weight in zip(grads, of_weights):
            kept.append(weight.to(torch.float32))
    return [y, d_x, d_shares, *(torch.stack(kept) for kept in grads)]


def calls(shape: tuple[int, ...]) -> dict[str, tuple[float, dict[str, Callable[[], object]]]]:
    """By product its FLOP and what is timed: ours by launch, and torch's grouped product over
    rows sorted beforehand.
    """
    tokens, experts, each, width, inner = shape
    chosen, _ = routed(tokens, experts, each)
    to = dispatch_to_experts(chosen, experts)
    pairs = tokens * each
    with torch.no_grad():
        x = random(tokens, width).detach()
        dy = random(tokens, width).detach()
        h = random(pairs, 2 * inner).detach()
        unit = random(pairs, inner).detach()
        w1, w2 = (
            random(experts, *s, scale=0.02).detach() for s in ((2 * inner, width), (width, inner))
        )
    sorted_x, sorted_dy = (rows[to.order_S.long() // each] for rows in (x, dy))
    ends = to.bounds[1:].contiguous()

    def of_rows(
        x: Tensor, w: Tensor, gathers: bool, peer: Tensor
    ) -> dict[str, Callable[[], object]]:
        found: dict[str, Callable[[], object]] = {
            label: (lambda launch=launch: launch_product(launch, x, w, to, gathers))
            for label, launch in products().items()
        }
        found["as trained"] = lambda: grouped_product(x, w, to, gathers)
        return found | {"torch": lambda: F.grouped_mm(peer, w.mT, offs=ends)}

    def of_weight(
        a: Tensor, b: Tensor, gathers: int, peers: tuple[Tensor, Tensor]
    ) -> dict[str, Callable[[], object]]:
        found: dict[str, Callable[[], object]] = {
            label: (
                lambda launch=launch: launch_weight_gradient(launch, a, b, to, gathers, 1.0, KIND)
            )
            for label, launch in gradients().items()
        }
        source, which = (a, 0) if gathers == GATHER_FIRST else (b, 1)

        def of_copies(launch: ProductLaunch) -> Tensor:
            """Of rows that are copied to their experts before."""
            rows = [a, b]
            rows[which] = source[to.order_S // each]
            return launch_weight_gradient(launch, *rows, to, GATHER_NONE, 1.0, KIND)

        found |= {
            f"copied, {label}": partial(of_copies, launch) for label, launch in gradients().items()
        }
        found["copy alone"] = lambda: source[to.order_S // each]
        found["as trained"] = lambda: grouped_weight_gradient(a, b, to, gathers)
        return found | {"torch": lambda: F.grouped_mm(peers[0].t(), peers[1], offs=ends)}

    first = 4.0 * pairs * width * inner
    second = 2.0 * pairs * width * inner
    return {
        "gate and up": (first, of_rows(x, w1, True, sorted_x)),
        "down": (second, of_rows(unit, w2, False, unit)),
        "gradient of the unit": (second, of_rows(dy, w2.mT, True, sorted_dy)),
        "gradient of x": (first, of_rows(h, w1.mT, False, h)),
        "dW of down": (second, of_weight(dy, unit, GATHER_FIRST, (sorted_dy, unit))),
        "dW of gate and up": (first, of_weight(h, x, GATHER_SECOND, (h, sorted_x))),
    }


def calls_in_fp8(
    shape: tuple[int, ...],
) -> dict[str, tuple[float, Tensor, dict[str, Callable[[], object]]]]:
    """By product its FLOP, what is expected of it in 16 bit, and what is timed, of operands
    quantised beforehand.
    """
    tokens, experts, each, width, inner = shape
    chosen, _ = routed(tokens, experts, each)
    to = dispatch_to_experts(chosen, experts)
    pairs = tokens * each
    ends = to.bounds[1:].contiguous()
    token_of = to.order_S.long() // each

    def of(
        x: Tensor, w: Tensor, gathers: bool, fast: bool
    ) -> tuple[Tensor, dict[str, Callable[[], object]]]:
        (x8, _), (w8, _) = fp8_quantize(x, "row"), fp8_quantize_experts(w)
        assert x8 is not None and w8 is not None
        scales = x8.scale, w8.scale
        found: dict[str, Callable[[], object]] = {
            label: partial(
                launch_product,
                launch,
                x8.values,
                w8.values,
                to,
                gathers,
                scales=scales,
                dtype=KIND,
                fast=as_fast,
            )
            for label, (launch, as_fast) in products_in_fp8().items()
        }
        found["as trained"] = partial(
            fp8_grouped_product, x8, w8, to, gathers, dtype=KIND, fast=fast
        )
        found["bf16 as trained"] = partial(grouped_product, x, w, to, gathers)
        peer = Scaled(*(part[token_of] for part in x8)) if gathers else x8
        columns = w8.scale[:, None].expand(-1, w.shape[1]).contiguous()
        if hasattr(torch, "_scaled_grouped_mm"):
            found["torch"] = lambda: torch._scaled_grouped_mm(
                peer.values,
                w8.values.mT,
                peer.scale.flatten(),
                columns,
                offs=ends,
                out_dtype=KIND,
                use_fast_accum=fast,
            )
        return grouped_product(x, w, to, gathers), found

    with torch.no_grad():
        x = random(tokens, width).detach()
        dy = random(tokens, width).detach()
        h = random(pairs, 2 * inner).detach()
        unit = random(pairs, inner).detach()
        w1, w2 = (
            random(experts, *s, scale=0.02).detach() for s in ((2 * inner, width), (width, inner))
        )
        w1t, w2t = (w.mT.contiguous() for w in (w1, w2))
    first = 4.0 * pairs * width * inner
    second = 2.0 * pairs * width * inner
    return {
        "gate and up": (first, *of(x, w1, True, True)),
        "down": (second, *of(unit, w2, False, True)),
        "gradient of the unit": (second, *of(dy, w2t, True, False)),
        "gradient of x": (first, *of(h, w1t, False, False)),
    }


def between(shape: tuple[int, ...], rate: float, samples: int) -> dict[str, dict]:
    """The kernels between the products: milliseconds, bytes and share of the copy rate."""
    tokens, experts, each, width, inner = shape
    chosen, shares = routed(tokens, experts, each)
    to: Dispatch = dispatch_to_experts(chosen, experts)
    pairs = tokens * each
    h, g, z = (random(pairs, columns).detach() for columns in (2 * inner, inner, width))
    flat = shares.reshape(-1)
    timed = {
        "expert_dispatch": (24 * pairs, lambda: dispatch_to_experts(chosen, experts)),
        "expert_glu forward": (6 * inner * pairs, lambda: expert_glu(h, Gate())),
        "expert_glu backward": (
            12 * inner * pairs,
            lambda: expert_glu_gradient(g, h, flat, to.order_S, Gate()),
        ),
        "expert_combine": (
            2 * width * (pairs + tokens),
            lambda: expert_combine(z, to.places_S, each, flat),
        ),
    }
    if not lacks_fp8(DEVICE):
        w = random(experts, 2 * inner, width).detach()
        rows, _ = fp8_quantize_experts(w)
        assert rows is not None
        x = random(tokens, width).detach()
        gradient = partial(expert_glu_gradient, g, h, flat, to.order_S, Gate(), in_fp8=True)
        timed |= {
            "fp8 of x by rows": (3 * width * tokens, lambda: fp8_quantize(x, "row")),
            "fp8 of gate and up's weights": (5 * w.numel(), lambda: fp8_quantize_experts(w)),
            "... with known scales, transposed": (
                3 * w.numel(),
                lambda: fp8_quantize_experts(w, "columns", rows.scale),
            ),
            "fp8 weights transposed": (2 * w.numel(), lambda: fp8_experts_transposed(rows)),
            "expert_glu_fp8 forward": (
                5 * inner * pairs,
                lambda: expert_glu(h, Gate(), False, in_fp8=True),
            ),
            "expert_glu_fp8 backward, fp8 alone": (
                8 * inner * pairs,
                lambda: gradient(False, False),
            ),
            "expert_glu_fp8 backward, all": (14 * inner * pairs, lambda: gradient(True, True)),
        }
    found = {}
    for label, (size, call) in timed.items():
        times = median(call, samples)
        found[label] = {
            "milliseconds": times,
            "bytes": size,
            "share": size / rate / statistics.median(times) * 1e3,
        }
    return found


def layers(shape: tuple[int, ...], samples: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of the whole layer by way: forward, forward and backward, and that with
    frozen weights.
    """
    layer = layer_of(shape)
    x = random(shape[0], shape[3])
    chosen, shares = routed(*shape[:3])
    shares.requires_grad_()
    dy = torch.randn_like(x)
    found: dict[str, dict[str, list[float]]] = {}
    for arm, way in ways(layer).items():
        few = samples if arm != "loop" else 3
        with torch.no_grad():
            found[arm] = {"forward": median(lambda way=way: way(x, chosen, shares), few)}
        before = allocated()
        found[arm]["both"] = median(
            lambda way=way: both_ways(way, layer, x, chosen, shares, dy), few
        )
        found[arm]["extra_gib"] = [
            (torch.cuda.max_memory_allocated() - before) / 2**30 if ON_CARD else 0.0
        ]
        layer.requires_grad_(False)
        found[arm]["frozen"] = median(
            lambda way=way: torch.autograd.grad(way(x, chosen, shares), [x, shares], dy), few
        )
        layer.requires_grad_(True)
    return found


def allocated() -> int:
    """Bytes; the peak is counted from here on."""
    if not ON_CARD:
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def copy_rate() -> float:
    """Bytes a second, read and written, of a device copy."""
    a = torch.randint(0, 255, (2**30 if ON_CARD else 2**20,), dtype=torch.uint8, device=DEVICE)
    b = torch.empty_like(a)
    return 2 * a.numel() / (statistics.median(median(lambda: b.copy_(a), 10)) * 1e-3)


def cublas_rate() -> float:
    """TFLOP/s of a dense product of 8192³."""
    size = 8192 if ON_CARD else 128
    a, b = (random(size, size).detach() for _ in range(2))
    return 2 * size**3 / (statistics.median(median(lambda: a @ b, 10)) * 1e-3) / 1e12


def measured(shape: tuple[int, ...], rate: float, samples: int) -> dict:
    found: dict = {"shape": shape, "errors": errors(shape), "products": {}}
    timed = calls(shape)
    launches = [call for _, arms in timed.values() for arm, call in arms.items() if arm != "torch"]
    attempted(partial(compile_all, launches))
    for product, (flop, arms) in timed.items():
        found["products"][product] = {"flop": flop, "milliseconds": {}, "failed": {}}
        expected = arms["torch"]()
        found["products"][product]["copy alone"] = (
            median(arms.pop("copy alone"), samples) if "copy alone" in arms else []
        )
        for arm, call in arms.items():
            times = attempted(partial(checked, call, expected, samples))
            where = "failed" if isinstance(times, str) else "milliseconds"
            found["products"][product][where][arm] = times
    del timed, launches, arms, call, expected
    torch.cuda.empty_cache()
    if not lacks_fp8(DEVICE):
        found["fp8"] = measured_in_fp8(shape, samples)
        torch.cuda.empty_cache()
    found["between"] = between(shape, rate, samples)
    found["layer"] = layers(shape, samples)
    torch.cuda.empty_cache()
    return found


def measured_in_fp8(shape: tuple[int, ...], samples: int) -> dict[str, dict]:
    timed = calls_in_fp8(shape)
    found = {}
    attempted(
        partial(
            compile_all,
            [call for _, _, arms in timed.values() for arm, call in arms.items() if arm != "torch"],
        )
    )
    for product, (flop, expected, arms) in timed.items():
        found[product] = {"flop": flop, "milliseconds": {}, "failed": {}}
        for arm, call in arms.items():
            times = attempted(partial(checked, call, expected, samples, OFF_IN_FP8))
            found[product]["failed" if isinstance(times, str) else "milliseconds"][arm] = times
    return found


def compile_all(launches: list[Callable[[], object]]) -> None:
    """Beside each other, where this Triton can; one that does not compile is met again when it
    is timed.
    """
    if can_compile_only():
        with compiling_only():
            for call in launches:
                attempted(call)


def checked(
    call: Callable[[], object], expected: Tensor, samples: int, most: float = 1e-2
) -> list[float]:
    """The times of a call whose result is the expected one."""
    difference = ((call() - expected).norm() / expected.norm()).item()
    if not difference <= most:
        raise ValueError(f"the result differs by {difference:.1e}")
    return median(call, samples)


def attempted(call: Callable[[], object]) -> object:
    """What it returns, or why it failed: a launch that a card has no room for is a result, too."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]


def print_tables(results: dict) -> None:
    print(
        f"{results['card']}: copy {results['copy_bytes_per_second'] / 1e12:.2f} TB/s, cuBLAS "
        f"{results['cublas']:.0f} TFLOP/s"
    )
    for shape, found in results["shapes"].items():
        print(f"\n{shape} (tokens, experts, each, width, inner) = {tuple(found['shape'])}")
        for arm, by in found["errors"].items():
            print(
                f"  error {arm:12} "
                + "  ".join(f"{what} {error:.1e}" for what, error in by.items())
            )
        for product, row in found["products"].items():
            rates = {
                arm: row["flop"] / statistics.median(times) / 1e9
                for arm, times in row["milliseconds"].items()
            }
            best = max((arm for arm in rates if arm != "torch"), key=rates.__getitem__, default="")
            print(
                f"  {product}: best {best} {rates.get(best, 0):.0f} TFLOP/s, torch "
                f"{rates.get('torch', 0):.0f}"
            )
            for arm, rate in sorted(rates.items(), key=lambda item: -item[1]):
                print(f"      {rate:6.0f}  {arm}")
            if row["copy alone"]:
                print(
                    f"      {statistics.median(row['copy alone']):.3f} ms of it are the copy, "
                    "where rows are copied"
                )
            for arm, why in row["failed"].items():
                print(f"      failed  {arm}: {why}")
        for product, row in found.get("fp8", {}).items():
            rates = {
                arm: row["flop"] / statistics.median(times) / 1e9
                for arm, times in row["milliseconds"].items()
            }
            words = ", ".join(
                f"{arm} {rates.get(arm, 0):.0f}"
                for arm in ("as trained", "bf16 as trained", "torch")
            )
            print(f"  fp8 {product}: {words} TFLOP/s")
            for arm, rate in sorted(rates.items(), key=lambda item: -item[1]):
                print(f"      {rate:6.0f}  {arm}")
            for arm, why in row["failed"].items():
                print(f"      failed  {arm}: {why}")
        for kernel, row in found["between"].items():
            print(
                f"  {kernel:34} {statistics.median(row['milliseconds']):8.3f} ms  "
                f"{row['share']:.0%} of copy"
            )
        for what in ("forward", "both", "frozen", "extra_gib"):
            line = "  ".join(
                f"{arm} {statistics.median(by[what]):9.3f}" for arm, by in found["layer"].items()
            )
            print(f"  layer {what:10} {line}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument(
        "--shapes",
        nargs="*",
        default=["qwen3-30b-a3b", "olmoe-1b-7b", "mixtral-8x7b"],
        choices=list(SHAPES),
    )
    parser.add_argument("--samples", type=int, default=9)
    given = parser.parse_args()
    torch.manual_seed(0)
    with contextlib.nullcontext() if ON_CARD else interpreting():
        results = all_of(given)
    print_tables(results)
    for shape, found in (
        results["shapes"].items() if ON_CARD else ()
    ):  # the interpreter cuts bf16 off
        ours = found["errors"]["ours"]
        peer = found["errors"]["grouped_mm"]
        for what, error in ours.items():
            if not error <= max(1.5 * peer[what], 1e-2):
                raise SystemExit(
                    f"{shape}: error of {what} {error:.2e} beside {peer[what]:.2e} of grouped_mm"
                )
        for what, error in found["errors"].get("fp8", {}).items():
            if not error <= OFF_IN_FP8:
                raise SystemExit(
                    f"{shape}: error of {what} in FP8 {error:.2e}, allowed {OFF_IN_FP8}"
                )


def all_of(given: argparse.Namespace) -> dict:
    """What is measured, which is in the file by then, too."""
    rate = copy_rate()
    results: dict = {
        "card": torch.cuda.get_device_name(0) if ON_CARD else "none",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
        "commit": given.commit,
        "copy_bytes_per_second": rate,
        "cublas": cublas_rate(),
        "shapes": {},
        "chosen": {
            "product": name(product_launch(128, 1536, DEVICE)),
            "weight_gradient": name(weight_gradient_launch(1536, 2048, DEVICE)),
            "fp8_product": {
                fast: name(fp8_product_launch(128, 1536, DEVICE, fast=fast))
                for fast in (True, False)
            },
        },
    }
    for shape in given.shapes:
        results["shapes"][shape] = measured(SHAPES[shape], rate, given.samples)
        given.output.write_text(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
