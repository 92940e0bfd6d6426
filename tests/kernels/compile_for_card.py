"""Compiles every kernel for a card that need not be there.

``python compile_for_card.py CAPABILITY KIB [SHARE SEED | CALLS]``: the capability as 86 for 8.6,
the shared memory that a program may have, and of all calls a share, drawn by a seed, or those with
these names, with commas between, if not all. A stand-in for Triton's driver says which card it is,
and launches compile and do not run. Prints a line of JSON a kernel: its name and the bytes of
shared memory that a program of it takes. Exit status 1 where one does not compile.
"""

import json
import random as chance
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

CAPABILITY, KIB = map(int, sys.argv[1:3])
HALF = torch.bfloat16 if CAPABILITY >= 80 else torch.float16


def stand_in() -> None:
    """Kernels believe that tensors are on the card."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from chronicals.kernels import launch

    class Card:
        def get_current_target(self):
            return GPUTarget("cuda", CAPABILITY, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

    driver.set_active(Card())
    torch.Tensor.is_cuda = property(lambda self: True)
    torch.cuda.get_device_capability = lambda device=None: divmod(CAPABILITY, 10)
    own_mm, own_addmm = torch.mm, torch.addmm  # of a CPU, which has no out_dtype
    torch.mm = lambda a, b, out_dtype=None, **more: own_mm(a, b, **more).to(out_dtype or a.dtype)
    torch.addmm = lambda x, a, b, out_dtype=None, out=None, **more: out.copy_(
        own_addmm(x.to(a.dtype), a, b, **more)
    )
    launch._is_current = lambda x: True
    for module in [
        module for name, module in sys.modules.items() if name.startswith("chronicals.kernels")
    ]:
        for name, value in (("shared_memory", KIB << 10), ("multiprocessors", 64)):
            if hasattr(module, name):
                setattr(module, name, lambda device, value=value: value)


def compiling(threads: ThreadPoolExecutor) -> dict[str, int]:
    """From here on launches compile; by kernel, the most shared memory of any of its variants,
    once the threads are done.
    """
    import triton
    from triton.runtime._async_compile import AsyncCompileMode, active_mode

    kernels = {}
    run = triton.JITFunction.run
    mode = AsyncCompileMode(threads)

    def compile_only(kernel, *args, grid, warmup, **options):
        before = active_mode.set(mode)
        try:
            compiled = run(kernel, *args, grid=grid, warmup=True, **options)
        finally:
            active_mode.reset(before)
        kernels[id(compiled)] = kernel._fn_name, compiled
        return compiled

    triton.JITFunction.run = compile_only
    return kernels


def calls() -> dict[str, Callable[[], object]]:
    """Each kernel, forward and backward, by name."""
    from chronicals import kernels as k
    from chronicals.kernels import adamw, adamw_8bit, gguf_blocks, gradient_norm, mxfp4, nf4

    def random(*shape, dtype=HALF):
        return torch.randn(*shape).to(dtype).requires_grad_()

    def both(function, *inputs):
        out = function(*inputs)
        outs = [x for x in (out if isinstance(out, tuple) else (out,)) if x.requires_grad]
        torch.autograd.grad(
            outs, [x for x in inputs if x.requires_grad], [torch.ones_like(x) for x in outs]
        )

    def optimizer(kind, update, **lists):
        weight = random(300, 1000).detach()
        low = (
            {"lows": [torch.zeros_like(weight, dtype=torch.int16)]}
            if torch.bfloat16 == HALF
            else {}
        )
        weight = weight if low else weight.float()
        tensors = kind(
            [weight], [torch.randn_like(weight)], steps=[torch.zeros(())], **low, **lists
        )
        update(tensors, 1e-3, (0.9, 0.999), 1e-8, 0.1, torch.ones(()), torch.tensor(True))

    found: dict[str, Callable[[], object]] = {}
    for width in (896, 4096, 8192):
        x = random(64, width)
        weight = random(width)
        bias = random(width)
        found |= {
            f"rmsnorm {width}": lambda x=x, w=weight: both(k.fused_rmsnorm, x, w),
            f"add_rmsnorm {width}": lambda x=x, w=weight: both(
                k.fused_add_rmsnorm, x, x.detach().clone().requires_grad_(), w
            ),
            f"add_rmsnorm to a residual in fp32 {width}": lambda x=x, w=weight: k.fused_add_rmsnorm(
                x, x.float(), w, dtype=HALF
            ),
            f"layernorm {width}": lambda x=x, w=weight, b=bias: both(k.fused_layernorm, x, w, b),
            f"softmax {width}": lambda x=x: both(k.fused_softmax, x),
            f"swiglu {width}": lambda x=x: both(
                k.fused_swiglu, x, x.detach().clone().requires_grad_()
            ),
            f"geglu {width}": lambda x=x: both(
                k.fused_geglu, x, x.detach().clone().requires_grad_()
            ),
        }
    for heads, groups, width in ((14, 2, 64), (32, 8, 128), (8, 1, 256)):
        q = random(64, heads, width)
        key = random(64, groups, width)
        table = torch.randn(64, width).to(HALF)
        found |= {
            f"qk_rope {width}": lambda q=q, key=key, t=table: both(
                lambda a, b: k.fused_qk_rope(a, b, t, t), q, key
            ),
            f"qk_norm_rope {width}": lambda q=q, key=key, t=table, w=width: both(
                lambda a, b, c, d: k.fused_qk_norm_rope(a, b, c, d, t, t),
                q,
                key,
                random(w),
                random(w),
            ),
        }
    hidden = random(256, 1024)
    head = random(4096, 1024)
    targets = torch.randint(0, 4096, (256,))
    found |= {
        "linear_cross_entropy": lambda: both(
            lambda h, w: k.linear_cross_entropy(h, w, targets), hidden, head
        ),
        "token_log_probability": lambda: both(
            lambda h, w: k.token_log_probability(h, w, targets)[0], hidden, head
        ),
        "linear_distillation": lambda: [both(call, hidden, head) for call in distilled(targets)],
        "gradient_norm": lambda: gradient_norm.gradient_norm([hidden.detach(), head.detach()]),
        "adamw": lambda: optimizer(
            adamw.Tensors,
            adamw.fused_adamw_,
            means=[torch.zeros(300, 1000)],
            squares=[torch.zeros(300, 1000)],
        ),
        "adamw_8bit": lambda: optimizer(
            adamw_8bit.QuantizedTensors,
            adamw_8bit.adamw_8bit_,
            means=[torch.zeros(300, 1000, dtype=torch.uint8)],
            squares=[torch.zeros(300, 1000, dtype=torch.uint8)],
            mean_scales=[torch.zeros(1172)],
            square_scales=[torch.zeros(1172)],
        ),
        "nf4": lambda: four_bits(nf4),
        "nf4_product": lambda: products_of_few_rows(nf4),
        "few_tokens_product": lambda: products_of_few_tokens(nf4),
        "dense_slots": lambda: values_of_slots(nf4),
        "gguf_blocks": lambda: blocks_of_gguf(gguf_blocks),
        "mxfp4": lambda: values_of_mxfp4(mxfp4),
        "magnitudes": magnitudes,
        "paged_attention": attention_over_pages,
        "decode_attention": attention_of_decode_steps,
        "invariant_product": products_of_fixed_tiles,
        "token_draws": draws_of_tokens,
        "host_rows": rows_of_tables,
    }
    for rank in (0, 8, 64):
        found[f"experts {rank}"] = partial(experts, rank)
    for rank in (129, 257, 300):
        found[f"wide adapters {rank}"] = partial(wide_adapters, rank)
    for rank in (8, 16, 64):
        found[f"adapters {rank}"] = partial(adapters, rank)
    if CAPABILITY >= 89:
        found["fp8"] = eight_bits
        for rank in (0, 64):
            found[f"experts in fp8 {rank}"] = partial(experts_in_eight_bits, rank)
    return found


def attention_of_decode_steps() -> None:
    """Heads of a 0.5B, an 8B and a Gemma, normed or not, for one sequence and 64, alone and in teams."""
    from chronicals.kernels.decode_attention import UnrotatedHeads, decode_attention
    from chronicals.kernels.paged_attention import SharedPages

    for heads, key_heads, width in ((14, 2, 64), (32, 8, 128), (8, 4, 256)):
        pages = torch.zeros(64, 16, key_heads, width, dtype=HALF)
        norms = tuple(torch.zeros(2, width, dtype=HALF))
        for rows in (1, 64):
            qkv = torch.zeros(rows, (heads + 2 * key_heads) * width, dtype=HALF)
            tables = torch.zeros(2, rows, width, dtype=HALF)
            numbers = torch.zeros(rows, dtype=torch.int64)
            table = torch.zeros(rows, 64, dtype=torch.int64)
            for of_norms in ((), (norms, 1e-6, 0.0)):
                new = UnrotatedHeads(qkv, *tables, (heads, key_heads), *of_norms)
                memory = pages, pages, numbers, table, numbers
                decode_attention(new, *memory, scale=1.0, window=512)
                teams = torch.zeros(rows, 2, dtype=torch.int32)
                shared = SharedPages(teams, teams[:, 0], teams[:, 1])
                decode_attention(new, *memory, scale=1.0, shared=shared)


def experts(rank: int) -> None:
    """Both ways, as Qwen's are and, without an adapter, as gpt-oss's are; few tokens and many."""
    from chronicals.kernels.expert_glu import Gate
    from chronicals.kernels.fused_experts import ExpertWeights, fused_experts

    count = 8
    width = 768
    inner = 512
    clamped = Gate("silu", 1.702, 7.0, 1.0, True)
    for tokens, gate in (
        ((64, Gate()), (1024, Gate()))
        if rank
        else ((64, Gate("gelu")), (1024, Gate()), (1024, clamped))
    ):
        made = []
        for out, into in ((2 * inner, width), (width, inner)):
            shape = (count, into, out) if gate is clamped else (count, out, into)
            bias = torch.randn(count, out).to(HALF).requires_grad_() if gate is clamped else None
            thin = ((count, rank, into), (count, out, rank)) if rank else ()
            pair = [torch.randn(*s).to(HALF).requires_grad_() for s in thin]
            made.append(
                ExpertWeights(
                    torch.randn(*shape).to(HALF).requires_grad_(not rank),
                    gate is clamped,
                    bias,
                    *pair,
                )
            )
        x = torch.randn(tokens, width).to(HALF).requires_grad_()
        shares = torch.rand(tokens, 2).requires_grad_()
        fused_experts(
            x, torch.zeros(tokens, 2, dtype=torch.int64), shares, *made, gate
        ).sum().backward()
    if CAPABILITY >= 90 and not rank:
        by_the_copy_engine(count, width, inner)


def wide_adapters(rank: int) -> None:
    """Beside products of many rows with experts, whose tiles are the largest; in 16 bit, and in
    FP8 where the card has it.
    """
    from chronicals.kernels.expert_dispatch import dispatch_to_experts
    from chronicals.kernels.fp8 import Scaled
    from chronicals.kernels.grouped_product import grouped_product
    from chronicals.kernels.low_rank_term import LowRankTerm

    to = dispatch_to_experts(torch.zeros(1024, 2, dtype=torch.int64), 8)
    thin = LowRankTerm(torch.zeros(2048, rank, dtype=HALF), torch.zeros(8, 512, rank, dtype=HALF))
    grouped_product(
        torch.zeros(1024, 256, dtype=HALF),
        torch.zeros(8, 512, 256, dtype=HALF),
        to,
        True,
        None,
        thin,
    )
    if CAPABILITY >= 89:
        from chronicals.kernels.fp8_grouped_product import fp8_grouped_product

        x8, w8 = (
            torch.zeros(*shape, dtype=torch.float8_e4m3fn) for shape in ((1024, 256), (8, 512, 256))
        )
        x = Scaled(x8, torch.ones(1024, 1))
        w = Scaled(w8, torch.ones(8))
        fp8_grouped_product(x, w, to, True, None, thin, HALF, True)


def by_the_copy_engine(count: int, width: int, inner: int) -> None:
    from chronicals.kernels.expert_dispatch import dispatch_to_experts

    of_rows = sys.modules["chronicals.kernels.grouped_product"]
    of_weights = sys.modules["chronicals.kernels.grouped_weight_gradient"]
    to = dispatch_to_experts(torch.zeros(1024, 2, dtype=torch.int64), count)
    x, rows, wide = (
        torch.randn(*shape).to(HALF) for shape in ((1024, width), (2048, width), (2048, inner))
    )
    weight = torch.randn(count, inner, width).to(HALF)
    launch = of_rows.ProductLaunch(256, 64, 8, 3, boxes=True)
    for given, w, gathers in ((x, weight, True), (rows, weight, False), (wide, weight.mT, False)):
        of_rows.launch_product(launch, given, w, to, gathers)
    of_weights._clear_kernel[(count, 1)](
        torch.zeros(count, 64, dtype=HALF), to.bounds, 64, of_weights.CLEAR_BLOCK
    )
    for a, b, gathers in (
        (wide, x, of_weights.GATHER_SECOND),
        (x, wide, of_weights.GATHER_FIRST),
        (wide, rows, of_weights.GATHER_NONE),
    ):
        of_weights.launch_weight_gradient(launch, a, b, to, gathers, 1.0, HALF)


def distilled(targets: torch.Tensor) -> list[Callable[..., object]]:
    """Students at the heads' logits, each kind of divergence, with and without a temperature."""
    from chronicals.kernels.linear_distillation import Divergence, linear_distillation
    from chronicals.kernels.linear_head import LinearHead

    teacher = LinearHead(torch.randn(256, 512).to(HALF), torch.randn(4096, 512).to(HALF))

    def call(hidden, head, divergence, temperature):
        student = LinearHead(hidden, head, softcap=30.0 if temperature == 2.0 else None)
        return linear_distillation(
            student,
            teacher,
            targets,
            divergence,
            temperature=temperature,
            cross_entropy_weight=temperature - 1,
        ).loss

    kinds = Divergence.forward_kl(), Divergence.reverse_kl(), Divergence.jsd()
    return [
        partial(call, divergence=kind, temperature=temperature)
        for kind in kinds
        for temperature in (1.0, 2.0)
    ]


def adapters(rank: int) -> None:
    """What adapters add to a product of 1024 to 2048 columns, with and without dropout."""
    from chronicals.kernels import dropped_products
    from chronicals.kernels.adapter_gradients import adapter_gradients
    from chronicals.kernels.adapter_padding import write_adapters

    tokens = 256
    columns = (1024, 512, 512)
    x = torch.randn(tokens, 1024).to(HALF)
    a = torch.randn(rank, 1024).to(HALF)
    seed = torch.zeros(1, dtype=torch.int64)
    u, g = (torch.randn(tokens, 3 * rank).to(HALF) for _ in range(2))
    dy = torch.randn(tokens, sum(columns)).to(HALF)
    up = torch.randn(sum(columns), 3 * rank).to(HALF)
    adapter_gradients(dy, up, u, g, columns, (rank,) * 3, (1.0,) * 3, HALF)
    dropped_products.dropped_down(x, a, seed, 0.1, u[:, :rank])
    dropped_products.dropped_gradient_of_down(g[:, :rank], x, seed, 0.1)
    dropped_products.add_dropped_product_(x, g[:, :rank], a, seed, 0.1)
    downs, ups = (
        [torch.randn(*shape) for shape in shapes]
        for shapes in ([(rank, 1024)] * 3, [(n, rank) for n in columns])
    )
    write_adapters(
        torch.zeros(3 * rank, 1024, dtype=HALF), up, columns, (rank,) * 3, downs, ups, (1.0,) * 3
    )


def attention_over_pages() -> None:
    """Groups of query heads, narrow and wide heads, latents; few splits and many."""
    from chronicals.kernels.paged_attention import (
        SharedPages,
        most_members,
        paged_attention,
        write_pages,
    )

    for heads, key_heads, width, value, sequences, columns in (
        (32, 8, 128, 128, 64, 256),
        (14, 2, 64, 64, 1, 4096),
        (16, 8, 256, 256, 8, 64),
        (32, 32, 96, 96, 8, 64),
        *([(128, 1, 576, 512, 8, 512)] if CAPABILITY >= 80 else []),
    ):
        q = torch.zeros(sequences, heads, width, dtype=HALF)
        k = torch.zeros(columns, 16, key_heads, width, dtype=HALF)
        v = k[..., :value]
        table = torch.zeros(sequences, columns, dtype=torch.int64)
        lengths = torch.ones(sequences, dtype=torch.int64)
        sinks = torch.zeros(heads)
        for of_scores in ({}, {"sinks": sinks, "window": 100, "softcap": 30.0}):
            paged_attention(q, k, v, table, lengths, scale=0.1, **of_scores)
            paged_attention(q, k, v, table, lengths, scale=0.1, splits=1, **of_scores)
        members = most_members(heads, key_heads, value)
        if members > 1:
            teams = torch.zeros(4, members, dtype=torch.int32)
            counts = torch.zeros(sequences, dtype=torch.int32)
            shared = SharedPages(teams, counts[:4], counts)
            paged_attention(q, k, v, table, lengths, scale=0.1, shared=shared)
        if width == value:
            write_pages(k[:, 0], v[:, 0], k, k.clone(), lengths)


def products_of_fixed_tiles() -> None:
    """Weights in 16 and 32 bit, in both orders, and sums of rows."""
    from chronicals.kernels.invariant_product import invariant_product

    for dtype in (HALF, torch.float32):
        x = torch.zeros(5, 896, dtype=dtype)
        for w in (torch.zeros(512, 896, dtype=dtype).mT, torch.zeros(896, 512, dtype=dtype)):
            invariant_product(x, w)
        invariant_product(x, torch.zeros(896, 1, dtype=dtype))


def draws_of_tokens() -> None:
    """Logits in 16 and 32 bit, small and large vocabularies."""
    from chronicals.kernels.token_draws import draw_tokens

    for vocabulary, dtype in ((32_000, HALF), (262_144, torch.float32)):
        logits = torch.zeros(4, vocabulary, dtype=dtype)
        ones = torch.ones(4)
        keys = torch.zeros(4, dtype=torch.int64)
        draw_tokens(logits, logits.float(), ones, ones, keys, keys)


def rows_of_tables() -> None:
    """Rows that one program copies, and wide ones."""
    from chronicals.kernels.host_rows import _gathered

    for width in (896, 8192):
        for ids in (torch.int32, torch.int64):
            _gathered(torch.zeros(5, dtype=ids), torch.zeros(7, width, dtype=HALF))


def magnitudes() -> None:
    """Of DoRA: outputs scaled in place, and their gradients."""
    from chronicals.kernels.column_scaling import scale_columns, scaled_columns_gradient

    y = torch.randn(256, 1024).to(HALF)
    factor = torch.randn(1024)
    scale_columns(y, factor, torch.randn(1024).to(HALF), y)
    scaled_columns_gradient(y, factor, torch.empty_like(y), y)


def eight_bits() -> None:
    from chronicals.kernels.fp8 import FP8_SCALINGS, fp8_quantize

    for scaling in FP8_SCALINGS:
        fp8_quantize(torch.randn(256, 1024).to(HALF), scaling, layout="both")


def experts_in_eight_bits(rank: int) -> None:
    """Products by launches that the function chooses, of few rows and many, gathered or not,
    with both kinds of sums.
    """
    from chronicals.kernels.expert_dispatch import dispatch_to_experts
    from chronicals.kernels.fp8 import Scaled
    from chronicals.kernels.fp8_experts import fp8_experts_transposed, fp8_quantize_experts
    from chronicals.kernels.fp8_grouped_product import fp8_grouped_product
    from chronicals.kernels.low_rank_term import LowRankTerm

    count = 8
    width = 768
    inner = 512
    weight = torch.randn(count, inner, width).to(HALF)
    rows, columns = fp8_quantize_experts(weight, "both")
    fp8_quantize_experts(weight[:, :33], "columns", rows.scale)
    fp8_experts_transposed(rows)
    for tokens in (64, 1024):
        to = dispatch_to_experts(torch.zeros(tokens, 2, dtype=torch.int64), count)
        x, dy = (
            Scaled(torch.zeros(*size, dtype=torch.float8_e4m3fn), torch.ones(size[0], 1))
            for size in ((tokens, width), (2 * tokens, inner))
        )
        for given, w, of_tokens, fast in ((x, rows, True, True), (dy, columns, False, False)):
            out = w.values.shape[1]
            bias = None if rank else torch.randn(count, out).to(HALF)
            thin = [
                torch.randn(*shape).to(HALF) for shape in ((2 * tokens, rank), (count, out, rank))
            ]
            fp8_grouped_product(
                given, w, to, of_tokens, bias, LowRankTerm(*thin) if rank else None, HALF, fast
            )
    units_in_eight_bits(inner, dense=bool(rank))


def units_in_eight_bits(inner: int, dense: bool) -> None:
    from chronicals.kernels.expert_glu import Gate, expert_glu, expert_glu_gradient

    h = torch.randn(256, 2 * inner).to(HALF)
    g = torch.randn(256, inner).to(HALF)
    shares = torch.rand(256)
    for gate in (Gate(), Gate("silu", 1.702, 7.0, 1.0, True)):
        expert_glu(h, gate, dense, in_fp8=True)
        order = torch.arange(256, dtype=torch.int32)
        expert_glu_gradient(g, h, shares, order, gate, dense, dense, in_fp8=True)


def blocks_of_gguf(gguf_blocks) -> None:
    from chronicals.kernels.gguf_product import gguf_product

    for kind, (block, size) in gguf_blocks.GGUF_KINDS.items():
        packed = torch.zeros(256 * 512 // block * size, dtype=torch.uint8)
        gguf_blocks.dequantize_gguf(packed, torch.empty(256, 512, dtype=HALF), kind)
        for rows in (1, 64):
            gguf_product(torch.zeros(rows, 512, dtype=HALF), packed, 256, kind)


def values_of_mxfp4(mxfp4) -> None:
    codes = torch.zeros(256 * 512 // 2, dtype=torch.uint8)
    scales = torch.zeros(256 * 512 // 32, dtype=torch.uint8)
    mxfp4.dequantize_mxfp4(codes, scales, torch.empty(256, 512, dtype=HALF))


def four_bits(nf4) -> None:
    packed, absmax = nf4.quantize_nf4(torch.randn(256, 512).to(HALF))
    for scales in (
        nf4.Scales(absmax),
        nf4.Scales(absmax.to(torch.uint8), absmax, torch.zeros(256), torch.zeros(())),
    ):
        nf4.dequantize_4bit(packed, scales, torch.empty(256, 512, dtype=HALF))


def products_of_few_rows(nf4) -> None:
    """One row and many, with splits and without, both forms of scales, small blocks and large."""
    from chronicals.kernels.nf4_product import nf4_product, nf4_products

    for outputs, columns, block in ((1024, 4096, 64), (16384, 896, 32), (64, 4096, 512)):
        packed = torch.zeros(outputs * columns // 2, dtype=torch.uint8)
        absmax = torch.zeros(outputs * columns // block)
        nested = absmax.to(torch.uint8), absmax, torch.zeros(256), torch.zeros(())
        for rows in (1, 17, 64):
            x = torch.zeros(rows, columns, dtype=HALF)
            for scales in (nf4.Scales(absmax), nf4.Scales(*nested)):
                nf4_product(x, packed, scales, outputs, block)
                sizes = outputs // 2, outputs // 4, outputs // 4
                parts = [packed[: size * columns // 2] for size in sizes]
                forms = [
                    replace(scales, absmax=scales.absmax[: size * columns // block])
                    for size in sizes
                ]
                nf4_products(x, parts, forms, sizes, block)


def products_of_few_tokens(nf4) -> None:
    """Weights in every format, small blocks and large: one token, and 64 from slots with a bias and
    an adapter.
    """
    from chronicals.kernels.expert_dispatch import dispatch_to_experts
    from chronicals.kernels.few_tokens_product import few_tokens_product
    from chronicals.kernels.low_rank_term import LowRankTerm

    experts = 8
    slots = torch.zeros(experts, dtype=torch.int32)
    to = dispatch_to_experts(torch.zeros(1, 4, dtype=torch.int64), experts)
    for stack in stacks_of_experts(nf4, experts, 1536, 2048):
        few_tokens_product(torch.zeros(1, 2048, dtype=HALF), stack, to, True)

    pairs, outputs = 256, 96
    to = dispatch_to_experts(torch.zeros(pairs // 4, 4, dtype=torch.int64), experts)
    bias = torch.zeros(experts, outputs, dtype=HALF)
    adapted = LowRankTerm(
        torch.zeros(pairs, 16, dtype=HALF), torch.zeros(experts, outputs, 16, dtype=HALF)
    )
    for stack in stacks_of_experts(nf4, experts, outputs, 896):
        x = torch.zeros(pairs, stack.layout.columns, dtype=HALF)
        few_tokens_product(x, stack, to, False, bias, adapted, slots)


def values_of_slots(nf4) -> None:
    """Of every packed format, small blocks and large, in 16 and in 32 bits."""
    from chronicals.kernels.dense_slots import dense_slots
    from chronicals.kernels.expert_stacks import StackIn16Bits, StackInFP8

    records = torch.zeros(4, dtype=torch.int32)
    for stack in stacks_of_experts(nf4, 8, 96, 2048):
        if isinstance(stack, StackIn16Bits | StackInFP8):
            continue
        for dtype in (HALF, torch.float32):
            dense_slots(stack, records, torch.zeros(4, 96, stack.layout.columns, dtype=dtype))


def stacks_of_experts(nf4, experts: int, outputs: int, columns: int) -> list:
    from chronicals.kernels import expert_stacks as of
    from chronicals.kernels.gguf_blocks import GGUF_KINDS

    def codes(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8)

    values = torch.zeros(experts, outputs, columns, dtype=HALF)
    bits = codes(experts, outputs, columns).view(torch.float8_e4m3fn)
    squares = torch.zeros(experts, -(-outputs // 128), -(-columns // 128))
    packed = codes(experts * outputs * columns // 2)
    stacks = [
        of.StackIn16Bits(values),
        of.StackIn16Bits(torch.zeros(experts, columns, outputs, dtype=HALF).mT),
        of.StackInFP8(bits, squares),
        of.StackInFP8.of_experts(bits, torch.zeros(experts)),
        of.StackInMXFP4(
            codes(experts, outputs, columns // 2), codes(experts, outputs, columns // 32)
        ),
    ]
    for block in (32, 64, 512):
        if columns % block == 0:
            absmax = torch.zeros(experts * outputs * columns // block)
            nested = absmax.to(torch.uint8), absmax[: -(-len(absmax) // 256)]
            for scales in (
                nf4.Scales(absmax),
                nf4.Scales(*nested, torch.zeros(256), torch.zeros(())),
            ):
                stacks.append(
                    of.StackIn4Bits.of_matrix(packed, scales, experts, outputs, block, "nf4")
                )
    for kind, (block, size) in GGUF_KINDS.items():
        blocks = codes(experts, outputs, -(-columns // block) * size)
        stacks.append(of.StackInGGUF(blocks, kind))
    return stacks


WAIT = "griddepcontrol.wait"
"""The instruction of a kernel that is launched early, with which it waits for the one before."""


def waits_first(ptx: str) -> bool:
    """Return whether a kernel that is launched early reads and writes nothing before it waits."""
    before, _, behind = ptx[ptx.index(".entry") :].partition(WAIT)
    touches = re.search(r"\b(ld\.global|cp\.async\.c|st\.global|atom|red\.)", before)
    return touches is None and WAIT not in behind


def main() -> None:
    stand_in()
    failed = False
    with ThreadPoolExecutor(2) as threads:
        kernels = compiling(threads)
        chosen = calls()
        if len(sys.argv) == 4:
            names = sys.argv[3].split(",")
            if unknown := [name for name in names if name not in chosen]:
                sys.exit(f"no call {', '.join(unknown)}; there are {', '.join(chosen)}")
            chosen = {name: chosen[name] for name in names}
        elif len(sys.argv) > 4:
            names = chance.Random(int(sys.argv[4])).sample(
                sorted(chosen), int(float(sys.argv[3]) * len(chosen))
            )
            chosen = {name: chosen[name] for name in names}
        for name, call in chosen.items():
            try:
                call()
            except Exception as error:
                failed = True
                print(json.dumps({"call": name, "error": f"{type(error).__name__}: {error}"[:500]}))
        for name, compiled in kernels.values():
            try:
                result = compiled.result() if hasattr(compiled, "result") else compiled
                line = {"kernel": name, "shared": result.metadata.shared}
                if WAIT in result.asm["ptx"]:
                    line["waits first"] = waits_first(result.asm["ptx"])
                print(json.dumps(line))
            except Exception as error:
                failed = True
                print(
                    json.dumps({"kernel": name, "error": f"{type(error).__name__}: {error}"[:500]})
                )
    sys.exit(failed)


if __name__ == "__main__":
    main()
