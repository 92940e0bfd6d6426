"""What the first step trained, and what it did not."""

import logging
from functools import partial

import pytest
import torch
from torch import nn

import families
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.moe.lookahead.heads import LayerAhead
from chronicals.optimizers import FusedAdamW
from chronicals.training.step.audit import FirstStepAudit


class Adapted(nn.Module):
    """An adapter that is used if its gate is not zero."""

    def __init__(self, b: float, gate: float):
        super().__init__()
        self.lora_A = nn.Parameter(torch.ones(2, 3))
        self.lora_B = nn.Parameter(torch.full((3, 2), b))
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
    head.forward = lambda x, predicted=head.forward: sum(
        predicted(layer, x, gates).logsumexp(-1).sum() for layer in range(2)
    )
    found = audited(nn.ModuleDict({"layer_ahead": head}))
    assert found.waiting == head.down.numel() and not found.idle


class Experts(nn.Module):
    """Of which ``sent`` tell by weight the experts that its gradient reaches."""

    def __init__(self, **sent):
        super().__init__()
        self.sent = sent
        for name in sent:
            self.register_parameter(name, nn.Parameter(torch.ones(4, 3, 2)))

    def forward(self, x):
        return sum(getattr(self, name)[numbers].sum() for name, numbers in self.sent.items())


def test_experts_without_a_gradient_are_counted_by_weight(caplog):
    caplog.set_level(logging.INFO)
    found = audited(nn.ModuleDict({"experts": Experts(gate_up_proj=[0, 3], down_proj=[0, 3])}))
    assert [(each.name, each.numbers, each.count) for each in found.experts] == [
        ("experts.gate_up_proj", (1, 2), 4),
        ("experts.down_proj", (1, 2), 4),
    ]
    assert found.with_gradient == 48 and not found.idle
    found.check()
    assert "no token of it was sent to: experts.gate_up_proj: 2 of 4 (1, 2)" in caplog.text
    assert all(record.levelname == "INFO" for record in caplog.records), (
        "an expert without tokens is no fault"
    )


def test_an_expert_that_half_learns_is_a_warning(caplog):
    found = audited(nn.ModuleDict({"experts": Experts(gate_up_proj=[0, 1, 3], down_proj=[0, 3])}))
    assert [each.partly for each in found.experts] == [(), (1,)]
    found.check()
    assert (
        "experts.down_proj: of experts 1 got no gradient in the first step, though tokens were "
        "sent to them" in caplog.text
    )


def test_a_stack_without_any_gradient_is_idle():
    found = audited(nn.ModuleDict({"experts": Experts(gate_up_proj=[0, 1], down_proj=[])}))
    assert found.idle == ("experts.down_proj",) and [each.name for each in found.experts] == [
        "experts.gate_up_proj"
    ]


def audited_mixture(model, chosen):
    """After a forward and backward pass in which layers send all tokens to these experts."""
    optimizer = FusedAdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    watching = FirstStepAudit(model, optimizer)
    for module in model.modules():
        if hasattr(module, "top_k") and "forward" in dir(module) and hasattr(module, "weight"):
            module.register_forward_hook(partial(_sent_to, chosen))
    ids = torch.randint(3, 61, (1, 9))
    model(input_ids=ids, labels=ids).loss.backward()
    watching.see_gradients()
    optimizer.step()
    return watching.coverage()


def _sent_to(chosen, module, inputs, outputs):
    *others, shares, _ = outputs
    numbers = torch.tensor(chosen).expand(len(shares), -1)
    return *others, torch.full_like(shares, 0.5) + 0 * shares, numbers


@pytest.mark.parametrize("kind", ["whole", "ours", "peft"])
def test_of_adapters_by_the_experts_of_their_matrices(kind):
    """A of an expert waits for its B, and its zeros tell nothing."""
    model = families.mixture("mixtral")
    targets = ["gate_up_proj", "down_proj"]
    if kind == "ours":
        apply_lora(model, LoRAConfig(2, 2, 0.0, ["q_proj"], target_parameters=targets))
    elif kind == "peft":
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(
            r=2, target_modules=[], target_parameters=[f"experts.{name}" for name in targets]
        )
        model = peft.get_peft_model(model, config)
    found = audited_mixture(model, [0, 2])
    assert {each.numbers for each in found.experts} == {(1, 3)} and {
        each.count for each in found.experts
    } == {4}
    assert len(found.experts) == 4 and not any(
        each.partly for each in found.experts
    )  # of two weights of two layers
    ends = {each.name.split(".layers.")[1].partition(".")[2] for each in found.experts}
    assert len(ends) == 2 and all(("lora_B" in end) == (kind != "whole") for end in ends)


def test_an_a_whose_b_is_zero_for_some_experts_is_no_fault(caplog):
    """As after a run in which no token was sent to them."""
    model = apply_lora(
        families.mixture("mixtral"),
        LoRAConfig(2, 2, 0.0, ["q_proj"], target_parameters=["down_proj"]),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts.lora_B" in name:
                parameter.normal_().view(len(parameter), 2, 4)[..., 2] = 0
    found = audited_mixture(model, [0, 2])
    of_a = [each for each in found.experts if "lora_A" in each.name]
    assert [each.numbers for each in of_a] == [(1, 2, 3)] * 2 and not any(
        each.partly for each in found.experts
    )
