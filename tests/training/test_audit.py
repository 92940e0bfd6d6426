"""What the first step trained, and what it did not."""

import torch
from torch import nn

from chronicals.moe.lookahead import LayerAhead
from chronicals.optimizers import FusedAdamW
from chronicals.training.audit import FirstStepAudit


class Adapted(nn.Module):
    """An adapter that is used if its gate is not zero."""

    def __init__(self, b: float, gate: float):
        super().__init__()
        self.lora_A, self.lora_B = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.full((3, 2), b))
        self.gate = gate

    def forward(self, x):
        return self.gate * x @ self.lora_A.T @ self.lora_B.T


def audited(model):
    optimizer = FusedAdamW(model.parameters(), lr=0.1)
    watching = FirstStepAudit(model, optimizer)
    sum(layer(torch.ones(1, 3)).sum() for layer in model.children()).backward()
    watching.see_gradients()
    optimizer.step()
    return watching.coverage()


def test_an_a_matrix_waits_only_for_a_b_that_learns():
    """One whose adapter is not used waits for nothing: it is idle, as its B is."""
    found = audited(nn.ModuleDict({"used": Adapted(0.0, 1.0), "unused": Adapted(0.0, 0.0)}))
    assert found.waiting == 6 and found.with_gradient == 6
    assert found.idle == ("unused.lora_A", "unused.lora_B")


def test_an_a_matrix_beside_a_b_that_is_not_zero_does_not_wait():
    """As in an adapter that is trained on: that its A has no gradient is a fault."""
    model = nn.ModuleDict({"used": Adapted(0.5, 1.0)})
    model["used"].lora_A.register_hook(torch.zeros_like)
    found = audited(model)
    assert found.waiting == 0 and found.idle == ("used.lora_A",)


class AdaptedEmbedding(nn.Module):
    """Of which A begins at zero."""

    def __init__(self, a: float):
        super().__init__()
        self.lora_embedding_A = nn.Parameter(torch.full((2, 5), a))
        self.lora_embedding_B = nn.Parameter(torch.ones(3, 2))

    def forward(self, x):
        return self.lora_embedding_A.t()[:2] @ self.lora_embedding_B.t()


def test_of_an_embedding_b_waits_for_a():
    found = audited(nn.ModuleDict({"used": AdaptedEmbedding(0.0)}))
    assert found.waiting == 6 and found.with_gradient == 10 and not found.idle
    model = nn.ModuleDict({"used": AdaptedEmbedding(0.5)})
    model["used"].lora_embedding_B.register_hook(torch.zeros_like)
    assert audited(model).idle == ("used.lora_embedding_B",)


def test_of_a_head_the_way_down_waits_for_the_way_up():
    head = LayerAhead(2, 3, 4, 1, 2)
    gates = [torch.ones(4, 3)] * 2
    head.forward = lambda x, predicted=head.forward: sum(predicted(layer, x, gates).logsumexp(-1).sum() for layer in range(2))
    found = audited(nn.ModuleDict({"layer_ahead": head}))
    assert found.waiting == head.down.numel() and not found.idle
