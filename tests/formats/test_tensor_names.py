"""Names of weights in a model's files, and their places in the loaded model."""

import torch

from chronicals.formats.tensor_names import DOWN, GATE, UP, Expert, stack_named


def test_names_of_experts():
    assert Expert.named("model.layers.3.mlp.experts.11.up_proj.weight") == Expert(3, 11, UP)
    for name, role in (("w1", GATE), ("w2", DOWN), ("w3", UP)):
        assert Expert.named(f"model.layers.0.block_sparse_moe.experts.2.{name}.weight") == Expert(
            0, 2, role
        )
    assert Expert.named("model.layers.3.mlp.shared_expert.up_proj.weight") is None
    assert Expert.named("model.layers.3.mlp.experts.1.up_proj.bias") is None
    assert (
        stack_named("model.layers.3.mlp.experts.gate_up_proj")
        == Expert(3, 5, GATE).stack
        == (3, "gate_up_proj")
    )
    assert stack_named("model.layers.3.mlp.experts.gate_up_proj_bias") is None
    stack = torch.arange(24).view(2, 4, 3)
    assert (
        Expert(0, 1, GATE).within(stack)[0, 0] == 12 and Expert(0, 1, UP).within(stack)[0, 0] == 18
    )
