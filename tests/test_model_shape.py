"""Sizes of a model, whatever its configuration calls them and wherever it has them."""

import subprocess
import sys

import pytest
import transformers

from chronicals.models import ModelShape

LLAMA = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 100,
    "vocab_size": 77,
}


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (transformers.LlamaConfig(**LLAMA), ModelShape(3, 48, 6, 2, 8, 100, 77, 0)),
        (transformers.LlamaConfig(**LLAMA, head_dim=16), ModelShape(3, 48, 6, 2, 16, 100, 77, 0)),
        (
            transformers.GPT2Config(n_layer=3, n_embd=48, n_head=6, vocab_size=77),
            ModelShape(3, 48, 6, 6, 8, 192, 77, 0),
        ),
        (
            transformers.MixtralConfig(**LLAMA, num_local_experts=5),
            ModelShape(3, 48, 6, 2, 8, 100, 77, 5),
        ),
        (
            transformers.LlavaConfig(text_config=transformers.LlamaConfig(**LLAMA)),
            ModelShape(3, 48, 6, 2, 8, 100, 77, 0),
        ),
        (LLAMA, ModelShape(3, 48, 6, 2, 8, 100, 77, 0)),
        (
            {"num_attention_heads": 1, "text_config": {**LLAMA, "head_dim": 16}},
            ModelShape(3, 48, 6, 2, 16, 100, 77, 0),
        ),
        ({}, ModelShape(0, 0, 0, 0, 0, 0, 0, 0)),
    ],
    ids=[
        "missing head_dim",
        "head_dim",
        "other names, no key heads",
        "experts",
        "nested",
        "json",
        "nested json",
        "empty",
    ],
)
def test_sizes_are_read(config, shape):
    assert ModelShape.of(config) == shape


def test_what_has_no_single_size_is_zero():
    shape = ModelShape.of(transformers.MambaConfig(num_hidden_layers=2, hidden_size=32))
    assert (shape.layers, shape.width, shape.heads, shape.head_dim) == (2, 32, 0, 0)


@pytest.mark.slow
def test_it_is_read_before_torch_is_there():
    program = (
        "import sys, chronicals.model_shape, chronicals.cli.train, chronicals.precompilation; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.skipif(
    not hasattr(transformers, "Gemma4TextConfig"), reason="this transformers has no Gemma 4"
)
def test_a_size_that_differs_by_layer_is_none():
    """Of Gemma 4, whose layers with full attention have wider heads."""
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 6,
        "head_dim": 8,
        "global_head_dim": 32,
    }
    shape = ModelShape.of(transformers.Gemma4TextConfig(**sizes))
    assert (shape.layers, shape.width, shape.heads, shape.head_dim) == (6, 64, 4, 16)
