"""Test every kernel on this machine against its definition in fp64, with random inputs.

The error of a kernel is compared with that of the plain operation in the same dtype. It may be at
most ``_ALLOWED`` times as large, or two roundings of the dtype if that is larger.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from chronicals.attention import attention_reference, choose_backend, document_attention
from chronicals.kernels import (
    fused_adamw_,
    fused_add_rmsnorm,
    fused_geglu,
    fused_layernorm,
    fused_qk_norm_rope,
    fused_qk_rope,
    fused_rmsnorm,
    fused_softmax,
    fused_swiglu,
    linear_cross_entropy,
    linear_distillation,
    token_log_probability,
)
from chronicals.kernels.adamw import Tensors, fused_adamw_reference_, join_master, split_master
from chronicals.kernels.dropped_products import (
    add_dropped_product_,
    draw_seed,
    dropped_down,
    dropped_gradient_of_down,
    dropped_reference,
)
from chronicals.kernels.fp8 import lacks_fp8
from chronicals.kernels.fp8_linear import fp8_linear
from chronicals.kernels.glu import geglu_reference, glu_of_both, swiglu_reference
from chronicals.kernels.gradient_norm import gradient_norm, gradient_norm_reference
from chronicals.kernels.launch import runs_triton
from chronicals.kernels.layernorm import layernorm_reference
from chronicals.kernels.linear_cross_entropy import linear_cross_entropy_reference
from chronicals.kernels.linear_distillation import (
    Divergence,
    linear_distillation_reference,
)
from chronicals.kernels.linear_head import Adapter, LinearHead
from chronicals.kernels.qk_norm_rope import fused_qkv_norm_rope, qk_norm_rope_reference
from chronicals.kernels.qk_rope import fused_qkv_rope, qk_rope_reference
from chronicals.kernels.rmsnorm import add_rmsnorm_reference, rmsnorm_reference
from chronicals.kernels.softmax import softmax_reference
from chronicals.kernels.token_log_probability import token_log_probability_reference
from chronicals.lora.merged_linear import MergedWeights, merged_linear, merged_linear_reference
from chronicals.verification.quantised import rounded_linear

_ALLOWED = 1.5
_LENGTHS = (17, 1, 31)
DTYPE = torch.bfloat16
WIDTH = 64
VOCABULARY = 301
_HEADS = 4

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class SelfTest:
    """Result for one kernel: the largest relative Frobenius error of its result and gradients."""

    name: str
    runs_as: str
    error: float
    plain_error: float
    passed: bool


def self_test(only: Collection[str] | None = None) -> list[SelfTest]:
    """Compare the kernels that would run here with their definitions.

    Args:
        only: names of kernels, such as ``rmsnorm``, that are compared with an operation; by default
            everything is tested.

    Raises:
        ValueError: there is no kernel of such a name.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    drawn = _Drawn.of(device)
    kernels = "triton" if runs_triton(drawn.gate) else "torch"
    runs_as = {"attention": choose_backend(device, DTYPE, head_dim=16)}
    cases = [*_of_tokens(drawn), *_of_heads(drawn)]
    names = {name for name, *_ in cases}
    if only is not None and not set(only) <= names:
        raise ValueError(f"only={sorted(only)}: there are {', '.join(sorted(names))}")
    compared = [
        _compare(name, runs_as.get(name, kernels), ours, plain, inputs)
        for name, ours, plain, inputs in cases
        if only is None or name in only
    ]
    if only is not None:
        return compared
    if not lacks_fp8(device):
        compared.append(_compare_fp8_linear(drawn, kernels))
    return [
        *compared,
        _compare_dropped_products(drawn, kernels),
        _compare_gradient_norm(drawn, kernels),
        _compare_adamw(kernels, device),
    ]


Case = tuple[str, Function, Function, tuple[Tensor, ...]]
"""Name, our function, the plain function, and their inputs."""


@dataclass(frozen=True)
class _Drawn:
    """Random inputs of T tokens that several kernels share."""

    device: torch.device
    gate: Tensor
    up: Tensor
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    tables: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, device: torch.device) -> _Drawn:
        tokens = sum(_LENGTHS)
        targets = torch.randint(0, VOCABULARY, (tokens,), device=device)
        targets[::3] = -100
        angles = torch.rand(tokens, 8, device=device, dtype=torch.float64) * 6
        cos, sin = (torch.cat((table, table), -1) for table in (angles.cos(), angles.sin()))
        gate, up, hidden = (
            torch.randn(tokens, WIDTH, device=device, dtype=DTYPE) for _ in range(3)
        )
        weight = torch.randn(VOCABULARY, WIDTH, device=device, dtype=DTYPE) * 0.1
        return cls(device, gate, up, hidden, weight, targets, (cos, sin))

    def random(self, *shape: int) -> Tensor:
        """Return normally distributed numbers, bf16."""
        return torch.randn(*shape, device=self.device, dtype=DTYPE)


def _of_tokens(drawn: _Drawn) -> list[Case]:
    """Return the cases of norms, gates, losses of the head and the merged product."""
    gate = drawn.gate
    up = drawn.up
    targets = drawn.targets
    random = drawn.random
    inputs = (drawn.hidden, drawn.weight)
    teacher = LinearHead(random(len(targets), 2 * WIDTH), random(VOCABULARY, 2 * WIDTH) * 0.1)
    return [
        ("rmsnorm", fused_rmsnorm, rmsnorm_reference, (gate, random(WIDTH))),
        (
            "add_rmsnorm",
            _together(fused_add_rmsnorm),
            _together(add_rmsnorm_reference),
            (gate, up, random(WIDTH)),
        ),
        ("layernorm", fused_layernorm, layernorm_reference, (gate, random(WIDTH), random(WIDTH))),
        ("softmax", fused_softmax, softmax_reference, (gate,)),
        ("swiglu", fused_swiglu, swiglu_reference, (gate, up)),
        ("geglu", fused_geglu, geglu_reference, (gate, up)),
        (
            "glu_of_both",
            lambda x: glu_of_both(x, "silu"),
            lambda x: swiglu_reference(*x.chunk(2, -1)),
            (random(len(gate), 74),),
        ),
        (
            "linear_cross_entropy",
            lambda h, w: linear_cross_entropy(h, w, targets, chunk_size=16),
            lambda h, w: linear_cross_entropy_reference(h, w, targets),
            inputs,
        ),
        (
            "linear_distillation",
            lambda h, w: (
                linear_distillation(
                    LinearHead(h, w), teacher, targets, Divergence.jsd(), chunk_size=16
                ).loss
            ),
            lambda h, w: (
                linear_distillation_reference(
                    LinearHead(h, w),
                    LinearHead(teacher.hidden.to(h), teacher.weight.to(h)),
                    targets,
                    Divergence.jsd(),
                ).loss
            ),
            inputs,
        ),
        (
            "token_log_probability",
            _together(
                lambda h, w: token_log_probability(h, w, targets, chunk_size=16, entropy=True)
            ),
            _together(lambda h, w: token_log_probability_reference(h, w, targets)),
            inputs,
        ),
        (
            "merged_linear",
            lambda x, w, a, b: merged_linear(
                x, MergedWeights.fused([w], [None], [len(a)]), [Adapter(a, b, 0.5)]
            ),
            lambda x, w, a, b: merged_linear_reference(x, [w], [None], [Adapter(a, b, 0.5)]),
            (gate, random(WIDTH, WIDTH) * 0.1, random(8, WIDTH) * 0.1, random(WIDTH, 8)),
        ),
    ]


def _of_heads(drawn: _Drawn) -> list[Case]:
    """Return the cases of rotations and of attention."""
    tokens = len(drawn.gate)
    random = drawn.random

    def rope(function: Callable[..., tuple[Tensor, ...]]) -> Function:
        return _together(
            lambda *given: function(*given, *(table.to(given[0].dtype) for table in drawn.tables))
        )

    def merged(function: Callable[..., tuple[Tensor, ...]]) -> Function:
        return rope(lambda x, *given: function(x * 1, *given, (_HEADS, 2)))

    def in_parts(
        function: Callable[..., tuple[Tensor, Tensor]], x: Tensor, *given: Tensor
    ) -> tuple[Tensor, ...]:
        q, k, v = x.unflatten(1, (-1, 16)).split((_HEADS, 2, 2), 1)
        return *function(q, k, *given), v

    bounds = torch.tensor([0, *_LENGTHS]).cumsum(0).to(drawn.device, torch.int32)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        document = torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS)).to(
            drawn.device
        )
        seen = (document[:, None] == document[None]).tril()
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return attention_reference(q, k, v, seen, q.shape[-1] ** -0.5, None, None).transpose(0, 1)

    qk = (random(tokens, _HEADS, 16), random(tokens, 2, 16))
    norms = (random(16), random(16))
    qkv = random(tokens, 8 * 16)
    return [
        ("qk_rope", rope(fused_qk_rope), rope(qk_rope_reference), qk),
        ("qk_norm_rope", rope(fused_qk_norm_rope), rope(qk_norm_rope_reference), (*qk, *norms)),
        ("qkv_rope", merged(fused_qkv_rope), rope(partial(in_parts, qk_rope_reference)), (qkv,)),
        (
            "qkv_norm_rope",
            merged(fused_qkv_norm_rope),
            rope(partial(in_parts, qk_norm_rope_reference)),
            (qkv, *norms),
        ),
        (
            "attention",
            lambda q, k, v: document_attention(q, k, v, bounds, max(_LENGTHS)),
            attention,
            tuple(random(tokens, heads, 16) for heads in (_HEADS, 2, 2)),
        ),
    ]


def _together(function: Callable[..., tuple[Tensor, ...]]) -> Function:
    """Return a function whose result is all results of ``function`` as one flat tensor."""
    return lambda *given: torch.cat([x.flatten() for x in function(*given)])


def _compare(
    name: str,
    runs_as: str,
    ours: Function,
    plain: Function,
    inputs: tuple[Tensor, ...],
    definition: Function | None = None,
) -> SelfTest:
    """Compare result and gradients with ``definition`` in fp64; by default this is ``plain``."""
    exact_inputs = tuple(x.double() for x in inputs)
    definition = definition or plain
    upstream = torch.randn_like(definition(*exact_inputs))
    exact = _outputs(definition, exact_inputs, upstream)
    return _judged(
        name,
        runs_as,
        _outputs(ours, inputs, upstream),
        _outputs(plain, inputs, upstream),
        exact,
        inputs[0].dtype,
    )


def _judged(
    name: str,
    runs_as: str,
    ours: list[Tensor],
    plain: list[Tensor],
    exact: list[Tensor],
    dtype: torch.dtype,
) -> SelfTest:
    pairs = []
    for a, b, e in zip(ours, plain, exact, strict=True):
        error = float((a.double() - e).norm() / e.norm())
        plain_error = float((b.double() - e).norm() / e.norm())
        pairs.append((error, plain_error))
    rounding = 2 * torch.finfo(dtype).eps
    passed = all(error <= max(_ALLOWED * plain_error, rounding) for error, plain_error in pairs)
    error, plain_error = (max(errors) for errors in zip(*pairs))
    return SelfTest(name, runs_as, error, plain_error, passed)


def _compare_fp8_linear(drawn: _Drawn, runs_as: str) -> SelfTest:
    """Compare a product in FP8 with one of rounded operands; the definition rounds nothing."""
    inputs = drawn.gate, drawn.random(WIDTH, WIDTH) * 0.1
    definition = torch.nn.functional.linear
    return _compare("fp8_linear", runs_as, fp8_linear, rounded_linear, inputs, definition)


def _compare_dropped_products(drawn: _Drawn, runs_as: str) -> SelfTest:
    """Compare an adapter's three products under dropout with products of dropped-out tensors."""
    x = drawn.gate
    a = drawn.random(8, WIDTH)
    g = drawn.random(len(x), 8)
    seed = draw_seed(x)
    dropout = 0.1

    def by_products(x: Tensor, a: Tensor, g: Tensor) -> list[Tensor]:
        kept = dropped_reference(x, seed, dropout)
        return [kept @ a.t(), g.t() @ kept, x + dropped_reference(g @ a, seed, dropout)]

    u = x.new_empty(len(x), len(a))
    dropped_down(x, a, seed, dropout, u)
    ours = [
        u,
        dropped_gradient_of_down(g, x, seed, dropout),
        add_dropped_product_(x.clone(), g, a, seed, dropout),
    ]
    plain = by_products(x, a, g)
    exact = by_products(x.double(), a.double(), g.double())
    return _judged("dropped_products", runs_as, ours, plain, exact, x.dtype)


def _compare_gradient_norm(drawn: _Drawn, runs_as: str) -> SelfTest:
    """Compare the norm of tensors of several dtypes together."""
    tensors = [drawn.gate, drawn.up.float(), drawn.hidden.half()]
    norm = gradient_norm(tensors)
    plain = gradient_norm_reference(tensors)
    exact = torch.cat([x.double().flatten() for x in tensors]).norm()
    return _judged("gradient_norm", runs_as, [norm], [plain], [exact], torch.float32)


def _compare_adamw(runs_as: str, device: torch.device) -> SelfTest:
    """Compare the change of bf16 weights with a master after one update."""

    def change_of_weight(update: Callable[..., None], dtype: torch.dtype) -> Tensor:
        weight, mean, square = (x.to(dtype, copy=True) for x in start)
        tensors = Tensors(
            [weight], [gradient.to(dtype)], [mean], [square], [], [torch.ones((), device=device)]
        )
        if update is fused_adamw_:
            high, low = split_master(weight)
            tensors.weights = [high]
            tensors.lows = [low]
        update(tensors, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
        return (join_master(high, low) if tensors.lows else weight).double() - start[0].double()

    start = (
        torch.randn(1001, device=device),
        torch.randn(1001, device=device) * 0.1,
        torch.rand(1001, device=device),
    )
    gradient = torch.randn(1001, device=device)
    exact = change_of_weight(fused_adamw_reference_, torch.float64)
    error, plain_error = (
        float((change_of_weight(update, torch.float32) - exact).norm() / exact.norm())
        for update in (fused_adamw_, fused_adamw_reference_)
    )
    return SelfTest("adamw", runs_as, error, plain_error, error <= _ALLOWED * plain_error)


def _outputs(function: Function, inputs: tuple[Tensor, ...], upstream: Tensor) -> list[Tensor]:
    """Return the result of ``function`` and the gradients of all inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]
