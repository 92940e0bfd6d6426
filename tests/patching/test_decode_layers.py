"""Layers of decode steps attend from their first product on, without kernels of rotation and pages."""

from dataclasses import replace

import pytest
import torch

import families
from chronicals.generation import Engine, EngineSettings, Request, Sampling
from chronicals.generation.sharing import PromptSharing
from chronicals.kernels import decode_attention
from chronicals.lora import LoRAConfig, apply_lora
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


def answers(model, of_each=1):
    """Drawn tokens of unequal prompts, their log-probabilities, and launches of all kernels."""
    torch.manual_seed(0)
    prompts = [torch.randint(1, families.VOCABULARY, (n,)).tolist() for n in LENGTHS]
    asked = [
        Request(prompt, NEW, Sampling(1.0, seed=3), of_each, number=n)
        for n, prompt in enumerate(prompts)
    ]
    with kernels_run(), counted_launches() as launches:
        found = Engine(model, EngineSettings(slots=8, page_size=4)).generate(asked)
    answered = [one for group in found for one in group]
    values = torch.tensor([one.full_log_probabilities for one in answered])
    return [one.tokens for one in answered], values, launches


@only_interpreted
@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("model", MODELS)
def test_a_step_attends_from_the_first_product(model, set_constants):
    family, changes = MODELS[model]
    model = fused(family, **changes)
    assert_attends_from_the_first_product(model, set_constants)


@only_interpreted
@pytest.mark.slow
def test_adapters_leave_room_behind_what_attention_gives(set_constants):
    """For their own products, in columns behind each row."""
    model = fused("llama", **WIDE)
    apply_lora(model, LoRAConfig(rank=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    assert_attends_from_the_first_product(model, set_constants)


@only_interpreted
@pytest.mark.slow
def test_a_prompt_that_answers_share_is_read_once(set_constants, monkeypatch):
    """In the layer without a window; the other one, with a window, reads the keys of each answer."""
    usual = PromptSharing.of
    monkeypatch.setattr(PromptSharing, "of", lambda layers: replace(usual(layers), worth=1))
    model = fused("gemma2", layers=2, head_dim=32)
    launches = assert_attends_from_the_first_product(model, set_constants, of_each=2)
    assert 2 * launches["_shared_keys_kernel"] == launches["_decode_attention_kernel"]


def assert_attends_from_the_first_product(model, set_constants, of_each=1):
    """Compare answers with those of kernels apart, and return the launches of kernels."""
    tokens, values, launches = answers(model, of_each)
    set_constants(decode_attention, NARROWEST=1024)
    expected, wanted, apart = answers(model, of_each)
    layers = apart["_paged_attention_kernel"]
    assert layers and layers % len(model.model.layers) == 0
    assert launches["_decode_attention_kernel"] == layers
    assert not launches["_paged_attention_kernel"] and not apart["_decode_attention_kernel"]
    more = apart - launches
    assert more["_write_pages_kernel"] == layers
    assert more["_qk_rope_kernel"] + more["_qk_norm_rope_forward_kernel"] == layers
    assert tokens == expected
    torch.testing.assert_close(values, wanted, atol=2e-5, rtol=0)
    return launches
