"""The native mixture, patched: loss and every gradient as its class's own, in rows and in packs,
with adapters and without.
"""

import copy

import pytest
import torch
from test_patch import loss_and_gradients
from torch import nn

import families
import mixtures
from chronicals import patch_model
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.patching import patch_parts
from chronicals.patching.experts import FUSED_EXPERTS

TOLERANCE = 1e-10
"""Relative to the norm of a gradient, or to a hundredth of the mean norm; in fp64, where norms
are exact, too.
"""


def close(expected, got):
    assert expected.keys() == got.keys()
    mean = torch.stack([x.norm() for x in expected.values()]).mean().item()
    for name, x in expected.items():
        assert (x - got[name]).norm().item() <= TOLERANCE * max(x.norm().item(), 1e-2 * mean), name


def native(seed, adapted):
    model = mixtures.mixture(seed)
    if adapted:
        apply_lora(
            model,
            LoRAConfig(3, 6, 0.0, ["o_proj"], target_parameters=["gate_up_proj", "down_proj"]),
        )
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.3)
    return mixtures.in_fp64(model).train()


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "adapters"])
def test_in_rows(adapted, seed):
    plain = native(seed, adapted)
    patched = copy.deepcopy(plain)
    mixtures.in_fp64(patched)  # a copy's norms are its own
    assert patch_model(patched).counts()[FUSED_EXPERTS] == plain.config.num_hidden_layers
    ids = mixtures.token_ids(2, 3 * mixtures.WINDOW)
    upstream = torch.randn(
        *ids.shape, plain.config.vocab_size
    ).double()  # a loss of the class is in fp32
    found = []
    for model in (plain, patched):
        logits = model(ids).logits * upstream
        gradients = families.gradients(model, logits.sum)
        found.append(
            {"logits": logits.detach()}
            | {name: g for name, g in gradients.items() if g is not None}
        )
    assert any("experts" in name for name in found[0])
    close(*found)


@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "adapters"])
def test_in_packs(adapted, seed):
    """Documents shorter than a window, and longer."""
    model = native(seed, adapted)
    given = families.hand_made_batch(
        [mixtures.token_ids(length) for length in (7, 1, 2 * mixtures.WINDOW + 3, 5)]
    )
    expected = families.states_and_gradients(model, given)
    assert patch_parts(model).counts()[FUSED_EXPERTS] == model.config.num_hidden_layers
    close(expected, families.states_and_gradients(model, given))


@pytest.mark.slow
def test_all_its_parts_are_replaced(seed):
    """Norms among them, which the class computes in fp32 whatever it is in."""
    plain = mixtures.mixture(seed).double().train()
    plain.set_experts_implementation("eager")
    patched = copy.deepcopy(plain)
    report = patch_model(patched)
    assert (
        not report.left
        and {FUSED_EXPERTS, "fused_rmsnorm", "fused_swiglu", "linear_cross_entropy"}
        <= report.counts().keys()
    )
    ids = mixtures.token_ids(2, 3 * mixtures.WINDOW)
    (loss, expected), (other, got) = (
        loss_and_gradients(model, input_ids=ids, labels=ids) for model in (plain, patched)
    )
    torch.testing.assert_close(other.double(), loss.double(), rtol=1e-5, atol=1e-6)
    families.assert_same(expected, got)
