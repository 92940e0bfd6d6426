"""The table of what excludes what."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from chronicals.memory import draws_numbers
from chronicals.moe.offload.module import streamed_experts_of
from chronicals.objectives import OBJECTIVES
from chronicals.policies.facts import Facts, trains_layers

GATHERED = "weights are gathered for each layer"
STREAMED = "streamed experts"
CPU_SHARE = "experts that the CPU computes"
RANDOM_NUMBERS = "random numbers beside streamed experts"
DRAWN_ANSWERS = "drawn answers beside streamed experts"
NOT_ASKED = "streamed experts, and graphs that were not asked for"
SHARED_PACKS = "processes that share packs exchange heads within each layer"

CUT = "a graph, which ends where the host looks which experts tokens chose, waits for no copy"


class Exclusion(NamedTuple):
    """A policy that does not run together with another one, or under a condition.

    Attributes:
        policy: name of the policy that does not run.
        beside: name of the other policy, or of a condition (``conditions``).
        reason: words for the log and for the error.
        within: a condition under which alone the row counts; None: always.
    """

    policy: str
    beside: str
    reason: str
    within: str | None = None


EXCLUSIONS: list[Exclusion] = [
    Exclusion("use_torch_compile", "shared packs", SHARED_PACKS),
    Exclusion("use_torch_compile", "divided weights", GATHERED),
    Exclusion("use_torch_compile", "fused layers", "decoder layers run fused"),
    Exclusion("use_torch_compile", "use_fp8", "weights in FP8 are kept between calls"),
    Exclusion("use_cuda_graphs", "shared packs", SHARED_PACKS),
    Exclusion("use_cuda_graphs", "divided trained weights", GATHERED),
    Exclusion("use_cuda_graphs", "reduce_in_backward", "gradients are summed in the backward pass"),
    Exclusion(
        "reduce_in_backward",
        "use_cuda_graphs",
        "micro-steps are CUDA graphs, whose gradients are summed afterwards",
    ),
    Exclusion(
        "optimizer_in_backward",
        "several processes",
        "updates a weight before the gradients of {facts.ranks} processes are added up; leave it "
        "out",
    ),
    Exclusion(
        "use_cuda_graphs",
        CPU_SHARE,
        "the CPU computes a share of the experts (chronicals.offload(mode='numerical'))",
    ),
    Exclusion(
        "use_cuda_graphs",
        RANDOM_NUMBERS,
        "graphs end where the host looks which experts tokens chose, and a layer that is recomputed "
        "in a later graph would draw other random numbers: set lora_dropout=0",
    ),
    Exclusion(
        "use_cuda_graphs",
        DRAWN_ANSWERS,
        "objective={facts.config.objective!r} draws answers by graphs of its own, which read "
        "experts in the same slots",
    ),
    Exclusion(
        "use_cuda_graphs",
        NOT_ASKED,
        "graphs that end where the host looks which experts tokens chose have run on the CPU alone, "
        "by a stand-in of graphs, and on no card yet: use_cuda_graphs=True takes them",
    ),
    Exclusion(
        "use_cuda_graphs",
        "activation_offload",
        f"activations are copied to host memory meanwhile, and {CUT}",
        STREAMED,
    ),
    Exclusion(
        "use_cuda_graphs",
        "offload_frozen_weights",
        f"weights are copied from host memory meanwhile, and {CUT}",
        STREAMED,
    ),
    Exclusion("use_torch_compile", STREAMED, "the host looks which experts tokens chose"),
    Exclusion("tiled_mlp", "tiled_layers", "layers in tiles tile their MLPs, too; leave it out"),
    Exclusion("tiled_layers", "divided weights", f"{GATHERED}; take recompute_layers"),
    Exclusion("divided weights", "use_fp8", "use_fp8=True quantises weights that are whole"),
    Exclusion(
        "divided weights",
        STREAMED,
        "experts in host memory are whole: leave memory=['offload_experts'] out",
    ),
    Exclusion(
        "divided weights",
        "offload_frozen_weights",
        "memory=['offload_frozen_weights'] moves weights that are whole",
    ),
    Exclusion(
        "divided weights",
        "offload_embeddings",
        "memory=['offload_embeddings'] moves tables that are whole",
    ),
    Exclusion(
        "use_torch_compile", "offload_embeddings", "tables in host memory are read by the card"
    ),
    Exclusion(
        "divided weights",
        "reduce_in_backward",
        "it sums gradients by itself: leave memory=['reduce_in_backward'] out",
    ),
    Exclusion(
        "divided trained weights",
        "activation_offload",
        "memory=['offload_activations'] tells activations from weights by where these lie, "
        "and gathered ones move",
    ),
]
"""Rows in the order in which their reasons are given. ``{facts…}`` in a reason is filled in. What
fields exclude each other whatever the model and the machine, ``ChronicalsConfig.check`` refuses."""


def streams_experts(model: Any) -> bool:
    """Return whether experts of the model are in host memory and come when tokens chose them."""
    return next(streamed_experts_of(model), None) is not None


def conditions(facts: Facts) -> set[str]:
    """Return the conditions of the table that hold: facts that exclude as policies do."""
    streamed = [module for _, module in streamed_experts_of(facts.model)]
    config = facts.config
    is_streamed = "offload_experts" in config.memory_policies or bool(streamed)
    drops = config.use_lora and config.lora_dropout > 0  # adapters may not be attached yet
    holds = {
        "shared packs": facts.context > 1,
        "divided weights": facts.divides_weights,
        "divided trained weights": facts.divides_weights and trains_layers(facts.model),
        "fused layers": facts.unfused is None,
        "several processes": facts.ranks > 1,
        STREAMED: is_streamed,
        CPU_SHARE: any(module.source.engine.cpu is not None for module in streamed),
        RANDOM_NUMBERS: is_streamed and (drops or draws_numbers(facts.model)),
        DRAWN_ANSWERS: is_streamed and OBJECTIVES[config.objective].draws_answers,
        NOT_ASKED: is_streamed and "use_cuda_graphs" not in config.explicit,
    }
    return {name for name, held in holds.items() if held}


def why_excluded(policy: str, standing: Collection[str], facts: Facts) -> str | None:
    """Return why a policy does not run together with ``standing``; None if nothing excludes it.

    Args:
        policy: name of a policy or a condition.
        standing: names of the policies that run and the conditions that hold.
        facts: of the run, which reasons may name.
    """
    for row in EXCLUSIONS:
        if row.policy != policy or row.beside not in standing:
            continue
        if row.within is None or row.within in conditions(facts):
            return row.reason.format(facts=facts)
    return None
