"""Defaults of other tools for settings that are left out, in our words, where ours are others.

Sources: transformers' ``TrainingArguments``, TRL's configurations (1.16), Axolotl's schemas
(067b021) and builder, LLaMA-Factory's arguments (ff6d4d1).
"""

from __future__ import annotations

from typing import Any

from chronicals.convert.lengths import has_conversations, steps_that_differ
from chronicals.convert.meanings import PAIRS, ROLLOUTS
from chronicals.convert.reading import AXOLOTL, LLAMA_FACTORY, TRL, Theirs

TRAINER: dict[str, Any] = {
    "batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_epochs": 3,
    "learning_rate": 5e-5,
    "lr_scheduler": "linear",
    "warmup_steps": 0,
}
"""Of transformers."""

RATES_OF_TRL = {"sft": 2e-5, "reward": 1e-4}
"""Of TRL by objective."""

OTHER_RATE_OF_TRL = 1e-6

ROLLOUTS_OF_TRL: dict[str, dict[str, Any]] = {
    "grpo": {"grpo.max_new_tokens": 512},
    "rloo": {"rloo.max_new_tokens": 512, "rloo.answers": 2, "rloo.beta": 0.05},
}
"""Of TRL's objectives that draw answers."""

AXOLOTL_WARMUP = 0.03
"""Share of the steps that Axolotl warms up in where nothing says so."""


def defaults_of(theirs: Theirs) -> dict[str, Any]:
    """Return the fields that stand for what is left out, with a reason each where it needs one."""
    fields = dict(TRAINER)
    if theirs.tool == AXOLOTL:
        fields |= {
            "batch_size": 1,
            "num_epochs": 1,
            "lr_scheduler": "cosine",
            "max_seq_length": 512,
            "warmup_ratio": AXOLOTL_WARMUP,
        }
        del fields["warmup_steps"]
    elif theirs.tool == LLAMA_FACTORY:
        fields |= {"max_seq_length": 2048, "use_lora": True}
    elif theirs.tool == TRL:
        fields |= {
            "learning_rate": RATES_OF_TRL.get(theirs.objective, OTHER_RATE_OF_TRL),
            "max_seq_length": 1024,
        }
    fields["use_sequence_packing"] = (
        theirs.tool == LLAMA_FACTORY and theirs.objective == "pretraining"
    )
    masks_none = theirs.get("assistant_only_loss", "completion_only_loss") is None
    if theirs.tool == TRL and theirs.objective == "sft" and masks_none:
        fields |= {"train_on": "all"} if has_conversations(theirs) else {}
    steps = steps_that_differ(theirs, TRAINER["num_epochs"])
    if steps is not None and theirs.get("num_train_epochs") is None:
        fields["max_steps"] = steps
        del fields["num_epochs"]
    if theirs.objective in PAIRS:
        fields["max_seq_length"] *= 2
    elif theirs.objective not in ROLLOUTS and theirs.objective != "kto":
        whole = theirs.objective == "pretraining"
        fields["overlong"] = "split" if whole else "drop" if theirs.tool == AXOLOTL else "cut"
    if theirs.objective in ROLLOUTS:
        fields |= ROLLOUTS_OF_TRL[theirs.objective]
        for name in ("batch_size", "gradient_accumulation_steps", "use_sequence_packing"):
            del fields[name]
    return fields


def adapters_of(theirs: Theirs, rank: int | None) -> dict[str, Any]:
    """Return what the tool takes of adapters where nothing says so.

    Args:
        theirs: the configuration.
        rank: that it sets; None if it sets none.
    """
    if theirs.tool == LLAMA_FACTORY:
        return {"lora_rank": 8, "lora_alpha": 2 * (rank or 8), "lora_dropout": 0.0}
    if theirs.tool == TRL:
        fields: dict[str, Any] = {
            "lora_rank": 16,
            "lora_alpha": 32,
            "lora_target_modules": ["q_proj", "v_proj"],  # of PEFT, for Llama, Qwen and Mistral
        }
        if theirs.objective not in ROLLOUTS:
            fields["lora_dropout"] = 0.0 if theirs.objective in (*PAIRS, "kto") else 0.05
        return fields
    return {"lora_rank": 8, "lora_alpha": 8, "lora_dropout": 0.0}
