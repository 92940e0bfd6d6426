"""Layers of decode steps attend from their first product on, without kernels of rotation and pages."""

import pytest
import torch

import families
from chronicals.generation import Engine, EngineSettings, Request
from chronicals.kernels import decode_attention
from chronicals.patching import patch_parts
from interpreted import counted_launches, kernels_run, only_interpreted

WIDE = {"hidden_size": 128}
"""Heads of 32 channels, the narrowest that the kernel takes."""

MODELS = {
    "llama": ("llama", WIDE),
    "qwen3": ("qwen3", WIDE | {"head_dim": 32}),
    "gemma": ("gemma", WIDE | {"head_dim": 32}),
    "mistral": ("mistral", WIDE | {"head_dim": 32, "sliding_window": 4}),
    "heads of a 0.5B": (
        "qwen2",
        {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2},
    ),
    "heads of an 8B": (
        "llama",
        {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    ),
}
"""Family, and what of its configuration is another one here."""

LENGTHS = (3, 12, 7)
NEW = 3


def fused(family, layers=1, **changes):
    model = families.build(family, num_hidden_layers=layers, **changes).eval()
    model.generation_config.eos_token_id = None
    patch_parts(model, whole_layers=True)
    return model


def answers(model):
    """Greedy tokens of unequal prompts, their log-probabilities, and launches of all kernels."""
    torch.manual_seed(0)
    prompts = [torch.randint(1, families.VOCABULARY, (n,)).tolist() for n in LENGTHS]
    with kernels_run(), counted_launches() as launches:
        found = Engine(model, EngineSettings(slots=8)).generate(
            [Request(prompt, NEW, number=n) for n, prompt in enumerate(prompts)]
        )
    answered = [one for (one,) in found]
    values = torch.tensor([one.full_log_probabilities for one in answered])
    return [one.tokens for one in answered], values, launches


@only_interpreted
@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("model", MODELS)
def test_a_step_attends_from_the_first_product(model, set_constants):
    family, changes = MODELS[model]
    model = fused(family, **changes)
    tokens, values, launches = answers(model)
    set_constants(decode_attention, NARROWEST=1024)
    expected, wanted, apart = answers(model)
    layers = apart["_paged_attention_kernel"]
    assert layers and layers % len(model.model.layers) == 0
    assert launches["_decode_attention_kernel"] == layers
    assert not launches["_paged_attention_kernel"] and not apart["_decode_attention_kernel"]
    more = apart - launches
    assert more["_write_pages_kernel"] == layers
    assert more["_qk_rope_kernel"] + more["_qk_norm_rope_forward_kernel"] == layers
    assert tokens == expected
    torch.testing.assert_close(values, wanted, atol=2e-5, rtol=0)
