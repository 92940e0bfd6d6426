"""Built-in shapes and documents, for measuring without a download.

Weights and tokens are random.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class BuiltIn:
    """A built-in model shape, and the default sizes of its benchmark.

    Attributes:
        config_class: class of the transformers configuration.
        sizes: its fields.
        batch_size: packs of a step.
        max_seq_length: tokens of a pack.
        steps: sampled steps of a round.
    """

    config_class: str
    sizes: dict[str, Any]
    batch_size: int
    max_seq_length: int
    steps: int


SHAPES = {
    "qwen2.5-0.5b": BuiltIn(
        "Qwen2Config",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        batch_size=8,
        max_seq_length=2048,
        steps=20,
    ),
    "llama-3.1-8b": BuiltIn(
        "LlamaConfig",
        {
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
        },
        batch_size=4,
        max_seq_length=2048,
        steps=8,
    ),
    "qwen3-8b": BuiltIn(
        "Qwen3Config",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        batch_size=4,
        max_seq_length=2048,
        steps=8,
    ),
    # 8 of its 48 layers: 5.6 billion weights, of which a token meets a ninth.
    "qwen3-30b-a3b": BuiltIn(
        "Qwen3MoeConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_hidden_layers": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        batch_size=8,
        max_seq_length=2048,
        steps=10,
    ),
    "olmoe-1b-7b": BuiltIn(
        "OlmoeConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "vocab_size": 50304,
            "tie_word_embeddings": False,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "rms_norm_eps": 1e-5,
        },
        batch_size=4,
        max_seq_length=2048,
        steps=10,
    ),
    "tiny": BuiltIn(
        "Qwen2Config",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 1024,
            "tie_word_embeddings": True,
            "max_position_embeddings": 512,
        },
        batch_size=2,
        max_seq_length=64,
        steps=4,
    ),
}

BUILT_IN_DATA = ("fixed", "ragged")
"""Names of documents that are made here."""

# Lengths of ragged documents are lognormal, and no longer than a pack.
MEDIAN_LENGTH = 400
LENGTH_SPREAD = 0.8
SHORTEST_LENGTH = 32

BYTE_TOKENS = 256
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
"""Special tokens of the tokenizers; their ids follow those of the bytes."""


def build_model(name: str, folder: Path, device: str) -> None:
    """Write a built-in shape to ``folder``.

    It has random bf16 weights (seed 0) and a tokenizer of bytes.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    shape = SHAPES[name]
    config = getattr(transformers, shape.config_class)(**shape.sizes)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def byte_tokenizer() -> Any:
    """Return a tokenizer whose vocabulary is the bytes and the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    for special in SPECIAL_TOKENS:
        vocabulary[special] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|pad|>"
    )


def word_tokenizer(vocabulary: int) -> Any:
    """Return a tokenizer of words ``t`` and their id, separated by white space.

    It has the special tokens of ``byte_tokenizer``.

    Args:
        vocabulary: number of words and special tokens.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{number}": number for number in range(vocabulary)}
    for number, special in enumerate(SPECIAL_TOKENS, BYTE_TOKENS):
        del words[f"t{number}"]
        words[special] = number
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token=SPECIAL_TOKENS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|pad|>"
    )


def zipf_ids(draws: np.ndarray, vocabulary: int) -> list[int]:
    """Return token ids exp(u · ln V) for each u of ``draws``, from 0 to 1; none is special."""
    ids = np.exp(draws * math.log(vocabulary - 1)).astype(np.int64)
    ids[(ids >= BYTE_TOKENS) & (ids < BYTE_TOKENS + len(SPECIAL_TOKENS))] -= len(SPECIAL_TOKENS)
    return np.minimum(ids, vocabulary - 1).tolist()


def random_documents(
    data: str, tokens: int, width: int, vocabulary: int, seed: int = 1
) -> list[list[int]]:
    """Make documents of ``width`` tokens (``fixed``) or of lognormal lengths (``ragged``).

    Together they have at least ``tokens`` tokens. A token id is exp(u · ln V) with u uniform, so
    frequencies fall as in Zipf's law. There are no special tokens.

    Args:
        data: ``fixed`` or ``ragged``.
        tokens: of all documents, at least.
        width: tokens of a pack, which no document exceeds.
        vocabulary: V, size of the vocabulary.
        seed: of the generator.
    """
    generator = np.random.default_rng(seed)
    documents: list[list[int]] = []
    shortest = min(SHORTEST_LENGTH, width // 8)
    median = min(MEDIAN_LENGTH, width // 4)
    while tokens > 0:
        drawn = int(np.exp(generator.normal(math.log(median), LENGTH_SPREAD)))
        length = width if data == "fixed" else min(max(drawn, shortest), width)
        documents.append(zipf_ids(generator.random(length), vocabulary))
        tokens -= length
    return documents
