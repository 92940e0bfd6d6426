"""Every kernel on a card: its error, its share of the measured copy rate or of cuBLAS, beside Liger
and torch.compile.

    python benchmarks/kernel_rates.py OUTPUT.json [--commit HASH] [--only NAME ...]

Tensors of at least 256 MB, so that the L2 cache is cold; the arms of a row take turns; a sample is
one call, or a run of calls, with the device busy before it, so that the host is not measured.
Median, with all samples in the file. One table last.
"""

import argparse
import dataclasses
import importlib.util
import json
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as donated
import torch.nn.functional as F
import triton
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from chronicals import kernels
from chronicals.attention import PAGED_BACKENDS, attend_pages
from chronicals.kernels import dropped_products
from chronicals.kernels.adamw import Tensors
from chronicals.kernels.adamw_8bit import (
    MOMENT_BLOCK,
    QuantizedTensors,
    adamw_8bit_,
    quantize_moment,
)
from chronicals.kernels.adapter_gradients import adapter_gradients
from chronicals.kernels.adapter_padding import write_adapters
from chronicals.kernels.column_scaling import scale_columns, scaled_columns_gradient
from chronicals.kernels.decode_attention import UnrotatedHeads, decode_attention
from chronicals.kernels.dense_slots import dense_slots, dense_slots_reference
from chronicals.kernels.expert_combine import expert_combine
from chronicals.kernels.expert_dispatch import Dispatch, dispatch_to_experts
from chronicals.kernels.expert_glu import (
    Gate,
    expert_glu,
    expert_glu_gradient,
)
from chronicals.kernels.expert_stacks import (
    ExpertStack,
    StackIn4Bits,
    StackIn16Bits,
    StackInFP8,
    StackInGGUF,
    StackInMXFP4,
)
from chronicals.kernels.few_tokens_product import (
    few_tokens_product,
    few_tokens_product_reference,
)
from chronicals.kernels.fp8 import (
    FP8_SCALINGS,
    Amax,
    Scaled,
    fp8_quantize,
    fp8_quantize_reference,
    fp8_transposed,
)
from chronicals.kernels.fp8_experts import fp8_experts_transposed, fp8_quantize_experts
from chronicals.kernels.fp8_grouped_product import fp8_grouped_product
from chronicals.kernels.fp8_linear import LINEAR_SCALINGS, Layouts, fp8_linear, scaled_product
from chronicals.kernels.fused_experts import ExpertWeights, fused_experts
from chronicals.kernels.gguf_blocks import GGUF_KINDS, dequantize_gguf
from chronicals.kernels.gguf_product import gguf_product
from chronicals.kernels.glu import geglu_reference, glu_of_both, swiglu_reference
from chronicals.kernels.gradient_norm import gradient_norm, gradient_norm_reference
from chronicals.kernels.grouped_product import grouped_product
from chronicals.kernels.grouped_weight_gradient import GATHER_SECOND, grouped_weight_gradient
from chronicals.kernels.host_memory import PinnedTensors
from chronicals.kernels.host_rows import host_rows, host_rows_reference
from chronicals.kernels.invariant_product import invariant_product
from chronicals.kernels.launch import with_padding
from chronicals.kernels.layernorm import layernorm_reference
from chronicals.kernels.linear_cross_entropy import linear_cross_entropy_reference
from chronicals.kernels.linear_distillation import (
    Divergence,
    linear_distillation_reference,
)
from chronicals.kernels.linear_head import Adapter, LinearHead
from chronicals.kernels.mxfp4 import dequantize_mxfp4
from chronicals.kernels.nf4 import Scales, dequantize_4bit, quantize_nf4, quantize_scales
from chronicals.kernels.nf4_product import nf4_product, nf4_product_reference, nf4_products
from chronicals.kernels.paged_attention import (
    SharedPages,
    paged_attention,
    paged_attention_reference,
    write_pages,
)
from chronicals.kernels.products import HIGH_PRIORITY
from chronicals.kernels.qk_norm_rope import fused_qkv_norm_rope, qk_norm_rope_reference
from chronicals.kernels.qk_rope import fused_qkv_rope, qk_rope_reference
from chronicals.kernels.rmsnorm import add_rmsnorm_reference, rmsnorm_reference
from chronicals.kernels.softmax import softmax_reference
from chronicals.kernels.token_draws import draw_tokens, draw_tokens_reference
from chronicals.kernels.token_log_probability import token_log_probability_reference
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.lora.merged_linear import MergedWeights, merged_linear
from chronicals.patching import decoder_layer, fuse_weights, patch_parts
from chronicals.quantization.dense import columns_for

donated.donated_buffer = False  # a compiled backward is called again and again here

SAMPLES = 15
WARM_UP = 3
ELEMENTS = 2**27
"""Samples of an arm, calls before them, and elements of the main tensor of a row (256 MB in
bf16).
"""

LIGER = importlib.util.find_spec("liger_kernel") is not None
BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None
UNSLOTH = importlib.util.find_spec("unsloth") is not None


@dataclass
class Row:
    """A line of the table.

    Attributes:
        name: kernel, direction and shape.
        arms: calls by name; ``ours`` first.
        bytes: that must move, or
        products: calls whose time is the floor: the same products, or the same layers without
            adapters.
        error: of ours beside the plain operation's own, both against fp64; ours must be at most 1.5
            times as large.
        calls: of a sample, one after the other.
    """

    name: str
    arms: dict[str, Callable[[], object]]
    bytes: int = 0
    products: Callable[[], object] | None = None
    error: tuple[float, float] | None = None
    calls: int = 1
    samples: dict[str, list[float]] = field(default_factory=dict)


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def relative(got, expected) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def errors(
    ours: Callable, plain: Callable, inputs: list[Tensor], rows: int = 512
) -> tuple[float, float]:
    """Largest relative error over outputs and gradients, on the first rows, of ours and of the
    plain operation.
    """
    small = [x[:rows] if x.shape[0] > rows and x.ndim > 1 else x for x in inputs]

    def run(function: Callable, kind: torch.dtype) -> list[Tensor]:
        leaves = [
            x.detach().to(kind).requires_grad_() if x.is_floating_point() else x for x in small
        ]
        out = function(*leaves)
        outs = [out] if isinstance(out, Tensor) else list(out)
        torch.manual_seed(1)
        upstream = [torch.randn(o.shape, device="cuda").bfloat16().to(o.dtype) for o in outs]
        return [
            *outs,
            *torch.autograd.grad(outs, [x for x in leaves if x.is_floating_point()], upstream),
        ]

    exact = run(plain, torch.float64)
    pairs = [[relative(g, e) for g, e in zip(run(f, torch.bfloat16), exact)] for f in (ours, plain)]
    worst = max(range(len(exact)), key=lambda n: pairs[0][n] / max(pairs[1][n], 4e-3))
    return pairs[0][worst], pairs[1][worst]


def backward(function: Callable, inputs: list[Tensor]) -> Callable[[], object]:
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    out = function(*leaves)
    outs = [out] if isinstance(out, Tensor) else list(out)
    upstream = [torch.randn_like(o) for o in outs]
    wanted = [x for x in leaves if x.is_floating_point()]
    return lambda: torch.autograd.grad(outs, wanted, upstream, retain_graph=True)


def pair(
    name: str,
    ours: Callable,
    plain: Callable,
    peers: dict[str, Callable],
    inputs: list[Tensor],
    moved: tuple[int, int],
):
    """A row forward and a row backward of an elementwise or row kernel."""
    arms = {"ours": ours, **peers, "compile": torch.compile(plain)}
    error = errors(ours, plain, inputs)
    yield Row(
        f"{name} forward",
        {arm: partial(f, *inputs) for arm, f in arms.items()},
        bytes=moved[0],
        error=error,
    )
    yield Row(
        f"{name} backward",
        {arm: backward(f, inputs) for arm, f in arms.items()},
        bytes=moved[1],
        error=error,
    )


def norms():
    for width in (896, 2048, 4096, 8192):
        rows = ELEMENTS // width
        x = random(rows, width)
        residual = random(rows, width)
        weight = random(width)
        size = 2 * rows * width
        peers = {}
        with_residual = {}
        if LIGER:
            from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
            from liger_kernel.ops.rms_norm import LigerRMSNormFunction

            peers["liger"] = lambda x, w: LigerRMSNormFunction.apply(
                x, w, 1e-6, 0.0, "llama", False
            )
            with_residual["liger"] = lambda x, r, w: LigerFusedAddRMSNormFunction.apply(
                x, r, w, 1e-6, 0.0, "llama", False
            )
        yield from pair(
            f"rmsnorm {width}",
            kernels.fused_rmsnorm,
            rmsnorm_reference,
            peers,
            [x, weight],
            (2 * size, 3 * size),
        )
        yield from pair(
            f"add_rmsnorm {width}",
            kernels.fused_add_rmsnorm,
            add_rmsnorm_reference,
            with_residual,
            [x, residual, weight],
            (4 * size, 4 * size),
        )


def others():
    for width in (896, 4096):
        rows = ELEMENTS // width
        x = random(rows, width)
        weight = random(width)
        bias = random(width)
        size = 2 * rows * width
        of_norm = {}
        of_softmax = {}
        if LIGER:
            from liger_kernel.ops.layer_norm import LigerLayerNormFunction
            from liger_kernel.ops.softmax import LigerSoftmaxFunction

            of_norm["liger"] = lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-5)
            of_softmax["liger"] = LigerSoftmaxFunction.apply
        yield from pair(
            f"layernorm {width}",
            kernels.fused_layernorm,
            layernorm_reference,
            of_norm,
            [x, weight, bias],
            (2 * size, 3 * size),
        )
        yield from pair(
            f"softmax {width}",
            kernels.fused_softmax,
            softmax_reference,
            of_softmax,
            [x],
            (2 * size, 3 * size),
        )
    for heads, groups, width in ((14, 2, 64), (32, 8, 128)):
        tokens = ELEMENTS // ((heads + groups) * width)
        q, k = (random(tokens, h, width) for h in (heads, groups))
        angles = torch.rand(tokens, width // 2, device="cuda").repeat(1, 2) * 6
        tables = angles.cos().bfloat16(), angles.sin().bfloat16()
        size = 2 * (q.numel() + k.numel())

        def ours(q, k, a, b, tables=tables):
            return kernels.fused_qk_norm_rope(q, k, a, b, *(table[: len(q)] for table in tables))

        def plain(q, k, a, b, tables=tables):
            return qk_norm_rope_reference(
                q, k, a, b, *(table[: len(q)].to(q.dtype) for table in tables)
            )

        yield from pair(
            f"qk_norm_rope {heads}/{groups}x{width}",
            ours,
            plain,
            {},
            [q, k, random(width), random(width)],
            (2 * size, 3 * size),
        )


def gated():
    for width in (4864, 14336):
        rows = ELEMENTS // width
        gate = random(rows, width)
        up = random(rows, width)
        size = 2 * rows * width
        peers = {}
        if LIGER:
            from liger_kernel.ops.geglu import LigerGELUMulFunction
            from liger_kernel.ops.swiglu import LigerSiLUMulFunction

            peers["liger"] = LigerSiLUMulFunction.apply
        yield from pair(
            f"swiglu {width}",
            kernels.fused_swiglu,
            swiglu_reference,
            peers,
            [gate, up],
            (3 * size, 5 * size),
        )
        if LIGER:
            peers["liger"] = LigerGELUMulFunction.apply
        yield from pair(
            f"geglu tanh {width}",
            partial(kernels.fused_geglu, approximate="tanh"),
            partial(geglu_reference, approximate="tanh"),
            peers,
            [gate, up],
            (3 * size, 5 * size),
        )


def rotations():
    for heads, groups, width in ((14, 2, 64), (32, 8, 128)):
        tokens = ELEMENTS // ((heads + groups) * width)
        q, k = (random(1, tokens, h, width).transpose(1, 2) for h in (heads, groups))
        angles = torch.rand(1, tokens, width // 2, device="cuda").repeat(1, 1, 2) * 6
        cos = angles.cos().bfloat16()
        sin = angles.sin().bfloat16()
        size = 2 * (q.numel() + k.numel())
        peers = {}
        if LIGER:
            from liger_kernel.ops.rope import LigerRopeFunction

            peers["liger"] = lambda q, k, cos=cos, sin=sin: LigerRopeFunction.apply(q, k, cos, sin)
        yield from pair(
            f"qk_rope {heads}/{groups}x{width}",
            lambda q, k, cos=cos, sin=sin: kernels.fused_qk_rope(q, k, cos, sin),
            lambda q, k, cos=cos, sin=sin: qk_rope_reference(
                q, k, cos.to(q.dtype), sin.to(q.dtype)
            ),
            peers,
            [q, k],
            (2 * size, 2 * size),
        )
        yield Row(
            f"qk_rope in place {heads}/{groups}x{width}",
            {
                "ours": lambda q=q, k=k, cos=cos, sin=sin: kernels.fused_qk_rope(
                    q, k, cos, sin, in_place=True
                )
            },
            bytes=2 * size,
        )


def heads():
    for tokens, width, vocabulary in ((16384, 896, 151936), (8192, 4096, 128256)):
        hidden = random(tokens, width)
        weight = random(vocabulary, width, scale=0.02)
        targets = torch.randint(0, vocabulary, (tokens,), device="cuda")
        logits = random(tokens, vocabulary, scale=0.1)

        def call(hidden, weight, targets=targets, **options):
            return kernels.linear_cross_entropy(hidden, weight, targets, **options)

        def both_ways(function, hidden=hidden, weight=weight, frozen=False):
            leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_(not frozen)
            wanted = leaves[:1] if frozen else leaves
            return lambda: torch.autograd.grad(function(*leaves), wanted)

        def three(hidden=hidden, weight=weight, logits=logits, kind=torch.bfloat16):
            torch.mm(hidden, weight.t())
            torch.mm(logits, weight)
            torch.mm(logits.t(), hidden, out_dtype=kind)

        def two(hidden=hidden, weight=weight, logits=logits):
            torch.mm(hidden, weight.t())
            torch.mm(logits, weight)

        small = targets[:512]
        error = errors(
            partial(call, targets=small),
            partial(linear_cross_entropy_reference, targets=small),
            [hidden[:512], weight],
            rows=len(weight),
        )
        shape = f"{tokens}x{width}x{vocabulary}"
        arms = {"ours": Captured(both_ways(partial(call, gradient_type=torch.bfloat16)))}
        if LIGER:
            from liger_kernel.ops.fused_linear_cross_entropy import (
                LigerFusedLinearCrossEntropyFunction,
            )

            arms["liger"] = both_ways(
                lambda h, w, t=targets: LigerFusedLinearCrossEntropyFunction.apply(h, w, t)[0]
            )
        yield Row(f"linear_cross_entropy bf16 dW {shape}", arms, products=three, error=error)
        yield Row(
            f"linear_cross_entropy fp32 dW {shape}",
            {"ours": Captured(both_ways(call))},
            products=partial(three, kind=torch.float32),
        )
        yield Row(
            f"linear_cross_entropy frozen {shape}",
            {"ours": Captured(both_ways(call, frozen=True))},
            products=two,
        )
        some = partial(token_log_probability_reference, targets=small)
        yield Row(
            f"token_log_probability {shape}",
            {
                "ours": lambda h=hidden, w=weight, t=targets: kernels.token_log_probability(
                    h, w, t
                )[0]
            },
            products=lambda h=hidden, w=weight: torch.mm(h, w.t()),
            error=errors(
                lambda h, w, t=small: kernels.token_log_probability(h, w, t, entropy=True),
                some,
                [hidden[:512], weight],
                rows=len(weight),
            ),
        )


def distillation():
    """A student of half its teacher's width, the heads of both read; beside it Liger's fused
    linear JSD.
    """
    for tokens, width, teachers_width, vocabulary in (
        (16384, 896, 1792, 151936),
        (8192, 2048, 4096, 128256),
    ):
        hidden = random(tokens, width)
        weight = random(vocabulary, width, scale=0.02)
        taught = random(tokens, teachers_width)
        theirs = random(vocabulary, teachers_width, scale=0.02)
        targets = torch.randint(0, vocabulary, (tokens,), device="cuda")
        logits = random(tokens, vocabulary, scale=0.1)

        def call(hidden, weight, of, taught=taught, theirs=theirs, targets=targets, **options):
            student = LinearHead(hidden, weight)
            teacher = LinearHead(taught, theirs)
            return kernels.linear_distillation(student, teacher, targets, of, **options).loss

        def plain(hidden, weight, of, taught=taught[:512], theirs=theirs, targets=targets[:512]):
            return linear_distillation_reference(
                LinearHead(hidden, weight), LinearHead(taught, theirs), targets, of
            ).loss

        def both_ways(function, hidden=hidden, weight=weight):
            leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            return lambda: torch.autograd.grad(function(*leaves), leaves)

        def four(hidden=hidden, weight=weight, taught=taught, theirs=theirs, logits=logits):
            torch.mm(hidden, weight.t())
            torch.mm(taught, theirs.t())
            torch.mm(logits, weight)
            torch.mm(logits.t(), hidden)

        shape = f"{tokens}x{width}/{teachers_width}x{vocabulary}"
        for name, of in (("forward KL", Divergence.forward_kl()), ("JSD", Divergence.jsd())):
            arms = {"ours": Captured(both_ways(partial(call, of=of, gradient_type=torch.bfloat16)))}
            if LIGER and name == "JSD":
                from liger_kernel.ops.fused_linear_jsd import LigerFusedLinearJSDFunction

                def liger(h, w, t=taught, v=theirs, y=targets):
                    return LigerFusedLinearJSDFunction.apply(h, w, t, v, y, 0.5, -100, 1.0)

                arms["liger"] = both_ways(liger)
            small = {"taught": taught[:512], "targets": targets[:512], "of": of}
            error = errors(
                partial(call, **small),
                partial(plain, of=of),
                [hidden[:512], weight],
                rows=len(weight),
            )
            yield Row(f"linear_distillation {name} {shape}", arms, products=four, error=error)


def optimizers():
    """494 million weights in 169 tensors, as Qwen2.5-0.5B has them; torch's fused one keeps no
    master, and states in the type of the weights."""
    shapes = [
        (151936, 896),
        *[(896, 896), (128, 896), (128, 896), (896, 896), (4864, 896), (4864, 896), (896, 4864)]
        * 24,
    ]
    factor = torch.ones((), device="cuda")
    applies = torch.tensor(True, device="cuda")
    for kind, states in (
        (torch.bfloat16,) * 2,
        (torch.bfloat16, torch.float32),
        (torch.float32,) * 2,
    ):
        tensors = Tensors()
        for shape in shapes:
            weight = torch.randn(shape, device="cuda").to(kind)
            tensors.weights.append(weight)
            tensors.gradients.append(torch.randn_like(weight))
            tensors.means.append(torch.zeros_like(weight, dtype=states))
            tensors.squares.append(torch.zeros_like(weight, dtype=states))
            tensors.steps.append(torch.zeros((), device="cuda"))
            if kind == torch.bfloat16:
                tensors.lows.append(torch.zeros_like(weight, dtype=torch.int16))
        elements = sum(weight.numel() for weight in tensors.weights)
        plain = [torch.nn.Parameter(weight.clone()) for weight in tensors.weights]
        for parameter, gradient in zip(plain, tensors.gradients):
            parameter.grad = gradient
        torchs = torch.optim.AdamW(plain, fused=True)
        arms = {
            "ours": lambda t=tensors: kernels.fused_adamw_(
                t, 1e-5, (0.9, 0.999), 1e-8, 0.01, factor, applies
            ),
            "torch": torchs.step,
        }
        names = [str(x).removeprefix("torch.") for x in (kind, states)]
        moved = (
            kind.itemsize
            + 4 * states.itemsize
            + 2 * kind.itemsize
            + (4 if kind == torch.bfloat16 else 0)
        ) * elements
        yield Row(f"fused_adamw_ {names[0]} weights, {names[1]} states", arms, bytes=moved)
        gradients = tensors.gradients
        arms = {
            "ours": lambda g=gradients: gradient_norm(g),
            "torch": lambda g=gradients: gradient_norm_reference(g),
        }
        if states == torch.float32:
            yield Row(f"gradient_norm {names[0]}", arms, bytes=kind.itemsize * elements)
        torch.cuda.empty_cache()
    yield from in_8_bits(shapes, factor, applies)


def in_8_bits(shapes: list[tuple[int, int]], factor: Tensor, applies: Tensor):
    """The same weights with moments in 8 bits, without masters, as bitsandbytes has them, and
    with.
    """
    for master in (False, True):
        tensors = QuantizedTensors()
        for shape in shapes:
            weight = random(*shape)
            tensors.weights.append(weight)
            tensors.gradients.append(torch.randn_like(weight))
            for signed, codes, scales in (
                (True, tensors.means, tensors.mean_scales),
                (False, tensors.squares, tensors.square_scales),
            ):
                quantized = quantize_moment(torch.zeros(1, device="cuda"), signed)
                codes.append(torch.full_like(weight, int(quantized[0]), dtype=torch.uint8))
                scales.append(torch.zeros(-(-weight.numel() // MOMENT_BLOCK), device="cuda"))
            tensors.steps.append(torch.zeros((), device="cuda"))
            if master:
                tensors.lows.append(torch.zeros_like(weight, dtype=torch.int16))
        elements = sum(weight.numel() for weight in tensors.weights)
        arms: dict[str, Callable[[], object]] = {
            "ours": lambda t=tensors: adamw_8bit_(
                t, 1e-5, (0.9, 0.999), 1e-8, 0.01, factor, applies
            )
        }
        moved = int((10 + 4 * master + 16 / MOMENT_BLOCK) * elements)
        name = f"adamw_8bit_ bf16 weights, {'with' if master else 'without'} masters"
        yield Row(name, arms, bytes=moved)
        if BITSANDBYTES and not master:
            plain = [torch.nn.Parameter(weight.clone()) for weight in tensors.weights]
            for parameter, gradient in zip(plain, tensors.gradients):
                parameter.grad = gradient
            theirs = importlib.import_module("bitsandbytes.optim").AdamW8bit(plain).step
            yield Row(
                f"{name}, in turn with bitsandbytes", {**arms, "bitsandbytes": theirs}, bytes=moved
            )
        torch.cuda.empty_cache()


def adapters():
    """Layers of the 8B shape at 8192 tokens with adapters of rank 16, forward and backward,
    beside the frozen products; and the products under dropout by themselves."""
    tokens = 8192
    rank = 16
    layers = {
        "qkv": (4096, (4096, 1024, 1024)),
        "out": (4096, (4096,)),
        "gate_up": (4096, (14336,) * 2),
        "down": (14336, (4096,)),
    }
    for name, (inner, sizes) in layers.items():
        weights = [random(size, inner, scale=inner**-0.5) for size in sizes]
        padding = columns_for([rank] * len(sizes))
        x = with_padding(weights[0], (tokens, inner), padding).normal_().requires_grad_()
        upstream = with_padding(weights[0], (tokens, sum(sizes)), padding).normal_()
        merged, frozen = (
            MergedWeights.fused(weights, [None] * len(sizes), [r] * len(sizes)) for r in (rank, 0)
        )
        matrices = [
            (random(rank, inner).float().requires_grad_(), random(n, rank).float().requires_grad_())
            for n in sizes
        ]

        def adapted(dropout, x=x, upstream=upstream, merged=merged, matrices=matrices):
            of_layers = [Adapter(a, b, 0.5, dropout) for a, b in matrices]
            y = merged_linear(x, merged, of_layers, True, True)
            return torch.autograd.grad(
                y, [x, *(matrix for pair in matrices for matrix in pair)], upstream
            )

        def plain(x=x, upstream=upstream, matrix=frozen.storage.matrix):
            return torch.mm(x.detach(), matrix.t()), torch.mm(upstream, matrix)

        for suffix, dropout in (("", 0.0), (" dropout 0.05", 0.05)):
            yield Row(
                f"merged_linear {name}{suffix}",
                {"ours": Captured(partial(adapted, dropout))},
                products=Captured(plain),
            )
        to = merged.padding
        (downs, ups) = zip(*matrices)
        write = partial(
            write_adapters, to.down, to.up, to.sizes, to.ranks, downs, ups, [0.5] * len(sizes)
        )
        moved = 6 * sum(matrix.numel() for pair in matrices for matrix in pair)
        yield Row(f"adapter_padding {name}", {"ours": Captured(write)}, bytes=moved)
    y = random(tokens, 2 * 14336)
    factor = random(2 * 14336).float()
    yield Row(
        "column_scaling forward",
        {"ours": lambda: scale_columns(y, factor, out=y)},
        bytes=4 * y.numel(),
    )
    into = torch.empty_like(y)
    yield Row(
        "column_scaling backward",
        {"ours": lambda: scaled_columns_gradient(y, factor, into, y)},
        bytes=6 * y.numel(),
    )
    for tokens, sizes, rank in (
        (8192, (14336,) * 2, 16),
        (8192, (4096, 1024, 1024), 16),
        (2**14, (4864,) * 2, 32),
    ):
        yield from gradients_of_adapters(tokens, sizes, rank)
    x = random(2**14, 4864)
    g = random(2**14, 32)
    a = random(32, 4864)
    seed = dropped_products.draw_seed(x)
    size = x.numel() * 2
    calls = {
        "down": (lambda: dropped_products.dropped_down(x, a, seed, 0.05, g), size),
        "of A": (lambda: dropped_products.dropped_gradient_of_down(g, x, seed, 0.05), size),
        "of x": (lambda: dropped_products.add_dropped_product_(x, g, a, seed, 0.05), 2 * size),
    }
    for name, (call, moved) in calls.items():
        yield Row(f"dropped_products {name} 4864", {"ours": call}, bytes=moved)


def gradients_of_adapters(tokens: int, sizes: tuple[int, ...], rank: int):
    """Both at the wide end, beside the two products that read dy one after the other."""
    ranks = [rank] * len(sizes)
    padding = columns_for(ranks)
    dy, g = random(tokens, sum(sizes) + padding).split([sum(sizes), padding], 1)
    up = torch.zeros_like(random(sum(sizes), padding))
    u = random(tokens, padding)
    for n, rows in enumerate(up.split(sizes)):
        rows[:, n * rank :][:, :rank].normal_()
    call = partial(adapter_gradients, dy, up, u, g, sizes, ranks, [1.0] * len(sizes), torch.float32)

    def products():
        torch.mm(dy, up, out=g)
        torch.mm(dy.t(), u, out_dtype=torch.float32)

    yield Row(
        f"adapter_gradients {'+'.join(map(str, sizes))} r{rank}",
        {"ours": call, "products": products},
        bytes=dy.numel() * 2,
    )


def layers():
    """Four fused decoder layers of the 8B shape over 8192 tokens, forward and backward, with
    adapters of rank 16 on every linear layer, beside the same layers frozen, which give the
    gradient of their input alone. A sample is 0.3 s of one arm: within it the card comes to the
    clock at which it would train with this arm alone."""
    count = 4
    tokens = 8192
    shape = LlamaConfig(
        num_hidden_layers=count,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=256,
        max_position_embeddings=tokens,
    )
    x = random(1, tokens, 4096).requires_grad_()
    upstream = with_padding(x, (tokens, 4096), columns_for([16])).normal_()[
        None
    ]  # as the norm above gives it

    def built(dropout: float | None) -> LlamaModel:
        with torch.device("cuda"):
            model = LlamaForCausalLM(shape).bfloat16().requires_grad_(False)
        if dropout is not None:
            apply_lora(model, LoRAConfig(rank=16, dropout=dropout))
        patch_parts(model, whole_layers=True)
        fuse_weights(model)
        return model.model

    def step(model: LlamaModel, asked: list[Tensor], given: dict) -> tuple[Tensor, ...]:
        y = x
        for layer in model.layers:
            y = layer(y, **given)
        return torch.autograd.grad(y, asked, upstream)

    models = {"frozen": built(None), "": built(0.0), " dropout 0.05": built(0.05)}
    for documents in (1, 4, 16):
        bounds = torch.arange(0, tokens + 1, tokens // documents, dtype=torch.int32, device="cuda")
        positions = (torch.arange(tokens, device="cuda") % (tokens // documents))[None]
        given = {
            "position_embeddings": models["frozen"].rotary_emb(x, positions),
            "position_ids": positions,
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": tokens // documents,
            "max_length_k": tokens // documents,
        }
        calls = {}
        for name, model in models.items():
            asked = [x, *(p for p in model.layers.parameters() if p.requires_grad)]
            before = decoder_layer.runs[decoder_layer.FUSED_LAYER]
            calls[name] = Captured(partial(step, model, asked, given))
            if decoder_layer.runs[decoder_layer.FUSED_LAYER] != before + 2 * count:
                raise RuntimeError("the layers did not run fused")
        frozen = calls.pop("frozen")
        for name, call in calls.items():
            yield Row(
                f"decoder layers {documents} x {tokens // documents}{name}",
                {"ours": call},
                products=frozen,
                calls=6,
            )


class Captured:
    """A call as a CUDA graph, as a step has it: on a stream that goes first, without what the
    host takes.
    """

    def __init__(self, call: Callable[[], object]):
        self.launched = call
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(priority=HIGH_PRIORITY)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self.graph, stream=stream):
            self.made = call()

    def __call__(self) -> object:
        self.graph.replay()
        return self.made


def fp8():
    """Quantisation of 2^27 values, whose scales over a tensor and over columns take a read more;
    and a layer of the 8B shape at 8192 tokens, its products in FP8 beside those in bf16."""
    rows = ELEMENTS // 4096
    width = 4096
    x = random(rows, width)
    for scaling in FP8_SCALINGS:
        for layout, written in (("rows", 1), ("both", 2)):
            read = 4 if scaling == "tensor" or (scaling == "row" and layout == "both") else 2
            call = Captured(partial(fp8_quantize, x, scaling, torch.float8_e4m3fn, layout))
            plain = torch.compile(
                partial(fp8_quantize_reference, x, scaling, torch.float8_e4m3fn, layout)
            )
            yield Row(
                f"fp8 {scaling} {layout} {width}",
                {"ours": call, "compile": plain},
                bytes=(read + written) * ELEMENTS,
            )
    in_rows = fp8_quantize(x)[0]
    yield Row(
        "fp8 turned 4096", {"ours": Captured(partial(fp8_transposed, in_rows))}, bytes=2 * ELEMENTS
    )
    for name, call, moved in (
        ("a norm", lambda **amax: kernels.fused_add_rmsnorm(x, x, None, **amax), 8),
        ("a unit", lambda **amax: glu_of_both(x, "silu", **amax), 3),
    ):
        arms = {"ours": Captured(lambda call=call: call(amax=Amax())), "without": Captured(call)}
        yield Row(f"amax of {name} {width}", arms, bytes=moved * ELEMENTS)
    yield from gradients_of_qkv(rows)
    for inner, outer in (
        (4096, 14336),
        (14336, 4096),
        (4096, 4096),
        (2048, 8192),
        (2048, 2048),
        (1536, 8960),
    ):
        x = random(8192, inner)
        weight = random(outer, inner, scale=inner**-0.5)
        dy = random(8192, outer)

        def three(x=x, weight=weight, dy=dy):
            return torch.mm(x, weight.t()), torch.mm(dy, weight), torch.mm(dy.t(), x)

        def products(scaling, x=x, weight=weight, dy=dy):
            (a, at), (c, ct) = (fp8_quantize(t, scaling, layout="both") for t in (x, dy))
            b, bt = fp8_quantize(weight, LINEAR_SCALINGS[scaling], layout="both")
            pairs = ((a, b, True), (c, bt, False), (ct, at, False))
            return lambda: [
                scaled_product(left, right, torch.bfloat16, fast) for left, right, fast in pairs
            ]

        def layer(scaling, frozen, x=x, weight=weight, dy=dy):
            leaves = x.detach().requires_grad_(), weight.detach().requires_grad_(not frozen)
            known = (
                Layouts(*fp8_quantize(weight, LINEAR_SCALINGS[scaling], layout="both"))
                if frozen
                else None
            )
            asked = leaves[:1] if frozen else leaves
            return Captured(
                lambda: torch.autograd.grad(
                    fp8_linear(*leaves, scaling=scaling, known=known), asked, dy
                )
            )

        arms = {
            "ours" if scaling == "tensor" else scaling: layer(scaling, False)
            for scaling in LINEAR_SCALINGS
        }
        arms |= {"frozen": layer("tensor", True), "frozen block": layer("block", True)}
        arms |= {f"products {scaling}": products(scaling) for scaling in LINEAR_SCALINGS}
        yield Row(f"fp8_linear {inner} to {outer}", arms, products=three)


def gradients_of_qkv(tokens: int):
    """QKV's gradient in both FP8 layouts at the widths of the 8B shape, from before the
    rotation: with its amax found by the rotation's backward kernel, and read once more for it."""
    ones = random(128) * 0 + 1
    heads = (32, 8)
    written = tokens * 5120
    qkv = random(tokens, 6144)
    upstream = [random(tokens, count, 128) for count in (32, 8, 8)]
    angles = torch.rand(tokens, 64, device="cuda").repeat(1, 2) * 6
    tables = angles.cos().bfloat16(), angles.sin().bfloat16()

    def after_norms(qkv, cos, sin, gradient_amax):
        return fused_qkv_norm_rope(qkv, ones, ones, cos, sin, heads, gradient_amax=gradient_amax)

    def both_layouts(rotate, amax):
        leaf = qkv.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(rotate(leaf, *tables, gradient_amax=amax), leaf, upstream)
        return fp8_quantize(
            gradient, layout="both", amax=None if amax is None else amax.take(gradient)
        )

    for name, rotate, moved in (
        ("QKV's gradient", partial(fused_qkv_rope, heads=heads), 4 * written + 8 * qkv.numel()),
        ("QKV's gradient after norms", after_norms, 6 * written + 8 * qkv.numel()),
    ):
        ours, plain = (Captured(partial(both_layouts, rotate, amax)) for amax in (Amax(), None))
        yield Row(f"operand of {name}", {"ours": ours, "without": plain}, bytes=moved)


def nf4():
    """2^26 weights in 4 bits, with plain and with quantised scales, beside bitsandbytes' own
    kernels.
    """
    weight = random(8192, 8192)
    count = weight.numel()
    packed, absmax = quantize_nf4(weight)
    quantised = quantize_scales(absmax)
    theirs = importlib.import_module("bitsandbytes.functional") if BITSANDBYTES else None
    quantising: dict[str, Callable[[], object]] = {"ours": partial(quantize_nf4, weight)}
    if theirs:
        quantising["bitsandbytes"] = partial(theirs.quantize_4bit, weight, quant_type="nf4")
    yield Row("nf4 quantise", quantising, bytes=2 * count + count // 2 + absmax.nbytes)
    for name, scales in (("plain", Scales(absmax)), ("quantised", quantised)):
        arms = dequantising(weight, packed, scales)
        yield Row(
            f"nf4 dequantise, {name} scales",
            arms,
            bytes=2 * count + count // 2 + scales.absmax.nbytes,
        )
    apart = torch.empty(
        (len(weight), weight.shape[1] + 64), dtype=weight.dtype, device=weight.device
    )[:, : weight.shape[1]]
    beside_adapters = {"ours": partial(dequantize_4bit, packed, quantised, apart)}
    yield Row(
        "nf4 dequantise, beside adapters",
        beside_adapters,
        bytes=2 * count + count // 2 + quantised.absmax.nbytes,
    )
    yield nf4_of_weights("a weight of 4096 x 4096", 12 * [(4096, 4096)])
    yield nf4_of_weights("the weights of a layer of an 8B", LAYER_OF_8B)


LAYER_OF_8B = [
    (4096, 4096),
    (1024, 4096),
    (1024, 4096),
    (4096, 4096),
    (14336, 4096),
    (14336, 4096),
    (4096, 14336),
]
"""Outputs and inputs of q, k, v, o, gate, up and down."""


def dequantising(weight: Tensor, packed: Tensor, scales: Scales) -> dict[str, Callable[[], object]]:
    """Ours and, where they are installed, bitsandbytes' and Unsloth's way to the same values,
    which are compared.
    """
    dense = torch.empty_like(weight)
    arms: dict[str, Callable[[], object]] = {
        "ours": partial(dequantize_4bit, packed, scales, dense)
    }
    if BITSANDBYTES:
        theirs = importlib.import_module("bitsandbytes.functional")
        codes, state = theirs.quantize_4bit(
            weight, quant_type="nf4", compress_statistics=scales.nested
        )
        assert torch.equal(codes.view(-1), packed) and torch.equal(state.absmax, scales.absmax)
        arms["bitsandbytes"] = partial(theirs.dequantize_4bit, codes, state)
        assert torch.equal(arms["bitsandbytes"](), arms["ours"]())
        if UNSLOTH:
            fast = importlib.import_module("unsloth.kernels.utils").fast_dequantize
            arms["unsloth"] = partial(
                fast, codes, state, use_global_buffer=True
            )  # as its layers call it
            torch.testing.assert_close(
                arms["unsloth"](), dense, rtol=2**-8, atol=0
            )  # a bit of bf16
    return arms


def nf4_of_weights(name: str, shapes: list[tuple[int, int]]) -> Row:
    """Several weights with quantised scales, one after the other: what a layer asks for, where
    each launch counts. Together they are more than the L2 cache holds."""
    each = list[dict[str, Callable[[], object]]]()
    moved = 0
    for shape in shapes:
        weight = random(*shape)
        packed, absmax = quantize_nf4(weight)
        scales = quantize_scales(absmax)
        each.append(dequantising(weight, packed, scales))
        moved += 2 * weight.numel() + packed.nbytes + scales.absmax.nbytes
    arms = {arm: partial(in_turn, [of_weight[arm] for of_weight in each]) for arm in each[0]}
    return Row(f"nf4 dequantise, {name}", arms, bytes=moved)


def in_turn(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()


SAME_INPUT = (slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 7))
"""Weights of ``LAYER_OF_8B`` with one input: queries, keys and values; gate and up."""


def products_of_few_rows():
    """``nf4_product``: the products of a layer of an 8B for 1, 8 and 64 sequences, those of one
    input in one launch. They are beside those of its weights in 16 bits, which they must not be
    slower than, beside each weight by itself, and with dequantised weights.
    """
    dense = [random(*shape, scale=0.02) for shape in LAYER_OF_8B]
    packed = list[tuple[Tensor, Scales, int]]()
    moved = 0
    for weight in dense:
        codes, absmax = quantize_nf4(weight)
        scales = quantize_scales(absmax)
        packed.append((codes, scales, len(weight)))
        moved += codes.nbytes + scales.absmax.nbytes
    room = torch.empty(max(weight.numel() for weight in dense), dtype=torch.bfloat16, device="cuda")

    def dequantised(x: Tensor, codes: Tensor, scales: Scales, outputs: int) -> Tensor:
        count = outputs * x.shape[1]
        return x @ dequantize_4bit(codes, scales, room[:count].view(outputs, -1)).t()

    merged = [torch.cat(dense[part]) for part in SAME_INPUT]
    for rows in (1, 8, 64):
        xs = [random(rows, weight.shape[1]) for weight in dense]
        of_inputs = [xs[part.start] for part in SAME_INPUT]
        of_rows = sum(2 * rows * sum(weight.shape) for weight in dense)
        last = xs[1], *packed[1]
        exact = nf4_product_reference(torch.eye(4096, device="cuda").bfloat16(), *packed[1])
        exact = xs[1].double() @ exact.double()
        together = [
            partial(nf4_products, x, *zip(*packed[part])) for x, part in zip(of_inputs, SAME_INPUT)
        ]
        apart = [partial(nf4_product, x, *weight) for x, weight in zip(xs, packed)]
        yield Row(
            f"nf4_product, a layer of an 8B, {rows} rows",
            {
                "ours": partial(in_turn, together),
                "each alone": partial(in_turn, apart),
                "16 bit": partial(in_turn, [partial(F.linear, *x) for x in zip(of_inputs, merged)]),
                "dequantised": partial(
                    in_turn, [partial(dequantised, x, *w) for x, w in zip(xs, packed)]
                ),
            },
            bytes=moved + of_rows,
            error=tuple(
                relative(product(*last), exact) for product in (nf4_product, nf4_product_reference)
            ),
        )


def products_of_few_tokens():
    """``few_tokens_product``: gate and up of 128 experts, 8 of them a token, for 1, 8 and 64
    tokens, in every format, from slots in another order. Beside them the product over dense weights
    in 16 bits, and packed weights with all experts dequantised first. The floor is the bytes of the
    chosen experts, with tokens and results.
    """
    experts, each, outputs, columns = 128, 8, 1536, 2048
    dense = random(experts, outputs, columns, scale=0.02)
    slots = torch.randperm(experts, device="cuda").int()
    room = torch.empty_like(dense)
    formats = stacks_of(dense, room)
    for tokens in (1, 8, 64):
        chosen = torch.rand(tokens, experts, device="cuda").topk(each, 1).indices
        to = dispatch_to_experts(chosen, experts)
        x = random(tokens, columns)
        visited = len(chosen.unique())
        for name, (stack, dequantise) in formats.items():
            yield products_of_one_format(
                f"{name}, {tokens} tokens", x, to, stack, slots, visited, dense, dequantise, room
            )


def stacks_of(
    dense: Tensor, room: Tensor
) -> dict[str, tuple[ExpertStack, Callable[[], object] | None]]:
    """Stacks of the sizes of ``dense`` ``[E, N, K]`` in every format, and calls that write all dense
    values to ``room``; None for weights that are not packed.
    """
    experts, outputs, columns = dense.shape
    matrix = room.view(-1, columns)
    codes, absmax = quantize_nf4(dense.view(-1, columns))
    scales = quantize_scales(absmax)
    in_fp8, _ = fp8_quantize_experts(dense)
    byte = torch.uint8
    mxfp4_codes = torch.randint(0, 256, (experts, outputs, columns // 2), dtype=byte, device="cuda")
    exponents = torch.full((experts, outputs, columns // 32), 120, dtype=byte, device="cuda")
    blocks = torch.randint(0, 256, (experts, outputs, columns // 256 * 144), dtype=byte)
    # random bytes would be scales that are not numbers
    blocks.view(-1, 144)[:, :4] = torch.tensor([0.01, 0.01], dtype=torch.float16).view(byte)
    blocks = blocks.cuda()
    return {
        "16 bit": (StackIn16Bits(dense), None),
        "FP8": (StackInFP8.of_experts(*in_fp8), None),
        "NF4": (
            StackIn4Bits.of_matrix(codes, scales, experts, outputs, 64, "nf4"),
            lambda: dequantize_4bit(codes, scales, matrix),
        ),
        "MXFP4": (
            StackInMXFP4(mxfp4_codes, exponents),
            lambda: dequantize_mxfp4(mxfp4_codes, exponents, matrix),
        ),
        "Q4_K": (StackInGGUF(blocks, "Q4_K"), lambda: dequantize_gguf(blocks, matrix, "Q4_K")),
    }


def dense_values_of_slots():
    """``dense_slots``: the values of 56 of 128 experts' gate and up, a wave of streamed experts in 4
    bits, in slots in any order. Beside it a launch for each expert.
    """
    experts, wave = 128, 56
    dense = random(experts, 1536, 2048, scale=0.02)
    records = torch.randperm(experts, device="cuda")[:wave].int()
    out = torch.empty_like(dense[:wave])
    for name, (stack, dequantise) in stacks_of(dense, torch.empty_like(dense)).items():
        if dequantise is None:
            continue
        expected = torch.empty_like(out)
        dense_slots_reference(stack, records, expected)
        singles = records.split(1)
        held = sum(tensor.nbytes for tensor in stack.tensors if tensor.ndim > 1)

        def one_by_one(stack: ExpertStack = stack, singles: Sequence[Tensor] = singles) -> None:
            for matrix, record in zip(out.split(1), singles):
                dense_slots(stack, record, matrix)

        yield Row(
            f"dense_slots, {name}",
            {"ours": partial(dense_slots, stack, records, out), "one by one": one_by_one},
            bytes=held * wave // experts + out.nbytes,
            error=(relative(dense_slots(stack, records, out), expected), 0.0),
        )


def products_of_one_format(
    name: str,
    x: Tensor,
    to: Dispatch,
    stack: ExpertStack,
    slots: Tensor,
    visited: int,
    dense: Tensor,
    dequantise: Callable[[], object] | None,
    room: Tensor,
) -> Row:
    """The row of ``few_tokens_product`` for one format and number of tokens.

    Args:
        visited: number of experts that are chosen.
        dense: the weights in 16 bits.
        dequantise: writes the packed weights to ``room``; None for weights that are not packed.
    """

    def dequantised() -> Tensor:
        dequantise()
        return grouped_product(x, room, to, True)

    arms = {
        "ours": lambda: few_tokens_product(x, stack, to, True, slot_of_expert=slots),
        "all in place": lambda: few_tokens_product(x, stack, to, True),
        "dense": lambda: grouped_product(x, dense, to, True),
    }
    if dequantise is not None:
        arms["dequantised"] = dequantised
    of_experts = sum(tensor.nbytes for tensor in stack.tensors if tensor.ndim > 1)
    pairs = len(to.order_S)
    outputs = stack.layout.outputs
    return Row(
        f"few_tokens_product, {name}",
        arms,
        bytes=visited * of_experts // len(slots) + 2 * (x.numel() + pairs * outputs),
        error=errors_of_few_tokens(x, stack, to),
    )


def errors_of_few_tokens(x: Tensor, stack: ExpertStack, to: Dispatch) -> tuple[float, float]:
    """The relative errors of ``few_tokens_product`` and of its reference, against fp64."""
    exact = few_tokens_product_reference(x.double(), stack, to, True)
    products = few_tokens_product, few_tokens_product_reference
    return tuple(relative(product(x, stack, to, True), exact) for product in products)


def gguf_blocks():
    """2^26 weights in the blocks of GGUF files: dequantised, and inside a product of few rows
    (``gguf_product``) beside the weight in 16 bits and dequantised first.
    """
    out = torch.empty(8192, 8192, dtype=torch.bfloat16, device="cuda")
    dense = random(8192, 8192, scale=0.02)
    for kind, (block, size) in GGUF_KINDS.items():
        packed = torch.randint(
            0, 256, (out.numel() // block * size,), dtype=torch.uint8, device="cuda"
        )
        call = partial(dequantize_gguf, packed, out, kind)
        yield Row(f"gguf dequantise, {kind}", {"ours": call}, bytes=packed.nbytes + 2 * out.numel())
        for rows in (1, 8, 64):
            x = random(rows, 8192)
            arms = {
                "ours": partial(gguf_product, x, packed, 8192, kind),
                "16 bit": partial(F.linear, x, dense),
                "dequantised": lambda x=x, call=call: F.linear(x, call()),
            }
            name = f"gguf_product, {kind}, {rows} rows"
            yield Row(name, arms, bytes=packed.nbytes + 4 * x.numel())


def mxfp4():
    """2^26 weights in MXFP4."""
    out = torch.empty(8192, 8192, dtype=torch.bfloat16, device="cuda")
    codes = torch.randint(0, 256, (out.numel() // 2,), dtype=torch.uint8, device="cuda")
    scales = torch.randint(118, 126, (out.numel() // 32,), dtype=torch.uint8, device="cuda")
    call = partial(dequantize_mxfp4, codes, scales, out)
    moved = codes.nbytes + scales.nbytes + 2 * out.numel()
    yield Row("mxfp4 dequantise", {"ours": call}, bytes=moved)


def attention_over_pages():
    """``paged_attention`` of a decoding step: 64 sequences of 4k keys, one of 32k, a window, larger
    pages, and latents; the pages of a sequence lie anywhere. Beside it the other backends of
    attention over pages that run here.
    """
    for name, shape, sequences, length, window, size in (
        ("64 x 4k", (32, 8, 128, 128), 64, 4096, None, 16),
        ("1 x 32k", (32, 8, 128, 128), 1, 32768, None, 16),
        ("64 x 4k, window 1k", (32, 8, 128, 128), 64, 4096, 1024, 16),
        ("64 x 4k, pages of 128", (32, 8, 128, 128), 64, 4096, None, 128),
        ("64 x 4k, pages of 256", (32, 8, 128, 128), 64, 4096, None, 256),
        ("64 x 4k latents", (128, 1, 576, 512), 64, 4096, None, 16),
    ):
        heads, key_heads, width, value = shape
        columns = length // size
        keys = random(sequences * columns, size, key_heads, width)
        latent = value < width
        values = keys[..., :value] if latent else random(*keys.shape[:3], value)
        q = random(sequences, heads, width)
        table = torch.randperm(len(keys), device="cuda").view(sequences, columns)
        lengths = torch.full((sequences,), length, device="cuda")
        inputs = q, keys, values, table, lengths
        options = {"scale": width**-0.5, "window": window}
        seen = sequences * min(length, window or length) * key_heads
        few = q[:2], keys, values, table[:2], lengths[:2]
        exact = paged_attention_reference(
            *(x.double() if x.is_floating_point() else x for x in few), **options
        )
        pair_of_errors = tuple(
            relative(function(*few, **options), exact)
            for function in (paged_attention, paged_attention_reference)
        )
        of_others = q, keys, values, table.int(), lengths.int()
        yield Row(
            f"paged_attention {name}",
            {
                "ours": partial(paged_attention, *inputs, **options),
                **others_over_pages(*of_others, **options),
            },
            bytes=2 * seen * (width if latent else width + value),
            error=pair_of_errors,
        )
    yield shared_prompts()


def attention_of_decode_steps():
    """``decode_attention`` of 24 layers of a 0.5B for 1, 8 and 64 sequences of 512 keys, and for 512 of
    which eight each share half of them, beside rotation, pages and attention apart, both as graphs.
    The error is that of one layer.
    """
    heads, key_heads, width, size, length = 14, 2, 64, 16, 512
    columns = length // size
    for rows, members in ((1, 1), (8, 1), (64, 1), (512, 8)):
        caches = [random(2, rows * columns, size, key_heads, width) for _ in range(24)]
        angles = 6 * torch.rand(rows, width // 2, device="cuda").repeat(1, 2)
        qkv = random(rows, (heads + 2 * key_heads) * width)
        new = UnrotatedHeads(qkv, angles.cos(), angles.sin(), (heads, key_heads))
        table = torch.randperm(rows * columns, device="cuda").view(rows, columns)
        lengths = torch.full((rows,), length, device="cuda")
        places = table[:, -1] * size + size - 1
        options = {"scale": width**-0.5, "shared": None}
        moved = sum(cache.nbytes for cache in caches)
        name = f"{rows} x {length}"
        if members > 1:
            half = columns // 2
            table[:, :half] = table[::members, :half].repeat_interleave(members, 0)
            teams = torch.arange(rows, dtype=torch.int32, device="cuda").view(-1, members)
            counts = torch.full_like(teams.flatten(), length // 2)
            options["shared"] = SharedPages(teams, counts[: len(teams)], counts)
            moved = moved * (members + 1) // (2 * members)
            name += f", half of them shared by {members}"

        def fused(
            new: UnrotatedHeads = new,
            caches=caches,
            at=(places, table, lengths),
            options=options,
            count: int = 24,
        ) -> Tensor:
            for k, v in caches[:count]:
                out = decode_attention(new, k, v, *at, **options)
            return out

        def apart(
            new: UnrotatedHeads = new,
            caches=caches,
            at=(places, table, lengths),
            options=options,
            count: int = 24,
        ) -> Tensor:
            for cache in caches[:count]:
                k, v = cache.to(new.qkv_NX.dtype)
                q, k_new, v_new = fused_qkv_rope(new.qkv_NX, new.cos_NW, new.sin_NW, new.counts)
                write_pages(k_new, v_new, k, v, at[0])
                out = paged_attention(q, k, v, *at[1:], **options)
            return out

        # rotation apart overwrites the product
        copies = {
            kind: dataclasses.replace(new, qkv_NX=qkv.to(kind, copy=True))
            for kind in (qkv.dtype, torch.float64)
        }
        exact = apart(copies[torch.float64], count=1)
        error = relative(fused(count=1), exact), relative(apart(copies[qkv.dtype], count=1), exact)
        yield Row(
            f"decode_attention, layers of a 0.5B, {name}",
            {"ours": Captured(fused), "apart": Captured(apart)},
            bytes=moved,
            error=error,
        )


def others_over_pages(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, **options: Any
) -> dict[str, Callable[[], object]]:
    """Return the calls of other backends by name; one that refuses or fails is named and left out."""
    arms = dict[str, Callable[[], object]]()
    expected = paged_attention(q, keys, values, table.long(), lengths.long(), **options)
    for name in PAGED_BACKENDS:
        call = partial(attend_pages, q, keys, values, table, lengths, **options, backend=name)
        if name == "kernel":
            continue
        try:
            torch.testing.assert_close(call(), expected, rtol=2**-6, atol=2**-6)
        except Exception as error:  # whatever a package raises, the other rows are measured
            print(f"attention over pages by {name}: {str(error).splitlines()[0]}", file=sys.stderr)
        else:
            arms[name] = call
    return arms


def shared_prompts() -> Row:
    """512 answers of 64 prompts of 512 keys, and as many keys of their own: shared keys once,
    beside every answer's own.
    """
    sequences, members, prompt, own, size = 512, 8, 512, 512, 16
    heads, key_heads, width = 32, 8, 128
    keys, values = (random(40_000, size, key_heads, width) for _ in range(2))
    q = random(sequences, heads, width)
    table = torch.randperm(len(keys), device="cuda")[: sequences * 64].view(sequences, 64)
    whole = prompt // size
    table[:, :whole] = table[::members, :whole].repeat_interleave(members, 0)
    lengths = torch.full((sequences,), prompt + own, device="cuda")
    teams = torch.arange(sequences, dtype=torch.int32, device="cuda").view(-1, members)
    counts = torch.full((sequences,), prompt, dtype=torch.int32, device="cuda")
    shared = SharedPages(teams, counts[: len(teams)], counts)
    call = partial(paged_attention, q, keys, values, table, lengths, scale=width**-0.5)
    read = sequences * own + len(teams) * prompt
    return Row(
        "paged_attention 64 x 8, 512 + 512",
        {"ours": partial(call, shared=shared), "each its own": call},
        bytes=2 * read * key_heads * 2 * width,
    )


def products_of_fixed_tiles():
    """``invariant_product`` of the MLP of an 8B: rows of a decoding step and of a prefill pass."""
    weight = random(14336, 4096).mT
    for rows in (8, 64, 512, 4096):
        x = random(rows, 4096)
        exact = x[:8].double() @ weight.double()
        pair_of_errors = tuple(
            relative(function(x[:8], weight), exact) for function in (invariant_product, torch.mm)
        )
        yield Row(
            f"invariant_product {rows} rows",
            {"ours": partial(invariant_product, x, weight), "torch": partial(torch.mm, x, weight)},
            bytes=2 * (x.numel() + weight.numel() + rows * 14336),
            error=pair_of_errors,
        )


def draws_of_tokens():
    """``draw_tokens``: 64 rows of a vocabulary of 152,000, whose logits are read twice."""
    logits = random(64, 152_064).float()
    ones = torch.ones(64, device="cuda")
    keys = torch.arange(64, device="cuda")
    given = logits, logits, ones, 0 * ones, keys, keys
    arms = {"ours": draw_tokens, "plain": draw_tokens_reference}
    yield Row(
        "draw_tokens, 64 x 152k",
        {name: partial(function, *given) for name, function in arms.items()},
        bytes=2 * logits.nbytes,
    )


def rows_of_host_tables():
    """``host_rows``: rows of 32,768 tokens from the embeddings of an 8B and a 70B, over the bus; beside
    the host gathering them, which waits for the ids."""
    for width in (4096, 8192):
        pinned = PinnedTensors()
        table = pinned.empty((128_256, width), torch.bfloat16, torch.device("cuda", 0))
        table.normal_()
        ids = torch.randint(len(table), (32768,), device="cuda")
        arms = {"ours": host_rows, "host": host_rows_reference}
        assert torch.equal(*(function(ids, table) for function in arms.values()))
        yield Row(
            f"host_rows {width}",
            {name: partial(function, ids, table) for name, function in arms.items()},
            bytes=2 * len(ids) * width,
        )


def experts():
    """A layer of 128 experts, 8 of them a token, part by part: ``expert_dispatch``,
    ``grouped_product`` and its gradient of the weights beside torch's, ``expert_glu``,
    ``expert_combine``, and ``fused_experts`` beside transformers' grouped_mm."""
    tokens = 32768
    count = 128
    each = 8
    width = 2048
    inner = 768
    shares, chosen = torch.randn(tokens, count, device="cuda").softmax(1).topk(each, 1)
    to = dispatch_to_experts(chosen, count)
    pairs = tokens * each
    x = random(tokens, width)
    unit = random(pairs, inner)
    both = random(pairs, 2 * inner)
    rows = x[to.order_S.long() // each]
    ends = to.bounds[1:].contiguous()
    flat = shares.reshape(-1)
    first = random(count, 2 * inner, width, scale=0.02)
    second = random(count, width, inner, scale=0.02)
    yield Row(
        "expert_dispatch", {"ours": lambda: dispatch_to_experts(chosen, count)}, bytes=24 * pairs
    )
    yield Row(
        "expert_glu forward", {"ours": lambda: expert_glu(both, Gate())}, bytes=6 * inner * pairs
    )
    glu_gradient = partial(expert_glu_gradient, unit, both, flat, to.order_S, Gate())
    yield Row("expert_glu backward", {"ours": glu_gradient}, bytes=12 * inner * pairs)
    combined = {"ours": lambda: expert_combine(rows, to.places_S, each, flat)}
    yield Row("expert_combine", combined, bytes=2 * width * (pairs + tokens))
    product = {
        "ours": lambda: grouped_product(x, first, to, True),
        "torch": lambda: F.grouped_mm(rows, first.mT, offs=ends),
    }
    yield Row("grouped_product gate and up", product, products=lambda: rows @ first[0].t())
    gradient = {
        "ours": lambda: grouped_weight_gradient(both, x, to, GATHER_SECOND),
        "torch": lambda: F.grouped_mm(both.t(), rows, offs=ends),
    }
    yield Row("grouped_product weight gradient", gradient, products=lambda: both.t() @ rows)
    leaves = [leaf.requires_grad_() for leaf in (x, shares.bfloat16(), first, second)]
    dy = random(tokens, width)

    def layer(function: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(), leaves, dy)

    def ours() -> Tensor:
        return fused_experts(
            leaves[0], chosen, leaves[1], ExpertWeights(first), ExpertWeights(second)
        )

    def dense() -> object:
        for _ in range(3):
            torch.mm(rows, first[0].t())
            torch.mm(unit, second[0].t())

    peer = Qwen3MoeExperts(
        Qwen3MoeConfig(hidden_size=width, moe_intermediate_size=inner, num_experts=1)
    )
    peer.num_experts = count
    peer.gate_up_proj = nn.Parameter(first)
    peer.down_proj = nn.Parameter(second)
    theirs = partial(ALL_EXPERTS_FUNCTIONS["grouped_mm"], peer, leaves[0], chosen, leaves[1])
    leaves_of_peer = [*leaves[:2], peer.gate_up_proj, peer.down_proj]
    arms = {
        "ours": layer(ours),
        "grouped_mm": lambda: torch.autograd.grad(theirs(), leaves_of_peer, dy),
    }
    yield Row("fused_experts, forward and backward", arms, products=dense)


def experts_in_fp8():
    """The same layer's parts in FP8: ``fp8_experts`` (weights trained: rows, then columns with
    known scales), ``fp8_grouped_product`` beside torch's with scales of rows and columns,
    ``expert_glu`` in FP8 where adapters alone, or nothing, learns."""
    tokens = 32768
    count = 128
    each = 8
    width = 2048
    inner = 768
    shares, chosen = torch.randn(tokens, count, device="cuda").softmax(1).topk(each, 1)
    to = dispatch_to_experts(chosen, count)
    pairs = tokens * each
    x = random(tokens, width)
    unit = random(pairs, inner)
    both = random(pairs, 2 * inner)
    weight = random(count, 2 * inner, width, scale=0.02)
    flat = shares.reshape(-1)
    ends = to.bounds[1:].contiguous()
    (x8, _), (both8, _) = fp8_quantize(x, "row"), fp8_quantize(both, "row")
    rows, columns = fp8_quantize_experts(weight, "both")
    sizes = weight.numel()
    yield Row("fp8_experts rows", {"ours": lambda: fp8_quantize_experts(weight)}, bytes=5 * sizes)
    again = partial(fp8_quantize_experts, weight, "columns", rows.scale)
    yield Row("fp8_experts columns, known scales", {"ours": again}, bytes=3 * sizes)
    yield Row(
        "fp8_experts transposed", {"ours": lambda: fp8_experts_transposed(rows)}, bytes=2 * sizes
    )
    yield Row(
        "expert_glu_fp8 forward",
        {"ours": lambda: expert_glu(both, Gate(), False, in_fp8=True)},
        bytes=5 * inner * pairs,
    )
    gradient = partial(
        expert_glu_gradient, unit, both, flat, to.order_S, Gate(), False, False, in_fp8=True
    )
    yield Row("expert_glu_fp8 backward", {"ours": gradient}, bytes=8 * inner * pairs)
    token_of = to.order_S.long() // each
    sorted_values, sorted_scale = (part[token_of] for part in x8)

    def theirs(values: Tensor, scale: Tensor, weight: Scaled, fast: bool) -> Tensor:
        of_columns = weight.scale[:, None].expand(-1, weight.values.shape[1]).contiguous()
        options = {"offs": ends, "out_dtype": torch.bfloat16, "use_fast_accum": fast}
        return torch._scaled_grouped_mm(
            values, weight.values.mT, scale.flatten(), of_columns, **options
        )

    first = {
        "ours": lambda: fp8_grouped_product(x8, rows, to, True, fast=True),
        "bf16": lambda: grouped_product(x, weight, to, True),
        "torch": lambda: theirs(sorted_values, sorted_scale, rows, True),
    }
    in_order = x[token_of]
    yield Row("fp8_grouped_product gate and up", first, products=lambda: in_order @ weight[0].t())
    of_x = {
        "ours": lambda: fp8_grouped_product(both8, columns, to),
        "bf16": lambda: grouped_product(both, weight.mT, to),
        "torch": lambda: theirs(*both8, columns, False),
    }
    yield Row("fp8_grouped_product gradient of x", of_x, products=lambda: both @ weight[0])


GROUPS = {
    "optimizers": optimizers,
    "norms": norms,
    "others": others,
    "gated": gated,
    "rotations": rotations,
    "heads": heads,
    "distillation": distillation,
    "adapters": adapters,
    "layers": layers,
    "fp8": fp8,
    "nf4": nf4,
    "nf4_product": products_of_few_rows,
    "few_tokens_product": products_of_few_tokens,
    "dense_slots": dense_values_of_slots,
    "gguf": gguf_blocks,
    "mxfp4": mxfp4,
    "paged_attention": attention_over_pages,
    "decode_attention": attention_of_decode_steps,
    "invariant_product": products_of_fixed_tiles,
    "token_draws": draws_of_tokens,
    "host_rows": rows_of_host_tables,
    "experts": experts,
    "experts_in_fp8": experts_in_fp8,
}


def sample(call: Callable[[], object], calls: int = 1) -> float:
    """Milliseconds a call; the device is kept busy first, so that launches are not waited for."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(4_000_000)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def measure(row: Row) -> dict:
    arms = dict(row.arms)
    if row.products:
        arms["products"] = row.products
    for call in arms.values():
        for _ in range(WARM_UP):
            call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ours = row.arms["ours"]
    (
        ours.launched if isinstance(ours, Captured) else ours
    )()  # what is captured has its memory already
    peak = torch.cuda.max_memory_allocated() - before
    row.samples = {name: [] for name in arms}
    for _ in range(SAMPLES):
        for name, call in arms.items():
            row.samples[name].append(sample(call, row.calls))
    return {
        "bytes": row.bytes,
        "error": row.error,
        "extra_gib": peak / 2**30,
        "milliseconds": row.samples,
    }


def copy_rate() -> float:
    """Bytes a second, read and written, of a device copy."""
    a = torch.randint(0, 255, (2**30,), dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    times = [sample(lambda: b.copy_(a)) for _ in range(20)]
    return 2 * a.numel() / (statistics.median(times[5:]) * 1e-3)


def print_table(rows: dict[str, dict], rate: float) -> None:
    print(f"copy {rate / 1e12:.2f} TB/s; share: of the copy rate, or time over the products'")
    for name, row in rows.items():
        times = {arm: statistics.median(samples) for arm, samples in row["milliseconds"].items()}
        floor = row["bytes"] / rate * 1e3 or times["products"]
        share = (
            f"{floor / times['ours']:6.1%} of copy"
            if row["bytes"]
            else f"{times['ours'] / floor:6.3f}x products"
        )
        others = "  ".join(
            f"{arm} {time / times['ours']:.2f}x"
            for arm, time in times.items()
            if arm not in ("ours", "products")
        )
        error = "" if row["error"] is None else f"error {row['error'][0]:.1e}/{row['error'][1]:.1e}"
        print(
            f"{name:50} {times['ours']:8.3f} ms {share}  +{row['extra_gib']:.2f} GiB  {others}  "
            f"{error}"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--only", nargs="*", default=list(GROUPS))
    given = parser.parse_args()
    torch.manual_seed(0)
    rate = copy_rate()
    results: dict = {
        "card": torch.cuda.get_device_name(0),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
        "commit": given.commit,
        "copy_bytes_per_second": rate,
        "rows": {},
    }
    for group in given.only:
        for row in GROUPS[group]():
            results["rows"][row.name] = measure(row)
            given.output.write_text(json.dumps(results))
        torch.cuda.empty_cache()
        torch._dynamo.reset()
    print_table(results["rows"], rate)
    for name, row in results["rows"].items():
        if row["error"] is not None and not row["error"][0] <= max(1.5 * row["error"][1], 8e-3):
            raise SystemExit(
                f"{name}: error {row['error'][0]:.2e} beside {row['error'][1]:.2e} of the plain "
                "operation"
            )


if __name__ == "__main__":
    main()
