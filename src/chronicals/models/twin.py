"""Twins: small random models of a class and configuration that show properties of the class.

They are in fp32 on the CPU, with small sizes and few layers, but at least one layer of every type
that the model has. All parameters are random: a norm weight of one or a bias of zero would hide an
operation that ignores it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from chronicals.models.twin_layers import cut_layers, settable

_SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "n_inner": 96,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_heads": 4,
    "head_dim": 16,
    "sliding_window": 5,
    "attention_chunk_size": 5,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 16,
    "max_position_embeddings": 128,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rotary_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "floor_scale": 4,
    "index_topk": 4,
    "index_block_size": 2,
    "index_topk_blocks": 1,
    "index_local_blocks": 1,
    "index_kpool": 2,
    "mamba_n_heads": 4,
    "n_mamba_heads": 4,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "decoder_vocab_size": 97,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
}
"""Sizes of a twin, set for those fields that a configuration has."""

DERIVED_SIZES: dict[str, Callable[[Any], int]] = {
    "attention_hidden_size": lambda text: 2 * text.hidden_size,
    "attention_head_dim": lambda text: 2 * text.hidden_size // text.num_attention_heads,
    "embedding_dim": lambda text: text.hidden_size,
    "kv_channels": lambda text: text.hidden_size // text.num_attention_heads,
    "mamba_d_head": lambda text: text.mamba_expand * text.hidden_size // text.mamba_n_heads,
    "mamba_d_ssm": lambda text: text.mamba_expand * text.hidden_size,
    "mamba_headdim": lambda text: text.mamba_expand * text.hidden_size // text.n_mamba_heads,
    "num_query_groups": lambda text: text.num_attention_heads,
    "qk_head_dim": lambda text: text.qk_nope_head_dim + text.qk_rope_head_dim,
}
"""Sizes that a configuration derives from others when it is created; they must stay consistent."""

WIDTHS = ("hidden_size", "n_embd", "d_model")
SMALL_ENOUGH = 128
"""Width up to which a configuration keeps its sizes, which fit each other already."""

LATE = 4
"""Position from which Llama 4 scales queries, low enough for a twin's documents to reach it."""

IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FIRST_TOKEN = len(IDS)
"""Lowest random token id; ids below it are special tokens."""

LARGEST = 50_000_000
"""Most parameters of a twin; a larger one has size fields that ``_SMALL`` does not know."""

DROPOUTS = (
    "attention_dropout",
    "attn_pdrop",
    "resid_pdrop",
    "embd_pdrop",
    "hidden_dropout",
    "dropout",
)


def twin_config(config: Any) -> Any:
    """Return a copy of the configuration with small sizes and few layers, one of every kind it has.

    Raises:
        AttributeError, TypeError, ValueError, RuntimeError: the configuration refuses small sizes.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    overrides: dict[int, dict[str, Any]] = {}
    if getattr(text, "is_heterogeneous", False):
        # While a configuration has fields by layer, reading one of these fields raises an error.
        by_layer = text.to_dict()["per_layer_config"]
        overrides = {int(index): fields for index, fields in by_layer.items()}
        text.per_layer_config = None
    if not any(
        isinstance(getattr(text, name, None), int) and getattr(text, name) <= SMALL_ENOUGH
        for name in WIDTHS
    ):
        usual = {
            name: getattr(text, name, None) for fields in overrides.values() for name in fields
        }
        _smaller(text)
        # A layer's own sizes keep the ratio that they have to the usual ones of the model.
        for index, fields in overrides.items():
            overrides[index] = {
                name: _in_ratio(getattr(text, name, None), value, usual[name])
                for name, value in fields.items()
            }
    rope = getattr(text, "rope_parameters", None)
    if isinstance(rope, dict) and rope.get("llama_4_scaling_beta"):
        rope["original_max_position_embeddings"] = LATE
    for name, value in IDS.items():
        if getattr(text, name, None) is not None:
            setattr(text, name, value)
    overrides = cut_layers(text, overrides)
    if overrides:
        text.per_layer_config = overrides
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is None or part is text:
            continue
        # A vision or audio tower gets few layers; its widths stay, as the text model expects them.
        for count in ("num_hidden_layers", "depth", "num_layers", "encoder_layers"):
            if isinstance(getattr(part, count, None), int) and settable(part, count):
                setattr(part, count, min(getattr(part, count), 2))
    for name in DROPOUTS:
        if isinstance(getattr(text, name, None), float):
            setattr(text, name, 0.0)
    return config


def _in_ratio(small: Any, value: Any, usual: Any) -> Any:
    """Return ``small`` times the power of two nearest to ``value / usual``.

    ``value`` is returned unchanged if one of the three is not a size.
    """
    sizes = [
        number
        for number in (small, value, usual)
        if isinstance(number, int) and not isinstance(number, bool)
    ]
    if len(sizes) < 3 or min(sizes) < 1 or small == usual:
        return value
    steps = round(math.log2(value / usual))
    return max(1, small << steps if steps >= 0 else small >> -steps)


def _smaller(text: Any) -> None:
    grouped = getattr(text, "num_key_value_heads", None) not in (
        None,
        getattr(text, "num_attention_heads", None),
    )
    for name, value in _SMALL.items():
        given = getattr(text, name, None)
        if isinstance(given, int) and settable(text, name):
            setattr(text, name, value)
        # One size for each layer.
        elif isinstance(given, list) and given and all(isinstance(size, int) for size in given):
            setattr(text, name, [_in_ratio(value, size, given[0]) for size in given])
    if isinstance(getattr(text, "num_key_value_heads", None), int) and settable(
        text, "num_key_value_heads"
    ):
        text.num_key_value_heads = 2 if grouped else 4
    # Latent attention: the rotary table is as wide as the rotated part of a head.
    if hasattr(text, "qk_rope_head_dim"):
        if isinstance(getattr(text, "head_dim", None), int) and settable(text, "head_dim"):
            text.head_dim = text.qk_rope_head_dim
    elif getattr(text, "head_dim", 0) is None and settable(text, "head_dim"):
        text.head_dim = text.hidden_size // text.num_attention_heads
    # Mamba 2
    if isinstance(getattr(text, "expand", None), int) and isinstance(
        getattr(text, "num_heads", None), int
    ):
        text.head_dim = text.expand * text.hidden_size // text.num_heads
        text.n_groups = math.gcd(text.n_groups, text.num_heads)
    for name, compute in DERIVED_SIZES.items():
        if isinstance(getattr(text, name, None), int) and settable(text, name):
            setattr(text, name, compute(text))
    rope = getattr(text, "rope_parameters", None)
    # Multimodal RoPE: time, height and width divide the rotated pairs of a head.
    if isinstance(rope, dict) and rope.get("mrope_section"):
        pairs = (
            getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        ) // 2
        pairs = int(pairs * rope.get("partial_rotary_factor", 1.0))
        rope["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]


def build_twin(cls: Any, config: Any) -> Any:
    """Build the twin of ``cls`` in evaluation mode; call within ``plain_surroundings``.

    Args:
        cls: a class of causal language models.
        config: a configuration from ``twin_config``.

    Raises:
        ValueError: the twin would be too large.
    """
    config._attn_implementation = "eager"  # the reference: SDPA ignores some options
    config._experts_implementation = "eager"  # grouped matrix products do not support fp64
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in cls(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"its twin would have {size:,} parameters; {LARGEST:,} are the most")
    twin = cls(config).float().eval()
    randomise(twin)
    return twin


def randomise(twin: torch.nn.Module) -> None:
    """Draw all parameters: matrices scaled by their input size, vectors from 0.5 to 1.5."""
    for parameter in twin.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)


@contextmanager
def plain_surroundings() -> Iterator[None]:
    """A context with gradients on, autocast off, CPU, fp32 and its own random numbers.

    The caller's settings are restored afterwards.
    """
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
        ):
            # torch.manual_seed would also seed every GPU, which nothing restores.
            torch.default_generator.manual_seed(0)
            yield
    finally:
        torch.set_default_dtype(usual)
