"""Which activations are made again: the fastest policy that fits, by an estimate of what a run holds."""

import pytest

import tiny
from chronicals.memory import CHEAP, LAYERS, NOTHING, Estimate, enable_gradient_checkpointing, estimate

GIB = 2**30


@pytest.mark.parametrize(
    ("total", "policy"), [(0, NOTHING), (200, NOTHING), (100, CHEAP), (60, LAYERS), (10, LAYERS)], ids=str
)  # fmt: skip
def test_the_fastest_that_fits(total, policy):
    kept = {NOTHING: 100 * GIB, CHEAP: 60 * GIB, LAYERS: 20 * GIB}
    assert Estimate(20 * GIB, kept, total * GIB).policy() == policy


def test_what_is_counted():
    """A token and layer of width 64, 4 query and 2 key heads of 16, inner width 96, in 16 bit; 300 tokens of vocabulary."""
    model = tiny.llama()
    model.get_input_embeddings().requires_grad_(False)
    found = estimate(model, 1000, True, 2, 2, 14, 4352)
    frozen = model.get_input_embeddings().weight.numel()
    assert found.fixed == 2 * frozen + 14 * (sum(p.numel() for p in model.parameters()) - frozen)
    whole, cheap = 2 * (4 * 64 + 16 * (2 * 4 + 2 * 2) + 3 * 96), 2 * (2 * 64 + 16 * (2 * 4 + 2 * 2) + 2 * 96)
    loss = 300 * 64 * 4 + 1000 * 300 * 2
    assert found.activations[NOTHING] == 1000 * 2 * whole + loss
    assert found.activations[CHEAP] == 1000 * 2 * cheap + loss
    assert CHEAP not in estimate(model, 1000, False, 2, 2, 14, 4352).activations
    assert (
        estimate(model, 1000, True, 4, 2, 14, 4352).activations[NOTHING] == 2 * 1000 * 2 * whole + 300 * 64 * 4 + 1000 * 300 * 4
    )
    fewer = estimate(model, 1000, True, 2, 2, 14, 100)
    assert found.activations[NOTHING] - fewer.activations[NOTHING] == 900 * 300 * 2
    assert found.policy() == NOTHING and found.words() == "not on a card"


def test_a_class_that_cannot_is_named():
    model = tiny.llama()
    model.supports_gradient_checkpointing = False
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot recompute"):
        enable_gradient_checkpointing(model)
