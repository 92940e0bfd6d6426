"""Few tokens multiply offloaded experts in their slots, with the bits of those in their place."""

import copy

import pytest
import torch
from test_expert_offload import EACH, EXPERTS, FORMATS, SIZES, build, layers_of, offloaded, resident

from interpreted import counted_launches, kernels_run, only_interpreted

pytestmark = [only_interpreted, pytest.mark.slow]


def experts_of(model):
    return [module for _, module in layers_of(model)]


def run(modules, x, chosen, shares):
    """The outputs of a token's experts in each layer, and how many products were in place."""
    with torch.no_grad(), kernels_run(), counted_launches() as launches:
        found = [module(x, chosen, shares) for module in modules]
    return found, launches["_few_tokens_kernel"]


@pytest.mark.parametrize(
    ("name", "form"),
    [("Qwen3Moe", "16 bit"), ("Qwen3Moe", "nf4"), ("GptOss", "mxfp4"), ("Qwen3Moe", "fp8")],
)
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_same_bits_from_slots(name, form, tokens):
    sizes = {**SIZES, "hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64}
    model = build(name, **sizes).bfloat16()
    if form in FORMATS:
        FORMATS[form](model)
    model.bfloat16()
    expected = resident(copy.deepcopy(model))
    x = torch.randn(tokens, 64).bfloat16()
    shares, chosen = torch.rand(tokens, EXPERTS).topk(EACH)
    wanted, in_place = run(experts_of(expected), x, chosen, shares)
    assert in_place == 2 * len(wanted)  # both products of each layer
    for slots in (EACH + 2, EXPERTS + 1):
        streamed = offloaded(model, slots)
        modules = [streamed.get_submodule(path) for path, _ in layers_of(model)]
        for _ in range(2):  # with empty slots, and with those of the pass before
            got, from_slots = run(modules, x, chosen, shares)
            assert from_slots >= in_place
            for one, other in zip(got, wanted):
                assert torch.equal(one, other)
        streamed.offload.close()
