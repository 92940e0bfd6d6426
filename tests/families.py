"""Tiny models of many families with random weights, and Batches of random documents."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import tiny
from chronicals.batch import IGNORED, Batch
from chronicals.config import ChronicalsConfig
from chronicals.data import create_dataloader
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.models import PresentedModel
from chronicals.quantization import Linear4bit

VOCABULARY = 61
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
JAMBA = {
    "attn_layer_offset": 1,
    "attn_layer_period": 2,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "num_experts": 2,
    "experts_implementation": "eager",  # the grouped product knows no fp64
    "mamba_d_state": 4,
    "mamba_dt_rank": 4,
}
IDS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
# Some versions of transformers take SDPA for Gemma 2, which leaves its softcap out; eager is the
# definition.
GEMMA2 = {
    "head_dim": 8,
    "sliding_window": 4,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 1.5,
}
GEMMA2 |= {"attn_implementation": "eager"}
MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}
# Queries grow from the fourth position on.
MINISTRAL3 = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 3,
}
MINISTRAL3 = {"head_dim": 8, "rope_parameters": {**MINISTRAL3, "llama_4_scaling_beta": 0.5}}
GPT_OSS = {
    "head_dim": 8,
    "experts_implementation": "eager",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 4,
}

# A factor of one, or an epsilon too small to see, would hide what is left out.
GRANITE = {
    "logits_scaling": 3.0,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}

FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", {**SIZES}),
    "qwen2": ("Qwen2", {**SIZES, "rms_norm_eps": 0.1}),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 8, "rms_norm_eps": 0.2}),
    "gemma": ("Gemma", {**SIZES, "head_dim": 8}),
    "gemma2": ("Gemma2", {**SIZES, **GEMMA2}),
    "gemma3": (
        "Gemma3",
        {
            **SIZES,
            "head_dim": 8,
            "sliding_window": 4,
            "rms_norm_eps": 0.1,
            "query_pre_attn_scalar": 20,
        },
    ),
    "phi3": ("Phi3", {**SIZES, "rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.5}}),
    "smollm3": ("SmolLM3", {**SIZES, "no_rope_layers": [1, 0]}),
    "olmo2": ("Olmo2", {**SIZES, "rms_norm_eps": 0.1}),
    "olmo3": ("Olmo3", {**SIZES, "sliding_window": 4}),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 4}),
    "ministral3": ("Ministral3", {**SIZES, **MINISTRAL3}),
    "gpt2": ("GPT2", {**GPT2, **IDS, **NO_DROPOUT}),
    "phi": ("Phi", {**SIZES}),
    "cohere": ("Cohere", {**SIZES, "logit_scale": 0.3, "layer_norm_eps": 0.1}),
    "granite": ("Granite", {**SIZES, **GRANITE}),
    "gpt_oss": ("GptOss", {**SIZES, **GPT_OSS}),
    "mamba": ("Mamba", {**MAMBA, **IDS}),
    "bloom": ("Bloom", {**BLOOM, **IDS}),
    "jamba": ("Jamba", {**SIZES, **JAMBA}),
}
"""Name of the classes in transformers, and sizes."""

PADDED = ["mamba", "bloom", "jamba"]
PACKABLE = [name for name in FAMILIES if name not in (*PADDED, "gpt_oss")]
"""gpt_oss can be packed too, but in fp32 its router may choose another expert for a rounding: it
is proved only.
"""


def configuration(family: str, **changes: Any) -> Any:
    import transformers

    name, sizes = FAMILIES[family]
    kind = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    return kind(**{**sizes, **changes})


def build(family: str, random: bool = True, **changes: Any) -> Any:
    """In training mode, in fp32, all parameters random: a norm of one or a bias of zero would
    hide what is left out.
    """
    import transformers

    name = FAMILIES[family][0]
    cls = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    model = cls(configuration(family, **changes)).float().train()
    return randomise(model) if random else model


MIXTURES: dict[str, tuple[str, dict]] = {
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **SIZES,
            "head_dim": 8,
            "moe_intermediate_size": 24,
            "num_experts": 5,
            "num_experts_per_tok": 2,
        },
    ),
    "gpt_oss": ("GptOss", {**SIZES, **GPT_OSS}),
}
"""Of experts as stacked parameters: two that hold them as [E, out, in], one as [E, in, out] with
biases.
"""


def mixture(name: str, seed: int = 0, **changes: Any) -> Any:
    """In evaluation mode, in fp32, all parameters random; the same for the same seed."""
    import transformers

    family, sizes = MIXTURES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = getattr(transformers, f"{family}Config")(**{**sizes, **changes})
        return randomise(getattr(transformers, f"{family}ForCausalLM")(config).float().eval())


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "experts_implementation": "eager"}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
DEEPSEEK = {
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
} | LATENT
ROUTED = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": {"num_experts": 4, "head_dim": 8},
    "Olmoe": {"num_experts": 4},
    "DeepseekV2": {"n_routed_experts": 4, "topk_method": "greedy"} | DEEPSEEK,
    "DeepseekV3": {"n_routed_experts": 4} | DEEPSEEK,
    "GptOss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4, "swiglu_limit": 0.7},
    "Glm4Moe": {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "head_dim": 8,
    },
}
"""Of the published mixtures: name of the classes in transformers, and sizes."""

GROUPED = {
    "DeepseekV2": {
        "n_routed_experts": 8,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
    },
    "DeepseekV3": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2},
    "Glm4Moe": {"n_routed_experts": 8, "n_group": 2, "topk_group": 1},
}
"""Of those that choose among the experts of some groups alone."""


@torch.no_grad()
def routed(name: str, **changes: Any) -> Any:
    """In evaluation mode, in fp32; all parameters random, and biases that correct the choice of
    experts, which would be as good as left out at zero."""
    import transformers

    config = getattr(transformers, f"{name}Config")(
        **{**SIZES, **EXPERTS, **ROUTED[name], **changes}
    )
    model = randomise(getattr(transformers, f"{name}ForCausalLM")(config).float().eval())
    for path, buffer in model.named_buffers():
        if path.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)
    return model


def minimax_m3(**changes: Any) -> Any:
    """A layer that attends to everything and one to the blocks that its indexer chooses."""
    from transformers import MiniMaxM3VLForCausalLM, MiniMaxM3VLTextConfig

    sizes = {key: value for key, value in GPT_OSS.items() if key != "sliding_window"} | {
        "rotary_dim": 4
    }
    sizes |= {
        "index_n_heads": 2,
        "index_head_dim": 8,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
    }
    config = MiniMaxM3VLTextConfig(**{**SIZES, **sizes, **changes})
    return randomise(MiniMaxM3VLForCausalLM(config).float().train())


@torch.no_grad()
def randomise(model: Any) -> Any:
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(
                std=0.7 * parameter[0].numel() ** -0.5
            )  # larger, and Mamba multiplies roundings
        else:
            parameter.uniform_(0.5, 1.5)
    return model


def random_rows(count: int = 12, longest: int = 40) -> list[dict]:
    """Documents of 2 tokens to ``longest``; both ends are among them. No token is 0, which fills
    packs up, and together they are no multiple of 8: whatever the packs are, of a width that is,
    some are to be filled up."""
    lengths = [2, longest, *torch.randint(2, longest + 1, (count - 2,)).tolist()]
    if sum(lengths) % 8 == 0:
        lengths[-1] += 1 if lengths[-1] < longest else -1
    return [{"input_ids": torch.randint(1, VOCABULARY, (length,)).tolist()} for length in lengths]


def loaded_batches(rows: list[dict], folder: Any, width: int = 48) -> list[Batch]:
    """Batches as a training run gets them."""
    config = ChronicalsConfig(
        max_seq_length=width,
        batch_size=2,
        gradient_accumulation_steps=1,
        num_epochs=1,
        cache_dir=folder,
    )
    return list(create_dataloader(rows, tiny.tokenizer(), config))


def documents(batch: Batch) -> list[slice]:
    """Where the documents are that have something to predict: not the filler."""
    bounds = batch.cu_seqlens.tolist()
    spans = [slice(a, b) for a, b in itertools.pairwise(bounds) if b > a]
    return [span for span in spans if (batch.targets[span] != IGNORED).any()]


def hand_made_batch(pieces: list[Tensor]) -> Batch:
    """The given documents end to end, every token a target but the first."""
    targets = [torch.cat((piece[1:], torch.tensor([IGNORED]))) for piece in pieces]
    positions = [torch.arange(len(piece)) for piece in pieces]
    bounds = torch.tensor([0, *(len(piece) for piece in pieces)]).cumsum(0).to(torch.int32)
    longest = max(len(piece) for piece in pieces)
    return Batch(torch.cat(pieces), torch.cat(targets), torch.cat(positions), bounds, longest)


def documents_batch(lengths: tuple[int, ...] = (7, 1, 12, 5)) -> Batch:
    """Random documents of these lengths, and an entry that is empty."""
    batch = hand_made_batch([torch.randint(1, VOCABULARY, (length,)) for length in lengths])
    return replace(batch, cu_seqlens=torch.cat((batch.cu_seqlens, batch.cu_seqlens[-1:])))


def gradients(model: Any, call: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Of every parameter, from the number that ``call`` returns."""
    model.zero_grad()
    call().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def distance(got: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest value."""
    return float((got - expected).detach().abs().max() / expected.detach().abs().max())


def states_and_gradients(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Hidden states of a packed model and the gradients of what it trains, by name."""
    with PresentedModel(model, packed=True, head_is_read=False).attending_documents() as presented:
        states = presented.hidden_states(batch)
    upstream = torch.randn(
        states.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    found = torch.autograd.grad(
        (states * upstream.to(states)).sum(), [p for _, p in named], allow_unused=True
    )
    return {
        "states": states.detach(),
        **{name: g for (name, _), g in zip(named, found) if g is not None},
    }


def assert_same(
    expected: dict[str, Tensor], got: dict[str, Tensor], tolerance: float = 3e-5
) -> None:
    """In fp64, where the classes themselves round to fp32 in their norms; the gradient of a
    key's bias is but rounding.
    """
    assert expected.keys() == got.keys()
    mean = torch.stack([x.norm() for x in expected.values()]).mean().item()
    for name, x in expected.items():
        assert (x - got[name]).norm().item() <= tolerance * max(x.norm().item(), 1e-2 * mean), name


def replaced(model: Any, make: Callable[[nn.Linear], nn.Module]) -> Any:
    """``model``, whose layers' linear layers are what ``make`` makes of them."""
    for path, layer in list(model.get_decoder().layers.named_modules()):
        if isinstance(layer, nn.Linear):
            parent, _, name = path.rpartition(".")
            setattr(model.get_decoder().layers.get_submodule(parent), name, make(layer))
    return model


def four_bit_pair(family: str, adapted: bool, **config: Any) -> tuple[Any, Any]:
    """A model in 4 bits and the plain one that it stands for, in fp64, with the same adapters."""
    model = build(family)
    plain = build(family)
    plain.load_state_dict(model.state_dict())
    (
        replaced(model, Linear4bit.of),
        replaced(plain, lambda layer: Linear4bit.of(layer).to(torch.float64).plain()),
    )
    return (
        adapted_alike(model, plain, **config)
        if adapted
        else tuple(map(frozen_codes, (model.double(), plain.double())))
    )


def adapted_alike(model: Any, plain: Any, **config: Any) -> tuple[Any, Any]:
    """Both in fp64, with the same adapters, which change something."""
    for one in (model.double(), plain.double()):
        torch.manual_seed(0)
        apply_lora(one, LoRAConfig(rank=4, dropout=0.0, **config))
        for name, p in frozen_codes(one).named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.1)
    return model, plain


def frozen_codes(model: Any) -> Any:
    for p in model.parameters():
        p.requires_grad_(p.requires_grad and p.is_floating_point())
    return model
