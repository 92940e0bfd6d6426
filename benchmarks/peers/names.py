"""The peers by name: what each needs, what it trains on, and how its process is started."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from chronicals.benchmark.processes import Arm
from chronicals.config import ConfigurationError

PEERS: dict[str, tuple[str, ...]] = {
    "transformers": ("transformers",),
    "transformers-recompute": ("transformers",),
    "torch-compile": ("transformers",),
    "liger": ("liger_kernel",),
    "unsloth": ("unsloth",),
    "unsloth-recompute": ("unsloth",),
    "unsloth-padded": ("unsloth",),
    "unsloth-compiled": ("unsloth",),
    "trl": ("trl", "datasets"),
    "trl-recompute": ("trl", "datasets"),
}
"""Peers by name, and the packages each needs."""

MODE_PACKAGES = {
    "full": (),
    "lora": ("peft",),
    "qlora": ("peft", "bitsandbytes", "accelerate"),
}
"""Further packages that all peers need, by what is trained."""

PAIR_PEERS = ("trl", "trl-recompute", "unsloth", "unsloth-recompute")
"""Peers that train on pairs of answers."""

DISTILLATION_PEERS = ("transformers", "liger")
"""Peers that train beside a teacher."""

TRL_ENVIRONMENT = {
    # Shapes differ from step to step, so memory is in segments that grow, as Unsloth's is.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    # Liger's rotation in CuTe, taken for large batches, is compiled anew for each length.
    "LIGER_KERNEL_IMPL_ROPE": "nvidia-triton",
}


def peer_arm(name: str) -> Arm:
    """Return the arm of a peer."""
    environment = {"UNSLOTH_DISABLE_STATISTICS": "1"}
    if name.startswith("trl"):
        environment |= TRL_ENVIRONMENT
    return Arm(
        name,
        module="peers.arm",
        import_path=str(Path(__file__).parent.parent),
        environment=environment,
    )


def missing_packages_of(peer: str, mode: str) -> list[str]:
    """Return the packages that a peer needs for ``mode`` and that are not installed."""
    return [name for name in (*PEERS[peer], *MODE_PACKAGES[mode]) if find_spec(name) is None]


def chosen_peers(
    names: Sequence[str], data: str, lora: bool, objective: str | None = None
) -> list[str]:
    """Return the peers that run for the names given to ``--against``.

    ``unsloth`` stands for several arms: with and without recomputation, and if lengths differ also
    padded rows and, under LoRA, its compiled modules. Beside another ``unsloth-…`` it is the arm
    without recomputation alone, as ``unsloth-alone`` is.

    Args:
        lora: whether adapters are trained.
        objective: one over pairs of answers or of a teacher has fewer peers.

    Raises:
        ConfigurationError: there is no such peer, or it has no trainer for the objective.
    """
    from chronicals.benchmark.pairs import PAIR_OBJECTIVES
    from chronicals.benchmark.work import DISTILLATION

    able = tuple(PEERS)
    trained_on = ""
    if objective == DISTILLATION:
        able = DISTILLATION_PEERS
        trained_on = "documents with a teacher"
    elif objective in PAIR_OBJECTIVES:
        able = PAIR_PEERS
        trained_on = "pairs of answers"
    asked = ["unsloth" if name == "unsloth-alone" else name for name in names if name]
    for name in asked:
        if name not in PEERS:
            raise ConfigurationError(
                f"against={name!r}: no such peer; there are {', '.join(PEERS)}"
            )
        if name not in able:
            raise ConfigurationError(
                f"against={name!r}: has no trainer for {trained_on}; these have: {', '.join(able)}"
            )
    if any(name.startswith("unsloth-") for name in names):
        return list(dict.fromkeys(asked))
    unsloth = ["unsloth-recompute"]
    if data != "fixed" and objective not in PAIR_OBJECTIVES:
        unsloth.append("unsloth-padded")
        if lora:
            unsloth.append("unsloth-compiled")
    unsloth.append("unsloth")
    chosen: list[str] = []
    for name in asked:
        chosen += unsloth if name == "unsloth" else [name]
    return list(dict.fromkeys(chosen))
