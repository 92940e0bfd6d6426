"""Facts about a run on which its policies decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from chronicals.attention import choose_backend
from chronicals.attention.backends import EXACT_ORDER
from chronicals.config import ChronicalsConfig
from chronicals.memory import card_memory, decoder_layers
from chronicals.model_shape import ModelShape
from chronicals.models import PresentedModel, input_device
from chronicals.patching.layer_policies import is_large
from chronicals.patching.plan import plan_for
from chronicals.policies.frozen_models import Held

DIVIDE_WEIGHTS = "weights"
"""Value of ``sharding`` where weights are divided."""

TORCH_FLASH = "flash"
"""Attention backend that needs no package beside torch."""

GATHERED_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float32, "fp32": torch.float32}
"""Dtype in which trained weights are gathered, by ``mixed_precision``; autocast casts to fp16."""

PRODUCT_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Dtype of products, activations and frozen weights, by ``mixed_precision``."""

NOT_ON_CARD = "not on a card"
"""Reason of a run on the CPU."""

ONE_BY_ONE = "attention runs on one document after the other"


@dataclass(frozen=True)
class Facts:
    """A run as its policies see it; the defaults are those of a plan for cards that are not here.

    Attributes:
        config: the configuration.
        model: the model with its adapters; for a plan it may be on the meta device.
        ranks: number of processes that train together.
        context: number of them that share each pack.
        exchanging: number of those that exchange heads to attend to split documents.
        here: number of processes on each machine; None for what torchrun says.
        total: bytes of a card; 0 without one.
        packed: True if documents lie in packs, not in padded rows.
        alike: True if all documents have as many tokens and targets, so that one CUDA graph is
            captured.
        one_by_one: True if attention runs on one document after the other.
        head_is_read: True if the loss is computed from hidden states, without whole logits.
        records_routers: True if router logits of the layers are recorded for their losses.
        unfused: reason why decoder layers do not run fused; None where they do.
        fuses_halves: True if decoder layers run fused, in one piece or as attention and experts, and
            no half of one is computed by the model's own class.
        backend: name of the attention backend.
        frozen_models: the objective's frozen models on the card, by name.
        resumed: True if the run goes on from a checkpoint.
        taken: names of the policies that ``fit`` switched on.
    """

    config: ChronicalsConfig
    model: Any
    ranks: int = 1
    context: int = 1
    exchanging: int = 1
    here: int | None = None
    total: int = 0
    packed: bool = True
    one_by_one: bool = False
    head_is_read: bool = True
    records_routers: bool = False
    unfused: str | None = None
    fuses_halves: bool = True
    backend: str = ""
    frozen_models: Mapping[str, Held] = field(default_factory=dict)
    alike: bool = False
    resumed: bool = False
    taken: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        config: ChronicalsConfig,
        presented: PresentedModel,
        ranks: int = 1,
        context: int = 1,
        here: int | None = None,
        exchanging: int = 1,
        frozen_models: Mapping[str, Held] | None = None,
        alike: bool = False,
        resumed: bool = False,
    ) -> Facts:
        """Read the facts of a run on this machine; see the attributes."""
        model = presented.model
        unfused = why_not_fused(config, presented)
        return cls(
            config=config,
            model=model,
            ranks=ranks,
            context=context,
            exchanging=exchanging,
            here=here,
            total=fillable(card_memory(input_device(model)), config),
            packed=presented.packed,
            one_by_one=presented.one_by_one,
            head_is_read=presented.head_is_read,
            records_routers=presented.records_routers,
            unfused=unfused,
            fuses_halves=unfused is None and plan_for(model).fuses_halves,
            backend=backend_on(input_device(model), config, model),
            frozen_models=frozen_models or {},
            alike=alike,
            resumed=resumed,
        )

    @property
    def in_fp8(self) -> Callable[[int, int], bool] | None:
        """Function of a trained product's inputs and outputs: is it in FP8? None where none is."""
        trains_all = all(p.requires_grad for p in self.model.get_decoder().parameters())
        return is_large if self.config.use_fp8 and trains_all else None

    @property
    def element(self) -> int:
        """Bytes of an element of products, activations and frozen weights."""
        return PRODUCT_TYPES[self.config.mixed_precision].itemsize

    @property
    def tokens(self) -> int:
        """Tokens of one forward pass of a process."""
        return self.config.batch_size * self.config.max_seq_length // self.context

    @property
    def planned(self) -> bool:
        """True if the model has shapes alone, for a plan."""
        return input_device(self.model).type == "meta"

    @property
    def on_card(self) -> bool:
        """True if the model runs on a card, or is planned to."""
        return input_device(self.model).type == "cuda" or (self.planned and self.total > 0)

    @property
    def on_host(self) -> bool:
        """True if the model runs on the CPU, or is planned to."""
        return not self.on_card and self.unfused == NOT_ON_CARD

    @property
    def sharing(self) -> int:
        """Number of processes that share the optimizer's states."""
        return 1 if self.config.sharding == "none" else self.ranks

    @property
    def divides_weights(self) -> bool:
        """True if every process has a share of the weights."""
        return self.ranks > 1 and self.config.sharding == DIVIDE_WEIGHTS

    def who_asked(self, policy: str) -> str:
        """Return who switched on a policy that is off by default, for the log."""
        return "taken by fit" if policy in self.taken else "as asked"

    @property
    def skips_layers(self) -> bool:
        """True if a training pass leaves layers out at random."""
        fields = ("layerdrop", "decoder_layerdrop")
        return any(getattr(self.model.config, field, 0) for field in fields)

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """Parameters that require a gradient."""
        return [p for p in self.model.parameters() if p.requires_grad]


def backend_on(device: torch.device, config: ChronicalsConfig, model: Any) -> str:
    """Return the name of the attention backend that a run of a model takes on a device."""
    text = model.config.get_text_config()
    return choose_backend(
        device,
        PRODUCT_TYPES[config.mixed_precision],
        ModelShape.of(model.config).head_dim or 128,  # 128 if layers have different ones
        softcap=getattr(text, "attn_logit_softcapping", None) is not None,
        flash=config.use_flash_attention,
    )


def expected_backend(config: ChronicalsConfig, usual: str) -> str:
    """Return the attention backend that a run is expected to take on a card that is not here.

    Args:
        config: of the run.
        usual: backend of runs in 16 bits on that card; empty if it is not known, which then is the
            one that torch has.
    """
    if config.mixed_precision == "fp32":
        return EXACT_ORDER[0]
    return usual or (TORCH_FLASH if config.use_flash_attention else "")


def fillable(size: int, config: ChronicalsConfig) -> int:
    """Return the bytes of a card of ``size`` bytes that the run may fill (``gpu_memory``)."""
    return size if config.card_bytes is None else min(size, config.card_bytes)


def trains_layers(model: Any) -> bool:
    """Return whether weights of decoder layers other than adapters are trained."""
    adapted = hasattr(model, "chronicals_lora") or hasattr(model, "peft_config")
    return not adapted and any(
        p.requires_grad for layer in decoder_layers(model) for p in layer.parameters()
    )


def why_not_fused(config: ChronicalsConfig, presented: PresentedModel) -> str | None:
    """Return why decoder layers do not run fused; None where they do.

    They need a card and packs, and a proof on a twin of the model (``patching.plan``), which is
    asked for last because it takes time.
    """
    asks_to_compile = config.use_torch_compile and "use_torch_compile" in config.explicit
    obstacles = {
        NOT_ON_CARD: input_device(presented.model).type != "cuda",
        "use_fused_kernels=False": not config.use_fused_kernels,
        "use_torch_compile=True": asks_to_compile,
        "mixed_precision=fp16": config.mixed_precision == "fp16",
        "documents become padded rows": not presented.packed,
        ONE_BY_ONE: presented.one_by_one,
    }
    for reason, holds in obstacles.items():
        if holds:
            return reason
    if not plan_for(presented.model).layers:
        return f"{type(presented.model).__name__} has none that were proved"
    return None
