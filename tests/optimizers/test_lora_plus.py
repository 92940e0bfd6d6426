"""LoRA+: the B matrices in a group of their own."""

import pytest
import torch

import tiny
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.optimizers import FusedAdamW, create_lora_plus_optimizer


def adapted():
    return apply_lora(
        tiny.llama(), LoRAConfig(rank=4, dropout=0.0, target_modules=["q_proj", "down_proj"])
    )


def test_groups():
    model = adapted()
    optimizer = create_lora_plus_optimizer(
        model, 1e-4, 8.0, weight_decay=0.02, betas=(0.8, 0.9), eps=1e-6
    )
    assert type(optimizer) is FusedAdamW
    slow, fast = optimizer.param_groups
    of = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {id(p) for p in fast["params"]} == {
        id(p) for name, p in of.items() if name.endswith(".lora_B")
    }
    assert {id(p) for p in slow["params"]} == {
        id(p) for name, p in of.items() if name.endswith(".lora_A")
    }
    assert len(fast["params"]) == len(slow["params"]) == 4
    assert (slow["lr"], fast["lr"]) == (1e-4, 8e-4)
    for group in (slow, fast):
        assert (group["weight_decay"], group["betas"], group["eps"]) == (0.02, (0.8, 0.9), 1e-6)


def test_defaults():
    slow, fast = create_lora_plus_optimizer(adapted(), 1e-4).param_groups
    assert (
        fast["lr"] == pytest.approx(16 * slow["lr"])
        and slow["weight_decay"] == fast["weight_decay"] == 0
    )


def test_b_learns_so_much_faster():
    """Of one and the same gradient the first step of Adam is the learning rate, so B moves 16
    times as far as A.
    """
    model = adapted()
    optimizer = create_lora_plus_optimizer(model, 1e-3)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            expected = 1.6e-2 if name.endswith("lora_B") else 1e-3
            torch.testing.assert_close(
                before[name] - parameter, torch.full_like(parameter, expected), rtol=1e-4, atol=1e-7
            )


def test_peft_names_are_known_too():
    """``lora_B.default.weight`` is a B matrix; a name that merely contains the letters is not."""

    class Peft(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(2, 2, bias=False)})
            self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(2, 2, bias=False)})
            self.my_lora_B_like = torch.nn.Linear(2, 2, bias=False)

    model = Peft()
    slow, fast = create_lora_plus_optimizer(model, 1e-3).param_groups
    assert [id(p) for p in fast["params"]] == [id(model.lora_B["default"].weight)]
    assert len(slow["params"]) == 2


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_without_trainable_b_is_refused(frozen):
    model = adapted().requires_grad_(False) if frozen else tiny.llama()
    with pytest.raises(ValueError, match="no trainable lora_B; call apply_lora first"):
        create_lora_plus_optimizer(model, 1e-4)
