"""Every kernel against its definition in fp64, on this machine, with fresh random inputs.

The error of a kernel is compared with that of the plain operation in the same dtype: it may be at most ``ALLOWED`` times as
large, or two roundings of the dtype if that is larger.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

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
from chronicals.kernels.adamw import Tensors, fused_adamw_reference_
from chronicals.kernels.adapter import Adapter
from chronicals.kernels.dropped_products import (
    add_dropped_product_,
    draw_seed,
    dropped_down,
    dropped_gradient_of_down,
    dropped_reference,
)
from chronicals.kernels.fp8 import lacks_fp8
from chronicals.kernels.fp8_linear import fp8_linear, fp8_linear_reference
from chronicals.kernels.glu import geglu_reference, glu_of_both, swiglu_reference
from chronicals.kernels.gradient_norm import gradient_norm, gradient_norm_reference
from chronicals.kernels.launch import runs_triton
from chronicals.kernels.layernorm import layernorm_reference
from chronicals.kernels.linear_cross_entropy import linear_cross_entropy_reference
from chronicals.kernels.linear_distillation import Divergence, LinearHead, linear_distillation_reference
from chronicals.kernels.master import join_master, split_master
from chronicals.kernels.qk_norm_rope import fused_qkv_norm_rope, qk_norm_rope_reference
from chronicals.kernels.qk_rope import fused_qkv_rope, qk_rope_reference
from chronicals.kernels.rmsnorm import add_rmsnorm_reference, rmsnorm_reference
from chronicals.kernels.softmax import softmax_reference
from chronicals.kernels.token_log_probability import token_log_probability_reference
from chronicals.lora.merged_linear import Merged, merged_linear, merged_linear_reference
from chronicals.verification.eight_bits import rounded_linear

ALLOWED = 1.5
LENGTHS = (17, 1, 31)

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class SelfTest:
    """Largest relative Frobenius error against fp64 among the result and the gradients."""

    name: str
    runs_as: str
    error: float
    plain_error: float
    passed: bool

    def to_dict(self) -> dict:
        return asdict(self)


def self_test() -> list[SelfTest]:
    """Test everything that would run here."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16
    tokens, width, vocabulary, heads = sum(LENGTHS), 64, 301, 4

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    targets = torch.randint(0, vocabulary, (tokens,), device=device)
    targets[::3] = -100
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(device, torch.int32)
    angles = torch.rand(tokens, 8, device=device, dtype=torch.float64) * 6
    cos, sin = (torch.cat((table, table), -1) for table in (angles.cos(), angles.sin()))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return document_attention(q, k, v, bounds, max(LENGTHS))

    def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(device)
        seen = (document[:, None] == document[None]).tril()
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return attention_reference(q, k, v, seen, q.shape[-1] ** -0.5, None, None).transpose(0, 1)

    def together(function: Callable[..., tuple[Tensor, ...]]) -> Function:
        return lambda *given: torch.cat([x.flatten() for x in function(*given)])

    def rope(function: Callable[..., tuple[Tensor, ...]]) -> Function:
        return together(lambda *given: function(*given, *(table.to(given[0].dtype) for table in (cos, sin))))

    def merged(function: Callable[..., tuple[Tensor, ...]]) -> Function:
        return rope(lambda x, *given: function(x * 1, *given, (heads, 2)))

    def in_parts(function: Callable[..., tuple[Tensor, Tensor]]) -> Function:
        def run(x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
            q, k, v = x.unflatten(1, (-1, 16)).split((heads, 2, 2), 1)
            return *function(q, k, *given), v

        return rope(run)

    qkv = random(tokens, heads, 16), random(tokens, 2, 16), random(tokens, 2, 16)
    gate, up = random(tokens, width), random(tokens, width)
    hidden, weight = random(tokens, width), random(vocabulary, width) * 0.1
    teacher = LinearHead(random(tokens, 2 * width), random(vocabulary, 2 * width) * 0.1)
    cases: list[tuple[str, Function, Function, tuple[Tensor, ...]]] = [
        ("rmsnorm", fused_rmsnorm, rmsnorm_reference, (gate, random(width))),
        ("add_rmsnorm", together(fused_add_rmsnorm), together(add_rmsnorm_reference), (gate, up, random(width))),
        ("layernorm", fused_layernorm, layernorm_reference, (gate, random(width), random(width))),
        ("softmax", fused_softmax, softmax_reference, (gate,)),
        ("swiglu", fused_swiglu, swiglu_reference, (gate, up)),
        ("geglu", fused_geglu, geglu_reference, (gate, up)),
        ("qk_rope", rope(fused_qk_rope), rope(qk_rope_reference), qkv[:2]),
        ("qk_norm_rope", rope(fused_qk_norm_rope), rope(qk_norm_rope_reference), (*qkv[:2], random(16), random(16))),
        (
            "linear_cross_entropy",
            lambda h, w: linear_cross_entropy(h, w, targets, chunk_size=16),
            lambda h, w: linear_cross_entropy_reference(h, w, targets),
            (hidden, weight),
        ),
        (
            "linear_distillation",
            lambda h, w: linear_distillation(LinearHead(h, w), teacher, targets, Divergence.jsd(), chunk_size=16).loss,
            lambda h, w: linear_distillation_reference(
                LinearHead(h, w), LinearHead(teacher.hidden.to(h), teacher.weight.to(h)), targets, Divergence.jsd()
            ).loss,
            (hidden, weight),
        ),
        (
            "token_log_probability",
            together(lambda h, w: token_log_probability(h, w, targets, chunk_size=16, entropy=True)),
            together(lambda h, w: token_log_probability_reference(h, w, targets)),
            (hidden, weight),
        ),
        ("glu_of_both", lambda x: glu_of_both(x, "silu"), lambda x: swiglu_reference(*x.chunk(2, -1)), (random(tokens, 74),)),
        ("qkv_rope", merged(fused_qkv_rope), in_parts(qk_rope_reference), (random(tokens, 8 * 16),)),
        (
            "qkv_norm_rope",
            merged(fused_qkv_norm_rope),
            in_parts(qk_norm_rope_reference),
            (random(tokens, 8 * 16), random(16), random(16)),
        ),
        (
            "merged_linear",
            lambda x, w, a, b: merged_linear(x, Merged.fused([w], [None], [len(a)]), [Adapter(a, b, 0.5)]),
            lambda x, w, a, b: merged_linear_reference(x, [w], [None], [Adapter(a, b, 0.5)]),
            (gate, random(width, width) * 0.1, random(8, width) * 0.1, random(width, 8)),
        ),
        ("attention", attention, plain_attention, qkv),
    ]
    kernels = "triton" if runs_triton(gate) else "torch"
    runs_as = {"attention": choose_backend(device, dtype, head_dim=16)}
    compared = [_compare(name, runs_as.get(name, kernels), ours, plain, inputs) for name, ours, plain, inputs in cases]
    if not lacks_fp8(device):
        inputs = gate, random(width, width) * 0.1
        compared.append(_compare("fp8_linear", kernels, fp8_linear, rounded_linear, inputs, fp8_linear_reference))
    dropped = _compare_dropped(kernels, gate, random(8, width), random(tokens, 8))
    norms = [gate, up.float(), hidden.half()]
    norm, plain_norm, exact_norm = (
        function([x.to(dtype or x.dtype) for x in norms])
        for function, dtype in ((gradient_norm, None), (gradient_norm_reference, None), (_norm, torch.float64))
    )
    return [
        *compared, dropped, _judged("gradient_norm", kernels, [norm], [plain_norm], [exact_norm], torch.float32),
        _compare_adamw(kernels, device),
    ]  # fmt: skip


def _compare(
    name: str, runs_as: str, ours: Function, plain: Function, inputs: tuple[Tensor, ...], definition: Function | None = None
) -> SelfTest:
    """Compare result and gradients with ``definition`` in fp64, which is ``plain`` by default."""
    exact_inputs, definition = tuple(x.double() for x in inputs), definition or plain
    upstream = torch.randn_like(definition(*exact_inputs))
    exact = _outputs(definition, exact_inputs, upstream)
    return _judged(
        name, runs_as, _outputs(ours, inputs, upstream), _outputs(plain, inputs, upstream), exact, inputs[0].dtype
    )  # fmt: skip


def _judged(
    name: str, runs_as: str, ours: list[Tensor], plain: list[Tensor], exact: list[Tensor], dtype: torch.dtype
) -> SelfTest:
    pairs = [
        tuple(float((got.double() - e).norm() / e.norm()) for got in (a, b)) for a, b, e in zip(ours, plain, exact, strict=True)
    ]
    rounding = 2 * torch.finfo(dtype).eps
    passed = all(error <= max(ALLOWED * plain_error, rounding) for error, plain_error in pairs)
    error, plain_error = (max(errors) for errors in zip(*pairs))
    return SelfTest(name, runs_as, error, plain_error, passed)


def _norm(tensors: list[Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in tensors]).norm()


def _compare_dropped(runs_as: str, x: Tensor, a: Tensor, g: Tensor, dropout: float = 0.1) -> SelfTest:
    """The three products of an adapter under dropout, compared with products of the reference's dropped-out tensors."""
    seed = draw_seed(x)

    def by_products(x: Tensor, a: Tensor, g: Tensor) -> list[Tensor]:
        kept = dropped_reference(x, seed, dropout)
        return [kept @ a.t(), g.t() @ kept, x + dropped_reference(g @ a, seed, dropout)]

    u = x.new_empty(len(x), len(a))
    dropped_down(x, a, seed, dropout, u)
    ours = [u, dropped_gradient_of_down(g, x, seed, dropout), add_dropped_product_(x.clone(), g, a, seed, dropout)]
    exact = by_products(x.double(), a.double(), g.double())
    return _judged("dropped_products", runs_as, ours, by_products(x, a, g), exact, x.dtype)


def _compare_adamw(runs_as: str, device: torch.device) -> SelfTest:
    """Compare the change of bf16 weights with a master by one update."""

    def change_of_weight(update: Callable[..., None], dtype: torch.dtype) -> Tensor:
        weight, mean, square = (x.to(dtype, copy=True) for x in start)
        tensors = Tensors([weight], [gradient.to(dtype)], [mean], [square], [], [torch.ones((), device=device)])
        if update is fused_adamw_:
            high, low = split_master(weight)
            tensors.weights, tensors.lows = [high], [low]
        update(tensors, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
        return (join_master(high, low) if tensors.lows else weight).double() - start[0].double()

    start = torch.randn(1001, device=device), torch.randn(1001, device=device) * 0.1, torch.rand(1001, device=device)
    gradient = torch.randn(1001, device=device)
    exact = change_of_weight(fused_adamw_reference_, torch.float64)
    error, plain_error = (
        float((change_of_weight(update, torch.float32) - exact).norm() / exact.norm())
        for update in (fused_adamw_, fused_adamw_reference_)
    )
    return SelfTest("adamw", runs_as, error, plain_error, error <= ALLOWED * plain_error)


def _outputs(function: Function, inputs: tuple[Tensor, ...], upstream: Tensor) -> list[Tensor]:
    """The result and the gradients of all inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]
