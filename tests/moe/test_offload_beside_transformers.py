"""Offloaded experts beside the class of transformers with all experts in place."""

import copy

import pytest
import torch

import chronicals
import families
import mixtures
from chronicals.moe.model import CACHE
from chronicals.patching.patch import patch_parts

COUNT = {"Mixtral": "num_local_experts", "GptOss": "num_local_experts"}
COUNT |= dict.fromkeys(("DeepseekV2", "DeepseekV3", "Glm4Moe"), "n_routed_experts")
FAMILIES = [*families.ROUTED, "native"]
SLOTS = 6


def build(name):
    if name == "native":
        return mixtures.mixture(num_experts=8, num_hidden_layers=2)
    return families.routed(name, **{COUNT.get(name, "num_experts"): 8})


def offloaded(model):
    """A copy with six slots, run by products and fused parts."""
    size = sum(
        p.nbytes // 8
        for path, p in model.named_parameters()
        if ".1.mlp.experts." in path  # the first layer of some has none
    )
    streamed = chronicals.offload(
        copy.deepcopy(model), vram=SLOTS * size + size // 2, ram="1GiB", device="cpu"
    )
    patch_parts(streamed)
    return streamed


def logits_of(model, prompts):
    """Logits of prompts, and of one more token behind the cache of each."""
    found = []
    for ids in prompts:
        first = model(ids, use_cache=True)
        cache = {CACHE: getattr(first, CACHE)}
        found += [first.logits, model(ids[:, -1:], **cache).logits]
    return torch.cat([logits.float().flatten() for logits in found])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_logits(name):
    """Within 1e-5 of the largest in fp32, and by 2 % of their norm in bf16.

    The native model in fp32 alone: it is no class of transformers, and with such weights a rounding
    lets its routers choose other experts.
    """
    prompts = [torch.randint(2, families.VOCABULARY, (2, tokens)) for tokens in (1, 2, 21)]
    model = build(name)
    for dtype in (torch.float32, torch.bfloat16)[: 1 if name == "native" else 2]:
        model = model.to(dtype)
        streamed = offloaded(model)
        expected, got = logits_of(model, prompts), logits_of(streamed, prompts)
        if dtype == torch.float32:
            assert (got - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)
        else:
            assert 0 < (got - expected).norm() <= 2e-2 * expected.norm()
        assert streamed.offload.report().misses > 0
        streamed.offload.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_text_of_generate(name):
    """In fp32 the same 32 tokens as transformers' own generate gives with its own experts."""
    model = build(name)
    streamed = offloaded(model)
    ids = torch.randint(2, families.VOCABULARY, (1, 7))
    given = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    texts = [
        one.generate(ids, attention_mask=torch.ones_like(ids), **given) for one in (model, streamed)
    ]
    assert texts[0].shape == (1, 39) and torch.equal(*texts)
    streamed.offload.close()
