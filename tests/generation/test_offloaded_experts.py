"""Generation with experts in host memory: the same tokens as with all of them on the device."""

import copy

import pytest
import torch

import chronicals
import families
from chronicals.generation.engine import Engine
from chronicals.generation.requests import Request
from chronicals.generation.sampling import Sampling
from chronicals.moe import ChronicalsMoeConfig, ChronicalsMoeForCausalLM
from chronicals.patching.patch import patch_parts

NEW = 64


def resident(model):
    same = copy.deepcopy(model)
    patch_parts(same)
    return same


def offloaded(model, kib, **options):
    size = int(kib * 1024)
    same = chronicals.offload(copy.deepcopy(model), vram=size, ram="1GiB", device="cpu", **options)
    patch_parts(same)
    return same


def native():
    torch.manual_seed(2)
    config = ChronicalsMoeConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        moe_intermediate_size=16,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        sliding_window=16,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return families.randomise(ChronicalsMoeForCausalLM(config).float().eval())


def greedy(model, ids):
    given = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **given)


MODELS = {
    "qwen3": lambda: families.routed("Qwen3Moe", num_experts=8),
    "gpt-oss": lambda: families.routed("GptOss", num_local_experts=8),
    "native": native,
}
OTHERS = {
    "mixtral": lambda: families.routed("Mixtral", num_local_experts=8),
    "qwen2": lambda: families.routed("Qwen2Moe", num_experts=8),
    "olmoe": lambda: families.routed("Olmoe", num_experts=8),
    "deepseek-v2": lambda: families.routed("DeepseekV2", n_routed_experts=8),
    "deepseek-v3": lambda: families.routed("DeepseekV3", n_routed_experts=8),
    "glm-4": lambda: families.routed("Glm4Moe", n_routed_experts=8),
}
SLOTS = 6
"""A quarter to three quarters of a model's experts."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_sixty_four_greedy_tokens_are_the_same(name):
    model = {**MODELS, **OTHERS}[name]()
    ids = torch.randint(1, families.VOCABULARY, (2, 9))
    expected = greedy(resident(model), ids)
    whole = offloaded(model, 1024)
    kib = SLOTS * whole.offload.engine.slot_bytes / 1024
    whole.offload.close()
    streamed = offloaded(model, kib)
    got = greedy(streamed, ids)
    assert got.shape == (2, 9 + NEW) and torch.equal(got, expected)
    report = streamed.offload.report()
    assert report.slots == SLOTS and report.misses > 0 and report.fallback_mass == 0
    streamed.offload.close()


@pytest.mark.slow
def test_the_engine_serves_it():
    model = MODELS["qwen3"]()
    prompts = [torch.randint(1, families.VOCABULARY, (length,)).tolist() for length in (3, 11, 6)]
    requests = [Request(prompt, NEW, Sampling(temperature=0.0)) for prompt in prompts]
    streamed = offloaded(model, 40)
    answers = [
        [one.tokens for answer in Engine(given).generate(requests) for one in answer]
        for given in (resident(model), streamed)
    ]
    assert answers[0] == answers[1] and all(len(tokens) == NEW for tokens in answers[0])
    streamed.offload.close()
