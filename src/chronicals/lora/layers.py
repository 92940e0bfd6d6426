"""Adapted layers: the class that all share, and those over linear layers and embeddings.

``LoRALinear`` is a frozen linear layer with an adapter beside it.

    y = x Wᵀ + b + s · u Bᵀ,   u = dropout(x) Aᵀ
    g = s · dy B,   dx = dy W + g A,   dA = gᵀ x,   dB = s · dyᵀ u        (no dropout)

With DoRA (``magnitude.py``) the rows of ``W + s B A`` have lengths m: ``y = m / n ⊙ (x Wᵀ + s · u
Bᵀ) + b``.

Without dropout and DoRA, over a plain linear layer, the adapter's products add their results
themselves (``addmm``) in both passes, so no separate sum passes over y or dx. Saved are x, W, A, B
and u. Under ``torch.compile`` the plain formula runs, whose sums the compiler fuses.

``LoRAEmbedding`` is a frozen input embedding with an adapter beside it.

    y = (W + s · (B A)ᵀ)[ids] · e          W [V, D], A [r, V], B [D, r]; e: the scale of classes that have one (Gemma 3), else 1
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chronicals.kernels.launch import differentiable_once
from chronicals.kernels.linear_head import Adapter
from chronicals.kernels.products import product
from chronicals.lora.config import LoRAConfig
from chronicals.lora.magnitude import (
    SHORTEST,
    adapted_norms,
    crossed,
    has_plain_values,
    squared_norms_of,
    unbiased,
)
from chronicals.lora.stacked_experts import has_hooks
from chronicals.lora.tokens import TrainedTokens
from chronicals.models.linear import ADAPTER_READERS
from chronicals.models.routed_experts import is_of_head
from chronicals.quantization import is_linear, packed_weight


class AdapterLayer(nn.Module, ABC):
    """A frozen ``base_layer`` with a trained product ``s · B A`` beside one of its weights.

    A ``[r, in]`` and B ``[out, r]`` are fp32 whatever the base is.

    Attributes:
        MATRICES: names of A and B.
        scale: s.
        dropout: probability with which an element of the input of A is dropped in training.
        enabled: whether the adapter is on (``without_adapters``).
    """

    MATRICES = ("lora_A", "lora_B")

    def __init__(self, base_layer: nn.Module, config: LoRAConfig):
        super().__init__()
        self.base_layer = base_layer
        if not isinstance(base_layer, AdapterLayer):  # the matrices of another adapter stay trained
            base_layer.requires_grad_(False)
        self.scale = config.scale
        self.dropout = config.dropout
        self.enabled = True

    def _make_matrices(
        self, a_shape: tuple[int, int], b_shape: tuple[int, int], device: torch.device
    ) -> None:
        """Register A and B as parameters, uninitialised."""
        for name, shape in zip(self.MATRICES, (a_shape, b_shape), strict=True):
            self.register_parameter(
                name, nn.Parameter(torch.empty(shape, device=device, dtype=torch.float32))
            )

    @property
    def pair(self) -> tuple[nn.Parameter, nn.Parameter]:
        """A and B."""
        a, b = (self.get_parameter(name) for name in self.MATRICES)
        return a, b

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the parameters that are trained and saved."""
        return self.MATRICES

    def named_at(self, path: str) -> str:
        """Return the name of the adapted weight in patterns of ranks and in PEFT's configuration.

        Args:
            path: path of the layer.
        """
        return path

    @property
    def is_fresh(self) -> bool:
        """True if the layer computes the same as without its adapter, as one of A and B is zero.

        The host waits for the device.
        """
        return not all(bool(matrix.any()) for matrix in self.pair)

    @abstractmethod
    def merge(self) -> None:
        """Add ``s · B A`` to the base's weight, summed in at least fp32 and rounded once."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "base_layer" and type(value).__module__.startswith("peft."):
            raise ValueError(
                f"PEFT's {type(value).__name__} would go into an adapter of ours: call "
                "merge_and_unload() first"
            )
        super().__setattr__(name, value)


def exact(weight: Tensor) -> Tensor:
    """Return the weight in at least fp32."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


@torch.no_grad()
def draw_matrix(matrix: nn.Parameter, initialise: Callable[[Tensor], Any]) -> None:
    """Fill a matrix with random numbers.

    They are drawn on the host, so that a seed gives the same adapters on every device, and for a
    model that is still in host memory before it is sharded.

    Args:
        matrix: A or B.
        initialise: fills a tensor in place, such as ``nn.init.normal_``.
    """
    values = torch.empty_like(matrix, device="cpu")
    initialise(values)
    matrix.copy_(values)


def in_file(name: str) -> str:
    """Return the name of a trained parameter in PEFT's files, where A and B are layers."""
    return f"{name}.weight" if name in AdapterLayer.MATRICES else name


class LoRALinear(AdapterLayer):
    """A linear layer with an adapter: ``base(x) + s · B (A dropout(x))``.

    A starts uniform as a linear layer does and B at zero, so that the model is at first unchanged.

    Args:
        base_layer: a linear layer whose output is ``[..., out]``; it is frozen.
        config: rank, scale and dropout.
        in_features: number of inputs of the base layer.
        out_features: number of its outputs.

    Attributes:
        lora_magnitude_vector: m of DoRA, fp32 ``[out]``, or None; it starts at the norms of the
            rows of W.
        lora_start_A, lora_start_B: starting values of the adapter, if a part of the base's weight
            was moved into it (``starting_values``); else None. With its adapter off, such a layer
            computes the product of the original weight.
        held_norms: n of DoRA while no weight changes (``holding_norms``), else None.
    """

    held_norms: Tensor | None = None
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_magnitude_vector: Tensor | None
    lora_start_A: Tensor | None
    lora_start_B: Tensor | None

    def __init__(
        self, base_layer: nn.Module, config: LoRAConfig, in_features: int, out_features: int
    ):
        super().__init__(base_layer, config)
        self.in_features = in_features
        self.out_features = out_features
        device = next(base_layer.parameters()).device
        self._make_matrices((config.rank, in_features), (out_features, config.rank), device)
        start_matrices(self.lora_A, self.lora_B, config)
        self.register_buffer("lora_start_A", None)
        self.register_buffer("lora_start_B", None)
        self._squares: tuple[tuple, Tensor] | None = None
        self.lora_magnitude_vector = nn.Parameter(self.norms()) if config.use_dora else None

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the parameters that are trained and saved: A, B and m."""
        if self.lora_magnitude_vector is None:
            return self.MATRICES
        return (*self.MATRICES, "lora_magnitude_vector")

    @property
    def matrices(self) -> tuple[Tensor, Tensor] | None:
        """A and B that are added to the base now; None if the base computes alone."""
        if self.enabled:
            return self.lora_A, self.lora_B
        if self.lora_start_A is None or self.lora_start_B is None:
            return None
        return self.lora_start_A, self.lora_start_B

    @property
    def is_fresh(self) -> bool:
        """True if the layer computes the same as without its adapter; the host waits for it."""
        if self.lora_start_A is not None and self.lora_start_B is not None:
            same_a = torch.equal(self.lora_A, self.lora_start_A)
            same = same_a and torch.equal(self.lora_B, self.lora_start_B)
        else:
            same = super().is_fresh
        magnitude = self.lora_magnitude_vector
        return same and (magnitude is None or torch.allclose(magnitude, self.norms(), rtol=1e-5))

    @property
    def weight(self) -> Tensor:
        """The base's weight with the adapter added, in the base's shape and dtype.

        It is for a model that reads it instead of calling the layer, as Mamba does. Dropout does
        not apply then.

        Raises:
            AttributeError: the base's weight is quantised.
        """
        weight = cast(Tensor, self.base_layer.weight)
        if not weight.is_floating_point() or weight.element_size() == 1:
            raise AttributeError(
                f"the {weight.dtype} weight of {type(self.base_layer).__name__} has no adapter in it"
            )
        matrices = self.matrices
        if matrices is None:
            return weight
        return self.with_adapter(weight, *matrices).to(weight.dtype)

    def with_adapter(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return ``weight``, the base's in its layout, with A and B added; in at least fp32."""
        update = (b @ a) * self.scale
        upright = is_linear(self.base_layer)  # a Conv1D's weight is [in, out]
        total = exact(weight) + (update if upright else update.t()).to(weight.device)
        if self.lora_magnitude_vector is None:
            return total
        along = 1 if upright else 0
        norms = torch.linalg.vector_norm(total.detach(), dim=along).clamp_(min=SHORTEST)
        return total * (self.lora_magnitude_vector.to(weight.device) / norms).unsqueeze(along)

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapter to the base's weight; a packed base becomes a plain layer."""
        merged = partial(self.with_adapter, a=self.lora_A, b=self.lora_B)
        base: Any = self.base_layer
        if packed_weight(base) is None:
            base.weight.copy_(merged(base.weight))
        else:
            self.base_layer = base.plain(update=merged)

    @torch.no_grad()
    def norms(self) -> Tensor:
        """Return n of DoRA: the norms of the rows of ``W + s B A``, fp32 ``[out]``."""
        if self.held_norms is not None:
            return self.held_norms
        across = crossed(self.base_layer, self.lora_A)
        weight = cast(Tensor, self.base_layer.weight)
        # a compiled graph cannot test whether the weight has changed
        if torch.compiler.is_compiling() and (
            has_plain_values(weight) or packed_weight(self.base_layer) is not None
        ):
            squares = squared_norms_of(self.base_layer, self.in_features)
        else:
            # ‖W‖² of the rows, cached until the weight is moved or changed
            key = weight.data_ptr(), weight._version, weight.dtype, weight.device
            if self._squares is None or self._squares[0] != key:
                self._squares = key, squared_norms_of(self.base_layer, self.in_features)
            squares = self._squares[1]
        return adapted_norms(squares, across, self.lora_A, self.lora_B * self.scale)

    @property
    def bias(self) -> Tensor | None:
        """The base's bias, or None."""
        return cast(Tensor | None, self.base_layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for x ``[..., in]``, with the adapter if it is on."""
        matrices = self.matrices
        if matrices is None:
            y: Tensor = self.base_layer(x)
            return y

        a, b = matrices
        dropout = self.dropout if self.training and self.enabled else 0.0
        magnitude = self.lora_magnitude_vector
        in_one = magnitude is None and not dropout and not torch.compiler.is_compiling()
        if in_one and _is_plain(self.base_layer, x):
            assert isinstance(self.base_layer, nn.Linear)
            weight = self.base_layer.weight
            bias = self.base_layer.bias
            rows = x.reshape(-1, x.shape[-1])
            y = _WithAdapter.apply(rows, weight, bias, a, b, self.scale)
            return y.view(*x.shape[:-1], len(weight))

        if magnitude is None:
            base = self.base_layer(x)
        elif _is_plain(self.base_layer, x):
            base = F.linear(x, cast(Tensor, self.base_layer.weight))
        else:
            base = unbiased(self.base_layer, x)

        down = F.linear(F.dropout(x, dropout), a.to(x.dtype))
        added = F.linear(down, b.to(x.dtype))
        y = base + added.to(base.dtype) * self.scale
        if magnitude is None:
            return y

        # The factors of rows stay in fp32: in 16 bits they would change in steps of 0.8 %.
        y = y * (magnitude / self.norms())
        return (y if self.bias is None else y + self.bias).to(base.dtype)


def _read_adapter(layer: LoRALinear) -> tuple[Adapter, bool]:
    """Return the adapter of the layer, and whether the layer adds it now."""
    matrices = layer.matrices
    a, b = matrices or (layer.lora_A, layer.lora_B)
    dropout = layer.dropout if layer.training and layer.enabled else 0.0
    adapter = Adapter(a, b, layer.scale, dropout, layer.lora_magnitude_vector)
    return adapter, matrices is not None


ADAPTER_READERS[LoRALinear] = _read_adapter


def start_matrices(a: nn.Parameter, b: nn.Parameter, config: LoRAConfig) -> None:
    """Initialise A, uniform like the weight of a linear layer or normal, and B, zero."""
    if config.init == "gaussian":
        draw_matrix(a, partial(nn.init.normal_, std=1 / config.rank))
    else:
        draw_matrix(a, partial(nn.init.kaiming_uniform_, a=math.sqrt(5)))
    nn.init.zeros_(b)


class LoRAEmbedding(AdapterLayer):
    """An input embedding with an adapter.

    A starts at zero and B normal, as PEFT starts them: the model is at first unchanged. There is no
    dropout, since the inputs are ids.

    Args:
        base_layer: an embedding for which ``is_embedding`` is true; it is frozen.
        config: rank and scale.
    """

    MATRICES = ("lora_embedding_A", "lora_embedding_B")
    lora_embedding_A: nn.Parameter
    lora_embedding_B: nn.Parameter

    def __init__(self, base_layer: nn.Embedding, config: LoRAConfig):
        super().__init__(base_layer, config)
        rows, width = base_layer.weight.shape
        self._make_matrices((config.rank, rows), (width, config.rank), base_layer.weight.device)
        nn.init.zeros_(self.lora_embedding_A)
        draw_matrix(self.lora_embedding_B, nn.init.normal_)

    @property
    def weight(self) -> Any:
        """The base's weight without the adapter, since a head that is tied to it has none."""
        return self.base_layer.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings of ``ids``, with the adapter if it is on."""
        y: Tensor = self.base_layer(ids)
        if not self.enabled:
            return y
        base: Any = self.base_layer
        a, b = self.pair
        rows = F.embedding(ids, a.t(), base.padding_idx, scale_grad_by_freq=base.scale_grad_by_freq)
        added = F.linear(rows.to(y.dtype), b.to(y.dtype)) * self.scale
        factor = getattr(base, "embed_scale", None)
        if factor is not None:
            added = added * torch.as_tensor(factor).to(added.device, base.weight.dtype)
        return y + added.to(y.dtype)

    @torch.no_grad()
    def merge(self) -> None:
        """Add ``s · (B A)ᵀ`` to the base's weight."""
        a, b = self.pair
        weight: Tensor = self.weight
        weight.copy_(exact(weight) + (self.scale * (b @ a)).t().to(weight.device))


def is_embedding(layer: Any) -> bool:
    """Return whether the layer computes ``W[ids]``, or that times its ``embed_scale``.

    A class with another forward than ``nn.Embedding`` is tried with a small copy.
    """
    if not isinstance(layer, nn.Embedding) or layer.max_norm is not None or layer.sparse:
        return False
    if type(layer).forward is nn.Embedding.forward:
        return "embed_scale" not in vars(layer) and "embed_scale" not in layer._buffers
    ids = torch.tensor([[4, 1, 1], [0, 3, 2]])
    with torch.random.fork_rng(devices=[]):
        small = nn.Embedding(5, 3, device="cpu", dtype=torch.float32)
    expected = small(ids)
    small.__dict__ = {
        name: value for name, value in vars(layer).items() if name != "forward"
    } | vars(small)
    small.__class__ = type(layer)
    try:
        small._buffers = {
            name: buffer.float().cpu()
            for name, buffer in layer._buffers.items()
            if buffer is not None
        }
        got = small(ids)
        factor = torch.as_tensor(getattr(layer, "embed_scale", 1.0)).float().cpu()
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return False
    return (
        factor.numel() == 1
        and got.shape == expected.shape
        and torch.allclose(got, expected * factor, rtol=1e-4)
    )


def adapters(model: nn.Module) -> Iterator[tuple[str, AdapterLayer]]:
    """Return paths and modules of the adapted layers, linear or not.

    Of several around one layer the outermost comes first.
    """
    return (
        (name, module) for name, module in model.named_modules() if isinstance(module, AdapterLayer)
    )


def linear_adapters(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """Return paths and modules of the adapted linear layers."""
    return ((name, module) for name, module in adapters(model) if isinstance(module, LoRALinear))


def has_magnitudes(model: nn.Module) -> bool:
    """Return whether the model's adapters are DoRA."""
    return any(layer.lora_magnitude_vector is not None for _, layer in linear_adapters(model))


def adapters_are_fresh(model: nn.Module) -> bool:
    """Return whether the model computes the same with and without its adapters.

    The result is False if there are no adapters of ours, or if other parameters are trained, except
    those of heads that predict experts. The host waits for the device.
    """
    layers = [layer for _, layer in adapters(model)]
    if not layers:
        return False
    adapter_ids = set()
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if name.startswith("lora_"):
                adapter_ids.add(id(parameter))
    for name, parameter in model.named_parameters():
        is_other = id(parameter) not in adapter_ids and not is_of_head(name)
        if parameter.requires_grad and is_other:
            return False
    return all(layer.is_fresh for layer in layers)


def why_base_is_gone(model: nn.Module) -> str | None:
    """Return why the model without its adapters is not the base that they were trained over.

    The result is None if it is.
    """
    named = getattr(getattr(model, "chronicals_lora", None), "modules_to_save", None) or ()
    whole = [name for name in named if not is_of_head(name)]
    return f"{', '.join(whole)} is trained whole (modules_to_save)" if whole else None


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Turn adapters and trained rows of tokens off for the length of a block.

    The model is then the base, as for a reference policy. No storage moves. If layers are
    recomputed in the backward pass, that must run within the block, too.

    Raises:
        ValueError: embedding or head are trained whole (``modules_to_save``), so that the base is
            no longer there.
    """
    reason = why_base_is_gone(model)
    if reason:
        raise ValueError(f"without_adapters: {reason}; load the base beside it")
    candidates: list[Any] = [
        *(layer for _, layer in adapters(model)),
        *(m for m in model.modules() if isinstance(m, TrainedTokens)),
    ]
    layers = [layer for layer in candidates if layer.enabled]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


@contextmanager
def holding_norms(model: nn.Module) -> Iterator[None]:
    """Context manager in which the norms of DoRA are computed once, for generation.

    In each step of an answer W Aᵀ would take longer than the layer's own product. Nothing may
    change weights or adapters meanwhile.
    """
    layers = [
        layer for _, layer in linear_adapters(model) if layer.lora_magnitude_vector is not None
    ]
    held = list[LoRALinear]()
    try:
        for layer in layers:
            layer.held_norms = layer.norms()
            held.append(layer)
        yield
    finally:
        for layer in held:
            del layer.held_norms


def _is_plain(layer: nn.Module, x: Tensor) -> bool:
    """Return whether ``layer`` is frozen and linear, without hooks, another forward or autocast."""
    if (
        type(layer) is not nn.Linear
        or type(layer.weight) not in (nn.Parameter, Tensor)
        or "forward" in vars(layer)
    ):
        return False

    trained = any(p.requires_grad for p in layer.parameters())
    return (
        not has_hooks(layer)
        and not trained
        and layer.weight.dtype == x.dtype
        and not torch.is_autocast_enabled(x.device.type)
    )


class _WithAdapter(torch.autograd.Function):
    """The product of a frozen linear layer with its adapter, for rows ``[T, in]``.

    Inputs of other shapes are viewed as rows outside: callers may write into an output only if it
    is no view that was made within an autograd Function. Weight and bias get no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
    ) -> Tensor:
        kind = rows.dtype
        down = rows @ a.t().to(kind)
        y = F.linear(rows, weight, bias)
        y.addmm_(down, b.t().to(kind), alpha=scale)
        ctx.save_for_backward(rows, weight, a, b, down)
        ctx.scale = scale
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, weight, a, b, down = ctx.saved_tensors
        kind = rows.dtype
        g = (dy @ b.to(kind)) * ctx.scale
        dx = (dy @ weight).addmm_(g, a.to(kind)) if ctx.needs_input_grad[0] else None
        da = product(g.t(), rows, a.dtype) if ctx.needs_input_grad[3] else None
        db = product(dy.t(), down, b.dtype, ctx.scale) if ctx.needs_input_grad[4] else None
        return dx, None, None, da, db, None
