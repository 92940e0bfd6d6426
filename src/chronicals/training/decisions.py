"""What runs of all that is permitted, and why; the first lines of the log say it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from chronicals.attention import FLASH, choose_backend
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.kernels.fp8 import lacks_fp8
from chronicals.kernels.fp8_linear import FP8_MULTIPLE
from chronicals.kernels.host_memory import available_memory
from chronicals.memory import (
    CHEAP,
    LAYERS,
    NOTHING,
    Estimate,
    decoder_layers,
    enters_again,
    recomputes,
)
from chronicals.models import ModelShape, PresentedModel, input_device, unfused_kind
from chronicals.optimizers import (
    host_states,
    moments_in_8_bits,
    states_in_host_memory,
)
from chronicals.optimizers.adam_8bit import MIN_8BIT_ELEMENTS
from chronicals.patching import experts, has_gated_mlps
from chronicals.patching.forms import signature
from chronicals.patching.fp8_layers import is_large
from chronicals.patching.plan import plan_for
from chronicals.quantization import Experts4bit, PackedLinear
from chronicals.training.memory_check import refuse_what_cannot_fit
from chronicals.training.needed_memory import (
    expected_memory,
    fixed_recomputation,
    gathered_bytes,
    has_tiles,
    layers_that_stay,
    leaves_the_card,
    sharing_of,
    state_bytes,
    why_not_divided,
)
from chronicals.training.weight_sharding import PRODUCTS, WEIGHTS, check_divisible, trains_layers

PLAIN = {
    "use_flash_attention": "FlashAttention",
    "use_fused_kernels": "loss without whole logits",
    "use_sequence_packing": "sequence packing",
    "use_torch_compile": "torch.compile",
    "use_cuda_graphs": "CUDA graphs",
    "use_fp8": "FP8",
    "use_8bit_optimizer": "8-bit AdamW",
    "sharding": "sharding",
    "quantization": "packed base weights",
    "use_gradient_checkpointing": "activation recomputation",
    "activation_offload": "activation offload",
    "tiled_mlp": "tiled MLPs",
    "offload_frozen_weights": "frozen weights in host memory",
    "offload_optimizer_states": "optimizer states in host memory",
    "optimizer_in_backward": "optimizer in the backward pass",
    "reduce_in_backward": "gradients summed in the backward pass",
}
"""What each decision is about, in a practitioner's words."""


@dataclass(frozen=True)
class Decision:
    """Whether something runs, and why.

    Attributes:
        field: the switch, or the memory policy.
        how: of recomputation, what every layer saves; of sharding, what is divided.
        layers: of recomputation, how many layers are recomputed whole, None for all.
        matters: whether the log says it too where it does not run.
        among: of sharding, how many processes share one copy of what is divided.
        stay: of sharding, how many of the last layers stay gathered between their passes.
    """

    field: str
    runs: bool
    reason: str
    how: str = NOTHING
    layers: int | None = 0
    matters: bool = False
    among: int = 1
    stay: int = 0

    def __str__(self) -> str:
        return f"{self.field}: {'on' if self.runs else 'off'}, {self.reason}"


def summary(decisions: Iterable[Decision]) -> list[str]:
    """Lines of the log: what runs, and what does not though it matters."""
    runs = [
        f"{PLAIN[decision.field]} ({decision.reason})" for decision in decisions if decision.runs
    ]
    lines = [f"in use: {', '.join(runs)}"] if runs else []
    return lines + [
        f"without {PLAIN[d.field]}: {d.reason}" for d in decisions if not d.runs and d.matters
    ]


def decide(
    config: ChronicalsConfig,
    presented: PresentedModel,
    ranks: int = 1,
    context: int = 1,
    here: int | None = None,
    smallest: Callable[[int], int] = int,
) -> dict[str, Decision]:
    """For every ``use_*`` switch and memory policy whether it runs.

    Args:
        ranks: how many processes train together.
        context: how many of them share each pack.
        here: how many of them are on each machine; by default as torchrun says.
        smallest: of a number that each of them has, the smallest; called once, by all.

    Raises:
        ConfigurationError: a switch that was set cannot be honoured.
    """
    model = presented.model
    device = input_device(presented.model)
    product_type = PRODUCTS[config.mixed_precision]
    head_dim = ModelShape.of(model.config).head_dim or 128  # where there is no single one
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    backend = choose_backend(
        device, product_type, head_dim, softcap=softcap, flash=config.use_flash_attention
    )
    flash = presented.packed and not presented.one_by_one and backend in FLASH
    on_card = device.type == "cuda"
    why_not = why_not_fused(config, presented)
    fused = why_not is None
    in_fp8 = (
        is_large
        if config.use_fp8 and all(p.requires_grad for p in model.get_decoder().parameters())
        else None
    )
    whole = (
        fused and plan_for(model).fuses_whole_layers
    )  # beside a half that its class computes, nothing is counted as saved
    sharding = _sharding(config, model, ranks, here)
    if divided := sharding.how == WEIGHTS:
        config = config.fitted(sharding_ranks=sharding.among)
    pads_attended = (
        backend == "flash-attn-4"
    )  # it leaves room for an adapter's columns behind what it returns
    frees, needed = expected_memory(
        config, model, ranks, context, whole, in_fp8, None, pads_attended
    )
    sharding = _kept_whole(config, model, ranks, here, sharding, needed)
    graphs, why_not_graphs = _graphs(config, presented, backend, context, frees, divided)
    possible: dict[str, tuple[bool, str]] = {
        "use_flash_attention": (
            flash,
            backend if flash else "needs a card, bf16 or fp16, and packs",
        ),
        "use_fused_kernels": (
            presented.head_is_read,
            "from the hidden states" if presented.head_is_read else "unknown kind of head",
        ),
        "use_sequence_packing": (
            presented.packed,
            "documents do not affect each other"
            if presented.packed
            else "documents become padded rows",
        ),
        "use_torch_compile": _compilation(
            presented, on_card and presented.packed, fused, context, divided, config.use_fp8
        ),
        "use_cuda_graphs": (graphs, why_not_graphs),
    }
    made = [_decide(config, field, *can) for field, can in possible.items()]
    shown = ("use_sequence_packing", "use_fused_kernels")
    made = [replace(d, matters=d.field in shown and getattr(config, d.field)) for d in made]
    made += [_quantization(model), _fp8(config, presented, why_not, context)]
    recomputed = _recomputation(config, needed, why_not, presented)
    size = gathered_bytes(config, model) if divided and trains_layers(model) else 0
    if stay := smallest(
        layers_that_stay(needed, recomputed.how, recomputed.layers, size) if size else 0
    ):
        sharding = _with_layers_that_stay(sharding, stay, size)
        recomputed = _recomputation(
            config, needed.beside(stay * size), why_not, presented
        )  # the same, for these bytes fit

    def estimated(length: int) -> Estimate:
        shorter = config.fitted(max_seq_length=length)
        return expected_memory(shorter, model, ranks, context, whole, in_fp8, None, pads_attended)[
            1
        ]

    refuse_what_cannot_fit(
        config, needed.beside(stay * size), fixed_recomputation(config, model), estimated, ranks
    )
    made += [recomputed, _offload(config, on_card)]
    made += [_tiles(config, model, context), _frozen_weights(config)]
    made += [
        sharding,
        _reduce_in_backward(config, sharding, graphs and config.use_cuda_graphs, frees, context),
        _optimizer_in_backward(config, ranks),
        _8bit_optimizer(config, model),
        _host_states(config, model, on_card),
    ]
    return {decision.field: decision for decision in made}


GATHERED = "weights are gathered for each layer"

BY_HOSTS = "weights are gathered for each layer by gloo, which works on the host"

ONE_BY_ONE = "attention runs on one document after the other"

SHARED = "processes that share packs exchange heads within each layer"


def _compilation(
    presented: PresentedModel, on_card: bool, fused: bool, context: int, divided: bool, in_fp8: bool
) -> tuple[bool, str]:
    model = presented.model
    obstacles = {
        SHARED: context > 1,
        GATHERED: divided,
        "decoder layers run fused": fused,
        "weights in FP8 are kept between calls": in_fp8,
        "only packs on a card are compiled for": not on_card,
        f"{type(model).__name__} has no list of layers": not decoder_layers(model),
        ONE_BY_ONE: presented.one_by_one,
        "its layers' router logits are recorded for the losses of routers": presented.records_routers,
        "adapters run through PEFT's own modules": unfused_kind(model) is not None,
    }
    reason = next((reason for reason, there in obstacles.items() if there), None)
    return reason is None, reason or "decoder layers"


def why_not_fused(config: ChronicalsConfig, presented: PresentedModel) -> str | None:
    """What keeps decoder layers from running fused; they need a card, packs, and to have been
    proved.
    """
    obstacles = {
        "not on a card": lambda: input_device(presented.model).type != "cuda",
        "use_fused_kernels=False": lambda: not config.use_fused_kernels,
        "use_torch_compile=True": lambda: (
            config.use_torch_compile and "use_torch_compile" in config.explicit
        ),
        "mixed_precision=fp16": lambda: config.mixed_precision == "fp16",
        "documents become padded rows": lambda: not presented.packed,
        ONE_BY_ONE: lambda: presented.one_by_one,
        f"{type(presented.model).__name__} has none that were proved": lambda: (
            not plan_for(presented.model).layers
        ),
    }
    return next((reason for reason, there in obstacles.items() if there()), None)


def _graphs(
    config: ChronicalsConfig,
    presented: PresentedModel,
    backend: str,
    context: int,
    frees: bool,
    divided: bool,
) -> tuple[bool, str]:
    """Whether steps can be CUDA graphs.

    Args:
        frees: gradients are summed in the backward pass, for there is no memory for all, or as
            asked.
    """
    obstacles = {
        SHARED: context > 1,
        GATHERED: divided and trains_layers(presented.model),
        "gradients are summed in the backward pass": frees,
        "not on a card": input_device(presented.model).type != "cuda",
        BY_HOSTS: divided and dist.is_initialized() and dist.get_backend() != "nccl",
        "documents become padded rows": not presented.packed,
        ONE_BY_ONE: presented.one_by_one,
        "the model's own logits are used": not presented.head_is_read,
        f"attention by {backend} asks the host": backend not in FLASH,
        "fp16 runs under autocast": config.mixed_precision == "fp16",
        "adapters run through PEFT's own modules, which may ask the host": unfused_kind(
            presented.model
        )
        is not None,
    }
    reason = next((reason for reason, there in obstacles.items() if there), None)
    return reason is None, reason or "micro-step and update are replayed"


def _decide(config: ChronicalsConfig, field: str, runs: bool, reason: str) -> Decision:
    if not getattr(config, field):
        return Decision(field, False, "turned off")
    if field not in config.explicit or runs:
        return Decision(field, runs, reason)
    raise ConfigurationError(
        f"{field}=True cannot be honoured here: {reason}; leave it out or set it to False"
    )


def _quantization(model: Any) -> Decision:
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    experts = [module for module in model.modules() if isinstance(module, Experts4bit)]
    formats = " and ".join(sorted({layer.format for layer in layers}))
    said = [f"{len(layers)} linear layers in {formats}"] if layers else []
    said += [f"the experts of {len(experts)} layers in {experts[0].format}"] if experts else []
    reason = f"{' and '.join(said)}, dequantised for each product" if said else "not asked for"
    return Decision("quantization", bool(said), reason)


def _fp8(
    config: ChronicalsConfig, presented: PresentedModel, why_not: str | None, context: int
) -> Decision:
    field = "use_fp8"
    tokens = config.batch_size * config.max_seq_length // context
    shared = " / context_parallel" if context > 1 else ""
    lacks = lacks_fp8(input_device(presented.model))
    if not config.use_fp8:
        return Decision(field, False, "not asked for")
    none = f"only fused decoder layers and experts have FP8 products, and none run ({why_not})"
    rows = f"batch_size * max_seq_length{shared}={tokens} is no multiple of {FP8_MULTIPLE}"
    obstacles = {
        lacks: bool(lacks),
        none: why_not is not None and not has_fused_experts(config, presented),
        rows: why_not is None and bool(tokens % FP8_MULTIPLE),
    }
    for reason, there in obstacles.items():
        if there:
            raise ConfigurationError(
                f"use_fp8=True cannot be honoured here: {reason}; leave it out"
            )
    return Decision(
        field, True, "as asked, frozen weights quantised once, trained ones at each use"
    )


def has_fused_experts(config: ChronicalsConfig, presented: PresentedModel) -> bool:
    """Whether experts run as grouped products, also where no layer around them runs fused."""
    model = presented.model
    forms = plan_for(presented.model).forms
    if (
        input_device(model).type != "cuda"
        or not config.use_fused_kernels
        or config.mixed_precision == "fp16"
    ):
        return False
    return any(
        forms[key][1].by == experts.BY for m in model.modules() if (key := signature(m)) in forms
    )


def _recomputation(
    config: ChronicalsConfig, needed: Estimate, why_not_fused: str | None, presented: PresentedModel
) -> Decision:
    """As asked for; else where the memory needs it."""
    field = "use_gradient_checkpointing"
    asked = config.memory_policies
    model = presented.model
    if "recompute_layers" in asked:
        return Decision(field, True, f"as asked, {LAYERS} recomputed", layers=None)
    if "recompute_elementwise" in asked:
        if why_not_fused is not None:
            needs = f"needs fused decoder layers, and none run ({why_not_fused})"
            raise ConfigurationError(
                f"memory=['recompute_elementwise']: {needs}; take recompute_layers"
            )
        return Decision(field, True, f"as asked, {CHEAP} recomputed", CHEAP)
    if config.memory is not None:
        return Decision(field, False, "not among memory")
    if not config.use_gradient_checkpointing:
        return Decision(field, False, "turned off")
    if recomputes(model):
        if presented.records_routers and enters_again(model):
            raise ConfigurationError(
                "the model recomputes its layers with use_reentrant=True, through which its "
                "router loss has no gradient; leave "
                "that to us (model.gradient_checkpointing_disable()), or pass use_reentrant=False"
            )
        return Decision(field, True, "the model's own, which stays as it is")
    cheap, again = needed.choice()
    if again and not getattr(model, "supports_gradient_checkpointing", False):
        reason = f"{needed.words()}: {type(model).__name__} cannot recompute its layers"
        return Decision(field, False, reason, matters=True)
    if again and not decoder_layers(model):
        return Decision(
            field, True, f"{needed.words()}: all are, this class has no list of layers", layers=None
        )
    return Decision(field, bool(again) or cheap != NOTHING, needed.words(), cheap, again)


def _offload(config: ChronicalsConfig, on_card: bool) -> Decision:
    field = "activation_offload"
    if "offload_activations" not in config.memory_policies:
        return Decision(field, False, "not asked for")
    if not on_card:
        raise ConfigurationError(
            "activation_offload=True cannot be honoured here, nor memory=['offload_activations']: "
            "activations are in host "
            "memory anyway; leave it out"
        )
    return Decision(field, True, "as asked, beside the computation")


def _tiles(config: ChronicalsConfig, model: Any, context: int) -> Decision:
    if "tiled_mlp" not in config.memory_policies:
        return Decision("tiled_mlp", False, "not asked for")
    if not has_gated_mlps(model):
        raise ConfigurationError(
            f"memory=['tiled_mlp']: needs gated MLPs, {type(model).__name__} has none; leave it out"
        )
    if not has_tiles(config, context):
        return Decision("tiled_mlp", False, "a batch has no more rows than a tile")
    return Decision("tiled_mlp", True, "as asked")


def _frozen_weights(config: ChronicalsConfig) -> Decision:
    if not leaves_the_card(config):
        return Decision("offload_frozen_weights", False, "not asked for")
    return Decision("offload_frozen_weights", True, "as asked, of products in FP8")


def _8bit_optimizer(config: ChronicalsConfig, model: Any) -> Decision:
    field = "use_8bit_optimizer"
    if not config.use_8bit_optimizer:
        return Decision(field, False, "not asked for")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    share = sum(p.numel() for p in moments_in_8_bits(model)) / max(trained, 1)
    if trained and not share:
        raise ConfigurationError(
            "use_8bit_optimizer=True cannot be honoured here: no trained matrix but embeddings "
            f"has {MIN_8BIT_ELEMENTS} elements, and "
            "smaller ones keep their states in fp32; leave it out"
        )
    others = f"embeddings, vectors and matrices under {MIN_8BIT_ELEMENTS} elements in fp32"
    return Decision(
        field, True, f"as asked, the moments of {share:.1%} of the trained weights; {others}"
    )


def _sharding(config: ChronicalsConfig, model: Any, ranks: int, here: int | None) -> Decision:
    if ranks == 1:
        return Decision("sharding", False, "one process")
    if config.sharding_ranks and config.sharding != WEIGHTS and "sharding" in config.explicit:
        raise ConfigurationError(
            f"sharding_ranks={config.sharding_ranks}: no weights are divided with "
            f"sharding={config.sharding!r}; set "
            "sharding='weights' too, or leave it out"
        )
    if config.sharding == "none":
        return Decision(
            "sharding", False, "as asked, every process has all optimizer states", matters=True
        )
    if config.sharding == WEIGHTS:
        among = sharing_of(config, model, ranks, here=here)
        check_divisible(model, config, among)
        copies = f", {ranks // among} copies" if among < ranks else ""
        if here is not None and here < among:
            asked = "" if config.sharding_ranks else ", for the cards of one hold no copy"
            copies += f", each over {-(-among // here)} machines{asked}"
        what = (
            "weights, gradients' sums and optimizer states"
            if trains_layers(model)
            else "frozen weights"
        )
        return Decision(
            "sharding",
            True,
            f"{what}, a share of 1/{among} in each process{copies}",
            WEIGHTS,
            among=among,
        )
    shared = f"gradients' sums and optimizer states, a share of 1/{ranks} in each process"
    unused = (
        f"; sharding_ranks={config.sharding_ranks} is of weights that are divided"
        if config.sharding_ranks
        else ""
    )
    return Decision("sharding", True, shared + unused)


def _kept_whole(
    config: ChronicalsConfig,
    model: Any,
    ranks: int,
    here: int | None,
    sharding: Decision,
    needed: Estimate,
) -> Decision:
    """What was decided, with what keeps weights that do not fit from being divided, which nobody
    asked for.
    """
    if not sharding.runs or sharding.how == WEIGHTS or "sharding" in config.explicit or needed.fits:
        return sharding
    why = why_not_divided(config, model, ranks, here=here)
    said = f"; weights are not divided though they do not fit a card whole: {why}"
    return replace(sharding, reason=sharding.reason + said) if why else sharding


def _with_layers_that_stay(sharding: Decision, stay: int, size: int) -> Decision:
    """What was decided, with how many layers stay gathered, of so many bytes each."""
    said = (
        f"the last {stay} layers stay gathered between their passes, {stay * size / 2**30:.1f} GiB"
    )
    return replace(sharding, reason=f"{sharding.reason}; {said}", stay=stay)


def _reduce_in_backward(
    config: ChronicalsConfig, sharding: Decision, graphs: bool, frees: bool, context: int
) -> Decision:
    field = "reduce_in_backward"
    asked = "reduce_in_backward" in config.memory_policies
    if context > 1:  # ranks that exchange heads in a backward pass must not wait in it for sums
        if asked:
            raise ConfigurationError(
                f"memory=['{field}']: sums wait for processes that wait for heads, with "
                f"context_parallel={context}; leave one "
                "out"
            )
        return Decision(field, False, SHARED)
    if sharding.how == WEIGHTS:
        return Decision(field, False, "weights are divided, and sums with them")
    if not sharding.runs:
        if asked and config.sharding == "none":
            raise ConfigurationError(
                f"memory=['{field}']: every process updates a share, and sharding='none'; leave "
                "one out"
            )
        return Decision(field, False, sharding.reason, matters=asked)
    if graphs:
        return Decision(
            field, False, "micro-steps are CUDA graphs, whose gradients are summed afterwards"
        )
    if not asked and config.memory is not None:
        return Decision(field, False, "not among memory")
    if frees:
        return Decision(
            field,
            True,
            "as asked" if asked else "the gradients of all weights would not fit beside the rest",
        )
    return Decision(field, True, "beside its products, for no micro-step is a CUDA graph")


def _optimizer_in_backward(config: ChronicalsConfig, ranks: int) -> Decision:
    if "optimizer_in_backward" not in config.memory_policies:
        return Decision("optimizer_in_backward", False, "not asked for")
    if ranks > 1:
        raise ConfigurationError(
            f"memory=['optimizer_in_backward']: updates a weight before the gradients of {ranks} "
            "processes are added up; "
            "leave it out"
        )
    return Decision("optimizer_in_backward", True, "as asked, gradients are dropped once used")


def _host_states(config: ChronicalsConfig, model: Any, on_card: bool) -> Decision:
    field = "offload_optimizer_states"
    if field not in config.memory_policies:
        return Decision(field, False, "not asked for")
    moved = states_in_host_memory(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if trained and not moved:
        raise ConfigurationError(
            f"memory=['{field}']: no trained weight has {host_states.MIN_HOST_ELEMENTS} elements, and "
            "smaller ones keep their states "
            "where they are; leave it out"
        )
    share = sum(p.numel() for p in moved) / max(trained, 1)
    size = state_bytes(config, model, moved)
    available = available_memory()
    if available is not None and size > available:
        sizes = (
            f"states of {size / 2**30:.2f} GiB, and {available / 2**30:.2f} GiB of host "
            "memory are free"
        )
        smaller = "" if config.use_8bit_optimizer else "set use_8bit_optimizer=True, or "
        raise ConfigurationError(f"memory=['{field}']: {sizes}; {smaller}leave it out")
    where = "" if on_card else ", from memory to memory, since there is no card"
    crossing = f"{size / 2**30:.2f} GiB come and go in every update{where}"
    return Decision(field, True, f"as asked, of {share:.1%} of the trained weights; {crossing}")
