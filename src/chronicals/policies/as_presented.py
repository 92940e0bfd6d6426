"""Policies that follow from how the model is presented: attention, loss, packing, packed base."""

from __future__ import annotations

from collections.abc import Iterator

from chronicals.attention import FLASH
from chronicals.config import ChronicalsConfig
from chronicals.memory import decoder_layers
from chronicals.policies.facts import PRODUCT_TYPES, Facts
from chronicals.policies.policy import Course, Decision, Policy, Remedy, Switch, register_policy
from chronicals.quantization import NF4, packed_words


class FlashAttention(Switch):
    """Attention by a FlashAttention backend."""

    name = "use_flash_attention"
    title = "FlashAttention"

    def why_not(self, facts: Facts) -> str | None:
        """Return what a FlashAttention backend needs, if none was chosen."""
        runs = facts.packed and not facts.one_by_one and facts.backend in FLASH
        return None if runs else "needs a card, bf16 or fp16, and packs"

    def words(self, facts: Facts) -> str:
        """Return the name of the backend."""
        return facts.backend


class FusedLoss(Switch):
    """The loss from hidden states, a chunk of logits at a time."""

    name = "use_fused_kernels"
    title = "loss without whole logits"
    runs_as = "from the hidden states"
    matters = True

    def why_not(self, facts: Facts) -> str | None:
        """Return that the head is unknown, if hidden states cannot give the loss."""
        return None if facts.head_is_read else "unknown kind of head"


class SequencePacking(Switch):
    """Several documents in a row of tokens."""

    name = "use_sequence_packing"
    title = "sequence packing"
    runs_as = "documents do not affect each other"
    matters = True

    def why_not(self, facts: Facts) -> str | None:
        """Return that documents are padded, if the model does not take packs."""
        return None if facts.packed else "documents become padded rows"


class PackedBaseWeights(Policy):
    """Base weights in a packed format, which the model was loaded with."""

    name = "quantization"
    title = "packed base weights"
    before_memory = True

    def asked(self, config: ChronicalsConfig) -> bool:
        """Return whether the base is to be quantised."""
        return config.quantization is not None

    def decide(self, facts: Facts, course: Course) -> Decision:
        """Decide by the weights that the model has, which was loaded before."""
        words = packed_words(facts.model)
        if not words:
            return Decision(self.name, False, "not asked for")
        return Decision(self.name, True, f"{words}, dequantised for each product")

    def settings(self, facts: Facts) -> Iterator[Remedy]:
        """Yield a base in 4 bits, under adapters over 16 bits."""
        if facts.config.use_lora and not packed_words(facts.model):
            yield from self.remedies(facts.config, facts.ranks)

    def remedies(self, config: ChronicalsConfig, ranks: int) -> Iterator[Remedy]:
        """Yield adapters where the weights are trained, else a base in 4 bits under adapters."""
        if not config.use_lora:
            masters = {} if config.master_weights else {"master_weights": True}
            price = "adapters are trained, not the weights"
            yield Remedy({"use_lora": True, **masters}, price)
        elif config.quantization is None and not config.use_fp8:
            yield Remedy({self.name: "nf4"}, "the base is rounded to 4 bits")

    def unloaded(self, facts: Facts) -> int:
        """Return the bytes of frozen weights of decoder layers, but for those of their 4 bits."""
        element = PRODUCT_TYPES[facts.config.mixed_precision].itemsize
        values = 0
        for layer in decoder_layers(facts.model):
            values += sum(p.numel() for p in layer.parameters() if not p.requires_grad)
        return int(values * (element - NF4.bytes_a_value(element)))


register_policy(FlashAttention())
register_policy(FusedLoss())
register_policy(SequencePacking())
register_policy(PackedBaseWeights())
