"""Products, FLOPs and bytes of a training step of a decoder, from its sizes.

Legend: L layers, D width, q and kv the widths of all query and of all key heads, F inner width of
the MLP, V vocabulary, P adapter parameters, f ratio of labelled tokens, T real tokens of a step, s̄
= Σs²/Σs over the lengths s of documents. Of a mixture: E experts of inner width F, k of them for a
token.

    Nb = L·(D(q + 2kv) + qD + 3DF)        Nh = D·V        a = 2·L·q·(s̄ + 1)
    of a mixture, what a token meets:     Nb = L·(D(q + 2kv) + qD + DE + k·3DF)
    FLOPs a token, full:  6·Nb + 6·Nh·f + 3a
    FLOPs a token, LoRA:  4·Nb − 2·D(q + 2kv) + 6·P + 4·Nh·f + 3a
    bytes a step to dequantise weights held in 4 bits:  (2·N4 − D(q + 2kv)) · (read + written for a
                                          value) N4 = Nb, of a mixture L·(D(q + 2kv) + qD + E·3DF)
    elementwise bytes a token:  L · 2·(16D + 4(q + kv) + 8F + 7q)      loss bytes a token:  4·V·f
    of a mixture:               L · 2·(16D + 4(q + kv) + k·(9F + 2D) + 7q)

Recomputation and padding do not count. The products of experts are one product over the k·T rows of
all experts, without a cost of routing. The benchmark's reference step (``benchmark.floor``) and the
planned time of a step (``policies.step_time``) are made of these.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from chronicals.model_shape import ModelShape

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MERGED_PROJECTIONS = {
    "qkv": PROJECTIONS[:3],
    "out": PROJECTIONS[3:4],
    "gate_up": PROJECTIONS[4:6],
    "down": PROJECTIONS[6:],
}
"""Projections that share an input, and are one product."""

UNCOUNTED_FIELDS = (
    "kv_lora_rank",
    "n_shared_experts",
    "shared_expert_intermediate_size",
    "first_k_dense_replace",
    "mlp_only_layers",
)
"""Fields of configurations of mixtures that have latent attention, experts for every token, or
layers without experts.
"""


@dataclass(frozen=True)
class DecoderShape(ModelShape):
    """A decoder of norm, attention and gated MLP; symbols as in the module's legend.

    Attributes:
        parameters: of the whole model.
        chosen: k, experts of a token.
        unlike: True if it has layers, or parts beside its experts, that are not counted here.
        routed: True if its MLPs are experts.
        q: width of all query heads.
        kv: width of all key heads, and of all value heads.
        attention_weights: weights of a layer's attention.
        mlp: weights of an MLP, or of an expert.
        each: MLPs of a layer that a token passes through.
        body: Nb, the weights of the layers that a token is multiplied with.
        head: Nh, the weights of the head.
    """

    parameters: int = 0
    chosen: int = 0
    unlike: bool = False
    routed: bool = field(init=False)
    q: int = field(init=False)
    kv: int = field(init=False)
    attention_weights: int = field(init=False)
    mlp: int = field(init=False)
    each: int = field(init=False)
    body: int = field(init=False)
    head: int = field(init=False)

    def __post_init__(self) -> None:
        routed = self.experts > 0
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        attention_weights = self.width * (q + 2 * kv) + q * self.width
        mlp = 3 * self.width * self.inner
        each = self.chosen if routed else 1
        router = self.width * self.experts
        derived = {
            "routed": routed,
            "q": q,
            "kv": kv,
            "attention_weights": attention_weights,
            "mlp": mlp,
            "each": each,
            "body": self.layers * (attention_weights + router + each * mlp),
            "head": self.width * self.vocabulary,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, config: Any) -> DecoderShape:
        """Return the shape of a transformers configuration.

        It is taken as a decoder with gated MLPs or experts in every layer. Small parameters (norms,
        biases) are not counted.
        """
        text = config.get_text_config()
        shape = cls(**asdict(ModelShape.of(config)))
        if shape.routed:
            inner = getattr(text, "moe_intermediate_size", None) or shape.inner
            chosen = getattr(text, "num_experts_per_tok", None) or 0
            shape = replace(
                shape,
                inner=inner,
                chosen=chosen,
                unlike=any(getattr(text, name, None) for name in UNCOUNTED_FIELDS),
            )
        tables = 1 if text.tie_word_embeddings else 2
        body = shape.layers * (
            shape.attention_weights
            + shape.width * shape.experts  # the router
            + max(1, shape.experts) * shape.mlp
        )
        return replace(shape, parameters=body + tables * shape.head)


@dataclass(frozen=True)
class Job:
    """A training step of a shape.

    Attributes:
        tokens: T, real tokens of the step.
        mean_length: s̄, the length of a token's document, in the mean over tokens.
        rank: of the adapters; 0 trains all weights.
        adapted: names of the projections that have one.
        labelled: f.
        optimizer_bytes: bytes that the optimizer reads and writes for each trained parameter.
        dequantised_bytes: bytes read and written to dequantise a value of the layers' weights,
            before a product of the forward pass and before one of the backward pass; 0 for dense
            weights.
        uneven: True if adapters differ between layers, or have row norms (DoRA).
        pairs: True for pairs of answers, which share prompts and may have a reference policy.
        has_teacher: True if a student learns from a teacher.
        adapted_linear: names of ``adapted`` that are linear layers.
        adapter_parameters: P, parameters of adapters on these projections of every layer.
        trained_parameters: those of the adapters, or of the whole model.
    """

    shape: DecoderShape
    tokens: int
    mean_length: float
    rank: int = 0
    adapted: tuple[str, ...] = PROJECTIONS
    labelled: float = 1.0
    optimizer_bytes: float = 26
    dequantised_bytes: float = 0.0
    uneven: bool = False
    pairs: bool = False
    has_teacher: bool = False
    adapted_linear: tuple[str, ...] = field(init=False)
    adapter_parameters: int = field(init=False)
    trained_parameters: int = field(init=False)

    @property
    def why_uncounted(self) -> str:
        """Reason why not all of its FLOPs are counted; empty if they are."""
        if self.shape.routed and (not self.shape.chosen or self.shape.unlike):
            return (
                "beside its experts this model has parts (latent attention, shared experts, dense "
                "layers) that are not counted here"
            )
        if self.pairs:
            return (
                "prompts that answers share, and a reference policy, are not counted here; tokens "
                "are those of prompt and answer of both sides, in every arm"
            )
        if self.has_teacher:
            return "the products of a teacher are not counted here"
        if self.uneven:
            return (
                "adapters differ between layers or have lengths, and their products are not counted"
            )
        return ""

    def __post_init__(self) -> None:
        shape = self.shape
        adapted = self.adapted
        if shape.routed:  # experts are no linear layers
            experts = MERGED_PROJECTIONS["gate_up"] + MERGED_PROJECTIONS["down"]
            adapted = tuple(name for name in adapted if name not in experts)
        inputs_and_outputs = {
            "q_proj": shape.width + shape.q,
            "k_proj": shape.width + shape.kv,
            "v_proj": shape.width + shape.kv,
            "o_proj": shape.q + shape.width,
            "gate_proj": shape.width + shape.inner,
            "up_proj": shape.width + shape.inner,
            "down_proj": shape.inner + shape.width,
        }
        a_layer = self.rank * sum(inputs_and_outputs[name] for name in adapted)
        in_all = shape.layers * a_layer
        object.__setattr__(self, "adapted_linear", adapted)
        object.__setattr__(self, "adapter_parameters", in_all)
        object.__setattr__(self, "trained_parameters", in_all if self.rank else shape.parameters)


def optimizer_bytes(
    precision: str, states: str, adapters: bool, master: bool = True, full: float = 0.0
) -> float:
    """Return the bytes that AdamW reads and writes for a parameter.

    It reads the gradient, and reads and writes the weight and two states.

    Args:
        precision: ``bf16`` (weights in two 16-bit halves of an exact fp32 value), ``fp16`` or
            ``fp32`` (fp32 weights).
        states: of the optimizer, ``fp32``, ``bf16`` or ``8bit``, each a byte and 1/256 of an fp32
            scale.
        adapters: True if adapters are trained, which are fp32 under every precision.
        master: True if ``bf16`` weights have an fp32 master, of which they are the upper half.
        full: share of the parameters whose states are in fp32 beside ``8bit`` ones.
    """
    gradient = 4
    weight = 4
    if precision == "bf16" and not adapters:
        gradient = 2
        weight = 4 if master else 2
    state = {"fp32": 4, "bf16": 2, "8bit": full * 4 + (1 - full) * (1 + 4 / 256)}[states]
    return gradient + 2 * weight + 2 * 2 * state


def attention_flops(job: Job) -> float:
    """Return a, the FLOPs of attention in the forward pass of a token.

    These are two products with the keys and values it sees on average.
    """
    return 2 * job.shape.layers * job.shape.q * (job.mean_length + 1)


def needed_flops(job: Job) -> float:
    """Return the FLOPs that training on a token needs."""
    shape = job.shape
    attention = 3 * attention_flops(job)  # twice as many backward as forward
    if not job.rank:
        # For each weight two FLOPs forward, two for the input's gradient, two for its own.
        return 6 * shape.body + 6 * shape.head * job.labelled + attention
    # Frozen weights have no gradient, and nobody needs that of the first layer's input.
    first_layer = 2 * shape.width * (shape.q + 2 * shape.kv)
    return (
        4 * shape.body
        - first_layer
        + 6 * job.adapter_parameters
        + 4 * shape.head * job.labelled
        + attention
    )


def elementwise_bytes(shape: DecoderShape) -> int:
    """Return the bytes of elementwise operations for a token in all layers.

    They are those of both passes, in bf16 and perfectly fused.
    """
    mlp = 8 * shape.inner
    if shape.routed:
        mlp = shape.chosen * (9 * shape.inner + 2 * shape.width)
    return shape.layers * 2 * (16 * shape.width + 4 * (shape.q + shape.kv) + mlp + 7 * shape.q)


def dequantised_bytes(job: Job) -> float:
    """Return the bytes of a step to dequantise its layers' weights.

    All are dequantised forward, and all but the first layer's queries, keys and values backward.
    """
    shape = job.shape
    # N4 has the weights of all experts, whichever a token meets, and no routers.
    packed = shape.layers * (shape.attention_weights + max(1, shape.experts) * shape.mlp)
    first = shape.width * (shape.q + 2 * shape.kv)
    return job.dequantised_bytes * (2 * packed - first)


def loss_bytes(job: Job) -> float:
    """Return the bytes of the loss for a token.

    Chunks of bf16 logits are written once and read once.
    """
    return 4 * job.shape.vocabulary * job.labelled


@dataclass(frozen=True)
class Product:
    """A matrix product of the step.

    ``forward`` is x[rows, inputs] · W[outputs, inputs]ᵀ, ``dX`` is dY · W, ``dW`` is dYᵀ · x; all
    three are ``2 · rows · inputs · outputs`` FLOPs.
    """

    name: str
    kind: Literal["forward", "dX", "dW"]
    rows: int
    inputs: int
    outputs: int
    count: int

    @property
    def flops(self) -> int:
        """FLOPs of one of the ``count`` products."""
        return 2 * self.rows * self.inputs * self.outputs

    @property
    def key(self) -> str:
        """Name of all products of this kind and shape, which take the same time."""
        return f"{self.kind} {self.rows}x{self.inputs}x{self.outputs}"


def products(job: Job) -> list[Product]:
    """Return the step's products.

    Those of QKV and of gate and up are merged, and adapters are inside the base's products.

    The columns of u = x A stand beside x, those of their gradient beside dY, so the base's products
    grow by R, the sum of the ranks. Four products with one dimension R remain. Two of them read dY,
    which can be read once for both: one is counted.
    """
    s = job.shape
    T = job.tokens
    layer = {
        "qkv": (T, s.width, s.q + 2 * s.kv),
        "out": (T, s.q, s.width),
        "gate_up": (T * s.each, s.width, 2 * s.inner),
        "down": (T * s.each, s.inner, s.width),
    }
    if s.routed:
        layer["router"] = (T, s.width, s.experts)
    result = []
    for name, (rows, inputs, outputs) in layer.items():
        ranks = job.rank * sum(
            member in job.adapted_linear for member in MERGED_PROJECTIONS.get(name, ())
        )
        result.append(Product(name, "forward", rows, inputs + ranks, outputs, s.layers))
        # Under adapters nobody needs the gradient of the first layer's input.
        count = s.layers - 1 if job.rank and name == "qkv" else s.layers
        result.append(Product(name, "dX", rows, inputs, outputs + ranks, count))
        if not job.rank:
            result.append(Product(name, "dW", rows, inputs, outputs, s.layers))
        if ranks:
            result.append(Product(f"{name} A", "forward", T, inputs, ranks, s.layers))
            result.append(Product(f"{name} A", "dW", T, inputs, ranks, s.layers))
            result.append(Product(f"{name} B", "dW", T, ranks, outputs, s.layers))
    head = round(T * job.labelled)
    kinds: tuple[Literal["forward", "dX", "dW"], ...] = (
        ("forward", "dX") if job.rank else ("forward", "dX", "dW")
    )
    result += [Product("head", kind, head, s.width, s.vocabulary, 1) for kind in kinds]
    return [product for product in result if product.count]
