"""What ``several_cards.py`` measures: models, configurations, and the ways in which cards share
each.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

LORA = {
    "use_lora": True,
    "lora_rank": 32,
    "lora_alpha": 32,
    "lora_dropout": 0.0,
    "use_lora_plus": False,
    "lora_target_modules": [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ],
    "learning_rate": 1e-4,
}
FULL = {"learning_rate": 1e-6, "optimizer_state_dtype": "bf16"}
EIGHT = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    "rms_norm_eps": 1e-5,
}
SEVENTY = {
    **EIGHT,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
HALF = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
TINY = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}

SHARED = ("context", "context-keys")
"""Ways in which all cards share each document."""

PEERS = (
    "fsdp2-liger",
    "fsdp2-liger-compile",
    "fsdp2-liger-recompute",
    "fsdp2-liger-compile-recompute",
    "fsdp2-compile-recompute",
    "fsdp2-recompute",
)
"""Under FSDP2, the most that a card may hold first: what does not fit fails."""

COMPARED = 2
WARM_UP = 3
"""Steps that are compared, and steps before those that are timed: a micro-batch is captured when
it is met again.
"""


@dataclass(frozen=True)
class Row:
    """Attributes:
    config_class, sizes: of the model.
    fields: of the configuration.
    ways: that are run.
    packs, width: documents of a micro-batch, and their tokens.
    base: ``dense``, ``nf4`` (quantised), or ``codes`` (NF4 that is drawn).
    saves: times what a checkpoint holds up in place of steps.
    steps: that are timed at most, after one more; for rows whose steps take long.
    """

    config_class: str
    sizes: dict[str, Any]
    fields: dict[str, Any]
    ways: tuple[str, ...] = ("1x", "optimizer", "weights")
    packs: int = 4
    width: int = 2048
    base: str = "dense"
    saves: bool = False
    steps: int | None = None

    @property
    def shares(self) -> bool:
        """Whether cards share documents."""
        return any(way in SHARED for way in self.ways)

    def sizes_of_batch(self, tiny: bool) -> tuple[int, int]:
        """Documents of a micro-batch, and their tokens."""
        return (min(self.packs, 2), 64) if tiny else (self.packs, self.width)


ROWS = {
    "16-layers-full": Row("LlamaConfig", {**EIGHT, "num_hidden_layers": 16}, FULL),
    "16-layers-full-4k": Row("LlamaConfig", {**EIGHT, "num_hidden_layers": 16}, FULL, packs=2),
    "8b-lora": Row("LlamaConfig", EIGHT, LORA),
    "8b-qlora": Row("LlamaConfig", EIGHT, LORA, base="nf4"),
    "0.5b-full": Row("Qwen2Config", HALF, FULL, ("1x", "optimizer", "weights"), packs=8),
    "0.5b-lora": Row("Qwen2Config", HALF, LORA, ("1x", "optimizer"), packs=8),
    "8b-full": Row("LlamaConfig", EIGHT, FULL, ("weights", *PEERS)),
    "70b-qlora": Row("LlamaConfig", SEVENTY, LORA, packs=1, base="codes"),
    "save": Row(
        "LlamaConfig", {**EIGHT, "num_hidden_layers": 8}, FULL, ("optimizer", "weights"), saves=True
    ),
    "8b-qlora-64k": Row(
        "LlamaConfig",
        {**EIGHT, "max_position_embeddings": 65536},
        {**LORA, "memory": ["recompute_layers"], "use_cuda_graphs": False},
        ("1x", *SHARED),
        packs=1,
        width=65536,
        base="nf4",
        steps=3,
    ),
}
"""By name; of 70B the share of a card's own time is that of the way ``1x`` with the same
micro-batch.
"""


@dataclass
class Plan:
    """What a process is told.

    Attributes:
        out: where the first one writes what it measured.
    """

    row: str
    way: str
    cards: int
    steps: int
    tiny: bool
    out: Path
    folder: Path
