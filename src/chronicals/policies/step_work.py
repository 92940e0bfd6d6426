"""Work of an optimizer step, as its policies change it one after the other, and its seconds.

The solver compares settings by these seconds, so only the order of settings matters: FLOPs and bytes
are those of the large operations, and what is the same under all settings is left out.

    seconds = max(forward / flops, copied / bus) + max(backward / flops, copied / bus)
            + moved / memory + waited / bus + sent / link

FLOPs of a token are 2 N forward for N multiplied weights, as many for the gradient of inputs, and
again as many for that of trained weights; attention to a document of length s has 4 · Q · s / 2 in a
layer, with Q the width of all query heads, and 2.5 times as many backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from chronicals.memory import NOTHING, Estimate
from chronicals.model_shape import ModelShape
from chronicals.policies.facts import PRODUCT_TYPES, Facts, trains_layers
from chronicals.quantization import packed_modules

ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward pass over those of its forward pass: five products for two."""

GRADIENT_BYTES = 8
"""Bytes moved to add a micro-batch's gradient of a value to its fp32 sum: it is read and written."""

DEQUANTISED_BYTES = 2.5
"""Bytes moved to dequantise a value before a product: half a byte read, two written."""


@dataclass(frozen=True)
class Rates:
    """Rates of a card, of which only the ratios matter here.

    Attributes:
        flops: FLOPs a second in training; about what an 8B reaches on one H200 (docs/measured.md).
        memory: bytes a second of the card's memory; kernels of rows reach five sixths of the H200's
            4.8 TB/s (docs/kernels.md).
        bus: bytes a second to host memory or from it; 0.97 MB a token went out and back at 25,903
            tokens/s on the H200 (0.5B full with offload_activations alone, docs/measured.md).
        link: bytes a second to other cards, as plans assume of NVLink.
    """

    flops: float = 6e14
    memory: float = 4e12
    bus: float = 5e10
    link: float = 3.7e11


@dataclass(frozen=True)
class StepWork:
    """Work of an optimizer step of one process.

    Attributes:
        memory: bytes that the step is expected to hold.
        micro_batches: forward passes of the step.
        forward: FLOPs of its forward passes.
        backward: FLOPs of its backward passes.
        layers: FLOPs of the decoder layers within ``forward``.
        mlps: FLOPs of the MLPs within ``layers``.
        kept: bytes that one forward pass keeps for its backward pass.
        moved: bytes read and written in the card's memory beside products.
        copied: bytes that go to host memory beside the forward passes, and come back beside the
            backward passes.
        waited: bytes over the bus while nothing is computed.
        sent: bytes to other cards beyond those that are sent once a step.
    """

    memory: Estimate
    micro_batches: int
    forward: float
    backward: float
    layers: float
    mlps: float
    kept: float
    moved: float
    copied: float = 0.0
    waited: float = 0.0
    sent: float = 0.0

    @classmethod
    def of(cls, facts: Facts, memory: Estimate) -> StepWork:
        """Return the work of a run without the policies that change it.

        Args:
            facts: of the run.
            memory: bytes that it is expected to hold.
        """
        config = facts.config
        text = facts.model.config.get_text_config()
        shape = ModelShape.of(facts.model.config)
        queries = shape.heads * shape.head_dim
        keys = shape.kv_heads * shape.head_dim
        inner = shape.inner
        if shape.experts:
            met = getattr(text, "num_experts_per_tok", None) or 1
            inner = met * (getattr(text, "moe_intermediate_size", None) or inner)
        attention = 2 * shape.width * (queries + keys)
        mlps = 3 * shape.width * inner
        tokens = facts.tokens * config.gradient_accumulation_steps
        scores = 2 * queries * config.max_seq_length * shape.layers * tokens
        products = 2 * shape.layers * (attention + mlps) * tokens
        head = 2 * shape.width * shape.vocabulary * tokens
        again = 2 if trains_layers(facts.model) else 1
        trained = sum(p.numel() for p in facts.trained)
        element = PRODUCT_TYPES[config.mixed_precision].itemsize
        packed = sum(module.values for _, module in packed_modules(facts.model))
        weights = 2 * shape.layers * (attention + mlps) * element + 2 * DEQUANTISED_BYTES * packed
        return cls(
            memory=memory,
            micro_batches=config.gradient_accumulation_steps,
            forward=products + head + scores,
            backward=again * (products + head) + ATTENTION_BACKWARD * scores,
            layers=products + scores,
            mlps=2 * shape.layers * mlps * tokens,
            kept=memory.layers * memory.kept[NOTHING],
            moved=config.gradient_accumulation_steps * (weights + GRADIENT_BYTES * trained),
        )

    def seconds(self, rates: Rates) -> float:
        """Return the seconds of the step at these rates."""
        copies = self.copied / rates.bus
        computing = max(self.forward / rates.flops, copies)
        computing += max(self.backward / rates.flops, copies)
        return (
            computing + self.moved / rates.memory + self.waited / rates.bus + self.sent / rates.link
        )
