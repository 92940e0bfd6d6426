"""What each expert of a model is multiplied with."""

import pytest
import torch

import gguf_models
from chronicals.models.routed_experts import watch_experts
from comparison import equal

IDS = torch.randint(0, 300, (1, 17))


def watched(model, through, ids=IDS):
    undo = watch_experts(model, through)
    try:
        with torch.no_grad():
            return model(ids).logits
    finally:
        undo()


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"])
def test_every_row_passes_through_its_experts(name):
    """Each token in as many experts as it has, once into the first product and once into the
    second; nothing changes.
    """
    model = gguf_models.build(name)
    rows = {}

    def through(path, expert, x):
        rows[path] = rows.get(path, 0) + len(x)
        return x

    with torch.no_grad():
        plain = model(IDS).logits
    assert torch.allclose(watched(model, through), plain, atol=1e-4)
    expected = {
        f"model.layers.{n}.mlp.experts.{part}": 34
        for n in range(2)
        for part in ("gate_up_proj", "down_proj")
    }
    assert rows == expected
    with torch.no_grad():
        assert equal(model(IDS).logits, plain) and sum(rows.values()) == 4 * 34


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_what_an_expert_is_given_is_told_by_its_number(name):
    model = gguf_models.build(name)
    experts = model.model.layers[1].mlp.experts
    seen = []
    x = torch.randn(3, 64)
    undo = watch_experts(
        model, lambda path, expert, given: seen.append((path, expert, given)) or given
    )
    experts(
        x,
        torch.tensor([[2, 0], [2, 3], [1, 2]]),
        torch.ones(3, 2) if name == "mixtral" else torch.ones(3, 4),
    )
    undo()
    first = {
        expert: given
        for path, expert, given in seen
        if path == "model.layers.1.mlp.experts.gate_up_proj"
    }
    assert {number: len(given) for number, given in first.items()} == {0: 1, 1: 1, 2: 3, 3: 1}
    assert equal(first[2], x) and equal(first[3], x[1:2]) and equal(first[0], x[:1])


def test_what_is_given_back_is_what_is_multiplied():
    model = gguf_models.build("qwen3_moe")
    without = watched(
        model, lambda path, expert, x: torch.zeros_like(x) if path.endswith("down_proj") else x
    )
    for layer in model.model.layers:
        layer.mlp.experts.down_proj.data.zero_()
    with torch.no_grad():
        assert torch.allclose(without, model(IDS).logits, atol=1e-5)
