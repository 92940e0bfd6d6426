"""Small models, a tokenizer and rows that every test may use; made, never downloaded."""

import functools
from typing import Any

import torch

from chronicals.data.tokens.tokenizer_training import train_tokenizer

TEXTS = [
    "hello world",
    "what is the answer to everything?",
    "the answer to life is forty two",
    "0 1 2 3 4 5 6 7 8 9",
]


@functools.cache
def _tokenizer_json() -> Any:
    return train_tokenizer(TEXTS * 20, vocab_size=300)


def tokenizer() -> Any:
    """ChatML, ``pad_token = eos_token``; a fresh copy, free to change."""
    import copy

    return copy.deepcopy(_tokenizer_json())


def chat_rows(count: int = 60) -> list[dict]:
    """Questions with answers of different lengths."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"what is {n}?"},
                {
                    "role": "assistant",
                    "content": f"the answer to {n} is " + "very " * (n % 7) + str(2 * n),
                },
            ]
        }
        for n in range(count)
    ]


def llama(seed: int = 0, **changes: Any) -> Any:
    """A Llama of about 100,000 parameters in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))


PLANNED = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
"""Sizes of a Llama of 0.35 B parameters, which is large enough that its plans say something."""


def planned(**changes: Any) -> Any:
    """A Llama of sizes ``PLANNED``, names and shapes only."""
    with torch.device("meta"):
        return llama(**{**PLANNED, **changes})
